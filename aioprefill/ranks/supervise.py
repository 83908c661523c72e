"""What `aioprefill serve --tp N` does in its first process: start N ranks, and end when they do.

Rank 0 is the one that serves: it has our stdout, and the signals go to it alone; it drains and tells the
others by the call order. A rank that ends brings the others down: they notice by themselves, answer their
clients and report; those that do not, in `grace_s`, get SIGTERM, then SIGKILL. When this process is killed,
the ranks see the end of their stdin.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from aioprefill.process import ENDS_WITH_PARENT, EXIT_DRAINED, EXIT_STUCK
from aioprefill.ranks.child import RankChild, describe, exit_code
from aioprefill.ranks.place import (
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    RANK_STORE,
    WORLD_SIZE,
)

GRACE_S = 30.0
"""How long ranks may go on when one has ended: they drain, or answer their clients and report."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
TOGETHER_S = 0.05
"""Ends that come so close cannot be told apart by their order."""
TERM_S = 5.0
"""How long a rank may take to end after SIGTERM."""


def supervise(
    argv_of_a_rank: Sequence[str], size: int, *, grace_s: float = GRACE_S, term_s: float = TERM_S
) -> int:
    """Run `size` ranks with this command line until all have ended; the exit code of the first that failed.

    128 and the signal's number stand for a rank that was killed by a signal; 0 when all ended in order, and
    `EXIT_STUCK` when a rank that nobody had failed before had to be killed. What failed is told on stderr,
    with the rank's last lines. Raises `HostError` when a rank cannot be started. To be called in the main
    thread, without a running loop.
    """
    with tempfile.TemporaryDirectory(prefix="aioprefill-ranks-") as folder:  # for this user only

        async def run() -> int:
            return await Supervisor(argv_of_a_rank, size, Path(folder), grace_s, term_s).run()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())


class Supervisor:
    """The ranks of one run."""

    def __init__(self, argv: Sequence[str], size: int, folder: Path, grace_s: float, term_s: float) -> None:
        """See `supervise`; `folder` is for the store through which the ranks find each other."""
        self._argv = argv
        self._size = size
        self._folder = folder
        self._grace_s, self._term_s = grace_s, term_s
        self._children: list[RankChild] = []
        self._failures: list[tuple[float, RankChild]] = []
        """Ranks that failed by themselves, and when."""
        self._signals = 0
        self._pressed = False
        """A rank was told to end, or killed, because it went on alone."""
        self._one_ended = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """See `supervise`. Cancelled, it kills the ranks."""
        loop = asyncio.get_running_loop()
        early: list[int] = []
        for number in SIGNALS:
            loop.add_signal_handler(number, early.append, number)
        try:
            for rank in range(self._size):
                child = await RankChild.start(rank, self._argv, self._environ(rank), _pass_on, self._on_exit)
                self._children.append(child)
            for number in SIGNALS:
                loop.add_signal_handler(number, self._on_signal, number)
            for came in early:
                self._on_signal(came)
            await self._one_ended.wait()
            await self._bring_down()
            return self._conclude()
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            self._signal_all(signal.SIGKILL)
            await asyncio.gather(*(child.ended for child in self._children))

    def _environ(self, rank: int) -> dict[str, str]:
        """What a rank needs to know, over our own environment. Everything is on this machine."""
        environ = dict(os.environ)
        for name in (MASTER_ADDR, MASTER_PORT):  # the ranks meet through the file
            environ.pop(name, None)
        environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // self._size)))
        return environ | {
            RANK: str(rank),
            WORLD_SIZE: str(self._size),
            LOCAL_RANK: str(rank),
            LOCAL_WORLD_SIZE: str(self._size),
            RANK_STORE: str(self._folder / "store"),
            ENDS_WITH_PARENT: "1",
            "PYTHONUNBUFFERED": "1",
        }

    def _on_signal(self, number: int) -> None:
        """To rank 0: the first has it drain, the second leave. When it has ended, wait no longer."""
        self._signals += 1
        if self._children[0].code is None:
            self._children[0].signal(number)
        else:
            self._hurry.set()

    def _on_exit(self, child: RankChild) -> None:
        if child.code and not self._pressed:
            self._failures.append((asyncio.get_running_loop().time(), child))
            _say(f"rank {child.rank} {describe(child.code)}")
        self._one_ended.set()

    async def _bring_down(self) -> None:
        """See that all ranks end, now that one has."""
        forced = self._signals > 1  # whoever wants it at once does not wait for the others either
        await self._wait_all(self._term_s if forced else self._grace_s)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal_all(number)
            await self._wait_all(self._term_s)

    async def _wait_all(self, timeout_s: float) -> None:
        """Until all have ended, at most so long, or until a signal says to hurry."""
        all_ended = asyncio.ensure_future(asyncio.wait([child.ended for child in self._children]))
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait([all_ended, hurry], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hurry.clear()
            for wait in (all_ended, hurry):
                wait.cancel()
            await asyncio.gather(all_ended, hurry, return_exceptions=True)

    def _signal_all(self, number: signal.Signals) -> None:
        """To those that have not ended."""
        for child in self._children:
            if child.code is None:
                self._pressed = True
                _say(f"rank {child.rank} goes on although another one has ended, so it gets {number.name}")
                child.signal(number)

    def _conclude(self) -> int:
        """The exit code, told with its reason. Of ranks that failed at once, a killed one is the cause."""
        if not self._failures:
            return EXIT_STUCK if self._pressed else EXIT_DRAINED
        first_at = self._failures[0][0]
        together = [child for at, child in self._failures if at - first_at < TOGETHER_S]
        first = next((child for child in together if (child.code or 0) < 0), together[0])
        assert first.code is not None
        lines = "\n".join(f"    {line}" for line in first.lines)
        _say(
            f"rank {first.rank} failed first: it {describe(first.code)}"
            + (f"; its last lines:\n{lines}" if lines else " and said nothing")
        )
        return exit_code(first.code)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pass_on(rank: int, line: bytes) -> None:
    """A rank's line, to our stderr."""
    data = memoryview(b"[rank %d] %s\n" % (rank, line))
    with contextlib.suppress(OSError):  # nobody reads it: no reason to stop serving
        while data:  # with PYTHONUNBUFFERED a write takes what it can, no more
            data = data[sys.stderr.buffer.write(data) or len(data) :]
        sys.stderr.buffer.flush()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"aioprefill: {text}", file=sys.stderr, flush=True)
