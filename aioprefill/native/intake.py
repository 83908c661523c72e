"""The native host's intake: dispatches requests, aborts and control commands, in the order of their coming.

Rule: the inbox is also where a held pause and everything behind it waits; nothing overtakes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aioprefill.control import AbortMatching, Command, FlushCache, Pause, PauseMode, Resume, UpdateWeights
from aioprefill.engine.grammar_port import GrammarSource
from aioprefill.engine.port import Engine
from aioprefill.errors import AioprefillError, ControlError, HostError, PeerError, RequestAborted
from aioprefill.host import Hold, Ingested
from aioprefill.native.facts import AbortFact, GrammarFact, SwappedFact
from aioprefill.native.frontend import Arrival, Controlled, Frontend
from aioprefill.native.grammar_gate import GrammarGate
from aioprefill.native.ledger import Ledger
from aioprefill.native.memory import KVMemory
from aioprefill.native.outside import Outside
from aioprefill.native.pause_state import PauseState, Phase
from aioprefill.native.request_state import Request, State
from aioprefill.native.stage_timers import Stage, StageTimers
from aioprefill.native.staging import Staging
from aioprefill.transfer.port import Handoff, KVTransfer

logger = logging.getLogger(__name__)

BOUND = 256
"""Inputs that one call dispatches at most."""


class Intake:
    """Owns the pause state and the version of the weights. `consume_result(now)` is for retract pauses."""

    def __init__(
        self,
        frontend: Frontend,
        outside: Outside,
        staging: Staging,
        ledger: Ledger,
        memory: KVMemory,
        engine: Engine,
        transfer: KVTransfer | None,
        consume_result: Callable[[float], int],
        timers: StageTimers,
        grammars: GrammarSource | None = None,
    ) -> None:
        self.pause = PauseState()
        self.weight_version = 0
        self._frontend = frontend
        self._outside = outside
        self._staging = staging
        self._ledger = ledger
        self._memory = memory
        self._engine = engine
        self._transfer = transfer
        self._consume_result = consume_result
        self._timers = timers
        self.gate = GrammarGate(grammars, frontend.post, ledger.fail)
        self._wake: Callable[[], None] = lambda: None
        self.arrivals = 0
        """Requests that were dispatched: the number of the next one."""
        self._draining = False
        self._waiting_pause: asyncio.Future[Any] | None = None
        """The answer that a `wait` pause owes."""
        self._swap: asyncio.Future[Any] | None = None
        """The answer that a swap of weights on the device owes."""
        self._swapped_in = ""
        self.on_weights: Callable[[str], None] = lambda _: None
        """Called with the fingerprint of new weights when they are in place and the cache is empty."""

    def bind(self, wake: Callable[[], None]) -> None:
        """`wake` has the loop ingest again."""
        self._wake = wake

    def run(self, now: float, hold: Hold) -> Ingested:
        """One `ingest`."""
        taken = requests = consumed = 0
        inbox = self._frontend.inbox
        swapped = self._outside.swapped()
        if swapped is not None:
            self._end_swap(swapped)
        while inbox and taken < BOUND:
            item = inbox[0]
            if isinstance(item, Controlled) and self.pause.keeps_back(item.command, hold):
                break
            inbox.popleft()
            taken += 1
            if isinstance(item, Arrival):
                requests += 1
                self._arrive(item, now)
            elif isinstance(item, AbortFact):
                self.abort(item.request_id, item.reason)
            elif isinstance(item, GrammarFact):
                self._grammar_known(item)
            else:
                consumed += self._control(now, item)
                if isinstance(item.command, Resume):
                    break  # `hold` is of the pause: one behind the resume has to wait for its step again
        held = self._is_held(hold)
        return Ingested(
            requests=requests,
            admission_changed=taken > 0,
            held=len(inbox) if held else 0,
            held_retract=held and self._is_retract(inbox[0]),
            consumed=consumed,
            paused=self.pause.paused,
            more=bool(inbox) and not held,
        )

    def _is_held(self, hold: Hold) -> bool:
        inbox = self._frontend.inbox
        if not inbox:
            return False
        first = inbox[0]
        return isinstance(first, Controlled) and self.pause.keeps_back(first.command, hold)

    @staticmethod
    def _is_retract(item: object) -> bool:
        command = item.command if isinstance(item, Controlled) else None
        return isinstance(command, Pause) and command.mode is PauseMode.RETRACT

    @property
    def idle(self) -> bool:
        """It runs: no pause, swap or drain is under way."""
        return self.pause.admits and not self._draining

    # Requests

    def _arrive(self, arrival: Arrival, now: float) -> None:
        asked = arrival.request
        request = Request(
            request_id=asked.request_id,
            tokens=arrival.tokens,
            sampling=asked.sampling,
            peer=asked.peer,
            max_new_tokens=asked.max_new_tokens,
            ignore_eos=asked.ignore_eos,
            grammar=asked.grammar,
            handle=arrival.handle,
            arrival=self.arrivals,
            timeouts=asked.timeouts,
            arrival_s=arrival.handle.arrival_s,
            priority=asked.priority,
            due_s=None if asked.deadline_s is None else arrival.handle.arrival_s + asked.deadline_s,
            state=State.WAITING if asked.peer is None else State.BOOTSTRAPPING,
        )
        self.arrivals += 1
        self._ledger.add(request)
        if self._draining:
            self._ledger.fail(request, RequestAborted("the scheduler is draining"))
        elif request.peer is not None:
            self._timers.enter(request, Stage.HANDSHAKE, now)
        else:
            self._timers.enter(request, Stage.QUEUE, now)
        self.gate.arrived(request)
        self._connect(request)

    def _grammar_known(self, fact: GrammarFact) -> None:
        request = self._ledger.requests.get(fact.request_id)
        if request is not None and request.arrival == fact.arrival and not request.over:
            self.gate.known(request, fact)
            self._connect(request)

    def _connect(self, request: Request) -> None:
        """Begin the handshake, if there is one to make: not before the grammar is known to be right.

        Else the peer would find fault with it too, and its answer might reach the client first.
        """
        if request.peer is not None and request.grammar_ready and not request.over:
            self._handshake(request, request.peer)

    def _handshake(self, request: Request, peer: str) -> None:
        if self._transfer is None:
            self._ledger.fail(request, PeerError(peer, "this scheduler has no KV transfer"))
            return
        request.room_open = True
        self._transfer.open(
            Handoff(
                room=request.request_id,
                peer=peer,
                prompt_tokens=request.length,
                pages=self._engine.spec.layout.pages_for(request.length),
                sampling=request.sampling,
                max_new_tokens=request.max_new_tokens,
                ignore_eos=request.ignore_eos,
                grammar=request.grammar,
            )
        )

    def abort(self, request_id: str, reason: str) -> None:
        """End a request with `RequestAborted`; one that is unknown or over is left alone."""
        request = self._ledger.requests.get(request_id)
        if request is not None and not request.over:
            self._ledger.fail(request, RequestAborted(f"request {request_id}: {reason}"))

    # Control

    def _control(self, now: float, item: Controlled) -> int:
        """Carry a command out; results that it consumed. Its answer is settled here, or later."""
        try:
            answer, consumed = self._carry_out(now, item.command, item.answer)
        except AioprefillError as error:
            if not item.answer.done():
                item.answer.set_exception(error)
            return 0
        if answer is not None and not item.answer.done():
            item.answer.set_result(answer)
        return consumed

    def _carry_out(
        self, now: float, command: Command, owed: asyncio.Future[Any]
    ) -> tuple[dict[str, Any] | None, int]:
        """The answer, or None when `owed` is settled later; and results consumed."""
        match command:
            case Pause():
                return self._pause(now, command.mode, owed)
            case Resume():
                self._resume()
                return {}, 0
            case UpdateWeights():
                self._begin_swap(command.staged, owed)
                return None, 0
            case FlushCache():
                return {"pages_freed": self._memory.flush(self._ledger.requests.values())}, 0
            case AbortMatching():
                self._abort_matching(command)
                return {"aborted": command.matched}, 0

    def _pause(
        self, now: float, mode: PauseMode, owed: asyncio.Future[Any]
    ) -> tuple[dict[str, Any] | None, int]:
        self.pause.pause(mode)
        if mode is PauseMode.WAIT:
            self._waiting_pause = owed
            self._wake()  # when nothing is under way, nothing else would have the loop look again
            return None, 0
        if mode is PauseMode.ABORT:
            return {"aborted": self._abort_matching(AbortMatching("", "aborted by a pause"))}, 0
        if mode is PauseMode.RETRACT:
            consumed = self._consume_result(now)
            idle = [request for request in self._ledger.under_way.values() if not request.sent_pages]
            for request in idle:
                self._ledger.requeue(request)
                self._timers.wait_again(request, now)
            return {"requeued": len(idle)}, consumed
        return {}, 0

    def finish_wait(self, *, idle: bool) -> None:
        """A `wait` pause is complete when what was admitted is prefilled."""
        if idle and self.pause.phase is Phase.FINISHING:
            self.pause.finished()
            self._answer_wait(None)
            self._wake()  # the loop learns from `ingest` that the host is paused

    def _answer_wait(self, error: AioprefillError | None) -> None:
        owed, self._waiting_pause = self._waiting_pause, None
        if owed is not None and not owed.done():
            if error is None:
                owed.set_result({})
            else:
                owed.set_exception(error)

    def _resume(self) -> None:
        self.pause.resume()
        self._answer_wait(ControlError("resumed before what was admitted had finished"))

    def _abort_matching(self, command: AbortMatching) -> int:
        found = [request for request in self._ledger.open if command.names(request.request_id)]
        for request in found:
            self.abort(request.request_id, command.reason)
        return len(found)

    # Weights

    def _begin_swap(self, staged: int, owed: asyncio.Future[Any]) -> None:
        weights = self._staging.pop(staged)
        swap = asyncio.wrap_future(self._engine.swap_weights(weights))
        self.pause.swapping = True
        self._swapped_in = self._engine.weights_fingerprint(weights)
        self._swap = owed
        swap.add_done_callback(self._swap_ended)

    def _swap_ended(self, swap: asyncio.Future[None]) -> None:
        """The device of this rank has the weights, or could not take them."""
        if not swap.cancelled():
            error = swap.exception()
            self._outside.know(SwappedFact(None if error is None else str(error)))

    def _end_swap(self, swapped: SwappedFact) -> None:
        """What the devices have done about a swap, at a point of the input's order."""
        owed, self._swap = self._swap, None
        assert owed is not None, "a swap ended that was never begun"
        self.pause.swapping = False
        if swapped.error is None:
            self.weight_version += 1
            self._memory.flush()
            self.on_weights(self._swapped_in)
            for request in self._ledger.requests.values():
                request.cacheable = request.cacheable and request.computed == 0 and request.in_flight == 0
            answer: dict[str, Any] = {"weight_version": self.weight_version}
            if not owed.done():
                owed.set_result(answer)
        elif not owed.done():
            owed.set_exception(HostError(f"the weights were not swapped: {swapped.error}"))

    # Drain

    def close(self, error: AioprefillError) -> None:
        """Settle the answers that are still owed."""
        self._answer_wait(error)
        swap, self._swap = self._swap, None
        if swap is not None and not swap.done():
            swap.set_exception(error)

    def begin_drain(self, now: float) -> None:
        """End what will not be launched any more, and refuse commands, also those that wait in the inbox."""
        self._draining = True
        refusal = ControlError("the scheduler drains")
        self._answer_wait(refusal)
        inbox = self._frontend.inbox
        while inbox:
            item = inbox.popleft()
            if isinstance(item, Arrival):
                self._arrive(item, now)
            elif isinstance(item, AbortFact):
                self.abort(item.request_id, item.reason)
            elif isinstance(item, Controlled) and isinstance(item.command, AbortMatching):
                self._control(now, item)  # it was marked when it came, and has to follow
            elif isinstance(item, Controlled) and not item.answer.done():
                item.answer.set_exception(refusal)
        for request in self._ledger.open:
            if not request.all_launched:
                reason = f"request {request.request_id}: dropped, for the scheduler drains"
                self._ledger.fail(request, RequestAborted(reason))
