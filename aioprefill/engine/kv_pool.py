"""The paged KV pool: one tensor, so that a page is one contiguous block and one transfer descriptor.

Indexing uses *rows*: the pool seen as (rows, kv_heads * head_dim), one row per token, layer and K/V. A
token in slot s of page p has row `p * rows_per_page + s` in the view `k_rows[layer]` or `v_rows[layer]`,
which differ only in where they begin. So one index tensor serves all layers.
"""

from __future__ import annotations

import psutil
import torch

from aioprefill.errors import ConfigError
from aioprefill.kv_layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEFAULT_KV_SHARE = 4
"""By default the pool takes one part in so many of the free memory."""
DEFAULT_KV_CEILING = 4 << 30
"""By default the pool takes at most so many bytes."""


def default_kv_memory(device: str | torch.device = "cpu") -> int:
    """Bytes for the pool when nobody says: a quarter of what is free on `device`, at most 4 GiB."""
    device = torch.device(device)
    on_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_cuda else psutil.virtual_memory().available
    return min(int(free) // DEFAULT_KV_SHARE, DEFAULT_KV_CEILING)


def pages_for_memory(layout: KVLayout, memory_bytes: int) -> int:
    """Pages that fit into `memory_bytes`. Raises `ConfigError` when not even one does."""
    pages = memory_bytes // layout.page_bytes
    if pages < 1:
        raise ConfigError(
            f"KV memory of {memory_bytes:,} bytes holds no page of {layout.page_bytes:,} bytes "
            f"({layout.page_size} tokens): give more memory or a smaller page size"
        )
    return pages


class KVPool:
    """Keys and values of all pages.

    `storage` has shape (num_pages, layers, 2, page_size, kv_heads, head_dim) and is contiguous, so page p
    is the `page_bytes` bytes at `base_address + p * page_bytes`. The memory is touched at once.

    Raises `ConfigError` when the memory cannot be had.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: str | torch.device = "cpu") -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.device = torch.device(device)
        self.rows_per_page = layout.layers * 2 * layout.page_size
        self.storage = self._allocate()
        rows = self.storage.view(-1, layout.kv_heads * layout.head_dim)
        size = layout.page_size
        self.k_rows = [rows[2 * layer * size :] for layer in range(layout.layers)]
        self.v_rows = [rows[(2 * layer + 1) * size :] for layer in range(layout.layers)]

    def __repr__(self) -> str:
        return f"<KVPool pages={self.num_pages} of {self.page_bytes:,} bytes on {self.device}>"

    def _allocate(self) -> torch.Tensor:
        layout = self.layout
        shape = (self.num_pages, layout.layers, 2, layout.page_size, layout.kv_heads, layout.head_dim)
        try:
            # zeros, not empty: page faults in the first transfer or forward would cost far more
            return torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=self.device)
        except (RuntimeError, MemoryError) as err:
            raise ConfigError(
                f"cannot allocate {self.num_pages * layout.page_bytes:,} bytes of KV memory on "
                f"{self.device}: give less KV memory ({err})"
            ) from err

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layout.page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.num_pages * self.page_bytes

    @property
    def base_address(self) -> int:
        """Address of page 0, on the host or on the device."""
        return self.storage.data_ptr()

    @property
    def memory(self) -> str:
        """ "DRAM" or "VRAM", as transfer libraries name it."""
        return "VRAM" if self.device.type == "cuda" else "DRAM"

    @property
    def device_id(self) -> int:
        """Index of the CUDA device, 0 on the host."""
        return self.device.index or 0
