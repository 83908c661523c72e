"""Attention over the paged KV pool, for a packed batch, as a function that transformers' models call.

`AttentionInterface` hands over the keyword argument `paged` that the engine gives to the model; it is a
`PagedAttention` here (or the recorder that examines a model at load). Nothing in the per-layer path waits
for the device or builds index tensors: all that is known before the forward is made once, in `__init__`.

A windowed layer whose window is shorter than a span's context attends by blocks of queries with a mask;
all others use the causal kernels.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from aioprefill.engine.batch import ContextSpan, DecodeGroup, PackedBatch
from aioprefill.engine.kv_pool import KVPool
from aioprefill.engine.masks import CausalMasks
from aioprefill.errors import ModelError

ATTENTION_NAME = "aioprefill_paged"
# Queries per masked call: on CPU small enough to skip most of the keys that a causal mask hides.
_BLOCK = {"cpu": 256, "cuda": 1024}


class Attends(Protocol):
    """What attention layers are handed in the keyword argument `paged`."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of one layer.

        query: (1, heads, total, head_dim), key and value: (1, kv_heads, total, head_dim); `arguments` are
        the keyword arguments of the model's call. Returns (1, total, heads, head_dim).
        """


def _interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    paged: Attends | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls, once per layer."""
    if paged is None:
        raise ModelError(f"{type(module).__name__} does not pass keyword arguments on to its attention")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} brings an attention mask of its own")
    return paged.attend(module, query, key, value, arguments), None


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, _interface)


def make_masks(pool: KVPool) -> CausalMasks:
    """Masks to share between the forwards over `pool`."""
    return CausalMasks(_BLOCK[pool.device.type], pool.storage.dtype, pool.device)


class _Context:
    """A span that attends to gathered context."""

    def __init__(self, span: ContextSpan, rows: torch.Tensor) -> None:
        self.first, self.length, self.start = span.first, span.length, span.start
        self.rows = rows


class _Decodes:
    """A decode group on the device."""

    def __init__(self, group: DecodeGroup, to_device: Any, dtype: torch.dtype) -> None:
        self.tokens: torch.Tensor = to_device(group.tokens)
        self.rows: torch.Tensor = to_device(group.rows.reshape(-1))
        self.size, self.longest = group.rows.shape
        self._lengths: torch.Tensor = to_device(group.lengths)
        self._uniform = int(group.lengths[-1]) == self.longest
        self._dtype = dtype
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Additive mask of shape (size, 1, 1, longest); None when every key is seen."""
        if window is not None and window >= self.longest:
            window = None
        if window not in self._masks:
            self._masks[window] = self._make(window)
        return self._masks[window]

    def _make(self, window: int | None) -> torch.Tensor | None:
        if self._uniform and window is None:
            return None
        keys = torch.arange(self.longest, device=self._lengths.device)[None]
        hidden = keys >= self._lengths[:, None]
        if window is not None:
            hidden |= keys < self._lengths[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]


class PagedAttention:
    """One forward's attention: writes K and V of its tokens to the pool, then attends each span.

    Sequences may share pages, also with one that is written by this very forward.
    """

    def __init__(self, batch: PackedBatch, pool: KVPool, masks: CausalMasks, to_device: Any) -> None:
        """`to_device` turns an int64 numpy array into a tensor on the pool's device without waiting."""
        self._pool = pool
        self._masks = masks
        self._dtype = pool.storage.dtype
        self._slots: torch.Tensor = to_device(batch.slots)
        self._fresh = batch.fresh
        self._contexts = [_Context(span, to_device(span.rows)) for span in batch.contexts]
        self._decodes = [_Decodes(group, to_device, self._dtype) for group in batch.decodes]
        self._one_fresh = len(batch.fresh) == batch.spans == 1
        layout = pool.layout
        self._kv_heads, self._head_dim = layout.kv_heads, layout.head_dim

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """See `Attends.attend`."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        scale: float | None = arguments.get("scaling")
        window: int | None = arguments.get("sliding_window")
        total = query.shape[2]
        k_rows, v_rows = self._pool.k_rows[layer], self._pool.v_rows[layer]
        k_rows.index_copy_(0, self._slots, key[0].transpose(0, 1).reshape(total, -1))
        v_rows.index_copy_(0, self._slots, value[0].transpose(0, 1).reshape(total, -1))
        if self._one_fresh:
            return self._causal(query, key, value, scale, window).transpose(1, 2)
        out = query.new_empty(total, query.shape[1], self._head_dim)
        for fresh in self._fresh:
            span = slice(fresh.first, fresh.first + fresh.length)
            q, k, v = query[:, :, span], key[:, :, span], value[:, :, span]
            out[span] = self._causal(q, k, v, scale, window)[0].transpose(0, 1)
        for context in self._contexts:
            span = slice(context.first, context.first + context.length)
            k, v = self._gather(k_rows, context.rows, 1), self._gather(v_rows, context.rows, 1)
            self._blocks(out[span], query[:, :, span], k, v, context.start, scale, window)
        for group in self._decodes:
            k = self._gather(k_rows, group.rows, group.size)
            v = self._gather(v_rows, group.rows, group.size)
            self._decode(out, query, k, v, group, scale, window)
        return out[None]

    def _gather(self, rows: torch.Tensor, index: torch.Tensor, sequences: int) -> torch.Tensor:
        """(sequences, kv_heads, tokens, head_dim)."""
        gathered = rows.index_select(0, index)
        return gathered.view(sequences, -1, self._kv_heads, self._head_dim).transpose(1, 2)

    def _causal(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """A span at position 0: (1, heads, length, head_dim)."""
        length = q.shape[2]
        if window is not None and window < length:
            out = q.new_empty(length, q.shape[1], self._head_dim)
            self._blocks(out, q, k, v, 0, scale, window)
            return out.transpose(0, 1)[None]
        k, v, grouped = self._grouped(q, k, v, masked=False)
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)

    def _blocks(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        start: int,
        scale: float | None,
        window: int | None,
    ) -> None:
        """Queries at positions [start, …) over keys at [0, …), by blocks, into out (length, heads, d)."""
        length = q.shape[2]
        k, v, grouped = self._grouped(q, k, v, masked=True)
        for low in range(0, length, self._masks.block):
            high = min(low + self._masks.block, length)
            before, end = start + low, start + high
            begin = 0 if window is None else max(0, before - window + 1)
            mask = self._masks.get(high - low, before, end - begin, window)
            block = scaled_dot_product_attention(
                q[:, :, low:high],
                k[:, :, begin:end],
                v[:, :, begin:end],
                attn_mask=mask,
                scale=scale,
                enable_gqa=grouped,
            )
            out[low:high] = block[0].transpose(0, 1)

    def _grouped(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, masked: bool
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """K and V to give to the kernel, and `enable_gqa`.

        On CUDA only the flash kernel knows grouped heads; it takes no mask and no float32. Anything else
        would fall back to a kernel that stores all scores, so there K and V are repeated.
        """
        repeats = q.shape[1] // k.shape[1]
        if repeats == 1:
            return k, v, False
        if q.device.type == "cpu" or not (masked or q.dtype == torch.float32):
            return k, v, True
        return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), False

    def _decode(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: _Decodes,
        scale: float | None,
        window: int | None,
    ) -> None:
        """One token each. Heads that share keys stand as queries beside each other: no key is repeated."""
        heads = query.shape[1]
        q = query[0].transpose(0, 1).index_select(0, group.tokens)
        q = q.view(group.size, self._kv_heads, heads // self._kv_heads, self._head_dim)
        o = scaled_dot_product_attention(q, k, v, attn_mask=group.mask(window), scale=scale)
        out.index_copy_(0, group.tokens, o.reshape(group.size, heads, self._head_dim))
