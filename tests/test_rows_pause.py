"""Section P of the behaviours: pause, continue, weights. Fake host and native host, virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.errors import ControlError, HostError, ModelError, RequestAborted
from aioprefill.native.host import NativeHost
from aioprefill.request import PrefillHandle, PrefillRequest
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine
from aioprefill.testing.host import FakeHost
from aioprefill.testing.transfer import FakeTransfer


@asynccontextmanager
async def fake(host: FakeHost) -> AsyncIterator[PrefillScheduler]:
    """A scheduler on the fake host; at the end every request has one outcome."""
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=1.0)) as scheduler:
        await settle()
        yield scheduler
        while host.in_flight and scheduler.health().live:
            host.forwards[host.in_flight[0]].completion.complete()
            await settle()
    assert all(len(outcomes) == 1 for outcomes in host.outcomes.values())


class World:
    """A scheduler on a native host with a peer, everything fake but the host."""

    def __init__(self, chunk_tokens: int = 64, *, write_s: float | None = 0.0) -> None:
        self.engine = FakeEngine(num_pages=64)
        self.transfer = FakeTransfer(write_s=write_s)
        self.host = NativeHost(self.engine, self.transfer, NativeConfig(chunk_tokens=chunk_tokens))
        self.scheduler = PrefillScheduler(self.host, SchedulerConfig(drain_timeout_s=5.0))

    async def __aenter__(self) -> World:
        await self.scheduler.__aenter__()
        await settle()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            await self.run_out()
            self.host.memory.check()
            assert self.host.memory.pool.held == 0 and self.host.ledger.requests == {}
        await self.scheduler.__aexit__(kind, error, trace)

    def submit(self, length: int, name: str, *, peer: str | None = "peer") -> PrefillHandle:
        """A request of its own prefix."""
        tokens = (np.arange(length) * 7 + sum(map(ord, name)) * 131) % 1000
        return self.scheduler.submit(PrefillRequest(tokens, request_id=name, peer=peer))

    async def complete(self, number: int) -> None:
        """The device is done with a forward."""
        self.engine.forwards[number].complete()
        await settle()

    async def run_out(self) -> None:
        """Complete every forward that is pending, and those that follow."""
        while any(not forward.completion.done for forward in self.engine.forwards):
            for forward in self.engine.forwards:
                forward.completion.complete()
            await settle()

    @property
    def launched(self) -> int:
        """Forwards launched so far."""
        return len(self.engine.forwards)

    def ranges(self, name: str) -> list[tuple[int, int]]:
        """KV sends of a request: (first page, pages)."""
        return [(send.first_page, len(send.pages)) for send in self.transfer.sends if send.room == name]


async def now(command: Awaitable[Any]) -> Any:
    """The answer of a command that takes effect without anything else happening."""
    task = asyncio.ensure_future(command)
    await settle()
    assert task.done(), "the command waits for something"
    return task.result()


# P1, P2: order


@virtual_time
async def test_P1_a_pause_is_held_until_the_next_step_with_everything_behind_it_in_order() -> None:
    """Receiving goes on meanwhile."""
    host = FakeHost()
    async with fake(host):
        host.arrive("a")
        await settle()
        host.control("in_place")
        host.arrive("b")
        await settle()
        host.abort("b")
        host.control("resume")
        host.arrive("c")
        await settle()
        assert host.held == ["in_place", "b", "b", "resume", "c"]
        assert host.in_flight == [0]
        host.log.clear()
        host.forwards[0].completion.complete()
        await settle()
        assert host.log[:4] == ["result 0", "in_place", "resume", "ingest 5"]
        assert host.outcomes["b"] == ["aborted"]
        assert [piece.request.name for piece in host.forwards[1].pieces] == ["c"]


@virtual_time
async def test_P1_a_retract_waits_for_one_forward_whose_vote_is_complete_and_takes_its_result() -> None:
    """Held through the step of the first result; every forward has one vote, every result is taken once."""
    host = FakeHost()
    async with fake(host) as scheduler:
        host.arrive("a")
        host.arrive("b")
        await settle()
        assert host.in_flight == [0, 1]
        host.control("retract")
        host.arrive("c")
        host.forwards[0].completion.complete()
        await settle()
        assert host.in_flight == [1] and host.held == ["retract", "c"]
        host.forwards[1].completion.complete()
        await settle()
        assert host.in_flight == [] and host.paused and host.held == []
        assert [entry for entry in host.log if entry.startswith("result")] == ["result 0", "result 1"]
        assert scheduler._pipeline.counters.processed == 2
        assert host.idle_calls == 1
        host.control("resume")
        await settle()
        assert host.in_flight == [2]


@virtual_time
async def test_P2_while_input_is_held_nothing_is_prepared_even_with_a_free_slot() -> None:
    """Work that waits is not launched in front of the pause, and not behind it before the resume."""
    host = FakeHost(slots=1)
    async with fake(host):
        host.arrive("a")
        await settle()
        host.arrive("b")
        host.control("in_place")
        await settle()
        assert host.in_flight == [0]
        host.abort("a")  # would free the slot for b, but waits behind the pause
        await settle()
        assert host.in_flight == [0]
        host.forwards[0].completion.complete()
        await settle()
        assert host.in_flight == [] and host.paused
        host.control("resume")
        await settle()
        assert host.in_flight == [1]


# P3, P4, P5: what a pause does with what runs


@virtual_time
async def test_P3_an_in_place_pause_keeps_results_to_be_processed_after_resume_each_once() -> None:
    """The second forward completes during the pause; its result waits."""
    host = FakeHost()
    async with fake(host):
        host.arrive("a")
        host.arrive("b")
        await settle()
        host.control("in_place")
        host.forwards[0].completion.complete()
        await settle()
        assert host.paused and host.in_flight == [1]
        host.forwards[1].completion.complete()
        await settle()
        assert host.in_flight == [1], "kept"
        host.control("resume")
        await settle()
        assert [entry for entry in host.log if entry.startswith("result")] == ["result 0", "result 1"]


@pytest.mark.parametrize("depth", [1, 2])
def test_P4_a_retract_keeps_a_live_chunked_request_with_its_kv_send_boundary(depth: int) -> None:
    """After resume no KV chunk is sent twice or missed; what had sent nothing is requeued."""

    async def main() -> None:
        async with World() as w:
            long = w.submit(200, "long")
            await settle()
            await w.complete(0)
            other = w.submit(100, "other")
            await settle()
            assert w.ranges("long") == [(0, 4)]
            if depth == 1:
                await w.complete(1)
            pausing = asyncio.ensure_future(w.scheduler.pause("retract"))
            await settle()
            launched = w.launched
            for number in range(launched):
                await w.complete(number)
            answer = await pausing
            assert w.launched == launched, "nothing is launched behind the acknowledgement"
            assert w.scheduler.stats().in_flight == 0
            assert answer["requeued"] in (0, 1)
            await now(w.scheduler.resume())
            await w.run_out()
            await asyncio.gather(long.wait_transferred(), other.wait_transferred())
            for name, pages in (("long", 13), ("other", 7)):
                ends = [first + count for first, count in w.ranges(name)]
                starts = [first for first, _ in w.ranges(name)]
                assert starts == [0, *ends[:-1]] and ends[-1] == pages

    virtual_time(main)()


@virtual_time
async def test_P4_a_retract_requeues_what_has_sent_nothing_and_frees_its_pages() -> None:
    """A chunked prompt without a peer starts again, and finds its beginning in the prefix cache."""
    async with World() as w:
        long = w.submit(400, "long", peer=None)
        await settle()
        await w.complete(0)
        await w.complete(1)
        pausing = asyncio.ensure_future(w.scheduler.pause("retract"))
        await w.complete(2)
        await w.complete(3)
        assert (await pausing) == {"requeued": 1}
        assert w.host.memory.pool.held == 0
        assert w.host.frontend.queued_requests == 1
        await now(w.scheduler.resume())
        await w.run_out()
        assert (await long).cached_tokens == 256


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("mode", ["in_place", "retract", "wait"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_P5_no_request_is_lost_or_counted_twice_by_a_pause(mode: str, depth: int, continuous: bool) -> None:
    """At every queue depth, in both modes of the loop: as many before as after, and all are served."""

    async def main() -> None:
        engine = FakeEngine(num_pages=200, duration_s=1.0)
        host = NativeHost(engine, None, NativeConfig(chunk_tokens=64))
        config = SchedulerConfig(continuous_intake=continuous, drain_timeout_s=5.0)
        async with PrefillScheduler(host, config) as scheduler:
            handles = [
                scheduler.submit(PrefillRequest((np.arange(n) + 40 * n) % 1000))
                for n in [100, 64, 30, 30, 200, 64, 10][: 3 * depth]
            ]
            await asyncio.sleep(0.5 if continuous else 0)
            before = len(host.open_requests())
            assert before == len(handles)
            await scheduler.pause(mode)
            done = sum(handle.done for handle in handles)
            assert len(host.open_requests()) == before - done
            launched = scheduler.stats().launched
            await asyncio.sleep(10)
            assert scheduler.stats().launched == launched
            await scheduler.resume()
            results = await asyncio.gather(*handles)
            assert len({result.request_id for result in results}) == len(handles)
            assert host.ledger.totals.finished == len(handles)
            assert host.ledger.totals.failed == 0

    virtual_time(main)()


# P6: barriers


@virtual_time
async def test_P6_a_barrier_returns_when_every_launched_forward_is_agreed_and_not_before() -> None:
    """The result stays unprocessed until resume; transfers, stats and health go on."""
    async with World(write_s=None) as w:
        first = w.submit(60, "first")
        await settle()
        await w.complete(0)
        second = w.submit(60, "second")
        third = w.submit(60, "third")
        await settle()
        pausing = asyncio.ensure_future(w.scheduler.pause("in_place", barrier=True))
        await w.complete(1)
        assert not pausing.done(), "the pause has taken effect, but a forward still runs"
        assert w.scheduler.stats().paused
        w.transfer.finish_write("first")
        await settle()
        assert first.done, "transfers go on"
        assert w.scheduler.health().live
        await w.complete(2)
        await pausing
        assert w.scheduler.stats().in_flight == 1 and not third.result.done()
        await now(w.scheduler.resume())
        assert (await third).token_id >= 0
        for name in ("second", "third"):
            w.transfer.finish_write(name)
        await second.wait_transferred()


@virtual_time
async def test_P6_concurrent_pauses_and_updates_each_get_their_own_answer() -> None:
    """In the order in which they were asked."""
    async with World() as w:
        w.submit(60, "a")
        await settle()
        order: list[str] = []

        async def ask(name: str, command: Awaitable[Any]) -> None:
            try:
                await command
                order.append(name)
            except ControlError:
                order.append(f"{name} refused")

        asking = [
            asyncio.ensure_future(ask(name, command))
            for name, command in (
                ("pause", w.scheduler.pause("in_place", barrier=True)),
                ("second pause", w.scheduler.pause("retract")),
                ("flush", w.scheduler.flush_cache()),
                ("resume", w.scheduler.resume()),
                ("second resume", w.scheduler.resume()),
                ("weights", w.scheduler.update_weights("3")),
            )
        ]
        await settle()
        assert order == []
        await w.complete(0)
        await asyncio.gather(*asking)
        assert [name for name in order if name != "pause"] == [
            "second pause refused",
            "flush",
            "resume",
            "second resume refused",
            "weights",
        ]
        assert "pause" in order


# P7: weights


@virtual_time
async def test_P7_weights_are_swapped_between_forwards_and_versions_are_visible() -> None:
    """Acknowledged after all forwards ended; a live chunked request reports both versions."""
    async with World() as w:
        w.engine.swaps_by_hand = True
        long = w.submit(100, "long", peer=None)
        await settle()
        queued = w.submit(20, "queued", peer=None)
        updating = asyncio.ensure_future(w.scheduler.update_weights("7"))
        await settle()
        assert w.engine.weights == 0, "two forwards run"
        late = w.submit(20, "late", peer=None)
        await w.complete(0)
        assert w.engine.weights == 0 and w.launched == 2
        await w.complete(1)
        assert w.engine.weights == 7 and not updating.done()
        launched = w.launched
        await settle()
        assert w.launched == launched, "nothing is launched while weights are swapped"
        w.engine.swaps[0].set_result(None)
        await settle()
        assert await updating == {"weight_version": 1}
        await w.run_out()
        assert (await late).weight_versions == (1,)
        assert (await queued).weight_versions in ((0,), (1,))
        assert (await long).weight_versions in ((0,), (0, 1))
        assert w.scheduler.stats().flat()["weight_version"] == 1


@virtual_time
async def test_P7_a_live_chunked_request_reports_both_versions_and_is_not_cached() -> None:
    """Its KV mixes two models; the cache is flushed, and nothing mixed gets in."""
    async with World() as w:
        old = w.submit(64, "old", peer=None)
        await settle()
        await w.complete(0)
        await old
        long = w.submit(300, "long", peer=None)
        await settle()
        updating = asyncio.ensure_future(w.scheduler.update_weights("7"))
        await settle()
        await w.complete(1)
        await w.complete(2)
        await updating
        cache = w.host.memory.cache
        assert cache is not None and cache.pages == 0
        await w.run_out()
        assert (await long).weight_versions == (0, 1)
        assert cache.pages == 0
        fresh = w.submit(64, "fresh", peer=None)
        await settle()
        await w.run_out()
        assert (await fresh).weight_versions == (1,) and cache.pages == 4


@virtual_time
async def test_P7_a_bad_folder_leaves_the_old_weights_serving() -> None:
    """Refused before anything is touched; also when the device fails to swap."""
    async with World() as w:
        with pytest.raises(ModelError, match="holds no weights"):
            await w.scheduler.update_weights(Path("no-such-folder"))
        w.engine.swaps_by_hand = True
        updating = asyncio.ensure_future(w.scheduler.update_weights("9"))
        await settle()
        w.engine.swaps[0].set_exception(RuntimeError("out of memory"))
        with pytest.raises(HostError, match="not swapped: out of memory"):
            await updating
        handle = w.submit(10, "a", peer=None)
        await settle()
        await w.run_out()
        assert (await handle).weight_versions == (0,)


@virtual_time
async def test_P7_weights_can_be_updated_during_an_in_place_pause() -> None:
    """When the kept forward is complete, not before."""
    async with World() as w:
        w.submit(60, "a", peer=None)
        kept = w.submit(60, "b", peer=None)
        await settle()
        pausing = asyncio.ensure_future(w.scheduler.pause("in_place"))
        await w.complete(0)
        await pausing
        updating = asyncio.ensure_future(w.scheduler.update_weights("2"))
        await settle()
        assert not updating.done() and w.engine.weights == 0
        await w.complete(1)
        assert (await now(updating))["weight_version"] == 1
        assert not kept.result.done()
        await now(w.scheduler.resume())
        assert (await kept).weight_versions == (0,)


# P8: modes


@virtual_time
async def test_P8_wait_finishes_what_was_admitted_and_admits_nothing_new() -> None:
    """The chunked prompt runs to its end; the one that waited stays queued; then it is a barrier."""
    async with World() as w:
        long = w.submit(200, "long", peer=None)
        await settle()
        waiting = w.submit(30, "waiting", peer=None)
        pausing = asyncio.ensure_future(w.scheduler.pause("wait"))
        for number in range(4):
            assert not pausing.done()
            await w.complete(number)
        await pausing
        assert long.done and not waiting.done and w.launched == 4
        late = w.submit(30, "late", peer=None)
        await settle()
        assert w.launched == 4
        await now(w.scheduler.resume())
        await w.run_out()
        assert (await waiting).token_id >= 0 and (await late).token_id >= 0


@virtual_time
async def test_P8_wait_on_an_idle_scheduler_returns_at_once_and_resume_can_end_it_early() -> None:
    """A wait that is resumed before it is complete is told so."""
    async with World() as w:
        await now(w.scheduler.pause("wait"))
        await now(w.scheduler.resume())
        w.submit(100, "long", peer=None)
        await settle()
        pausing = asyncio.ensure_future(w.scheduler.pause("wait"))
        await w.complete(0)
        await now(w.scheduler.resume())
        with pytest.raises(ControlError, match="resumed before"):
            await pausing


@virtual_time
async def test_P8_abort_aborts_everything_and_is_a_barrier() -> None:
    """Queued, running and transferring requests; it returns when the device is still."""
    async with World(write_s=None) as w:
        handles = [w.submit(60, "sending")]
        await settle()
        await w.complete(0)
        handles += [w.submit(60, name) for name in ("running", "running too", "queued")]
        await settle()
        pausing = asyncio.ensure_future(w.scheduler.pause("abort"))
        await w.complete(1)
        assert not pausing.done() and all(handle.done for handle in handles[2:])
        await w.complete(2)
        assert (await pausing)["aborted"] >= 2
        outcomes = await asyncio.gather(
            *(handle.wait_transferred() for handle in handles), return_exceptions=True
        )
        assert all(isinstance(outcome, RequestAborted) for outcome in outcomes)
        assert w.launched == 3
        while w.transfer.live_writes:
            w.transfer.finish_write()
        await settle()
        await now(w.scheduler.resume())


@virtual_time
async def test_P8_nothing_is_launched_between_acknowledgement_and_resume() -> None:
    """Whatever comes in, whatever the mode."""
    for mode in ("in_place", "retract", "wait", "abort"):
        async with World() as w:
            await now(w.scheduler.pause(mode))
            handle = w.submit(30, "new", peer=None)
            w.host.memory.flush()
            await settle()
            await asyncio.sleep(60)
            assert w.launched == 0, mode
            await now(w.scheduler.resume())
            assert w.launched == 1
            await w.run_out()
            assert (await handle).token_id >= 0


# Bad commands, abort by prefix, drain


@virtual_time
async def test_commands_that_do_not_fit_are_refused_and_change_nothing() -> None:
    """Unknown mode, pause while paused, resume while running."""
    async with World() as w:
        with pytest.raises(ControlError, match="not paused"):
            await w.scheduler.resume()
        with pytest.raises(ControlError, match="no pause mode 'softly': say one of in_place"):
            await w.scheduler.pause("softly")
        await now(w.scheduler.pause())
        with pytest.raises(ControlError, match="paused already"):
            await w.scheduler.pause("wait")
        await now(w.scheduler.resume())
        assert not w.scheduler.stats().paused


@virtual_time
async def test_A6_abort_by_prefix_and_abort_all_reach_queued_launched_and_transferring_requests() -> None:
    """And nobody else."""
    async with World(write_s=None) as w:
        handles = {name: w.submit(60, name) for name in ("x-sending", "keep-sending")}
        await settle()
        await w.complete(0)
        await w.complete(1)
        for name in ("x-running", "keep-running", "x-queued", "keep-queued"):
            handles[name] = w.submit(60, name)
        await settle()
        assert await now(w.scheduler.abort_matching("x-")) == {"aborted": 3}
        assert {name for name, handle in handles.items() if handle.done} == {
            name for name in handles if name.startswith("x-")
        }
        assert await now(w.scheduler.abort_matching("")) == {"aborted": 3}
        assert await now(w.scheduler.abort_matching("unknown")) == {"aborted": 0}
        await w.run_out()
        while w.transfer.live_writes:
            w.transfer.finish_write()
        await settle()


@virtual_time
async def test_A2_an_abort_behind_a_held_pause_is_applied_before_the_result_is_published() -> None:
    """The result comes first in the step, the held input after it; the abort was there before both."""
    async with World() as w:
        handle = w.submit(60, "a", peer=None)
        await settle()
        pausing = asyncio.ensure_future(w.scheduler.pause())
        await settle()
        handle.abort("in time")
        await w.complete(0)
        with pytest.raises(RequestAborted, match="in time"):
            await handle
        await pausing


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("held", [False, True])
def test_S1_shutdown_processes_launched_forwards_also_with_a_held_pause_in_front(
    depth: int, held: bool
) -> None:
    """Nothing new is launched; the rest is reported by id; the pause is answered."""

    async def main() -> None:
        async with World() as w:
            handles = {f"r{number}": w.submit(60, f"r{number}", peer=None) for number in range(depth)}
            await settle()
            assert w.launched == depth
            pausing = asyncio.ensure_future(w.scheduler.pause("retract")) if held else None
            await settle()
            late = w.submit(60, "late", peer=None)
            draining = asyncio.ensure_future(w.scheduler.drain(10.0))
            await settle()
            if pausing is not None:
                with pytest.raises(ControlError, match="drains"):
                    await pausing
            for number in range(depth):
                await w.complete(number)
            report = await draining
            assert report.finished == tuple(handles) and report.dropped == ("late",)
            assert w.launched == depth
            for handle in handles.values():
                assert (await handle).token_id >= 0
            with pytest.raises(RequestAborted, match="drain"):
                await late

    virtual_time(main)()


@virtual_time
async def test_S1_shutdown_during_a_pause_processes_the_kept_result() -> None:
    """Also on the fake host, in order."""
    host = FakeHost()
    async with fake(host) as scheduler:
        host.arrive("a")
        host.arrive("b")
        await settle()
        host.control("in_place")
        host.forwards[0].completion.complete()
        host.forwards[1].completion.complete()
        await settle()
        assert host.in_flight == [1]
        draining = asyncio.ensure_future(scheduler.drain(1.0))
        await settle()
        assert host.in_flight == []
        for name in ("a", "b"):
            host.end_transfer(name)
        report = await draining
        assert report.finished == ("a", "b")
