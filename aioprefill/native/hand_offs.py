"""The native host's side of every hand-off, from the end of its handshake to the end of its transfer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aioprefill.errors import PeerError
from aioprefill.native.ledger import Ledger
from aioprefill.native.request_state import Move, Request, State
from aioprefill.native.stage_timers import Stage, StageTimers
from aioprefill.transfer.port import TransferEvent, TransferState

logger = logging.getLogger(__name__)


class HandOffs:
    """Takes the events of transfers and moves requests along."""

    def __init__(self, ledger: Ledger, timers: StageTimers) -> None:
        self._ledger = ledger
        self._timers = timers
        self._bootstrapped: list[Request] = []

    @property
    def bootstrapped(self) -> int:
        """Requests whose handshake has ended and that wait for `collect`."""
        return len(self._bootstrapped)

    def collect(self, now: float) -> int:
        """Make them admissible; how many."""
        ready = [request for request in self._bootstrapped if request.state is State.BOOTSTRAPPING]
        self._bootstrapped.clear()
        for request in ready:
            del self._ledger.bootstrapping[request.request_id]
            request.move(Move.BOOTSTRAPPED)
            self._ledger.waiting[request.request_id] = request
            self._timers.enter(request, Stage.QUEUE, now)
        return len(ready)

    def prefilled(self, now: float, request: Request) -> None:
        """The last chunk of a request that has a peer is computed."""
        request.move(Move.PREFILLED if request.bootstrapped else Move.PREFILLED_EARLY)
        self._start_timer(now, request)

    def _start_timer(self, now: float, request: Request) -> None:
        """A peer that is not ready yet has had its time since the request's arrival."""
        if request.state is State.PARKED:
            self._timers.enter(request, Stage.HANDSHAKE, now, since=request.handle.arrival_s)
        else:
            self._timers.enter(request, Stage.TRANSFER, now)

    def take(self, now: float, events: Sequence[TransferEvent]) -> tuple[int, int]:
        """Take what has happened to rooms; how many hand-offs ended well, and how many failed."""
        retired = failed = 0
        for event in events:
            request = self._ledger.requests.get(event.room)
            if request is None:
                logger.error("transfer event for an unknown room: %s", event)
                continue
            if not request.over:
                retired += event.state is TransferState.SUCCESS
                failed += event.state is TransferState.FAILED
            self._take(now, request, event)
        return retired, failed

    def _take(self, now: float, request: Request, event: TransferEvent) -> None:
        if event.released:
            request.room_open = False
        if not request.over:
            if event.state is TransferState.WAITING_FOR_INPUT:
                self._peer_ready(now, request)
            elif event.state is TransferState.SUCCESS:
                request.move(Move.TRANSFERRED)
                self._ledger.finish(now, request)
            elif event.state is TransferState.FAILED:
                self._ledger.fail(request, PeerError(request.peer or "?", event.reason or "failed"))
        self._ledger.release_if_quiet(request)

    def _peer_ready(self, now: float, request: Request) -> None:
        request.bootstrapped = True
        if request.state is State.BOOTSTRAPPING:
            self._bootstrapped.append(request)
            return
        request.move(Move.BOOTSTRAPPED)
        if request.state is State.TRANSFERRING:
            self._start_timer(now, request)
        self._ledger.send(request)
