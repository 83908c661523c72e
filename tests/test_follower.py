"""Leader and followers in one process: links in memory that delay, virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.errors import (
    DeviceError,
    HostError,
    HostLeft,
    ModelError,
    RankError,
    RequestAborted,
    RequestTimeout,
)
from aioprefill.follower import Follower
from aioprefill.host import Hold, Ingested
from aioprefill.native.host import NativeHost
from aioprefill.request import PrefillHandle, PrefillRequest, Timeouts
from aioprefill.sampling_params import SamplingParams
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine
from aioprefill.testing.rank_links import MemoryRanks
from aioprefill.testing.transfer import FakeTransfer

PEER = "tcp://127.0.0.1:7420"


@dataclass
class Group:
    """Native hosts on several ranks, rank 0 first."""

    ranks: MemoryRanks
    hosts: list[NativeHost]
    engines: list[FakeEngine]
    transfers: list[FakeTransfer]
    followers: list[Follower]
    scheduler: PrefillScheduler
    running: list[asyncio.Task[None]] = field(default_factory=list)

    def submit(self, name: str, length: int = 20, **options: object) -> PrefillHandle:
        """A request of its own prefix."""
        tokens = (np.arange(length) * 7 + sum(map(ord, name)) * 131) % 1000
        return self.scheduler.submit(PrefillRequest(tokens, request_id=name, **options))  # type: ignore[arg-type]

    def agree(self) -> None:
        """All ranks have launched the same, and hold the same."""
        shapes = [
            [[(span.start, span.token_ids.tolist(), span.pages.tolist()) for span in forward.spans]]
            for engine in self.engines
            for forward in engine.forwards
        ]
        count = len(self.engines[0].forwards)
        for rank in range(1, len(self.hosts)):
            assert shapes[rank * count : (rank + 1) * count] == shapes[:count]
            assert self.hosts[rank].memory.pool.free == self.hosts[0].memory.pool.free


@asynccontextmanager
async def group(
    size: int = 2,
    *,
    duration_s: float | None = 1.0,
    delay_s: float = 0.01,
    config: NativeConfig | None = None,
) -> AsyncIterator[Group]:
    """At the end all ranks are empty and have ended well."""
    rng = random.Random(5)
    ranks = MemoryRanks(size, lambda: rng.uniform(0, delay_s))
    engines = [FakeEngine(num_pages=64, duration_s=duration_s) for _ in range(size)]
    transfers = [FakeTransfer(handshake_s=None, write_s=None) for _ in range(size)]
    hosts = [
        NativeHost(engine, transfer, NativeConfig(chunk_tokens=64))
        for engine, transfer in zip(engines, transfers, strict=True)
    ]
    followers = [Follower(hosts[rank], ranks[rank]) for rank in range(1, size)]
    running = [asyncio.create_task(follower.run()) for follower in followers]
    async with PrefillScheduler(hosts[0], SchedulerConfig(drain_timeout_s=5.0), ranks=ranks[0]) as scheduler:
        yield Group(ranks, hosts, engines, transfers, followers, scheduler, running)
    await asyncio.gather(*running)
    for host in hosts:
        host.memory.check()
        assert host.ledger.requests == {} and host.memory.pool.held == 0


@virtual_time
async def test_followers_launch_what_the_leader_has_decided() -> None:
    """Chunks, batches and pages are the same; every forward had one vote."""
    async with group(3) as g:
        handles = [g.submit(f"r{number}", 20 * number + 1) for number in range(10)]
        await asyncio.gather(*handles)
        await asyncio.sleep(1)
        g.agree()
        assert g.ranks.collectives == len(g.engines[0].forwards) == len(g.engines[2].forwards) > 5
        assert {follower.digest for follower in g.followers} == {g.scheduler._core.digest.value}  # type: ignore[union-attr]


@virtual_time
async def test_a_hand_off_is_ready_and_done_when_every_shard_is() -> None:
    """Whichever rank is last."""
    async with group(2) as g:
        handle = g.submit("r", peer=PEER)
        await asyncio.sleep(0.1)
        g.transfers[1].finish_handshake("r")
        await asyncio.sleep(2)
        assert not g.engines[0].forwards
        g.transfers[0].finish_handshake("r")
        await handle
        await asyncio.sleep(0.1)
        g.transfers[0].finish_write()
        await asyncio.sleep(1)
        assert not handle.done and all(host.memory.pool.held for host in g.hosts)
        g.transfers[1].finish_write()
        assert (await handle.wait_transferred()).request_id == "r"
        await asyncio.sleep(1)
        assert all(host.memory.pool.held == 0 for host in g.hosts)


@virtual_time
async def test_one_failed_shard_fails_the_hand_off_and_gives_the_others_up() -> None:
    """The reason names peer and rank; pages come back on all ranks."""
    async with group(2) as g:
        handle = g.submit("r", peer=PEER)
        await asyncio.sleep(0.1)
        g.transfers[1].give_up("r", "no room here")
        with pytest.raises(Exception, match=r"7420.*no room here.*rank 1"):
            await handle
        await asyncio.sleep(1)
        assert g.transfers[0].open_rooms == g.transfers[1].open_rooms == []


@virtual_time
async def test_new_weights_are_read_by_all_ranks_and_swapped_at_one_point() -> None:
    """What was launched before computes with the old ones on every rank."""
    async with group(2) as g:
        before = g.submit("before")
        await asyncio.sleep(0.5)
        update = asyncio.ensure_future(g.scheduler.update_weights("5"))
        await asyncio.sleep(0.1)  # all ranks have read them, and the swap waits for the forward
        after = g.submit("after")
        assert (await before).weight_versions == (0,)
        assert await update == {"weight_version": 1}
        assert (await after).weight_versions == (1,)
        assert [[forward.weights for forward in engine.forwards] for engine in g.engines] == [[0, 5]] * 2


@virtual_time
async def test_weights_that_one_rank_cannot_read_are_used_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old ones go on serving, and nothing stays staged."""

    async def refuse(folder: Path) -> int:
        raise ModelError(f"{folder}: not on this machine")

    async with group(2) as g:
        monkeypatch.setattr(g.engines[1], "stage_weights", refuse)
        with pytest.raises(ModelError, match="not on this machine"):
            await g.scheduler.update_weights("5")
        assert (await g.submit("r")).weight_versions == (0,)
        await asyncio.sleep(1)
        assert all(host._staging._ready == {} for host in g.hosts)


@virtual_time
async def test_a_swap_that_ends_late_on_one_rank_is_waited_for() -> None:
    """Nothing is launched before every rank has the weights."""
    async with group(2) as g:
        g.engines[1].swaps_by_hand = True
        update = asyncio.ensure_future(g.scheduler.update_weights("5"))
        await asyncio.sleep(1)
        handle = g.submit("r")
        await asyncio.sleep(5)
        assert not update.done() and not g.engines[0].forwards
        g.engines[1].swaps[0].set_result(None)
        assert await update == {"weight_version": 1}
        assert (await handle).weight_versions == (1,)


@virtual_time
async def test_A4_timeouts_are_judged_by_the_leaders_clock_at_one_point_of_the_order() -> None:
    """A follower that lags by seconds fails the same requests at the same call."""
    async with group(2, delay_s=3.0) as g:
        handles = [
            g.submit(f"r{number}", peer=PEER, timeouts=Timeouts(handshake_s=1.0 + number))
            for number in range(3)
        ]
        for handle in handles:
            with pytest.raises(RequestTimeout, match="handshake timeout"):
                await handle
        await asyncio.sleep(20)
        totals = [(host.ledger.totals.failed, host.ledger.totals.requests) for host in g.hosts]
        assert totals == [(3, 3)] * 2
        assert g.followers[0].digest == g.scheduler._core.digest.value  # type: ignore[union-attr]


@virtual_time
async def test_what_is_drawn_is_drawn_once_for_all_ranks() -> None:
    """A request that samples without a seed gets one at the front door."""
    async with group(2) as g:
        await g.submit("r", sampling=SamplingParams(temperature=1.0))
        await asyncio.sleep(1)
        seeds = [engine.forwards[0].spans[0].sample.seed for engine in g.engines]  # type: ignore[union-attr]
        assert seeds[0] is not None and seeds[0] == seeds[1]


@virtual_time
async def test_aborts_reach_every_rank() -> None:
    """Of queued, launched and finished requests; a withdrawn command is withdrawn everywhere."""
    async with group(2) as g:
        first, second, third = (g.submit(name, 64) for name in ("a1", "a2", "b"))
        await asyncio.sleep(0.5)
        first.abort("no need")
        assert await g.scheduler.abort_matching("a") == {"aborted": 2}
        for handle in (first, second):
            with pytest.raises(RequestAborted):
                await handle
        await third
        await asyncio.sleep(5)
        assert [host.ledger.totals.failed for host in g.hosts] == [2, 2]


@virtual_time
async def test_a_device_error_on_one_rank_fails_the_forward_on_all() -> None:
    """By its name and its rank; what follows goes on."""
    async with group(2, duration_s=None) as g:
        handle = g.submit("r")
        await asyncio.sleep(0.1)
        g.engines[0].forwards[0].complete()
        g.engines[1].forwards[0].fail(DeviceError("cudaErrorX", "broke", sticky=False))
        with pytest.raises(DeviceError, match=r"cudaErrorX: broke \(on rank 1\)"):
            await handle
        again = g.submit("again")
        await asyncio.sleep(0.1)
        for engine in g.engines:
            engine.forwards[1].complete()
        assert (await again).prompt_tokens == 20


async def _ends_with(group_of: Group, kind: type[BaseException], match: str) -> None:
    """The follower has ended so."""
    with pytest.raises(kind, match=match):
        await group_of.running[0]
    group_of.running.clear()


@virtual_time
async def test_a_leader_whose_loop_breaks_stops_the_followers_with_its_error() -> None:
    """They end with an error, not as after a drain."""
    with pytest.raises(DeviceError, match="cudaErrorY"):
        async with group(2, duration_s=None) as g:
            handle = g.submit("r")
            await asyncio.sleep(0.1)
            for engine in g.engines:
                engine.forwards[0].fail(DeviceError("cudaErrorY", "lost", sticky=True))
            with pytest.raises(DeviceError):
                await handle
            await g.scheduler.wait_stopped()
            await _ends_with(g, HostError, "rank 0")


@virtual_time
async def test_a_follower_whose_host_breaks_is_named_and_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every open request gets an answer."""
    with pytest.raises(RankError, match="rank 1 stopped: it broke"):
        async with group(2) as g:

            def broken(*_: object) -> None:
                raise HostError("it broke")

            monkeypatch.setattr(g.hosts[1], "launch", broken)
            handle = g.submit("r")
            with pytest.raises(HostError, match="rank 1 stopped: it broke"):
                await handle
            await g.scheduler.wait_stopped()
            await _ends_with(g, HostError, "it broke")


@virtual_time
async def test_R2_a_rank_that_decides_differently_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three ranks the odd one out is known; here rank 2 plans smaller chunks."""
    with pytest.raises(RankError, match="rank 2 decided differently"):
        async with group(3) as g:
            limits = g.hosts[2]._batches._limits
            monkeypatch.setattr(g.hosts[2]._batches, "_limits", type(limits)(16, 64, 16, 1.0))
            handle = g.submit("r", 100)
            with pytest.raises(HostError, match="rank 2 decided differently"):
                await handle
            await g.scheduler.wait_stopped()
            for running in g.running:
                with pytest.raises(RankError, match="rank 2 decided differently"):
                    await running
            g.running.clear()


def leaves(monkeypatch: pytest.MonkeyPatch, host: NativeHost, at: int) -> None:
    """The host leaves the loop by itself at its intake number `at`."""
    own, calls = host.ingest, iter(range(at))

    def ingest(now: float, *, hold: Hold) -> Ingested:
        if next(calls, None) is None:
            raise HostLeft("it changes its role") from LookupError("the host's own")
        return own(now, hold=hold)

    monkeypatch.setattr(host, "ingest", ingest)


@virtual_time
async def test_hosts_that_leave_end_all_ranks_at_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers wait for the leader's last token; nobody is at fault, and what each left by is kept."""
    with pytest.raises(HostLeft, match="role"):
        async with group(3) as g:
            for host in g.hosts:
                leaves(monkeypatch, host, 2)
            g.submit("r")
            await g.scheduler.wait_stopped()
            for running in g.running:
                with pytest.raises(HostLeft, match="role") as left:
                    await running
                assert isinstance(left.value.__cause__, LookupError)
            assert {follower.next_token for follower in g.followers} == {g.scheduler._order.next_number - 1}
            g.running.clear()


@virtual_time
async def test_a_host_that_leaves_alone_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's has decided differently, and goes on."""
    with pytest.raises(RankError, match="rank 1 left the loop"):
        async with group(2) as g:
            leaves(monkeypatch, g.hosts[1], 2)
            g.submit("r")
            await g.scheduler.wait_stopped()
            with pytest.raises(RankError, match="rank 1 left the loop"):
                await g.running[0]
            g.running.clear()


@virtual_time
async def test_a_gap_in_the_order_is_an_error() -> None:
    """Rather than a call that is skipped."""
    ranks = MemoryRanks(2)
    host = NativeHost(FakeEngine(num_pages=8), FakeTransfer())
    running = asyncio.create_task(Follower(host, ranks[1]).run())
    await settle()
    from aioprefill.tp_agree import CallToken, encode_token

    ranks[0].send(encode_token(CallToken(1, "ingest", 0.0)))
    with pytest.raises(RankError, match="rank 0 sent host call 1 where 0 was due"):
        await running


@virtual_time
async def test_a_message_that_is_no_token_is_an_error() -> None:
    """It names who sent it."""
    ranks = MemoryRanks(2)
    host = NativeHost(FakeEngine(num_pages=8), FakeTransfer())
    running = asyncio.create_task(Follower(host, ranks[1]).run())
    await settle()
    ranks[0].send(b"\xc1")
    with pytest.raises(RankError, match="rank 0 sent what is no token"):
        await running


@virtual_time
async def test_a_follower_that_is_told_to_stop_has_the_leader_drain() -> None:
    """Its process does not end alone."""
    async with group(2) as g:
        g.followers[0].ask_to_stop()
        await asyncio.wait_for(g.scheduler.stop_wanted.wait(), 1)
