"""Row L7, L4 and the storage tier's own rules: native host, fake device, a store in memory, virtual time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.engine.port import PageCopy
from aioprefill.errors import ConfigError, DeviceError, HostError, RequestAborted
from aioprefill.native.host import NativeBatch, NativeForward, NativeHost
from aioprefill.native.memory import KVMemory
from aioprefill.native.tier.keys import PageKeys, names
from aioprefill.native.tier.prefetch import DEADLINE_STEPS, LIMIT_S, Prefetch
from aioprefill.native.tier.store import Blocks
from aioprefill.native.tier.tier import StorageTier
from aioprefill.request import PrefillHandle, PrefillRequest
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine, FakePageCopy, fake_spec
from aioprefill.testing.tier import MemoryStore

PAGE = 16
LAYOUT = fake_spec().layout


def prompt(name: str, length: int) -> np.ndarray:
    """Tokens of its own, none of them 0."""
    return ((np.arange(length) * 7 + sum(map(ord, name)) * 131) % 999 + 1).astype(np.uint32)


def stored(tokens: np.ndarray, fingerprint: str = LAYOUT.fingerprint) -> dict[str, Blocks]:
    """What a tier holds that has seen a prompt: its full pages by name."""
    keys = PageKeys(LAYOUT, fingerprint)
    pages = len(tokens) // PAGE
    blocks = np.zeros((pages, LAYOUT.page_bytes), dtype=np.uint8)
    blocks[:, : 4 * PAGE] = tokens[: pages * PAGE].astype(np.uint32).view(np.uint8).reshape(pages, -1)
    return dict(zip(names(keys.chain(keys.root, tokens[: pages * PAGE].tobytes())), blocks, strict=True))


@dataclass
class World:
    """A scheduler on a native host with a tier; whatever is launched finds the KV of what it skips."""

    scheduler: PrefillScheduler
    host: NativeHost
    engine: FakeEngine
    store: MemoryStore
    order: list[str] = field(default_factory=list)
    """Request ids in the order of their first launch."""

    @property
    def tier(self) -> StorageTier:
        """The tier."""
        assert isinstance(self.host.tier, StorageTier)
        return self.host.tier

    def submit(self, tokens: np.ndarray, name: str) -> PrefillHandle:
        """A request without a peer."""
        return self.scheduler.submit(PrefillRequest(tokens, request_id=name))

    async def blocker(self, name: str, length: int = 64) -> PrefillHandle:
        """A request that has nothing in the tier; it takes a slot, if there is one."""
        handle = self.submit(prompt(name, length), name)
        await settle()
        return handle

    async def complete(self, count: int = 1) -> None:
        """The device is done with the oldest forwards."""
        for _ in range(count):
            self.engine.forwards[self.host.forwards.pending[0].number].complete()
            await settle()

    async def run_out(self) -> None:
        """Complete all forwards, and those that follow."""
        for _ in range(100):
            if self.host.forwards.pending:
                await self.complete()
        assert not self.host.forwards.pending

    def prefetch(self, name: str) -> Prefetch:
        """The one of a request."""
        item = self.tier.prefetcher.book._known[name]
        assert item is not None
        return item

    def stat(self, name: str) -> Any:
        """One of the host's numbers."""
        return self.host.stats()[name]


@asynccontextmanager
async def world(
    pages: dict[str, Blocks] | None = None,
    *,
    num_pages: int = 64,
    read_s: float | None = 0.0,
    write_s: float | None = 0.0,
    duration_s: float | None = None,
    tier_size: int = 1 << 20,
    fail_open: str | None = None,
) -> AsyncIterator[World]:
    """At the end nothing is in use."""
    engine = FakeEngine(num_pages=num_pages, duration_s=duration_s)
    engine.keep_kv = True
    store = MemoryStore(pages, page_bytes=LAYOUT.page_bytes, read_s=read_s, write_s=write_s)
    store.fail_open = fail_open
    config = NativeConfig(chunk_tokens=64, tier_size=tier_size)
    host = NativeHost(engine, None, config, tier_store=store)
    launch = host.launch

    def checked(now: float, batch: NativeBatch, number: int) -> NativeForward:
        for piece in batch.pieces:
            request = piece.request
            if request.request_id not in made.order:
                made.order.append(request.request_id)
            for page in range(piece.start // PAGE):
                tokens = request.tokens[page * PAGE : (page + 1) * PAGE].tolist()
                assert engine.page_tokens(request.pages[page]) == tokens, f"page {page} has other KV"
        return launch(now, batch, number)

    host.launch = checked  # type: ignore[method-assign]
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=5.0)) as scheduler:
        made = World(scheduler, host, engine, store)
        await settle()
        yield made
        await made.run_out()
    host.memory.check()
    made.tier.index.check()
    assert host.memory.pool.held == 0 and host.ledger.requests == {}
    assert len(made.tier.prefetcher.book) == 0 and made.tier.prefetcher._timer is None
    assert store.closed and engine.closed


# L7


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("arrivals", [False, True])
def test_L7_polls_do_not_advance_prefetch_deadlines_and_steps_do(depth: int, arrivals: bool) -> None:
    """13 polls, with or without arrivals, at both depths; then each result is one step."""

    async def main() -> None:
        tokens = prompt("hit", 100)
        async with world(stored(tokens), read_s=None) as w:
            for number in range(depth):
                await w.blocker(f"blocker {number}")
            w.submit(tokens, "hit")
            await settle()
            assert len(w.host.forwards.pending) == depth and w.order == [f"blocker {n}" for n in range(depth)]
            steps = w.prefetch("hit").steps_left
            for poll in range(13):
                if arrivals:
                    await w.blocker(f"late {poll}", 20)
                w.host.intake._wake()
                w.scheduler._core.signals.transfers.set()  # type: ignore[union-attr]
                w.scheduler._core.signals.preparation.set()  # type: ignore[union-attr]
                await settle()
            assert w.prefetch("hit").steps_left == steps, "a poll brought the deadline nearer"
            for number in range(1, depth + 1):
                await w.complete()
                assert w.prefetch("hit").steps_left == steps - number
            w.store.reads[0]()
            await settle()

    virtual_time(main)()


@virtual_time
async def test_L7_at_its_deadline_a_request_is_admitted_without() -> None:
    """Others pass it until then; a read that ends too late changes nothing."""
    tokens = prompt("hit", 100)
    async with world(stored(tokens), read_s=None) as w:
        await w.blocker("first")
        hit = w.submit(tokens, "hit")
        await settle()
        for step in range(DEADLINE_STEPS):
            assert "hit" not in w.order, f"admitted at step {step}"
            await w.blocker(f"other {step}")
            await w.complete()
        assert "hit" in w.order and w.stat("tier_expired") == 1
        free = w.host.memory.pool.free
        w.store.reads[0]()
        await settle()
        assert w.host.memory.pool.free == free and w.stat("tier_hits") == 0
        await w.run_out()
        assert (await hit).cached_tokens == 0


@virtual_time
async def test_L4_a_prefetch_that_becomes_ready_is_admitted_at_once_under_a_pending_result() -> None:
    """The marker is set: nothing but the prefetch clears it. Not at the pending result's end."""
    tokens = prompt("hit", 100)
    async with world(stored(tokens), read_s=None) as w:
        await w.blocker("first")
        hit = w.submit(tokens, "hit")
        await settle()
        assert w.order == ["first"] and w.scheduler._pipeline.marker
        w.store.reads[0]()
        await settle()
        assert w.order == ["first", "hit"] and len(w.host.forwards.pending) == 2
        await w.run_out()
        assert (await hit).cached_tokens == 96
        assert w.stat("tier_hits") == 6


@virtual_time
async def test_L7_on_an_idle_loop_a_clock_ends_the_wait_for_a_disk_that_hangs() -> None:
    """There are no steps to count when nothing else is there to do."""
    prompts = prompt("one", 100), prompt("two", 100)
    pages = stored(prompts[0]) | stored(prompts[1])
    async with world(pages, read_s=None, duration_s=1.0) as w:
        one = w.submit(prompts[0], "one")
        await asyncio.sleep(2.0)
        two = w.submit(prompts[1], "two")
        for handle in (one, two):
            result = await handle
            waited = result.launched_s - result.arrival_s
            assert result.cached_tokens == 0 and LIMIT_S <= waited <= LIMIT_S + 0.1
        assert w.stat("tier_expired") == 2


@virtual_time
async def test_L7_what_finds_no_room_is_tried_again_at_steps() -> None:
    """Eight pages, all held by a running prompt: placed when its result has been processed."""
    tokens = prompt("hit", 100)
    async with world(stored(tokens), num_pages=8) as w:
        await w.blocker("large", 64 + 50)
        hit = w.submit(tokens, "hit")
        await asyncio.sleep(0.1)
        assert len(w.store.read_calls) == 1 and w.prefetch("hit").stalled
        for _ in range(13):
            w.scheduler._core.signals.preparation.set()  # type: ignore[union-attr]
            await asyncio.sleep(0.1)
        assert len(w.store.read_calls) == 1, "tried again at a poll"
        await w.complete()
        await asyncio.sleep(0.1)
        assert len(w.store.read_calls) == 2 and w.stat("tier_hits") == 0
        await w.complete()
        await asyncio.sleep(0.1)
        await w.run_out()
        assert (await hit).cached_tokens == 96 and len(w.store.read_calls) == 3


# The round trip


@virtual_time
async def test_what_is_evicted_is_stored_and_serves_a_later_request() -> None:
    """Also after a restart; with the pages' own contents (the world looks) and the same token."""
    tokens = prompt("long", 150)
    pages: dict[str, Blocks] = {}
    async with world(pages, num_pages=12, duration_s=1.0) as w:
        first = await w.submit(tokens, "long")
        await w.submit(prompt("other", 150), "other")
        assert w.stat("tier_writes") >= 9 - 2
        await w.submit(prompt("more", 150), "more")
        again = await w.submit(tokens, "again")
        assert again.cached_tokens == 144 and again.token_id == first.token_id
        assert w.stat("tier_hits") == 9 and w.stat("tier_pages") == len(pages)
        assert w.stat("tier_bytes") == len(pages) * LAYOUT.page_bytes
    async with world(pages, duration_s=1.0) as w:
        assert w.stat("tier_pages") == len(pages)
        restarted = await w.submit(tokens, "restarted")
        assert restarted.cached_tokens == 144 and restarted.token_id == first.token_id


@virtual_time
async def test_a_prefix_partly_in_the_pool_is_completed_from_the_tier() -> None:
    """Only what is missing is read."""
    tokens = prompt("x", 150)
    async with world(stored(tokens), duration_s=1.0) as w:
        await w.submit(tokens[:70], "short")
        before = len(w.store.read_calls)
        result = await w.submit(tokens, "long")
        assert result.cached_tokens == 144
        assert [len(call) for call in w.store.read_calls] == [4, 5] and before == 1


@virtual_time
async def test_a_prompt_that_is_stored_as_a_whole_still_computes_its_last_token() -> None:
    """A forward needs a token to give logits."""
    tokens = prompt("x", 96)
    async with world(stored(tokens), duration_s=1.0) as w:
        assert (await w.submit(tokens, "x")).cached_tokens == 80


@virtual_time
async def test_the_tier_is_asked_while_a_request_waits_for_a_slot() -> None:
    """Both slots are full: the pages are in the pool when its turn comes."""
    tokens = prompt("hit", 100)
    async with world(stored(tokens)) as w:
        await w.blocker("a")
        await w.blocker("b")
        w.submit(tokens, "hit")
        await asyncio.sleep(0.1)
        assert w.stat("tier_hits") == 6 and w.order == ["a", "b"]
        await w.complete()
        assert w.order == ["a", "b", "hit"] and w.engine.forwards[2].spans[0].start == 96


@virtual_time
async def test_a_long_prefix_is_read_in_parts_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages a read, and two requests at a time."""
    monkeypatch.setattr("aioprefill.native.tier.prefetcher.READ_BYTES", 2 * LAYOUT.page_bytes)
    monkeypatch.setattr("aioprefill.native.tier.prefetcher.MOST_READS", 2)
    prompts = {name: prompt(name, 100) for name in "abc"}
    pages: dict[str, Blocks] = {}
    for tokens in prompts.values():
        pages |= stored(tokens)
    async with world(pages, read_s=None) as w:
        handles = [w.submit(tokens, name) for name, tokens in prompts.items()]
        await settle()
        ended = 0
        while ended < len(w.store.reads):
            assert len(w.store.reads) - ended <= 2
            w.store.reads[ended]()
            ended += 1
            await settle()
        assert ended == 9 and all(len(call) == 2 for call in w.store.read_calls)
        await w.run_out()
        assert [(await handle).cached_tokens for handle in handles] == [96, 96, 96]


# Aborts, drains, weights


@pytest.mark.parametrize("how", ["abort", "drain", "leave"])
def test_A1_ending_a_request_while_its_prefix_is_read_leaks_nothing(how: str) -> None:
    """One outcome; the read ends afterwards, or never."""

    async def main() -> None:
        tokens = prompt("hit", 100)
        async with world(stored(tokens), read_s=None) as w:
            await w.blocker("first")
            hit = w.submit(tokens, "hit")
            await settle()
            held = w.host.memory.pool.held
            if how == "abort":
                hit.abort("not wanted")
                await settle()
            elif how == "drain":
                w.engine.forwards[0].complete()
                report = await w.scheduler.drain(5.0)
                assert report.dropped == ("hit",)
                held = 0
            else:
                w.engine.forwards[0].complete()
                return
            with pytest.raises(RequestAborted):
                await hit
            w.store.reads[0]()
            await settle()
            assert w.host.memory.pool.held == held and w.stat("tier_hits") == 0
            assert w.tier.prefetcher._reads == 0 and w.tier.prefetcher._timer is None

    virtual_time(main)()


@virtual_time
async def test_P7_new_weights_find_nothing_of_the_old_ones() -> None:
    """Not in the tier, not in a read under way; their own pages are stored under their own names."""
    tokens = prompt("hit", 100)
    pages = stored(tokens)
    async with world(pages, read_s=None, num_pages=8, duration_s=1.0) as w:
        hit = w.submit(tokens, "hit")
        await settle()
        answer = await w.scheduler.update_weights("7")
        assert answer["weight_version"] == 1
        w.store.reads[0]()
        result = await hit
        assert result.cached_tokens == 0 and result.weight_versions == (1,)
        await w.submit(prompt("other", 100), "other")
        await w.submit(prompt("more", 100), "more")
        assert len(stored(tokens, "fake 7").keys() & pages.keys()) == 6
    async with world(pages, read_s=0.0, duration_s=1.0) as w:
        await w.scheduler.update_weights("7")
        assert (await w.submit(tokens, "again")).cached_tokens == 96


@virtual_time
async def test_flushing_the_cache_leaves_the_tier() -> None:
    """It is for memory; what is stored comes back."""
    tokens = prompt("hit", 100)
    async with world(stored(tokens), duration_s=1.0) as w:
        await w.submit(tokens, "one")
        await w.scheduler.flush_cache()
        assert (await w.submit(tokens, "two")).cached_tokens == 96
        assert w.stat("tier_hits") == 12


# Faults


@virtual_time
async def test_a_damaged_page_is_dropped_and_what_came_before_it_is_used() -> None:
    """Counted, said, and not asked for again."""
    tokens = prompt("hit", 100)
    async with world(stored(tokens), duration_s=1.0) as w:
        third = list(stored(tokens))[2]
        w.store.damaged.add(third)
        assert (await w.submit(tokens, "hit")).cached_tokens == 32
        assert w.stat("tier_errors") == 1 and third not in w.store.pages and third not in w.tier.index


@virtual_time
async def test_pages_that_vanished_are_computed_and_the_trouble_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The directory was emptied behind the tier's back."""
    one, two = prompt("one", 100), prompt("two", 100)
    async with world(stored(one) | stored(two), duration_s=1.0) as w:
        w.store.pages.clear()
        for name, tokens in (("one", one), ("two", two)):
            assert (await w.submit(tokens, name)).cached_tokens == 0
        assert w.stat("tier_errors") == 2
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@virtual_time
async def test_eviction_never_waits_for_a_slow_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pages may be on their way; the others are dropped and counted, and serving goes on."""
    monkeypatch.setattr("aioprefill.native.tier.saver.BEHIND_BYTES", 4 * LAYOUT.page_bytes)
    async with world(num_pages=8, write_s=None, duration_s=1.0) as w:
        for number in range(3):
            await w.submit(prompt(f"p{number}", 120), f"p{number}")
        assert len(w.store.writes) == 1 and w.tier.saver._pending_pages == 4
        dropped = w.stat("tier_dropped")
        assert dropped >= 8
        w.store.writes[0]()
        await settle()
        assert w.stat("tier_writes") == 4
        assert set(w.store.pages) == set(list(stored(prompt("p0", 120)))[:4]), "the beginning is worth most"
        await w.submit(prompt("last", 120), "last")
        assert len(w.store.writes) == 2 and w.stat("tier_dropped") > dropped
        w.store.writes[1]()
        await settle()
        assert w.tier.saver._pending_pages == 0


@virtual_time
async def test_a_full_disk_is_said_once_left_alone_for_a_while_and_used_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Serving goes on; after half a minute the tier tries again."""
    caplog.set_level(logging.INFO)
    async with world(num_pages=8, duration_s=1.0) as w:
        w.store.fail_writes = "No space left on device"
        for number in range(4):
            await w.submit(prompt(f"p{number}", 120), f"p{number}")
        assert w.stat("tier_errors") == 1 and w.stat("tier_writes") == 0 and w.stat("tier_dropped") > 7
        await asyncio.sleep(31)
        await w.submit(prompt("p4", 120), "p4")
        assert w.stat("tier_errors") == 2
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == 1 and "No space left on device" in said[0] and "Serving goes on" in said[0]
        w.store.fail_writes = None
        await asyncio.sleep(31)
        await w.submit(prompt("p5", 120), "p5")
        assert w.stat("tier_writes") > 0
        assert any("can be written to again" in record.getMessage() for record in caplog.records)


@virtual_time
async def test_a_store_that_cannot_be_opened_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A warning says why; requests are served as without a tier."""
    tokens = prompt("hit", 100)
    async with world(stored(tokens), num_pages=8, duration_s=1.0, fail_open="Read-only file system") as w:
        for number in range(3):
            assert (await w.submit(tokens + number, f"{number}")).cached_tokens == 0
        assert w.stat("tier_errors") == 1 and w.store.read_calls == [] and w.stat("tier_writes") == 0
    assert "the storage tier is off" in caplog.text and "Read-only file system" in caplog.text


@virtual_time
async def test_the_size_limit_is_kept_and_the_oldest_go() -> None:
    """Room for five pages, and prompts of seven: never more in the store, and those of the last prompts."""
    async with world(num_pages=8, duration_s=1.0) as w:
        w.tier.index.limit_bytes = 5 * LAYOUT.page_bytes
        for number in range(6):
            await w.submit(prompt(f"p{number}", 120), f"p{number}")
            await settle()
            assert len(w.store.pages) <= 5
        assert w.stat("tier_pages") == 5 == len(w.store.pages)
        assert set(w.store.pages) == set(list(stored(prompt("p4", 120)))[:5]), "beginnings are worth most"


@virtual_time
async def test_when_the_tier_is_full_a_prompt_loses_its_end_first() -> None:
    """Room for nine pages: seven of the last prompt, and the beginning of the one before."""
    async with world(num_pages=8, duration_s=1.0) as w:
        w.tier.index.limit_bytes = 9 * LAYOUT.page_bytes
        for number in range(3):
            await w.submit(prompt(f"p{number}", 120), f"p{number}")
        older, newer = (list(stored(prompt(name, 120))) for name in ("p0", "p1"))
        assert set(w.store.pages) == set(newer) | set(older[:2])


@virtual_time
async def test_a_shutdown_stores_what_is_on_its_way() -> None:
    """A write takes half a second; leaving the block waits for it."""
    pages: dict[str, Blocks] = {}
    async with world(pages, num_pages=8, write_s=0.5, duration_s=0.01) as w:
        await w.submit(prompt("a", 120), "a")
        await w.submit(prompt("b", 120), "b")
        assert pages == {} and w.tier.saver.busy
    assert len(pages) == 7


@virtual_time
async def test_a_shutdown_does_not_wait_for_a_store_that_hangs() -> None:
    """Five seconds, then it is said."""
    async with world(num_pages=8, write_s=None, duration_s=0.01) as w:
        await w.submit(prompt("a", 120), "a")
        await w.submit(prompt("b", 120), "b")
        started = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - started < 10


def test_the_tier_needs_the_prefix_cache() -> None:
    """Settings that do not fit each other are refused."""
    with pytest.raises(ConfigError, match="prefix-cache"):
        NativeConfig(tier_dir=Path("x"), prefix_cache=False)


# The device's side of it


class SlowCopies(FakeEngine):
    """Copies of pages are queued, ready and failed when the test says so."""

    def __init__(self) -> None:
        super().__init__(num_pages=8, duration_s=1.0)
        self.keep_kv = True
        self.copies: list[tuple[concurrent.futures.Future[PageCopy], FakePageCopy]] = []
        self.refuse = False

    def read_pages(self, pages: np.ndarray) -> concurrent.futures.Future[PageCopy]:
        """See `Engine.read_pages`."""
        if self.refuse:
            raise HostError("the engine is closed")
        copied = super().read_pages(pages).result().blocks().copy()
        copy = FakePageCopy(copied, is_ready=False)
        future: concurrent.futures.Future[PageCopy] = concurrent.futures.Future()
        self.copies.append((future, copy))
        return future


@asynccontextmanager
async def saving() -> AsyncIterator[tuple[SlowCopies, StorageTier, KVMemory, MemoryStore]]:
    """A tier without a host; 7 cached pages can be evicted."""
    engine, store = SlowCopies(), MemoryStore(page_bytes=LAYOUT.page_bytes)
    memory = KVMemory(8, PAGE, prefix_cache=True)
    tier = StorageTier(store, 1 << 20, memory, engine)
    tier.bind(lambda: None)
    await settle()
    assert memory.cache is not None
    tokens = prompt("p", 7 * PAGE)
    pages = memory.pool.take(7)
    memory.cache.insert(tokens, pages)
    memory.pool.drop(pages)
    yield engine, tier, memory, store
    await tier.aclose()
    assert not tier.saver.busy and tier.saver._pending_pages == 0
    tier.index.check()


@virtual_time
async def test_a_copy_goes_to_the_store_when_the_device_has_made_it_and_not_before() -> None:
    """Queued, then ready: the host's own calls look, nothing waits."""
    async with saving() as (engine, tier, memory, store):
        memory.cache.evict(7)  # type: ignore[union-attr]
        assert memory.pool.free == 8, "the pages are free at once"
        future, copy = engine.copies[0]
        tier.pump()
        assert store.pages == {} and tier.saver.busy
        future.set_result(copy)
        tier.pump()
        await settle()
        assert store.pages == {}, "the device is still copying"
        object.__setattr__(copy, "is_ready", True)
        tier.pump()
        await asyncio.sleep(0.1)
        assert len(store.pages) == 7 and tier.counters.writes == 7


@virtual_time
async def test_closing_waits_for_copies_that_the_device_still_makes() -> None:
    """The store's thread waits for the device, not the loop."""
    async with saving() as (engine, _, memory, store):
        memory.cache.evict(3)  # type: ignore[union-attr]
        memory.cache.evict(3)  # type: ignore[union-attr]
        for at, (future, copy) in enumerate(engine.copies):
            asyncio.get_running_loop().call_later(1.0 + at, future.set_result, copy)
    assert len(store.pages) == 6


@virtual_time
async def test_a_copy_that_fails_loses_its_pages_and_those_that_wait_behind_it() -> None:
    """Counted; the tier rests, and nothing stays on its way."""
    async with saving() as (engine, tier, memory, store):
        memory.cache.evict(2)  # type: ignore[union-attr]
        memory.cache.evict(2)  # type: ignore[union-attr]
        engine.copies[0][0].set_exception(DeviceError("cudaErrorAssert", "lost", sticky=True))
        tier.pump()
        assert tier.counters.errors == 1 and tier.counters.dropped == 4 and not tier.saver.busy
        await asyncio.sleep(31)
        engine.refuse = True
        memory.cache.evict(1)  # type: ignore[union-attr]
        assert tier.counters.errors == 2 and tier.counters.dropped == 5
        assert store.pages == {}


@virtual_time
async def test_a_store_whose_calls_break_costs_what_they_were_for() -> None:
    """Bugs of a store are errors like others: a write, then a read."""

    def broken(*_: Any) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_exception(ZeroDivisionError("a bug"))
        return future

    tokens = prompt("hit", 100)
    async with world(stored(tokens), num_pages=8, duration_s=1.0) as w:
        w.store.write = w.store.read = broken  # type: ignore[method-assign,assignment]
        assert (await w.submit(tokens, "hit")).cached_tokens == 0
        assert w.stat("tier_errors") == 1
        await w.submit(prompt("other", 100), "other")
        await w.submit(prompt("more", 100), "more")
        await settle()
        assert w.stat("tier_errors") == 2 and w.stat("tier_writes") == 0


@virtual_time
async def test_pages_whose_beginning_was_evicted_meanwhile_are_not_placed() -> None:
    """The request is admitted, and computes."""
    tokens = prompt("x", 150)
    async with world(stored(tokens), read_s=None, duration_s=1.0) as w:
        w.tier.prefetcher.keys = None
        await w.submit(tokens[:70], "short")
        w.tier.prefetcher.keys = w.tier._keys
        hit = w.submit(tokens, "hit")
        await settle()
        assert w.prefetch("hit").first == 4
        await w.scheduler.flush_cache()
        w.store.reads[0]()
        assert (await hit).cached_tokens == 0
        assert w.stat("tier_hits") == 0
