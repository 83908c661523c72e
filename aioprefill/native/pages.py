"""The page pool: who holds which KV page. Pure.

A page is free; or held by `refs` requests; or idle in the prefix cache (cached, held by nobody), where it
may be evicted. Free pages are handed out lowest first after a start, then last freed first: the order is
a function of the calls alone, so ranks agree.

Pages go in and out as int32 arrays, each page at most once in an array: a prompt of 12,000 tokens has 750,
and its admission and release are a few array operations each.
"""

from __future__ import annotations

import numpy as np

from aioprefill.engine.port import PageIds


class PagePool:
    """Reference counts of a fixed number of pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = _lowest_on_top(num_pages)
        self._free = num_pages
        """The free pages are the first so many of the stack; its end is handed out first."""
        self._refs = np.zeros(num_pages, dtype=np.int32)
        self._cached = np.zeros(num_pages, dtype=np.bool_)
        self.idle = 0
        """Pages that only the prefix cache keeps: they can be evicted."""

    def __repr__(self) -> str:
        return f"<PagePool free={self.free} idle={self.idle} held={self.held} of {self.num_pages}>"

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return self._free

    @property
    def held(self) -> int:
        """Pages that requests hold."""
        return self.num_pages - self.free - self.idle

    @property
    def available(self) -> int:
        """Pages that an allocation can get, after eviction."""
        return self.free + self.idle

    def held_among(self, pages: PageIds) -> int:
        """How many of the pages requests hold."""
        return int(np.count_nonzero(self._refs[pages]))

    def take(self, count: int) -> PageIds:
        """`count` free pages, each held once. The caller has made sure that there are as many."""
        assert count <= self._free, f"{count} pages wanted, {self!r}"
        pages: PageIds = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        self._refs[pages] = 1
        return pages

    def hold(self, pages: PageIds) -> None:
        """One more holder of pages that are held or cached."""
        idle = self._refs[pages] == 0
        assert self._cached[pages[idle]].all(), "a free page cannot be held"
        self.idle -= int(np.count_nonzero(idle))
        self._refs[pages] += 1

    def drop(self, pages: PageIds) -> None:
        """One holder fewer; pages that nobody holds or caches become free, the last one on top."""
        left = self._refs[pages] - 1
        assert (left >= 0).all(), "a page is not held"
        self._refs[pages] = left
        unheld = pages[left == 0]
        cached = self._cached[unheld]
        self.idle += int(np.count_nonzero(cached))
        self._push(unheld[~cached])

    def cache(self, pages: PageIds) -> None:
        """The prefix cache keeps these held pages."""
        assert (self._refs[pages] > 0).all(), "a page is not held"
        assert not self._cached[pages].any(), "a page is cached already"
        self._cached[pages] = True

    def evict(self, pages: PageIds) -> None:
        """The prefix cache lets go of these idle pages: they become free."""
        assert self._cached[pages].all(), "a page is not cached"
        assert not self._refs[pages].any(), "a page is held"
        self._cached[pages] = False
        self.idle -= len(pages)
        self._push(pages)

    def uncache(self, pages: PageIds) -> None:
        """The prefix cache lets go of these pages; idle ones become free."""
        assert self._cached[pages].all(), "a page is not cached"
        self._cached[pages] = False
        idle = pages[self._refs[pages] == 0]
        self.idle -= len(idle)
        self._push(idle)

    def restart(self) -> None:
        """Hand the pages out again as after a start. Every page must be free."""
        assert self._free == self.num_pages, f"pages are in use: {self!r}"
        self._stack = _lowest_on_top(self.num_pages)

    def _push(self, pages: PageIds) -> None:
        self._stack[self._free : self._free + len(pages)] = pages
        self._free += len(pages)

    def check(self) -> None:
        """Assert the pool's invariants: every page is in exactly one place."""
        free = np.zeros(self.num_pages, dtype=np.bool_)
        free[self._stack[: self._free]] = True
        assert np.count_nonzero(free) == self._free, "a page is free twice"
        used = (self._refs > 0) | self._cached
        assert (used != free).all(), "a page is lost, or free and in use"
        idle = int(np.count_nonzero(self._cached & (self._refs == 0)))
        assert idle == self.idle, f"{idle} idle pages, counted {self.idle}"


def _lowest_on_top(num_pages: int) -> PageIds:
    return np.arange(num_pages - 1, -1, -1, dtype=np.int32)
