"""What the pair costs while nothing happens, and how soon it takes the first message afterwards."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import uvloop

from aioprefill.bench.report import Report
from aioprefill.pair import running_pair
from aioprefill.wire.client import PairClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--seconds", type=float, default=20.0, help="of quiet before each message")
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> Report:
    """Measure."""
    report = Report("idle", {"seconds": options.seconds, "rounds": options.rounds})
    with tempfile.TemporaryDirectory() as folder:
        from aioprefill.testing.models import make_tiny_llama

        model = make_tiny_llama(Path(folder) / "tiny")
        uvloop.run(measure(str(model), options, report))
    for key in ("prefill_cpu_percent", "decode_cpu_percent", "first_message_us"):
        report.summary[key] = statistics.median(row[key] for row in report.rows)
    return report


async def measure(model: str, options: argparse.Namespace, report: Report) -> None:
    """Requests, then quiet with both connections and NIXL up, then one message; a row each."""
    common = ("--model", model, "--kv-memory", "16MiB", "--threads", "1")
    async with running_pair(common) as pair:
        processes = {side: psutil.Process(getattr(pair, side).pid) for side in ("prefill", "decode")}
        async with PairClient(pair.prefill.endpoint, pair.decode.endpoint, timeout_s=30) as client:
            for number in range(options.rounds):
                async for _ in client.submit([1, 2, 3], max_new_tokens=4, ignore_eos=True):
                    pass
                await asyncio.sleep(2.0)  # what the requests left to do is not idleness
                before = {side: sum(process.cpu_times()[:2]) for side, process in processes.items()}
                await asyncio.sleep(options.seconds)
                row: dict[str, float] = {"round": number}
                for side, process in processes.items():
                    used = sum(process.cpu_times()[:2]) - before[side]
                    row[f"{side}_cpu_percent"] = round(100 * used / options.seconds, 2)
                started = time.perf_counter()
                await client.ping()
                row["first_message_us"] = round(1e6 * (time.perf_counter() - started), 1)
                report.rows.append(row)
