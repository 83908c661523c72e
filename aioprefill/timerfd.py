"""A fine timer for any asyncio loop: timers of uvloop have whole milliseconds, and shorter sleeps spin."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC if sys.platform == "linux" else 0
_SHORTEST_S = 0.001
"""Of an ordinary timer, where there is no timerfd."""
_SOONEST_S = 0.00001
"""Between two looks; 0 would disarm the timer."""
REHEARSAL = 16
"""Every so manieth look wakes the task, though in vain.

Else the code that is in a hurry behind the last look has left the processor's caches by then: rehearsed, a
task goes on in about half the time.
"""


Look = Callable[[], float | None]
"""Something that is asked again after so many seconds; None: no more."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class FineTimer:
    """Sleeps of microseconds, for one task at a time, on one `timerfd`. Close it when its loop ends.

    Where there is no timerfd, or the loop cannot watch one, sleeps take at least 1 ms.
    """

    def __init__(self) -> None:
        # Calls that are too short to be worth giving the interpreter lock away.
        self._libc = ctypes.PyDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._value = _Itimerspec()
        self._waiter: asyncio.Future[None] | None = None
        self._look: Look | None = None
        self._looks_left = 0
        self._next_s: float | None = None
        """What the last look said."""
        self._loop = asyncio.get_running_loop()
        self._fd = self._open()

    def _open(self) -> int:
        if self._libc is None:
            return -1
        fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if fd >= 0:
            self._loop.add_reader(fd, self._expired)
        return fd

    @property
    def fine(self) -> bool:
        """There is a timerfd."""
        return self._fd >= 0

    async def sleep(self, seconds: float) -> None:
        """Sleep; not at all for 0 and less. Cancelling it disarms the timer."""
        if seconds <= 0:
            return
        if not self.fine:
            await asyncio.sleep(max(seconds, _SHORTEST_S))
            return
        assert self._waiter is None, "two tasks sleep on one timer"
        self._waiter = self._loop.create_future()
        self._arm(seconds)
        try:
            await self._waiter
        finally:
            if not self._waiter.done() or self._waiter.cancelled():
                self._arm(0.0)
            self._waiter = None

    async def repeat(self, look: Look) -> None:
        """Call `look`, now and then after as many seconds as it says, until it says None.

        It is called from the loop itself, which costs less than waking a task each time. What it raises is
        raised here. Cancelling it disarms the timer.
        """
        seconds = look()
        while seconds is not None:
            if self.fine:
                seconds = await self._look_some_times(look, seconds)
            else:
                await asyncio.sleep(max(seconds, _SHORTEST_S))
                seconds = look()

    async def _look_some_times(self, look: Look, seconds: float) -> float | None:
        """See `REHEARSAL`; what the last look said."""
        self._look, self._looks_left = look, REHEARSAL
        try:
            await self.sleep(max(seconds, _SOONEST_S))
        finally:
            self._look = None
        return self._next_s

    async def sleep_until(self, deadline: float) -> None:
        """Sleep until `time.monotonic()` is `deadline`."""
        await self.sleep(deadline - time.monotonic())

    def _arm(self, seconds: float) -> None:
        whole, rest = divmod(max(0, round(seconds * 1e9)), 1_000_000_000)
        self._value.value.seconds, self._value.value.nanoseconds = whole, rest
        assert self._libc is not None
        if self._libc.timerfd_settime(self._fd, 0, ctypes.byref(self._value), None) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _expired(self) -> None:
        waiter = self._waiter
        if self._look is not None and waiter is not None and not waiter.done():
            try:
                seconds = self._next_s = self._look()
            except Exception as error:  # whoever waits for the looks gets it
                waiter.set_exception(error)
            else:
                self._looks_left -= 1
                if seconds is None or not self._looks_left:
                    waiter.set_result(None)
                else:
                    self._arm(max(seconds, _SOONEST_S))
                # The new time makes the descriptor unreadable; else it is read in the next turn, behind the
                # task that is woken, which is in a hurry.
                return
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # disarmed in between
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
