"""The state of the two-slot loop. Pure: no asyncio, torch, zmq or clock.

Rule: every change of the loop's state happens in this file, and nothing here awaits. Tasks ask
(`next_attempt`, `oldest`, `take_idle_step`) and tell (`ingested`, `prepared`, `launched`, `processed`, …).

The last batch is the oldest forward whose result is not processed. A preparation that names it does its
chunk bookkeeping. A result may be processed only after such a preparation, so that KV chunk ranges are
those of one-at-a-time completion.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from aioprefill.errors import DeviceError
from aioprefill.host import Forward, Hold, Ingested, Progress

SLOTS = 2
"""Forwards in flight at most: hosts keep two sets of buffers alive."""


@dataclass(slots=True)
class Flight:
    """A launched forward whose result is not processed."""

    forward: Forward
    launched_at: float
    running_since: float
    """When the device could begin with it: its launch, or the vote on its predecessor if that came later."""
    digest: int = 0
    """What the ranks had decided by its launch; see `tp_agree.Digest`."""
    agreed: bool = False
    """Complete, or failed with `error`, on every rank: its vote is over."""
    error: DeviceError | None = None

    @property
    def number(self) -> int:
        """Number of the forward, in launch order from 0."""
        return self.forward.number


@dataclass(frozen=True, slots=True)
class Attempt:
    """A preparation to make: arguments of `PrefillHost.prepare`."""

    last: int | None
    admit: bool


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    launched: int = 0
    processed: int = 0
    max_in_flight: int = 0
    preparations: int = 0
    empty_preparations: int = 0
    arrivals: int = 0
    arrivals_during_forward: int = 0
    idle_steps: int = 0


class Pipeline:
    """Slots, preparation marker, pause and drain flags of one loop."""

    def __init__(self) -> None:
        self.flights: deque[Flight] = deque()
        self.marker = False
        """The last preparation found no batch while a result was pending, and nothing has changed since."""
        self.held = 0
        self.held_retract = False
        self.paused = False
        self.exiting = False
        self.counters = Counters()
        self._idle_step_due = False
        self._preparing = False
        self._last_named: int | None = None
        """The last batch that the last preparation named; the host believes it to be running."""

    def __repr__(self) -> str:
        numbers = ",".join(str(flight.number) for flight in self.flights)
        return (
            f"<Pipeline in_flight=[{numbers}] marker={self.marker} held={self.held}"
            f" paused={self.paused} exiting={self.exiting} processed={self.counters.processed}>"
        )

    # Questions

    @property
    def result_pending(self) -> bool:
        """A forward is in flight."""
        return bool(self.flights)

    @property
    def oldest(self) -> Flight | None:
        """The forward whose result comes next."""
        return self.flights[0] if self.flights else None

    @property
    def next_vote(self) -> Flight | None:
        """The oldest forward whose vote is not over; votes are in launch order."""
        for flight in self.flights:
            if not flight.agreed:
                return flight
        return None

    @property
    def still(self) -> bool:
        """Every launched forward is agreed complete: nothing touches weights or pages."""
        return all(flight.agreed for flight in self.flights)

    def agreed_before(self, number: int) -> bool:
        """Every forward launched before forward `number` is agreed complete."""
        return all(flight.agreed for flight in self.flights if flight.number < number)

    @property
    def may_process(self) -> bool:
        """The oldest result may be processed. A pause keeps results; a drain does not."""
        oldest = self.oldest
        return oldest is not None and oldest.agreed and (self.exiting or not self.paused)

    @property
    def retract_takes_result(self) -> bool:
        """A held retract pause comes before the only result that is left, and processes it itself."""
        oldest = self.oldest
        return self.held_retract and len(self.flights) == 1 and oldest is not None and oldest.error is None

    def hold(self, *, scheduling_step: bool) -> Hold:
        """What the next `ingest` must keep back.

        A pause waits for the next scheduling step. While paused none comes: held, a further pause would
        hold back the resume behind it.
        """
        return Hold(
            pauses=self.result_pending and not scheduling_step and not self.paused,
            retract=len(self.flights) > 1 or not self.still,
            weights=not self.still,
        )

    @property
    def next_number(self) -> int:
        """Number of the next forward."""
        return self.counters.launched

    @property
    def may_admit(self) -> bool:
        """A preparation may look for a batch."""
        blocked = self.paused or self.exiting or self.held > 0 or len(self.flights) >= SLOTS
        return not blocked and not (self.marker and self.flights)

    def next_attempt(self) -> Attempt | None:
        """The preparation to make now, or None: nothing may be admitted and no bookkeeping is due."""
        last = None if self.oldest is None else self.oldest.number
        bookkeeping_due = last != self._last_named
        if not self.may_admit and not bookkeeping_due:
            return None
        return Attempt(last=last, admit=self.may_admit)

    def take_idle_step(self) -> bool:
        """True once after the last result, when the step behind it launched nothing."""
        due = self._idle_step_due and not self.flights
        if due:
            self._idle_step_due = False
            self.counters.idle_steps += 1
        return due

    # Events

    def ingested(self, result: Ingested) -> None:
        """`ingest` returned."""
        self.held = result.held
        self.held_retract = result.held_retract
        self.paused = result.paused
        if result.consumed:
            assert result.consumed == 1 and self.oldest is not None, "a pause consumed what was not there"
            self.processed(self.oldest.number)
        self.exiting = self.exiting or result.exiting
        self.counters.arrivals += result.requests
        if self.flights:
            self.counters.arrivals_during_forward += result.requests
        if result.admission_changed:
            self.admission_changed()

    def collected(self, bootstrapped: int) -> None:
        """`collect_bootstrapped` returned."""
        if bootstrapped:
            self.admission_changed()

    def transfers_progressed(self, progress: Progress) -> bool:
        """`progress_transfers` returned; True when that can change what may be admitted."""
        changed = progress.freed or progress.retired > 0 or progress.failed > 0
        if changed:
            self.admission_changed()
        return changed

    def admission_changed(self) -> None:
        """Something can be admitted that could not before."""
        self.marker = False

    def prepared(self, attempt: Attempt, found: bool) -> None:
        """`prepare` returned; `found` says whether with a batch, which is then launched at once."""
        assert not self._preparing, "a batch was prepared and not launched"
        assert attempt.admit or not found, "a batch came from a preparation that may not admit"
        self.counters.preparations += 1
        self._last_named = attempt.last
        self._preparing = found
        if attempt.admit and not found:
            self.counters.empty_preparations += 1
            self.marker = bool(self.flights)

    def launched(self, forward: Forward, now: float, digest: int = 0) -> None:
        """`launch` returned."""
        assert self._preparing, "a forward was launched without a preparation"
        assert len(self.flights) < SLOTS, "a third forward was launched"
        assert forward.number == self.next_number, f"forward {forward.number} is not {self.next_number}"
        self._preparing = False
        self._idle_step_due = False
        self.flights.append(Flight(forward, now, now, digest))
        self.counters.launched += 1
        self.counters.max_in_flight = max(self.counters.max_in_flight, len(self.flights))

    def voted(self, number: int, error: DeviceError | None, now: float = 0.0) -> None:
        """The vote on a forward is over; the device goes on with the next one."""
        flight = self.next_vote
        assert flight is not None and flight.number == number, f"vote {number} is out of order: {self}"
        flight.agreed, flight.error = True, error
        following = self.next_vote
        if following is not None:
            following.running_since = max(following.running_since, now)

    def processed(self, number: int) -> None:
        """The result of the oldest forward was processed."""
        assert self.flights and self.flights[0].number == number, f"result {number} is out of order: {self}"
        assert self.flights[0].agreed, f"result {number} was processed before its vote was over"
        assert self._last_named == number, f"result {number} was processed before its chunk bookkeeping"
        self.flights.popleft()
        self.counters.processed += 1
        self.marker = False
        self._idle_step_due = not self.flights

    def drain(self) -> None:
        """Launch nothing more."""
        self.exiting = True
