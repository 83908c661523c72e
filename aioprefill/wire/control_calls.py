"""The control commands as a client's methods: each call has an id, so each caller gets its own answer.

A command may have to wait for long (a barrier, a drain, weights), so there is no timeout for its answer;
instead the server has to answer a ping from time to time, or the call fails.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aioprefill.control import PauseMode
from aioprefill.errors import AioprefillError, WireError
from aioprefill.stats import Health
from aioprefill.wire.control_commands import (
    AbortCommand,
    ControlCommand,
    DrainCommand,
    FlushCacheCommand,
    HealthCommand,
    PauseCommand,
    ResumeCommand,
    UpdateWeightsCommand,
    control_message,
)
from aioprefill.wire.failures import error_from
from aioprefill.wire.messages import Control, ControlDone, Failed, Message

MAX_CALLS = 256
"""Calls of one client that may wait for answers at a time."""

Answer = dict[str, Any]


class ControlCalls:
    """Calls that wait for their answers. `send` opens the connection first and raises when it cannot.

    `ping` is a round trip through the server's loop; it raises `WireError` when none comes in time.
    """

    def __init__(
        self, send: Callable[[Control], Awaitable[None]], ping: Callable[[], Awaitable[float]], every_s: float
    ) -> None:
        self._send = send
        self._ping = ping
        self._every_s = every_s
        self._waiting: dict[str, asyncio.Future[Answer]] = {}

    async def call(self, command: ControlCommand) -> Answer:
        """The answer's values. Raises the command's error, or `WireError` when the server is lost or stuck.

        Cancelling it does not undo the command.
        """
        if len(self._waiting) >= MAX_CALLS:
            raise WireError(f"{MAX_CALLS} control commands wait for answers already")
        message = control_message(secrets.token_hex(8), command)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[message.op_id] = future
        try:
            await self._send(message)
            while not future.done():
                await asyncio.wait([future], timeout=self._every_s)
                if not future.done():
                    await self._look_alive(future)
            return future.result()
        finally:
            self._waiting.pop(message.op_id, None)
            if not future.cancel() and not future.cancelled():
                future.exception()  # seen, also when it is another error that is raised

    async def _look_alive(self, future: asyncio.Future[Answer]) -> None:
        """The server's loop turns, or the answer has come meanwhile."""
        try:
            await self._ping()
        except WireError:
            if not future.done():
                raise

    def on_message(self, message: Message) -> bool:
        """Take an answer to a call; False when it is something else."""
        if not isinstance(message, ControlDone | Failed) or message.op_id is None:
            return False
        future = self._waiting.pop(message.op_id, None)
        if future is None or future.done():
            return True  # its caller has given up
        if isinstance(message, Failed):
            future.set_exception(error_from(message))
        else:
            future.set_result(message.values)
        return True

    def fail(self, error: AioprefillError) -> None:
        """The connection is lost: so are the answers, though not what the commands do."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


class ControlMethods:
    """What operators can ask of a prefill server; see `PrefillScheduler` for what each does and returns.

    All raise the server's error (`ControlError`, `ModelError`, …), or `WireError` when there is no server.
    Cancelling a call, or closing the client, does not undo its command.
    """

    _control: ControlCalls

    async def pause(self, mode: PauseMode | str = PauseMode.IN_PLACE, *, barrier: bool = False) -> Answer:
        """Stop launching; returns when it has taken effect."""
        return await self._control.call(PauseCommand(str(mode), barrier))

    async def resume(self) -> Answer:
        """Go on after a pause."""
        return await self._control.call(ResumeCommand())

    async def update_weights(self, folder: str | os.PathLike[str]) -> Answer:
        """Serve with the weights of a folder on the server's machine, an absolute path; their version."""
        return await self._control.call(UpdateWeightsCommand(os.fspath(folder)))

    async def abort_request(self, request_id: str) -> Answer:
        """Abort one request, whoever submitted it; `aborted` says how many there were: 0 or 1."""
        return await self._control.call(AbortCommand(request_id=request_id))

    async def abort_matching(self, prefix: str) -> Answer:
        """Abort all requests whose id begins with `prefix` ("" is all); `aborted` says how many."""
        return await self._control.call(AbortCommand(prefix=prefix))

    async def flush_cache(self) -> Answer:
        """Forget cached prefixes."""
        return await self._control.call(FlushCacheCommand())

    async def drain(self, timeout_s: float | None = None) -> Answer:
        """Drain the server, which then ends. Returns how many requests finished, and which were dropped."""
        return await self._control.call(DrainCommand(timeout_s))

    async def health(self) -> Health:
        """Whether the server is well, as its loop says."""
        return Health(**await self._control.call(HealthCommand()))
