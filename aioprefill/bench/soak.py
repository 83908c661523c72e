"""Random load on the real pair with aborts, clients that vanish, pauses and new weights; nothing goes wrong.

The model is small and random, so that a run makes many requests. The answers of all requests are known
beforehand. `lost`, `duplicated`, `wrong_tokens` and `leaked` of the summary are 0, or the servers have a bug.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from aioprefill.bench.report import Report
from aioprefill.bench.soak_actors import Actors
from aioprefill.bench.soak_book import Book
from aioprefill.bench.soak_cases import Case, make_cases
from aioprefill.bench.soak_leaks import settle, settled_growth, size
from aioprefill.bench.soak_load import Load
from aioprefill.config import EngineConfig
from aioprefill.native.load import load_engine
from aioprefill.pair import Pair, running_pair
from aioprefill.wire.client import PairClient

KV_MEMORY = 4 << 20
SETTLE_S = 30.0
ROWS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--minutes", type=float, default=30.0, help="of load, after the warm-up")
    parser.add_argument(
        "--warmup-s", type=float, default=20.0, help="of the same load before sizes are taken"
    )
    parser.add_argument("--rate", type=float, default=30.0, help="requests per second that are aimed at")
    parser.add_argument("--workers", type=int, default=24, help="most requests at a time")
    parser.add_argument("--clients", type=int, default=4, help="connections that they share")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--longest", type=int, default=700, help="tokens of the longest prompt")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random")


def run(options: argparse.Namespace) -> Report:
    """Measure."""
    names = ("minutes", "warmup_s", "rate", "workers", "clients", "prompts", "longest", "seed")
    report = Report("soak", {name: getattr(options, name) for name in names})
    with tempfile.TemporaryDirectory() as folder:
        from aioprefill.testing.models import make_tiny_llama

        models = [make_tiny_llama(Path(folder) / name) for name in ("weights", "same-weights")]
        uvloop.run(Soak(options, models, report).run())
    return report


class Soak:
    """One run: warm-up, quiet, load, quiet."""

    def __init__(self, options: argparse.Namespace, models: list[Path], report: Report) -> None:
        self._options = options
        self._models = models
        self._report = report
        self._rng = random.Random(options.seed)
        self._book = Book()

    async def run(self) -> None:
        """Everything; fills the report."""
        cases = await self._answers()
        common: tuple[str, ...] = (
            "--model",
            str(self._models[0]),
            "--dtype",
            "fp32",
            "--kv-memory",
            str(KV_MEMORY),
        )
        common += ("--threads", "1", "--log-level", "warning", "--lease-s", "5")
        async with running_pair(common, serve=("--chunk-tokens", "128")) as pair:
            endpoints = (pair.prefill.endpoint, pair.decode.endpoint)
            async with PairClient(*endpoints, timeout_s=60.0) as control:
                load = Load(self._book, cases, endpoints, self._rng, clients=self._options.clients)
                actors = Actors(self._book, load, control, self._models, endpoints, self._rng)
                await self._phase(pair, load, actors, self._options.warmup_s)
                await settle(control, SETTLE_S)
                before = size(pair)
                self._report.rows.append({"at_s": 0.0, **before})
                began, requests = time.monotonic(), self._book.counts["requests"]
                await self._phase(pair, load, actors, 60.0 * self._options.minutes, rows=ROWS)
                seconds = time.monotonic() - began
                leaked: dict[str, Any] = dict(await settle(control, SETTLE_S))
                leaked |= await settled_growth(pair, before, 10.0)
                self._report.rows.append({"at_s": round(seconds, 1), **size(pair)})
                self._summarise(leaked, seconds, self._book.counts["requests"] - requests)

    async def _answers(self) -> list[Case]:
        config = EngineConfig(model=str(self._models[0]), dtype="float32", kv_memory=KV_MEMORY, threads=1)
        engine = await asyncio.to_thread(load_engine, config)
        try:
            return await make_cases(
                engine, self._rng, prompts=self._options.prompts, longest=self._options.longest
            )
        finally:
            await engine.aclose()

    async def _phase(self, pair: Pair, load: Load, actors: Actors, seconds: float, rows: int = 0) -> None:
        """Load and everything that disturbs it for so long; then every request has its outcome."""
        await load.connect()
        stop, stop_actors = asyncio.Event(), asyncio.Event()
        think_s = self._options.workers / self._options.rate
        async with asyncio.TaskGroup() as group:
            for _ in range(self._options.workers):
                group.create_task(load.worker(stop, think_s))
            disturbing = group.create_task(actors.run(stop_actors))
            await self._watch(pair, seconds, rows)
            stop_actors.set()
            await disturbing  # which leaves the scheduler running
            stop.set()
        await load.disconnect()

    async def _watch(self, pair: Pair, seconds: float, rows: int) -> None:
        began = time.monotonic()
        for number in range(1, rows):
            await asyncio.sleep(began + seconds * number / rows - time.monotonic())
            counts = {name: self._book.counts[name] for name in ("requests", "finished", "aborted")}
            at_s = round(time.monotonic() - began, 1)
            self._report.rows.append({"at_s": at_s, **counts, **size(pair), **self._book.faults})
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))

    def _summarise(self, leaked: dict[str, Any], seconds: float, requests: int) -> None:
        self._report.summary = {
            **self._book.faults,
            "leaked": len(leaked),
            "leaks": leaked,
            "examples": self._book.examples,
            "seconds": round(seconds, 1),
            "requests_per_s": round(requests / seconds, 1),
            **dict(sorted(self._book.counts.items())),
        }
