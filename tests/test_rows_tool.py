"""The list of rows and their tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aioprefill.testing.rows import load_rows, main


def write_tests(folder: Path, names: list[str]) -> None:
    """A test file with one empty test per name; the second half are methods and coroutines."""
    half = len(names) // 2
    lines = [f"def {name}(): ..." for name in names[:half]]
    lines += ["class TestRows:", *(f"    async def {name}(self): ..." for name in names[half:])]
    (folder / "sub").mkdir()
    with_processes = [row for row, found in load_rows().items() if found.processes]
    shown = "\n".join(f"def test_{row}_with_processes(): ..." for row in with_processes)
    (folder / "test_ranks_rows.py").write_text(shown)
    (folder / "sub" / "test_made.py").write_text("import nothing_of_that_name\n" + "\n".join(lines))


def test_complete_rows_pass_and_each_is_listed_with_its_tests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One test per row, and two rows in one name: exit code 0."""
    write_tests(tmp_path, [f"test_{row}_works" for row in load_rows()] + ["test_T5_C1_both"])
    assert main(["--tests", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["missing"] == found["unknown"] == []
    both = "sub/test_made.py::test_T5_C1_both"
    assert found["rows"]["C1"]["tests"] == ["sub/test_made.py::test_C1_works", both]
    assert found["rows"]["T5"]["tests"] == ["sub/test_made.py::test_T5_works", both]


def test_a_row_without_a_test_fails_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """L1 is not covered by a test of L10, nor by a name that only contains it."""
    write_tests(tmp_path, [f"test_{row}_works" for row in load_rows() if row != "L1"] + ["test_what_L1_does"])
    assert main(["--tests", str(tmp_path)]) == 1
    assert "; without: L1\n" in capsys.readouterr().out


def test_a_row_that_is_not_shown_with_processes_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though it has a test elsewhere."""
    write_tests(tmp_path, [f"test_{row}_works" for row in load_rows()])
    (tmp_path / "test_ranks_rows.py").write_text("def test_L8_P1_A4_R1_R3_with_processes(): ...")
    assert main(["--tests", str(tmp_path)]) == 1
    assert "NO TEST IN test_ranks_rows.py\n" in (printed := capsys.readouterr().out)
    assert "; without: R2\n" in printed


def test_a_test_of_an_unknown_row_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slip of the pen in a test's name is not taken for coverage."""
    write_tests(tmp_path, [f"test_{row}_works" for row in load_rows()] + ["test_L99_x"])
    assert main(["--tests", str(tmp_path)]) == 1
    assert "unknown row: sub/test_made.py::test_L99_x" in capsys.readouterr().out


def test_a_folder_that_does_not_exist_is_said_to_be_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No empty list, no traceback."""
    with pytest.raises(SystemExit):
        main(["--tests", str(tmp_path / "none")])
    assert "there is no folder" in capsys.readouterr().err
