"""The native host: runs the port's host calls over an engine, a KV transfer and the pure parts.

A request is admitted with pages for its whole prompt, runs in chunks, and hands its KV over chunk by chunk
as results are processed. Live requests, what they hold and their outcomes are the `Ledger`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from aioprefill.config import NativeConfig
from aioprefill.engine.grammar_port import GrammarSource
from aioprefill.engine.port import Engine
from aioprefill.errors import (
    AioprefillError,
    ConfigError,
    DeviceError,
    RankError,
    RequestAborted,
    RequestTimeout,
)
from aioprefill.host import Hold, Ingested, Progress, Wake
from aioprefill.native.admission import Admission
from aioprefill.native.batches import Batches
from aioprefill.native.forwards import Forwards, NativeBatch, NativeForward
from aioprefill.native.frontend import Frontend
from aioprefill.native.hand_offs import HandOffs
from aioprefill.native.intake import Intake
from aioprefill.native.ledger import Ledger
from aioprefill.native.memory import KVMemory
from aioprefill.native.outside import Outside
from aioprefill.native.request_state import Request
from aioprefill.native.stage_timers import StageTimers
from aioprefill.native.staging import Staging
from aioprefill.native.tier.store import TierStore
from aioprefill.native.tier.tier import make_tier
from aioprefill.transfer.port import KVTransfer

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
LOST_TIMEOUT_S = 1.0


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
        self._staging = Staging(engine)
        self.frontend = Frontend(engine.spec, engine.num_pages, self.config, self._staging)
        self.outside = Outside(self.frontend, transfer, self._staging)
        self.timers = StageTimers(self.config)
        self.ledger = Ledger(self.frontend, self.memory, transfer, self._layout, self.timers)
        self.admission = Admission(self.config, self.memory)
        self.ledger.on_deadline = self.admission.watch
        self._hand_offs = HandOffs(self.ledger, self.timers)
        self.intake = Intake(
            self.frontend,
            self.outside,
            self._staging,
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
        self.forwards = Forwards(
            engine,
            self.frontend,
            self.ledger,
            self.memory,
            self.admission,
            self._hand_offs,
            self.timers,
            self.tier,
        )
        self.ledger.on_left_queue = self.tier.left_queue
        self.intake.on_weights = self.tier.use_weights
        self._closed = False
        self.hung = False
        """The engine did not stop when it was closed: one of its threads sits in a call that never ends."""

    def __repr__(self) -> str:
        return f"<NativeHost in_flight={len(self.forwards.pending)} {self.ledger!r} {self.memory.pool!r}>"

    def bind(self, wake: Wake) -> None:
        """See `PrefillHost.bind`."""
        self.frontend.bind(wake.input, asyncio.get_running_loop().time)
        self.intake.bind(wake.input)
        self.tier.bind(wake.admission)
        self.timers.on_earlier = self.admission.on_earlier = wake.transfers
        self.outside.start(wake.transfers)

    # Intake

    def ingest(self, now: float, *, hold: Hold) -> Ingested:
        """See `PrefillHost.ingest`."""
        self.outside.see()
        ingested = self.intake.run(now, hold)
        self.tier.look_ahead(now, chain(self.ledger.waiting.values(), self.ledger.bootstrapping.values()))
        return ingested

    def consume_result(self, now: float) -> int:
        """A retract pause takes the result of the only forward in flight; how many: 0 or 1."""
        if not self.forwards.pending:
            return 0
        assert len(self.forwards.pending) == 1 and self.forwards.pending[0].settled
        self.forwards.process(now, self.forwards.pending[0], self.intake.abort)
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
        if last is not None:
            self.forwards.settle(last)
        if not admit or self.intake.pause.paused:
            return None
        if not self.intake.pause.admits:
            pieces = self._batches.of_admitted()
            self.intake.finish_wait(idle=not pieces and not self.forwards.pending)
            return NativeBatch(pieces) if pieces else None
        self._fail_late(self.admission.refused(now))
        pieces = self._batches.form(now)
        return NativeBatch(pieces) if pieces else None

    def _fail_late(self, late: list[tuple[Request, RequestTimeout]]) -> int:
        for request, error in late:
            self.ledger.fail(request, error)
        return len(late)

    def launch(self, now: float, batch: NativeBatch, number: int) -> NativeForward:
        """See `PrefillHost.launch`."""
        return self.forwards.launch(now, batch, number, self.intake.weight_version)

    # Results

    def process_result(self, now: float, forward: NativeForward) -> None:
        """See `PrefillHost.process_result`. A request that cannot take its result fails alone."""
        self.outside.see()
        self.forwards.process(now, forward, self.intake.abort)

    def fail_result(self, now: float, forward: NativeForward, error: DeviceError) -> None:
        """See `PrefillHost.fail_result`."""
        self.forwards.fail(forward, error)

    # Transfers

    def progress_transfers(self, now: float) -> Progress:
        """See `PrefillHost.progress_transfers`."""
        self.outside.see()
        available = self.memory.pool.available
        late = self._fail_late(self.timers.expired(now)) + self._fail_late(self.admission.refused(now))
        retired, failed = self._hand_offs.take(now, self.outside.events())
        freed = self.memory.pool.available > available
        return Progress(
            bootstrapped=self._hand_offs.bootstrapped, retired=retired, failed=failed + late, freed=freed
        )

    # Several ranks, recordings and replays

    def lead(self, size: int, *, recorded: bool) -> None:
        """See `ReplicatedHost.lead`."""
        self._refuse_tier("several ranks, and recordings,")
        self.outside.lead(size)
        if recorded:
            self.outside.results = self.forwards.new_results

    def follow(self, report: Callable[[bytes], None]) -> None:
        """See `ReplicatedHost.follow`."""
        self._refuse_tier("several ranks, and replays,")
        self.outside.follow(report)
        self.intake.gate.follows = True

    def _refuse_tier(self, who: str) -> None:
        if self.config.tier_dir is not None:
            raise ConfigError(f"tier-dir: {who} have no storage tier: what it holds differs between ranks")

    def take_facts(self) -> bytes:
        """See `ReplicatedHost.take_facts`."""
        return self.outside.take()

    def give_facts(self, facts: bytes) -> None:
        """See `ReplicatedHost.give_facts`."""
        self.outside.give(facts)

    def take_report(self, rank: int, report: bytes) -> None:
        """See `ReplicatedHost.take_report`."""
        self.outside.take_report(rank, report)

    def describe(self, batch: NativeBatch) -> bytes:
        """See `ReplicatedHost.describe`."""
        return batch.describe()

    def at_rest(self) -> bool:
        """See `ReplicatedHost.at_rest`. Weights that wait to be swapped in count as live."""
        quiet = not (self.ledger.requests or self.forwards.pending or self._hand_offs.bootstrapped)
        return quiet and self.frontend.idle and self.intake.idle and self._staging.idle

    def restart(self, now: float) -> None:
        """See `ReplicatedHost.restart`. Cached prefixes, and what was learned of the speed, are gone.

        The numbers of arrivals and of the weights go on: a fresh host needs those two.
        """
        assert not self.ledger.requests and not self.forwards.pending, f"restarted at work: {self!r}"
        self.memory.restart()
        self.admission.restart()
        self.frontend.tokens_per_s = 0.0

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
        self.outside.see()
        self.intake.begin_drain(now)

    def end_drain(self, now: float) -> None:
        """See `PrefillHost.end_drain`."""
        for request in self.ledger.open:
            reason = f"request {request.request_id}: not done at the end of the drain"
            self.ledger.fail(request, RequestAborted(reason))

    def open_requests(self) -> Sequence[str]:
        """See `PrefillHost.open_requests`."""
        return [request.request_id for request in self.ledger.open] + self.frontend.arrivals

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
        """See `PrefillHost.aclose`. Waits at most 10 s for a device that hangs.

        1 s when a rank is lost: a forward that needs that rank never ends.
        """
        if self._closed:
            return
        self._closed = True
        self.outside.alone()
        self.frontend.close(error)
        self.intake.close(error)
        await self._staging.aclose()
        for request in self.ledger.open:
            self.ledger.fail(request, error)
        if self.grammars is not None:
            await self.grammars.aclose()
        if self.transfer is not None:
            await self.transfer.aclose()
        await self.tier.aclose()
        timeout_s = LOST_TIMEOUT_S if isinstance(error.__cause__, RankError) else CLOSE_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                await self.engine.aclose()
        except TimeoutError:
            self.hung = True
            logger.error("the engine did not stop within %.0f s: a forward hangs", timeout_s)
