"""New weights, read and examined beside those that serve, on every rank before any rank swaps."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioprefill.engine.port import Engine
from aioprefill.errors import AioprefillError, ModelError
from aioprefill.native.facts import ErrorFact, StagedFact, StageFact, UnstageFact

logger = logging.getLogger(__name__)


class Staging:
    """Owns the staged weights of this rank, by number; and on the leader, who waits for those of all.

    Weights that were staged are kept until they are swapped in (`pop`), dropped, or the host is closed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._ready: dict[int, Any] = {}
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Future[StagedFact]] = {}
        self.post: Callable[[StageFact | UnstageFact], None] = lambda _: None
        """Puts a fact among the inputs."""
        self.on_read: Callable[[StagedFact], None] = lambda _: None
        """This rank has read weights, or could not."""

    @property
    def idle(self) -> bool:
        """No weights are staged, being read, or asked for."""
        return not (self._ready or self._reading or self._asked)

    async def stage(self, folder: Path) -> int:
        """Have every rank read a folder; the number for `UpdateWeights`. Raises `ModelError`.

        Cancelling it has the ranks forget what they have read.
        """
        number = next(self._numbers)
        asked: asyncio.Future[StagedFact] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        self.post(StageFact(number, str(folder)))
        try:
            staged = await asked
        except asyncio.CancelledError:
            self.post(UnstageFact(number))
            raise
        finally:
            del self._asked[number]
        if staged.error is not None:
            self.post(UnstageFact(number))
            raise ModelError(staged.error.message)
        return number

    def read_everywhere(self, staged: StagedFact) -> None:
        """Every rank has read the weights, or one of them could not."""
        asked = self._asked.get(staged.number)
        if asked is not None and not asked.done():
            asked.set_result(staged)

    def read(self, fact: StageFact) -> None:
        """Begin to read, off the loop."""
        task = asyncio.create_task(self._read(fact), name=f"stage weights {fact.number}")
        self._reading[fact.number] = task

    async def _read(self, fact: StageFact) -> None:
        try:
            self._ready[fact.number] = await self._engine.stage_weights(Path(fact.folder))
        except asyncio.CancelledError:
            self.on_read(StagedFact(fact.number, ErrorFact(ModelError.code, "given up")))
            raise
        except AioprefillError as error:
            self.on_read(StagedFact(fact.number, ErrorFact(error.code, str(error))))
        except Exception as error:
            logger.exception("weights could not be staged")
            self.on_read(StagedFact(fact.number, ErrorFact(ModelError.code, f"{fact.folder}: {error!r}")))
        else:
            self.on_read(StagedFact(fact.number))
        finally:
            self._reading.pop(fact.number, None)

    def pop(self, number: int) -> Any:
        """Take staged weights, to swap them in."""
        return self._ready.pop(number)

    def drop(self, number: int) -> None:
        """Forget staged weights; reading ends where it can."""
        self._ready.pop(number, None)
        reading = self._reading.get(number)
        if reading is not None:
            reading.cancel()

    def fail(self, error: AioprefillError) -> None:
        """Nobody will stage anything any more: tell who waits."""
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)

    async def aclose(self) -> None:
        """Forget everything; wait for readings to end. Idempotent."""
        self._ready.clear()
        reading = list(self._reading.values())
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        self._ready.clear()
