"""A storage tier's store in memory, on the running loop's clock."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence

import numpy as np

from aioprefill.engine.port import PageCopy
from aioprefill.native.tier.store import Blocks, ReadOutcome, WriteOutcome


class MemoryStore:
    """Implements `TierStore`. `pages` outlives it: give it to the next store, as a disk would.

    Reads take `read_s` seconds, writes `write_s`; None: until the test ends the call itself, which then is
    in `reads` or `writes`. `fail_writes` and `fail_open` are reasons for them to fail.
    """

    def __init__(
        self,
        pages: dict[str, Blocks] | None = None,
        *,
        page_bytes: int = 128,
        read_s: float | None = 0.0,
        write_s: float | None = 0.0,
    ) -> None:
        self.pages = {} if pages is None else pages
        self.read_s = read_s
        self.write_s = write_s
        self.fail_writes: str | None = None
        self.fail_open: str | None = None
        self.reads: list[Callable[[], None]] = []
        """Reads under way that the test has to end, by calling them; likewise `writes`."""
        self.writes: list[Callable[[], None]] = []
        self.read_calls: list[tuple[str, ...]] = []
        self.damaged: set[str] = set()
        """Names that turn out to be damaged."""
        self.closed = False
        self._page_bytes = page_bytes

    @property
    def stored_bytes(self) -> int:
        """See `TierStore.stored_bytes`."""
        return self._page_bytes

    def open(self) -> concurrent.futures.Future[list[tuple[str, int]]]:
        """See `TierStore.open`."""
        future: concurrent.futures.Future[list[tuple[str, int]]] = concurrent.futures.Future()
        if self.fail_open is not None:
            future.set_exception(OSError(self.fail_open))
        else:
            future.set_result([(name, self._page_bytes) for name in self.pages])
        return future

    def write(
        self, remove: Sequence[str], names: Sequence[str], copy: PageCopy | None
    ) -> concurrent.futures.Future[WriteOutcome]:
        """See `TierStore.write`."""
        assert not self.closed
        future: concurrent.futures.Future[WriteOutcome] = concurrent.futures.Future()

        def end() -> None:
            if self.fail_writes is not None:
                future.set_result(WriteOutcome(0, self.fail_writes))
                return
            for name in remove:
                self.pages.pop(name, None)
            for name, block in zip(names, copy.blocks() if copy is not None else (), strict=True):
                self.pages[name] = block.copy()
            future.set_result(WriteOutcome(len(names)))

        self._later(self.write_s, end, self.writes)
        return future

    def read(self, names: Sequence[str]) -> concurrent.futures.Future[ReadOutcome]:
        """See `TierStore.read`."""
        assert not self.closed
        self.read_calls.append(tuple(names))
        future: concurrent.futures.Future[ReadOutcome] = concurrent.futures.Future()
        self._later(self.read_s, lambda: future.set_result(self._read(names)), self.reads)
        return future

    def _read(self, names: Sequence[str]) -> ReadOutcome:
        blocks = np.empty((len(names), self._page_bytes), dtype=np.uint8)
        for number, name in enumerate(names):
            if name not in self.pages:
                return ReadOutcome(blocks[:number], f"{name[:12]}: No such file or directory")
            if name in self.damaged:
                del self.pages[name]
                return ReadOutcome(blocks[:number], f"{name[:12]} is damaged", damaged=True)
            blocks[number] = self.pages[name]
        return ReadOutcome(blocks)

    @staticmethod
    def _later(seconds: float | None, end: Callable[[], None], by_hand: list[Callable[[], None]]) -> None:
        if seconds is None:
            by_hand.append(end)
        else:
            asyncio.get_running_loop().call_later(seconds, end)

    async def aclose(self) -> None:
        """See `TierStore.aclose`."""
        self.closed = True
