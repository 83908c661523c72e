"""What a caller hands to a scheduler and what comes back: request, handle, results."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from aioprefill.errors import AioprefillError
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a request may stay in each stage, seconds; None: as the server's settings say."""

    queue_s: float | None = None
    """From the end of the handshake (or arrival, without one) to the first launch."""
    handshake_s: float | None = None
    """From arrival to the peer's readiness."""
    running_s: float | None = None
    """From the first launch to the first token."""
    transfer_s: float | None = None
    """From the first token until all KV is with the peer."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """One prompt to prefill.

    Nothing is checked here: `PrefillScheduler.submit` does, and names the field that is wrong.
    """

    token_ids: Sequence[int] | npt.NDArray[np.integer[Any]]
    """The prompt, at least one token."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique among live requests, 1 to 128 characters."""
    peer: str | None = None
    """Decode peer that gets the KV; None: the first token only, nothing is handed off."""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = 128
    """Tokens that the peer generates in all, the first one included."""
    ignore_eos: bool = False
    """The peer goes on past end-of-sequence tokens. A grammar ends the output nevertheless."""
    grammar: GrammarSpec | None = None
    """What the output must match (structured output)."""
    timeouts: Timeouts = Timeouts()
    priority: int = 0
    """Higher goes first, where the policy is `priority`."""
    deadline_s: float | None = None
    """The first token is wanted within so many seconds of arrival; None: whenever. What cannot be met any
    more is refused with `RequestTimeout`, or served late, as the option `late-deadlines` says."""


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The first token. Times are seconds on the loop's monotonic clock."""

    request_id: str
    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    arrival_s: float
    launched_s: float
    """When the request's first chunk was launched."""
    first_token_s: float
    weight_versions: tuple[int, ...] = (0,)
    """Versions of the weights that computed the prompt's KV and the token, in order; 0 before any update."""


@dataclass(frozen=True, slots=True)
class HandoffResult:
    """All KV and the first token are with the decode peer."""

    request_id: str
    transferred_s: float
    kv_bytes: int


def _consume(future: asyncio.Future[Any]) -> None:
    """Mark the exception as seen: a caller need not wait for both futures."""
    if not future.cancelled():
        future.exception()


class PrefillHandle:
    """A live request. Made by the host's frontend, settled by the host, exactly once each way.

    `await handle` gives the `PrefillResult` or raises the request's error; cancelling that await aborts
    the request. `result` and `transferred` are the bare futures, for callbacks: do not settle them.
    """

    def __init__(self, request_id: str, arrival_s: float, abort: Callable[[str, str], None]) -> None:
        loop = asyncio.get_running_loop()
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.result: asyncio.Future[PrefillResult] = loop.create_future()
        self.transferred: asyncio.Future[HandoffResult] = loop.create_future()
        self.result.add_done_callback(_consume)
        self.transferred.add_done_callback(_consume)
        self._abort = abort

    def __repr__(self) -> str:
        return f"<PrefillHandle {self.request_id} result={self.result.done()} transferred={self.done}>"

    @property
    def done(self) -> bool:
        """True when the request has its outcome: handed off, or failed."""
        return self.transferred.done()

    def abort(self, reason: str = "aborted by the caller") -> None:
        """Ask for the request to be given up; its outcome becomes `RequestAborted`. Does not wait."""
        if not self.done:
            self._abort(self.request_id, reason)

    def __await__(self) -> Generator[Any, None, PrefillResult]:
        return self._wait_result().__await__()

    async def _wait_result(self) -> PrefillResult:
        try:
            return await asyncio.shield(self.result)
        except asyncio.CancelledError:
            self.abort("the caller stopped waiting")
            raise

    async def wait_transferred(self) -> HandoffResult:
        """Return when all KV is with the peer (at once after the first token, where there is no peer).

        Raises the request's error. Cancelling the wait leaves the request be.
        """
        return await asyncio.shield(self.transferred)

    def publish(self, result: PrefillResult) -> None:
        """Host only: the first token is there."""
        if not self.result.done():
            self.result.set_result(result)

    def finish(self, handoff: HandoffResult) -> None:
        """Host only: the hand-off is complete."""
        if not self.transferred.done():
            self.transferred.set_result(handoff)

    def fail(self, error: AioprefillError) -> None:
        """Host only: the request ends with `error`."""
        for future in (self.result, self.transferred):
            if not future.done():
                future.set_exception(error)
