"""The error that a lost rank is, on its way from whoever notices it to the loop's task group."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from aioprefill.errors import RankError


class LostRank:
    """Made on a running loop. The first rank that is lost counts."""

    def __init__(self) -> None:
        self._lost: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    def set(self, error: RankError) -> None:
        """A rank is lost; nothing once one was, or nobody waits any more."""
        if not self._lost.done():
            self._lost.set_exception(error)

    async def wait(self) -> NoReturn:
        """Raise the error, for one waiter. Cancelling it ends the waiting for good."""
        try:
            await asyncio.shield(self._lost)
        finally:
            self._lost.cancel()
        raise AssertionError("unreachable")
