"""The native host's front door: checks requests, limits the queue, and keeps inputs until `ingest`."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from aioprefill.config import NativeConfig
from aioprefill.control import AbortMatching, Command
from aioprefill.engine.port import ModelSpec, TokenIds
from aioprefill.errors import AioprefillError, InvalidRequest, QueueFull
from aioprefill.native.facts import (
    AbortFact,
    GrammarFact,
    StageFact,
    SwappedFact,
    TransferFact,
    UnstageFact,
    WithdrawnFact,
)
from aioprefill.native.staging import Staging
from aioprefill.native.validate import validate
from aioprefill.request import PrefillHandle, PrefillRequest
from aioprefill.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """A checked request on its way into the host."""

    request: PrefillRequest
    tokens: TokenIds
    handle: PrefillHandle

    @property
    def arrival_s(self) -> float:
        """When it came, on the leader's clock."""
        return self.handle.arrival_s

    @classmethod
    def elsewhere(cls, request: PrefillRequest, tokens: TokenIds, arrival_s: float) -> Arrival:
        """The same on another rank, where nobody waits for it."""
        return cls(request, tokens, PrefillHandle(request.request_id, arrival_s, lambda *_: None))


@dataclass(frozen=True, slots=True, eq=False)
class Controlled:
    """A control command, and who waits for its answer."""

    number: int
    command: Command
    answer: asyncio.Future[Any]

    @classmethod
    def elsewhere(cls, number: int, command: Command) -> Controlled:
        """The same on another rank, where nobody waits for it."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return cls(number, command, answer)


Input: TypeAlias = (
    Arrival
    | Controlled
    | AbortFact
    | WithdrawnFact
    | GrammarFact
    | StageFact
    | UnstageFact
    | SwappedFact
    | TransferFact
)
"""What may come from outside."""


class Frontend:
    """Inputs in the order of their coming. Queue counts cover what was taken and not yet launched.

    What comes waits in `coming` until a host call sees it (`Outside`); then in `inbox` until `ingest`
    dispatches it.
    """

    def __init__(self, spec: ModelSpec, num_pages: int, config: NativeConfig, staging: Staging) -> None:
        self._spec = spec
        self._num_pages = num_pages
        self._config = config
        self._staging = staging
        staging.post = self.post
        self._live: dict[str, PrefillHandle] = {}
        self._commands = itertools.count()
        self._wake: Callable[[], None] = lambda: None
        self._clock: Callable[[], float] = lambda: 0.0
        self.coming: deque[Input] = deque()
        self.inbox: deque[Arrival | AbortFact | Controlled | GrammarFact] = deque()
        self.aborting: dict[str, str] = {}
        """Aborts that were seen and wait in the inbox, by id. They count before results are published."""
        self.queued_requests = 0
        self.queued_tokens = 0
        self.tokens_per_s = 0.0
        """Prefill speed as last seen by the host, for retry hints; 0: not known."""

    def bind(self, wake: Callable[[], None], clock: Callable[[], float]) -> None:
        """`wake` tells the loop that something has come."""
        self._wake = wake
        self._clock = clock

    # Outside

    def submit(self, request: PrefillRequest) -> PrefillHandle:
        """Take a request. Raises `InvalidRequest` or `QueueFull`; see `PrefillScheduler.submit`."""
        tokens = validate(request, self._spec, self._num_pages)
        if request.request_id in self._live:
            raise InvalidRequest("request_id", f"{request.request_id!r} is live already")
        self._check_room(len(tokens))
        handle = PrefillHandle(request.request_id, self._clock(), self.abort)
        self._enter(handle, len(tokens))
        self.post(Arrival(replace(request, sampling=_seeded(request.sampling)), tokens, handle))
        return handle

    def _enter(self, handle: PrefillHandle, tokens: int) -> None:
        self._live[handle.request_id] = handle
        self.queued_requests += 1
        self.queued_tokens += tokens

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
            self.post(AbortFact(request_id, reason))

    def control(self, command: Command) -> asyncio.Future[Any]:
        """Queue a command; its answer comes when it has taken effect.

        Cancelling that withdraws a command that waits; an abort is carried out all the same.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        item = Controlled(next(self._commands), command, answer)
        if not isinstance(command, AbortMatching):
            answer.add_done_callback(lambda done: self._answered(item.number, done))
        self.post(item)
        return answer

    def _answered(self, number: int, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled():
            self.post(WithdrawnFact(number))

    async def stage_weights(self, folder: Path) -> int:
        """Have new weights read and examined, off the loop. Raises `ModelError` when they do not fit."""
        return await self._staging.stage(folder)

    def post(self, item: Input) -> None:
        """Queue what has come."""
        self.coming.append(item)
        self._wake()

    @property
    def arrivals(self) -> list[str]:
        """Ids of the requests that are not dispatched, in order of their coming."""
        return [item.request.request_id for item in (*self.inbox, *self.coming) if isinstance(item, Arrival)]

    @property
    def idle(self) -> bool:
        """No request is live, and no input waits."""
        return not (self._live or self.coming or self.inbox)

    # Seen by a host call

    def place(self, item: Arrival | AbortFact | Controlled | GrammarFact | WithdrawnFact) -> bool:
        """A host call has seen the input: it counts from now on. False: it concerns nobody any more."""
        match item:
            case Arrival():
                if item.request.request_id not in self._live:  # another rank's front door let it in
                    self._enter(item.handle, len(item.tokens))
            case AbortFact(request_id, reason):
                if request_id not in self._live or request_id in self.aborting:
                    return False
                self.aborting[request_id] = reason
            case Controlled(command=AbortMatching() as command):
                item = replace(item, command=self._mark(command))
            case WithdrawnFact(number):
                return self._withdraw(number)
        self.inbox.append(item)
        return True

    def _mark(self, command: AbortMatching) -> AbortMatching:
        """An abort of many counts before results are published, too, also while it is held behind a pause.

        It names those that came before it. Only this rank's front door knows of later ones already.
        """
        later = {item.request.request_id for item in self.coming if isinstance(item, Arrival)}
        named = [
            name
            for name, handle in self._live.items()
            if command.names(name) and not handle.done and name not in later
        ]
        for request_id in named:
            self.aborting.setdefault(request_id, command.reason)
        return replace(command, matched=len(named))

    def _withdraw(self, number: int) -> bool:
        for item in self.inbox:
            if isinstance(item, Controlled) and item.number == number:
                self.inbox.remove(item)
                return True
        return False

    def close(self, error: AioprefillError) -> None:
        """Answer what still waits with `error`."""
        waiting = [*self.inbox, *self.coming]
        self.inbox.clear()
        self.coming.clear()
        for item in waiting:
            if isinstance(item, Arrival):
                item.handle.fail(error)
                self.left_queue(len(item.tokens))
                self.released(item.request.request_id)
            elif isinstance(item, Controlled) and not item.answer.done():
                item.answer.set_exception(error)
        self._staging.fail(error)

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


def _seeded(sampling: SamplingParams) -> SamplingParams:
    """With a seed, if there is something to draw: every rank must draw the same."""
    if sampling.temperature == 0 or sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=secrets.randbits(63))
