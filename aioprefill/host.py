"""The port between the loop and the thing being scheduled. Native, SGLang and fake host implement it.

A host owns queues, held input, memory and the model. Every method but `aclose` is one *host call*:
synchronous, bounded, atomic. It never waits for the device or the network. `now` is the clock reading
of the call (seconds, monotonic): a host decides by it and by nothing else that differs between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aioprefill.completion import Completion
from aioprefill.errors import AioprefillError, DeviceError


@dataclass(frozen=True, slots=True)
class Wake:
    """How a host wakes the loop's tasks, on the loop's thread. Edge-triggered and cheap."""

    input: Callable[[], None]
    """There is something to ingest."""
    transfers: Callable[[], None]
    """A handshake or a transfer made progress."""
    admission: Callable[[], None]
    """Something outside the other calls changed what can be admitted."""


@dataclass(frozen=True, slots=True)
class Hold:
    """What `ingest` must keep back now, together with everything behind it."""

    pauses: bool = False
    """Every pause: a result is pending and this is no scheduling step."""
    retract: bool = False
    """Retract pauses: more than one forward is in flight, or one whose vote is not complete."""
    weights: bool = False
    """What needs the device to be still (weight updates): a forward is not agreed complete."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """What one `ingest` did."""

    requests: int = 0
    """New requests dispatched."""
    admission_changed: bool = False
    """Something dispatched can change what may be admitted (a request came, an abort freed pages, …)."""
    held: int = 0
    """Inputs kept back behind a pause, in all."""
    held_retract: bool = False
    """What is held begins with a retract pause."""
    consumed: int = 0
    """Results that a retract pause processed itself: 0 or 1, always the oldest forward's."""
    paused: bool = False
    """The host is paused now: nothing may be launched, and no result processed."""
    exiting: bool = False
    """The host asked to launch nothing more."""
    more: bool = False
    """The call stopped at its bound; there is more to ingest."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one `progress_transfers` did."""

    bootstrapped: int = 0
    """Requests that wait, or may wait, for `collect_bootstrapped`."""
    retired: int = 0
    """Hand-offs that ended well."""
    failed: int = 0
    freed: bool = False
    """Pages or slots came back."""


class Batch(Protocol):
    """What `prepare` found to launch. The loop only passes it on."""


class Forward(Protocol):
    """A launched batch."""

    @property
    def number(self) -> int: ...

    @property
    def completion(self) -> Completion: ...


class PrefillHost(Protocol):
    """The host port."""

    @property
    def intake_tick_s(self) -> float | None:
        """Interval at which `ingest` is wanted even without a wake, for hosts that hang timers on it."""

    @property
    def unsupported_shape(self) -> str | None:
        """What this loop cannot serve, in words ("speculative decoding"); then `run_own_loop` runs."""

    async def run_own_loop(self) -> None:
        """The host's own loop, in place of this one, until the host is told to end."""

    def bind(self, wake: Wake) -> None:
        """Called once, on the running loop, before any host call."""

    def ingest(self, now: float, *, hold: Hold) -> Ingested:
        """Receive and dispatch a bounded amount of input, in order; stop in front of what `hold` names.

        A retract pause is dispatched with at most one forward in flight, agreed complete without error;
        the host processes its result itself and says so (`consumed`). A call ends behind a resume that it
        dispatched: what must be kept back has changed with it.
        """

    def collect_bootstrapped(self, now: float) -> int:
        """Make requests whose handshake ended admissible; how many."""

    def prepare(self, now: float, *, last: int | None, admit: bool, scheduling_step: bool) -> Batch | None:
        """Chunk bookkeeping of the last batch, then one attempt to form the next one.

        `last` is the number of the oldest forward whose result is not processed; the first call that
        names it does its chunk bookkeeping, later ones must not repeat it; None: no batch is running.
        Without `admit` there is the bookkeeping only. `scheduling_step` is true on scheduling steps, where
        retry deadlines may advance.
        """

    def launch(self, now: float, batch: Any, number: int) -> Forward:
        """Queue the batch on the device as forward `number`; returns at once."""

    def process_result(self, now: float, forward: Any) -> None:
        """Publish results and send KV of a forward that is complete, then sample a delayed successor."""

    def fail_result(self, now: float, forward: Any, error: DeviceError) -> None:
        """Instead of `process_result`, when the forward failed: fail its requests."""

    def progress_transfers(self, now: float) -> Progress:
        """Advance handshakes and retire transfers."""

    def on_idle(self, now: float) -> None:
        """No batch is running any more: once after the last result."""

    def next_timer(self) -> float | None:
        """When `progress_transfers` is wanted at the latest even without a wake; None: no timer."""

    def begin_drain(self, now: float) -> None:
        """Take no new input; end what will not be launched any more with `RequestAborted`."""

    def end_drain(self, now: float) -> None:
        """The deadline has passed: end what is still open with `RequestAborted`."""

    def open_requests(self) -> Sequence[str]:
        """Ids of the requests without an outcome, in order of arrival."""

    def stats(self) -> Mapping[str, int | float | str]:
        """Counters of the host's own."""

    async def aclose(self, error: AioprefillError) -> None:
        """Answer every open request with `error`, stop threads and sockets. Idempotent. Bounded in time."""


class ReplicatedHost(PrefillHost, Protocol):
    """A host that can run on several ranks, be recorded and be replayed: it decides by calls and facts alone.

    A *fact* is anything that comes to the host from outside its calls: requests, aborts, commands, what a
    transfer or a compilation came to. Facts take effect at the beginning of a host call and nowhere else.
    """

    def take_facts(self) -> bytes:
        """What came from outside since the last call, to be given to other ranks; b"" for nothing.

        Leader only. The call that follows sees these facts and no others.
        """

    def give_facts(self, facts: bytes) -> None:
        """Followers and replays only: what the leader's `take_facts` returned before the call to come."""

    def describe(self, batch: Any) -> bytes:
        """What ranks must have decided alike about a batch: request ids, token ranges, pages."""

    def follow(self, report: Callable[[bytes], None]) -> None:
        """Be a follower, before `bind`: nothing comes in but by `give_facts`.

        What this rank alone can know (its shard's transfers, say) goes to `report`.
        """

    def lead(self, size: int, *, recorded: bool) -> None:
        """Be the leader of `size` ranks, before `bind`: reports of the others come by `take_report`.

        `recorded`: the facts have what forwards sampled too, for a replay that has no model.
        """

    def take_report(self, rank: int, report: bytes) -> None:
        """Leader only: what a follower's host gave to its `report`. Becomes facts when all ranks agree."""

    def at_rest(self) -> bool:
        """Nothing is live or on its way in: `restart` may be called now. Recorded leaders only."""

    def restart(self, now: float) -> None:
        """A host call, at rest only: forget whatever earlier calls have left that later ones decide by.

        Afterwards a fresh host that is given the same numbers to go on from decides alike.
        """


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What became of the requests that were open when a drain began."""

    finished: tuple[str, ...] = field(default=())
    dropped: tuple[str, ...] = field(default=())
