"""What a test leaves behind: tasks, threads, descriptors, child processes; and what a host still holds.

Tasks are counted when their loop's runner closes, before it cancels them. The rest is compared with what
there was before the test; what ends by itself within a moment is given that moment. Descriptors and child
processes are seen on Linux only.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from aioprefill.native.host import NativeHost
from aioprefill.testing.host import FakeHost

GRACE_S = 1.0
OURS = ("aioprefill", "nixl", "kv ", "zmq")
"""How the names of our threads begin: those count also when they are daemons."""
KEPT = ("/dev/", "/proc/", "/sys/")
"""Descriptors that libraries open once, when first used, and keep."""
PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the process has."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[str, str]]
    """(number, target)."""
    children: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        """As of now."""
        return cls(frozenset(threading.enumerate()), _descriptors(), _children())

    def left_since(self, before: Snapshot) -> list[str]:
        """What is here and was not before, in words."""
        threads = [
            f"thread {thread.name!r}"
            for thread in self.threads - before.threads
            if not thread.daemon or thread.name.lower().startswith(OURS)
        ]
        descriptors = [f"descriptor {fd}: {target}" for fd, target in self.descriptors - before.descriptors]
        children = [f"child process {child}" for child in self.children - before.children]
        return sorted(threads + descriptors + children)


def left_since(before: Snapshot) -> list[str]:
    """What came since `before` and does not go away within `GRACE_S`."""
    left = Snapshot.take().left_since(before)
    deadline = time.monotonic() + GRACE_S
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
        left = Snapshot.take().left_since(before)
    return left


def _tracker(what: str) -> str:
    """Process or descriptor of multiprocessing's resource tracker, which Python starts once and keeps."""
    return str(getattr(getattr(resource_tracker, "_resource_tracker", None), what, None))


def _descriptors() -> frozenset[tuple[str, str]]:
    found, known = set(), {"0", "1", "2", _tracker("_fd")}  # pytest redirects the standard ones as it likes
    try:
        for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208  as quick as can be: it runs around every test
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
            except OSError:
                continue  # the listing's own, closed by now
            if fd not in known and not target.startswith(KEPT):
                found.add((fd, target))
    except FileNotFoundError:
        return frozenset()
    return frozenset(found)


def _children() -> frozenset[str]:
    found: set[str] = set()
    for task in PROC.glob("task/*/children"):
        try:
            found.update(task.read_text().split())
        except OSError:
            continue  # the thread ended meanwhile
    return frozenset(found - {_tracker("_pid")})


def tasks_of(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Tasks of a loop that nobody awaits any more, in words."""
    return sorted(f"task {task.get_name()!r}: {task.get_coro()!r}" for task in asyncio.all_tasks(loop))


def assert_nothing_left(host: Any) -> None:
    """A host whose scheduler has stopped holds no page, slot, request or transfer.

    Raises `AssertionError` that says what is held. Hosts that it does not know are taken at their word:
    `open_requests` must be empty. A host that was stopped with a forward in flight is left alone: what that
    forward touches went with its device.
    """
    if isinstance(host, FakeHost):
        if not host._pending:
            assert not host.open_requests(), f"open requests: {host.open_requests()}"
            twice = {name: ends for name, ends in host.outcomes.items() if len(ends) != 1}
            assert not twice, f"requests that ended more than once: {twice}"
    elif isinstance(host, NativeHost):
        if not host.forwards.pending:
            _check_native(host)
    else:
        assert not host.open_requests(), f"open requests: {host.open_requests()}"


def _check_native(host: NativeHost) -> None:
    if host.transfer is not None:
        host.progress_transfers(0.0)  # the events of its end
    assert not host.ledger.requests, f"requests that were not released: {list(host.ledger.requests)}"
    untaken = [*host.frontend.inbox, *host.frontend.coming]
    assert not untaken, f"inputs that nobody took: {untaken}"
    queued = host.frontend.queued_requests, host.frontend.queued_tokens
    assert queued == (0, 0), f"{queued[0]} requests, {queued[1]} tokens are counted as queued"
    host.memory.check()
    assert host.memory.pool.held == 0, f"pages are held: {host.memory.pool!r}"
    stats: dict[str, int] = getattr(host.transfer, "stats", dict)()
    rooms = [f"{count} {name}" for name, count in stats.items() if name.startswith("rooms_") and count]
    rooms += getattr(host.transfer, "open_rooms", [])
    assert not rooms, f"transfers that were not released: {rooms}"
