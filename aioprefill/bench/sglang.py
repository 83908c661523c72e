"""The plugin's loop against SGLang's own two, on SGLang's real scheduler: what waiting for forwards costs.

Modes alternate: `sglang_blocking` (SGLang's overlap loop, which waits in `synchronize`), `sglang_polling`
(the same with its continuous input polling) and `plugin`. Each measurement has a process of its own for each
rank, for a scheduler is made once in a process. The model is replaced by one that only takes its time
(`forward_ms`), transfers by ones that end some time after their last chunk; both go by the clock. Requests
come from another process, over SGLang's own socket; several ranks meet over Gloo. Run it where SGLang is
installed (`make install-sglang`).

Keys are explained in docs/benchmarks/sglang.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from aioprefill.bench.report import Report, Row, percentile
from aioprefill.bench.sglang_ranks import combined
from aioprefill.bench.sglang_server import MODES, Task, environment
from aioprefill.bench.sglang_summary import summary
from aioprefill.errors import ConfigError

STUBS = Path(__file__).parents[2] / "tests_sglang" / "stubs"
"""Stand-ins for what SGLang imports and does not need on a CPU."""
RANKS = (1, 2)
"""The model can be parted among more, but each rank wants a core."""
TIMEOUT_S = 120.0
"""Of one measurement, beyond its forwards."""
COLUMNS = (
    "tp",
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
    parser.add_argument(
        "--alone-seconds", type=float, default=2.0, help="of the side thread alone, before and after"
    )
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tp", type=int, nargs="+", choices=RANKS, default=[1], help="tensor-parallel ranks")


def run(options: argparse.Namespace) -> Report:
    """Measure."""
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
        for alternation, forward_ms, ranks, mode in itertools.product(
            range(options.alternations), options.forward_ms, options.tp, options.modes
        ):
            task = Task(
                mode=mode,
                forward_ms=forward_ms,
                jitter=options.jitter,
                forwards=options.forwards,
                rate=options.rate,
                tokens=options.tokens,
                idle_s=options.idle_seconds,
                alone_s=options.alone_seconds,
                model=str(model),
                ranks=ranks,
            )
            report.rows.append(row(task, alternation, measure(task, Path(folder))))
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


def measure(task: Task, folder: Path) -> list[dict[str, Any]]:
    """Run one measurement in processes of its own; what each rank has measured."""
    variables = {**os.environ, **environment(task.mode, task.ranks)}
    if not _installed("torchvision"):
        variables["PYTHONPATH"] = os.pathsep.join([str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    words = [msgspec.json.encode(task).decode(), str(result)]
    ended = subprocess.run(
        [sys.executable, "-m", "aioprefill.bench.sglang_rank", *words],
        env=variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S + 3 * task.forwards * max(task.forward_ms / 1e3, 1 / task.rate),
        check=False,
    )
    if ended.returncode or not result.exists():
        raise RuntimeError(
            f"{task.mode} at {task.forward_ms} ms, tp {task.ranks}, failed:\n{_end_of(ended.stderr)}"
        )
    measured: list[dict[str, Any]] = json.loads(result.read_text())
    return measured


def _end_of(text: str) -> str:
    """What says why: SGLang warns of much before, and its bindings complain behind it."""
    return text.partition("nanobind:")[0][-4000:]


def row(task: Task, alternation: int, ranks: list[dict[str, Any]]) -> Row:
    """One measurement, from what each rank has measured."""
    measured = combined(ranks)
    cpu, host = measured["main_thread_cpu_percent"], measured["host_call_cpu_percent"]
    intake_us, detect_us, retire_us = (measured[key] for key in ("intake_us", "detect_us", "retire_us"))
    return {
        "mode": task.mode,
        "forward_ms": task.forward_ms,
        "tp": task.ranks,
        "alternation": alternation,
        "seconds": round(measured["seconds"], 2),
        "forwards": len(detect_us),
        "requests": len(intake_us),
        "intake_p50_us": round(percentile(intake_us, 50), 1),
        "intake_p99_us": round(percentile(intake_us, 99), 1),
        "dispatch_p50_us": round(percentile(measured["dispatch_us"], 50), 1),
        "detect_p50_us": round(percentile(detect_us, 50), 1),
        "detect_p95_us": round(percentile(detect_us, 95), 1),
        "detect_last_rank_p50_us": round(percentile(measured["detect_last_rank_us"], 50), 1),
        "transfer_retire_p50_us": round(percentile(retire_us, 50), 1),
        "transfer_retire_p99_us": round(percentile(retire_us, 99), 1),
        "main_thread_cpu_percent": round(cpu, 2),
        "cpu_percent_by_rank": [round(one["main_thread_cpu_percent"], 2) for one in ranks],
        "process_cpu_percent": round(measured["process_cpu_percent"], 2),
        "host_call_cpu_percent": round(host, 2),
        "wait_cpu_percent": round(cpu - host, 2),
        "passes_per_s": round(measured["passes_per_s"], 1),
        "side_progress_percent": round(measured["side_progress_percent"], 2),
        "idle_cpu_percent": round(measured["idle_cpu_percent"], 2),
        "idle_cpu_worst_percent": round(max(one["idle_cpu_percent"] for one in ranks), 2),
        "idle_process_cpu_worst_percent": round(max(one["idle_process_cpu_percent"] for one in ranks), 2),
        "load_average": round(measured["load_average"], 2),
    }
