"""What the benchmark `sglang` is to reach, and whether its rows do. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from aioprefill.bench.report import Row
from aioprefill.bench.sglang_server import BLOCKING, MODES, PLUGIN, POLLING

ByMode = Mapping[str, Row]
"""The rows of one alternation."""
Ratios = dict[str, tuple[float, Callable[[ByMode], float]]]
"""Ratios of one alternation, the plugin's figure over a stock loop's, and the most that each may be."""

IDLE_KEYS = {
    "idle_cpu_percent": "idle_cpu_worst_percent",
    "idle_process_cpu_percent": "idle_process_cpu_worst_percent",
}
"""Of a summary, and of rows: the rank with the most. The whole process counts at more ranks than one, where
other threads wait as well."""
IDLE_LIMIT_PERCENT = 10.0
INTAKE_LIMIT_US = 500.0
TARGETS_AT_MS = (100.0, 500.0)


def _ratio(by_mode: ByMode, key: str, to: str) -> float:
    theirs = by_mode[to][key]
    return float(by_mode[PLUGIN][key] / theirs) if theirs else float("inf")


def _to_better(by_mode: ByMode, key: str) -> float:
    return max(_ratio(by_mode, key, mode) for mode in (BLOCKING, POLLING))


ONE_RANK: Ratios = {
    "wait_cpu_to_polling": (0.5, lambda by: _ratio(by, "wait_cpu_percent", POLLING)),
    "cpu_to_blocking": (1.2, lambda by: _ratio(by, "main_thread_cpu_percent", BLOCKING)),
    "transfer_retire_p99_to_better": (0.2, lambda by: _to_better(by, "transfer_retire_p99_us")),
    "detect_p50_to_polling": (0.7, lambda by: _ratio(by, "detect_p50_us", POLLING)),
    "detect_p95_to_polling": (1.5, lambda by: _ratio(by, "detect_p95_us", POLLING)),
}
MORE_RANKS: Ratios = {
    "cpu_to_polling": (0.7, lambda by: _ratio(by, "main_thread_cpu_percent", POLLING)),
    "process_cpu_to_polling": (0.7, lambda by: _ratio(by, "process_cpu_percent", POLLING)),
    "transfer_retire_p50_to_better": (0.2, lambda by: _to_better(by, "transfer_retire_p50_us")),
    "detect_p50_to_polling": (2.5, lambda by: _ratio(by, "detect_p50_us", POLLING)),
    "detect_last_rank_p50_to_polling": (2.5, lambda by: _ratio(by, "detect_last_rank_p50_us", POLLING)),
}


class Summary:
    """Medians over the alternations; `missed` names what is not reached of what must be."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.missed: list[str] = []

    def put(self, key: str, values: list[float], limit: float | None = None) -> float:
        """The median, which must not be above the limit."""
        self.found[key] = median = round(statistics.median(values), 4)
        if limit is not None and median > limit:
            self.missed.append(f"{key} {median} > {limit}")
        return median


def summary(rows: list[Row]) -> dict[str, Any]:
    """By delay; keys of more ranks than one end in their number."""
    told = Summary()
    for ranks in dict.fromkeys(one["tp"] for one in rows):
        here = [one for one in rows if one["tp"] == ranks]
        for forward_ms in dict.fromkeys(one["forward_ms"] for one in here):
            _at_delay(told, [one for one in here if one["forward_ms"] == forward_ms], ranks, forward_ms)
        idle_keys = list(IDLE_KEYS.items())[: None if ranks > 1 else 1]
        for (key, worst), mode in itertools.product(idle_keys, dict.fromkeys(one["mode"] for one in here)):
            idle = [one[worst] for one in here if one["mode"] == mode]
            told.put(f"{key}_{mode}{_end(ranks)}", idle, IDLE_LIMIT_PERCENT if mode == PLUGIN else None)
    return {**told.found, "missed": told.missed}


def _end(ranks: int) -> str:
    return "" if ranks == 1 else f"_tp{ranks}"


def _at_delay(told: Summary, rows: list[Row], ranks: int, forward_ms: float) -> None:
    name, judged = f"{forward_ms:g}ms{_end(ranks)}", forward_ms in TARGETS_AT_MS
    alternations = dict.fromkeys(one["alternation"] for one in rows)
    sets = [{one["mode"]: one for one in rows if one["alternation"] == a} for a in alternations]
    if all(len(by_mode) == len(MODES) for by_mode in sets):
        for key, (limit, ratio) in (ONE_RANK if ranks == 1 else MORE_RANKS).items():
            told.put(f"{key}_{name}", [ratio(by_mode) for by_mode in sets], limit if judged else None)
        side = [
            by_mode[PLUGIN]["side_progress_percent"]
            - max(by_mode[mode]["side_progress_percent"] for mode in (BLOCKING, POLLING))
            for by_mode in sets
        ]
        if told.put(f"side_progress_over_better_{name}", side) < 0 and judged and ranks == 1:
            told.missed.append(f"side_progress_over_better_{name} < 0")
    ours = [by_mode[PLUGIN]["intake_p50_us"] for by_mode in sets if PLUGIN in by_mode]
    if ours:
        told.put(f"intake_p50_us_{name}", ours, INTAKE_LIMIT_US if judged and ranks == 1 else None)
