"""The benchmark `sglang`: each mode in a process of its own, a short run, all keys."""

from __future__ import annotations

import json

import pytest

from aioprefill.bench import __main__ as bench

KEYS = {
    *("mode", "forward_ms", "tp", "alternation", "seconds", "forwards", "requests", "load_average"),
    *("intake_p50_us", "intake_p99_us", "dispatch_p50_us", "detect_p50_us", "detect_p95_us"),
    *("transfer_retire_p50_us", "transfer_retire_p99_us"),
    *("main_thread_cpu_percent", "host_call_cpu_percent", "wait_cpu_percent", "idle_cpu_percent"),
    *("passes_per_s", "side_progress_percent"),
}


def test_each_mode_prints_a_row_with_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """The two loops of SGLang's and the plugin, which measures itself to be none of them."""
    words = ["--forward-ms", "20", "--forwards", "12", "--alternations", "1", "--idle-seconds", "0.5"]
    assert bench.main(["sglang", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == "sglang"
    assert [row["mode"] for row in found["rows"]] == ["sglang_blocking", "sglang_polling", "plugin"]
    for row in found["rows"]:
        assert row.keys() == KEYS
        assert row["forwards"] == 12
        assert row["requests"] > 0
        assert 0 < row["host_call_cpu_percent"] <= row["main_thread_cpu_percent"] <= 100
        assert 0 < row["intake_p50_us"] < row["dispatch_p50_us"]
        assert row["detect_p50_us"] >= 0
        assert row["transfer_retire_p50_us"] >= 0
    idle = {row["mode"]: row["idle_cpu_percent"] for row in found["rows"]}
    assert idle["plugin"] < idle["sglang_blocking"] / 4
    assert found["summary"]["wait_cpu_to_polling_20ms"] > 0
    assert isinstance(found["summary"]["missed"], list)


def test_more_ranks_are_refused_so_far() -> None:
    """Before anything is started."""
    with pytest.raises(SystemExit, match="--tp 2"):
        bench.main(["sglang", "--tp", "2"])
