"""A virtual clock without sockets: thousands of loops a minute, and not one system call between two turns."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Clock:
    """Stands where a loop has its selector: "waiting" passes the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None = None) -> tuple[()]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        if timeout > 0:
            self.now += timeout
        return ()


class SimulationLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time, which starts at 0. It has no sockets, no signals and no threads."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Clock()
        self.broken: list[dict[str, Any]] = []
        """What callbacks and forgotten tasks have raised."""
        self.set_exception_handler(lambda _, context: self.broken.append(context))

    def time(self) -> float:
        """Virtual seconds."""
        return self._selector.now

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector who would have to be woken: `call_soon_threadsafe` is `call_soon`."""


def run(main: Coroutine[Any, Any, T], loop: SimulationLoop) -> T:
    """Run a coroutine to its end; tasks that are left are cancelled. Raises what it raises."""
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main)
    finally:
        _cancel_all(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_all(loop: SimulationLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        gathered = asyncio.gather(*left, return_exceptions=True)
        loop.run_until_complete(asyncio.wait([gathered], timeout=60.0))
