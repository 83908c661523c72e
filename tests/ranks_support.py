"""Helpers of the rank tests: groups without torch, in one process or in several."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aioprefill.errors import RankError
from aioprefill.ranks.place import RankPlace
from aioprefill.ranks.wires import Wires


class MemoryBoard:
    """A `Board` for ranks that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def publish(self, key: str, value: bytes) -> None:
        """See `Board.publish`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def lookup(self, key: str, rank: int = 0) -> bytes:
        """See `Board.lookup`."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout=10):
                raise RankError(rank, f"did not publish {key}")
            return self._values[key]


@dataclass(frozen=True)
class FakeGroup:
    """What links and watch need of a group."""

    place: RankPlace
    wires: Wires


@contextmanager
def groups(size: int) -> Iterator[list[FakeGroup]]:
    """A group of each rank, all in this process."""
    board = MemoryBoard()

    def join(rank: int) -> FakeGroup:
        place = RankPlace(rank, size, rank)
        return FakeGroup(place, Wires.exchange(place, board))

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        made = list(pool.map(join, range(size)))
    try:
        yield made
    finally:
        for group in made:
            group.wires.close()
