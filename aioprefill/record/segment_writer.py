"""Writes a recording's files on a thread of its own: neither the loop nor the device waits for a disk.

Rule: an error of the disk ends the recording with one warning, and concerns nobody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import stat
import threading
from pathlib import Path

from aioprefill.errors import ConfigError
from aioprefill.record.format import MAGIC

logger = logging.getLogger(__name__)

MODE = 0o600
"""Prompts are in it."""
CLOSE_TIMEOUT_S = 5.0
MAX_WAITING_BYTES = 64 << 20
"""More than this behind means that the disk does not keep up."""


class SegmentWriter:
    """Owns FILE, and FILE.1, the segment before. Made and used on one thread; it writes on another one.

    Raises `ConfigError` when FILE cannot be made, another process writes to it, or what is there is no
    recording. A recording of an earlier run becomes FILE.1.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._older = older(path)
        self._given = self._written = 0
        self._queue: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.failed = False
        """The recording is over: the disk did not take it. Set once, by either thread."""
        try:
            for there in (path, self._older):
                _check_ours(there)
            self._file = self._rotate()
        except OSError as err:
            raise ConfigError(f"record: {path} cannot be written: {err.strerror}") from err

    def __repr__(self) -> str:
        return f"<SegmentWriter {self._path} waiting={self.waiting} failed={self.failed}>"

    @property
    def waiting(self) -> int:
        """Bytes that are not written yet."""
        return self._given - self._written

    # The user's thread

    def write(self, data: bytes) -> None:
        """Append to the present segment, soon."""
        if self.waiting > MAX_WAITING_BYTES:
            self._fail(f"the disk does not keep up, {self.waiting >> 20} MiB wait for it")
        self._put("write", data)

    def begin_segment(self) -> None:
        """What is written from now on goes to a new FILE; the present one becomes FILE.1."""
        self._put("rotate", b"")

    def close(self) -> None:
        """Write what is left and end the thread; at most `CLOSE_TIMEOUT_S`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            os.close(self._file)
            return
        self._put("close", b"")
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._fail(f"the disk hangs, {self.waiting} bytes are not written")

    def _put(self, what: str, data: bytes) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aioprefill-record", daemon=True)
            self._thread.start()
        self._given += len(data)
        self._queue.put((what, data))

    def _fail(self, why: str) -> None:
        if not self.failed:
            self.failed = True
            logger.warning("the recording %s has ended: %s", self._path, why)

    # The writing thread

    def _run(self) -> None:
        try:
            while (item := self._queue.get())[0] != "close":
                if not self.failed:
                    try:
                        self._carry_out(*item)
                    except OSError as err:
                        self._fail(err.strerror or str(err))
                self._written += len(item[1])
        finally:
            if self._file >= 0:
                os.close(self._file)

    def _carry_out(self, what: str, data: bytes) -> None:
        if what == "rotate":
            closing, self._file = self._file, -1
            os.close(closing)
            self._file = self._rotate()
            return
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def _rotate(self) -> int:
        """Make FILE anew; its descriptor. Somebody may have moved the present one away."""
        with contextlib.suppress(FileNotFoundError):
            self._path.replace(self._older)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
        with contextlib.suppress(OSError):  # where a file system has no locks there is no protection
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file


def older(path: Path) -> Path:
    """Where the segment before that in `path` is kept."""
    return path.with_name(path.name + ".1")


def _check_ours(path: Path) -> None:
    """Raise `ConfigError` when there is something that must not be replaced."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        regular = stat.S_ISREG(os.fstat(file).st_mode)
        begins = os.read(file, len(MAGIC)) if regular else b"?"
        if not MAGIC.startswith(begins):
            raise ConfigError(f"record: {path} is there and is no recording: name another file")
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"record: another process records to {path}: name another file") from None
    finally:
        os.close(file)
