"""Recordings of busy schedulers, replayed: the same decisions, or the first difference by name."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from record_support import LIMIT, RecordedFuzz, read, recorded, replayed, served

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.errors import RecordingError, RequestTimeout
from aioprefill.follower import Follower
from aioprefill.native.facts import CommandFact, GrammarFact, SwappedFact, TransferFact, decode_facts
from aioprefill.native.forwards import Forwards
from aioprefill.native.host import NativeHost
from aioprefill.native.policy import POLICIES
from aioprefill.record.outcome import plain
from aioprefill.record.recorder import Recorder, header_of
from aioprefill.record.replay import native_config
from aioprefill.record.segment_writer import older
from aioprefill.request import PrefillRequest
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import run_virtual, settle
from aioprefill.testing.engine import FakeEngine
from aioprefill.testing.rank_links import MemoryRanks
from aioprefill.testing.transfer import FakeTransfer
from aioprefill.tp_agree import CallToken

SEEDS = 60


def play(seed: int, path: Path, limit: int = LIMIT) -> RecordedFuzz:
    """Run a random schedule under virtual time and record it."""

    async def main() -> RecordedFuzz:
        fuzz = RecordedFuzz(seed, path, limit)
        await fuzz.run()
        return fuzz

    return run_virtual(main())


def seen_in(calls: list[tuple[CallToken, bytes]]) -> Counter[str]:
    """What kinds of things a recording has."""
    seen: Counter[str] = Counter()
    for token, description in calls:
        seen[token.kind] += 1
        came_to = plain(token.kind, description)
        if token.kind == "ingest":
            seen["retract takes a result"] += came_to["consumed"]
        elif token.kind == "prepare" and came_to:
            seen["chunk"] += any(piece["start"] for piece in came_to)
        for fact in decode_facts(token.facts) if token.facts else []:
            match fact:
                case CommandFact():
                    seen[f"{fact.name} {fact.mode}".strip()] += 1
                case GrammarFact() | SwappedFact():
                    seen[f"{type(fact).__name__} {'well' if fact.error is None else 'error'}"] += 1
                case TransferFact():
                    seen[f"transfer {fact.state.value}"] += 1
                case _:
                    seen[type(fact).__name__] += 1
    return seen


def test_busy_schedules_replay_without_a_difference(tmp_path: Path) -> None:
    """Aborts, pauses, weights, chunks, transfers that fail, timeouts, deadlines, grammars, device errors,
    drains: random schedules have them all, and a host without a model decides alike at every call."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        path = tmp_path / f"{seed}.rec"
        fuzz = play(seed, path)
        header, calls, end = read(path)
        assert end == "closed" and not header.amid_work and header.native["policy"] == fuzz.config.policy
        assert replayed(path) is None, f"seed {seed}"
        seen += seen_in(calls)
        errors = [handle.transferred.exception() for handle in fuzz.handles.values()]
        late = [str(error) for error in errors if isinstance(error, RequestTimeout)]
        seen["timeout"] += sum("timeout" in text for text in late)
        seen["deadline"] += sum("deadline" in text for text in late)
    wanted = (
        *("Pause in_place", "Pause retract", "Pause wait", "Pause abort", "Resume", "UpdateWeights"),
        *("FlushCache", "AbortMatching", "WithdrawnFact", "AbortFact", "StageFact", "SwappedFact well"),
        *("GrammarFact well", "GrammarFact error", "transfer waiting_for_input", "transfer success"),
        *("transfer failed", "OutputsFact", "ArrivalFact", "chunk", "retract takes a result", "timeout"),
        *("deadline", "fail_result", "process_result", "begin_drain", "end_drain", "on_idle"),
    )
    assert [name for name in wanted if not seen[name]] == []


def test_segments_that_begin_at_rest_replay_by_themselves(tmp_path: Path) -> None:
    """A host that was restarted decides as a fresh one with its numbers; the call order goes on."""
    replays = later = 0
    for seed in range(SEEDS):
        path = tmp_path / f"{seed}.rec"
        play(seed, path, limit=12_000)
        found = [read(one) for one in (older(path), path) if one.exists()]
        if len(found) == 2:
            (before, calls, end), (header, _, _) = found
            assert end == "continued" and header.segment == before.segment + 1
            assert header.first_call == before.first_call + len(calls)
        for one, (header, calls, _) in zip((path, older(path))[: len(found)], reversed(found), strict=True):
            if not header.amid_work:
                assert replayed(one) is None, f"seed {seed}, {one}"
                replays += 1
                later += header.segment > 0 and len(calls) > 25
    assert replays > SEEDS // 2 and later > SEEDS // 5, (replays, later)


def test_a_changed_policy_is_the_first_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call, kind and time; the batches of both, by request, tokens and pages."""
    path = tmp_path / "a.rec"

    async def main() -> None:
        async with recorded(path, FakeEngine(duration_s=1.0)) as scheduler:
            await served(scheduler, ("first", [1] * 20))
            await served(scheduler, ("a", list(range(40))), ("b", list(range(100, 150))))

    run_virtual(main())
    assert replayed(path) is None
    monkeypatch.setitem(POLICIES, "fcfs", lambda requests, now, outlook: list(requests)[::-1])
    difference = replayed(path)
    assert difference is not None and difference.kind == "prepare" and difference.time_s == 1.0
    first, before, after = difference.lines()
    assert first == f"first difference: call {difference.number}, prepare, 1.000000 s after the start"
    assert before == "  recorded: a [0, 40) in pages 1-3; b [0, 16) in pages 4-7"
    assert after == "  now:      b [0, 50) in pages 1-4"
    assert difference.table()["recorded"][0] == {"request": "a", "start": 0, "end": 40, "pages": [1, 2, 3]}


def test_fields_that_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an intake only what is not as it was."""
    path = tmp_path / "a.rec"

    async def main() -> None:
        async with recorded(path, FakeEngine(duration_s=1.0)) as scheduler:
            await scheduler.pause("in_place")
            await scheduler.resume()

    run_virtual(main())
    monkeypatch.setattr("aioprefill.native.pause_state.PauseState.paused", False)
    difference = replayed(path)
    assert difference is not None
    assert difference.lines()[1:] == ["  paused: recorded True, now False"]
    assert difference.table()["now"]["paused"] is False


def test_a_call_that_raised_is_recorded_and_raises_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The call that broke the loop is the last one; mended, it is the difference."""
    path = tmp_path / "a.rec"

    async def main() -> None:
        async with recorded(path, FakeEngine(duration_s=1.0)) as scheduler:
            await served(scheduler, ("a", [1, 2, 3]))

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(Forwards, "process", broken)
        with pytest.raises(Exception, match="planted"):
            run_virtual(main())
        _, calls, end = read(path)
        assert end == "closed"
        assert plain("process_result", calls[-1][1]) == {"raised": "ZeroDivisionError: planted"}
        assert replayed(path) is None
    difference = replayed(path)
    assert difference is not None
    assert difference.lines()[1:] == [
        "  recorded: raised ZeroDivisionError: planted",
        "  now:      nothing to tell",
    ]
    assert "planted" in caplog.text


def test_the_leader_of_two_ranks_is_recorded_and_all_are_restarted(tmp_path: Path) -> None:
    """Devices and transfers of both ranks differ in time; the restart is a call that both make."""
    path = tmp_path / "a.rec"
    config = NativeConfig(chunk_tokens=64)

    def host(duration_s: float, write_s: float) -> NativeHost:
        transfer = FakeTransfer(handshake_s=0.1, write_s=write_s)
        return NativeHost(FakeEngine(num_pages=40, duration_s=duration_s), transfer, config)

    async def main() -> tuple[NativeHost, NativeHost]:
        ranks = MemoryRanks(2)
        leader, other = host(0.2, 0.01), host(0.3, 0.05)
        settings = SchedulerConfig()
        recorder = Recorder(path, 40_000, header_of(leader, settings, tp=2))
        following = asyncio.create_task(Follower(other, ranks[1]).run())
        async with PrefillScheduler(leader, settings, ranks=ranks[0], recording=recorder) as scheduler:
            for turn in range(30):
                handles = [
                    scheduler.submit(PrefillRequest(np.arange(90) % (n + 7) + turn, peer="p"))
                    for n in range(3)
                ]
                handles[1].abort()
                await asyncio.gather(*(h.wait_transferred() for h in handles), return_exceptions=True)
                await asyncio.sleep(1.0)
        await following
        return leader, other

    leader, other = run_virtual(main())
    header, calls, _ = read(path)
    assert header.tp == 2 and header.segment > 0 and header.arrivals > 0 and not header.amid_work
    assert calls and replayed(path) is None and replayed(older(path)) is None
    assert read(older(path))[1][-1][0].kind == "restart"
    assert leader.memory.pool._stack.tolist() == other.memory.pool._stack.tolist()


def test_numbers_go_on_over_a_restart(tmp_path: Path) -> None:
    """A fresh host is given the version of the weights and the number of arrivals; the cache is empty."""
    path = tmp_path / "a.rec"

    async def main() -> None:
        engine = FakeEngine(duration_s=0.1)
        async with recorded(path, engine, limit=30_000) as scheduler:
            await scheduler.update_weights("1")
            for turn in range(11):
                await served(scheduler, (f"r{turn}", [turn] * 300))

    run_virtual(main())
    header, calls, _ = read(path)
    assert header.weight_version == 1 and 0 < header.arrivals < 11 and header.segment > 0 and calls
    assert header.origin_s == 0.0 and calls[0][0].now > 0.5
    assert replayed(path) is None


def test_a_segment_that_begins_amid_work_is_not_replayed(tmp_path: Path) -> None:
    """Where the host never rests the recording goes on, and says so."""
    path = tmp_path / "a.rec"

    async def main() -> None:
        async with recorded(path, FakeEngine(), limit=8_000) as scheduler:
            await scheduler.pause("in_place")
            for n in range(30):
                scheduler.submit(PrefillRequest([n] * 60, request_id=f"r{n}"))
                await settle()

    run_virtual(main())
    header, calls, end = read(path)
    assert header.amid_work and header.segment > 1 and calls and end == "closed"
    assert path.stat().st_size + older(path).stat().st_size <= 8_000
    with pytest.raises(RecordingError, match=f"begins amid work, at call {header.first_call}.*--text"):
        replayed(path)


def test_settings_that_are_not_known_are_named(tmp_path: Path) -> None:
    """A recording of other software is refused, not replayed wrongly."""
    path = tmp_path / "a.rec"

    async def main() -> None:
        async with recorded(path, FakeEngine(duration_s=1.0)) as scheduler:
            await served(scheduler, ("a", [1]))

    run_virtual(main())
    header, _, _ = read(path)
    assert native_config(header) == NativeConfig(chunk_tokens=64)
    with pytest.raises(RecordingError, match="settings that are not known here: magic; replay it with"):
        native_config(replace(header, native={**header.native, "magic": 1}))
    with pytest.raises(RecordingError, match="policy must be one of"):
        native_config(replace(header, native={**header.native, "policy": "best"}))
