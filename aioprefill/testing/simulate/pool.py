"""Many seeds, over several processes. Which process plays which seed depends on their numbers alone."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from aioprefill.testing.simulate.bugs import planted
from aioprefill.testing.simulate.reach import missing
from aioprefill.testing.simulate.schedule import Played, play

BATCH = 20
"""Seeds that a process is given at a time."""


@dataclass(slots=True)
class Total:
    """What came of many seeds."""

    seeds: int
    sizes: Sequence[int]
    schedules: int = 0
    events: int = 0
    least_events: int = 0
    seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    """By seed, in order."""
    counters: Counter[str] = field(default_factory=Counter)

    def add(self, played: Played) -> None:
        """Count one schedule."""
        self.schedules += 1
        self.events += played.events
        if not played.failure:
            self.least_events = min(self.least_events or played.events, played.events)
        else:
            self.failures[played.seed] = played.failure
        self.counters.update(played.counters)

    @property
    def missing(self) -> list[str]:
        """What should have been reached and was not."""
        return missing(self.counters, self.schedules, self.sizes)

    @property
    def failed(self) -> bool:
        """A seed fails, or something was not reached."""
        return bool(self.failures or self.missing)

    def json(self) -> str:
        """One JSON object."""
        table = {
            "schedules": self.schedules,
            "schedules_per_second": round(self.schedules / self.seconds, 1) if self.seconds else None,
            "seconds": round(self.seconds, 1),
            "ranks": list(self.sizes),
            "events": self.events,
            "least_events": self.least_events,
            "failing_seeds": list(self.failures),
            "failures": {str(seed): text[:1000] for seed, text in self.failures.items()},
            "missing": self.missing,
            "counters": dict(sorted(self.counters.items())),
        }
        return json.dumps(table, indent=2)


def play_many(
    first: int, count: int, sizes: Sequence[int], *, workers: int, bug: str = "", until: str | None = None
) -> Total:
    """Play seeds first, first + 1, …; with the pattern `until` up to the first failure that has it."""
    total, started = Total(count, tuple(sizes)), time.perf_counter()
    if workers <= 1:
        results = _here(first, count, sizes, bug)
    else:
        results = _elsewhere(first, count, sizes, workers, bug)
    for played in results:
        total.add(played)
        if until is not None and played.failure and re.search(until, played.failure):
            break
    total.seconds = time.perf_counter() - started
    return total


def _here(first: int, count: int, sizes: Sequence[int], bug: str) -> Iterator[Played]:
    with planted(bug):
        for seed in range(first, first + count):
            yield play(seed, sizes)


def _elsewhere(first: int, count: int, sizes: Sequence[int], workers: int, bug: str) -> Iterator[Played]:
    """In the order of the seeds."""
    spawn = multiprocessing.get_context("spawn")
    end = first + count
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as executor:
        batches = [
            executor.submit(_batch, begin, min(begin + BATCH, end), tuple(sizes), bug)
            for begin in range(first, end, BATCH)
        ]
        try:
            for batch in batches:
                yield from batch.result()
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _batch(begin: int, end: int, sizes: Sequence[int], bug: str) -> list[Played]:
    return list(_here(begin, end - begin, sizes, bug))
