"""Causal masks for blocks of queries behind a context, cut out of one template per window.

A mask depends only on how far a key is from a query. So the template of a window has one row per query
of a block and one column per key up to the longest context, and the mask of any block is a slice of it.
"""

from __future__ import annotations

import torch

_GROWTH = 1024


class CausalMasks:
    """Additive masks (0 or -inf) in one dtype on one device. Not thread-safe."""

    def __init__(self, block: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block = block
        """Most queries of one block."""
        self._dtype = dtype
        self._device = device
        self._templates: dict[int | None, torch.Tensor] = {}

    def get(self, queries: int, before: int, keys: int, window: int | None) -> torch.Tensor:
        """Mask of shape (queries, keys) for queries at positions [before, before + queries).

        The keys are those at the last `keys` positions up to before + queries. A key is seen when it is
        at most the query's position and, with a window, less than `window` positions back.
        """
        template = self._templates.get(window)
        if template is None or template.shape[1] - self.block < before:
            template = self._make(before, window)
            self._templates[window] = template
        # column c of row r is the key at distance r - (c - reach), where reach is the number of columns
        # in front of the block
        reach = template.shape[1] - self.block
        end = reach + queries
        mask = template[:queries, end - keys : end]
        # kernels on CUDA demand aligned rows
        return mask.contiguous() if self._device.type == "cuda" else mask

    def _make(self, before: int, window: int | None) -> torch.Tensor:
        reach = -(-before // _GROWTH) * _GROWTH
        rows = torch.arange(self.block, device=self._device)[:, None]
        columns = torch.arange(-reach, self.block, device=self._device)[None]
        distance = rows - columns
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(distance.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))
