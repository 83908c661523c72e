"""What the tier holds and in what order it goes: least recently used first, within a size. Pure.

The index is the loop's; the files are the I/O thread's. A name counts from the moment its write is queued,
so that the files on disk never exceed the limit, but can be read only once the write has ended.
"""

from __future__ import annotations

from collections.abc import Iterable


class TierIndex:
    """Names and sizes of stored pages."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        """Bytes of all pages, the ones being written included."""
        self._stored: dict[str, int] = {}
        """Least recently used first."""
        self._writing: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<TierIndex pages={len(self)} bytes={self.bytes} of {self.limit_bytes}>"

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def knows(self, name: str) -> bool:
        """It is stored, or being written."""
        return name in self._stored or name in self._writing

    def load(self, found: Iterable[tuple[str, int]]) -> list[str]:
        """Take over what a scan found, oldest use first; all of it older than what is here already.

        Returns the names to remove, for the limit may be smaller than it was.
        """
        old = {name: size for name, size in found if not self.knows(name)}
        self._stored = {**old, **self._stored}
        self.bytes += sum(old.values())
        return self._shrink(0)

    def touch(self, name: str) -> None:
        """It was used just now."""
        if name in self._stored:
            self._stored[name] = self._stored.pop(name)

    def room(self, size: int) -> int:
        """How many pages of `size` bytes may be written now; everything that is stored can go for them."""
        return max(0, self.limit_bytes - sum(self._writing.values())) // size

    def begin_write(self, name: str, size: int) -> list[str]:
        """Make room, of which the caller has made sure; the names to remove before the write."""
        assert not self.knows(name), f"page {name} is written twice"
        assert self.room(size), f"no room for page {name}: {self!r}"
        removed = self._shrink(size)
        self._writing[name] = size
        self.bytes += size
        return removed

    def end_write(self, name: str, *, stored: bool) -> None:
        """The write has ended, well or not."""
        size = self._writing.pop(name)
        if stored:
            self._stored[name] = size
        else:
            self.bytes -= size

    def drop(self, name: str) -> None:
        """It is gone, or not worth keeping. Unknown names are ignored."""
        self.bytes -= self._stored.pop(name, 0)

    def _shrink(self, room: int) -> list[str]:
        """Drop the least recently used until `room` more bytes fit."""
        removed = []
        while self._stored and self.bytes + room > self.limit_bytes:
            name = next(iter(self._stored))
            self.drop(name)
            removed.append(name)
        return removed

    def check(self) -> None:
        """Assert the invariants."""
        assert not self._stored.keys() & self._writing.keys(), "a page is stored and being written"
        assert self.bytes == sum(self._stored.values()) + sum(self._writing.values())
        assert self.bytes <= self.limit_bytes or not self._stored
