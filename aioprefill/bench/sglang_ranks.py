"""What the ranks of one measurement of the benchmark `sglang` have seen, as one. Pure.

All ranks are on one machine, whose monotonic clock they share. Requests come in at rank 0, which answers
them, so that intake is what it sees. A forward is over, and a transfer has succeeded, where it is so on the
last rank; counters of CPU are means over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

MEANS = (
    "main_thread_cpu_percent",
    "process_cpu_percent",
    "host_call_cpu_percent",
    "passes_per_s",
    "side_progress_percent",
    "idle_cpu_percent",
)


def combined(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Times from the last rank's due moment on: `detect_us` to rank 0, `detect_last_rank_us` to the last one.

    A loop that does not ask the other ranks may be at a result on rank 0 before: such a time is negative.
    """
    first = ranks[0]
    opened_ns, closed_ns = first["window_ns"]
    due_ns = _latest([one["due_ns"] for one in ranks])
    last_ns = _latest([one["detected_ns"] for one in ranks])
    success_ns: dict[int, int] = {}
    for one in ranks:
        for room, at_ns, _ in one["transfers"]:
            success_ns[room] = max(at_ns, success_ns.get(room, 0))
    return {
        **{key: mean(one[key] for one in ranks) for key in MEANS},
        "seconds": (closed_ns - opened_ns) / 1e9,
        "intake_us": first["intake_us"],
        "dispatch_us": first["dispatch_us"],
        "detect_us": _apart_us(first["detected_ns"], due_ns),
        "detect_last_rank_us": _apart_us(last_ns, due_ns),
        "retire_us": [
            (retired_ns - success_ns[room]) / 1e3
            for room, _, retired_ns in first["transfers"]
            if opened_ns <= success_ns[room] < closed_ns
        ],
        "load_average": first["load_average"],
    }


def _latest(by_rank: Sequence[Sequence[int]]) -> list[int]:
    return [max(times) for times in zip(*by_rank, strict=True)]


def _apart_us(later: Sequence[int], earlier: Sequence[int]) -> list[float]:
    return [(a - b) / 1e3 for a, b in zip(later, earlier, strict=True)]
