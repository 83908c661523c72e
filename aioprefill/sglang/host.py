"""SGLang's scheduler as a host: every host call is one of its own methods.

Rule: nothing of SGLang's loop is copied here. What is kept beside the scheduler is which forwards are in
flight, for its `last_batch` must be the oldest one whose result is not processed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioprefill.errors import AioprefillError, DeviceError, HostLeft
from aioprefill.host import Hold, Ingested, Progress, Wake
from aioprefill.sglang.completion import Pacing, SglangCompletion
from aioprefill.sglang.input_order import InputOrder
from aioprefill.sglang.inventory import aborted, counts, ending, unfinished
from aioprefill.sglang.replica import ADMISSION_CHANGED, GRAMMARS_READY, TRANSFERS_MOVED, Replica
from aioprefill.sglang.upkeep import Upkeep
from aioprefill.sglang.wakes import Wakes

logger = logging.getLogger(__name__)

INTAKE_TICK_S = 0.1
"""SGLang hangs timeouts, deferred flushes and session reaping on intake."""
TRANSFER_FALLBACK_S = 0.05
"""Longest time between two calls of `progress_transfers` while one is needed."""


@dataclass(slots=True)
class SglangForward:
    """A launched batch: SGLang's `batch` and `result`, and when both are done."""

    number: int
    batch: Any
    result: Any
    completion: SglangCompletion


class SglangHost(Replica):
    """Implements `ReplicatedHost` over a scheduler that serves as prefill. Made on its loop, closed once.

    `input_poll_s` is the interval of intake where the receiver has no sockets to watch.
    """

    unsupported_shape: str | None = None

    def __init__(
        self,
        scheduler: Any,
        pacing: Pacing,
        *,
        clock: Callable[[], float],
        pause_barrier: bool = False,
        stall_limit_s: float = 120.0,
        input_poll_s: float = 0.005,
    ) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._pacing = pacing
        self._clock = clock
        self._input = InputOrder(scheduler, barrier=pause_barrier)
        self._upkeep = Upkeep(scheduler, stall_limit_s=stall_limit_s)
        self._input_poll_s = input_poll_s
        self._forwards: deque[SglangForward] = deque()
        self._barrier_pending = False
        self._wakes: Wakes | None = None
        self._on_report: Mapping[bytes, Callable[[], None]] = {}
        self._progressed_at = 0.0
        self.on_exiting: Callable[[], None] = lambda: None
        """Called when SGLang has been told to shut down."""

    # Life

    async def run_own_loop(self) -> None:
        """Never asked: who makes the host has looked at the shape."""
        raise AssertionError("an SGLang host is made for shapes that are served")

    def bind(self, wake: Wake) -> None:
        """See `PrefillHost.bind`. Takes the place of what SGLang waits by, until `aclose`."""
        scheduler = self._scheduler
        scheduler.enable_continuous_input_polling = True
        scheduler.result_queue = deque()
        self._upkeep.begin()
        if self._follows:
            self._wakes = Wakes(
                scheduler, self.reporting(), lambda: self._report(GRAMMARS_READY), follows=True
            )
            return
        self._wakes = wakes = Wakes(scheduler, wake, wake.admission, alone=self.alone)
        self._on_report = {
            TRANSFERS_MOVED: wake.transfers,
            ADMISSION_CHANGED: wake.admission,
            GRAMMARS_READY: wakes.grammars.others_ready,
        }

    async def aclose(self, error: AioprefillError) -> None:
        """Give SGLang back what was its own. Its requests get no answer here: their end is SGLang's."""
        if self._wakes is not None:
            self._wakes.close()
        self._upkeep.end()
        self._pacing.timer.close()

    @property
    def intake_tick_s(self) -> float | None:
        """See `PrefillHost.intake_tick_s`; no wakes come from a receiver without sockets."""
        return INTAKE_TICK_S if self._woken.by_sockets else self._input_poll_s

    @property
    def _woken(self) -> Wakes:
        assert self._wakes is not None, "the host is not bound to a loop"
        return self._wakes

    @property
    def grammars_due(self) -> bool:
        """See `Replica.grammars_due`."""
        return self._woken.grammars.due

    def take_report(self, rank: int, report: bytes) -> None:
        """See `Replica.take_report`. Unknown reports are of another version, and mean nothing here."""
        known = self._on_report.get(report)
        if known is not None:
            known()

    # Host calls

    def ingest(self, now: float, *, hold: Hold) -> Ingested:
        """See `PrefillHost.ingest`. Raises `HostLeft` when SGLang changes its role.

        A call does not end behind a resume: in SGLang a pause that comes with it begins at once.
        """
        self.take_look()
        scheduler = self._scheduler
        self._apply_pending_barrier()
        results, was_paused = len(scheduler.result_queue), scheduler._engine_paused
        try:
            taken = self._input.take(hold)
        except Exception as error:
            if type(error).__name__ == "PdRoleSwitchRestart":
                raise HostLeft("SGLang changes its role") from error
            raise
        consumed = results - len(scheduler.result_queue)
        for _ in range(consumed):
            self._forwards.popleft()
        self._after_input(now, new=taken.requests > 0, resumed=was_paused and not scheduler._engine_paused)
        return Ingested(
            requests=taken.requests,
            admission_changed=taken.others > 0 or consumed > 0,
            held=self._input.held,
            held_retract=self._input.held_retract,
            consumed=consumed,
            paused=bool(scheduler._engine_paused),
            exiting=bool(scheduler.gracefully_exit),
        )

    def _after_input(self, now: float, *, new: bool, resumed: bool) -> None:
        """What may follow from input, and what SGLang would do between two passes of its loop."""
        scheduler = self._scheduler
        if scheduler._engine_paused:
            scheduler._record_scheduler_state_for_paused_engine()
            scheduler.cur_batch_for_debug = None  # a stale one arms the watchdog
        self._woken.after_input(now, new=new, resumed=resumed)
        self._upkeep.tick(now, in_flight=len(self._forwards), busy_since=self._busy_since)
        if scheduler.gracefully_exit:
            self.on_exiting()

    def collect_bootstrapped(self, now: float) -> int:
        """See `PrefillHost.collect_bootstrapped`."""
        self.take_look()
        scheduler = self._scheduler
        if scheduler._engine_paused or scheduler.gracefully_exit:
            return 0
        ready = scheduler.disagg_prefill_bootstrap_queue.pop_bootstrapped()
        scheduler.waiting_queue.extend(ready)
        return len(ready)

    def prepare(self, now: float, *, last: int | None, admit: bool, scheduling_step: bool) -> Any:
        """See `PrefillHost.prepare`."""
        scheduler, grammars, look = self._scheduler, self._woken.grammars, self.take_look()
        self._apply_pending_barrier()
        self._name_last_batch(last)
        if not admit:
            self._keep_chunk_books()
            return None
        grammars.open(look=look)
        try:
            plan = scheduler.get_next_disagg_prefill_batch_to_run(
                running_batch=scheduler.running_batch,
                last_batch=scheduler.last_batch,
                should_retry_storage_prefetch=scheduling_step,
            )
        finally:
            grammars.shut(now)
        scheduler.running_batch = plan.running_batch
        batch = scheduler.ngram_embedding_manager.prepare_for_forward(
            plan.batch_to_run, chunked_req=scheduler.chunked_req
        )
        scheduler.cur_batch_for_debug = batch
        self._woken.after_call()
        return batch

    def _name_last_batch(self, last: int | None) -> None:
        oldest = self._forwards[0] if self._forwards else None
        assert last == (None if oldest is None else oldest.number), f"{last} is not the oldest forward"
        self._scheduler.last_batch = None if oldest is None else oldest.batch

    def _keep_chunk_books(self) -> None:
        """The chunk step of the last batch alone: nothing may be admitted, but its result will send KV."""
        scheduler = self._scheduler
        last = scheduler.last_batch
        if last is None:
            scheduler.cur_batch_for_debug = None
        elif not last.prefill_chunk_processed:
            scheduler.process_prefill_chunk(last_batch=last, running_batch=scheduler.running_batch)
            last.prefill_chunk_processed = True

    def launch(self, now: float, batch: Any, number: int) -> SglangForward:
        """See `PrefillHost.launch`."""
        self.take_look()
        scheduler = self._scheduler
        if scheduler.enable_staging:
            scheduler.maybe_prefetch_staging_for_batch(batch)
        result = scheduler.run_batch(batch)
        if scheduler._war_barrier_is_coarse():
            self._barrier_pending = True
        else:
            scheduler._apply_war_barrier()
        scheduler.result_queue.append((batch.copy(), result))
        completion = SglangCompletion(result, batch.extend_num_tokens or 1, self._clock(), self._pacing)
        forward = SglangForward(number, batch, result, completion)
        self._forwards.append(forward)
        if len(self._forwards) == 1:
            scheduler.last_batch = batch
            if result.delay_sample_func is not None:
                self._apply_pending_barrier()
            scheduler.launch_batch_sample_if_needed(result, batch)
        return forward

    def process_result(self, now: float, forward: SglangForward) -> None:
        """See `PrefillHost.process_result`; then retires transfers, at the point where SGLang does."""
        self.take_look()
        scheduler = self._scheduler
        assert forward is self._forwards.popleft(), f"result {forward.number} is out of order"
        batch, result = scheduler.result_queue.popleft()
        scheduler.process_batch_result(batch, result)
        scheduler.process_disagg_prefill_inflight_queue()
        self._apply_pending_barrier()
        following = self._forwards[0] if self._forwards else None
        scheduler._sched_idled = following is None
        scheduler.last_batch = None if following is None else following.batch
        if following is not None:
            scheduler.launch_batch_sample_if_needed(following.result, following.batch)
        self._woken.after_call()

    def fail_result(self, now: float, forward: SglangForward, error: DeviceError) -> None:
        """SGLang has no way on after a forward that failed: as in its own loop, its process ends."""
        raise error

    def progress_transfers(self, now: float) -> Progress:
        """See `PrefillHost.progress_transfers`. Handshakes are moved by `collect_bootstrapped`."""
        self.take_look()
        scheduler = self._scheduler
        before = len(scheduler.disagg_prefill_inflight_queue)
        done = scheduler.process_disagg_prefill_inflight_queue()
        failed = sum(map(aborted, done))
        left = len(scheduler.disagg_prefill_inflight_queue)
        self._progressed_at = now
        self._upkeep.tick(now, in_flight=len(self._forwards), busy_since=self._busy_since)
        blocked = scheduler._engine_paused or scheduler.gracefully_exit
        return Progress(
            bootstrapped=0 if blocked else len(scheduler.disagg_prefill_bootstrap_queue.queue),
            retired=len(done) - failed,
            failed=failed,
            freed=left < before,  # released for good, or requeued
        )

    def on_idle(self, now: float) -> None:
        """See `PrefillHost.on_idle`."""
        self.take_look()
        self._scheduler.cur_batch_for_debug = None
        self._upkeep.idle(now)

    def next_timer(self) -> float | None:
        """See `PrefillHost.next_timer`."""
        return self._progressed_at + TRANSFER_FALLBACK_S if self._woken.transfers_needed else None

    @property
    def _busy_since(self) -> float | None:
        """When the device began with the oldest forward that has not been seen done."""
        pending = [f for f in self._forwards if not f.completion.ended]
        return max(pending[0].completion.launched_at, self._pacing.free_at) if pending else None

    def _apply_pending_barrier(self) -> None:
        """A coarse barrier makes later work of the schedule stream wait for the whole forward.

        So it is put off until something is about to write what the forward reads.
        """
        if self._barrier_pending:
            self._barrier_pending = False
            self._scheduler._apply_war_barrier()

    # Ends

    def begin_drain(self, now: float) -> None:
        """See `PrefillHost.begin_drain`. What was not launched is left to SGLang, which ends its process."""
        self._scheduler.gracefully_exit = True

    def end_drain(self, now: float) -> None:
        """See `PrefillHost.end_drain`."""

    def open_requests(self) -> Sequence[str]:
        """See `PrefillHost.open_requests`. In a drain only those that will still end."""
        scheduler = self._scheduler
        return ending(scheduler, self._launched) if scheduler.gracefully_exit else self.unfinished()

    def unfinished(self) -> Sequence[str]:
        """Ids of all requests that SGLang's scheduler still has."""
        return unfinished(self._scheduler, self._launched)

    @property
    def _launched(self) -> list[Any]:
        return [request for forward in self._forwards for request in forward.batch.reqs]

    def stats(self) -> Mapping[str, int | float | str]:
        """See `PrefillHost.stats`."""
        looks = {"completion_looks": self._pacing.looks, "peer_looks": self._woken.peer_looks}
        return {**counts(self._scheduler), **looks}
