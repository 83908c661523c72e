"""The benchmark `sglang`: each mode in processes of its own at one and two ranks, short runs, all keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from aioprefill.bench import __main__ as bench
from aioprefill.bench.sglang import STUBS
from aioprefill.bench.sglang_device import SKEW_S, Device
from aioprefill.bench.sglang_ranks import combined
from aioprefill.bench.sglang_server import BLOCKING, MODES, PLUGIN, POLLING, Task
from aioprefill.bench.sglang_summary import summary

KEYS = {
    *("mode", "forward_ms", "tp", "alternation", "seconds", "forwards", "requests", "load_average"),
    *("intake_p50_us", "intake_p99_us", "dispatch_p50_us"),
    *("detect_p50_us", "detect_p95_us", "detect_last_rank_p50_us"),
    *("transfer_retire_p50_us", "transfer_retire_p99_us"),
    *("main_thread_cpu_percent", "cpu_percent_by_rank", "process_cpu_percent"),
    *("host_call_cpu_percent", "wait_cpu_percent", "passes_per_s", "side_progress_percent"),
    *("idle_cpu_percent", "idle_cpu_worst_percent", "idle_process_cpu_worst_percent"),
}
SHORT = ("--forward-ms", "20", "--forwards", "12", "--alternations", "1", "--idle-seconds", "0.5")
RAN = {1: MODES, 2: (POLLING, PLUGIN)}
"""Modes by the number of ranks. Imports take 10 s of CPU for each rank and mode, hence not all at two."""
RUN_S = 240.0

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> dict[int, Found]:
    """What is printed, by the number of ranks. Most of a run is imports, so that two share the cores."""
    command = [sys.executable, "-m", "aioprefill.bench", "sglang", "--json", *SHORT, "--alone-seconds", "0.2"]
    runs = {
        ranks: subprocess.Popen(
            [*command, "--tp", str(ranks), "--modes", *modes],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for ranks, modes in RAN.items()
    }
    printed = {}
    try:
        for ranks, process in runs.items():
            out, err = process.communicate(timeout=RUN_S)
            assert process.returncode == 0, err[-4000:]
            printed[ranks] = json.loads(out)
    finally:
        for process in runs.values():
            process.kill()
    return printed


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_mode_prints_a_row_with_all_keys(found: Mapping[int, Found], ranks: int) -> None:
    """The two loops of SGLang's and the plugin, which measures itself to be none of them."""
    told = found[ranks]
    assert told["benchmark"] == "sglang"
    assert [row["mode"] for row in told["rows"]] == list(RAN[ranks])
    for row in told["rows"]:
        assert row.keys() == KEYS
        assert row["tp"] == len(row["cpu_percent_by_rank"]) == ranks
        assert row["forwards"] == 12
        assert row["requests"] > 0
        assert 0 < row["host_call_cpu_percent"] <= row["main_thread_cpu_percent"] <= 100
        assert max(row["cpu_percent_by_rank"]) <= 100
        assert row["process_cpu_percent"] > 0
        assert 0 < row["intake_p50_us"] < row["dispatch_p50_us"]
        assert row["detect_last_rank_p50_us"] >= max(0, row["detect_p50_us"])
        assert row["transfer_retire_p50_us"] >= 0
        assert row["idle_cpu_worst_percent"] >= row["idle_cpu_percent"] > 0
        assert row["idle_process_cpu_worst_percent"] > 0
    idle = {row["mode"]: row["idle_cpu_worst_percent"] for row in told["rows"]}
    assert idle[PLUGIN] < min(percent for mode, percent in idle.items() if mode != PLUGIN) / 4
    assert told["summary"]["idle_cpu_percent_plugin" + ("" if ranks == 1 else "_tp2")] == idle[PLUGIN]
    assert isinstance(told["summary"]["missed"], list)
    if ranks == 1:
        assert told["summary"]["wait_cpu_to_polling_20ms"] > 0


def test_loops_that_ask_all_ranks_are_never_early(found: Mapping[int, Found]) -> None:
    """Not at a result before the last rank's moment; nor is one rank before its own."""
    assert all(row["detect_p50_us"] >= 0 for told in found.values() for row in told["rows"])


def test_another_rank_does_not_outlive_rank_0() -> None:
    """Whatever it is at: rank 0 holds the other end of its standard input."""
    task = Task(
        PLUGIN, 20.0, 0.1, 12, 25.0, 500, 0.5, 0.2, "/nowhere", ranks=2, rank=1, meeting="127.0.0.1:9"
    )
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "aioprefill.bench.sglang_rank",
            msgspec.json.encode(task).decode(),
            "unused",
        ],
        env={**os.environ, "PYTHONPATH": str(STUBS)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("the process of rank 0 has ended\n")


def test_an_unknown_number_of_ranks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    with pytest.raises(SystemExit):
        bench.main(["sglang", "--tp", "3"])
    assert "--tp" in capsys.readouterr().err


def test_ranks_see_the_same_forwards_a_little_apart() -> None:
    """Their skew does not add up, and is the same in each run; one rank has none."""

    def ends(rank: int, ranks: int) -> list[int]:
        device = Device(20.0, 0.1, rank=rank, ranks=ranks)
        first = device.launch().due_ns
        return [device.launch().due_ns - first for _ in range(200)]

    alone, again, other = ends(0, 1), ends(0, 2), ends(1, 2)
    for skewed in (again, other):
        assert skewed != alone
        assert max(abs(a - b) for a, b in zip(skewed, alone, strict=True)) <= SKEW_S * 1e9
    assert again != other
    assert ends(1, 2) == other


def rank_measured(due_ns: list[int], detected_ns: list[int], transfers: list[tuple[int, int, int]]) -> Found:
    """What one rank tells; CPU is 10 % on each."""
    same = dict.fromkeys(("main_thread_cpu_percent", "process_cpu_percent", "host_call_cpu_percent"), 10.0)
    rest = {"passes_per_s": 1.0, "side_progress_percent": 100.0, "idle_cpu_percent": 1.0, "load_average": 1.0}
    lists = {"due_ns": due_ns, "detected_ns": detected_ns, "transfers": transfers}
    requests = {"window_ns": [100_000, 900_000], "intake_us": [1.0], "dispatch_us": [2.0]}
    return {**same, **rest, **lists, **requests}


def test_times_count_from_the_last_rank_s_moment() -> None:
    """Detection to rank 0 and to the last rank, retirement to rank 0; transfers by their last success."""
    first = rank_measured([1000, 5000], [9000, 6000], [(7, 200_000, 260_000), (8, 880_000, 990_000)])
    second = rank_measured([4000, 3000], [7000, 8000], [(8, 901_000, 980_000), (7, 210_000, 250_000)])
    second["main_thread_cpu_percent"] = 20.0
    told = combined([first, second])
    assert told["detect_us"] == [5.0, 1.0]
    assert told["detect_last_rank_us"] == [5.0, 3.0]
    assert told["retire_us"] == [50.0]
    assert told["main_thread_cpu_percent"] == 15.0
    assert told["seconds"] == 0.0008


def one_row(mode: str, ranks: int, alternation: int = 0, **figures: float) -> Found:
    """A row of 100 ms, all of whose figures are 1 but for `figures`."""
    keys = KEYS - {"mode", "tp", "forward_ms", "alternation", "cpu_percent_by_rank"}
    where = {"mode": mode, "tp": ranks, "forward_ms": 100.0, "alternation": alternation}
    return {**dict.fromkeys(keys, 1.0), **where, **figures}


def test_each_number_of_ranks_has_its_own_limits() -> None:
    """Rows that miss what one rank must reach do not at two ranks, and the other way round."""
    good = {"transfer_retire_p50_us": 0.2, "main_thread_cpu_percent": 0.7, "process_cpu_percent": 0.7}
    stock = [one_row(mode, 2) for mode in (BLOCKING, POLLING)]
    told = summary([*stock, one_row(PLUGIN, 2, **good, detect_p50_us=2.5, side_progress_percent=0.5)])
    assert told["missed"] == []
    assert told["cpu_to_polling_100ms_tp2"] == 0.7
    assert told["transfer_retire_p50_to_better_100ms_tp2"] == 0.2
    assert "cpu_to_blocking_100ms_tp2" not in told
    bad = {"detect_p50_us": 2.6, "idle_cpu_worst_percent": 11.0, "idle_process_cpu_worst_percent": 12.0}
    missed = summary([*stock, one_row(PLUGIN, 2, **bad)])["missed"]
    assert [line.split()[0] for line in missed] == [
        "cpu_to_polling_100ms_tp2",
        "process_cpu_to_polling_100ms_tp2",
        "transfer_retire_p50_to_better_100ms_tp2",
        "detect_p50_to_polling_100ms_tp2",
        "idle_cpu_percent_plugin_tp2",
        "idle_process_cpu_percent_plugin_tp2",
    ]
    both = [*stock, one_row(PLUGIN, 2, **good), *(one_row(mode, 1) for mode in MODES)]
    missed = summary(both)["missed"]
    assert [line.split()[0] for line in missed] == [
        "wait_cpu_to_polling_100ms",
        "transfer_retire_p99_to_better_100ms",
        "detect_p50_to_polling_100ms",
    ]
