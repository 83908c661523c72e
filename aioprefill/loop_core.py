"""What the loop's tasks share, and the scheduling step that they run. Nothing here awaits.

A scheduling step has a fixed order, although the waits around it are separate: result n and the delayed
sample of n+1 -> input -> bootstrapped -> chunk bookkeeping of n+1 and one preparation attempt.
"""

from __future__ import annotations

from dataclasses import dataclass

from aioprefill.config import SchedulerConfig
from aioprefill.errors import DeviceError
from aioprefill.host import PrefillHost
from aioprefill.host_calls import HostCalls
from aioprefill.pipeline import Pipeline
from aioprefill.signals import Signals
from aioprefill.tp_agree import Agreement, Digest


@dataclass(frozen=True, slots=True)
class LoopCore:
    """The loop's state, its way to the host, and its signals."""

    host: PrefillHost
    calls: HostCalls
    pipeline: Pipeline
    signals: Signals
    agreement: Agreement
    config: SchedulerConfig
    digest: Digest | None = None
    """Kept where there are other ranks, or a recording."""

    def take_input(self, *, scheduling_step: bool = False) -> None:
        """One `ingest`; what is left over, and what a resume sets free, is signalled."""
        result = self.calls.ingest(hold=self.pipeline.hold(scheduling_step=scheduling_step))
        self.pipeline.ingested(result)
        if result.more:
            self.signals.input.set()
        if self.pipeline.may_process:
            self.signals.results.set()

    def collect_bootstrapped(self) -> bool:
        """Make requests whose handshake ended admissible, unless input is held; True if there were any."""
        collected = 0 if self.pipeline.held else self.calls.collect_bootstrapped()
        self.pipeline.collected(collected)
        return collected > 0

    def run_preparation(self, *, scheduling_step: bool) -> None:
        """Prepare and launch until no slot is free or nothing is found.

        A launch takes its time, so what came meanwhile is taken before the next preparation. Afterwards the
        chunk bookkeeping of the oldest forward is done, whatever else is held or paused.
        """
        while (attempt := self.pipeline.next_attempt()) is not None:
            batch = self.calls.prepare(
                last=attempt.last, admit=attempt.admit, scheduling_step=scheduling_step
            )
            self.pipeline.prepared(attempt, batch is not None)
            if batch is None:
                return
            forward = self.calls.launch(self.pipeline.next_number)
            digest = 0 if self.digest is None else self.digest.value
            self.pipeline.launched(forward, self.calls.now(), digest)
            self.signals.results.set()
            scheduling_step = False
            if self.pipeline.may_admit:
                self.take_input()
                self.collect_bootstrapped()

    def voted(self, number: int, error: DeviceError | None) -> None:
        """The vote on a forward is over."""
        self.pipeline.voted(number, error, self.calls.now())
        self.calls.agreed = number + 1
        self.signals.progress.set()
        if self.pipeline.held:
            self.signals.input.set()

    def scheduling_step(self) -> None:
        """The step, without a result in front."""
        self.take_input(scheduling_step=True)
        self.collect_bootstrapped()
        self.run_preparation(scheduling_step=True)
        if self.pipeline.take_idle_step():
            self.calls.on_idle()
        self.signals.progress.set()

    def finish_oldest(self) -> None:
        """The step behind the result of the oldest forward, which is agreed. Raises its sticky error."""
        flight = self.pipeline.oldest
        assert flight is not None and flight.agreed
        if flight.error is not None:
            self.calls.fail_result(flight.forward, flight.error)
            self.pipeline.processed(flight.number)
            if flight.error.sticky:
                raise flight.error
        elif not self.pipeline.retract_takes_result:
            self.calls.process_result(flight.forward)
            self.pipeline.processed(flight.number)
        self.scheduling_step()
