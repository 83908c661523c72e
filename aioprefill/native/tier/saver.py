"""Evicted pages on their way to the store.

Rules:
- Eviction never waits. A page is copied to the host on the device's stream, ahead of the forward that will
  overwrite it, so it is free at once. When too much is on its way, pages are dropped and counted.
- One write at a time is with the store, so that a read waits for one at most.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import chain as joined

import numpy as np

from aioprefill.engine.port import Engine, PageCopy
from aioprefill.errors import AioprefillError
from aioprefill.native.tier.index import TierIndex
from aioprefill.native.tier.keys import Evicted, names
from aioprefill.native.tier.store import TierStore, WriteOutcome

logger = logging.getLogger(__name__)

BEHIND_BYTES = 64 << 20
"""Copied pages that wait for the store, at most; further ones are dropped."""
BATCH_BYTES = 8 << 20
"""One copy and one write, at most; but a page at least."""
REST_S = 30.0
"""Seconds without a write after one that failed."""


@dataclass(slots=True)
class TierCounters:
    """Totals since the start, in pages, but errors in events."""

    hits: int = 0
    """Brought back into the pool."""
    writes: int = 0
    dropped: int = 0
    """Evicted and not saved: the writer was behind, or the store out of order."""
    errors: int = 0
    """Reads and writes that failed, damaged files included."""
    expired: int = 0
    """Requests that were admitted before their prefix had come."""

    def table(self) -> dict[str, int]:
        """The counters by name."""
        return {f"tier_{item.name}": getattr(self, item.name) for item in fields(self)}


@dataclass(slots=True)
class _Group:
    names: list[str]
    copy: concurrent.futures.Future[PageCopy]


class PageSaver:
    """Takes evicted pages (`save`) and hands them to the store (`pump`)."""

    def __init__(self, store: TierStore, index: TierIndex, engine: Engine, counters: TierCounters) -> None:
        self._store = store
        self._index = index
        self._engine = engine
        self._counters = counters
        page_bytes = engine.spec.layout.page_bytes
        self._most_pending = max(1, BEHIND_BYTES // page_bytes)
        self._batch = max(1, BATCH_BYTES // page_bytes)
        self._pending: deque[_Group] = deque()
        self._removals: list[str] = []
        self._writing: tuple[asyncio.Future[WriteOutcome], list[str]] | None = None
        self._pending_pages = 0
        self._rest_until = 0.0
        self._broken = False
        self._time: Callable[[], float] = lambda: 0.0
        self.usable = False
        """Set by whoever has opened the store."""

    @property
    def busy(self) -> bool:
        """Something is on its way to the store."""
        return bool(self._pending or self._writing)

    def bind(self, time: Callable[[], float]) -> None:
        """`time`: the loop's clock."""
        self._time = time

    def save(self, evicted: Evicted) -> None:
        """These pages are about to be overwritten."""
        room = min(self._most_pending - self._pending_pages, self._index.room(self._store.stored_bytes))
        if not self.usable or self._time() < self._rest_until:
            room = 0
        # a page is of no use without those before it: what has no room is what follows
        runs = [zip(pages.tolist(), names(chain), strict=True) for pages, chain in reversed(evicted)]
        found = list(joined(*runs))
        wanted = [item for item in found if not self._index.knows(item[1])]
        kept = wanted[:room]
        self._counters.dropped += len(wanted) - len(kept)
        kept.reverse()  # and the store lets go first of what came first
        for _, name in reversed(found):
            self._index.touch(name)
        for at in range(0, len(kept), self._batch):
            part = kept[at : at + self._batch]
            self._begin([page for page, _ in part], [name for _, name in part])
        self.pump()

    def _begin(self, pages: list[int], group: list[str]) -> None:
        for name in group:
            self._removals += self._index.begin_write(name, self._store.stored_bytes)
        self._pending_pages += len(group)
        try:
            copy = self._engine.read_pages(np.array(pages, dtype=np.int32))
        except AioprefillError as err:
            self._end(group, WriteOutcome(0, str(err)))
            return
        self._pending.append(_Group(group, copy))

    def remove(self, gone: list[str]) -> None:
        """Have the store remove pages that the index has dropped."""
        self._removals += gone
        self.pump()

    def pump(self, *, unready: bool = False) -> None:
        """Hand what has been copied to the store, if it is free. Cheap, and safe to call at any time.

        `unready`: also what the device is still copying; the store's thread then waits for it.
        """
        while self._writing is None and (self._removals or self._pending):
            group = self._pending[0] if self._pending else None
            if group is not None and not group.copy.done():
                return
            copy: PageCopy | None = None
            if group is not None:
                error = group.copy.exception()
                if error is not None:
                    self._pending.popleft()
                    self._end(group.names, WriteOutcome(0, str(error)))
                    continue
                copy = group.copy.result()
                if not (unready or copy.ready()):
                    return
                self._pending.popleft()
            self._write(group.names if group is not None else [], copy)

    async def finish(self) -> None:
        """Return when nothing is on its way any more."""
        while self.busy:
            self.pump(unready=True)
            with contextlib.suppress(Exception):  # outcomes are looked at in `pump` and `_written`
                if self._writing is not None:
                    await asyncio.wait([self._writing[0]])
                elif self._pending:
                    await asyncio.shield(asyncio.wrap_future(self._pending[0].copy))

    def _write(self, group: list[str], copy: PageCopy | None) -> None:
        gone, self._removals = self._removals, []
        write = asyncio.wrap_future(self._store.write(gone, group, copy))
        self._writing = write, group
        write.add_done_callback(self._written)

    def _written(self, write: asyncio.Future[WriteOutcome]) -> None:
        assert self._writing is not None
        group, self._writing = self._writing[1], None
        if write.cancelled():
            outcome = WriteOutcome(0, "the write was cancelled")
        elif (error := write.exception()) is not None:
            outcome = WriteOutcome(0, repr(error))
        else:
            outcome = write.result()
        self._end(group, outcome)
        self.pump()

    def _end(self, group: list[str], outcome: WriteOutcome) -> None:
        self._pending_pages -= len(group)
        for number, name in enumerate(group):
            self._index.end_write(name, stored=number < outcome.written)
        self._counters.writes += outcome.written
        if outcome.error is not None:
            self._counters.errors += 1
            self._counters.dropped += len(group) - outcome.written
            self._rest(outcome.error)
        elif group and self._broken:
            self._broken = False
            logger.info("the storage tier can be written to again")

    def _rest(self, error: str) -> None:
        """Leave the store alone for a while, and say so once."""
        self._rest_until = self._time() + REST_S
        while self._pending:
            group = self._pending.popleft()
            self._counters.dropped += len(group.names)
            self._pending_pages -= len(group.names)
            for name in group.names:
                self._index.end_write(name, stored=False)
        if not self._broken:
            self._broken = True
            logger.warning(
                "the storage tier cannot be written to: %s. Serving goes on without saving prefixes; "
                "another attempt every %.0f s", error, REST_S,
            )  # fmt: skip
