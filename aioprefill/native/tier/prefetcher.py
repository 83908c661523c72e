"""Brings stored prefixes of waiting requests back into the pool.

Rules:
- A page of the pool is touched only when its contents are in host memory: it is taken, written in the
  device's order and given to the prefix cache in one call. So a prefetch under way holds no page, and
  giving it up releases nothing.
- What cannot be placed now (no room, too many reads) is tried again at scheduling steps, up to the deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from aioprefill.engine.port import Engine
from aioprefill.native.memory import KVMemory
from aioprefill.native.request_state import Request, State
from aioprefill.native.tier.index import TierIndex
from aioprefill.native.tier.keys import PageKeys
from aioprefill.native.tier.prefetch import Prefetch, PrefetchBook
from aioprefill.native.tier.saver import TierCounters
from aioprefill.native.tier.store import Blocks, ReadOutcome, TierStore

logger = logging.getLogger(__name__)

READ_BYTES = 16 << 20
"""One read, at most; but a page at least."""
MOST_READS = 4
"""Requests for which the store reads at the same time."""


class Prefetcher:
    """Asks the index about waiting requests, and keeps those back whose pages are on their way."""

    def __init__(
        self,
        store: TierStore,
        index: TierIndex,
        memory: KVMemory,
        engine: Engine,
        counters: TierCounters,
        book: PrefetchBook,
    ) -> None:
        self.book = book
        self.keys: PageKeys | None = None
        """None: the store is not open."""
        self._store = store
        self._index = index
        self._memory = memory
        self._engine = engine
        self._counters = counters
        self._batch = max(1, READ_BYTES // engine.spec.layout.page_bytes)
        self._reads = 0
        self._failing = False
        self._wake: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def bind(self, wake: Callable[[], None]) -> None:
        """`wake`: something can be admitted that could not before."""
        self._wake = wake
        self._loop = asyncio.get_running_loop()

    # What the host calls

    def look(self, now: float, request: Request) -> None:
        """Begin to prefetch for a request, unless that was done, or the tier has nothing for it."""
        if self.keys is None or self.book.knows(request.request_id):
            return
        first, names = self._find(request, self.keys)
        if not names:
            self.book.nothing(request.request_id)
            return
        self._read(self.book.begin(request.request_id, request.tokens, names, first, now))
        self._arm()

    def gate(self, now: float, requests: Iterable[Request]) -> Iterator[Request]:
        """Those requests that need not wait for the tier (any more), in order; lazily."""
        self._counters.expired += self.book.expire(now)
        for request in requests:
            if request.state is not State.RUNNING:  # launched before its handshake, and in between chunks
                self.look(now, request)
            if not self.book.blocks(request.request_id):
                yield request

    def step(self) -> None:
        """A scheduling step: deadlines come nearer, what could not be placed is tried again."""
        self._counters.expired += self.book.step()
        self._continue()

    def stop(self) -> None:
        """Nothing is prefetched any more."""
        self.keys = None
        self.book.forget_all()
        self._arm()

    # Inside

    def _find(self, request: Request, keys: PageKeys) -> tuple[int, list[str]]:
        """First missing page of a prompt, and the names of those from there on that are stored."""
        cache = self._memory.cache
        assert cache is not None
        first, digest = cache.tail(request.tokens)
        # at least one token is left to compute, and more than the pool holds is of no use
        last = min((request.length - 1) // self._memory.page_size, self._memory.pool.num_pages)
        names: list[str] = []
        for page in range(first, last):
            at = page * self._memory.page_size
            digest = keys.next(digest, request.tokens[at : at + self._memory.page_size].tobytes())
            if (name := digest.hex()) not in self._index:
                break
            names.append(name)
        return first, names

    def _read(self, item: Prefetch) -> None:
        if self._reads >= MOST_READS or item.reading or item.stalled or item.over:
            return
        item.reading = True
        self._reads += 1
        names = item.batch(self._batch)
        read = asyncio.wrap_future(self._store.read(names))
        read.add_done_callback(partial(self._arrived, item, names))

    def _arrived(self, item: Prefetch, names: list[str], read: asyncio.Future[ReadOutcome]) -> None:
        item.reading = False
        self._reads -= 1
        outcome = None if read.cancelled() or read.exception() is not None else read.result()
        if outcome is None or outcome.error is not None:
            self._lost(item, names, outcome)
        else:
            self._failing = False
        if outcome is not None and not item.over:
            self._place(item, outcome.blocks)
        elif outcome is None:
            item.over = True
            self._wake()
        self._continue()
        self._arm()

    def _lost(self, item: Prefetch, names: list[str], outcome: ReadOutcome | None) -> None:
        """A page could not be read: it, and those behind it, are not waited for."""
        had = 0 if outcome is None else len(outcome.blocks)
        self._counters.errors += 1
        self._index.drop(names[had])
        del item.names[item.done + had :]
        reason = "the read failed" if outcome is None else outcome.error
        if outcome is not None and outcome.damaged:
            logger.warning("storage tier: page %s", reason)
        elif not self._failing:
            self._failing = True
            logger.warning("the storage tier cannot be read: %s. Prefixes are computed instead", reason)

    def _place(self, item: Prefetch, blocks: Blocks) -> None:
        """Put pages that were read into the pool, and go on to the next ones."""
        start = item.first + item.done
        restored = self._memory.restore(item.tokens, start, len(blocks))
        if restored is None:
            item.stalled = True
            return
        known, pages = restored
        if known < start:
            item.over = True  # what leads to these pages has been evicted meanwhile
        else:
            if len(pages):
                written = self._engine.write_pages(pages, blocks[known - start :])
                written.add_done_callback(_report)
                self._counters.hits += len(pages)
            for name in reversed(item.batch(len(blocks))):
                self._index.touch(name)
            item.done += len(blocks)
            item.over = item.done >= len(item.names)
        if item.over:
            self._wake()
        else:
            self._read(item)

    def _continue(self) -> None:
        for item in list(self.book.active):
            self._read(item)

    def _arm(self) -> None:
        """Have admission look again when a deadline passes by the clock: an idle loop makes no steps."""
        if self._loop is None:
            return
        first = next(self.book.active, None)
        if first is None and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if first is not None and self._timer is None:
            # a little later, for timers fire early by the clock's resolution
            self._timer = self._loop.call_at(max(first.until_s, self._loop.time()) + 0.01, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._wake()
        self._arm()


def _report(written: concurrent.futures.Future[None]) -> None:
    """On any thread. The engine fails what would use the pages; here it is only said."""
    if not written.cancelled() and (error := written.exception()) is not None:
        logger.error("storage tier: pages could not be put into the pool: %s", error)
