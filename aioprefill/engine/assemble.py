"""Putting pages in order that the ranks of a prefill server wrote as shards, one after the other."""

from __future__ import annotations

import torch

SCRATCH_BYTES = 64 << 20
"""Pages are put in order in place, so many bytes of them at a time are copied first."""


def assemble(
    storage: torch.Tensor, pages: torch.Tensor, shards: int, *, scratch_bytes: int = SCRATCH_BYTES
) -> None:
    """Reorder pages in place, on the current stream.

    `storage` has shape (num_pages, layers, 2, page_size, kv_heads, head_dim) and is contiguous. Each of
    `pages` (shape (n,), int64, on its device, none twice) holds `shards` contiguous blocks of shape (layers,
    2, page_size, kv_heads / shards, head_dim); afterwards shard r's heads begin at r * kv_heads / shards.
    """
    num_pages, layers, kinds, page_size, kv_heads, head_dim = storage.shape
    slots, width = layers * kinds * page_size, kv_heads // shards * head_dim
    ordered = storage.view(num_pages, slots, shards, width)
    page_bytes = storage[0].numel() * storage.element_size()
    block = max(1, scratch_bytes // page_bytes)
    for start in range(0, len(pages), block):
        part = pages[start : start + block]
        written = storage.index_select(0, part).view(len(part), shards, slots, width)
        ordered.index_copy_(0, part, written.transpose(1, 2))
