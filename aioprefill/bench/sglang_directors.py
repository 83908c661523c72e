"""Who leads through a measurement of the benchmark `sglang`, while the loop has the main thread.

Rank 0's director opens and closes the window and the look at idleness; directors of other ranks read their
counters when it reads its own, told by a line each on their standard input.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aioprefill.bench.sglang_device import RETIREMENTS
from aioprefill.bench.sglang_server import WARM_UP, Task
from aioprefill.bench.sglang_side import SideThread
from aioprefill.bench.sglang_watch import Watch

QUIET_S = 60.0
"""Longest time that the requests of one measurement may take to end behind the window."""
SETTLE_S = 0.3
"""Between the last retirement and the look at idleness."""
MOMENTS = ("opened", "closed", "before", "after")
"""When counters are read: around the window, and around a time without requests."""


class Child:
    """Another process, which is told what to do by lines."""

    def __init__(self, module: str, words: Sequence[str], *, answers: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else None,
            text=True,
        )

    def tell(self, word: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def read(self) -> str:
        """Wait for a line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a child process ended with {self.process.wait()}")
        return line

    def wait(self) -> None:
        """Wait for its end."""
        if code := self.process.wait():
            raise RuntimeError(f"a child process ended with {code}")


def start_client(endpoint: str, messages: Path, rate: float) -> Child:
    """See `sglang_client`."""
    words = ["--endpoint", endpoint, "--messages", str(messages), "--rate", str(rate)]
    client = Child("aioprefill.bench.sglang_client", words)
    client.read()
    return client


class Reading:
    """All counters at one moment. `clock_id` is the CPU clock of the main thread."""

    def __init__(self, watch: Watch, side: SideThread, clock_id: int) -> None:
        self.ns = time.monotonic_ns()
        self.cpu_s = time.clock_gettime(clock_id)
        self.process_s = time.process_time() - time.clock_gettime(side.clock_id)
        self.host_ns, self.passes, self.rounds = watch.sight.host_ns, watch.sight.passes, side.rounds


class Director(threading.Thread):
    """What directors share. A failure ends the process: the loop would never be told to end."""

    def __init__(self, watch: Watch, side: SideThread) -> None:
        super().__init__(name="director", daemon=True)
        self._watch, self._side = watch, side
        self._clock_id = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._readings: dict[str, Reading] = {}

    def run(self) -> None:
        """Direct; see above."""
        try:
            self.direct()
        except BaseException as error:
            print(f"the measurement failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)

    def direct(self) -> None:
        """Read the counters at the moments."""
        raise NotImplementedError

    def read(self, moment: str) -> Reading:
        """Read the counters."""
        self._readings[moment] = Reading(self._watch, self._side, self._clock_id)
        return self._readings[moment]

    def measured(self, forwards: int) -> dict[str, Any]:
        """What any rank tells, once the loop has ended; forwards are those of the window."""
        opened, closed, before, after = (self._readings[moment] for moment in MOMENTS)
        took_s, idle_s = (closed.ns - opened.ns) / 1e9, (after.ns - before.ns) / 1e9
        copies = self._watch.sight.copies[WARM_UP : WARM_UP + forwards]
        return {
            "main_thread_cpu_percent": 100 * (closed.cpu_s - opened.cpu_s) / took_s,
            "process_cpu_percent": 100 * (closed.process_s - opened.process_s) / took_s,
            "host_call_cpu_percent": (closed.host_ns - opened.host_ns) / 1e7 / took_s,
            "passes_per_s": (closed.passes - opened.passes) / took_s,
            "side_rounds_per_s": (closed.rounds - opened.rounds) / took_s,
            "idle_cpu_percent": 100 * (after.cpu_s - before.cpu_s) / idle_s,
            "idle_process_cpu_percent": 100 * (after.process_s - before.process_s) / idle_s,
            "due_ns": [copy.due_ns for copy in copies],
            "detected_ns": [copy.detected_ns for copy in copies],
            "transfers": RETIREMENTS.done,
        }


class Orders(threading.Thread):
    """Takes the lines that rank 0 sends to another rank's process, which must not outlive rank 0's."""

    def __init__(self) -> None:
        super().__init__(name="orders", daemon=True)
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Rank 0 closes its end only by ending."""
        for line in sys.stdin:
            self.lines.put(line.strip())
        print("the process of rank 0 has ended", file=sys.stderr, flush=True)
        os._exit(1)


class FollowingDirector(Director):
    """On a rank other than 0."""

    def __init__(self, watch: Watch, side: SideThread, orders: Orders) -> None:
        super().__init__(watch, side)
        self._lines = orders.lines

    def direct(self) -> None:
        """Read when told."""
        for moment in MOMENTS:
            line = self._lines.get()
            if line != moment:
                raise RuntimeError(f"told {line!r} instead of {moment!r}")
            self.read(moment)


class LeadingDirector(Director):
    """On rank 0, which has the client and tells the `followers`, the other ranks' processes."""

    def __init__(
        self,
        task: Task,
        scheduler: Any,
        watch: Watch,
        side: SideThread,
        client: Child,
        followers: Sequence[Child],
    ) -> None:
        super().__init__(watch, side)
        self._task, self._scheduler = task, scheduler
        self._client, self._followers = client, followers
        self._sent_ns: list[int] = []

    def direct(self) -> None:
        """Have requests sent until the forwards are done; then none at all."""
        task, watch, client = self._task, self._watch, self._client
        client.tell("go")
        watch.wait_results(WARM_UP)
        self.read("opened")
        watch.wait_results(WARM_UP + task.forwards)
        self.read("closed")
        client.tell("stop")
        self._sent_ns = json.loads(client.read())
        self._wait_quiet(len(self._sent_ns))
        time.sleep(SETTLE_S)
        self.read("before")
        time.sleep(task.idle_s)
        self.read("after")
        client.tell("end")

    def read(self, moment: str) -> Reading:
        """On all ranks."""
        for follower in self._followers:
            follower.tell(moment)
        return super().read(moment)

    def _wait_quiet(self, requests: int) -> None:
        deadline = time.monotonic() + QUIET_S
        while len(RETIREMENTS.done) < requests or not self._scheduler.is_fully_idle():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{requests} requests sent, {len(RETIREMENTS.done)} retired")
            time.sleep(0.02)

    def measured(self, forwards: int) -> dict[str, Any]:
        """Also the window, and the requests that were sent in it."""
        opened_ns, closed_ns = self._readings["opened"].ns, self._readings["closed"].ns
        sight = self._watch.sight
        inside = [(n, at) for n, at in enumerate(self._sent_ns) if opened_ns <= at < closed_ns]
        return {
            **super().measured(forwards),
            "window_ns": (opened_ns, closed_ns),
            "intake_us": [(sight.received_ns[n] - at) / 1e3 for n, at in inside],
            "dispatch_us": [(sight.dispatched_ns[n] - at) / 1e3 for n, at in inside],
        }
