"""The scheduler: one TaskGroup that owns the loop's tasks, start, drain and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from aioprefill.config import SchedulerConfig
from aioprefill.errors import AioprefillError, HostError, RequestAborted
from aioprefill.host import DrainReport, PrefillHost, Wake
from aioprefill.host_calls import CallMeter, HostCalls
from aioprefill.intake_task import intake_task
from aioprefill.loop_core import LoopCore
from aioprefill.pipeline import Pipeline
from aioprefill.prepare_task import prepare_task
from aioprefill.request import PrefillHandle, PrefillRequest
from aioprefill.result_task import result_task
from aioprefill.signals import Signals
from aioprefill.tp_agree import CallOrder, SoloAgreement
from aioprefill.transfer_task import transfer_task

logger = logging.getLogger(__name__)

TASKS = (intake_task, prepare_task, result_task, transfer_task)


class Frontend(Protocol):
    """How requests get into a host that takes them by call (the native host has one)."""

    def submit(self, request: PrefillRequest) -> PrefillHandle:
        """Queue a request; see `PrefillScheduler.submit`."""

    def abort(self, request_id: str, reason: str) -> None:
        """Ask for a request to be given up; unknown ids are ignored."""


@dataclass(frozen=True, slots=True)
class Health:
    """Live while the loop turns; ready while the host is well and nothing is stalled."""

    live: bool
    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot of the loop's counters and of its host's own."""

    in_flight: int
    launched: int
    processed: int
    max_in_flight: int
    arrivals: int
    arrivals_during_forward: int
    held: int
    paused: bool
    draining: bool
    open_requests: int
    host_calls: int
    slow_host_calls: int
    """Host calls that took longer than `SchedulerConfig.slow_call_s`."""
    longest_host_call_ms: float
    longest_host_call: str
    host: Mapping[str, int | float | str]

    def flat(self) -> dict[str, int | float | str]:
        """All of it in one flat table."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "host"}
        return {**own, **self.host}

    def __repr__(self) -> str:
        return "<Stats " + " ".join(f"{name}={value}" for name, value in self.flat().items()) + ">"


class PrefillScheduler:
    """Runs a host's prefill loop on the current asyncio (or uvloop) loop.

        async with PrefillScheduler(host, config) as scheduler:
            result = await scheduler.submit(request)

    Leaving the block drains (see `drain`) and stops. An error that breaks the host answers every open
    request with `HostError` and is raised from the block's end; `wait_stopped` tells earlier.
    """

    def __init__(self, host: PrefillHost, config: SchedulerConfig | None = None) -> None:
        self._host = host
        self._config = config or SchedulerConfig()
        self._pipeline = Pipeline()
        self._meter = CallMeter(slow_s=self._config.slow_call_s)
        self._order = CallOrder()
        self._core: LoopCore | None = None
        self._stop = asyncio.Event()
        self._over = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "new" if self._runner is None else "stopped" if self._runner.done() else "running"
        return f"<PrefillScheduler {state} {self._pipeline!r}>"

    # Life

    async def __aenter__(self) -> PrefillScheduler:
        assert self._runner is None, "a scheduler runs once"
        loop = asyncio.get_running_loop()
        signals = Signals()
        self._core = LoopCore(
            host=self._host,
            calls=HostCalls(self._host, self._order, loop.time, self._meter),
            pipeline=self._pipeline,
            signals=signals,
            agreement=SoloAgreement(),
            config=self._config,
        )

        def admission_changed() -> None:
            self._pipeline.admission_changed()
            signals.preparation.set()

        self._host.bind(
            Wake(input=signals.input.set, transfers=signals.transfers.set, admission=admission_changed)
        )
        signals.input.set()
        self._runner = asyncio.create_task(self._run(self._core), name="aioprefill.scheduler")
        return self

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
        verdict: AioprefillError = RequestAborted("the scheduler stopped")
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_named(task, core), name=f"aioprefill.{task.__name__}")
                    for task in TASKS
                ]
                await self._stop.wait()
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as group_error:
            cause = _first(group_error)
            verdict = HostError(f"the scheduler stopped: {cause}")
            logger.error("the loop stopped: %s", cause, exc_info=cause)
            raise cause from None
        finally:
            await self._host.aclose(verdict)
            self._over.set()
            core.signals.progress.set()

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

    # Control

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
            core.take_input()
            core.calls.begin_drain()
        still_open = set(self._host.open_requests())
        dropped = [request_id for request_id in before if request_id not in still_open]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._running and (self._pipeline.result_pending or self._host.open_requests()):
                    await core.signals.progress.wait()
        late = tuple(self._host.open_requests())
        dropped += late
        core.calls.end_drain()
        finished = tuple(
            request_id for request_id in before if request_id in still_open and request_id not in late
        )
        return DrainReport(finished=finished, dropped=tuple(dropped))

    @property
    def _running(self) -> bool:
        return self._runner is not None and not self._over.is_set()

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
        if self._core is None or not self._running:
            return Health(live=False, ready=False, reason="the loop is not running")
        oldest = self._pipeline.oldest
        if oldest is not None:
            age = self._core.calls.now() - oldest.launched_at
            if age > self._config.stall_limit_s:
                return Health(live=True, ready=False, reason=f"forward {oldest.number} runs for {age:.1f} s")
        if self._pipeline.exiting:
            return Health(live=True, ready=False, reason="draining")
        return Health(live=True, ready=True)


async def _named(task: Callable[[LoopCore], Any], core: LoopCore) -> None:
    await task(core)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first leaf of an exception group: what broke the loop."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
