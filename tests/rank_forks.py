"""Groups of ranks that tests start, watch and signal: the other side of `rank_process.py`."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

SCRIPT = Path(__file__).with_name("rank_process.py")
PATIENCE_S = 180.0
Event = dict[str, Any]


class Forge:
    """The process that forks ranks, one group at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("AIOPREFILL_")},
                "PYTHONUNBUFFERED": "1",
                "OMP_NUM_THREADS": "1",  # no threads before a fork
                "OPENBLAS_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "XDG_CONFIG_HOME": "/nonexistent",
            },
        )
        self.events: queue.Queue[Event | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                self.events.put(msgspec.json.decode(line))
            else:  # rank 0 of `aioprefill serve` tells where it serves
                self.events.put({"event": "printed", "rank": 0, "text": line.decode().rstrip()})
        self.events.put(None)

    def ask(self, **job: Any) -> None:
        """Have a group forked."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it, and with it every rank that is left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdin.close()
        self._process.stdout.close()


class Ranks:
    """A group that was forked. Times are of the monotonic clock, which all processes of a machine share."""

    def __init__(self, forge: Forge, folder: Path, size: int) -> None:
        self._forge, self._folder, self.size = forge, folder, size
        self.events: list[Event] = []
        self.ends: dict[int, Event] = {}
        """How each rank has ended, by rank."""
        self._pids: list[int] = self.wait(lambda event: event["event"] == "started")["pids"]

    def wait(self, wanted: Callable[[Event], bool]) -> Event:
        """The first event of that kind that has not been waited for; all others are kept in `events`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                event = self._forge.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                event = None
            assert event is not None, f"it did not come; so far: {self.events}\n{self.printed()}"
            self.events.append(event)
            if event["event"] == "ended":
                self.ends[event["rank"]] = event
            if wanted(event):
                return event

    def wait_said(self, what: str, ranks: set[int] | None = None) -> list[Event]:
        """Until each of `ranks`, or all, has said `what`."""
        missing = set(range(self.size)) if ranks is None else set(ranks)
        found = [event for event in self.events if event["event"] == what and event["rank"] in missing]
        missing -= {event["rank"] for event in found}
        while missing:
            event = self.wait(lambda event: event["event"] == what and event["rank"] in missing)
            missing.discard(event["rank"])
            found.append(event)
        return found

    def said(self, what: str, rank: int) -> Event:
        """What a rank has said, once."""
        found = [event for event in self.events if event["event"] == what and event["rank"] == rank]
        assert len(found) == 1, f"rank {rank} said {what} {len(found)} times: {self.events}\n{self.printed()}"
        return found[0]

    def signal(self, rank: int, number: int) -> float:
        """Send a signal to a rank that has not ended; when."""
        assert rank not in self.ends
        os.kill(
            self._pids[rank], number
        )  # not waited for before its end is told, so it is still that process
        return time.monotonic()

    def finish(self) -> list[list[Event]]:
        """All have ended well; what they saw, by scenario and rank."""
        self.wait_said("ended")
        codes = [self.ends[rank]["code"] for rank in range(self.size)]
        assert codes == [0] * self.size, f"ended with {codes}\n{self.printed()}"
        return [list(each) for each in zip(*map(self.saw, range(self.size)), strict=True)]

    def saw(self, rank: int) -> list[Event]:
        """What a rank saw, by scenario."""
        path = self._folder / f"rank-{rank}.json"
        assert path.exists(), f"rank {rank} has left nothing\n{self.printed()}"
        found: list[Event] = msgspec.json.decode(path.read_bytes())
        return found

    def printed(self, rank: int | None = None) -> str:
        """What the ranks printed."""
        paths = sorted(self._folder.glob(f"rank-{'*' if rank is None else rank}.err"))
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')}" for path in paths)

    def end(self) -> None:
        """Kill who is left."""
        for rank, pid in enumerate(self._pids):
            if rank not in self.ends:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait_said("ended")


@contextmanager
def running(forge: Forge, folder: Path, size: int, **job: Any) -> Iterator[Ranks]:
    """A group; nobody of it is left afterwards."""
    folder.mkdir()
    forge.ask(size=size, folder=str(folder), **job)
    ranks = Ranks(forge, folder, size)
    try:
        yield ranks
    finally:
        ranks.end()
