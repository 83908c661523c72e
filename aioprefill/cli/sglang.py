"""`aioprefill sglang`."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from aioprefill.cli.settings_flags import NOTE, command
from aioprefill.config import SglangConfig
from aioprefill.config_sources import Settings
from aioprefill.errors import ConfigError
from aioprefill.sglang.contract import SUPPORTED_RELEASES, release_fault
from aioprefill.sglang.plugin import ENTRY_POINT, VARIABLE, Mode, missing_package, mode_of

ALLOW_LIST = "SGLANG_PLUGINS"
"""SGLang's own variable: names of the plugins that it may load; all if it is not set."""

_EXAMPLES = (
    "Examples:\n\n"
    "`aioprefill sglang -- --model-path ./my-llama --disaggregation-mode prefill`\n\n"
    "`aioprefill sglang --require --pause-barrier -- --model-path ./my-llama --disaggregation-mode prefill` "
    "refuses to start where only SGLang's own loop could run.\n\n"
    "Everything behind -- goes to `python -m sglang.launch_server`, in the place of this process.\n\n" + NOTE
)


@command("sglang")
def sglang(
    settings: Settings,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="SGLang's own arguments.")
    ] = None,
    require: Annotated[
        bool,
        typer.Option("--require", help="Refuse to start rather than run SGLang's own prefill loop."),
    ] = False,
) -> int:
    """Start an SGLang server whose prefill scheduler runs aioprefill's loop."""
    settings.build(SglangConfig)
    check_installation()
    given = list(arguments or ())
    if not serves_prefill(given):
        print(
            "note: these arguments have no --disaggregation-mode prefill: a server of another kind has no "
            "prefill loop, and aioprefill does nothing in it",
            file=sys.stderr,
        )
    program = [sys.executable, "-m", "sglang.launch_server", *given]
    os.execve(program[0], program, environment_for(settings, os.environ, require=require))


def check_installation() -> None:
    """Raises `ConfigError` when the SGLang of this environment is missing or cannot be served."""
    try:
        release = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"SGLang is not installed beside aioprefill in {sys.prefix}: install sglang "
            f"{' or '.join(SUPPORTED_RELEASES)} there, or aioprefill into SGLang's own environment "
            '(pip install "aioprefill[sglang]"; docs/sglang.md)'
        ) from None
    fault = release_fault(release) or missing_package()
    if fault is not None:
        raise ConfigError(f"{fault}; start this server without aioprefill: python -m sglang.launch_server")


def serves_prefill(arguments: Sequence[str]) -> bool:
    """SGLang's arguments ask for a prefill server, or name a file that may."""
    pairs = list(zip(arguments, [*arguments[1:], ""], strict=True))
    asked = ("--disaggregation-mode", "prefill") in pairs or "--disaggregation-mode=prefill" in arguments
    return asked or any(word == "--config" or word.startswith("--config=") for word in arguments)


def environment_for(settings: Settings, environment: Mapping[str, str], *, require: bool) -> dict[str, str]:
    """What SGLang's processes get: the mode, and every setting that is not at its default.

    An AIOPREFILL=require that is there already stays. Raises `ConfigError` for one that means nothing.
    """
    mode = Mode.REQUIRE if require or mode_of(environment) is Mode.REQUIRE else Mode.ON
    chosen = {v.option.env: v.text for v in settings.values.values() if v.source != "default"}
    allowed = [name.strip() for name in environment.get(ALLOW_LIST, "").split(",") if name.strip()]
    if allowed and ENTRY_POINT not in allowed:
        chosen[ALLOW_LIST] = ",".join([*allowed, ENTRY_POINT])
    return {**environment, **chosen, VARIABLE: mode.value}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES)(sglang)
