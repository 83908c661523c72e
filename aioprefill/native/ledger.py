"""The native host's live requests: their queues, what they hold, and their outcomes.

Rule: a request's pages, its prefix-cache holds and its id are released in `release_if_quiet` and nowhere
else; its outcome is reported in `publish`, `finish` and `fail`, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aioprefill.engine.port import SampledToken
from aioprefill.errors import AioprefillError
from aioprefill.kv_layout import KVLayout
from aioprefill.native.frontend import Frontend
from aioprefill.native.memory import KVMemory
from aioprefill.native.request_state import Move, Request, State
from aioprefill.native.stage_timers import StageTimers
from aioprefill.request import HandoffResult, PrefillResult
from aioprefill.transfer.port import KVTransfer


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    finished: int = 0
    failed: int = 0
    kv_bytes: int = 0
    """KV handed to decode peers."""

    def table(self) -> dict[str, int]:
        """The counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class Ledger:
    """Every request from its dispatch until nothing of it is left."""

    def __init__(
        self,
        frontend: Frontend,
        memory: KVMemory,
        transfer: KVTransfer | None,
        layout: KVLayout,
        timers: StageTimers,
    ) -> None:
        self._timers = timers
        self._frontend = frontend
        self._memory = memory
        self._transfer = transfer
        self._layout = layout
        self.totals = Totals()
        self.on_left_queue: Callable[[Request], None] = lambda _: None
        """Called when a request waits no more: admitted, or failed."""
        self.on_deadline: Callable[[Request], None] = lambda _: None
        """Called when a request with a deadline has come."""
        self.requests: dict[str, Request] = {}
        """All of them, in order of arrival."""
        self.bootstrapping: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.under_way: dict[str, Request] = {}
        """Admitted ones whose next chunk may be launched."""

    def __repr__(self) -> str:
        return (
            f"<Ledger bootstrapping={len(self.bootstrapping)} waiting={len(self.waiting)}"
            f" under_way={len(self.under_way)} live={len(self.requests)}>"
        )

    @property
    def open(self) -> list[Request]:
        """Requests without an outcome."""
        return [request for request in self.requests.values() if not request.over]

    def add(self, request: Request) -> None:
        """A request was dispatched; it waits, for its handshake or for admission."""
        self.requests[request.request_id] = request
        self.totals.requests += 1
        queue = self.bootstrapping if request.state is State.BOOTSTRAPPING else self.waiting
        queue[request.request_id] = request
        if request.due_s is not None:
            self.on_deadline(request)

    def admit(self, request: Request) -> bool:
        """Give a waiting request its pages; False: not enough now."""
        if not self._memory.admit(request):
            return False
        self.waiting.pop(request.request_id, None)
        self.bootstrapping.pop(request.request_id, None)
        request.early_launches += request.state is State.BOOTSTRAPPING
        request.move(Move.ADMITTED)
        self.under_way[request.request_id] = request
        self._frontend.left_queue(request.length)
        self.on_left_queue(request)
        self.totals.prompt_tokens += request.length
        self.totals.cached_tokens += request.cached
        return True

    def requeue(self, request: Request) -> None:
        """A request under way gives its pages back and waits again. Nothing of it is in flight or sent."""
        assert request.in_flight == 0 and request.sent_pages == 0
        self.under_way.pop(request.request_id, None)
        self._memory.release(request)
        request.inserted = request.cached = request.planned = request.computed = 0
        request.weight_versions, request.cacheable = (), True
        early = request.peer is not None and not request.bootstrapped
        request.move(Move.RETRACTED_EARLY if early else Move.RETRACTED)
        queue = self.bootstrapping if early else self.waiting
        queue[request.request_id] = request
        self._frontend.back_in_queue(request.length)

    def send(self, request: Request) -> None:
        """Send the KV computed and not yet sent; with the first token when the prompt is complete."""
        assert self._transfer is not None
        final = request.first
        end = len(request.pages) if final is not None else request.computed // self._layout.page_size
        if final is None and end <= request.sent_pages:
            return
        pages = request.pages[request.sent_pages : end].tolist()
        self._transfer.send(request.request_id, pages, request.sent_pages, final)
        request.sent_pages = end

    def publish(self, now: float, request: Request, first: SampledToken) -> None:
        """Report the first token."""
        request.handle.publish(
            PrefillResult(
                request_id=request.request_id,
                token_id=first.token_id,
                logprob=first.logprob,
                top_logprobs=first.top_logprobs,
                prompt_tokens=request.length,
                cached_tokens=request.cached,
                arrival_s=request.handle.arrival_s,
                launched_s=now if request.launched_s is None else request.launched_s,
                first_token_s=now,
                weight_versions=request.weight_versions,
            )
        )

    def finish(self, now: float, request: Request) -> None:
        """Report that the hand-off is complete."""
        kv_bytes = request.sent_pages * self._layout.page_bytes
        self._timers.leave(request)
        self.totals.finished += 1
        self.totals.kv_bytes += kv_bytes
        request.handle.finish(HandoffResult(request.request_id, now, kv_bytes))

    def fail(self, request: Request, error: AioprefillError) -> None:
        """End a request that is not over; its pages go back when nothing touches them any more."""
        if request.state in (State.WAITING, State.BOOTSTRAPPING):
            self._frontend.left_queue(request.length)
            self.on_left_queue(request)
        request.move(Move.FAILED)
        self._timers.leave(request)
        self.totals.failed += 1
        for queue in (self.waiting, self.bootstrapping, self.under_way):
            queue.pop(request.request_id, None)
        request.handle.fail(error)
        if request.room_open and self._transfer is not None:
            self._transfer.abandon(request.request_id, str(error))
        self.release_if_quiet(request)

    def release_if_quiet(self, request: Request) -> None:
        """The one place where a request lets go of what it holds."""
        if not request.quiet or self.requests.pop(request.request_id, None) is None:
            return
        self._memory.release(request)
        self._frontend.released(request.request_id)
