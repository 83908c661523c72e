"""Where a KV pool lies, as far as a transfer must know. Pure; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MEMORY_KINDS = ("DRAM", "VRAM")


@dataclass(frozen=True, slots=True)
class PoolView:
    """One contiguous block of `num_pages` pages of `page_bytes` bytes; page i starts at i * page_bytes.

    Whoever makes the view keeps the memory alive until the transfer that uses it is closed.
    """

    base_address: int
    num_pages: int
    page_bytes: int
    memory: str = "DRAM"
    """One of `MEMORY_KINDS`."""
    device_id: int = 0
    """CUDA device of VRAM; 0 for DRAM."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.page_bytes

    def descriptors(self) -> npt.NDArray[np.uint64]:
        """One row (address, bytes, device id) for each page: shape (num_pages, 3)."""
        rows = np.empty((self.num_pages, 3), dtype=np.uint64)
        rows[:, 0] = np.uint64(self.base_address) + np.arange(self.num_pages, dtype=np.uint64) * np.uint64(
            self.page_bytes
        )
        rows[:, 1] = self.page_bytes
        rows[:, 2] = self.device_id
        return rows
