"""A rank as a process, for tests.

`ranks_process.py join TIMEOUT_S`: joins a group by its environment, makes one vote, prints what it found.

`ranks_process.py watch FOLDER RANK SIZE TIMEOUT_S BEAT_S GRACE_S`: watches, with a folder for a store and
without torch. Prints "hears" when it has heard all ranks (rank 0) or the table (others), then what it is told
of. A line on stdin has it act: "sit" blocks its loop inside a host call, "fail" reports an error of its own,
"leave" ends in order.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import uvloop

from aioprefill.errors import AioprefillError, RankError
from aioprefill.ranks.place import RankPlace, place_from_environment
from aioprefill.ranks.progress import RankProgress
from aioprefill.ranks.watch import Watch
from aioprefill.ranks.wires import Wires


class FolderBoard:
    """A `Board` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(self, key: str, value: bytes) -> None:
        """See `Board.publish`."""
        path = self._folder / key.replace("/", "-")
        path.with_suffix(f".{os.getpid()}").write_bytes(value)
        path.with_suffix(f".{os.getpid()}").rename(path)

    def lookup(self, key: str, rank: int = 0) -> bytes:
        """See `Board.lookup`."""
        path, deadline = self._folder / key.replace("/", "-"), time.monotonic() + 30
        while not path.exists():
            if time.monotonic() > deadline:
                raise RankError(rank, f"did not publish {key}")
            time.sleep(0.005)
        return path.read_bytes()


def say(*words: object) -> None:
    """One line to the test."""
    print(*words, flush=True)


class Group:
    """What a watch needs of a group."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.place = RankPlace(rank, size, rank)
        self.wires = Wires.exchange(self.place, FolderBoard(folder))


async def watch(folder: Path, rank: int, size: int, timeout_s: float, beat_s: float, grace_s: float) -> None:
    """One rank that is watched and watches."""
    loop = asyncio.get_running_loop()
    group, progress, end = Group(folder, rank, size), RankProgress(), asyncio.Event()
    progress.executed, progress.forward = 8, 3

    def on_stuck(error: RankError) -> None:
        say("stuck", f"{time.monotonic():.3f}", error)
        os._exit(3)

    watching = Watch(
        group,
        progress,
        timeout_s=timeout_s,
        beat_s=beat_s,
        grace_s=grace_s,
        on_lost=lambda error: say("lost", f"{time.monotonic():.3f}", error),
        on_stuck=on_stuck,
    )

    def act() -> None:
        for word in sys.stdin.readline().split() or ["leave"]:
            say("does", word, f"{time.monotonic():.3f}")
            if word == "sit":
                progress.executed = 7  # the others have carried out call 8
                progress.begin_call("process_result")
                threading.Event().wait()
            elif word == "fail":
                progress.error = "its device is lost"
                watching.tell_now()
            elif word == "leave":
                end.set()

    loop.add_reader(0, act)
    watching.start()
    table = watching._table
    while not all(known.beat for known in table._ranks):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    say("hears")
    await end.wait()
    await watching.aclose()
    say("cpu", f"{time.process_time():.4f}")
    group.wires.close()


def join(timeout_s: float) -> None:
    """One rank that joins, votes and leaves."""
    import torch
    import torch.distributed as dist

    from aioprefill.ranks.group import RankGroup

    size = int(os.environ["WORLD_SIZE"])
    place = place_from_environment(os.environ, size)
    assert place is not None
    group = RankGroup.join(place, device="cpu", timeout_s=timeout_s)
    ballot = torch.tensor([place.rank + 5])
    dist.all_reduce(ballot, op=dist.ReduceOp.MIN, group=group.vote_group)
    group.publish(f"hello/{place.rank}", b"\0%d" % place.rank)
    hello = group.lookup(f"hello/{size - 1}", size - 1)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    say("joined", place.rank, int(ballot), hello, group.shared_id, interface, group.wires.addresses.watch)
    dist.barrier()
    group.close()
    group.close()


def main() -> int:
    """Exit code 1 for an error of ours, told on stdout."""
    try:
        match sys.argv[1:]:
            case ["join", timeout_s]:
                join(float(timeout_s))
            case ["watch", folder, rank, size, *times]:
                timeout_s, beat_s, grace_s = map(float, times)
                uvloop.run(watch(Path(folder), int(rank), int(size), timeout_s, beat_s, grace_s))
    except AioprefillError as err:
        say("error", err.code, err)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
