"""One rank of one measurement of the benchmark `sglang`: a scheduler of SGLang's in a process of its own.

The scheduler's loop has the main thread, as in SGLang. A second thread measures, by the clocks of the main
thread. A third one stands for what else needs the interpreter. Rank 0 starts the processes of the others.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec

from aioprefill.bench.sglang_device import Device
from aioprefill.bench.sglang_directors import (
    Child,
    Director,
    FollowingDirector,
    LeadingDirector,
    Orders,
    start_client,
)
from aioprefill.bench.sglang_server import Task, encode_messages, make_scheduler
from aioprefill.bench.sglang_side import SideThread
from aioprefill.bench.sglang_watch import Watch


class Follower(Child):
    """The process of a rank other than 0. Where it fails, so does this one, which may wait for it."""

    def __init__(self, task: Task, rank: int, folder: Path) -> None:
        self._result = folder / f"rank{rank}.json"
        task = msgspec.structs.replace(task, rank=rank)
        words = [msgspec.json.encode(task).decode(), str(self._result)]
        super().__init__("aioprefill.bench.sglang_rank", words, answers=False)
        threading.Thread(target=self._watch, name=f"rank {rank}", daemon=True).start()

    def _watch(self) -> None:
        if code := self.process.wait():
            print(f"the process of another rank ended with {code}", file=sys.stderr, flush=True)
            os._exit(1)

    def measured(self) -> dict[str, Any]:
        """Wait for its end; what it has measured."""
        self.wait()
        found: dict[str, Any] = json.loads(self._result.read_text())
        return found


def measure(task: Task, folder: Path) -> list[dict[str, Any]]:
    """Run one scheduler once; what came of it, on rank 0 by rank. On the main thread, once in a process."""
    if task.rank == 0:
        task = msgspec.structs.replace(task, meeting=f"127.0.0.1:{_free_port()}")
    orders = Orders() if task.rank else None
    followers = [] if task.rank else [Follower(task, rank, folder) for rank in range(1, task.ranks)]
    scheduler, endpoint = make_scheduler(task)
    watch = Watch(scheduler, Device(task.forward_ms, task.jitter, rank=task.rank, ranks=task.ranks))
    side = SideThread()
    director: Director
    client = None
    if orders is None:
        messages = folder / "messages"
        messages.write_bytes(msgspec.msgpack.encode(encode_messages(task)))
        client = start_client(endpoint, messages, task.rate)
        director = LeadingDirector(task, scheduler, watch, side, client, followers)
    else:
        director = FollowingDirector(watch, side, orders)
    gc.collect()
    gc.freeze()
    gc.enable()
    alone = [side.rate_alone(task.alone_s)]
    director.start()
    scheduler.run_event_loop()
    director.join()
    if client is not None:
        client.wait()
    alone.append(side.rate_alone(task.alone_s))
    side.stop()
    measured = director.measured(task.forwards)
    measured["side_progress_percent"] = 100 * measured.pop("side_rounds_per_s") / statistics.mean(alone)
    measured["load_average"] = os.getloadavg()[0]
    return [measured, *(follower.measured() for follower in followers)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    """The task is the first argument, as JSON; the second one names the file for what was measured.

    Rank 0 writes a list, by rank; another rank what it has measured itself.
    """
    task = msgspec.json.decode(sys.argv[1], type=Task)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(task, Path(folder))
    Path(sys.argv[2]).write_text(json.dumps(measured if task.rank == 0 else measured[0]))
    sys.stderr.flush()
    os._exit(0)  # SGLang's threads have no end of their own: its process is killed as well
