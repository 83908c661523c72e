"""Packs spans into the flat index arrays of one forward. Needs numpy only.

The spans' tokens lie one after the other in one sequence of `total` tokens. Each span is attended in one
of three ways, chosen here:

- *fresh*: starts at position 0, so its keys and values are those just computed; nothing is gathered;
- *context*: several tokens behind an existing context (a chunk, a prefix hit): the whole context is gathered;
- *decode*: one token. Such spans are attended together, in groups of similar length, because a call per
  span would cost more than the padding.

Rows are those of `KVPool`: page * rows_per_page + slot, valid for all layers. Padding in a decode group
repeats the sequence's own first row, never a slot that this sequence does not own: a stale NaN there
would survive masking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioprefill.engine.port import ModelSpec, Span, TokenMask
from aioprefill.sampling_params import SamplingParams

Indices = npt.NDArray[np.int64]

# A decode group may gather this many padding rows, or this share of its rows, whichever is more: about
# what one more attention call costs.
_PADDING_ROWS = 2048
_PADDING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class FreshSpan:
    """Tokens [first, first + length) of the packed sequence, at positions [0, length)."""

    first: int
    length: int


@dataclass(frozen=True, slots=True)
class ContextSpan:
    """Tokens [first, first + length) of the packed sequence, at positions [start, start + length)."""

    first: int
    length: int
    start: int
    rows: Indices
    """Shape (start + length,): the sequence's rows in the pool."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token spans attended in one call."""

    tokens: Indices
    """Shape (size,): where the tokens are in the packed sequence."""
    rows: Indices
    """Shape (size, longest): rows in the pool, padded."""
    lengths: Indices
    """Shape (size,): context of each, the token itself included."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to sample."""

    span: int
    """Index of the span in the launch."""
    position: int
    """Position of the token that is sampled."""
    params: SamplingParams
    mask: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Everything about a forward that is known before the device runs."""

    spans: int
    token_ids: Indices
    """Shape (total,)."""
    positions: Indices
    """Shape (total,)."""
    slots: Indices
    """Shape (total,): the row in the pool that each token's K and V go to."""
    last: Indices
    """Shape (len(samples),): where in the packed sequence the logits to sample from are."""
    samples: tuple[SampleRow, ...]
    fresh: tuple[FreshSpan, ...]
    contexts: tuple[ContextSpan, ...]
    decodes: tuple[DecodeGroup, ...]


def pack(spans: Sequence[Span], spec: ModelSpec, num_pages: int, rows_per_page: int) -> PackedBatch:
    """Build the arrays. Raises `ValueError` for spans that no correct caller gives."""
    _check(spans, spec, num_pages)
    lengths = np.array([len(span.token_ids) for span in spans], dtype=np.int64)
    firsts = np.cumsum(lengths) - lengths
    rows = [_rows(span, spec.layout.page_size, rows_per_page) for span in spans]
    samples = tuple(
        SampleRow(index, span.end, span.sample, span.mask)
        for index, span in enumerate(spans)
        if span.sample is not None
    )
    fresh, contexts, decodes = [], [], []
    for index, span in enumerate(spans):
        first, length = int(firsts[index]), int(lengths[index])
        if length == 1:
            decodes.append((first, rows[index]))
        elif span.start == 0:
            fresh.append(FreshSpan(first, length))
        else:
            contexts.append(ContextSpan(first, length, span.start, rows[index]))
    return PackedBatch(
        spans=len(spans),
        token_ids=np.concatenate([span.token_ids for span in spans]).astype(np.int64),
        positions=np.concatenate([np.arange(span.start, span.end) for span in spans]),
        slots=np.concatenate([table[span.start :] for span, table in zip(spans, rows, strict=True)]),
        last=np.array([firsts[row.span] + lengths[row.span] - 1 for row in samples], dtype=np.int64),
        samples=samples,
        fresh=tuple(fresh),
        contexts=tuple(contexts),
        decodes=tuple(_group(decodes)),
    )


def _rows(span: Span, page_size: int, rows_per_page: int) -> Indices:
    """Rows of the sequence's tokens [0, end)."""
    pages = span.pages[: -(-span.end // page_size)].astype(np.int64) * rows_per_page
    return (pages[:, None] + np.arange(page_size)).ravel()[: span.end]


def _group(decodes: list[tuple[int, Indices]]) -> list[DecodeGroup]:
    """Cut single-token spans, longest first, into groups with little padding."""
    groups: list[DecodeGroup] = []
    pending: list[tuple[int, Indices]] = []
    padding = 0
    for first, rows in sorted(decodes, key=lambda item: -len(item[1])):
        if pending:
            longest = len(pending[0][1])
            padding += longest - len(rows)
            if padding > max(_PADDING_ROWS, _PADDING_SHARE * longest * (len(pending) + 1)):
                groups.append(_decode_group(pending))
                pending, padding = [], 0
        pending.append((first, rows))
    if pending:
        groups.append(_decode_group(pending))
    return groups


def _decode_group(members: list[tuple[int, Indices]]) -> DecodeGroup:
    lengths = np.array([len(rows) for _, rows in members], dtype=np.int64)
    table = np.empty((len(members), int(lengths[0])), dtype=np.int64)
    for line, (_, rows) in zip(table, members, strict=True):
        line[: len(rows)] = rows
        line[len(rows) :] = rows[0]
    return DecodeGroup(np.array([first for first, _ in members], dtype=np.int64), table, lengths)


def _check(spans: Sequence[Span], spec: ModelSpec, num_pages: int) -> None:
    if not spans:
        raise ValueError("a forward needs at least one span")
    for index, span in enumerate(spans):
        needed = spec.layout.pages_for(span.end)
        if len(span.token_ids) < 1 or span.start < 0:
            raise ValueError(f"span {index}: needs a token and start >= 0, got [{span.start}, {span.end})")
        if span.end > spec.context_length:
            raise ValueError(f"span {index}: ends at {span.end}, the context is {spec.context_length} tokens")
        if len(span.pages) < needed:
            raise ValueError(f"span {index}: needs {needed} pages to {span.end}, has {len(span.pages)}")
        pages = span.pages[:needed]
        if int(pages.min()) < 0 or int(pages.max()) >= num_pages:
            raise ValueError(f"span {index}: a page id is outside of 0..{num_pages - 1}")
        if int(span.token_ids.max()) >= spec.vocab_size:
            raise ValueError(f"span {index}: a token id is outside of 0..{spec.vocab_size - 1}")
