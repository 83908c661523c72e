"""Resident memory over many requests through a small real model, and what is left in use at the end."""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path

import numpy as np
import psutil
import uvloop

from aioprefill.bench.report import Report
from aioprefill.config import EngineConfig, NativeConfig
from aioprefill.native.host import NativeHost
from aioprefill.native.load import load_engine
from aioprefill.request import PrefillRequest
from aioprefill.scheduler import PrefillScheduler

MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1000, help="requests between two looks at the memory")
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest prompt")
    parser.add_argument("--kv-memory", type=int, default=8 * MIB, help="bytes of the page pool")


def run(options: argparse.Namespace) -> Report:
    """Measure."""
    names = ("requests", "every", "longest", "kv_memory")
    report = Report("memory", {name: getattr(options, name) for name in names})
    with tempfile.TemporaryDirectory() as folder:
        from aioprefill.testing.models import make_tiny_llama

        model = make_tiny_llama(Path(folder) / "tiny")
        uvloop.run(measure(str(model), options, report))
    first = report.rows[0]["rss_mib"]
    last = report.rows[-1]
    report.summary = {
        "rss_growth_percent": round(100 * (last["rss_mib"] / first - 1), 2),
        "kv_pool_bytes": last["kv_pool_bytes"],
        **{key: last[key] for key in ("pages_held", "live_requests", "queued_requests", "open_handles")},
    }
    return report


async def measure(model: str, options: argparse.Namespace, report: Report) -> None:
    """Requests in groups that fill the queue; a row after each `every`."""
    engine = load_engine(EngineConfig(model=model, kv_memory=options.kv_memory, threads=1))
    host = NativeHost(engine, None, NativeConfig(chunk_tokens=512))
    generator = np.random.default_rng(0)
    process = psutil.Process()
    pool_bytes = engine.num_pages * engine.spec.layout.page_bytes
    assert pool_bytes <= options.kv_memory
    async with PrefillScheduler(host) as scheduler:
        for done in range(options.every, options.requests + 1, options.every):
            handles = [
                scheduler.submit(PrefillRequest(generator.integers(0, 512, int(length))))
                for length in generator.integers(1, options.longest + 1, options.every)
            ]
            for handle in handles:
                await handle.wait_transferred()
            open_handles = sum(not handle.done for handle in handles)
            del handles, handle
            gc.collect()
            stats = scheduler.stats().flat()
            report.rows.append(
                {
                    "requests": done,
                    "rss_mib": round(process.memory_info().rss / MIB, 1),
                    "kv_pool_bytes": pool_bytes,
                    "pages_held": stats["pages_held"],
                    "live_requests": len(host.ledger.requests),
                    "queued_requests": stats["queued_requests"],
                    "open_handles": open_handles,
                }
            )
