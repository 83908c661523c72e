"""`aioprefill serve`."""

from __future__ import annotations

import os
import sys

import typer

from aioprefill.cli.model_progress import fetch_model
from aioprefill.cli.settings_flags import NOTE, command
from aioprefill.config import ServeConfig
from aioprefill.config_sources import Settings
from aioprefill.ranks.place import place_from_environment

_EXAMPLES = (
    "Examples:\n\n"
    "`aioprefill serve` on loopback, with the embedded model.\n\n"
    "`aioprefill serve --model ./my-llama --dtype bf16 --kv-memory 8GiB --chunk-tokens 2048`\n\n"
    "`aioprefill serve --model ./my-llama --tp 2` divides the model over two processes.\n\n"
    "`aioprefill serve --listen tcp://0.0.0.0:7410 --curve-keys keys` for other machines.\n\n" + NOTE
)


@command("serve")
def serve(settings: Settings) -> int:
    """Run the prefill process: it takes prompts, computes their KV and hands it to decode workers."""
    config = settings.build(ServeConfig)
    place = place_from_environment(os.environ, config.ranks.tp)
    fetch_model(config.engine)
    if config.ranks.tp > 1 and place is None:
        from aioprefill.ranks.supervise import supervise

        return supervise([sys.executable, "-m", "aioprefill", *sys.argv[1:]], config.ranks.tp)
    from aioprefill.native.serve import run_serve

    return run_serve(config, place)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES)(serve)
