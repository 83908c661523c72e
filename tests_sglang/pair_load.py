"""Kinds of load on a pair, and what the prefill scheduler's CPU does under each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pair_client import Job, Jobs, Pair
from servers import Cpu


@dataclass(frozen=True)
class Phase:
    """`rate` requests a second, all at once if it is None; `seconds` of nothing if there are no jobs."""

    name: str
    jobs: Callable[[Jobs], list[Job]]
    rate: float | None = None
    seconds: float = 0.0


def phases(scale: float = 1.0) -> tuple[Phase, ...]:
    """Every kind of load; `scale` makes all of them shorter."""

    def some(count: int) -> range:
        return range(round(scale * count))

    return (
        Phase("burst", lambda jobs: [jobs.plain(20 + 3 * n) for n in some(60)]),
        Phase("long chunked", lambda jobs: [jobs.plain(1600 + 13 * n) for n in some(6)]),
        Phase("steady", lambda jobs: [jobs.plain(40 + n % 90) for n in some(60)], rate=15),
        Phase("light", lambda jobs: [jobs.plain(60) for _ in some(8)], rate=2),
        Phase("idle", lambda _: [], seconds=scale * 4),
    )


@dataclass(frozen=True)
class Figures:
    """One phase with one loop. CPU is that of the prefill side's schedulers."""

    phase: str
    loop: str
    requests: int
    wall_s: float
    cpu: Cpu

    @property
    def main_thread_percent(self) -> float:
        """Of one core: the thread that the loop runs on, of all ranks together."""
        return 100 * self.cpu.main_thread_s / self.wall_s

    @property
    def process_percent(self) -> float:
        """Of one core, with Mooncake's own threads: one of them turns while a transfer is under way."""
        return 100 * self.cpu.process_s / self.wall_s


async def measure(
    pair: Pair, phase: Phase, jobs: Sequence[Job]
) -> tuple[Figures, list[tuple[Job, tuple[Any, Any]]]]:
    """Send the jobs; (figures, answers). The phase ends with its last answer, or after its seconds."""
    before, started = pair.prefill.cpu(), time.monotonic()
    async with asyncio.TaskGroup() as group:
        asked = []
        for number, job in enumerate(jobs):
            if phase.rate is not None:
                await asyncio.sleep(started + number / phase.rate - time.monotonic())
            asked.append(group.create_task(pair.ask(job)))
    answers = [task.result() for task in asked]
    await asyncio.sleep(started + phase.seconds - time.monotonic())
    wall_s, cpu = time.monotonic() - started, pair.prefill.cpu().since(before)
    figures = Figures(phase.name, pair.prefill.name, len(jobs), wall_s, cpu)
    return figures, list(zip(jobs, answers, strict=True))


def table(figures: Sequence[Figures]) -> str:
    """In Markdown."""
    head = "| phase | loop | requests | seconds | main thread, CPU s | % of a core | whole process, CPU s |"
    rows = [
        f"| {f.phase} | {f.loop} | {f.requests} | {f.wall_s:.1f} | {f.cpu.main_thread_s:.2f} "
        f"| {f.main_thread_percent:.1f} | {f.cpu.process_s:.2f} |"
        for f in figures
    ]
    return "\n".join([head, "| --- | --- | ---: | ---: | ---: | ---: | ---: |", *rows])
