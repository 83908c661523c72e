"""Copies of results to the host that take their time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any


class Copies:
    """Stands for the device's copies: `copy_done` is set `delay_s(forward number)` after its launch.

    Copies end in launch order, as on a stream.
    """

    def __init__(self, delay_s: Callable[[int], float | None]) -> None:
        self._delay_s = delay_s
        self._queue: deque[tuple[Any, float]] = deque()
        self._condition = threading.Condition()
        self._number = 0
        self._free_at = 0.0
        self._stopped = False
        self.held: dict[int, Any] = {}
        """Copies without a delay: tests set them."""
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def begin(self) -> Any:
        """A copy is queued; the `copy_done` of its forward."""
        from sglang.srt.managers.async_d2h_copy_worker import HostCopyDone

        done, number = HostCopyDone(), self._number
        self._number += 1
        delay_s = self._delay_s(number)
        if delay_s is None:
            self.held[number] = done
        elif delay_s <= 0:
            done.set_done()
        else:
            with self._condition:
                self._free_at = max(self._free_at, time.monotonic()) + delay_s
                self._queue.append((done, self._free_at))
                self._condition.notify()
        return done

    def finish(self, *numbers: int) -> None:
        """End copies that have no delay, in the order given."""
        for number in numbers:
            self.held[number].set_done()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._queue:
                    if self._stopped:
                        return
                    self._condition.wait()
                done, due = self._queue.popleft()
            time.sleep(max(0.0, due - time.monotonic()))
            done.set_done()

    def stop(self) -> None:
        """No more copies."""
        with self._condition:
            self._stopped = True
            self._condition.notify()
