"""Edge-triggered signals between the loop's tasks."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes one waiter, once per `set`; several sets before the wait are one.

    A task must not set the signal that it waits for unless there is more to do: that would be a spin.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the waiter, now or at its next wait."""
        self._event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a `set` and take it; False when `timeout_s` passed first.

        Always gives other tasks a turn, also when already set. Cancellation takes nothing.
        """
        if self._event.is_set():
            await asyncio.sleep(0)
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError:
                return False
        self._event.clear()
        return True


class Signals:
    """The loop's signals, one per condition that a task waits for."""

    def __init__(self) -> None:
        self.input = Signal()
        """-> intake_task: there is something to ingest."""
        self.preparation = Signal()
        """-> prepare_task: something may be admitted now."""
        self.launched = Signal()
        """-> result_task: a forward is in flight."""
        self.transfers = Signal()
        """-> transfer_task: handshakes or transfers made progress."""
        self.progress = Signal()
        """-> drain: a request may have got its outcome."""
