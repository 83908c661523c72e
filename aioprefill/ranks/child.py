"""One rank as a child process of the supervisor: its output, its last lines, its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from aioprefill.errors import HostError
from aioprefill.pair import LAST_LINES

CHUNK = 1 << 16
LINE_LIMIT = 1 << 22
"""A longer line is passed on in pieces."""
LOOK_S = 0.25
QUIET_LOOKS = 4
"""Looks without output after which a process that has ended is done: its own children may keep it open."""


class RankChild:
    """One rank's process. `on_line(rank, line)` gets each line of stderr, and of stdout but for rank 0.

    Rank 0 has the supervisor's own stdout. `on_exit(child)` is called as soon as the process has ended.
    `ended` must be awaited in the end.
    """

    def __init__(
        self,
        rank: int,
        process: asyncio.subprocess.Process,
        on_line: Callable[[int, bytes], None],
        on_exit: Callable[[RankChild], None],
    ) -> None:
        self.rank = rank
        self.code: int | None = None
        """Its exit code, once it has ended; negative: the signal that killed it."""
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        """Its last lines."""
        self._process = process
        self._on_line = on_line
        self._on_exit = on_exit
        self._bytes_read = 0
        self._readers = [
            asyncio.create_task(self._read(stream), name=f"aioprefill.rank-{rank}.output")
            for stream in (process.stdout, process.stderr)
            if stream is not None
        ]
        self.ended = asyncio.create_task(self._end(), name=f"aioprefill.rank-{rank}.end")
        """Done when it has ended and its output is read."""

    def __repr__(self) -> str:
        return f"<RankChild {self.rank} pid={self._process.pid} code={self.code}>"

    @classmethod
    async def start(
        cls,
        rank: int,
        argv: Sequence[str],
        environ: Mapping[str, str],
        on_line: Callable[[int, bytes], None],
        on_exit: Callable[[RankChild], None],
    ) -> RankChild:
        """Raises `HostError` when the program cannot be started."""
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,  # never written: it ends when we do, however that is
                stdout=None if rank == 0 else asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                # its own session: Ctrl-C reaches only us, and we stop it in order
                start_new_session=True,
                env=dict(environ),
            )
        except OSError as err:
            raise HostError(f"rank {rank}: cannot start {argv[0]}: {err}") from err
        return cls(rank, process, on_line, on_exit)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        begun: list[bytes] = []  # of a line whose end is to come
        size = 0
        while data := await stream.read(CHUNK):
            self._bytes_read += len(data)
            *lines, rest = data.split(b"\n")
            for line in lines:
                self._take(b"".join((*begun, line)))
                begun, size = [], 0
            begun.append(rest)
            size += len(rest)
            if size > LINE_LIMIT:
                self._take(b"".join(begun))
                begun, size = [], 0
        if size:
            self._take(b"".join(begun))

    def _take(self, line: bytes) -> None:
        self.lines.append(line.decode(errors="replace").rstrip())
        self._on_line(self.rank, line)

    async def _end(self) -> None:
        self.code = await self._process.wait()
        self._on_exit(self)
        late, looks, seen = set(self._readers), 0, self._bytes_read
        while late and looks < QUIET_LOOKS:  # several: the loop itself may be held up, by whoever reads us
            _, late = await asyncio.wait(late, timeout=LOOK_S)
            looks = looks + 1 if self._bytes_read == seen else 0
            seen = self._bytes_read
        for reader in late:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def signal(self, number: int) -> None:
        """Send a signal; a process that has ended is left alone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def exit_code(code: int) -> int:
    """An exit code as a shell tells it: 128 and the signal for a process that was killed."""
    return 128 - code if code < 0 else code


def describe(code: int) -> str:
    """What became of a process, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
