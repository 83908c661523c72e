"""A virtual clock: an asyncio loop that jumps to its next timer instead of waiting.

For logic only: threads, sockets and uvloop do not belong under it. A loop with nothing to do and no timer
raises instead of hanging.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns += 1
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, which starts at 0."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Virtual seconds."""
        return self._clock.now

    @property
    def turns(self) -> int:
        """Turns that the loop has made: what an idle program costs."""
        return self._clock.turns

    def advance(self, seconds: float) -> None:
        """Pass virtual time at once, as a call that blocks the loop does."""
        self._clock.now += seconds


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Decorator: makes an async test an ordinary one that runs on virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_virtual(test(*args, **kwargs))

    return run


async def settle(turns: int = 50) -> None:
    """Let every ready task run until nothing is ready; no virtual time passes."""
    for _ in range(turns):
        await asyncio.sleep(0)
