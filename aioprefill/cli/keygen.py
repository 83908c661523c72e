"""`aioprefill keygen`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aioprefill.cli.settings_flags import command

_EXAMPLES = (
    "Examples:\n\n"
    "`aioprefill keygen keys`, then `--curve-keys keys` with `serve`, `decode` and `generate`.\n\n"
    "Give a client's machine `server.key` and `client.key_secret` only; a server admits the keys that are in "
    "`clients/`."
)


@command()
def keygen(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to make keys in; it must hold none yet.")
    ],
) -> int:
    """Make the CURVE keys that connections off loopback need."""
    from aioprefill.wire.security import write_keys

    for path in write_keys(directory.expanduser()):
        print(path)
    return 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES)(keygen)
