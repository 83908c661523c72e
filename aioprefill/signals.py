"""Edge-triggered signals between the loop's tasks."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes one waiter, once per `set`; several sets before the wait are one.

    A task must not set the signal that it waits for unless there is more to do: that would be a spin.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the waiter, now or at its next wait."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a `set` and take it; False when `timeout_s` passed first.

        Always gives other tasks a turn, also when already set. Cancellation takes nothing.
        """
        if self._is_set:
            await asyncio.sleep(0)
        else:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, _resolve, waiter)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
            if not self._is_set:
                return False
        self._is_set = False
        return True


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Notice:
    """Tells every waiter that something has happened; who comes later waits for the next time."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake all waiters."""
        if self._next is not None:
            self._next.set_result(None)
            self._next = None

    async def wait(self) -> None:
        """Wait for the next `set`. Cancelling it hurts no other waiter."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)


class Signals:
    """The loop's signals, one per condition that a task waits for."""

    def __init__(self) -> None:
        self.input = Signal()
        """-> intake_task: there is something to ingest."""
        self.preparation = Signal()
        """-> prepare_task: something may be admitted now."""
        self.results = Signal()
        """-> result_task: a forward was launched, or a kept result may be processed."""
        self.transfers = Signal()
        """-> transfer_task: handshakes or transfers made progress."""
        self.progress = Notice()
        """-> drain and barriers: a vote is over, or a request may have got its outcome."""
