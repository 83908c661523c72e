"""Every row of behaviour has a test that names it."""

from __future__ import annotations

from pathlib import Path

from aioprefill.testing.rows import coverage


def test_every_row_has_a_test() -> None:
    """The list is complete, and no test names a row that does not exist."""
    rows, strangers = coverage(Path(__file__).parent)
    assert {name: row.missing for name, row in rows.items() if row.missing} == {}
    assert strangers == []
