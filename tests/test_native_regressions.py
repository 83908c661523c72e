"""Faults that were found by reading the code: each as small as it can be shown."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.errors import RequestTimeout
from aioprefill.native.host import NativeHost
from aioprefill.native.memory import KVMemory
from aioprefill.native.request_state import Request
from aioprefill.request import PrefillRequest
from aioprefill.sampling_params import SamplingParams
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine
from aioprefill.testing.transfer import FakeTransfer


def prompt(length: int, start: int = 0) -> np.ndarray:
    """Token ids that differ from those of another `start`."""
    return (np.arange(length) * 7 + start * 131) % 1000


def request(tokens: np.ndarray, name: str) -> Request:
    """A request with nothing behind it."""
    return Request(
        request_id=name,
        tokens=tokens.astype(np.uint32),
        sampling=SamplingParams(),
        peer=None,
        max_new_tokens=1,
        ignore_eos=False,
        handle=None,
        arrival=0,
    )


def test_a_flush_under_a_running_prompt_keeps_the_tree_evictable() -> None:
    """A prompt holds the tree's pages above its own, also those that came after it had seen its own there."""
    memory = KVMemory(8, 16, prefix_cache=True)
    tokens = prompt(64)
    a, b = request(tokens, "a"), request(tokens, "b")
    assert memory.admit(a) and memory.admit(b)
    a.computed = 32
    memory.keep_prefix(a)
    memory.flush()
    b.computed = 32
    memory.keep_prefix(b)  # the tree's first two pages are b's
    a.computed = 64
    memory.keep_prefix(a)  # and a's lie below them, which a does not hold
    memory.release(b)
    memory.check()


@virtual_time
async def test_A6_a_cancelled_abort_of_many_leaves_the_requests_abortable() -> None:
    """An abort is marked when it comes; it follows even if nobody waits for its answer."""
    engine = FakeEngine(num_pages=8)
    host = NativeHost(engine, None, NativeConfig(chunk_tokens=64))
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=1.0)) as scheduler:
        first = scheduler.submit(PrefillRequest(prompt(128), request_id="first"))  # takes the whole pool
        waiting = scheduler.submit(PrefillRequest(prompt(128, 1), request_id="waiting"))
        await settle()
        asking = asyncio.ensure_future(scheduler.abort_matching("waiting"))
        await asyncio.sleep(0)  # queued, not dispatched
        asking.cancel()
        await settle()
        scheduler.abort("waiting")
        await settle()
        assert waiting.done
        for _ in range(3):
            for forward in engine.forwards:
                forward.complete()
            await settle()
        assert first.done


@virtual_time
async def test_T2_a_retract_pause_leaves_the_handshake_timeout_of_an_early_prompt() -> None:
    """Back in its handshake, it is timed by its handshake."""
    engine, transfer = FakeEngine(), FakeTransfer(handshake_s=None)
    host = NativeHost(
        engine,
        transfer,
        NativeConfig(chunk_tokens=64, optimistic=True, optimistic_attempts=1, handshake_timeout_s=10.0),
    )
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=1.0)) as scheduler:
        early = scheduler.submit(PrefillRequest(prompt(640), request_id="early", peer="peer"))
        await settle()
        pausing = asyncio.ensure_future(scheduler.pause("retract"))
        await settle()
        for _ in range(3):
            for forward in engine.forwards:
                forward.complete()
            await settle()
        assert (await pausing)["requeued"] == 1
        await scheduler.resume()
        await asyncio.sleep(60.0)
        assert early.done and isinstance(early.result.exception(), RequestTimeout)


@virtual_time
async def test_the_looks_into_the_prefix_cache_do_not_pile_up() -> None:
    """Requests that are done are not remembered."""
    engine = FakeEngine(duration_s=0.01)
    engine.keep_forwards = False
    host = NativeHost(engine, None, NativeConfig(chunk_tokens=1024))
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=1.0)) as scheduler:
        for turn in range(30):
            handles = [scheduler.submit(PrefillRequest(prompt(8, turn + n))) for n in range(512)]
            await asyncio.gather(*handles)
        assert not host.ledger.requests
        assert len(host.admission._looked_up) <= 512


@virtual_time
async def test_an_error_while_closing_does_not_leave_waiters_hanging() -> None:
    """The error is raised, and who waits for the end learns of it."""
    engine = FakeEngine()

    async def aclose() -> None:
        raise RuntimeError("the engine cannot be closed")

    engine.aclose = aclose  # type: ignore[method-assign]
    host = NativeHost(engine, None, NativeConfig(chunk_tokens=64))
    scheduler = PrefillScheduler(host, SchedulerConfig(drain_timeout_s=1.0))
    with pytest.raises(RuntimeError, match="cannot be closed"):
        async with scheduler:
            stopped = asyncio.ensure_future(scheduler.wait_stopped())
            await settle()
    await settle()
    assert stopped.done()


@virtual_time
async def test_a_chunk_smaller_than_a_page_serves_or_is_refused() -> None:
    """A page is the least that can be cut."""
    engine = FakeEngine(duration_s=0.01)
    host = NativeHost(engine, None, NativeConfig(chunk_tokens=8))
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=1.0)) as scheduler:
        handle = scheduler.submit(PrefillRequest(prompt(40)))
        async with asyncio.timeout(60):
            await handle


@virtual_time
async def test_a_flush_under_running_prompts_does_not_stop_the_scheduler() -> None:
    """After the flush another prompt's pages stand where a has seen its own, and a's next lie below them."""
    engine, transfer = FakeEngine(num_pages=18), FakeTransfer(handshake_s=None)
    config = NativeConfig(chunk_tokens=64, optimistic=True, max_batch_requests=1)
    host = NativeHost(engine, transfer, config)
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=1.0)) as scheduler:

        def submit(name, length, start, peer=None):
            return scheduler.submit(PrefillRequest(prompt(length, start), request_id=name, peer=peer))

        async def complete(number):
            engine.forwards[number].complete()
            await settle()

        submit("a", 160, 0, "peer")  # early: whoever is ready goes first
        submit("c", 64, 1)
        await settle()  # forwards: c, a[0:64]
        submit("d", 64, 2)
        await settle()
        await complete(0)  # d is launched
        submit("b", 64, 0)
        commands = [
            asyncio.ensure_future(c) for c in (scheduler.pause(), scheduler.flush_cache(), scheduler.resume())
        ]
        await settle()
        await complete(1)  # a's first pages are cached, and forgotten; b is launched, which finds nothing
        await asyncio.gather(*commands)
        for number in range(2, 7):
            if number < len(engine.forwards):
                await complete(number)
        submit("e", 16 * host.memory.pool.available, 3)
        await settle()
        for forward in engine.forwards[5:]:
            forward.complete()
        await settle()
        host.memory.check()
        assert scheduler.health().live, scheduler.health()


@virtual_time
async def test_A6_S1_an_abort_of_many_that_a_drain_refuses_leaves_the_requests_abortable() -> None:
    """It is carried out as the drain begins."""
    engine, transfer = FakeEngine(duration_s=0.1), FakeTransfer(handshake_s=None)
    host = NativeHost(engine, transfer, NativeConfig(chunk_tokens=64, optimistic=True))
    async with PrefillScheduler(host) as scheduler:
        parked = scheduler.submit(PrefillRequest(prompt(64), request_id="a", peer="peer"))
        await asyncio.sleep(1)  # prefilled, waits for its peer
        asking = asyncio.ensure_future(scheduler.abort_matching("a"))
        draining = asyncio.ensure_future(scheduler.drain(20.0))
        await settle()
        asking.cancel()
        scheduler.abort("a")
        await settle()
        assert parked.done and draining.done()


@virtual_time
async def test_C4_two_requests_per_forward() -> None:
    """Two long prompts leave a place for a short one."""
    engine = FakeEngine(num_pages=800, duration_s=1.0)
    host = NativeHost(engine, None, NativeConfig(chunk_tokens=64, max_batch_requests=2))
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=1.0)) as scheduler:
        for start in (0, 1):
            scheduler.submit(PrefillRequest(prompt(6000, start)))
        await asyncio.sleep(5)
        result = await scheduler.submit(PrefillRequest(prompt(64, 3)))
        assert result.first_token_s - result.arrival_s < 5


@virtual_time
async def test_C2_parked_early_prompts_do_not_keep_ready_ones_out() -> None:
    """Early prompts hold half of the pool at most."""
    engine, transfer = FakeEngine(num_pages=8, duration_s=0.1), FakeTransfer(handshake_s=None)
    host = NativeHost(
        engine, transfer, NativeConfig(chunk_tokens=64, optimistic=True, handshake_timeout_s=60.0)
    )
    async with PrefillScheduler(host) as scheduler:
        for n in range(2):
            scheduler.submit(PrefillRequest(prompt(64, n), peer="slow"))
        await asyncio.sleep(1)
        ready = await scheduler.submit(PrefillRequest(prompt(64, 7), request_id="ready"))
        assert ready.first_token_s - ready.arrival_s < 5, ready.first_token_s - ready.arrival_s
