"""Shards over real NIXL on 127.0.0.1: several ranks write into the pages of one decode worker."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from nixl_support import FIRST, LAYOUT, Child, DecodeSide, handoff

from aioprefill.engine.assemble import assemble
from aioprefill.engine.port import SampledToken
from aioprefill.transfer.nixl_sender import NixlTransfer
from aioprefill.transfer.pool_view import PoolView
from aioprefill.transfer.port import Handoff, TransferEvent, TransferState

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

WAITING, SUCCESS, FAILED = TransferState.WAITING_FOR_INPUT, TransferState.SUCCESS, TransferState.FAILED
SHAPE = (LAYOUT.layers, 2, LAYOUT.page_size, LAYOUT.kv_heads, LAYOUT.head_dim)


async def until(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.002)


class Assembling(DecodeSide):
    """A decode side that puts a room's pages in order and keeps a copy of them."""

    def __init__(self, **options: object) -> None:
        self.facts: list[tuple[str, dict]] = []
        super().__init__(lambda kind, **facts: self.facts.append((kind, facts)), **options)
        self.kv: dict[str, np.ndarray] = {}

    def arrived(
        self, room: str, pages: list[int], first: SampledToken, handoff: Handoff, shards: int = 1
    ) -> None:
        if shards > 1:
            assemble(
                torch.from_numpy(self.memory).view(torch.float32).view(-1, *SHAPE),
                torch.tensor(pages),
                shards,
            )
        self.kv[room] = self.memory[pages].copy()
        super().arrived(room, pages, first, handoff)

    def kinds(self, room: str) -> list[str]:
        return [kind for kind, facts in self.facts if facts["room"] == room]


class Rank:
    """One rank: a pool with its heads of all pages, and its transfer."""

    def __init__(self, whole: np.ndarray, shard: int, shards: int, group: str) -> None:
        layout = LAYOUT if shards == 1 else LAYOUT.shard_of(shard, shards)
        heads = slice(shard * layout.kv_heads, (shard + 1) * layout.kv_heads)
        pages = whole.view(np.float32).reshape(-1, *SHAPE)[..., heads, :]
        self.memory = np.ascontiguousarray(pages).view(np.uint8).reshape(len(whole), -1)
        pool = PoolView(self.memory.ctypes.data, len(whole), layout.page_bytes)
        self.transfer = NixlTransfer(pool, layout, lease_s=2.0, ping_s=0.2, group=group)
        self.events: list[TransferEvent] = []

    async def __aenter__(self) -> Rank:
        self.transfer.prepare()
        self.transfer.start(lambda: self.events.extend(self.transfer.poll()))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.transfer.aclose()

    def of(self, room: str) -> list[TransferState]:
        return [event.state for event in self.events if event.room == room]


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.asyncio
async def test_assembled_pages_equal_those_of_an_unsharded_sender(shards: int) -> None:
    """Rooms in chunks, sent by the ranks at different times: every byte as it is without shards."""
    whole = np.random.default_rng(5).standard_normal((64, LAYOUT.page_bytes // 4), dtype=np.float32)
    whole = whole.view(np.uint8)
    async with contextlib.AsyncExitStack() as stack:
        decode = await stack.enter_async_context(Assembling(num_pages=64))
        ranks = [Rank(whole, shard, shards, "server-1") for shard in range(shards)]
        for rank in ranks:
            await stack.enter_async_context(rank)
        rooms = {f"r{n}": [(7 * page + 11 * n) % 64 for page in range(12)] for n in range(3)}
        for rank in ranks:
            for room in rooms:
                rank.transfer.open(handoff(room, decode.server.endpoint, 12))
        await until(lambda: all(WAITING in rank.of(room) for rank in ranks for room in rooms), "reserved")
        for start, end in ((0, 5), (5, 12)):
            for rank in ranks[::-1]:
                for room, pages in rooms.items():
                    final = FIRST if end == 12 and rank is not ranks[0] else None
                    rank.transfer.send(room, pages[start:end], start, final)
        if shards > 1:
            await until(lambda: decode.receiver.stats()["rooms_awaiting_shards"] == 3, "all but one shard")
            assert decode.kv == {} and SUCCESS not in ranks[1].of("r0")
        for room in rooms:
            ranks[0].transfer.send(room, [], 12, FIRST)
        await until(lambda: all(SUCCESS in rank.of(room) for rank in ranks for room in rooms), "success")
        for room, pages in rooms.items():
            assert np.array_equal(decode.kv[room], whole[pages])
            assert decode.kinds(room) == ["arrived"]
        assert len(decode.free) == 64 and decode.receiver.stats()["rooms_awaiting_shards"] == 0


@pytest.mark.asyncio
async def test_ranks_of_a_server_that_does_not_fit_are_refused_with_the_difference() -> None:
    """A decode worker with other pages: each rank names the field, of the whole page."""
    whole = np.zeros((4, LAYOUT.page_bytes), dtype=np.uint8)
    decode = Assembling(num_pages=4, page_size=16, fingerprint="weights-2")
    async with decode, Rank(whole, 1, 2, "server-1") as rank:
        rank.transfer.open(handoff("r", decode.server.endpoint, 1))
        await until(lambda: FAILED in rank.of("r"), "failed")
        assert "fingerprint is 'weights-2', expected 'weights-1'" in str(rank.events[-1].reason)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.asyncio
async def test_T3_a_rank_that_dies_or_stops_loses_the_room_and_pages_wait_for_both_ranks(
    end: signal.Signals,
) -> None:
    """One of two rank processes ends mid-write: lost once, and no page comes back that it may still write."""
    decode = Assembling(num_pages=1500, lease_s=0.5)
    common = {"num_pages": 1500, "seed": 1, "lease_s": 5.0, "shards": 2, "group": "server-1"}
    async with decode:
        children = [Child("prefill", shard=shard, **common) for shard in range(2)]
        try:
            for child in children:
                await child.wait("ready", 20)
                child.tell("open", room="r", peer=decode.server.endpoint, pages=1500)
            for child in children:
                await child.wait("event", room="r", state="waiting_for_input")
            children[1].tell("send", room="r", pages=1500, stop_after_s=0.0)
            await until(lambda: decode.kinds("r") == ["lost"], "lost")
            assert "shard 1 of 2" in decode.facts[0][1]["reason"]
            await children[0].wait("event", room="r", state="failed", released=True)
            if end is signal.SIGSTOP:
                await asyncio.sleep(1.5)  # past the lease; what is proven is that nothing happens
                assert decode.kinds("r") == ["lost"]
                assert decode.receiver.stats()["pages_quarantined"] == 1500
                children[1].signal(signal.SIGCONT)
            else:
                children[1].signal(signal.SIGKILL)
            await until(lambda: decode.kinds("r") == ["lost", "released"], "released")
            assert len(decode.free) == 1500
        finally:
            for child in children:
                child.close()
