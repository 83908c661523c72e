"""How long each request may stay in its present stage. Pure: it decides by the clock readings it is given."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable

from aioprefill.config import NativeConfig
from aioprefill.errors import RequestTimeout
from aioprefill.native.request_state import Request, State


class Stage(enum.Enum):
    """What a request may be late with."""

    HANDSHAKE = "handshake"
    QUEUE = "queue"
    RUNNING = "running"
    TRANSFER = "transfer"


class StageTimers:
    """The earliest end of any request's stage, and the requests whose stage has lasted too long."""

    def __init__(self, config: NativeConfig) -> None:
        self._limits = {
            Stage.HANDSHAKE: config.handshake_timeout_s,
            Stage.QUEUE: config.queue_timeout_s,
            Stage.RUNNING: config.running_timeout_s,
            Stage.TRANSFER: config.transfer_timeout_s,
        }
        self.on_earlier: Callable[[], None] = lambda: None
        """Called when `next` has moved forward: who sleeps until then must look again."""
        self._heap: list[tuple[float, int]] = []
        """(end, arrival number); entries of stages that were left are stale."""
        self._present: dict[int, tuple[float, Stage, Request]] = {}
        """By arrival number: the end of the request's present stage."""

    def enter(self, request: Request, stage: Stage, now: float, *, since: float | None = None) -> None:
        """A request enters a stage, which began at `since` (default: now)."""
        self._present.pop(request.arrival, None)
        limit = self._limit(request, stage)
        if limit is not None:
            end = (now if since is None else since) + limit
            earliest = self.next()
            self._present[request.arrival] = (end, stage, request)
            heapq.heappush(self._heap, (end, request.arrival))
            if len(self._heap) > 4 * len(self._present) + 64:
                self._heap = [entry for entry in self._heap if self._is_present(entry)]
                heapq.heapify(self._heap)
            if earliest is None or end < earliest:
                self.on_earlier()

    def wait_again(self, request: Request, now: float) -> None:
        """A request that was admitted is back in the queue, or in its handshake."""
        if request.state is State.BOOTSTRAPPING:
            self.enter(request, Stage.HANDSHAKE, now, since=request.arrival_s)
        else:
            self.enter(request, Stage.QUEUE, now)

    def leave(self, request: Request) -> None:
        """A request is over."""
        self._present.pop(request.arrival, None)

    def next(self) -> float | None:
        """When the next stage ends; None: no request has a limit."""
        while self._heap and not self._is_present(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> list[tuple[Request, RequestTimeout]]:
        """Requests whose stage has ended by `now`, each once, in the order of their ends."""
        late = []
        while (end := self.next()) is not None and end <= now:
            _, stage, request = self._present.pop(heapq.heappop(self._heap)[1])
            limit = self._limit(request, stage)
            text = f"request {request.request_id}: its {stage.value} timeout of {limit:g} s has passed"
            late.append((request, RequestTimeout(text)))
        return late

    def _limit(self, request: Request, stage: Stage) -> float | None:
        asked = request.timeouts
        own = {
            Stage.HANDSHAKE: asked.handshake_s,
            Stage.QUEUE: asked.queue_s,
            Stage.RUNNING: asked.running_s,
            Stage.TRANSFER: asked.transfer_s,
        }[stage]
        return self._limits[stage] if own is None else own

    def _is_present(self, entry: tuple[float, int]) -> bool:
        present = self._present.get(entry[1])
        return present is not None and present[0] == entry[0]
