"""Sections T, C, L9 and A1's transfer states: native host, fake device, fake transfer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.errors import DeviceError, PeerError, RequestAborted, RequestTimeout
from aioprefill.native.host import NativeHost
from aioprefill.request import PrefillHandle, PrefillRequest, Timeouts
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine
from aioprefill.testing.transfer import FakeTransfer

PEER = "tcp://127.0.0.1:7420"


@dataclass
class World:
    """Everything around one scheduler."""

    scheduler: PrefillScheduler
    host: NativeHost
    engine: FakeEngine
    transfer: FakeTransfer

    def submit(self, length: int, name: str, peer: str = PEER) -> PrefillHandle:
        """A request of its own prefix, with a decode peer."""
        seed = sum(map(ord, name))
        tokens = (np.arange(length) * 7 + seed * 131) % 1000
        return self.scheduler.submit(PrefillRequest(tokens, request_id=name, peer=peer))

    async def complete(self, number: int | None = None) -> None:
        """The device is done with the oldest forward, or with forward `number`."""
        oldest = self.host.forwards.pending[0].number if number is None else number
        self.engine.forwards[oldest].complete()
        await settle()


@asynccontextmanager
async def world(
    *,
    handshake_s: float | None = 0.0,
    write_s: float | None = 0.0,
    optimistic: bool = False,
    num_pages: int = 64,
    duration_s: float | None = None,
) -> AsyncIterator[World]:
    """At the end nothing is in use, and no rule of the transfer's port was broken."""
    engine = FakeEngine(num_pages=num_pages, duration_s=duration_s)
    transfer = FakeTransfer(handshake_s=handshake_s, write_s=write_s)
    host = NativeHost(engine, transfer, NativeConfig(chunk_tokens=64, optimistic=optimistic))
    take = host.memory.pool.take

    def guarded(count: int) -> np.ndarray:
        pages = take(count)
        transfer.assert_free(pages.tolist())
        return pages

    host.memory.pool.take = guarded  # type: ignore[method-assign]
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=5.0)) as scheduler:
        await settle()
        yield World(scheduler, host, engine, transfer)
        host.memory.check()
        assert host.memory.pool.held == 0 and host.ledger.requests == {}
        assert transfer.open_rooms == []
    transfer.check()


@virtual_time
async def test_C1_kv_chunks_are_sent_in_order_with_exact_ranges_and_the_final_one_last() -> None:
    """A prompt of 150 tokens in chunks of 64: pages 0-3, 4-7, 8-9 with the first token."""
    async with world(duration_s=1.0) as w:
        handle = w.submit(150, "long")
        await handle.wait_transferred()
        sends = [(send.first_page, len(send.pages), send.final is not None) for send in w.transfer.sends]
        assert sends == [(0, 4, False), (4, 4, False), (8, 2, True)]
        final = w.transfer.sends[-1].final
        assert final is not None and final.token_id == (await handle).token_id
        handoff = await handle.wait_transferred()
        assert handoff.kv_bytes == 10 * w.engine.spec.layout.page_bytes


@virtual_time
async def test_C1_cached_prefix_pages_are_sent_too() -> None:
    """The peer gets the whole prompt's KV, whoever computed it."""
    async with world(duration_s=1.0) as w:
        await w.submit(64, "a").wait_transferred()
        tokens = (np.arange(64) * 7 + 97 * 131) % 1000
        again = w.scheduler.submit(PrefillRequest(np.append(tokens, [1, 2]), request_id="again", peer=PEER))
        assert (await again).cached_tokens == 64
        await again.wait_transferred()
        assert len(w.transfer.received("again")) == 5


@virtual_time
async def test_T1_a_prefill_that_is_done_before_its_handshake_is_parked_and_sent_when_the_peer_is_ready() -> (
    None
):
    """Launched optimistically; nothing is sent before the peer is ready, everything afterwards."""
    async with world(handshake_s=None, optimistic=True) as w:
        handle = w.submit(100, "early")
        await settle()
        await w.complete()
        await w.complete()
        assert (await handle).token_id >= 0
        assert w.transfer.sends == [] and not handle.done
        assert w.host.memory.pool.held == 7, "parked with its pages"
        w.transfer.finish_handshake("early")
        await settle()
        assert [(send.first_page, len(send.pages)) for send in w.transfer.sends] == [(0, 7)]
        assert w.transfer.sends[0].final is not None
        await handle.wait_transferred()


@virtual_time
async def test_T1_a_handshake_that_ends_between_chunks_sends_what_is_computed() -> None:
    """The rest follows chunk by chunk."""
    async with world(handshake_s=None, optimistic=True) as w:
        handle = w.submit(150, "early")
        await settle()
        await w.complete()
        w.transfer.finish_handshake("early")
        await settle()
        assert [(send.first_page, len(send.pages)) for send in w.transfer.sends] == [(0, 4)]
        await w.complete()
        await w.complete()
        await handle.wait_transferred()
        assert [(send.first_page, len(send.pages)) for send in w.transfer.sends] == [(0, 4), (4, 4), (8, 2)]


@virtual_time
async def test_without_optimistic_prefill_a_request_waits_for_its_handshake() -> None:
    """And is launched as soon as it has ended, although a forward is pending."""
    async with world(handshake_s=None) as w:
        first = w.submit(10, "first")
        await settle()
        w.transfer.finish_handshake("first")
        await settle()
        second = w.submit(10, "second")
        await settle()
        assert len(w.engine.forwards) == 1
        w.transfer.finish_handshake("second")
        await settle()
        assert len(w.engine.forwards) == 2, "at once, not at the end of the pending forward"
        await w.complete()
        await w.complete()
        await asyncio.gather(first.wait_transferred(), second.wait_transferred())


@pytest.mark.parametrize(
    "when", ["refuses", "dies in bootstrap", "dies in prefill", "dies in transfer", "silent"]
)
def test_T2_a_peer_that_fails_fails_its_requests_by_name_and_others_go_on(when: str) -> None:
    """Pages and room come back; another peer's request is served."""

    async def main() -> None:
        by_hand = when in ("dies in bootstrap", "refuses")
        async with world(handshake_s=None if by_hand else 0.0, write_s=None) as w:
            if when == "refuses":
                w.transfer.refuse(PEER, "another model")
            victim = w.submit(100, "victim")
            other = w.submit(10, "other", peer="tcp://127.0.0.1:9")
            await settle()
            if by_hand:
                w.transfer.finish_handshake("other")
                if when == "refuses":
                    w.transfer.finish_handshake("victim")
                else:
                    w.transfer.kill(PEER)
                await settle()
            if when == "dies in prefill":
                w.transfer.kill(PEER)
                await settle()
            while w.host.forwards.pending:
                await w.complete()
            if when == "dies in transfer":
                w.transfer.kill(PEER)
            if when == "silent":
                w.transfer.silence(PEER)
            await settle()
            with pytest.raises(PeerError, match=f"decode peer {PEER}: "):
                await victim.wait_transferred()
            if when == "silent":
                assert w.host.memory.pool.held > 0, "its writes may still read the pages"
                w.transfer.kill(PEER)
                await settle()
            w.transfer.finish_write("other")
            await other.wait_transferred()

    virtual_time(main)()


@virtual_time
async def test_T3_pages_of_an_abandoned_transfer_are_not_reused_before_it_has_ended() -> None:
    """Aborted in the middle of a write: the pages wait, and so does who needs them."""
    async with world(write_s=None, num_pages=8) as w:
        victim = w.submit(128, "victim")
        await settle()
        await w.complete()
        await w.complete()
        victim.abort()
        heir = w.submit(128, "heir")
        await settle()
        with pytest.raises(RequestAborted):
            await victim.wait_transferred()
        assert w.host.memory.pool.held == 8 and len(w.engine.forwards) == 2
        w.transfer.finish_write("victim")
        await settle()
        assert len(w.engine.forwards) == 2, "one write is still live"
        w.transfer.finish_write("victim")
        await settle()
        assert len(w.engine.forwards) == 4, "retired, and its pages admit the next at once"
        await w.complete()
        await w.complete()
        w.transfer.finish_write("heir")
        w.transfer.finish_write("heir")
        await heir.wait_transferred()


@virtual_time
async def test_L9_a_transfer_that_ends_during_a_long_forward_is_retired_at_once_and_its_pages_admit() -> None:
    """At 1 s, not at the end of the forward of 60 s."""
    async with world(write_s=None, num_pages=10) as w:
        first = w.submit(60, "first")
        await settle()
        await w.complete()
        running = w.submit(60, "running")
        await settle()
        waiting = w.submit(60, "waiting")
        await settle()
        assert w.host.frontend.queued_requests == 1, "no pages for it"
        asyncio.get_running_loop().call_at(1.0, w.transfer.finish_write, "first")
        await asyncio.sleep(1.5)
        assert (await first.wait_transferred()).transferred_s == 1.0
        assert len(w.engine.forwards) == 3 and w.host.frontend.queued_requests == 0
        while w.host.forwards.pending:
            await w.complete()
        for name in ("running", "waiting"):
            w.transfer.finish_write(name)
        await asyncio.gather(running.wait_transferred(), waiting.wait_transferred())


@pytest.mark.parametrize("state", ["bootstrapping", "bootstrapped", "sending", "parked", "transferring"])
def test_A1_abort_in_the_states_of_a_hand_off_gives_one_outcome_and_no_leak(state: str) -> None:
    """The peer is told; the room is released once."""

    async def main() -> None:
        async with world(handshake_s=None, write_s=None, optimistic=state == "parked") as w:
            blockers = []
            if state == "bootstrapped":
                blockers = [w.submit(64, name) for name in ("b1", "b2")]
                await settle()
                for name in ("b1", "b2"):
                    w.transfer.finish_handshake(name)
                await settle()
            victim = w.submit(100, "victim")
            await settle()
            if state not in ("bootstrapping", "parked"):
                w.transfer.finish_handshake("victim")
                await settle()
            if state == "sending":
                await w.complete()
            if state in ("transferring", "parked"):
                while w.host.forwards.pending:
                    await w.complete()
            victim.abort("not wanted")
            await settle()
            with pytest.raises(RequestAborted, match="not wanted"):
                await victim.wait_transferred()
            while w.host.forwards.pending:
                await w.complete()
            while w.transfer.live_writes:
                w.transfer.finish_write()
            await settle()
            assert [event.room for event in w.transfer.ended].count("victim") in (0, 1)
            assert "victim" not in w.transfer.open_rooms
            for blocker in blockers:
                await blocker.wait_transferred()

    virtual_time(main)()


@virtual_time
async def test_a_device_error_in_the_middle_of_a_hand_off_tells_the_peer() -> None:
    """The room is abandoned with the error as its reason."""
    async with world() as w:
        handle = w.submit(100, "victim")
        await settle()
        await w.complete()
        w.engine.forwards[1].fail(DeviceError("cudaErrorLaunchTimeout", "x", sticky=False))
        with pytest.raises(DeviceError):
            await handle
        await settle()
        assert w.transfer.abandoned and "cudaErrorLaunchTimeout" in w.transfer.abandoned[0][1]


@virtual_time
async def test_a_drain_waits_for_transfers() -> None:
    """Finished is what reached its peer before the deadline; the rest is named."""
    async with world(write_s=None) as w:
        w.submit(10, "slow")
        w.submit(10, "quick")
        await settle()
        await w.complete()
        asyncio.get_running_loop().call_later(2.0, w.transfer.finish_write, "quick")
        report = await w.scheduler.drain(4.0)
        assert report.finished == ("quick",) and report.dropped == ("slow",)
        w.transfer.finish_write("slow")
        await settle()


@virtual_time
async def test_C2_an_optimistic_request_yields_to_a_ready_one_but_not_while_a_chunk_of_it_is_in_flight() -> (
    None
):
    """Released and requeued once; it runs again afterwards, and nothing is sent twice."""
    async with world(handshake_s=None, optimistic=True, num_pages=12) as w:
        early = w.submit(192, "early")
        await settle()
        assert len(w.engine.forwards) == 2, "two of its three chunks"
        ready = w.submit(64, "ready")
        await settle()
        w.transfer.finish_handshake("ready")
        await settle()
        await w.complete(0)
        assert w.host.ledger.requests["early"].in_flight == 1
        assert len(w.engine.forwards) == 2, "a chunk is in flight: nothing is released, nothing passes"
        await w.complete(1)
        assert w.host.ledger.requests["early"].state.value == "bootstrapping"
        assert len(w.engine.forwards) == 3 and w.host.memory.pool.held == 4
        await w.complete(2)
        await ready.wait_transferred()
        while w.host.forwards.pending:
            await w.complete()
        assert (await early).token_id >= 0, "launched again"
        w.transfer.finish_handshake("early")
        await early.wait_transferred()
        assert [(send.first_page, len(send.pages)) for send in w.transfer.sends[1:]] == [(0, 12)]


@virtual_time
async def test_C2_attempts_are_bounded() -> None:
    """After so many launches a request waits for its handshake."""
    async with world(handshake_s=None, optimistic=True, num_pages=12) as w:
        early = w.submit(192, "early")
        for attempt in range(3):
            await settle()
            assert w.host.ledger.requests["early"].early_launches == attempt + 1
            name = f"ready{attempt}"
            ready = w.submit(100, name)
            await settle()
            w.transfer.finish_handshake(name)
            await settle()
            while not ready.result.done():
                await w.complete()
            await ready.wait_transferred()
            while w.host.forwards.pending:
                await w.complete()
            if early.result.done():
                break
        if not early.result.done():
            assert w.host.ledger.requests["early"].state.value == "bootstrapping"
        w.transfer.finish_handshake("early")
        await settle()
        while w.host.forwards.pending:
            await w.complete()
        await early.wait_transferred()


@virtual_time
async def test_T4_a_waiting_request_whose_peer_has_given_up_is_dropped_before_it_is_launched() -> None:
    """It waits behind full slots; its peer goes away; its turn never comes."""
    async with world() as w:
        for name in ("a", "b"):
            w.submit(60, name)
            await settle()
        victim = w.submit(60, "victim", peer="tcp://127.0.0.1:9")
        await settle()
        assert w.host.ledger.requests["victim"].state.value == "waiting"
        w.transfer.give_up("victim", "the client went away")
        await settle()
        with pytest.raises(PeerError, match="the client went away"):
            await victim
        while w.host.forwards.pending:
            await w.complete()
        assert len(w.engine.forwards) == 2


@pytest.mark.parametrize("stage", ["handshake", "queue", "running", "transfer", "parked"])
def test_A4_each_stage_has_its_timeout_decided_by_the_clock_readings_of_host_calls(stage: str) -> None:
    """Per server and per request; the error names stage and limit; nothing leaks."""

    async def main() -> None:
        limits = Timeouts(**{f"{'handshake' if stage == 'parked' else stage}_s": 3.0})
        optimistic = stage == "parked"
        by_hand = stage in ("handshake", "parked")
        async with world(handshake_s=None if by_hand else 0.0, write_s=None, optimistic=optimistic) as w:
            blockers = []
            if stage == "queue":
                blockers = [w.submit(60, name) for name in ("a", "b")]
                await settle()
            victim = w.scheduler.submit(
                PrefillRequest(np.arange(60), request_id="victim", peer=PEER, timeouts=limits)
            )
            await settle()
            if stage in ("transfer", "parked"):
                await w.complete()
            await asyncio.sleep(2.9)
            assert not victim.done
            await asyncio.sleep(0.2)
            name = "handshake" if by_hand else stage
            with pytest.raises(RequestTimeout, match=f"its {name} timeout of 3 s"):
                await victim.wait_transferred()
            while w.host.forwards.pending:
                await w.complete()
            while w.transfer.live_writes:
                w.transfer.finish_write()
            await settle()
            for blocker in blockers:
                await blocker.wait_transferred()
            assert w.host.timers.next() is None

    virtual_time(main)()


@virtual_time
async def test_A4_a_timeout_is_one_outcome_also_when_input_is_held() -> None:
    """It strikes during a held pause, once; the abort behind the pause finds nothing left to do."""
    async with world() as w:
        victim = w.scheduler.submit(
            PrefillRequest(np.arange(60), request_id="victim", timeouts=Timeouts(running_s=1.0))
        )
        await settle()
        pausing = asyncio.ensure_future(w.scheduler.pause("in_place"))
        await settle()
        victim.abort("behind the pause")
        await asyncio.sleep(5)
        with pytest.raises(RequestTimeout):
            await victim
        assert w.host.ledger.totals.failed == 1
        await w.complete()
        await pausing
        await w.scheduler.resume()


@virtual_time
async def test_A5_timers_fire_without_any_new_work_and_a_full_pool_recovers_by_them() -> None:
    """The pool is full of transfers that hang; their timeout frees it, and the next request is launched."""
    async with world(write_s=None, num_pages=8) as w:
        stuck = w.scheduler.submit(
            PrefillRequest(np.arange(128), request_id="stuck", peer=PEER, timeouts=Timeouts(transfer_s=5.0))
        )
        await settle()
        await w.complete()
        await w.complete()
        heir = w.scheduler.submit(PrefillRequest(np.arange(100) + 300, request_id="heir"))
        await asyncio.sleep(4)
        assert len(w.engine.forwards) == 2
        asyncio.get_running_loop().call_at(6.0, lambda: [w.transfer.finish_write() for _ in range(2)])
        await asyncio.sleep(3)
        with pytest.raises(RequestTimeout, match="transfer timeout"):
            await stuck.wait_transferred()
        assert len(w.engine.forwards) == 4
        await w.complete()
        await w.complete()
        assert (await heir).token_id >= 0
