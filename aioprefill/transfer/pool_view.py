"""Where a KV pool lies, as far as a transfer must know. Pure; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MEMORY_KINDS = ("DRAM", "VRAM")


@dataclass(frozen=True, slots=True)
class PoolView:
    """`num_pages` pages of `page_bytes` bytes each; page i starts at base_address + i * step.

    A process's own pool is one contiguous block. Seen by a rank whose pages hold a shard, another process's
    pool has gaps: of each whole page there is the part that this rank fills.

    Whoever makes the view keeps the memory alive until the transfer that uses it is closed.
    """

    base_address: int
    num_pages: int
    page_bytes: int
    memory: str = "DRAM"
    """One of `MEMORY_KINDS`."""
    device_id: int = 0
    """CUDA device of VRAM; 0 for DRAM."""
    stride: int | None = None
    """Bytes from the start of a page to that of the next; None: page_bytes."""

    @property
    def step(self) -> int:
        """Bytes from the start of a page to that of the next."""
        return self.page_bytes if self.stride is None else self.stride

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    def descriptors(self) -> npt.NDArray[np.uint64]:
        """One row (address, bytes, device id) for each page: shape (num_pages, 3)."""
        rows = np.empty((self.num_pages, 3), dtype=np.uint64)
        rows[:, 0] = np.uint64(self.base_address) + np.arange(self.num_pages, dtype=np.uint64) * np.uint64(
            self.step
        )
        rows[:, 1] = self.page_bytes
        rows[:, 2] = self.device_id
        return rows
