"""Rows L12 and C3: forwards that are launched and not yet processed; native host, fake device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from aioprefill.config import NativeConfig
from aioprefill.errors import RequestAborted, RequestTimeout
from aioprefill.native.host import NativeHost
from aioprefill.native.request_state import Request
from aioprefill.request import PrefillHandle, PrefillRequest, Timeouts
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine
from aioprefill.testing.transfer import FakeTransfer

PEER = "tcp://127.0.0.1:7420"
LENGTH = 150
PAGES = 10
"""Of a prompt of `LENGTH` tokens, which runs in chunks of 64, 64 and 22."""


class World:
    """A scheduler; forwards complete when told. `released` has the ids of requests as they let go."""

    def __init__(self) -> None:
        self.engine = FakeEngine(num_pages=64)
        self.transfer = FakeTransfer(handshake_s=0.0, write_s=0.0)
        self.host = NativeHost(self.engine, self.transfer, NativeConfig(chunk_tokens=64))
        self.scheduler = PrefillScheduler(self.host)
        self.released: list[str] = []
        release = self.host.memory.release

        def counted(request: Request) -> None:
            self.released.append(request.request_id)
            release(request)

        self.host.memory.release = counted  # type: ignore[method-assign]

    def submit(self, name: str, length: int = LENGTH, **options: object) -> PrefillHandle:
        """A request of its own prefix, with a peer unless told otherwise."""
        tokens = (np.arange(length) * 7 + sum(map(ord, name)) * 131) % 1000
        return self.scheduler.submit(
            PrefillRequest(tokens, request_id=name, **{"peer": PEER, **options})  # type: ignore[arg-type]
        )

    async def complete(self, number: int) -> None:
        """The device is done with a forward."""
        self.engine.forwards[number].complete()
        await settle()


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """At the end nothing is held."""
    w = World()
    async with w.scheduler:
        await settle()
        yield w
        assert w.host.memory.pool.held == 0 and w.host.ledger.requests == {}
        assert w.transfer.open_rooms == []
    w.transfer.check()


@pytest.mark.parametrize("launched", [1, 2, 3], ids=["first", "middle", "final"])
@virtual_time
async def test_C3_an_abort_releases_the_pages_once_when_the_last_result_that_touches_them_lands(
    launched: int,
) -> None:
    """With the first two, the middle or the final chunk in flight: held until then, released once."""
    async with world() as w:
        handle = w.submit("a")
        await settle()
        for number in range(launched - 1):
            await w.complete(number)
        in_flight = list(range(launched - 1, len(w.engine.forwards)))
        assert in_flight, "something is in flight"
        handle.abort("not wanted")
        await settle()
        with pytest.raises(RequestAborted, match="not wanted"):
            await handle
        for number in in_flight:
            assert w.host.memory.pool.held == PAGES and w.released == []
            await w.complete(number)
        assert w.host.memory.pool.held == 0 and w.released == ["a"]
        assert len(w.engine.forwards) == in_flight[-1] + 1, "no chunk of it is launched any more"


@pytest.mark.parametrize("depth", [1, 2])
@virtual_time
async def test_L12_a_launched_forward_is_seen_by_an_abort_at_both_depths(depth: int) -> None:
    """Aborted while its forward runs: no result is published, and its pages wait for the forward."""
    async with world() as w:
        handles = [w.submit(f"r{number}", 64) for number in range(depth)]
        await settle()
        assert len(w.engine.forwards) == depth
        handles[-1].abort("not wanted")
        await settle()
        with pytest.raises(RequestAborted):
            await handles[-1]
        held = w.host.memory.pool.held
        for number in range(depth):
            assert w.host.memory.pool.held == held
            await w.complete(number)
            held -= 4
        assert sorted(w.released) == [f"r{number}" for number in range(depth)]


@pytest.mark.parametrize("depth", [1, 2])
@virtual_time
async def test_L12_a_launched_forward_is_seen_by_the_running_timeout_at_both_depths(depth: int) -> None:
    """It counts from the launch, and fires while the forward runs and nothing else happens."""
    async with world() as w:
        for number in range(depth - 1):
            w.submit(f"r{number}", 64)
        late = w.submit("late", 64, timeouts=Timeouts(running_s=2.0))
        await settle()
        assert len(w.engine.forwards) == depth
        began = asyncio.get_running_loop().time()
        with pytest.raises(RequestTimeout):
            await late
        assert 2.0 <= asyncio.get_running_loop().time() - began < 2.1
        assert "late" not in w.released, "its forward still runs"
        for number in range(depth):
            await w.complete(number)
        assert "late" in w.released


@pytest.mark.parametrize("depth", [1, 2])
@virtual_time
async def test_L12_a_launched_forward_is_seen_by_weight_versions_at_both_depths(depth: int) -> None:
    """An update waits for it; its result has the version that it was launched with, the next one the new."""
    async with world() as w:
        handles = [w.submit(f"r{number}", 64) for number in range(depth)]
        await settle()
        assert len(w.engine.forwards) == depth
        updating = asyncio.ensure_future(w.scheduler.update_weights("5"))
        await settle()
        for number in range(depth):
            assert not updating.done() and w.engine.weights == 0
            await w.complete(number)
        assert (await updating)["weight_version"] == 1
        assert [(await handle).weight_versions for handle in handles] == [(0,)] * depth
        fresh = w.submit("fresh", 64)
        await settle()
        await w.complete(depth)
        assert (await fresh).weight_versions == (1,)
