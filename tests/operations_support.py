"""A prefill process without a model, started and stopped by tests."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT = Path(__file__).with_name("operations_process.py")


class FakeServe:
    """`endpoint` is where it serves; `lines` is what it has printed."""

    def __init__(self, device: str, drain_timeout_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), device, str(drain_timeout_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "XDG_CONFIG_HOME": "/nonexistent"},
        )
        self.lines: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.endpoint = self.wait_line("ready serve ").split("endpoint=")[1].split()[0]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._news.put(line.rstrip())
        self._news.put(None)

    def wait_line(self, text: str, timeout_s: float = 30.0) -> str:
        """The next line that contains `text`."""
        while (line := self._news.get(timeout=timeout_s)) is not None:
            if text in line:
                return line
        raise AssertionError(f"the process ended without {text!r}: " + "\n".join(self.lines))

    def wait(self, timeout_s: float = 10.0) -> int:
        """Its exit code, with all of its output read."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code


@contextmanager
def fake_serve(device: str, drain_timeout_s: float = 30.0) -> Iterator[FakeServe]:
    """A running process; killed in the end if it still runs."""
    server = FakeServe(device, drain_timeout_s)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()
