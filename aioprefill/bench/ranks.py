"""Two tensor-parallel ranks that wait for forwards: what it costs, and how soon the end is noticed.

Each rank has a fake device whose forwards take `--forward-ms` and up to `--skew-ms` more, other times on
each rank; requests come from another process all along. Modes alternate: `aioprefill` (rank 0 serves over
the real wire, rank 1 follows, one vote per forward) and `spin` (a plain loop that makes one broadcast of
what came in and one MIN all-reduce of readiness per poll, without sleeping, as polling schedulers do at
TP > 1).

Detection counts from the moment when the last rank's device is done to the moment when rank 0 knows it of
all. All processes read one monotonic clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from aioprefill.bench.report import Report, Row, percentile

MODES = ("aioprefill", "spin")
RANKS = 2
LOWER_IS_BETTER = ("cpu_percent_per_rank", "detect_p50_us", "detect_p99_us", "intake_p50_us", "intake_p99_us")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--forward-ms", type=float, default=200.0, help="of each forward")
    parser.add_argument("--skew-ms", type=float, default=5.0, help="most that a rank's forward takes longer")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--tokens", type=int, default=500, help="of each prompt")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each measurement")
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--as-rank", choices=MODES, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> Report:
    """Measure; or be one rank."""
    if options.as_rank:
        from aioprefill.bench import ranks_process

        ranks_process.be_rank(options)
        sys.exit(0)
    report = Report(
        "ranks",
        {
            "ranks": RANKS,
            "forward_ms": options.forward_ms,
            "skew_ms": options.skew_ms,
            "rate_per_s": options.rate,
            "prompt_tokens": options.tokens,
            "seconds": options.seconds,
            "alternations": options.alternations,
        },
    )
    for alternation in range(options.alternations):
        for mode in MODES:
            report.rows.append(row(mode, alternation, measure(mode, options)))
    for key in LOWER_IS_BETTER:
        values = {mode: [one[key] for one in report.rows if one["mode"] == mode] for mode in MODES}
        for mode in MODES:
            report.summary[f"{mode}_{key}"] = round(statistics.median(values[mode]), 2)
        ratios = [ours / theirs for ours, theirs in zip(values["aioprefill"], values["spin"], strict=True)]
        report.summary[f"{key}_ratio"] = round(statistics.median(ratios), 4)
    ours = [one["collectives_per_forward"] for one in report.rows if one["mode"] == "aioprefill"]
    report.summary["aioprefill_collectives_per_forward"] = max(ours)
    return report


def measure(mode: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all ranks once; what each of them has measured."""
    words = [
        *("--as-rank", mode),
        *("--forward-ms", str(options.forward_ms)),
        *("--skew-ms", str(options.skew_ms)),
        *("--rate", str(options.rate)),
        *("--tokens", str(options.tokens)),
        *("--seconds", str(options.seconds)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "aioprefill.bench", "ranks", *words],
                stdout=subprocess.PIPE,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "AIOPREFILL_RANK_STORE": str(Path(folder) / "store"),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(RANKS)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"ranks ended with {[process.returncode for process in processes]}")
    return [json.loads(output) for output in outputs]


def row(mode: str, alternation: int, ranks: list[dict[str, Any]]) -> Row:
    """One measurement. The first forwards are left out: they come while the ranks start."""
    ready = zip(*(rank["ready_ns"] for rank in ranks), strict=False)
    detected = zip(ranks[0]["detected_ns"], ready, strict=False)
    detect_us = [(seen - max(each)) / 1e3 for seen, each in detected][3:]
    return {
        "mode": mode,
        "alternation": alternation,
        "forwards": len(detect_us),
        "requests": len(ranks[0]["intake_us"]),
        "cpu_percent_per_rank": round(statistics.mean(rank["cpu_percent"] for rank in ranks), 2),
        "detect_p50_us": round(percentile(detect_us, 50), 1),
        "detect_p99_us": round(percentile(detect_us, 99), 1),
        "intake_p50_us": round(percentile(ranks[0]["intake_us"], 50), 1),
        "intake_p99_us": round(percentile(ranks[0]["intake_us"], 99), 1),
        "collectives_per_forward": round(ranks[0]["collectives"] / max(1, ranks[0]["forwards"]), 2),
    }
