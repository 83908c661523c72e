"""The one way from the loop into its host: numbers every host call, reads its clock, times it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from aioprefill.errors import DeviceError
from aioprefill.host import Batch, Forward, Hold, Ingested, PrefillHost, Progress
from aioprefill.tp_agree import CallOrder

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class CallMeter:
    """Durations of host calls, measured by the real clock; they decide nothing."""

    slow_s: float
    calls: int = 0
    slow: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    longest_kind: str = ""

    def add(self, kind: str, seconds: float) -> None:
        """Count one call."""
        self.calls += 1
        self.total_s += seconds
        if seconds > self.longest_s:
            self.longest_s, self.longest_kind = seconds, kind
        if seconds > self.slow_s:
            self.slow += 1
            logger.debug("host call %s took %.1f ms", kind, seconds * 1e3)


class HostCalls:
    """Host calls with the clock reading and the number that the call order gives them."""

    def __init__(
        self, host: PrefillHost, order: CallOrder, clock: Callable[[], float], meter: CallMeter
    ) -> None:
        self._host = host
        self._order = order
        self._clock = clock
        self._meter = meter

    def now(self) -> float:
        """The loop's clock, seconds."""
        return self._clock()

    def _call(self, kind: str, call: Callable[..., T], *args: Any, detail: int = -1, **options: Any) -> T:
        token = self._order.append(kind, self._clock(), detail)
        started = time.perf_counter()
        try:
            return call(token.now, *args, **options)
        finally:
            self._meter.add(kind, time.perf_counter() - started)

    def ingest(self, *, hold: Hold) -> Ingested:
        """See `PrefillHost.ingest`."""
        return self._call("ingest", self._host.ingest, hold=hold)

    def collect_bootstrapped(self) -> int:
        """See `PrefillHost.collect_bootstrapped`."""
        return self._call("collect_bootstrapped", self._host.collect_bootstrapped)

    def prepare(self, *, last: int | None, admit: bool, scheduling_step: bool) -> Batch | None:
        """See `PrefillHost.prepare`."""
        detail = -1 if last is None else last
        return self._call(
            "prepare",
            self._host.prepare,
            last=last,
            admit=admit,
            scheduling_step=scheduling_step,
            detail=detail,
        )

    def launch(self, batch: Batch, number: int) -> Forward:
        """See `PrefillHost.launch`."""
        return self._call("launch", self._host.launch, batch, number, detail=number)

    def process_result(self, forward: Forward) -> None:
        """See `PrefillHost.process_result`."""
        self._call("process_result", self._host.process_result, forward, detail=forward.number)

    def fail_result(self, forward: Forward, error: DeviceError) -> None:
        """See `PrefillHost.fail_result`."""
        self._call("fail_result", self._host.fail_result, forward, error, detail=forward.number)

    def progress_transfers(self) -> Progress:
        """See `PrefillHost.progress_transfers`."""
        return self._call("progress_transfers", self._host.progress_transfers)

    def on_idle(self) -> None:
        """See `PrefillHost.on_idle`."""
        self._call("on_idle", self._host.on_idle)

    def begin_drain(self) -> None:
        """See `PrefillHost.begin_drain`."""
        self._call("begin_drain", self._host.begin_drain)

    def end_drain(self) -> None:
        """See `PrefillHost.end_drain`."""
        self._call("end_drain", self._host.end_drain)
