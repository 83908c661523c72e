"""The side thread of the benchmark `sglang`: it stands for what else needs a scheduler's interpreter."""

from __future__ import annotations

import threading
import time

WORK_S = 50e-6
PAUSE_S = 0.001


class SideThread:
    """50 µs of Python, then 1 ms of sleep, over and over; the work is a fixed number of steps."""

    def __init__(self) -> None:
        self._steps = _steps_for(WORK_S)
        self._stopped = False
        self.rounds = 0
        self._thread = threading.Thread(target=self._run, name="side", daemon=True)
        self._thread.start()
        self.clock_id = time.pthread_getcpuclockid(self._thread.ident or 0)
        """Of its CPU clock."""

    def _run(self) -> None:
        while not self._stopped:
            _work(self._steps)
            time.sleep(PAUSE_S)
            self.rounds += 1

    def rate_alone(self, seconds: float) -> float:
        """Rounds a second, while the calling thread, which is the scheduler's, sleeps."""
        before, started = self.rounds, time.monotonic()
        time.sleep(seconds)
        return (self.rounds - before) / (time.monotonic() - started)

    def stop(self) -> None:
        """End it."""
        self._stopped = True
        self._thread.join()


def _work(steps: int) -> int:
    total = 0
    for step in range(steps):
        total += step
    return total


def _steps_for(seconds: float) -> int:
    """Steps that take `seconds`: by the fastest of many tries, for others disturb it."""
    steps, fastest = 1000, float("inf")
    for _ in range(200):
        started = time.perf_counter()
        _work(steps)
        fastest = min(fastest, time.perf_counter() - started)
    return max(1, round(steps * seconds / fastest))
