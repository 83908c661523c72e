"""What the scheduler costs: tokens a second through it, against the bare engine fed with the same batches.

Per alternation: 200 new prompts go through the scheduler, which notes its batches; then the same batches
go through the bare engine in a plain loop with two forwards in flight, as the scheduler has. `engine` is
measured first in every second alternation.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import concurrent.futures
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from aioprefill.bench.report import Report, Row
from aioprefill.config import EngineConfig, NativeConfig
from aioprefill.engine.port import EngineForward, PageCopy, PageIds, Span
from aioprefill.engine.transformers_engine import TransformersEngine
from aioprefill.native.host import NativeHost
from aioprefill.native.load import load_engine
from aioprefill.request import PrefillRequest
from aioprefill.scheduler import PrefillScheduler

Batch = Sequence[Span]


class Recording:
    """The engine as a host sees it, noting every batch. It is not closed with the host."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.spec = engine.spec
        self.num_pages = engine.num_pages
        self.batches: list[Batch] = []
        self._engine = engine

    def launch(self, spans: Batch) -> EngineForward:
        """See `Engine.launch`."""
        self.batches.append(list(spans))
        return self._engine.launch(spans)

    async def stage_weights(self, folder: Path) -> Any:
        """See `Engine.stage_weights`."""
        return await self._engine.stage_weights(folder)

    def swap_weights(self, staged: Any) -> concurrent.futures.Future[None]:
        """See `Engine.swap_weights`."""
        return self._engine.swap_weights(staged)

    def weights_fingerprint(self, staged: Any) -> str:
        """See `Engine.weights_fingerprint`."""
        return self._engine.weights_fingerprint(staged)

    def read_pages(self, pages: PageIds) -> concurrent.futures.Future[PageCopy]:
        """See `Engine.read_pages`."""
        return self._engine.read_pages(pages)

    def write_pages(self, pages: PageIds, blocks: Any) -> concurrent.futures.Future[None]:
        """See `Engine.write_pages`."""
        return self._engine.write_pages(pages, blocks)

    def assemble_pages(self, pages: PageIds, shards: int) -> concurrent.futures.Future[None]:
        """See `Engine.assemble_pages`."""
        return self._engine.assemble_pages(pages, shards)

    def close(self) -> None:
        """The engine goes on."""

    async def aclose(self) -> None:
        """The engine goes on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--alternations", type=int, default=5)


def run(options: argparse.Namespace) -> Report:
    """Measure."""
    engine = load_engine(EngineConfig(model=options.model, dtype=options.dtype, kv_memory=1 << 30))
    names = ("model", "dtype", "prompts", "longest", "chunk_tokens", "alternations")
    report = Report("overhead", {name: getattr(options, name) for name in names})
    generator = np.random.default_rng(0)
    try:
        batches, _, _ = through_scheduler(engine, prompts(engine, options, generator), options)  # warm-up
        for alternation in range(options.alternations):
            if alternation % 2:
                report.rows.append(bare(engine, batches, alternation))
            batches, row, _ = through_scheduler(engine, prompts(engine, options, generator), options)
            report.rows.append({"mode": "aioprefill", "alternation": alternation, **row})
            if not alternation % 2:
                report.rows.append(bare(engine, batches, alternation))
    finally:
        engine.close()
    report.summary = summarise(report.rows)
    return report


def prompts(
    engine: TransformersEngine, options: argparse.Namespace, generator: np.random.Generator
) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Random prompts of 1 to `longest` tokens, the same total in every call but for chance."""
    lengths = generator.integers(1, options.longest + 1, options.prompts)
    return [generator.integers(0, engine.spec.vocab_size, int(length)) for length in lengths]


def through_scheduler(
    engine: TransformersEngine,
    made: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]],
    options: argparse.Namespace,
) -> tuple[list[Batch], Row, float]:
    """All prompts at once through a scheduler; its batches, the row, tokens a second."""
    recording = Recording(engine)
    host = NativeHost(recording, None, NativeConfig(chunk_tokens=options.chunk_tokens))

    async def main() -> tuple[float, float]:
        async with PrefillScheduler(host) as scheduler:
            cpu, wall = time.thread_time(), time.perf_counter()
            handles = [scheduler.submit(PrefillRequest(prompt)) for prompt in made]
            for handle in handles:
                await handle
            return time.perf_counter() - wall, time.thread_time() - cpu

    wall, cpu = uvloop.run(main())
    return recording.batches, figures(recording.batches, wall, cpu), wall


def bare(engine: TransformersEngine, batches: list[Batch], alternation: int) -> Row:
    """The same batches through the engine alone."""
    cpu, wall = time.thread_time(), time.perf_counter()

    async def main() -> None:
        pending: collections.deque[EngineForward] = collections.deque()
        for batch in batches:
            if len(pending) == 2:
                pending.popleft().completion.synchronize()
            pending.append(engine.launch(batch))
        while pending:
            pending.popleft().completion.synchronize()

    asyncio.run(main())
    seconds = time.perf_counter() - wall
    return {
        "mode": "engine",
        "alternation": alternation,
        **figures(batches, seconds, time.thread_time() - cpu),
    }


def figures(batches: list[Batch], wall: float, cpu: float) -> Row:
    """Tokens a second, and CPU of the calling thread."""
    tokens = sum(len(span.token_ids) for batch in batches for span in batch)
    return {
        "forwards": len(batches),
        "tokens": tokens,
        "tokens_per_s": round(tokens / wall, 1),
        "thread_cpu_percent": round(100 * cpu / wall, 2),
    }


def summarise(rows: list[Row]) -> Row:
    """Medians of per-alternation ratios; the engine's row of the same alternation is the measure."""
    ours = {row["alternation"]: row for row in rows if row["mode"] == "aioprefill"}
    theirs = {row["alternation"]: row for row in rows if row["mode"] == "engine"}
    ratios = [ours[key]["tokens_per_s"] / theirs[key]["tokens_per_s"] for key in ours]
    return {
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "scheduler_cpu_percent": round(statistics.median(r["thread_cpu_percent"] for r in ours.values()), 2),
    }
