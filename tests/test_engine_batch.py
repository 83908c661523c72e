"""Packing: where each token's KV goes, what is attended how, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from aioprefill.engine.batch import pack
from aioprefill.engine.port import ModelSpec, Span
from aioprefill.kv_layout import KVLayout
from aioprefill.sampling_params import SamplingParams

LAYOUT = KVLayout("x", layers=3, kv_heads=1, head_dim=8, page_size=4, dtype="float32")
SPEC = ModelSpec("x", vocab_size=100, context_length=64_000, eos_token_ids=(), layout=LAYOUT)
PAGES = 20_000
PER_PAGE = LAYOUT.layers * 2 * LAYOUT.page_size


def span(count: int, start: int, pages: list[int], *, sample: bool = True) -> Span:
    """A span of tokens 1, 2, 3, …"""
    ids = np.arange(1, count + 1, dtype=np.uint32)
    return Span(ids % 100, start, np.array(pages, dtype=np.int32), SamplingParams() if sample else None)


def test_tokens_positions_and_slots_follow_the_page_tables() -> None:
    """Each new token has its position, and the row of its page and place."""
    batch = pack([span(3, 0, [7]), span(4, 3, [5, 2])], SPEC, PAGES, PER_PAGE)
    assert batch.token_ids.tolist() == [1, 2, 3, 1, 2, 3, 4]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    seven, five, two = (page * PER_PAGE for page in (7, 5, 2))
    assert batch.slots.tolist() == [seven, seven + 1, seven + 2, five + 3, two, two + 1, two + 2]


def test_spans_are_attended_by_their_kind() -> None:
    """From 0: fresh; behind a context: gathered; one token: decode, wherever it starts."""
    batch = pack([span(3, 0, [0]), span(2, 4, [1, 2]), span(1, 0, [3]), span(1, 5, [4, 5])], SPEC, PAGES, 24)
    assert [(s.first, s.length) for s in batch.fresh] == [(0, 3)]
    assert [(s.first, s.length, s.start, len(s.rows)) for s in batch.contexts] == [(3, 2, 4, 6)]
    (group,) = batch.decodes
    assert sorted(group.tokens.tolist()) == [5, 6]


def test_only_wanted_tokens_are_sampled_at_the_position_behind_their_span() -> None:
    """A middle chunk has no row; the others have the last token's place, in order."""
    batch = pack([span(3, 0, [0], sample=False), span(2, 4, [1, 2]), span(1, 0, [3])], SPEC, PAGES, PER_PAGE)
    assert [(row.span, row.position) for row in batch.samples] == [(1, 6), (2, 1)]
    assert batch.last.tolist() == [4, 5]


def test_a_batch_of_middle_chunks_samples_nothing() -> None:
    """No rows, but a whole forward."""
    batch = pack([span(3, 0, [0], sample=False)], SPEC, PAGES, PER_PAGE)
    assert batch.samples == ()
    assert batch.last.shape == (0,)


def test_decode_padding_repeats_a_row_of_the_same_sequence() -> None:
    """Padding never points at a slot that another sequence may have left a NaN in."""
    batch = pack([span(1, 1, [9]), span(1, 6, [4, 5])], SPEC, PAGES, PER_PAGE)
    (group,) = batch.decodes
    assert group.lengths.tolist() == [7, 2]
    assert group.rows.shape == (2, 7)
    nine = 9 * PER_PAGE
    assert group.rows[1].tolist() == [nine, nine + 1, *[nine] * 5]


def test_decode_groups_pad_little() -> None:
    """Long and short sequences are not attended together; every sequence is attended once."""
    lengths = [8_000, 7_900, 5_000, 40, 30, 2, 1, 7_000]
    spans = [span(1, length - 1, list(range(LAYOUT.pages_for(length)))) for length in lengths]
    groups = pack(spans, SPEC, PAGES, PER_PAGE).decodes
    assert sorted(t for group in groups for t in group.tokens.tolist()) == list(range(len(spans)))
    for group in groups:
        padding = group.rows.size - int(group.lengths.sum())
        assert padding <= max(2048, 0.25 * group.rows.size)
        assert [lengths[token] for token in group.tokens] == group.lengths.tolist()
    assert len(groups) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (span(0, 0, [0]), "needs a token"),
        (span(1, -1, [0]), "start >= 0"),
        (span(5, 0, [0]), "needs 2 pages to 5, has 1"),
        (span(1, 0, [PAGES]), "page id"),
        (span(1, 0, [-1]), "page id"),
        (span(2, 63_999, list(range(16_001))), "the context is 64000 tokens"),
        (Span(np.array([100], dtype=np.uint32), 0, np.array([0], dtype=np.int32), None), "token id"),
    ],
)
def test_spans_that_would_harm_other_sequences_are_refused(bad: Span, message: str) -> None:
    """A bug of the caller ends in an exception, not in somebody else's page or a sticky device error."""
    with pytest.raises(ValueError, match=f"span 1: .*{message}"):
        pack([span(1, 0, [0]), bad], SPEC, PAGES, PER_PAGE)


def test_an_empty_batch_is_refused() -> None:
    """There is nothing to run."""
    with pytest.raises(ValueError, match="at least one span"):
        pack([], SPEC, PAGES, PER_PAGE)
