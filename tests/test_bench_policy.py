"""The policy benchmark on small made-up traces."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioprefill.bench import __main__ as bench
from aioprefill.bench.trace import BLOCK, read_trace, uncached_tokens
from aioprefill.errors import ConfigError


def write_trace(path: Path, requests: int, seed: int = 0) -> Path:
    """Conversations over a minute: most prompts are short, some long, some repeat an earlier beginning."""
    generator = random.Random(seed)
    lines, fresh, known = [], 1, [[0]]
    for number in range(requests):
        blocks = list(generator.choice(known)) if generator.random() < 0.4 else [0]
        more = generator.choice((1, 2, 4, 40)) if generator.random() < 0.9 else 120
        blocks += range(fresh, fresh + more)
        fresh += more
        known.append(blocks)
        length = len(blocks) * BLOCK - generator.randrange(BLOCK)
        lines.append({"timestamp": 60_000 * number / requests, "input_length": length, "hash_ids": blocks})
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The benchmark's JSON object."""
    assert bench.main(["policy", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_policy_benchmark_prints_a_row_per_policy_and_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every figure is there, response ratio beats first come, and it is repeatable."""
    trace = write_trace(tmp_path / "trace.jsonl", 150)
    words = ("--trace", str(trace), "--utilisation", "0.97", "--chunk-tokens", "4096")
    found = run(capsys, *words)
    rows = found["rows"]
    policies = ("fcfs", "longest-prefix", "shortest-first", "hrrn")
    assert [(row["utilisation"], row["policy"]) for row in rows] == [(0.97, policy) for policy in policies]
    for row in rows:
        for prefix in ("", "short_", "medium_", "long_"):
            assert (
                0 < row[f"{prefix}ttft_p50_ms"] <= row[f"{prefix}ttft_p90_ms"] <= row[f"{prefix}ttft_p99_ms"]
            )
            assert row[f"{prefix}ttft_mean_ms"] > 0
        assert row["longest_wait_ms"] <= row["longest_ttft_ms"]
        assert row["prefix_hit_percent"] > 20 and row["steps"] > 50
    fcfs, hrrn = rows[0], rows[3]
    assert hrrn["ttft_mean_ms"] < 0.95 * fcfs["ttft_mean_ms"]
    ratio = found["summary"]["hrrn_0.97_ttft_mean_ratio"]
    assert ratio == round(hrrn["ttft_mean_ms"] / fcfs["ttft_mean_ms"], 3)
    again = run(capsys, *words, "--policies", "hrrn")["rows"]
    assert again == [hrrn]


def test_the_policy_benchmark_draws_and_prints_a_table(tmp_path: Path) -> None:
    """A plot, a table that fits a screen, a part of the trace, a pool that evicts.

    In a process of its own, for matplotlib keeps its fonts open.
    """
    pytest.importorskip("matplotlib")
    trace = write_trace(tmp_path / "trace.jsonl", 60)
    plot = tmp_path / "plot.svg"
    words = ["policy", "--trace", str(trace), "--requests", "50", "--utilisation", "0.9"]
    words += ["--policies", "fcfs,hrrn", "--cache-tokens", "200000", "--plot", str(plot)]
    out = subprocess.run(
        [sys.executable, "-m", "aioprefill.bench", *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert "longest_wait" in out and "short_ttft" not in out
    assert plot.read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--trace", "absent.jsonl"], "no trace"),
        (["--trace", "T", "--policies", "lifo"], "no policy 'lifo'"),
        (["--trace", "T", "--utilisation", "0"], "above 0"),
        (["--trace", "T", "--requests", "1"], "too short"),
    ],
)
def test_bad_use_of_the_policy_benchmark_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], match: str
) -> None:
    """By one line, without a traceback."""
    trace = write_trace(tmp_path / "trace.jsonl", 3)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["policy", *(str(trace) if word == "T" else word for word in words)])
    assert match in f"{stopped.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "not json",
        '{"timestamp": 0, "input_length": 600, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 0, "hash_ids": []}',
        '{"timestamp": 0, "input_length": 1, "hash_ids": [-1]}',
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    """Empty, malformed, or with lengths and blocks that disagree."""
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match="line 1" if line else "no requests"):
        read_trace(path)


def test_shared_blocks_are_shared_prefixes(tmp_path: Path) -> None:
    """Token ids follow the block ids; only full blocks are reused, and one token is always computed."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5, "input_length": 1024, "hash_ids": [1, 2]},
        {"timestamp": 0, "input_length": 700, "hash_ids": [1, 3]},
        {"timestamp": 9, "input_length": 1024, "hash_ids": [1, 2]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = trace = read_trace(path)
    assert first.tokens().tolist() == [1] * 512 + [3] * 188
    assert second.tokens().tolist() == third.tokens().tolist() == [1] * 512 + [2] * 512
    assert uncached_tokens(trace) == 700 + 512 + 512
