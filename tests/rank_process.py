"""Ranks as processes, for tests. `rank_process.py` imports what a rank needs once, and forks ranks when told.

A line on stdin is a `Job`. What happens is told in lines of JSON on stdout, each with its rank: what ranks
say, and at last how each of them has ended. A rank plays its scenarios one after the other, each over sockets
of its own, and leaves what it saw in `FOLDER/rank-N.json`; or it is a rank of `aioprefill serve`, from its
command line on. A rank ends as a rank of `serve` does: when another one is lost, by `leave`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import numpy.ma  # noqa: F401  numpy imports it at its first use
import rank_scenarios
import torch

import aioprefill.native.serve_rank  # noqa: F401  with it comes what a rank of `serve` takes long to import
from aioprefill.cli import main as command_line
from aioprefill.errors import AioprefillError, RankError
from aioprefill.process import EXIT_DRAINED, EXIT_FAILED, EXIT_RANK_LOST, leave
from aioprefill.ranks.group import RankGroup
from aioprefill.ranks.place import RANK_STORE, place_from_environment
from aioprefill.ranks.runtime import GroupLink
from aioprefill.ranks.wires import Wires

PR_SET_PDEATHSIG = 1
STDIN, STDOUT, STDERR = 0, 1, 2


class Job(msgspec.Struct, kw_only=True):
    """A group of ranks."""

    size: int
    folder: str
    """Empty: for their store, what they print on stderr, and what they saw."""
    timeout_s: float = 20.0
    """The rank timeout."""
    beat_s: float = 0.1
    scenarios: list[tuple[str, dict[str, Any]]] = []
    """Functions of `rank_scenarios`, and their options."""
    serve: list[str] = []
    """Options of `aioprefill serve`, instead."""


def say(**event: Any) -> None:
    """One line to the test. It is written at once, so that lines of several processes do not mix."""
    os.write(STDOUT, msgspec.json.encode({**event, "at": time.monotonic()}) + b"\n")


class Board:
    """A `wires.Board` of one scenario: keys of another one are not found."""

    def __init__(self, group: RankGroup, number: int) -> None:
        self._group, self._prefix = group, f"scenario-{number}/"

    def publish(self, key: str, value: bytes) -> None:
        """See `Board.publish`."""
        self._group.publish(self._prefix + key, value)

    def lookup(self, key: str, rank: int = 0) -> bytes:
        """See `Board.lookup`."""
        return self._group.lookup(self._prefix + key, rank)


def fork_ranks() -> tuple[Job, int] | None:
    """In a rank: its job and its number. In the first process: None, when stdin has ended."""
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=Job)
        ranks: dict[int, int] = {}
        for rank in range(job.size):
            pid = os.fork()
            if pid == 0:
                return job, rank
            ranks[pid] = rank
        say(event="started", rank=-1, pids=list(ranks))
        while ranks:
            pid, status = os.wait()
            say(event="ended", rank=ranks.pop(pid), code=os.waitstatus_to_exitcode(status))
    return None


def be_rank(job: Job, rank: int) -> int:
    """The exit code."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    folder = Path(job.folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
    os.dup2(os.open(folder / f"rank-{rank}.err", os.O_WRONLY | os.O_CREAT), STDERR)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.size),
        RANK_STORE: str(folder / "store"),
    }
    if job.serve:
        sys.argv = ["aioprefill", "serve", *job.serve]
        command_line()
    torch.set_num_threads(1)
    place = place_from_environment(os.environ, job.size)
    assert place is not None
    group = RankGroup.join(place, device="cpu", vote_timeout_s=job.timeout_s)
    seen: list[dict[str, Any]] = []
    for number, (name, options) in enumerate(job.scenarios):
        group.wires.close()
        group.wires = Wires.exchange(place, Board(group, number))
        code = play(name, options, group, job, seen)
        if code:
            return code
    group.close()
    return EXIT_DRAINED


def play(name: str, options: dict[str, Any], group: RankGroup, job: Job, seen: list[dict[str, Any]]) -> int:
    """One scenario; the exit code, 0 to go on. Where others follow, errors of ours end nothing."""
    rank = group.place.rank

    def stuck(error: RankError) -> None:
        say(event="stuck", rank=rank, error=str(error), culprit=error.rank)
        leave(EXIT_RANK_LOST, f"error: {error}; this rank's loop does not react")

    found: dict[str, Any] = {"scenario": name}
    seen.append(found)
    link: GroupLink | None = None

    def make_link() -> GroupLink:
        nonlocal link
        link = GroupLink(group, timeout_s=job.timeout_s, on_stuck=stuck, beat_s=job.beat_s)
        return link

    lost: RankError | None = None
    try:
        rank_scenarios.run(name, rank_scenarios.World(rank, job.size, options, found, say, group, make_link))
    except RankError as error:
        lost = error
    except AioprefillError as error:
        found["error"] = [error.code, str(error)]
    except BaseException:
        traceback.print_exc()
        leave(EXIT_FAILED)
    if lost is not None:
        found["error"] = [lost.code, str(lost)]
        say(event="lost", rank=rank, error=str(lost), culprit=lost.rank)
    (Path(job.folder) / f"rank-{rank}.json").write_bytes(msgspec.json.encode(seen))
    if lost is not None and len(job.scenarios) == 1:
        leave(EXIT_RANK_LOST, f"error: {lost}")
    if link is not None and link.voting:
        leave(EXIT_FAILED, "a vote hangs: leaving without it")
    return EXIT_DRAINED


def main() -> int:
    """Fork ranks until stdin ends; or be one."""
    forked = fork_ranks()
    return EXIT_DRAINED if forked is None else be_rank(*forked)


if __name__ == "__main__":
    sys.exit(main())
