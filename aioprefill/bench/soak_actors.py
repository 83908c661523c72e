"""What disturbs the soak's load: pauses in every mode, new weights, clients that vanish, in random order."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aioprefill.bench.soak_book import Book
from aioprefill.bench.soak_load import Load
from aioprefill.control import PauseMode
from aioprefill.errors import ControlError
from aioprefill.wire.client import PairClient

logger = logging.getLogger(__name__)

CONTROL_WITHIN_S = 20.0
LONGEST_HOLD_S = 0.4
"""Longest time that the soak leaves the scheduler paused."""


class Actors:
    """Each actor is a loop with random waits; `every_s` are their means."""

    def __init__(
        self,
        book: Book,
        load: Load,
        control: PairClient,
        weights: list[Path],
        endpoints: tuple[str, str],
        rng: random.Random,
    ) -> None:
        self._book = book
        self._load = load
        self._control = control
        self._weights = weights
        self._endpoints = endpoints
        self._rng = rng

    async def run(self, stop: asyncio.Event) -> None:
        """All actors until `stop`; the scheduler runs when it returns."""
        async with asyncio.TaskGroup() as group:
            for every_s, act in (
                (1.5, self._pause),
                (4.0, self._update),
                (6.0, self._flush),
                (3.0, self._load.cut_one),
                (10.0, self._kill_a_client),
            ):
                group.create_task(self._repeat(stop, every_s, act), name=f"soak.{act.__name__}")

    async def _repeat(self, stop: asyncio.Event, every_s: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                async with asyncio.timeout(self._rng.expovariate(1 / every_s)):
                    await stop.wait()
                return
            except TimeoutError:
                logger.info("%s", act.__name__)
                await act()

    async def _answered(self, what: str, answer: Awaitable[Any]) -> Any:
        """A command's answer; one that does not come is lost like a request's."""
        try:
            async with asyncio.timeout(CONTROL_WITHIN_S):
                return await answer
        except TimeoutError:
            self._book.fault("lost", f"no answer to {what} within {CONTROL_WITHIN_S:g} s")
            return None

    async def _pause(self) -> None:
        mode, barrier = self._rng.choice(list(PauseMode)), self._rng.random() < 0.5
        logger.info("pause %s barrier=%s", mode, barrier)
        self._load.abort_marks += mode is PauseMode.ABORT
        await self._answered(f"pause {mode}", self._control.pause(mode, barrier=barrier))
        self._load.abort_marks += mode is PauseMode.ABORT
        self._book.counts[f"pauses_{mode.value}"] += 1
        if self._rng.random() < 0.2:
            await self._pause_again()
        await asyncio.sleep(self._rng.uniform(0, LONGEST_HOLD_S))
        if self._rng.random() < 0.3:
            await self._update()
        logger.info("resume")
        await self._answered("resume", self._control.resume())

    async def _pause_again(self) -> None:
        try:
            await self._control.pause("in_place", barrier=False)
        except ControlError:
            self._book.counts["refused_pauses"] += 1
        else:
            self._book.fault("duplicated", "a pause of a paused scheduler was accepted")

    async def _update(self) -> None:
        folder = self._rng.choice(self._weights)
        if await self._answered("update-weights", self._control.update_weights(folder)) is not None:
            self._book.counts["weight_updates"] += 1

    async def _flush(self) -> None:
        await self._answered("flush-cache", self._control.flush_cache())
        self._book.counts["cache_flushes"] += 1

    async def _kill_a_client(self) -> None:
        """A process that submits, and is killed some moments later."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "aioprefill.bench.soak_victim",
            *self._endpoints,
            str(self._rng.getrandbits(32)),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            if await process.stdout.readline() == b"submitted\n":
                await asyncio.sleep(self._rng.uniform(0, 0.3))
                self._book.counts["client_kills"] += 1
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
