"""Makes the recorded host calls again, on a host that has no model, and looks for the first difference."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from aioprefill.config import NativeConfig
from aioprefill.config_option import own_options
from aioprefill.errors import ConfigError, RecordingError, RequestAborted
from aioprefill.host import Wake
from aioprefill.host_calls import RAISED, CallMeter, CallRunner
from aioprefill.native.host import NativeHost
from aioprefill.record.format import Header
from aioprefill.record.outcome import Difference
from aioprefill.record.replay_engine import ReplayEngine
from aioprefill.record.replay_transfer import ReplayTransfer
from aioprefill.tp_agree import CallToken

logger = logging.getLogger(__name__)

TURN = 64
"""Calls between two turns of the loop, which callbacks of futures need."""


class Replay:
    """One segment's replay, on the running loop: `await Replay(header).run(calls)`, once.

    Raises `RecordingError` when the segment begins amid work, or has settings that are not known here.
    """

    def __init__(self, header: Header) -> None:
        if header.amid_work:
            raise RecordingError(
                f"the recording begins amid work, at call {header.first_call}: it cannot be replayed, only "
                "printed (--text); the segment before it, FILE.1, may tell more"
            )
        self._origin_s = header.origin_s
        self._engine = ReplayEngine(header.spec, header.num_pages)
        transfer = ReplayTransfer() if header.transfer else None
        self.host = NativeHost(self._engine, transfer, native_config(header))
        self.host.intake.arrivals = header.arrivals
        self.host.intake.weight_version = header.weight_version
        self.host.outside.on_results = self._engine.take
        self._runner = CallRunner(self.host, CallMeter(slow_s=float("inf")))
        self._runner.observers.append(self._observe)
        self._came_to = b""
        self.calls = 0
        """Made so far, the one that differs included."""
        self.seconds = 0.0
        """Time of the last one since the recording began."""

    async def run(self, calls: Iterable[tuple[CallToken, bytes]]) -> Difference | None:
        """Make calls until one differs from what is recorded of it. Closes the host."""
        self.host.follow(_nobody)
        self.host.bind(Wake(input=_nothing, transfers=_nothing, admission=_nothing))
        try:
            for token, recorded in calls:
                self.calls += 1
                self.seconds = token.now - self._origin_s
                now = self._make(token)
                if now != recorded:
                    return Difference(token.number, token.kind, self.seconds, recorded, now)
                if self.calls % TURN == 0 or token.facts:  # weights may have to be staged by the next call
                    await asyncio.sleep(0)
            return None
        finally:
            await self.host.aclose(RequestAborted("the replay is over"))

    def _make(self, token: CallToken) -> bytes:
        """Make one call; the description of what it came to."""
        self._came_to = b""
        if token.kind == "launch":
            self._engine.expect(token.detail)
        try:
            if token.facts:
                self.host.give_facts(token.facts)
            self._runner.run(token)
        except Exception as error:
            logger.debug("call %d, %s", token.number, token.kind, exc_info=True)
            return msgspec.msgpack.encode({RAISED: f"{type(error).__name__}: {error}"})
        return self._came_to

    def _observe(self, token: CallToken, description: bytes) -> None:
        self._came_to = description


def native_config(header: Header) -> NativeConfig:
    """The host's settings as recorded. Raises `RecordingError` for those that are not known here."""
    known = {name for name, _ in own_options(NativeConfig)}
    given: dict[str, Any] = dict(header.native)
    unknown = sorted(given.keys() - known)
    if unknown:
        raise RecordingError(
            f"the recording, by aioprefill {header.software}, has settings that are not known here: "
            f"{', '.join(unknown)}; replay it with that version"
        )
    try:
        return NativeConfig(**given)
    except ConfigError as err:
        raise RecordingError(f"the recording, by aioprefill {header.software}: {err}") from err


def _nobody(report: bytes) -> None:
    """What a replay's host sees itself counts for nothing: facts come with the calls."""


def _nothing() -> None:
    """Nothing wakes a replay but the next call."""
