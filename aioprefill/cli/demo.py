"""`aioprefill demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from aioprefill.cli.model_progress import fetch_model
from aioprefill.cli.settings_flags import NOTE, command
from aioprefill.config import DemoConfig
from aioprefill.config_sources import Settings

_EXAMPLES = (
    "Examples:\n\n`aioprefill demo`\n\n`aioprefill demo --json` prints one JSON object instead of the table."
    "\n\n" + NOTE
)


@command("demo")
def demo(
    settings: Settings,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Start a prefill process and a decode worker, send eight prompts, and show when what happened."""
    config = settings.build(DemoConfig)
    fetch_model(config.engine)
    from aioprefill.demo import run_demo

    return run_demo(json=json, config=config)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES)(demo)
