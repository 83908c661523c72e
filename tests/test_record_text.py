"""Recordings as people read them: the schedule as text, and `aioprefill replay`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from record_support import LIMIT, RecordedFuzz, read, recorded, served
from typer.testing import CliRunner

from aioprefill.cli import app
from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.errors import DeviceError
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.native.host import NativeHost
from aioprefill.native.policy import POLICIES
from aioprefill.record.outcome import ranges
from aioprefill.record.recorder import Recorder, header_of
from aioprefill.record.segment_writer import older
from aioprefill.record.text import Filter, Schedule
from aioprefill.request import PrefillRequest
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import run_virtual, settle
from aioprefill.testing.engine import FakeEngine
from aioprefill.testing.grammars import FakeGrammars
from aioprefill.testing.transfer import FakeTransfer

STORY = """\
    0.500000  ingest               arrival a (100 tokens, for decode); arrival b (20 tokens, no peer, \
priority 1, due in 60 s); arrival c (20 tokens, no peer); arrival g (20 tokens, no peer, regex); dispatched 4
    0.500000  launch               forward 0: b [0, 20), c [0, 20)
    0.510000  progress_transfers   transfer a waiting for input; bootstrapped 1
    0.510000  collect_bootstrapped admissible 1
    0.510000  launch               forward 1: a [0, 64)
    0.600000  ingest               grammar of g failed: does not compile: it is bad; abort c: not wanted
    0.750000  process_result       result of forward 0; b sampled 365; c sampled 633
    0.750000  launch               forward 2: a [64, 100)
    1.000000  process_result       result of forward 1; a computed to 64
    1.250000  process_result       result of forward 2; a sampled 656
    1.270000  progress_transfers   transfer a success, released; retired 1
    1.270000  ingest               weights 0 are read from 1
    1.270000  ingest               command 0: UpdateWeights 0; paused
    1.270000  ingest               weights are swapped; goes on
    1.270000  ingest               command 1: AbortMatching c*: aborted by an operator
    1.270000  ingest               arrival d (20 tokens, no peer); dispatched 1
    1.270000  launch               forward 3: d [0, 20)
    1.370000  fail_result          forward 3 failed, cudaErrorFake: chance (d)
    1.370000  ingest               arrival e (20 tokens, no peer); dispatched 1
    1.370000  launch               forward 4: e [0, 20)
    1.370000  ingest               command 2: Pause retract; held 1
    1.620000  ingest               held 0; paused; result of forward 4; e sampled 479
    1.620000  ingest               command 3: Resume; goes on
    1.620000  begin_drain          the drain begins
    1.620000  end_drain            the drain ends
"""


def tell_story(path: Path) -> None:
    """Record a little of everything."""

    async def main() -> None:
        grammars = FakeGrammars()
        transfer = FakeTransfer(handshake_s=0.01, write_s=0.02)
        engine, settings = FakeEngine(duration_s=0.25), SchedulerConfig()
        host = NativeHost(engine, transfer, NativeConfig(chunk_tokens=64), grammars=grammars)
        recorder = Recorder(path, LIMIT, header_of(host, settings))
        async with PrefillScheduler(host, settings, recording=recorder) as scheduler:
            await asyncio.sleep(0.5)
            a = scheduler.submit(PrefillRequest(list(range(100)), request_id="a", peer="decode"))
            b = scheduler.submit(PrefillRequest([7] * 20, request_id="b", priority=1, deadline_s=60.0))
            c = scheduler.submit(PrefillRequest([8] * 20, request_id="c"))
            bad = GrammarSpec("regex", "bad")
            scheduler.submit(PrefillRequest([8] * 20, request_id="g", grammar=bad))
            await asyncio.sleep(0.1)
            grammars.finish()
            c.abort("not wanted")
            await b
            await a.wait_transferred()
            await scheduler.update_weights("1")
            await scheduler.abort_matching("c")
            d = scheduler.submit(PrefillRequest([9] * 20, request_id="d"))
            await asyncio.sleep(0.1)
            engine.forwards[-1].fail(DeviceError("cudaErrorFake", "chance", sticky=False))
            with pytest.raises(DeviceError):
                await d
            engine._free_at = 0.0
            scheduler.submit(PrefillRequest([11] * 20, request_id="e"))
            await settle()
            await scheduler.pause("retract")
            await scheduler.resume()

    run_virtual(main())


def text(path: Path, wanted: Filter | None = None) -> str:
    """The lines, one under the other."""
    header, calls, _ = read(path)
    return "".join(f"{line}\n" for line in Schedule(header.origin_s).lines(iter(calls), wanted))


def test_a_schedule_reads_as_a_story(tmp_path: Path) -> None:
    """Arrivals, aborts, commands, grammars, transfers, forwards with their ranges, results with tokens."""
    tell_story(tmp_path / "a.rec")
    assert text(tmp_path / "a.rec") == STORY


def test_lines_are_chosen_by_request_and_time(tmp_path: Path) -> None:
    """Only what concerns the request; commands by prefix do; a forward known from before is still known."""
    tell_story(tmp_path / "a.rec")
    assert text(tmp_path / "a.rec", Filter("c", from_s=0.55)) == (
        "    0.600000  ingest               abort c: not wanted\n"
        "    0.750000  process_result       result of forward 0; c sampled 633\n"
        "    1.270000  ingest               command 1: AbortMatching c*: aborted by an operator\n"
    )
    within = text(tmp_path / "a.rec", Filter(from_s=0.6, to_s=1.0)).splitlines()
    assert [line.split()[0] for line in within] == ["0.600000", "0.750000", "0.750000", "1.000000"]
    assert text(tmp_path / "a.rec", Filter("nobody")) == ""


def test_every_random_schedule_can_be_read(tmp_path: Path) -> None:
    """Also the parts that begin amid work."""
    unknown = 0
    for seed in range(20):
        path = tmp_path / f"{seed}.rec"

        async def main(seed: int = seed, path: Path = path) -> None:
            await RecordedFuzz(seed, path, 12_000).run()

        run_virtual(main())
        for one in (path, older(path)):
            if one.exists() and read(one)[1]:
                unknown += "launched before" in text(one)
    assert unknown


def test_page_numbers_are_told_in_ranges() -> None:
    """Short, whatever their order."""
    assert ranges([]) == "none"
    assert ranges([5]) == "5"
    assert ranges([3, 4, 5, 9, 8, 1, 2]) == "3-5, 9, 8, 1-2"


# the command


@pytest.fixture
def replay() -> Callable[..., Result]:
    """Runs `aioprefill replay` in this process."""
    return lambda *arguments: CliRunner().invoke(
        app, ["replay", *map(str, arguments)], env={"COLUMNS": "200"}
    )


def test_the_command_says_whether_decisions_are_the_same(
    tmp_path: Path, replay: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 and one line; 1 and the first difference; the same as JSON."""
    path = tmp_path / "a.rec"
    tell_story(path)
    calls = len(read(path)[1])
    result = replay(path)
    assert (result.exit_code, result.output) == (0, f"same: {calls} calls, 1.620 s since the start; closed\n")
    result = replay(path, "--json")
    found = json.loads(result.output)
    assert result.exit_code == 0 and found["same"] and found["difference"] is None
    assert (found["calls"], found["end"], found["segment"], found["tp"]) == (calls, "closed", 0, 1)
    monkeypatch.setitem(POLICIES, "fcfs", lambda requests, now, outlook: list(requests)[::-1])
    result = replay(path)
    assert result.exit_code == 1
    assert result.output.splitlines()[1:] == [
        "  recorded: b [0, 20) in pages 0-1; c [0, 20) in pages 2-3",
        "  now:      c [0, 20) in pages 0-1; b [0, 20) in pages 2-3",
    ]
    result = replay(path, "--json")
    found = json.loads(result.output)
    assert result.exit_code == 1 and not found["same"] and found["difference"]["kind"] == "prepare"
    assert found["difference"]["now"][0] == {"request": "c", "start": 0, "end": 20, "pages": [0, 1]}


def test_the_command_prints_the_schedule(tmp_path: Path, replay: Callable[..., Result]) -> None:
    """As text with a line before and after it, or as JSON."""
    path = tmp_path / "a.rec"
    tell_story(path)
    calls = len(read(path)[1])
    lines = replay(path, "--text").output.splitlines()
    assert lines[0].startswith("# began 20") and lines[0].endswith(", fake, 1024 pages, tp 1")
    assert lines[1:-1] == STORY.splitlines() and lines[-1] == f"# closed, {calls} calls"
    found = json.loads(replay(path, "--text", "--json", "--request", "d", "--to", "1.3").output)
    assert [line["did"] for line in found["schedule"]] == [
        ["arrival d (20 tokens, no peer)"],
        ["forward 3: d [0, 20)"],
    ]
    assert found["schedule"][1]["time_s"] == pytest.approx(1.27) and found["calls"] == calls


def test_the_command_refuses_what_it_cannot_replay(tmp_path: Path, replay: Callable[..., Result]) -> None:
    """2 and one line that says why; a part that begins amid work can be printed."""
    path = tmp_path / "a.rec"

    async def main() -> None:
        async with recorded(path, FakeEngine(), limit=8_000) as scheduler:
            await scheduler.pause("in_place")
            for n in range(30):
                scheduler.submit(PrefillRequest([n] * 60, request_id=f"r{n}"))
                await settle()

    run_virtual(main())
    result = replay(path)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the recording begins amid work") and result.stdout == ""
    result = replay(path, "--text")
    assert result.exit_code == 0 and "# this part begins amid work" in result.output
    assert "arrival r29" in result.output
    result = replay(path, "--request", "a")
    assert result.exit_code == 2 and "give --text too" in result.stderr
    (tmp_path / "no").write_text("no")
    result = replay(tmp_path / "no")
    assert (result.exit_code, result.stderr) == (
        2,
        f"error: {tmp_path / 'no'} is no recording of aioprefill\n",
    )


def test_damage_behind_a_difference_does_not_hide_it(
    tmp_path: Path, replay: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay ends at the first difference; without one, damage is an error at the end."""
    path = tmp_path / "a.rec"

    async def main() -> None:
        async with recorded(path, FakeEngine(duration_s=1.0)) as scheduler:
            await served(scheduler, ("a", [1] * 20), ("b", [2] * 20))

    run_virtual(main())
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert replay(path).exit_code == 2
    monkeypatch.setitem(POLICIES, "fcfs", lambda requests, now, outlook: list(requests)[::-1])
    assert replay(path).exit_code == 1
