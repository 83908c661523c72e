"""The one shape that every benchmark prints.

Rows are a flat list, one object per measured combination, with the unit in each key. The summary holds
medians of per-alternation ratios: modes alternate within one run, because machines are noisy.
"""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PACKAGES = ("aioprefill", "torch", "transformers", "pyzmq", "uvloop", "msgspec", "nixl")


@dataclass(slots=True)
class Report:
    """What one benchmark found."""

    benchmark: str
    parameters: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    columns: Sequence[str] = ()
    """Columns of the table, where the rows have more than a screen takes."""

    def json(self) -> str:
        """One JSON object."""
        return json.dumps(
            {
                "benchmark": self.benchmark,
                "commit": commit(),
                "versions": versions(),
                "machine": machine(),
                "parameters": self.parameters,
                "rows": self.rows,
                "summary": self.summary,
            },
            indent=2,
        )

    def table(self) -> str:
        """The same for people."""
        from rich.console import Console
        from rich.table import Table

        console = Console(width=120, record=True, file=io.StringIO())
        table = Table(title=f"{self.benchmark}  {self.parameters}")
        columns = self.columns or list(dict.fromkeys(key for row in self.rows for key in row))
        for column in columns:
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*(_text(row.get(column)) for column in columns))
        console.print(table)
        for key, value in self.summary.items():
            console.print(f"{key}: {_text(value)}")
        return console.export_text()


def _text(value: Any) -> str:
    return "" if value is None else f"{value:,.3f}" if isinstance(value, float) else str(value)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value at or below which `percent` of the sorted values lie (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def commit() -> str:
    """Commit of the checkout that runs; "+" when it has changes; "" outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False)
        return run.stdout.strip() if run.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD")
    return head + "+" if head and git("status", "--porcelain", "--untracked-files=no") else head


def versions() -> dict[str, str]:
    """Versions of what matters for speed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.platform(terse=True)}
