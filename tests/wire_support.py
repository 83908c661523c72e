"""Helpers of the wire tests: run a coroutine on either loop, wait for a condition."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
import zmq

from aioprefill.wire.pump import ZmqPump

LOOPS = pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)
"""Runs a test on both loops; the test takes the fixture `run`, imported from here."""


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine to its end, at most 30 s, on the loop that the test asks for (default uvloop)."""
    name = getattr(request, "param", "uvloop")
    factory = uvloop.new_event_loop if name == "uvloop" else asyncio.new_event_loop

    def runner(coroutine: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await coroutine

        with asyncio.Runner(loop_factory=factory) as loop_runner:
            loop_runner.run(bounded())

    return runner


async def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Return as soon as the condition holds; fail the test, saying what was awaited, after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s} s for: {what}")
        await asyncio.sleep(0.002)


@asynccontextmanager
async def zmq_context() -> AsyncIterator[zmq.Context[zmq.Socket[bytes]]]:
    """A context of its own; whatever is still open in it is closed at the end."""
    context = zmq.Context()
    try:
        yield context
    except BaseException:
        # the test failed before it closed its pumps, and uvloop aborts when a watched socket is closed
        for pump in [thing for thing in gc.get_objects() if isinstance(thing, ZmqPump)]:
            pump.close()
        raise
    finally:
        context.destroy(linger=0)
