"""pytest plugin, loaded by `-p aioprefill.testing.plugin`: nothing may be left behind by a test.

After every test that passed: no asyncio task, thread, file descriptor or child process more than before,
and no page, slot or transfer in any host that a `PrefillScheduler` has run and drained. What is left fails
the test's teardown. Fixtures of wider scope may keep what they like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any

import pytest
import uvloop

from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.leaks import Snapshot, assert_nothing_left, left_since, tasks_of

_before = pytest.StashKey[Snapshot]()
_passed = pytest.StashKey[bool]()


class _Watch:
    """What the running test has left so far, and the hosts that it ran."""

    def __init__(self) -> None:
        self.tasks: list[str] = []
        self.hosts: list[Any] = []

    def take(self) -> tuple[list[str], list[Any]]:
        """And begin anew."""
        taken = self.tasks, self.hosts
        self.tasks, self.hosts = [], []
        return taken


_watch = _Watch()


def pytest_configure(config: pytest.Config) -> None:
    """See loops before their tasks are cancelled, and hosts when their scheduler has stopped."""
    uvloop.new_event_loop().close()  # libuv opens a pipe at its first use and keeps it
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    close, leave = asyncio.Runner.close, PrefillScheduler.__aexit__

    def close_and_count(runner: asyncio.Runner) -> None:
        loop = getattr(runner, "_loop", None)
        if loop is not None and not loop.is_closed():
            _watch.tasks += tasks_of(loop)
        close(runner)

    async def leave_and_remember(
        scheduler: PrefillScheduler,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await leave(scheduler, kind, error, trace)
        if error is None:
            _watch.hosts.append(scheduler._host)

    patch.setattr(asyncio.Runner, "close", close_and_count)
    patch.setattr(PrefillScheduler, "__aexit__", leave_and_remember)


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remembers what there is before the test, fixtures of wider scope included."""
    _watch.take()
    request.node.stash[_before] = Snapshot.take()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers whether the test passed: one that failed is allowed a mess."""
    report = yield
    if call.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Compares when all of the test's fixtures are gone."""
    yield
    tasks, hosts = _watch.take()
    before = item.stash.get(_before, None)
    if before is None or not item.stash.get(_passed, False):
        return
    left = tasks + left_since(before)
    if left:
        raise AssertionError("the test left behind: " + "; ".join(left))
    for host in hosts:
        assert_nothing_left(host)
