"""The native host's forwards, from their launch to their result."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from aioprefill.completion import Completion
from aioprefill.engine.grammar_port import MaskWords
from aioprefill.engine.port import Engine, EngineForward, SampledToken, Span
from aioprefill.errors import DeviceError, HostError
from aioprefill.native.admission import Admission
from aioprefill.native.facts import OutputsFact
from aioprefill.native.frontend import Frontend
from aioprefill.native.hand_offs import HandOffs
from aioprefill.native.ledger import Ledger
from aioprefill.native.memory import KVMemory
from aioprefill.native.planner import Piece
from aioprefill.native.request_state import Move
from aioprefill.native.stage_timers import Stage, StageTimers
from aioprefill.native.tier.tier import Tier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativeBatch:
    """What `prepare` hands to `launch`."""

    pieces: list[Piece]

    def describe(self) -> bytes:
        """Request ids, token ranges and pages of all pieces."""
        return msgspec.msgpack.encode(
            [
                (piece.request.request_id, piece.start, piece.end, piece.request.pages.tobytes())
                for piece in self.pieces
            ]
        )


@dataclass(slots=True)
class NativeForward:
    """A launched batch. `settled`: its chunk bookkeeping is done."""

    number: int
    pieces: list[Piece]
    engine_forward: EngineForward
    launched_s: float
    settled: bool = False
    told: bool = False
    """A recording has its outputs."""

    @property
    def completion(self) -> Completion:
        """Ready when the sampled tokens are on the host side."""
        return self.engine_forward.completion


class Forwards:
    """Owns those whose result is not processed: `pending`, oldest first."""

    def __init__(
        self,
        engine: Engine,
        frontend: Frontend,
        ledger: Ledger,
        memory: KVMemory,
        admission: Admission,
        hand_offs: HandOffs,
        timers: StageTimers,
        tier: Tier,
    ) -> None:
        self._engine = engine
        self._frontend = frontend
        self._ledger = ledger
        self._memory = memory
        self._admission = admission
        self._hand_offs = hand_offs
        self._timers = timers
        self._tier = tier
        self._layout = engine.spec.layout
        self.pending: deque[NativeForward] = deque()

    def launch(self, now: float, batch: NativeBatch, number: int, weight_version: int) -> NativeForward:
        """Queue a batch on the device."""
        engine_forward = self._engine.launch([self._span(piece) for piece in batch.pieces])
        for piece in batch.pieces:
            request = piece.request
            if request.planned == request.cached:
                self._timers.enter(request, Stage.RUNNING, now)
            request.launched_s = now if request.launched_s is None else request.launched_s
            request.planned = piece.end
            if weight_version not in request.weight_versions:
                request.weight_versions += (weight_version,)
            request.in_flight += 1
            del self._ledger.under_way[request.request_id]
        forward = NativeForward(number, batch.pieces, engine_forward, now)
        self.pending.append(forward)
        return forward

    def _span(self, piece: Piece) -> Span:
        request = piece.request
        return Span(
            token_ids=request.tokens[piece.start : piece.end],
            start=piece.start,
            pages=request.pages[: self._layout.pages_for(piece.end)],
            sample=request.sampling if piece.final else None,
            mask=partial(_same, request.first_mask) if request.first_mask is not None else None,
        )

    def settle(self, number: int) -> None:
        """Chunk bookkeeping of the oldest forward, once: prompts whose chunk is launched may go on."""
        forward = self.pending[0]
        if forward.settled:
            return
        assert forward.number == number
        forward.settled = True
        for piece in forward.pieces:
            if not piece.final and not piece.request.over:
                self._ledger.under_way[piece.request.request_id] = piece.request

    def process(self, now: float, forward: NativeForward, abort: Callable[[str, str], None]) -> None:
        """Publish and send what the oldest forward has computed; `abort` ends who is to be aborted."""
        assert self.pending.popleft() is forward
        self._learn_speed(now, forward)
        self._tier.pump()
        for piece, output in zip(forward.pieces, forward.engine_forward.outputs(), strict=True):
            request = piece.request
            request.in_flight -= 1
            reason = self._frontend.aborting.get(request.request_id)
            if reason is not None:
                abort(request.request_id, reason)
            if not request.over:
                try:
                    self._take_result(now, piece, output)
                except Exception as err:
                    logger.exception("request %s: its result could not be processed", request.request_id)
                    self._ledger.fail(request, HostError(f"request {request.request_id}: {err!r}"))
            self._ledger.release_if_quiet(request)

    def _learn_speed(self, now: float, forward: NativeForward) -> None:
        tokens = sum(piece.tokens for piece in forward.pieces)
        self._ledger.totals.computed_tokens += tokens
        self._admission.speed.learn(tokens, forward.launched_s, now)
        self._frontend.tokens_per_s = self._admission.speed.tokens_per_s

    def _take_result(self, now: float, piece: Piece, output: SampledToken | None) -> None:
        request = piece.request
        request.computed = piece.end
        self._memory.keep_prefix(request)
        if piece.final:
            assert output is not None, "a final chunk has no sampled token"
            request.first = output
            self._ledger.publish(now, request, output)
            if request.peer is None:
                request.move(Move.PREFILLED_LOCAL)
                self._ledger.finish(now, request)
            else:
                self._hand_offs.prefilled(now, request)
        if request.bootstrapped:
            self._ledger.send(request)

    def fail(self, forward: NativeForward, error: DeviceError) -> None:
        """Fail the requests of the oldest forward."""
        assert self.pending.popleft() is forward
        for piece in forward.pieces:
            piece.request.in_flight -= 1
            if not piece.request.over:
                self._ledger.fail(piece.request, error)
            self._ledger.release_if_quiet(piece.request)

    def new_results(self) -> list[OutputsFact]:
        """What forwards have sampled that are done and were not told before."""
        found = []
        for forward in self.pending:
            if not forward.told and _done(forward.completion):
                forward.told = True
                found.append(OutputsFact(forward.number, list(forward.engine_forward.outputs())))
        return found


def _done(completion: Completion) -> bool:
    """It has ended well."""
    try:
        return completion.query()
    except DeviceError:
        return False


def _same(mask: MaskWords) -> MaskWords:
    return mask
