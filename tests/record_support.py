"""What tests of recordings share: random schedules that are recorded, and replays of the files."""

from __future__ import annotations

import asyncio
from pathlib import Path

from test_fuzz_native import CheckedHost, Fuzz

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.native.host import NativeHost
from aioprefill.record.format import Header
from aioprefill.record.outcome import Difference
from aioprefill.record.reader import RecordingReader
from aioprefill.record.recorder import Recorder, header_of
from aioprefill.record.replay import Replay
from aioprefill.request import PrefillRequest
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.engine import FakeEngine
from aioprefill.tp_agree import CallToken

LIMIT = 64 << 20


class RecordedFuzz(Fuzz):
    """A random schedule, recorded. Without a storage tier, which no recording has."""

    def __init__(self, seed: int, path: Path, limit: int = LIMIT) -> None:
        super().__init__(seed)
        self.store = None
        self.host = CheckedHost(self.engine, self.transfer, self.config, grammars=self.grammars)
        settings = SchedulerConfig(drain_timeout_s=30.0)
        self.recorder = Recorder(path, limit, header_of(self.host, settings))
        self.scheduler = PrefillScheduler(self.host, settings, recording=self.recorder)


def recorded(
    path: Path, engine: FakeEngine, config: NativeConfig | None = None, limit: int = LIMIT
) -> PrefillScheduler:
    """A scheduler on a host without transfers that is recorded in `path`. On the running loop."""
    host = NativeHost(engine, None, config or NativeConfig(chunk_tokens=64))
    settings = SchedulerConfig()
    return PrefillScheduler(host, settings, recording=Recorder(path, limit, header_of(host, settings)))


async def served(scheduler: PrefillScheduler, *prompts: tuple[str, list[int]]) -> None:
    """Serve requests, all at once."""
    handles = [scheduler.submit(PrefillRequest(tokens, request_id=name)) for name, tokens in prompts]
    await asyncio.gather(*(handle.wait_transferred() for handle in handles))


def read(path: Path) -> tuple[Header, list[tuple[CallToken, bytes]], str]:
    """Header, calls and end of a file."""
    with RecordingReader(path) as reader:
        return reader.header, list(reader), reader.end


def replayed(path: Path) -> Difference | None:
    """What a replay finds."""

    async def run() -> Difference | None:
        with RecordingReader(path) as reader:
            return await Replay(reader.header).run(reader)

    return asyncio.run(run())
