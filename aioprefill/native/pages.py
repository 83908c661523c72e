"""The page pool: who holds which KV page. Pure.

A page is free; or held by `refs` requests; or idle in the prefix cache (cached, held by nobody), where it
may be evicted. Free pages are handed out lowest first after a start, then last freed first: the order is
a function of the calls alone, so ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Reference counts of a fixed number of pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._cached = bytearray(num_pages)
        self.idle = 0
        """Pages that only the prefix cache keeps: they can be evicted."""

    def __repr__(self) -> str:
        return f"<PagePool free={self.free} idle={self.idle} held={self.held} of {self.num_pages}>"

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Pages that requests hold."""
        return self.num_pages - self.free - self.idle

    @property
    def available(self) -> int:
        """Pages that an allocation can get, after eviction."""
        return self.free + self.idle

    def refs(self, page: int) -> int:
        """Requests that hold the page."""
        return self._refs[page]

    def take(self, count: int) -> list[int]:
        """`count` free pages, each held once. The caller has made sure that there are as many."""
        assert count <= len(self._free), f"{count} pages wanted, {self!r}"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder of pages that are held or cached."""
        for page in pages:
            if self._refs[page] == 0:
                assert self._cached[page], f"page {page} is free"
                self.idle -= 1
            self._refs[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder fewer; pages that nobody holds or caches become free."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is not held"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._cached[page]:
                    self.idle += 1
                else:
                    self._free.append(page)

    def cache(self, pages: Iterable[int]) -> None:
        """The prefix cache keeps these held pages."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is not held"
            assert not self._cached[page], f"page {page} is cached already"
            self._cached[page] = 1

    def evict(self, pages: Iterable[int]) -> None:
        """The prefix cache lets go of these idle pages: they become free."""
        for page in pages:
            assert self._cached[page], f"page {page} is not cached"
            assert self._refs[page] == 0, f"page {page} is held"
            self._cached[page] = 0
            self.idle -= 1
            self._free.append(page)

    def check(self) -> None:
        """Assert the pool's invariants: every page is in exactly one place."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        idle = 0
        for page in range(self.num_pages):
            if page in free:
                assert self._refs[page] == 0 and not self._cached[page], f"page {page} is free and in use"
            else:
                assert self._refs[page] > 0 or self._cached[page], f"page {page} is lost"
                idle += self._refs[page] == 0
        assert idle == self.idle, f"{idle} idle pages, counted {self.idle}"
