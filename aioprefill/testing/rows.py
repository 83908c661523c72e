"""Which test covers which row: `python -m aioprefill.testing.rows [--tests FOLDER] [--json]`.

Tests are found by their names, without importing them. Exit code 1 when a row has none, or none with real
processes where it must, or a test names a row that does not exist.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

ROW_IDS = re.compile(r"test_((?:[A-Z]\d+_)+)")


@dataclass(slots=True)
class Row:
    """A row and the tests that name it, as `file::test`."""

    title: str
    tests: list[str] = field(default_factory=list)
    processes: str = ""
    """File that must have one of them; "": any has."""

    @property
    def missing(self) -> str:
        """What it lacks, in words; "" for nothing."""
        if not self.tests:
            return "NO TEST"
        shown = not self.processes or any(test.startswith(f"{self.processes}::") for test in self.tests)
        return "" if shown else f"NO TEST IN {self.processes}"


def load_rows() -> dict[str, Row]:
    """The rows by id, in order, without tests."""
    text = resources.files("aioprefill.testing").joinpath("rows.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text)
    rows = {row: Row(title) for row, title in found["rows"].items()}
    for row in found["processes"]["rows"]:
        rows[row].processes = found["processes"]["file"]
    return rows


def named_tests(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Every test below `folder` that names rows: (`file::test`, ids). Raises `SyntaxError` as `ast` does."""
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (ids := ROW_IDS.match(node.name)):
                yield f"{path.relative_to(folder)}::{node.name}", ids[1].rstrip("_").split("_")


def coverage(folder: Path) -> tuple[dict[str, Row], list[str]]:
    """Rows with their tests, and tests that name rows which do not exist."""
    rows, strangers = load_rows(), []
    for test, ids in named_tests(folder):
        for row in ids:
            if row in rows:
                rows[row].tests.append(test)
            else:
                strangers.append(test)
    return rows, strangers


def main(arguments: list[str] | None = None) -> int:
    """Print the rows; 0 when each has a test."""
    parser = argparse.ArgumentParser(prog="python -m aioprefill.testing.rows", description=__doc__)
    parser.add_argument("--tests", type=Path, default=Path("tests"), help="folder with the tests")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if not options.tests.is_dir():
        parser.error(f"there is no folder {options.tests}: run it at the top of a checkout, or give --tests")
    rows, strangers = coverage(options.tests)
    missing = [row for row, found in rows.items() if found.missing]
    if options.json:
        table = {name: {"title": row.title, "tests": row.tests} for name, row in rows.items()}
        print(json.dumps({"rows": table, "missing": missing, "unknown": strangers}, indent=2))
    else:
        for name, row in rows.items():
            print(f"{name:<4} {row.title}")
            print("\n".join(f"       {line}" for line in (*row.tests, row.missing) if line))
        print(f"{len(rows) - len(missing)} of {len(rows)} rows have tests", end="")
        print(f"; without: {', '.join(missing)}" if missing else "")
        print("".join(f"unknown row: {test}\n" for test in strangers), end="")
    return 1 if missing or strangers else 0


if __name__ == "__main__":
    sys.exit(main())
