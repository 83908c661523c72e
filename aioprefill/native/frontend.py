"""The native host's front door: checks requests, limits the queue, and keeps inputs until `ingest`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aioprefill.config import NativeConfig
from aioprefill.control import AbortMatching, Command
from aioprefill.engine.port import ModelSpec, TokenIds
from aioprefill.errors import AioprefillError, InvalidRequest, QueueFull
from aioprefill.native.grammar_gate import GrammarKnown
from aioprefill.native.validate import validate
from aioprefill.request import PrefillHandle, PrefillRequest


@dataclass(frozen=True, slots=True)
class Arrival:
    """A checked request on its way into the host."""

    request: PrefillRequest
    tokens: TokenIds
    handle: PrefillHandle


@dataclass(frozen=True, slots=True)
class AbortInput:
    """Somebody wants a request to be given up."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Controlled:
    """A control command, and who waits for its answer."""

    command: Command
    answer: asyncio.Future[Any]


class Frontend:
    """Inputs in the order of their coming. Queue counts cover what was taken and not yet launched."""

    def __init__(self, spec: ModelSpec, num_pages: int, config: NativeConfig) -> None:
        self._spec = spec
        self._num_pages = num_pages
        self._config = config
        self._live: dict[str, PrefillHandle] = {}
        self._wake: Callable[[], None] = lambda: None
        self._clock: Callable[[], float] = lambda: 0.0
        self.inbox: deque[Arrival | AbortInput | Controlled | GrammarKnown] = deque()
        self.aborting: dict[str, str] = {}
        """Aborts that wait in the inbox: id -> reason. They count before results are published."""
        self.queued_requests = 0
        self.queued_tokens = 0
        self.tokens_per_s = 0.0
        """Prefill speed as last seen by the host, for retry hints; 0: not known."""

    def bind(
        self,
        wake: Callable[[], None],
        clock: Callable[[], float],
        stage: Callable[[Path], Awaitable[Any]],
    ) -> None:
        """`wake` tells the loop that the inbox has something; `stage` reads new weights."""
        self._wake = wake
        self._stage = stage
        self._clock = clock

    def submit(self, request: PrefillRequest) -> PrefillHandle:
        """Take a request. Raises `InvalidRequest` or `QueueFull`; see `PrefillScheduler.submit`."""
        tokens = validate(request, self._spec, self._num_pages)
        if request.request_id in self._live:
            raise InvalidRequest("request_id", f"{request.request_id!r} is live already")
        self._check_room(len(tokens))
        handle = PrefillHandle(request.request_id, self._clock(), self.abort)
        self._live[request.request_id] = handle
        self.queued_requests += 1
        self.queued_tokens += len(tokens)
        self.inbox.append(Arrival(request, tokens, handle))
        self._wake()
        return handle

    def _check_room(self, tokens: int) -> None:
        for name, used, more, limit in (
            ("requests", self.queued_requests, 1, self._config.max_queue_requests),
            ("tokens", self.queued_tokens, tokens, self._config.max_queue_tokens),
        ):
            if used and used + more > limit:
                raise QueueFull(
                    f"{used} {name} are queued, the limit is {limit}", retry_after_s=self.retry_after_s()
                )

    def retry_after_s(self) -> float:
        """Rough time for half of the queue to be launched, 0.1 to 60 s."""
        speed = self.tokens_per_s or 10_000.0
        return min(60.0, max(0.1, self.queued_tokens / 2 / speed))

    def abort(self, request_id: str, reason: str) -> None:
        """Ask for a request to be given up. Unknown ids, and a second abort, change nothing."""
        if request_id in self._live and request_id not in self.aborting:
            self.aborting[request_id] = reason
            self.inbox.append(AbortInput(request_id, reason))
            self._wake()

    def control(self, command: Command) -> asyncio.Future[Any]:
        """Queue a command; its answer comes when it has taken effect. Cancelling that undoes nothing."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(command, AbortMatching):
            command = self._mark(command)
        self.inbox.append(Controlled(command, answer))
        self._wake()
        return answer

    def _mark(self, command: AbortMatching) -> AbortMatching:
        """An abort of many counts before results are published, too, also while it is held behind a pause."""
        named = [name for name, handle in self._live.items() if command.names(name) and not handle.done]
        for request_id in named:
            self.aborting.setdefault(request_id, command.reason)
        return replace(command, matched=len(named))

    async def stage_weights(self, folder: Path) -> Any:
        """Read and examine new weights, off the loop. Raises `ModelError` when they do not fit."""
        return await self._stage(folder)

    def post(self, item: GrammarKnown) -> None:
        """Queue what has become known about a request."""
        self.inbox.append(item)
        self._wake()

    def close(self, error: AioprefillError) -> None:
        """Answer what still waits in the inbox with `error`."""
        while self.inbox:
            item = self.inbox.popleft()
            if isinstance(item, Arrival):
                item.handle.fail(error)
                self.left_queue(len(item.tokens))
                self.released(item.request.request_id)
            elif isinstance(item, Controlled) and not item.answer.done():
                item.answer.set_exception(error)

    def back_in_queue(self, tokens: int) -> None:
        """A request that was launched waits again."""
        self.queued_requests += 1
        self.queued_tokens += tokens

    def left_queue(self, tokens: int) -> None:
        """A request was launched, or ended before."""
        self.queued_requests -= 1
        self.queued_tokens -= tokens

    def released(self, request_id: str) -> None:
        """Nothing of the request is left; its id may be used again."""
        del self._live[request_id]
        self.aborting.pop(request_id, None)
