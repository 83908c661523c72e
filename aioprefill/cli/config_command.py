"""`aioprefill config`."""

from __future__ import annotations

import json as jsonlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from aioprefill.cli.settings_flags import NOTE, Flags, command_for_all
from aioprefill.config import COMMANDS
from aioprefill.config_kinds import Auto, Bytes
from aioprefill.config_option import all_options
from aioprefill.config_sources import Effective, find_config_file, resolve_settings, unknown_variables

_EXAMPLES = (
    "Examples:\n\n"
    "`aioprefill config`\n\n"
    "`AIOPREFILL_PAGE_SIZE=32 aioprefill config --json`\n\n"
    "`aioprefill config --kv-memory 4GiB` also checks what flags would do.\n\n" + NOTE
)

Row = tuple[Effective, list[str]]
"""A value and the commands that it holds for."""


@command_for_all()
def config(
    flags: Flags,
    config_file: Path | None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Print all settings: their values, and where each came from."""
    rows = _rows(flags, config_file)
    unknown = unknown_variables(os.environ)
    file = find_config_file(config_file, os.environ)
    if json:
        found = {
            "file": str(file) if file else None,
            "settings": [_as_object(value, commands) for value, commands in rows],
            "unknown_variables": unknown,
        }
        print(jsonlib.dumps(found, indent=1))
    else:
        _print_table(rows)
    for name in unknown:
        print(f"note: no setting has the environment variable {name}", file=sys.stderr)
    # settings that are fine one by one may not fit each other
    for name, kind in COMMANDS.items():
        resolve_settings(name, flags=_flags_of(name, flags), config_file=config_file).build(kind)
    return 0


def _flags_of(command: str, flags: Flags) -> Flags:
    names = {option.name for option in all_options(COMMANDS[command])}
    return {name: flag for name, flag in flags.items() if name in names}


def _rows(flags: Flags, config_file: Path | None) -> list[Row]:
    """One row per value; a setting has several where commands have different values."""
    rows: dict[tuple[str, str, str], Row] = {}
    for command in COMMANDS:
        settings = resolve_settings(command, flags=_flags_of(command, flags), config_file=config_file)
        for name, value in settings.values.items():
            rows.setdefault((name, value.text, value.source), (value, []))[1].append(command)
    return list(rows.values())


def _as_object(value: Effective, commands: list[str]) -> dict[str, Any]:
    kind = value.option.kind
    sized = isinstance(kind.of if isinstance(kind, Auto) else kind, Bytes)
    plain = isinstance(value.value, bool | int | float) and not sized
    return {
        "name": value.option.name,
        "value": value.value if plain else value.text,
        "source": value.source,
        "env": value.option.env,
        "commands": commands,
    }


def _print_table(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "from", "used by", box=None, pad_edge=False)
    for value, commands in rows:
        table.add_row(value.option.name, value.text, value.source, ", ".join(commands))
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no width to fit
    console.print(table)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES)(config)
