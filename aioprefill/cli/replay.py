"""`aioprefill replay`."""

from __future__ import annotations

import asyncio
import json as jsonlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioprefill.cli.settings_flags import command
from aioprefill.errors import ConfigError

if TYPE_CHECKING:
    from aioprefill.record.reader import RecordingReader
    from aioprefill.record.text import Filter

SAME, DIFFERENT = 0, 1

_EXAMPLES = (
    "Examples:\n\n"
    "`aioprefill serve --record incident.rec` records; then, on any machine,\n\n"
    "`aioprefill replay incident.rec` makes the same decisions again, without a model;\n\n"
    "`aioprefill replay incident.rec --text --request r17 --from 12.5 --to 20` shows what became of one."
    "\n\n"
    "Exit codes: 0 the same decisions (or the text was printed), 1 a difference, 2 a file that cannot be "
    "read or replayed. FILE.1 is the part before FILE."
)


@command()
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording made by `serve --record`.")],
    text: Annotated[
        bool, typer.Option("--text", help="Print the schedule as text instead of replaying it.")
    ] = False,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="With --text: only what concerns this request.")
    ] = None,
    from_s: Annotated[
        float | None,
        typer.Option("--from", metavar="SECONDS", help="With --text: only from this time after the start."),
    ] = None,
    to_s: Annotated[
        float | None,
        typer.Option("--to", metavar="SECONDS", help="With --text: only up to this time after the start."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Make recorded decisions again, with no model and no GPU, and show the first difference."""
    from aioprefill.record.reader import RecordingReader
    from aioprefill.record.text import Filter

    if not text and (request, from_s, to_s) != (None, None, None):
        raise ConfigError("--request, --from and --to choose lines of the text: give --text too")
    with RecordingReader(file.expanduser()) as reader:
        if text:
            return _print_text(reader, Filter(request, from_s, to_s), json)
        return _replay(reader, json)


def _facts(reader: RecordingReader) -> dict[str, Any]:
    header = reader.header
    return {
        "software": header.software,
        "segment": header.segment,
        "begins_amid_work": header.amid_work,
        "began_unix_s": header.origin_unix_s,
        "tp": header.tp,
        "model": header.spec.name,
        "pages": header.num_pages,
        "first_call": header.first_call,
        "calls": reader.calls,
        "end": reader.end,
    }


def _print_text(reader: RecordingReader, wanted: Filter, json: bool) -> int:
    from aioprefill.record.text import Schedule

    lines = Schedule(reader.header.origin_s).lines(reader, wanted)
    if json:
        schedule = [line.table() for line in lines]
        print(jsonlib.dumps({**_facts(reader), "schedule": schedule}))
        return SAME
    header = reader.header
    began = datetime.fromtimestamp(header.origin_unix_s, UTC).isoformat(" ", "milliseconds")
    what = f"{header.spec.name}, {header.num_pages} pages, tp {header.tp}"
    print(f"# began {began}; aioprefill {header.software}, {what}")
    if header.amid_work:
        print("# this part begins amid work: forwards launched before are not known")
    for line in lines:
        print(line)
    print(f"# {reader.end}, {reader.calls} calls")
    return SAME


def _replay(reader: RecordingReader, json: bool) -> int:
    from aioprefill.record.replay import Replay

    async def run() -> int:
        replay = Replay(reader.header)
        difference = await replay.run(reader)
        same = difference is None
        if json:
            found = None if difference is None else difference.table()
            facts = _facts(reader) | {"seconds": replay.seconds, "same": same, "difference": found}
            print(jsonlib.dumps(facts))
        elif difference is None:
            print(f"same: {replay.calls} calls, {replay.seconds:.3f} s since the start; {reader.end}")
        else:
            print("\n".join(difference.lines()))
        return SAME if same else DIFFERENT

    return asyncio.run(run())


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES)(replay)
