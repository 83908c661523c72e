"""Turns a command's settings into flags, so that flags, environment and file have one declaration.

A command is written as `def serve(settings: Settings, ...) -> int`; `command` gives typer a function with a
flag per setting instead of `settings`. All flags take text: the settings' own kinds read it, so that an
error says the same whatever the source.
"""

from __future__ import annotations

import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from aioprefill.config import COMMANDS
from aioprefill.config_kinds import Switch
from aioprefill.config_option import Checked, Option, groups, own_options
from aioprefill.config_sources import CONFIG_ENV, resolve_settings
from aioprefill.errors import AioprefillError, ConfigError, InvalidRequest, RecordingError

logger = logging.getLogger("aioprefill")

USAGE_ERRORS = (ConfigError, InvalidRequest, RecordingError)

NOTE = (
    "Every option is also an environment variable (--page-size is AIOPREFILL_PAGE_SIZE) and a key of a TOML "
    f"file: --config FILE, else ${CONFIG_ENV}, else $XDG_CONFIG_HOME/aioprefill/config.toml. Flags win over "
    "the environment, that over the file. `aioprefill config` shows what holds."
)

Flags = dict[str, tuple[str, Any]]
"""Option name -> (flag, raw value) of the flags that were given."""

Declared = Sequence[tuple[Option, str]]
"""Options, each with the title it stands under in the help."""


def command(name: str | None = None) -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Decorator: give a command the flags of `COMMANDS[name]`, error reports and exit codes."""

    def decorate(function: Callable[..., int]) -> Callable[..., None]:
        declared = list(_panelled(COMMANDS[name])) if name is not None else []

        def run(settings: Flags, path: Path | None, own: dict[str, Any]) -> int:
            if name is None:
                return function(**own)
            resolved = resolve_settings(name, flags=settings, config_file=path)
            if "log-level" in resolved.values:
                # long-running processes set up their logging themselves; this is for error reports
                logger.setLevel(str(resolved.values["log-level"].value).upper())
            return function(settings=resolved, **own)

        return _as_typer_function(function, declared, run)

    return decorate


def command_for_all() -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Decorator for a command that takes the flags of all commands, as `flags` and `config_file`."""

    def decorate(function: Callable[..., int]) -> Callable[..., None]:
        declared: dict[str, tuple[Option, str]] = {}
        for config in COMMANDS.values():
            for option, panel in _panelled(config):
                # without further flags: "--listen" means one thing to serve and another to decode
                declared.setdefault(option.name, (replace(option, flags=()), panel))

        def run(settings: Flags, path: Path | None, own: dict[str, Any]) -> int:
            return function(flags=settings, config_file=path, **own)

        return _as_typer_function(function, list(declared.values()), run)

    return decorate


def _as_typer_function(
    function: Callable[..., int],
    declared: Declared,
    run: Callable[[Flags, Path | None, dict[str, Any]], int],
) -> Callable[..., None]:
    """A function with the signature that typer shall see."""
    fields = {option.name.replace("-", "_"): option for option, _ in declared}

    def typed(**given: Any) -> None:
        context: typer.Context = given.pop("context")
        path: Path | None = given.pop("config", None)
        flags = {
            option.name: (_flags(option)[0], given.pop(field))
            for field, option in fields.items()
            if given[field] is not None
        }
        debug = bool(context.find_root().params.get("debug"))
        own = {key: value for key, value in given.items() if key not in fields}
        raise typer.Exit(_guarded(lambda: run(flags, path, own), debug=debug))

    signature = inspect.signature(function, eval_str=True)
    given = [p for p in signature.parameters.values() if p.name not in ("settings", "flags", "config_file")]
    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in given]
    if declared:
        parameters.append(_config_parameter())
    parameters += [_parameter(option, panel) for option, panel in declared]
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    typed.__name__, typed.__doc__ = function.__name__, function.__doc__
    return typed


def _panelled(config: type[Checked]) -> Iterator[tuple[Option, str]]:
    for _, option in own_options(config):
        yield option, config.panel
    for _, group in groups(config):
        yield from _panelled(group)


def _flags(option: Option) -> list[str]:
    """Flags of an option, the shortest to say first."""
    return [*option.flags, f"--{option.name}"]


def _parameter(option: Option, panel: str) -> inspect.Parameter:
    field = option.name.replace("-", "_")
    text = f"{option.help} Default: {option.kind.show(option.default)}."
    if isinstance(option.kind, Switch):
        names = [f"{flag}/--no-{flag[2:]}" for flag in _flags(option)]
        annotation: Any = Annotated[bool | None, typer.Option(*names, help=text, rich_help_panel=panel)]
    else:
        shown = typer.Option(
            *_flags(option), help=text, metavar=option.kind.metavar, rich_help_panel=panel, show_default=False
        )
        annotation = Annotated[str | None, shown]
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _config_parameter() -> inspect.Parameter:
    shown = typer.Option("--config", metavar="FILE", help="Settings file (TOML).", show_default=False)
    annotation = Annotated[Path | None, shown]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _guarded(call: Callable[[], int], *, debug: bool) -> int:
    """Exit code of a command; errors raised on purpose become one line."""
    try:
        return call()
    except AioprefillError as err:
        if debug or logger.isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print(f"error: {' '.join(str(err).split())}", file=sys.stderr)
        return 2 if isinstance(err, USAGE_ERRORS) else 1
