"""The scheduler: one TaskGroup that owns the loop's tasks, start, drain and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

from aioprefill.config import SchedulerConfig
from aioprefill.errors import AioprefillError, HostError, HostLeft, RankError, RequestAborted
from aioprefill.follower import STOP, STOP_WANTED, first_cause
from aioprefill.health import Facts, verdict
from aioprefill.host import DrainReport, PrefillHost, ReplicatedHost, Wake
from aioprefill.host_calls import CallMeter, CallRunner, HostCalls
from aioprefill.intake_task import intake_task
from aioprefill.loop_core import LoopCore
from aioprefill.operations import Frontend, Operations
from aioprefill.pipeline import Pipeline
from aioprefill.prepare_task import prepare_task
from aioprefill.ranks.lost import LostRank
from aioprefill.ranks.port import RankLink
from aioprefill.recording import Recording
from aioprefill.request import PrefillHandle, PrefillRequest
from aioprefill.result_task import result_task
from aioprefill.signals import Signals
from aioprefill.stats import Health, SchedulerStats
from aioprefill.tp_agree import Agreement, CallOrder, CallToken, Digest, SoloAgreement, encode_token
from aioprefill.transfer_task import transfer_task

logger = logging.getLogger(__name__)

TASKS = (intake_task, prepare_task, result_task, transfer_task)


class PrefillScheduler(Operations):
    """Runs a host's prefill loop on the current asyncio (or uvloop) loop.

        async with PrefillScheduler(host, config) as scheduler:
            result = await scheduler.submit(request)

    Leaving the block drains (see `drain`) and stops. An error that breaks the host answers every open
    request with `HostError` and is raised from the block's end; `wait_stopped` tells earlier.

    With `ranks` it is rank 0 of several (the others run a `Follower`), with `recording` everything that it
    decides is recorded; both need a `ReplicatedHost`. Both are closed with the scheduler.
    """

    def __init__(
        self,
        host: PrefillHost,
        config: SchedulerConfig | None = None,
        *,
        ranks: RankLink | None = None,
        recording: Recording | None = None,
    ) -> None:
        super().__init__()
        self._host = host
        self._config = config or SchedulerConfig()
        self._pipeline = Pipeline()
        self._meter = CallMeter(slow_s=self._config.slow_call_s)
        self._order = CallOrder()
        self._ranks = ranks
        self._recording = recording
        self._runner_of_calls = CallRunner(host, self._meter, None if ranks is None else ranks.progress)
        self._lost: LostRank | None = None
        """Fails when another rank is lost."""
        self._core: LoopCore | None = None
        self._stop = asyncio.Event()
        self.stop_wanted = asyncio.Event()
        """Another rank was told to stop, and so should this one be: whoever runs the scheduler drains it."""
        self._begun = asyncio.Event()
        """Host calls may be made: every rank is connected. Set at the end of a loop that never began, too."""
        self._over = asyncio.Event()
        self._ending = False
        """The loop is over, and its host is being closed: nothing can be asked of it any more."""
        self._failure = ""
        self._drained = False
        """A drain has ended: a later one has nothing to wait for, though a forward may still hang."""
        self._late: set[str] = set()
        """Requests that were dropped at the deadline of a drain."""
        self._runner: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "new" if self._runner is None else "stopped" if self._runner.done() else "running"
        return f"<PrefillScheduler {state} {self._pipeline!r}>"

    # Life

    async def __aenter__(self) -> PrefillScheduler:
        assert self._runner is None, "a scheduler runs once"
        loop = asyncio.get_running_loop()
        signals = Signals()
        digest = self._replicate()
        self._core = LoopCore(
            host=self._host,
            calls=HostCalls(
                self._host,
                self._order,
                loop.time,
                self._runner_of_calls,
                self._send if digest is not None else None,
                self._recording,
            ),
            pipeline=self._pipeline,
            signals=signals,
            agreement=self._agreement,
            config=self._config,
            digest=digest,
        )

        def admission_changed() -> None:
            self._pipeline.admission_changed()
            signals.preparation.set()

        self._host.bind(
            Wake(input=signals.input.set, transfers=signals.transfers.set, admission=admission_changed)
        )
        if self._ranks is not None:
            self._lost = LostRank()
            self._ranks.start(self._on_report, self._on_lost)
        signals.input.set()
        self._runner = asyncio.create_task(self._run(self._core), name="aioprefill.scheduler")
        if self._ranks is not None:
            await self._wait_begun(self._runner)
        return self

    async def _wait_begun(self, runner: asyncio.Task[None]) -> None:
        """Cancelling it stops the loop, for nobody will leave the block."""
        try:
            await self._begun.wait()
        except asyncio.CancelledError:
            runner.cancel()
            await asyncio.wait([runner])
            raise

    @property
    def _agreement(self) -> Agreement:
        return SoloAgreement() if self._ranks is None else self._ranks.agreement

    def _replicate(self) -> Digest | None:
        """Prepare the host for followers and a recording; None where there is neither, at no cost."""
        if self._ranks is None and self._recording is None:
            return None
        host = cast(ReplicatedHost, self._host)
        host.lead(1 if self._ranks is None else self._ranks.size, recorded=self._recording is not None)
        digest = Digest()
        self._runner_of_calls.observers.append(lambda _, description: digest.add(description))
        if self._recording is not None:
            self._runner_of_calls.observers.append(self._recording.called)
        return digest

    def _send(self, token: CallToken) -> None:
        """A host call is about to be made: the other ranks, and the recording, are told."""
        if self._ranks is not None:
            self._ranks.send(encode_token(token))

    def _on_report(self, rank: int, report: bytes) -> None:
        if report == STOP_WANTED:
            logger.info("rank %d was told to stop", rank)
            self.stop_wanted.set()
            return
        cast(ReplicatedHost, self._host).take_report(rank, report)

    def _on_lost(self, error: RankError) -> None:
        if self._lost is not None:
            self._lost.set(error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        try:
            if error is None and self._running:
                report = await self.drain(self._config.drain_timeout_s)
                if report.dropped:
                    logger.warning("dropped at shutdown: %s", ", ".join(report.dropped))
        finally:
            self._stop.set()
            await asyncio.wait([self._runner])
        failure = self._runner.exception()
        if failure is not None and error is None:
            raise failure

    async def _run(self, core: LoopCore) -> None:
        """The group, and what is owed to open requests when it ends, however it ends."""
        answer: AioprefillError = RequestAborted("the scheduler stopped")
        culprit = -1
        try:
            shape = self._host.unsupported_shape
            if shape is not None:
                logger.warning("%s is not supported: the host's own loop runs, not aioprefill's", shape)
                self._begun.set()
                await self._host.run_own_loop()
                return
            async with asyncio.TaskGroup() as group:
                tasks: list[asyncio.Task[Any]] = []
                if self._ranks is not None:
                    assert self._lost is not None
                    tasks.append(group.create_task(self._lost.wait(), name="aioprefill.rank_task"))
                    await self._ranks.wait_connected()
                self._begun.set()
                tasks += [
                    group.create_task(_named(task, core), name=f"aioprefill.{task.__name__}")
                    for task in TASKS
                ]
                await self._stop.wait()
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as group_error:
            cause = first_cause(group_error)
            if isinstance(cause, HostLeft):
                logger.info("the loop ends: %s", cause)
                raise cause from cause.__cause__
            self._failure = str(cause) or type(cause).__name__
            if self._ranks is not None:
                self._ranks.failed(cause)
                culprit = cause.rank if isinstance(cause, RankError) else self._ranks.rank
            answer = HostError(f"the scheduler stopped: {cause}")
            answer.__cause__ = cause
            logger.error(
                "the loop stopped: %s", cause, exc_info=None if isinstance(cause, RankError) else cause
            )
            raise cause from None
        finally:
            self._ending = True
            self._tell_followers_to_stop(core, culprit)
            try:
                await self._host.aclose(answer)
            finally:
                if self._ranks is not None:
                    await self._ranks.aclose()
                if self._recording is not None:
                    self._recording.close()
                self._over.set()
                self._begun.set()
                core.signals.progress.set()

    def _tell_followers_to_stop(self, core: LoopCore, culprit: int) -> None:
        """The last token of the order. `culprit`: the rank by whose fault the loop broke, if it did."""
        if self._ranks is not None:
            error = ("", self._failure, True) if self._failure else None
            token = self._order.append(STOP, core.calls.now(), culprit, agreed=core.calls.agreed, error=error)
            self._ranks.send(encode_token(token))

    async def wait_stopped(self) -> None:
        """Return when the loop has ended, for whatever reason. Cancelling the wait leaves it running."""
        await self._over.wait()

    # Requests

    def submit(self, request: PrefillRequest) -> PrefillHandle:
        """Queue a request and return at once.

        Raises `InvalidRequest` (naming the field), `QueueFull` (with a retry hint), or `HostError` when the
        scheduler drains or has stopped.
        """
        if not self._running or self._pipeline.exiting:
            raise HostError("the scheduler takes no requests: it is not running, or it drains")
        return self._frontend.submit(request)

    def abort(self, request_id: str, reason: str = "aborted by the caller") -> None:
        """Ask for a request to be given up, in any state; unknown and finished ids are ignored."""
        self._frontend.abort(request_id, reason)

    @property
    def _frontend(self) -> Frontend:
        frontend: Any = getattr(self._host, "frontend", None)
        if frontend is None:
            raise HostError(f"{type(self._host).__name__} takes requests by its own sockets, not by submit()")
        return frontend  # type: ignore[no-any-return]

    # Shutdown

    async def drain(self, timeout: float | None = None) -> DrainReport:  # noqa: ASYNC109  part of the API
        """Launch nothing more; process what was launched, let transfers finish, up to `timeout` seconds.

        Requests that were never launched are dropped at once, the others at the deadline; both are in the
        report, and their callers get `RequestAborted`. Cancelling it leaves the scheduler draining.
        """
        core = self._core
        assert core is not None, "the scheduler was not started"
        before = tuple(self._host.open_requests())
        if not self._pipeline.exiting:
            self._pipeline.drain()
            core.calls.begin_drain()
            core.take_input()
        launched = set(self._host.open_requests())
        await self._wait_drained(core, timeout)
        self._late.update(self._host.open_requests())
        core.calls.end_drain()
        self._drained = True
        core.signals.progress.set()  # drains that wait longer have nothing to wait for any more
        finished = launched - self._late
        return DrainReport(
            finished=tuple(request_id for request_id in before if request_id in finished),
            dropped=tuple(request_id for request_id in before if request_id not in finished),
        )

    async def _wait_drained(self, core: LoopCore, timeout_s: float | None) -> None:
        """Return when nothing is open or in flight, at this or another drain's deadline, or at the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._running and not self._drained:
                    if not self._pipeline.result_pending and not self._host.open_requests():
                        return
                    await core.signals.progress.wait()

    @property
    def _running(self) -> bool:
        return self._runner is not None and not self._ending

    # Sight

    def stats(self) -> SchedulerStats:
        """A frozen snapshot."""
        counters = self._pipeline.counters
        return SchedulerStats(
            in_flight=len(self._pipeline.flights),
            launched=counters.launched,
            processed=counters.processed,
            max_in_flight=counters.max_in_flight,
            arrivals=counters.arrivals,
            arrivals_during_forward=counters.arrivals_during_forward,
            held=self._pipeline.held,
            paused=self._pipeline.paused,
            draining=self._pipeline.exiting,
            open_requests=len(self._host.open_requests()),
            host_calls=self._meter.calls,
            slow_host_calls=self._meter.slow,
            longest_host_call_ms=round(self._meter.longest_s * 1e3, 3),
            longest_host_call=self._meter.longest_kind,
            host=self._host.stats(),
        )

    def health(self) -> Health:
        """Liveness and readiness; a forward past the stall limit makes it unready and is named."""
        core, busy = self._core, self._pipeline.next_vote
        age_s = 0.0 if core is None or busy is None else core.calls.now() - busy.running_since
        return verdict(
            Facts(
                running=core is not None and self._running,
                failure=self._failure,
                forward=None if busy is None else busy.number,
                forward_age_s=age_s,
                stall_limit_s=self._config.stall_limit_s,
                draining=self._pipeline.exiting,
                paused=self._pipeline.paused,
                pausing=self.pausing,
                mode=self.pause_mode,
            )
        )


async def _named(task: Callable[[LoopCore], Any], core: LoopCore) -> None:
    await task(core)
