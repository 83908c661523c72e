"""Draws what `bench policy` found. Needs matplotlib (`pip install 'aioprefill[bench]'`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aioprefill.bench.report import Row

SHOWN = (
    ("ttft_mean_ms", "mean TTFT"),
    ("ttft_p50_ms", "median TTFT"),
    ("ttft_p99_ms", "p99 TTFT"),
    ("longest_wait_ms", "longest wait"),
)


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel per figure, one group of bars per utilisation. The suffix of `path` chooses the format."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'aioprefill[bench]'") from None
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    loads = list(dict.fromkeys(row["utilisation"] for row in rows))
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, len(SHOWN), squeeze=False)[0]
    width = 0.8 / len(policies)
    for panel, (key, title) in zip(panels, SHOWN, strict=True):
        for place, policy in enumerate(policies):
            found = {row["utilisation"]: row[key] / 1e3 for row in rows if row["policy"] == policy}
            where = [index + (place - (len(policies) - 1) / 2) * width for index in range(len(loads))]
            panel.bar(where, [found[load] for load in loads], width, label=policy)
        panel.set_title(title, fontsize=10)
        panel.set_xticks(range(len(loads)), [f"{load:g}" for load in loads])
        panel.set_xlabel("utilisation")
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("seconds")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(policies), frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
