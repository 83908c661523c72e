"""Carries out control commands that come over the wire, and answers each caller.

Rules:
- A command that waits for something is a task of its own, named, owned and bounded in number here. Tasks
  begin in the order of the messages; what order pauses and updates then take is the scheduler's.
- Stats and health are answered on the spot: they work when nothing else does.
- A client that leaves does not undo its command. Closing cancels what is under way, and says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aioprefill.errors import AioprefillError, ControlError, HostError, QueueFull
from aioprefill.host import DrainReport
from aioprefill.stats import Health, SchedulerStats
from aioprefill.wire.control_commands import (
    AbortCommand,
    ControlCommand,
    DrainCommand,
    FlushCacheCommand,
    HealthCommand,
    PauseCommand,
    ResumeCommand,
    StatsCommand,
    UpdateWeightsCommand,
    command_of,
)
from aioprefill.wire.failures import failed_from
from aioprefill.wire.messages import Control, ControlDone, Message

logger = logging.getLogger(__name__)

MAX_UNDER_WAY = 64
"""Commands that wait at a time."""
MAX_PER_CLIENT = 16
MAX_ID_LENGTH = 128
MAX_IDS = 1000
"""Ids of dropped requests that an answer names."""

Values = dict[str, Any]


class Operated(Protocol):
    """What is operated: a `PrefillScheduler`."""

    async def pause(self, mode: str, *, barrier: bool | None = None) -> Values: ...

    async def resume(self) -> Values: ...

    async def update_weights(self, folder: Path) -> Values: ...

    async def flush_cache(self) -> Values: ...

    async def abort_matching(self, prefix: str, *, exact: bool = False) -> Values: ...

    async def drain(self, timeout: float | None = None) -> DrainReport: ...  # noqa: ASYNC109  as it is

    def stats(self) -> SchedulerStats: ...

    def health(self) -> Health: ...


class ControlDesk:
    """`send(identity, message)` takes answers; `on_drained` is called behind the answer to a drain.

    `drain_timeout_s` holds for drains that bring no timeout. All of it runs on the loop.
    """

    def __init__(
        self,
        operated: Operated,
        send: Callable[[bytes, Message], None],
        *,
        drain_timeout_s: float | None = None,
        on_drained: Callable[[DrainReport], None] | None = None,
    ) -> None:
        self._operated = operated
        self._send = send
        self._drain_timeout_s = drain_timeout_s
        self._on_drained = on_drained
        self._tasks: set[asyncio.Task[Values | DrainReport]] = set()
        self._per_client: Counter[bytes] = Counter()
        self._closed = ""

    def __repr__(self) -> str:
        return f"<ControlDesk under_way={self.under_way}>"

    @property
    def under_way(self) -> int:
        """Commands that wait."""
        return len(self._tasks)

    def on_control(self, identity: bytes, message: Control) -> None:
        """Begin a command; its answer goes to `identity`, at once or later."""
        try:
            if len(message.op_id) > MAX_ID_LENGTH:
                raise ControlError(f"op_id must have at most {MAX_ID_LENGTH} characters")
            command = command_of(message)
            if isinstance(command, StatsCommand | HealthCommand):
                self._send(identity, ControlDone(message.op_id, self._look(command)))
            else:
                self._begin(identity, message, command)
        except AioprefillError as err:
            self._send(identity, failed_from(err, op_id=message.op_id[:MAX_ID_LENGTH]))

    async def aclose(self, reason: str) -> None:
        """Cancel what is under way; its callers get `HostError` with the reason, and so do later ones."""
        self._closed = self._closed or reason
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _look(self, command: StatsCommand | HealthCommand) -> Values:
        if isinstance(command, StatsCommand):
            return flat_values(self._operated.stats().flat())
        health = self._operated.health()
        return {"live": health.live, "ready": health.ready, "reason": health.reason}

    def _begin(self, identity: bytes, message: Control, command: ControlCommand) -> None:
        if self._closed:
            raise HostError(self._closed)
        if len(self._tasks) >= MAX_UNDER_WAY or self._per_client[identity] >= MAX_PER_CLIENT:
            limits = f"the limit is {MAX_UNDER_WAY}, {MAX_PER_CLIENT} of one client"
            raise QueueFull(f"{len(self._tasks)} control commands are under way, {limits}", retry_after_s=1.0)
        logger.info("control: %s %s", message.command, message.arguments or "")
        name = f"aioprefill.control.{message.command}"
        task = asyncio.get_running_loop().create_task(self._carry_out(command), name=name)
        self._tasks.add(task)
        self._per_client[identity] += 1
        # a callback, for a task that is cancelled before its first step runs nothing of its own
        task.add_done_callback(partial(self._on_done, identity, message))

    async def _carry_out(self, command: ControlCommand) -> Values | DrainReport:
        match command:
            case PauseCommand():
                return await self._operated.pause(command.mode, barrier=command.barrier)
            case ResumeCommand():
                return await self._operated.resume()
            case UpdateWeightsCommand():
                return await self._operated.update_weights(_absolute(command.path))
            case AbortCommand():
                if command.request_id is not None:
                    return await self._operated.abort_matching(command.request_id, exact=True)
                return await self._operated.abort_matching(command.prefix or "")
            case FlushCacheCommand():
                return await self._operated.flush_cache()
            case DrainCommand():
                timeout_s = self._drain_timeout_s if command.timeout_s is None else command.timeout_s
                return await self._operated.drain(timeout_s)
            case _:
                raise AssertionError(f"{command} is answered on the spot")

    def _on_done(self, identity: bytes, message: Control, task: asyncio.Task[Values | DrainReport]) -> None:
        self._tasks.discard(task)
        self._per_client[identity] -= 1
        if not self._per_client[identity]:
            del self._per_client[identity]
        error = HostError(self._closed) if task.cancelled() else task.exception()
        if error is not None:
            if not isinstance(error, AioprefillError):
                logger.error("control command %s failed", message.command, exc_info=error)
                error = HostError(f"{message.command}: {type(error).__name__}: {error}")
            self._send(identity, failed_from(error, op_id=message.op_id))
            return
        result = task.result()
        values = _drained(result) if isinstance(result, DrainReport) else result
        self._send(identity, ControlDone(message.op_id, flat_values(values)))
        if isinstance(result, DrainReport) and self._on_drained is not None:
            self._on_drained(result)


def _absolute(path: str) -> Path:
    folder = Path(path)
    if not folder.is_absolute():
        raise ControlError(f"{path!r} must be an absolute path: the folder is the server's")
    return folder


def _drained(report: DrainReport) -> Values:
    return {
        "finished": len(report.finished),
        "dropped": len(report.dropped),
        "dropped_ids": list(report.dropped[:MAX_IDS]),
    }


def flat_values(values: Mapping[str, Any]) -> Values:
    """Values that a message can carry: other than numbers, texts and lists of texts become texts."""
    return {
        key: value if value is None or isinstance(value, int | float | str | list) else str(value)
        for key, value in values.items()
    }
