"""`aioprefill decode`."""

from __future__ import annotations

import typer

from aioprefill.cli.model_progress import fetch_model
from aioprefill.cli.settings_flags import NOTE, command
from aioprefill.config import DecodeConfig
from aioprefill.config_sources import Settings

_EXAMPLES = (
    "Examples:\n\n"
    "`aioprefill decode` on loopback, with the embedded model.\n\n"
    "`aioprefill decode --model ./my-llama --max-batch-requests 64` with the model that the prefill process "
    "has.\n\n" + NOTE
)


@command("decode")
def decode(settings: Settings) -> int:
    """Run the reference decode worker: it receives KV, decodes on and streams the tokens."""
    config = settings.build(DecodeConfig)
    fetch_model(config.engine)
    from aioprefill.decode.serve import run_decode

    return run_decode(config)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES)(decode)
