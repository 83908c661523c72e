"""What the tier needs of a store. `disk.DiskStore` is one; `aioprefill.testing.tier.MemoryStore` another.

Every call but `aclose` returns at once; the future ends on the store's own thread, in the order of the
calls. Nothing is raised for a page that cannot be stored or read: the outcome says so.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from aioprefill.engine.port import PageCopy

Blocks = npt.NDArray[np.uint8]
"""Pages on the host, shape (pages, page_bytes)."""


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """The first `written` pages are stored."""

    written: int
    error: str | None = None
    """Why the others are not, in words."""


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """The first pages asked for, up to the first one that could not be had."""

    blocks: Blocks
    error: str | None = None
    """Why that one could not, in words."""
    damaged: bool = False
    """It was there, and damaged; it has been removed."""


class TierStore(Protocol):
    """Pages by name."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that one page takes in the store."""

    def open(self) -> concurrent.futures.Future[list[tuple[str, int]]]:
        """Find what an earlier run left: (name, bytes), least recently used first.

        The future raises `OSError` when the store cannot be used at all.
        """

    def write(
        self, remove: Sequence[str], names: Sequence[str], copy: PageCopy | None
    ) -> concurrent.futures.Future[WriteOutcome]:
        """Remove some pages, then store those of `copy`, which must be ready, under `names`."""

    def read(self, names: Sequence[str]) -> concurrent.futures.Future[ReadOutcome]:
        """Read pages; each one read counts as used."""

    async def aclose(self) -> None:
        """Wait for what is queued, at most a few seconds; then end the thread. Idempotent."""
