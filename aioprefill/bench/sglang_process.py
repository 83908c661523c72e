"""One measurement of the benchmark `sglang`: a scheduler of SGLang's in a process of its own, in one mode.

The scheduler's loop has the main thread, as in SGLang. A second thread measures: it opens and closes the
window by the clocks of the main thread. A third one stands for what else needs the interpreter.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from aioprefill.bench.sglang_device import RETIREMENTS, Device
from aioprefill.bench.sglang_server import WARM_UP, Task, encode_messages, make_scheduler
from aioprefill.bench.sglang_watch import Watch

SIDE_WORK_S = 50e-6
SIDE_PAUSE_S = 0.001
ALONE_S = 2.0
"""How long the side thread runs alone, before and after, to know what it manages."""
QUIET_S = 60.0
"""Longest time that the requests of one measurement may take to end behind the window."""
SETTLE_S = 0.3
"""Between the last retirement and the look at idleness."""


class SideThread:
    """50 µs of Python, then 1 ms of sleep, over and over; the work is a fixed number of steps."""

    def __init__(self) -> None:
        self._steps = _steps_for(SIDE_WORK_S)
        self._stopped = False
        self.rounds = 0
        self._thread = threading.Thread(target=self._run, name="side", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped:
            _work(self._steps)
            time.sleep(SIDE_PAUSE_S)
            self.rounds += 1

    def rate_alone(self) -> float:
        """Rounds a second, while the calling thread, which is the scheduler's, sleeps."""
        before, started = self.rounds, time.monotonic()
        time.sleep(ALONE_S)
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


class Reading:
    """All counters at one moment. `clock_id` is the CPU clock of the main thread."""

    def __init__(self, watch: Watch, side: SideThread, clock_id: int) -> None:
        self.ns = time.monotonic_ns()
        self.cpu_s = time.clock_gettime(clock_id)
        self.host_ns, self.passes, self.rounds = watch.sight.host_ns, watch.sight.passes, side.rounds


class Client:
    """The client process; see `sglang_client`."""

    def __init__(self, endpoint: str, messages: Path, rate: float) -> None:
        words = ["--endpoint", endpoint, "--messages", str(messages), "--rate", str(rate)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aioprefill.bench.sglang_client", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.read()

    def tell(self, word: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def read(self) -> str:
        """Wait for a line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client process ended with {self._process.wait()}")
        return line

    def wait(self) -> None:
        """Wait for its end."""
        if self._process.wait():
            raise RuntimeError("the client process failed")


class Director(threading.Thread):
    """Leads through one measurement, while the loop has the main thread."""

    def __init__(self, task: Task, scheduler: Any, watch: Watch, side: SideThread, client: Client) -> None:
        super().__init__(name="director", daemon=True)
        self._task, self._scheduler, self._watch = task, scheduler, watch
        self._side, self._client = side, client
        self._clock_id = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self.measured: dict[str, Any] = {}

    def run(self) -> None:
        """A failure ends the process: the loop would never be told to end."""
        try:
            self._direct()
        except BaseException as error:
            print(f"the measurement failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)

    def _direct(self) -> None:
        task, watch, client = self._task, self._watch, self._client
        client.tell("go")
        watch.wait_results(WARM_UP)
        opened = self._read()
        watch.wait_results(WARM_UP + task.forwards)
        closed = self._read()
        client.tell("stop")
        sent_ns: list[int] = json.loads(client.read())
        self._wait_quiet(len(sent_ns))
        time.sleep(SETTLE_S)
        before = self._read()
        time.sleep(task.idle_s)
        after = self._read()
        self.measured = self._sums(opened, closed, sent_ns)
        self.measured["idle_cpu_percent"] = 100e9 * (after.cpu_s - before.cpu_s) / (after.ns - before.ns)
        client.tell("end")

    def _wait_quiet(self, requests: int) -> None:
        deadline = time.monotonic() + QUIET_S
        while len(RETIREMENTS.done) < requests or not self._scheduler.is_fully_idle():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{requests} requests sent, {len(RETIREMENTS.done)} retired")
            time.sleep(0.02)

    def _read(self) -> Reading:
        return Reading(self._watch, self._side, self._clock_id)

    def _sums(self, opened: Reading, closed: Reading, sent_ns: list[int]) -> dict[str, Any]:
        """What lies in the window: requests by their send, forwards by their result."""
        sight = self._watch.sight
        inside = [(n, at) for n, at in enumerate(sent_ns) if opened.ns <= at < closed.ns]
        took = (closed.ns - opened.ns) / 1e9
        forwards = sight.copies[WARM_UP : WARM_UP + self._task.forwards]
        return {
            "seconds": took,
            "main_thread_cpu_percent": 100 * (closed.cpu_s - opened.cpu_s) / took,
            "host_call_cpu_percent": (closed.host_ns - opened.host_ns) / 1e7 / took,
            "passes_per_s": (closed.passes - opened.passes) / took,
            "side_rounds_per_s": (closed.rounds - opened.rounds) / took,
            "intake_us": [(sight.received_ns[n] - at) / 1e3 for n, at in inside],
            "dispatch_us": [(sight.dispatched_ns[n] - at) / 1e3 for n, at in inside],
            "detect_us": [(copy.detected_ns - copy.due_ns) / 1e3 for copy in forwards],
            "retire_us": [
                (retired - success) / 1e3
                for success, retired in RETIREMENTS.done
                if opened.ns <= success < closed.ns
            ],
        }


def measure(task: Task, folder: Path) -> dict[str, Any]:
    """Run one scheduler once; what came of it. Must run on the main thread, once in a process."""
    scheduler, endpoint = make_scheduler(task)
    messages = folder / "messages"
    messages.write_bytes(msgspec.msgpack.encode(encode_messages(task)))
    client = Client(endpoint, messages, task.rate)
    watch = Watch(scheduler, Device(task.forward_ms, task.jitter))
    gc.collect()
    gc.freeze()
    side = SideThread()
    alone = [side.rate_alone()]
    director = Director(task, scheduler, watch, side, client)
    director.start()
    scheduler.run_event_loop()
    director.join()
    client.wait()
    alone.append(side.rate_alone())
    side.stop()
    measured = director.measured
    measured["side_progress_percent"] = 100 * measured.pop("side_rounds_per_s") / statistics.mean(alone)
    measured["load_average"] = os.getloadavg()[0]
    return measured


def main() -> None:
    """The task is the first argument, as JSON; the second one names the file for what was measured."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(task, Path(folder))
    Path(sys.argv[2]).write_text(json.dumps(measured))
    sys.stderr.flush()
    os._exit(0)  # SGLang's threads have no end of their own: its process is killed as well


if __name__ == "__main__":
    main()
