"""The native host under the loop, on a fake device and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.errors import DeviceError, HostError, InvalidRequest, PeerError, QueueFull, RequestAborted
from aioprefill.native.host import NativeHost
from aioprefill.request import PrefillRequest
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine


@asynccontextmanager
async def serving(
    engine: FakeEngine, config: NativeConfig | None = None
) -> AsyncIterator[tuple[PrefillScheduler, NativeHost]]:
    """A scheduler on a native host without transfers; at the end nothing is in use."""
    host = NativeHost(engine, None, config or NativeConfig(chunk_tokens=64))
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=5.0)) as scheduler:
        await settle()
        yield scheduler, host
        for forward in engine.forwards:
            forward.completion.complete()
        await settle()
        host.memory.check()
        assert host.memory.pool.held == 0
        assert host.ledger.requests == {} and host.frontend.queued_requests == 0
        assert host.frontend.queued_tokens == 0
    assert engine.closed


def prompt(length: int, start: int = 0) -> np.ndarray:
    """Token ids that differ from those of another `start`."""
    return (np.arange(length) * 7 + start * 131) % 1000


@virtual_time
async def test_a_request_gets_its_first_token_and_its_times() -> None:
    """Arrival, launch and first token on the loop's clock; without a peer the hand-off is done at once."""
    async with serving(FakeEngine(duration_s=2.0)) as (scheduler, _):
        await asyncio.sleep(1.0)
        handle = scheduler.submit(PrefillRequest(prompt(40), request_id="a"))
        result = await handle
        assert (result.arrival_s, result.launched_s, result.first_token_s) == (1.0, 1.0, 3.0)
        assert result.prompt_tokens == 40 and result.cached_tokens == 0
        assert (await handle.wait_transferred()).kv_bytes == 0
        assert handle.done
        stats = scheduler.stats()
        assert stats.flat()["finished"] == 1 and "finished=1" in repr(stats)


@virtual_time
async def test_a_long_prompt_runs_in_chunks_and_short_ones_share_its_forwards() -> None:
    """Chunks end on pages; the remaining budget goes to who waits."""
    engine = FakeEngine(duration_s=1.0)
    async with serving(engine) as (scheduler, _):
        long = scheduler.submit(PrefillRequest(prompt(150)))
        short = scheduler.submit(PrefillRequest(prompt(20, 1)))
        await asyncio.gather(long, short)
        spans = [[(span.start, span.end) for span in forward.spans] for forward in engine.forwards]
        assert spans == [[(0, 64)], [(64, 128)], [(128, 150), (0, 20)]]
        assert [span.sample is None for span in engine.forwards[0].spans] == [True]


@virtual_time
async def test_prefixes_are_reused_and_reported() -> None:
    """The second request computes what differs only."""
    engine = FakeEngine(duration_s=1.0)
    async with serving(engine) as (scheduler, host):
        await scheduler.submit(PrefillRequest(prompt(60)))
        result = await scheduler.submit(PrefillRequest(np.concatenate([prompt(60), prompt(9, 5)])))
        assert result.cached_tokens == 48
        assert engine.forwards[-1].spans[0].start == 48
        assert host.memory.pool.idle == 4


@virtual_time
async def test_a_full_pool_makes_requests_wait_and_evicts_the_prefix_cache() -> None:
    """Ten pages, prompts of six: one at a time, all served."""
    engine = FakeEngine(num_pages=10, duration_s=1.0)
    async with serving(engine, NativeConfig(chunk_tokens=96)) as (scheduler, host):
        handles = [scheduler.submit(PrefillRequest(prompt(96, start))) for start in range(5)]
        results = await asyncio.gather(*handles)
        assert [result.first_token_s for result in results] == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert host.memory.pool.available == 10


@virtual_time
async def test_bad_requests_are_refused_and_hurt_nobody() -> None:
    """Empty, too long for the pool, a live id, no transfer; the good one is served."""
    async with serving(FakeEngine(num_pages=4, duration_s=1.0)) as (scheduler, _):
        good = scheduler.submit(PrefillRequest(prompt(10), request_id="x"))
        for request, field in (
            (PrefillRequest([]), "prompt"),
            (PrefillRequest(prompt(65)), "prompt"),
            (PrefillRequest(prompt(5), request_id="x"), "request_id"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                scheduler.submit(request)
            assert caught.value.field == field
        with pytest.raises(PeerError, match="no KV transfer"):
            await scheduler.submit(PrefillRequest(prompt(5), peer="tcp://127.0.0.1:1"))
        assert (await good).token_id >= 0


@virtual_time
async def test_H4_the_queue_is_bounded_and_says_when_to_try_again() -> None:
    """By requests and by tokens; a single request above the token limit is still taken alone."""
    engine = FakeEngine()
    config = NativeConfig(chunk_tokens=64, max_queue_requests=2, max_queue_tokens=100)
    async with serving(engine, config) as (scheduler, host):
        big = scheduler.submit(PrefillRequest(prompt(200)))
        with pytest.raises(QueueFull, match="tokens") as caught:
            scheduler.submit(PrefillRequest(prompt(1)))
        assert 0.1 <= caught.value.retry_after_s <= 60
        await settle()
        assert host.frontend.queued_requests == 0, "launched, so not queued any more"
        more = [scheduler.submit(PrefillRequest(prompt(3, start))) for start in (1, 2)]
        with pytest.raises(QueueFull, match="requests"):
            scheduler.submit(PrefillRequest(prompt(3, 3)))
        for handle in (big, *more):
            handle.abort()


@pytest.mark.parametrize("state", ["queued", "waiting", "first chunk", "middle chunk", "between", "final"])
def test_A1_abort_in_each_state_gives_one_outcome_and_no_leak(state: str) -> None:
    """The outcome is the abort's reason; pages go back when the last forward that touches them is done."""

    async def main() -> None:
        engine = FakeEngine()
        async with serving(engine) as (scheduler, host):
            blockers = (
                [scheduler.submit(PrefillRequest(prompt(64, i))) for i in (8, 9)]
                if state == "waiting"
                else []
            )
            await settle()
            victim = scheduler.submit(PrefillRequest(prompt(150), request_id="victim"))
            if state != "queued":
                await settle()
            if state in ("middle chunk", "final"):
                engine.forwards[0].complete()
                await settle()
            if state == "final":
                engine.forwards[1].complete()
                await settle()
            if state == "between":  # both slots taken, nothing of the victim may be launched next
                other = scheduler.submit(PrefillRequest(prompt(64, 3)))
                await settle()
                blockers.append(other)
            launched = len(engine.forwards)
            victim.abort("changed my mind")
            victim.abort("twice")
            scheduler.abort("unknown id")
            await settle()
            with pytest.raises(RequestAborted, match="changed my mind"):
                await victim
            with pytest.raises(RequestAborted):
                await victim.wait_transferred()
            touching = sum(
                not forward.completion.done
                for forward in engine.forwards
                if any(span.end > 64 or forward.number < 2 for span in forward.spans)
            )
            if state in ("first chunk", "middle chunk", "final"):
                assert touching and host.memory.pool.held == 10, "a forward still writes to its pages"
            while host.forwards.pending:
                host.forwards.pending[0].completion.complete()  # type: ignore[attr-defined]
                await settle()
            assert host.memory.pool.held == 0
            for blocker in blockers:
                assert (await blocker).token_id >= 0
            assert len(engine.forwards) <= launched + len(blockers)
            scheduler.submit(PrefillRequest(prompt(3), request_id="victim")).abort("the id is free again")

    virtual_time(main)()


@virtual_time
async def test_A1_abort_after_the_end_changes_nothing() -> None:
    """A finished request keeps its result."""
    async with serving(FakeEngine(duration_s=1.0)) as (scheduler, _):
        handle = scheduler.submit(PrefillRequest(prompt(9), request_id="a"))
        result = await handle
        handle.abort()
        scheduler.abort("a")
        await settle()
        assert await handle == result


@virtual_time
async def test_A2_an_abort_that_waits_in_the_inbox_is_applied_before_the_result_is_published() -> None:
    """Abort and result become ready in the same turn of the loop."""
    engine = FakeEngine()
    async with serving(engine) as (scheduler, _):
        handle = scheduler.submit(PrefillRequest(prompt(9)))
        await settle()
        engine.forwards[0].complete()
        handle.abort("just in time")
        with pytest.raises(RequestAborted, match="just in time"):
            await handle


@virtual_time
async def test_cancelling_the_wait_aborts_the_request() -> None:
    """As when a caller's own task is cancelled."""
    engine = FakeEngine()
    async with serving(engine) as (scheduler, host):
        handle = scheduler.submit(PrefillRequest(prompt(9)))
        waiter = asyncio.ensure_future(handle._wait_result())
        await settle()
        waiter.cancel()
        await settle()
        with pytest.raises(RequestAborted, match="stopped waiting"):
            await handle
        assert host.ledger.totals.failed == 1


@virtual_time
async def test_S3_a_device_error_fails_the_requests_of_its_forward_alone() -> None:
    """By the error's own name; nothing of the failed forward gets into the prefix cache."""
    engine = FakeEngine()
    async with serving(engine) as (scheduler, host):
        bad = scheduler.submit(PrefillRequest(prompt(64)))
        good = scheduler.submit(PrefillRequest(prompt(64, 1)))
        await settle()
        engine.forwards[0].fail(DeviceError("cudaErrorMemoryAllocation", "out of memory", sticky=False))
        engine.forwards[1].complete()
        with pytest.raises(DeviceError, match="cudaErrorMemoryAllocation"):
            await bad
        assert (await good).token_id >= 0
        assert host.memory.cache is not None and host.memory.cache.pages == 4


@virtual_time
async def test_S4_a_request_whose_result_cannot_be_taken_fails_alone() -> None:
    """The other one of the same forward gets its token."""
    engine = FakeEngine()
    async with serving(engine) as (scheduler, host):
        bad = scheduler.submit(PrefillRequest(prompt(9), request_id="bad"))
        good = scheduler.submit(PrefillRequest(prompt(9, 1)))
        await settle()
        keep = host.memory.keep_prefix

        def broken(request: object) -> None:
            if getattr(request, "request_id", "") == "bad":
                raise ZeroDivisionError("for this one")
            keep(request)  # type: ignore[arg-type]

        host.memory.keep_prefix = broken  # type: ignore[method-assign,assignment]
        engine.forwards[0].complete()
        with pytest.raises(HostError, match="bad: ZeroDivisionError"):
            await bad
        assert (await good).token_id >= 0


@virtual_time
async def test_a_drain_finishes_what_is_launched_and_names_what_it_drops() -> None:
    """Final chunks are processed, middle ones end, queued ones are dropped; nothing new is launched."""
    engine = FakeEngine(duration_s=1.0)
    async with serving(engine) as (scheduler, _):
        done = scheduler.submit(PrefillRequest(prompt(64), request_id="done"))
        long = scheduler.submit(PrefillRequest(prompt(150), request_id="long"))
        waiting = scheduler.submit(PrefillRequest(prompt(9), request_id="waiting"))
        await settle()
        coming = scheduler.submit(PrefillRequest(prompt(9), request_id="coming"))
        report = await scheduler.drain(10.0)
        assert report.finished == ("done",)
        assert report.dropped == ("long", "waiting", "coming")
        assert (await done).token_id >= 0
        for dropped in (long, waiting, coming):
            with pytest.raises(RequestAborted, match="drain"):
                await dropped
        with pytest.raises(HostError, match="drains"):
            scheduler.submit(PrefillRequest([1]))
        assert len(engine.forwards) == 2
        assert not scheduler.health().ready


@virtual_time
async def test_a_drain_gives_up_at_its_deadline() -> None:
    """A forward that does not end: its request is dropped, and reported."""
    engine = FakeEngine()
    async with serving(engine) as (scheduler, _):
        handle = scheduler.submit(PrefillRequest(prompt(9), request_id="stuck"))
        await settle()
        report = await scheduler.drain(3.0)
        assert report.dropped == ("stuck",) and report.finished == ()
        with pytest.raises(RequestAborted, match="end of the drain"):
            await handle


@virtual_time
async def test_leaving_the_block_answers_everything() -> None:
    """Also what was never ingested."""
    engine = FakeEngine(duration_s=1.0)
    host = NativeHost(engine, None, NativeConfig(chunk_tokens=64))
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=5.0)) as scheduler:
        first = scheduler.submit(PrefillRequest(prompt(9)))
        await settle()
        second = scheduler.submit(PrefillRequest(prompt(9, 1)))
    assert (await first).token_id >= 0
    with pytest.raises(RequestAborted):
        await second
    with pytest.raises(HostError):
        scheduler.submit(PrefillRequest([1]))
