"""The storage tier as the native host sees it: what is evicted goes out, what waiting requests need comes in.

Everything here runs on the loop and returns at once; files are the store's business, on its own thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from aioprefill.config import NativeConfig
from aioprefill.engine.port import Engine
from aioprefill.native.memory import KVMemory
from aioprefill.native.request_state import Request
from aioprefill.native.tier.index import TierIndex
from aioprefill.native.tier.keys import PageKeys
from aioprefill.native.tier.prefetch import PrefetchBook
from aioprefill.native.tier.prefetcher import Prefetcher
from aioprefill.native.tier.saver import PageSaver, TierCounters
from aioprefill.native.tier.store import TierStore

logger = logging.getLogger(__name__)

LOOKAHEAD = 8
"""Waiting requests for which pages are fetched before it is their turn."""
SAVE_TIMEOUT_S = 5.0
"""Seconds that a shutdown waits for pages on their way to the store."""


class Tier(Protocol):
    """What the host calls."""

    def bind(self, wake: Callable[[], None]) -> None:
        """Open the store. `wake` has the loop try to admit again."""

    def look_ahead(self, now: float, waiting: Iterable[Request]) -> None:
        """Begin to fetch for the first of those that wait."""

    def gate(self, now: float, waiting: Iterable[Request]) -> Iterable[Request]:
        """Those requests whose prefix is not on its way, in order; lazily."""

    def step(self) -> None:
        """A scheduling step."""

    def left_queue(self, request: Request) -> None:
        """The request waits no more: admitted, or failed."""

    def pump(self) -> None:
        """A forward has ended, or nothing runs: copies of evicted pages may be ready."""

    def use_weights(self, fingerprint: str) -> None:
        """Other weights compute from now on; the prefix cache is empty."""

    def stats(self) -> dict[str, int]:
        """Counters by name."""

    async def aclose(self) -> None:
        """Store what is on its way, within a few seconds, and close the store. Idempotent."""


class NoTier:
    """Implements `Tier` where there is none."""

    def bind(self, wake: Callable[[], None]) -> None:
        """Nothing to open."""

    def look_ahead(self, now: float, waiting: Iterable[Request]) -> None:
        """Nothing to fetch."""

    def gate(self, now: float, waiting: Iterable[Request]) -> Iterable[Request]:
        """All of them."""
        return waiting

    def step(self) -> None:
        """No deadlines."""

    def left_queue(self, request: Request) -> None:
        """Nothing is kept."""

    def pump(self) -> None:
        """Nothing is on its way."""

    def use_weights(self, fingerprint: str) -> None:
        """No keys."""

    def stats(self) -> dict[str, int]:
        """No counters."""
        return {}

    async def aclose(self) -> None:
        """Nothing to close."""


class StorageTier:
    """Implements `Tier` over a store. Owns the store: `aclose` closes it."""

    def __init__(
        self,
        store: TierStore,
        limit_bytes: int,
        memory: KVMemory,
        engine: Engine,
        *,
        book: PrefetchBook | None = None,
    ) -> None:
        self.index = TierIndex(limit_bytes)
        self.counters = TierCounters()
        self.saver = PageSaver(store, self.index, engine, self.counters)
        self.prefetcher = Prefetcher(store, self.index, memory, engine, self.counters, book or PrefetchBook())
        self._store = store
        self._memory = memory
        self._layout = engine.spec.layout
        self._keys = PageKeys(self._layout, self._layout.fingerprint)
        self._closed = False
        memory.save_evicted(self._keys, self.saver.save)

    def __repr__(self) -> str:
        return f"<StorageTier {self.index!r} {self.prefetcher.book!r}>"

    def bind(self, wake: Callable[[], None]) -> None:
        """See `Tier.bind`. A store that cannot be opened is left alone, with a warning."""
        loop = asyncio.get_running_loop()
        self.saver.bind(loop.time)
        self.prefetcher.bind(wake)
        asyncio.wrap_future(self._store.open()).add_done_callback(self._opened)

    def _opened(self, found: asyncio.Future[list[tuple[str, int]]]) -> None:
        if found.cancelled() or self._closed:
            return
        error = found.exception()
        if error is not None:
            self.counters.errors += 1
            logger.warning("the storage tier is off, for it cannot be opened: %s", error)
            return
        self.saver.usable = True
        self.prefetcher.keys = self._keys
        self.saver.remove(self.index.load(found.result()))
        logger.info("storage tier: %d pages of earlier runs, %d bytes", len(self.index), self.index.bytes)

    def look_ahead(self, now: float, waiting: Iterable[Request]) -> None:
        """See `Tier.look_ahead`."""
        for request in islice(waiting, LOOKAHEAD):
            self.prefetcher.look(now, request)

    def gate(self, now: float, waiting: Iterable[Request]) -> Iterable[Request]:
        """See `Tier.gate`."""
        return self.prefetcher.gate(now, waiting)

    def step(self) -> None:
        """See `Tier.step`."""
        self.prefetcher.step()

    def left_queue(self, request: Request) -> None:
        """See `Tier.left_queue`."""
        self.prefetcher.book.forget(request.request_id)

    def pump(self) -> None:
        """See `Tier.pump`."""
        self.saver.pump()

    def use_weights(self, fingerprint: str) -> None:
        """See `Tier.use_weights`. What is read for the old ones meanwhile is dropped."""
        self._keys = PageKeys(self._layout, fingerprint)
        self.prefetcher.book.forget_all()
        if self.prefetcher.keys is not None:
            self.prefetcher.keys = self._keys
        self._memory.save_evicted(self._keys, self.saver.save)

    def stats(self) -> dict[str, int]:
        """See `Tier.stats`."""
        return {"tier_pages": len(self.index), "tier_bytes": self.index.bytes, **self.counters.table()}

    async def aclose(self) -> None:
        """See `Tier.aclose`."""
        if self._closed:
            return
        self._closed = True
        self.saver.usable = False
        self.prefetcher.stop()
        try:
            async with asyncio.timeout(SAVE_TIMEOUT_S):
                await self.saver.finish()
        except TimeoutError:
            logger.warning("the storage tier is slow: evicted pages that waited for it are not saved")
        await self._store.aclose()


def make_tier(config: NativeConfig, memory: KVMemory, engine: Engine, store: TierStore | None = None) -> Tier:
    """The tier that the settings ask for; `store`: instead of the directory."""
    if store is None and config.tier_dir is not None:
        from aioprefill.native.tier.disk import DiskStore  # here, because most hosts do without

        store = DiskStore(config.tier_dir, engine.spec.layout.page_bytes)
    if store is None:
        return NoTier()
    return StorageTier(store, config.tier_size, memory, engine)
