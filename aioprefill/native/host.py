"""The native host: runs the port's host calls over an engine, a KV transfer and the pure parts.

A request is admitted with pages for its whole prompt, runs in chunks, and hands its KV over chunk by chunk
as results are processed. Live requests, what they hold and their outcomes are the `Ledger`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from aioprefill.completion import Completion
from aioprefill.config import NativeConfig
from aioprefill.engine.grammar_port import GrammarSource, MaskWords
from aioprefill.engine.port import Engine, EngineForward, SampledToken, Span
from aioprefill.errors import (
    AioprefillError,
    DeviceError,
    HostError,
    RequestAborted,
    RequestTimeout,
)
from aioprefill.host import Hold, Ingested, Progress, Wake
from aioprefill.native.admission import Admission
from aioprefill.native.batches import Batches
from aioprefill.native.frontend import Arrival, Frontend
from aioprefill.native.hand_offs import HandOffs
from aioprefill.native.intake import Intake
from aioprefill.native.ledger import Ledger
from aioprefill.native.memory import KVMemory
from aioprefill.native.planner import Piece
from aioprefill.native.request_state import Move, Request
from aioprefill.native.stage_timers import Stage, StageTimers
from aioprefill.native.tier.store import TierStore
from aioprefill.native.tier.tier import make_tier
from aioprefill.transfer.port import KVTransfer

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class NativeBatch:
    """What `prepare` hands to `launch`."""

    pieces: list[Piece]


@dataclass(slots=True)
class NativeForward:
    """A launched batch. `settled`: its chunk bookkeeping is done."""

    number: int
    pieces: list[Piece]
    engine_forward: EngineForward
    launched_s: float
    settled: bool = False

    @property
    def completion(self) -> Completion:
        """Ready when the sampled tokens are on the host side."""
        return self.engine_forward.completion


class NativeHost:
    """Implements `PrefillHost` (see there for the calls). `frontend` takes requests and aborts.

    Owns `engine`, `transfer` and `grammars` from now on: `aclose` closes them. `transfer` may be None: then
    requests that name a peer fail, and all others get their first token. `grammars` may be None: then
    requests with a grammar fail.
    """

    intake_tick_s: float | None = None
    unsupported_shape: str | None = None

    def __init__(
        self,
        engine: Engine,
        transfer: KVTransfer | None = None,
        config: NativeConfig | None = None,
        *,
        grammars: GrammarSource | None = None,
        tier_store: TierStore | None = None,
    ) -> None:
        self.engine = engine
        self.transfer = transfer
        self.grammars = grammars
        self.config = config or NativeConfig()
        self._layout = engine.spec.layout
        self.memory = KVMemory(
            engine.num_pages, self._layout.page_size, prefix_cache=self.config.prefix_cache
        )
        self.frontend = Frontend(engine.spec, engine.num_pages, self.config)
        self.timers = StageTimers(self.config)
        self.ledger = Ledger(self.frontend, self.memory, transfer, self._layout, self.timers)
        self.admission = Admission(self.config, self.memory)
        self.ledger.on_deadline = self.admission.watch
        self._hand_offs = HandOffs(self.ledger, self.timers, transfer)
        self._forwards: deque[NativeForward] = deque()
        self.intake = Intake(
            self.frontend,
            self.ledger,
            self.memory,
            engine,
            transfer,
            self.consume_result,
            self.timers,
            grammars,
        )
        self.tier = make_tier(self.config, self.memory, engine, tier_store)
        self._batches = Batches(
            self.config,
            self._layout.page_size,
            engine.num_pages,
            self.ledger,
            self.admission,
            self.timers,
            self.tier,
        )
        self.ledger.on_left_queue = self.tier.left_queue
        self.intake.on_weights = self.tier.use_weights
        self._closed = False
        self.hung = False
        """The engine did not stop when it was closed: one of its threads sits in a call that never ends."""

    def __repr__(self) -> str:
        return f"<NativeHost in_flight={len(self._forwards)} {self.ledger!r} {self.memory.pool!r}>"

    def bind(self, wake: Wake) -> None:
        """See `PrefillHost.bind`."""
        self.frontend.bind(wake.input, asyncio.get_running_loop().time, self.engine.stage_weights)
        self.intake.bind(wake.input)
        self.tier.bind(wake.admission)
        self.timers.on_earlier = self.admission.on_earlier = wake.transfers
        if self.transfer is not None:
            self.transfer.start(wake.transfers)

    # Intake

    def ingest(self, now: float, *, hold: Hold) -> Ingested:
        """See `PrefillHost.ingest`."""
        ingested = self.intake.run(now, hold)
        self.tier.look_ahead(now, chain(self.ledger.waiting.values(), self.ledger.bootstrapping.values()))
        return ingested

    def consume_result(self, now: float) -> int:
        """A retract pause takes the result of the only forward in flight; how many: 0 or 1."""
        if not self._forwards:
            return 0
        assert len(self._forwards) == 1 and self._forwards[0].settled
        self.process_result(now, self._forwards[0])
        return 1

    def collect_bootstrapped(self, now: float) -> int:
        """See `PrefillHost.collect_bootstrapped`."""
        return self._hand_offs.collect(now)

    # Preparation

    def prepare(
        self, now: float, *, last: int | None, admit: bool, scheduling_step: bool
    ) -> NativeBatch | None:
        """See `PrefillHost.prepare`."""
        if scheduling_step:
            self.tier.step()
        if last is not None and not self._forwards[0].settled:
            assert self._forwards[0].number == last
            self._settle(self._forwards[0])
        if not admit or self.intake.pause.paused:
            return None
        if not self.intake.pause.admits:
            pieces = self._batches.of_admitted()
            self.intake.finish_wait(idle=not pieces and not self._forwards)
            return NativeBatch(pieces) if pieces else None
        self._fail_late(self.admission.refused(now))
        pieces = self._batches.form(now)
        return NativeBatch(pieces) if pieces else None

    def _fail_late(self, late: list[tuple[Request, RequestTimeout]]) -> int:
        for request, error in late:
            self.ledger.fail(request, error)
        return len(late)

    def _settle(self, forward: NativeForward) -> None:
        """Chunk bookkeeping: prompts whose chunk is launched may go on with the next one."""
        forward.settled = True
        for piece in forward.pieces:
            if not piece.final and not piece.request.over:
                self.ledger.under_way[piece.request.request_id] = piece.request

    def launch(self, now: float, batch: NativeBatch, number: int) -> NativeForward:
        """See `PrefillHost.launch`."""
        engine_forward = self.engine.launch([self._span(piece) for piece in batch.pieces])
        for piece in batch.pieces:
            request = piece.request
            if request.planned == request.cached:
                self.timers.enter(request, Stage.RUNNING, now)
            request.launched_s = now if request.launched_s is None else request.launched_s
            request.planned = piece.end
            if self.intake.weight_version not in request.weight_versions:
                request.weight_versions += (self.intake.weight_version,)
            request.in_flight += 1
            del self.ledger.under_way[request.request_id]
        forward = NativeForward(number, batch.pieces, engine_forward, now)
        self._forwards.append(forward)
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

    # Results

    def process_result(self, now: float, forward: NativeForward) -> None:
        """See `PrefillHost.process_result`. A request that cannot take its result fails alone."""
        assert self._forwards.popleft() is forward
        self._learn_speed(now, forward)
        self.tier.pump()
        for piece, output in zip(forward.pieces, forward.engine_forward.outputs(), strict=True):
            request = piece.request
            request.in_flight -= 1
            reason = self.frontend.aborting.get(request.request_id)
            if reason is not None:
                self.intake.abort(request.request_id, reason)
            if not request.over:
                try:
                    self._take_result(now, piece, output)
                except Exception as err:
                    logger.exception("request %s: its result could not be processed", request.request_id)
                    self.ledger.fail(request, HostError(f"request {request.request_id}: {err!r}"))
            self.ledger.release_if_quiet(request)

    def _learn_speed(self, now: float, forward: NativeForward) -> None:
        tokens = sum(piece.tokens for piece in forward.pieces)
        self.ledger.totals.computed_tokens += tokens
        self.admission.speed.learn(tokens, forward.launched_s, now)
        self.frontend.tokens_per_s = self.admission.speed.tokens_per_s

    def _take_result(self, now: float, piece: Piece, output: SampledToken | None) -> None:
        request = piece.request
        request.computed = piece.end
        self.memory.keep_prefix(request)
        if piece.final:
            assert output is not None, "a final chunk has no sampled token"
            request.first = output
            self.ledger.publish(now, request, output)
            if request.peer is None:
                request.move(Move.PREFILLED_LOCAL)
                self.ledger.finish(now, request)
            else:
                self._hand_offs.prefilled(now, request)
        if request.bootstrapped:
            self.ledger.send(request)

    def fail_result(self, now: float, forward: NativeForward, error: DeviceError) -> None:
        """See `PrefillHost.fail_result`."""
        assert self._forwards.popleft() is forward
        for piece in forward.pieces:
            piece.request.in_flight -= 1
            if not piece.request.over:
                self.ledger.fail(piece.request, error)
            self.ledger.release_if_quiet(piece.request)

    # Transfers

    def progress_transfers(self, now: float) -> Progress:
        """See `PrefillHost.progress_transfers`."""
        available = self.memory.pool.available
        late = self._fail_late(self.timers.expired(now)) + self._fail_late(self.admission.refused(now))
        retired, failed = self._hand_offs.poll(now)
        freed = self.memory.pool.available > available
        return Progress(
            bootstrapped=self._hand_offs.bootstrapped, retired=retired, failed=failed + late, freed=freed
        )

    # The rest of the port

    async def run_own_loop(self) -> None:
        """See `PrefillHost.run_own_loop`. There is none: this loop serves all that the engine loads."""

    def on_idle(self, now: float) -> None:
        """See `PrefillHost.on_idle`."""
        self.tier.pump()

    def next_timer(self) -> float | None:
        """See `PrefillHost.next_timer`. The transfer keeps its own timers."""
        times = (self.timers.next(), self.admission.next_refusal())
        return min((time for time in times if time is not None), default=None)

    def begin_drain(self, now: float) -> None:
        """See `PrefillHost.begin_drain`."""
        self.intake.begin_drain(now)

    def end_drain(self, now: float) -> None:
        """See `PrefillHost.end_drain`."""
        for request in self.ledger.open:
            reason = f"request {request.request_id}: not done at the end of the drain"
            self.ledger.fail(request, RequestAborted(reason))

    def open_requests(self) -> Sequence[str]:
        """See `PrefillHost.open_requests`."""
        coming = [item.request.request_id for item in self.frontend.inbox if isinstance(item, Arrival)]
        return [request.request_id for request in self.ledger.open] + coming

    def stats(self) -> Mapping[str, int | float | str]:
        """See `PrefillHost.stats`."""
        pool = self.memory.pool
        return {
            **self.ledger.totals.table(),
            "phase": self.intake.pause.phase.value,
            "weight_version": self.intake.weight_version,
            "queued_requests": self.frontend.queued_requests,
            "queued_tokens": self.frontend.queued_tokens,
            "pages": pool.num_pages,
            "pages_free": pool.free,
            "pages_cached": pool.idle,
            "pages_held": pool.held,
            "page_bytes": self._layout.page_bytes,
            **self.tier.stats(),
        }

    async def aclose(self, error: AioprefillError) -> None:
        """See `PrefillHost.aclose`. Waits at most 10 s for a device that hangs."""
        if self._closed:
            return
        self._closed = True
        self.frontend.close(error)
        self.intake.close(error)
        for request in self.ledger.open:
            self.ledger.fail(request, error)
        if self.grammars is not None:
            await self.grammars.aclose()
        if self.transfer is not None:
            await self.transfer.aclose()
        await self.tier.aclose()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.engine.aclose()
        except TimeoutError:
            self.hung = True
            logger.error("the engine did not stop within %.0f s: a forward hangs", CLOSE_TIMEOUT_S)


def _same(mask: MaskWords) -> MaskWords:
    return mask
