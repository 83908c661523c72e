"""The plugin's loop against SGLang's own two, on SGLang's real scheduler: what waiting for forwards costs.

Modes alternate: `sglang_blocking` (SGLang's overlap loop, which waits in `synchronize`), `sglang_polling`
(the same with its continuous input polling) and `plugin`. Each measurement has a process of its own, for a
scheduler is made once in a process. The model is replaced by one that only takes its time (`forward_ms`),
transfers by ones that end some time after their last chunk; both go by the clock. Requests come from another
process, over SGLang's own socket. Run it where SGLang is installed (`make install-sglang`).

Keys are explained in docs/benchmarks/sglang.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from aioprefill.bench.report import Report, Row, percentile
from aioprefill.bench.sglang_server import BLOCKING, MODES, PLUGIN, POLLING, Task, environment
from aioprefill.errors import ConfigError

STUBS = Path(__file__).parents[2] / "tests_sglang" / "stubs"
"""Stand-ins for what SGLang imports and does not need on a CPU."""
TIMEOUT_S = 120.0
"""Of one measurement, beyond its forwards."""
IDLE_LIMIT_PERCENT = 10.0
INTAKE_LIMIT_US = 500.0
TARGETS_AT_MS = (100.0, 500.0)
RATIOS: dict[str, tuple[float, Callable[[dict[str, Row]], float]]] = {
    "wait_cpu_to_polling": (0.5, lambda by: _ratio(by, "wait_cpu_percent", POLLING)),
    "cpu_to_blocking": (1.2, lambda by: _ratio(by, "main_thread_cpu_percent", BLOCKING)),
    "transfer_retire_p99_to_better": (
        0.2,
        lambda by: max(_ratio(by, "transfer_retire_p99_us", mode) for mode in (BLOCKING, POLLING)),
    ),
    "detect_p50_to_polling": (0.7, lambda by: _ratio(by, "detect_p50_us", POLLING)),
    "detect_p95_to_polling": (1.5, lambda by: _ratio(by, "detect_p95_us", POLLING)),
}
"""Ratios of one alternation, the plugin's figure over a stock loop's, and the most that each may be."""
COLUMNS = (
    "forward_ms",
    "mode",
    "main_thread_cpu_percent",
    "wait_cpu_percent",
    "intake_p50_us",
    "detect_p50_us",
    "detect_p95_us",
    "transfer_retire_p99_us",
    "side_progress_percent",
    "idle_cpu_percent",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument(
        "--forward-ms", type=float, nargs="+", default=[20.0, 100.0, 500.0], help="of forwards"
    )
    parser.add_argument("--tokens", type=int, default=500, help="of a prompt, on average")
    parser.add_argument("--jitter", type=float, default=0.1, help="part by which a forward may differ")
    parser.add_argument("--forwards", type=int, default=100, help="in each measurement")
    parser.add_argument("--rate", type=float, default=25.0, help="requests a second, on average")
    parser.add_argument(
        "--idle-seconds", type=float, default=5.0, help="without requests, after the forwards"
    )
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tp", type=int, default=1, help="ranks; only 1 so far")


def run(options: argparse.Namespace) -> Report:
    """Measure."""
    if options.tp != 1:
        raise SystemExit(f"--tp {options.tp}: the plugin serves one rank so far; leave --tp out")
    report = Report(
        "sglang",
        {
            "forward_ms": options.forward_ms,
            "jitter": options.jitter,
            "forwards": options.forwards,
            "rate_per_s": options.rate,
            "prompt_tokens": options.tokens,
            "idle_s": options.idle_seconds,
            "alternations": options.alternations,
            "tp": options.tp,
            "sglang": _release(),
        },
        columns=COLUMNS,
    )
    with tempfile.TemporaryDirectory() as folder:
        from aioprefill.testing.models import make_tiny_llama

        model = make_tiny_llama(Path(folder) / "tiny")
        for alternation in range(options.alternations):
            for forward_ms in options.forward_ms:
                for mode in options.modes:
                    task = Task(
                        mode=mode,
                        forward_ms=forward_ms,
                        jitter=options.jitter,
                        forwards=options.forwards,
                        rate=options.rate,
                        tokens=options.tokens,
                        idle_s=options.idle_seconds,
                        model=str(model),
                    )
                    measured = measure(task, Path(folder))
                    report.rows.append(row(task, alternation, options.tp, measured))
    report.summary = summary(report.rows)
    return report


def _release() -> str:
    """SGLang's release; refuses where there is none."""
    if not _installed("sglang"):
        raise ConfigError("SGLang is missing: make install-sglang, then run .venv-sglang/bin/python")
    return metadata.version("sglang")


def _installed(name: str) -> bool:
    """A stand-in on the path is no installation."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def measure(task: Task, folder: Path) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    variables = {**os.environ, **environment(task.mode)}
    if not _installed("torchvision"):
        variables["PYTHONPATH"] = os.pathsep.join([str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    words = [msgspec.json.encode(task).decode(), str(result)]
    ended = subprocess.run(
        [sys.executable, "-m", "aioprefill.bench.sglang_process", *words],
        env=variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S + 3 * task.forwards * max(task.forward_ms / 1e3, 1 / task.rate),
        check=False,
    )
    if ended.returncode or not result.exists():
        raise RuntimeError(f"{task.mode} at {task.forward_ms} ms failed:\n{_end_of(ended.stderr)}")
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def _end_of(text: str) -> str:
    """What says why: SGLang warns of much before, and its bindings complain behind it."""
    return text.partition("nanobind:")[0][-4000:]


def row(task: Task, alternation: int, tp: int, measured: dict[str, Any]) -> Row:
    """One measurement."""
    cpu, host = measured["main_thread_cpu_percent"], measured["host_call_cpu_percent"]
    intake_us, detect_us, retire_us = (measured[key] for key in ("intake_us", "detect_us", "retire_us"))
    return {
        "mode": task.mode,
        "forward_ms": task.forward_ms,
        "tp": tp,
        "alternation": alternation,
        "seconds": round(measured["seconds"], 2),
        "forwards": len(detect_us),
        "requests": len(intake_us),
        "intake_p50_us": round(percentile(intake_us, 50), 1),
        "intake_p99_us": round(percentile(intake_us, 99), 1),
        "dispatch_p50_us": round(percentile(measured["dispatch_us"], 50), 1),
        "detect_p50_us": round(percentile(detect_us, 50), 1),
        "detect_p95_us": round(percentile(detect_us, 95), 1),
        "transfer_retire_p50_us": round(percentile(retire_us, 50), 1),
        "transfer_retire_p99_us": round(percentile(retire_us, 99), 1),
        "main_thread_cpu_percent": round(cpu, 2),
        "host_call_cpu_percent": round(host, 2),
        "wait_cpu_percent": round(cpu - host, 2),
        "passes_per_s": round(measured["passes_per_s"], 1),
        "side_progress_percent": round(measured["side_progress_percent"], 2),
        "idle_cpu_percent": round(measured["idle_cpu_percent"], 2),
        "load_average": round(measured["load_average"], 2),
    }


def _ratio(by_mode: dict[str, Row], key: str, to: str) -> float:
    theirs = by_mode[to][key]
    return float(by_mode[PLUGIN][key] / theirs) if theirs else float("inf")


def summary(rows: list[Row]) -> dict[str, Any]:
    """Medians over the alternations, by delay; `missed` names what is not reached of what must be."""
    found: dict[str, Any] = {}
    missed: list[str] = []

    def put(key: str, values: list[float], limit: float | None = None) -> float:
        found[key] = round(statistics.median(values), 4)
        if limit is not None and found[key] > limit:
            missed.append(f"{key} {found[key]} > {limit}")
        return float(found[key])

    for forward_ms in dict.fromkeys(one["forward_ms"] for one in rows):
        name = f"{forward_ms:g}ms"
        here = [one for one in rows if one["forward_ms"] == forward_ms]
        alternations = dict.fromkeys(one["alternation"] for one in here)
        sets = [{one["mode"]: one for one in here if one["alternation"] == a} for a in alternations]
        judged = forward_ms in TARGETS_AT_MS
        if all(len(by_mode) == len(MODES) for by_mode in sets):
            for key, (limit, ratio) in RATIOS.items():
                put(f"{key}_{name}", [ratio(by_mode) for by_mode in sets], limit if judged else None)
            side = [
                by_mode[PLUGIN]["side_progress_percent"]
                - max(by_mode[mode]["side_progress_percent"] for mode in (BLOCKING, POLLING))
                for by_mode in sets
            ]
            if put(f"side_progress_over_better_{name}", side) < 0 and judged:
                missed.append(f"side_progress_over_better_{name} < 0")
        ours = [by_mode[PLUGIN]["intake_p50_us"] for by_mode in sets if PLUGIN in by_mode]
        if ours:
            put(f"intake_p50_us_{name}", ours, INTAKE_LIMIT_US if judged else None)
    for mode in dict.fromkeys(one["mode"] for one in rows):
        idle = [one["idle_cpu_percent"] for one in rows if one["mode"] == mode]
        put(f"idle_cpu_percent_{mode}", idle, IDLE_LIMIT_PERCENT if mode == PLUGIN else None)
    found["missed"] = missed
    return found
