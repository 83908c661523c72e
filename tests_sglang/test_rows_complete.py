"""Every row of the sections that concern SGLang has a test here that names it."""

from __future__ import annotations

from pathlib import Path

from aioprefill.testing.rows import load_rows, named_tests

SECTIONS = ("L", "P", "C", "A")
"""The loop; pauses and weights; chunked and optimistic prefill; aborts and timeouts."""


def test_every_row_that_sglang_has_is_tested_inside_it() -> None:
    """All of those sections, and no test names a row that does not exist."""
    rows = load_rows()
    named = {row for _, ids in named_tests(Path(__file__).parent) for row in ids}
    assert sorted(row for row in rows if row[0] in SECTIONS and row not in named) == []
    assert sorted(named - rows.keys()) == []
