"""A prefill and a decode process, started and stopped together: for demonstration, benchmarks and tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from aioprefill.errors import HostError
from aioprefill.process import ENDS_WITH_PARENT

LOOPBACK = "tcp://127.0.0.1:0"
STOP_TIMEOUT_S = 15.0
LAST_LINES = 20


class ServerProcess:
    """One `aioprefill` process. `endpoint` is where it serves, once `wait_ready` has returned."""

    def __init__(self, command: str, process: asyncio.subprocess.Process) -> None:
        self.command = command
        self.endpoint = ""
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = process
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(), name=f"aioprefill.{command}.output")

    @classmethod
    async def start(cls, command: str, *options: str) -> ServerProcess:
        """Start `aioprefill COMMAND`. Use `stop` in the end, whatever happens."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "aioprefill",
            command,
            *options,
            stdin=asyncio.subprocess.PIPE,  # never written: it ends when we do, however that is
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=1 << 22,  # a line may name thousands of requests
            # its own group: Ctrl-C reaches only us, and we stop it in order
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", ENDS_WITH_PARENT: "1"},
        )
        return cls(command, process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            self.lines.append(text)
            if text.startswith(f"ready {self.command} ") and not self._ready.done():
                facts = dict(word.partition("=")[::2] for word in text.split()[2:])
                self._ready.set_result(facts["endpoint"])

    async def wait_ready(self, timeout_s: float = 120.0) -> str:
        """The endpoint, once the process serves. Raises `HostError` with its last lines when it does not."""
        ended = asyncio.create_task(self._process.wait())
        try:
            done, _ = await asyncio.wait(
                [self._ready, ended], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self._ready not in done:
                await asyncio.wait([self._reader], timeout=1.0)
                state = f"is not ready after {timeout_s:g} s"
                if ended in done:
                    state = f"ended with {ended.result()}"
                raise HostError(f"aioprefill {self.command} {state}:\n" + "\n".join(self.lines))
        finally:
            ended.cancel()
        self.endpoint = self._ready.result()
        return self.endpoint

    def signal(self, number: int) -> None:
        """Send a signal; a process that has ended is left alone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> int:
        """The exit code, when the process ends; negative: the signal that killed it."""
        code = await self._process.wait()
        await self._reader
        return code

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, and SIGKILL when that does not help within `timeout_s`; the exit code."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
            except (TimeoutError, asyncio.CancelledError):
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        return await self.wait()


@dataclass(frozen=True, slots=True)
class Pair:
    """A running pair."""

    prefill: ServerProcess
    decode: ServerProcess


@asynccontextmanager
async def running_pair(
    common: Sequence[str] = (), *, serve: Sequence[str] = (), decode: Sequence[str] = ()
) -> AsyncIterator[Pair]:
    """Both processes on free ports of loopback, ready; stopped on leaving, prefill first.

    `common`, `serve` and `decode` are command line options. Raises `HostError` when one does not start.
    """
    processes: list[ServerProcess] = []
    try:
        for command, own in (("decode", decode), ("serve", serve)):
            processes.append(await ServerProcess.start(command, "--listen", LOOPBACK, *common, *own))
        await asyncio.gather(*(process.wait_ready() for process in processes))
        yield Pair(prefill=processes[1], decode=processes[0])
    finally:
        async with AsyncExitStack() as stack:  # one that fails to stop does not spare the other
            for process in processes:
                stack.push_async_callback(process.stop)
