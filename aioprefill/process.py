"""What a long-running process needs around its coroutine: uvloop, signals, logging, an exit that ends.

Exit codes: 0 drained, 1 failed, 2 wrong settings, 3 drained as far as it went, but a device call never
ended, 4 stopped at once by a second signal, 5 a tensor-parallel rank was lost.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import uvloop

logger = logging.getLogger("aioprefill")

EXIT_DRAINED = 0
EXIT_FAILED = 1
EXIT_SETTINGS = 2
EXIT_STUCK = 3
EXIT_FORCED = 4
EXIT_RANK_LOST = 5

STDIN = 0
ENDS_WITH_PARENT = "AIOPREFILL_ENDS_WITH_PARENT"
"""Environment variable, "1" for servers that a program starts for itself (see `aioprefill.pair`)."""

Main = Callable[["Process"], Coroutine[Any, Any, int]]


class Process:
    """A process that stops when told: `stop` is set by the first SIGTERM or SIGINT.

    The second one prints `report()` and leaves by `os._exit`: a thread inside a device call or a
    collective cannot be interrupted.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stop = asyncio.Event()
        self.report: Callable[[], str] = lambda: "nothing was open"
        self.stuck: Callable[[], str] = lambda: ""
        """What keeps a thread from ending, once that is known; then the process must not wait for it."""

    def on_signal(self, number: int) -> None:
        """First: drain. Second: leave."""
        name = signal.Signals(number).name
        if self.stop.is_set():
            leave(EXIT_FORCED, f"{self.name}: {name} again, leaving at once; {self.report()}")
        logger.info("%s: %s, draining", self.name, name)
        self.stop.set()

    def end_with_parent(self) -> None:
        """Drain when standard input ends, as it does when the process that holds its other end is gone."""
        loop = asyncio.get_running_loop()

        def on_input() -> None:
            if not os.read(STDIN, 4096):
                loop.remove_reader(STDIN)
                logger.info("%s: the parent process is gone, draining", self.name)
                self.stop.set()

        loop.add_reader(STDIN, on_input)

    def ready(self, endpoint: str, **facts: object) -> None:
        """Tell whoever started the process that it serves, in one line on stdout."""
        settle_memory()
        told = " ".join(f"{key}={value}" for key, value in facts.items())
        print(f"ready {self.name} endpoint={endpoint} {told}".rstrip(), flush=True)

    async def wait_any(self, *others: Coroutine[Any, Any, Any]) -> None:
        """Return when `stop` is set or one of `others` ends; the rest is cancelled."""
        waits = [asyncio.ensure_future(wait) for wait in (self.stop.wait(), *others)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


def settle_memory() -> None:
    """Make garbage collection cheap for a process that has loaded and serves from now on.

    What exists is never looked at again, and collections are rarer: a full one over the objects of a
    loaded model takes tens of ms, which every request that comes meanwhile would wait for.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def run_process(name: str, main: Main, *, log_level: str) -> int:
    """Run `main(process)` on uvloop; its exit code. Exceptions pass through."""
    logging.basicConfig(
        level=log_level.upper(), format=f"%(asctime)s {name} %(levelname)s %(message)s", stream=sys.stderr
    )

    async def run() -> int:
        process = Process(name)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.on_signal, number)
        if os.environ.get(ENDS_WITH_PARENT) == "1":
            process.end_with_parent()
        try:
            code = await main(process)
        except Exception as err:
            if process.stuck():
                leave(EXIT_FAILED, f"error: {err}; {process.stuck()}")
            raise
        if process.stuck():  # the interpreter would wait for that thread, for ever
            leave(code, f"{name}: {process.stuck()}, leaving without it")
        return code

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def leave(code: int, message: str = "") -> NoReturn:
    """End the process now, with what was printed written out."""
    if message:
        print(message, file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
