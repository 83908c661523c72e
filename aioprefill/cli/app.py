"""All commands together."""

from __future__ import annotations

from typing import Annotated

import typer

import aioprefill
from aioprefill.cli import config_command, ctl, decode, demo, generate, keygen, model, replay, serve, sglang

app = typer.Typer(
    name="aioprefill",
    help="An asyncio prefill scheduler for disaggregated LLM serving.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    epilog=(
        "Examples:\n\n"
        "`aioprefill demo` runs a pair on the embedded model and shows what happens.\n\n"
        "`aioprefill decode`, `aioprefill serve` and `aioprefill generate 'The capital of France is'`, each "
        "in its own terminal, run a pair by hand."
    ),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"aioprefill {aioprefill.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with errors.")] = False,
) -> None:
    pass


for part in (serve, decode, generate, demo, sglang, replay, config_command, keygen):
    part.register(app)
app.add_typer(ctl.app, name="ctl")
app.add_typer(model.app, name="model")


def main() -> None:
    """The entry point. Ends by `SystemExit`: 0 done, 1 failed, 2 wrong usage or setting, 130 interrupted."""
    app(prog_name="aioprefill")
