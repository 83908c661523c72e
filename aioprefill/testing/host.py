"""A scripted host that is as fragile as the reference host, so that a loop that breaks its rules is seen.

Like there, the end of the KV chunk that a result sends is not in the result: it is what the chunk
bookkeeping of the *last batch* left behind (`chunk_end`). A bookkeeping that is skipped, repeated, or done
for the wrong forward sends a wrong range, and a third launch finds no buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aioprefill.errors import AioprefillError, DeviceError
from aioprefill.host import Hold, Ingested, Progress, Wake
from aioprefill.testing.completion import FakeCompletion


@dataclass(slots=True, eq=False)
class FakeRequest:
    """A request of the fake host; lengths in tokens."""

    name: str
    tokens: int
    bootstrapped: bool = True
    launched_end: int = 0
    chunk_end: int = 0
    """Where the next KV send ends; set by chunk bookkeeping only."""
    sent_end: int = 0
    outcome: str | None = None


@dataclass(frozen=True, slots=True)
class FakeControl:
    """A control command in the fake host's input: "in_place", "retract", "resume" or "weights"."""

    kind: str


@dataclass(frozen=True, slots=True)
class FakePiece:
    """One request's part of a fake batch."""

    request: FakeRequest
    start: int
    end: int


@dataclass(slots=True)
class FakeForward:
    """A launched fake batch; complete it by `completion.complete()`."""

    number: int
    pieces: list[FakePiece]
    completion: FakeCompletion = field(default_factory=FakeCompletion)
    bookkept: int = 0


class FakeHost:
    """Implements `PrefillHost`. Tests drive it by `arrive`, `bootstrap`, `end_transfer` and completions.

    `slots` bounds requests between admission and the end of their transfer. With `duration_s` forwards
    complete by themselves, one after the other, each after that time. With `delayed_sampling` a forward
    that is launched behind another one is sampled when that one's result is processed. `log` has one entry
    per host call that did something.
    """

    def __init__(
        self,
        *,
        slots: int = 1_000,
        chunk_tokens: int = 100,
        batch_requests: int = 1,
        duration_s: float | None = None,
        delayed_sampling: bool = False,
    ) -> None:
        self.intake_tick_s: float | None = None
        self.log: list[str] = []
        self.forwards: list[FakeForward] = []
        self.sends: dict[str, list[tuple[int, int]]] = {}
        self.outcomes: dict[str, list[str]] = {}
        self.prepare_calls = 0
        self.idle_calls = 0
        self.last_batch: int | None = None
        """The forward that the host believes to be running."""
        self.closed_with: AioprefillError | None = None
        self._slots = slots
        self._chunk_tokens = chunk_tokens
        self._batch_requests = batch_requests
        self._duration_s = duration_s
        self._delayed_sampling = delayed_sampling
        self.unsupported_shape: str | None = None
        self.own_loops = 0
        self._device_free_s = 0.0
        self._wake: Wake | None = None
        self._inbox: deque[FakeRequest | FakeControl | str] = deque()
        self.paused = False
        self.swaps = 0
        self._requests: dict[str, FakeRequest] = {}
        self._waiting: list[FakeRequest] = []
        self._bootstrapped: list[FakeRequest] = []
        self._ended: list[str] = []
        self._pending: deque[FakeForward] = deque()
        self._draining = False

    # The test's side

    @property
    def wake(self) -> Wake:
        """The loop's wakes, once bound."""
        assert self._wake is not None, "the host is not bound to a loop"
        return self._wake

    def arrive(self, name: str, tokens: int = 100, *, bootstrapped: bool = True) -> None:
        """A request comes in."""
        self._inbox.append(FakeRequest(name, tokens, bootstrapped))
        self.wake.input()

    def abort(self, name: str) -> None:
        """An abort comes in."""
        self._inbox.append(name)
        self.wake.input()

    def control(self, kind: str) -> None:
        """A control command comes in."""
        self._inbox.append(FakeControl(kind))
        self.wake.input()

    @property
    def held(self) -> list[str]:
        """What has come in and is not dispatched, in order."""
        return [
            item if isinstance(item, str) else item.kind if isinstance(item, FakeControl) else item.name
            for item in self._inbox
        ]

    def bootstrap(self, name: str) -> None:
        """The handshake of a request ends well."""
        self._bootstrapped.append(self._requests[name])
        self.wake.transfers()

    def end_transfer(self, name: str) -> None:
        """The transfer of a request ends well."""
        self._ended.append(name)
        self.wake.transfers()

    @property
    def in_flight(self) -> list[int]:
        """Numbers of the forwards whose result is not processed."""
        return [forward.number for forward in self._pending]

    # The port

    def bind(self, wake: Wake) -> None:
        """See `PrefillHost.bind`."""
        self._wake = wake

    def ingest(self, now: float, *, hold: Hold) -> Ingested:
        """See `PrefillHost.ingest`."""
        requests = taken = consumed = 0
        while self._inbox and not self._keeps_back(self._inbox[0], hold):
            item = self._inbox.popleft()
            taken += 1
            if isinstance(item, str):
                self._end(self._requests[item], "aborted")
            elif isinstance(item, FakeControl):
                consumed += self._control(item.kind)
            else:
                requests += 1
                self._requests[item.name] = item
                if item.bootstrapped:
                    self._waiting.append(item)
        if taken:
            self.log.append(f"ingest {taken}")
        first = self._inbox[0] if self._inbox else None
        return Ingested(
            requests=requests,
            admission_changed=taken > 0,
            held=len(self._inbox),
            held_retract=isinstance(first, FakeControl) and first.kind == "retract",
            consumed=consumed,
            paused=self.paused,
        )

    def _keeps_back(self, item: FakeRequest | FakeControl | str, hold: Hold) -> bool:
        if not isinstance(item, FakeControl):
            return False
        pauses = {"in_place": hold.pauses, "retract": hold.pauses or hold.retract}
        return {**pauses, "weights": hold.weights, "resume": False}[item.kind]

    def _control(self, kind: str) -> int:
        self.log.append(kind)
        if kind == "resume":
            self.paused = False
        elif kind == "weights":
            assert all(forward.completion.done for forward in self._pending), "weights under a forward"
            self.swaps += 1
        else:
            assert not self.paused
            self.paused = True
        if kind == "retract" and self._pending:
            # like the reference host, which pops one result itself and forgets its last batch
            assert len(self._pending) == 1, "a retract pause pops one result only"
            self.process_result(0.0, self._pending[0])
            self.last_batch = None
            return 1
        return 0

    def collect_bootstrapped(self, now: float) -> int:
        """See `PrefillHost.collect_bootstrapped`."""
        ready, self._bootstrapped = self._bootstrapped, []
        for request in ready:
            request.bootstrapped = True
            self._waiting.append(request)
        if ready:
            self.log.append(f"bootstrapped {len(ready)}")
        return len(ready)

    def prepare(
        self, now: float, *, last: int | None, admit: bool, scheduling_step: bool
    ) -> list[FakePiece] | None:
        """See `PrefillHost.prepare`."""
        self.prepare_calls += 1
        if last is not None and last != self.last_batch:
            self._bookkeep(next(forward for forward in self._pending if forward.number == last))
        self.last_batch = last
        if not admit:
            return None
        assert not self.paused and not self._inbox_held(), "prepared while paused or held"
        batch = self._form_batch()
        if batch:
            self.log.append("prepare " + ",".join(piece.request.name for piece in batch))
        return batch or None

    def _inbox_held(self) -> bool:
        return bool(self._inbox) and isinstance(self._inbox[0], FakeControl)

    def _bookkeep(self, forward: FakeForward) -> None:
        forward.bookkept += 1
        self.log.append(f"bookkeep {forward.number}")
        for piece in forward.pieces:
            request = piece.request
            request.chunk_end = piece.end
            if piece.end < request.tokens and request.outcome is None:
                self._waiting.insert(0, request)

    def _form_batch(self) -> list[FakePiece]:
        busy = sum(1 for r in self._requests.values() if r.launched_end and r.outcome is None)
        pieces: list[FakePiece] = []
        for request in list(self._waiting):
            if len(pieces) == self._batch_requests or (not request.launched_end and busy == self._slots):
                break
            busy += not request.launched_end
            end = min(request.tokens, request.launched_end + self._chunk_tokens)
            pieces.append(FakePiece(request, request.launched_end, end))
            self._waiting.remove(request)
        return pieces

    def launch(self, now: float, batch: list[FakePiece], number: int) -> FakeForward:
        """See `PrefillHost.launch`."""
        assert len(self._pending) < 2, "no buffers for a third forward"
        forward = FakeForward(number, batch)
        for piece in batch:
            piece.request.launched_end = piece.end
        forward.completion.submitted = not (self._delayed_sampling and self._pending)
        self._pending.append(forward)
        self.forwards.append(forward)
        if self._duration_s is not None:
            self._device_free_s = max(self._device_free_s, now) + self._duration_s
            forward.completion.complete(at=self._device_free_s)
        self.log.append(f"launch {number}")
        return forward

    def process_result(self, now: float, forward: FakeForward) -> None:
        """See `PrefillHost.process_result`."""
        assert forward is self._pending.popleft(), f"result {forward.number} is out of order"
        assert forward.completion.done, f"result {forward.number} is not there yet"
        assert forward.bookkept == 1, f"forward {forward.number} was bookkept {forward.bookkept} times"
        self.log.append(f"result {forward.number}")
        for piece in forward.pieces:
            request = piece.request
            if request.outcome is not None:
                continue
            self.sends.setdefault(request.name, []).append((request.sent_end, request.chunk_end))
            request.sent_end = request.chunk_end
        self.sample_delayed()

    def sample_delayed(self) -> None:
        """Hand the delayed sample of the next forward to the device."""
        if self._pending and not self._pending[0].completion.submitted:
            self._pending[0].completion.submitted = True
            self.log.append(f"sample {self._pending[0].number}")

    def fail_result(self, now: float, forward: FakeForward, error: DeviceError) -> None:
        """See `PrefillHost.fail_result`."""
        assert forward is self._pending.popleft(), f"result {forward.number} is out of order"
        self.log.append(f"failed {forward.number} {error.name}")
        for piece in forward.pieces:
            self._end(piece.request, error.name)

    async def run_own_loop(self) -> None:
        """See `PrefillHost.run_own_loop`."""
        self.own_loops += 1

    def progress_transfers(self, now: float) -> Progress:
        """See `PrefillHost.progress_transfers`."""
        ended, self._ended = self._ended, []
        for name in ended:
            self._end(self._requests[name], "done")
            self.log.append(f"retired {name} at {now:.3f}")
        return Progress(bootstrapped=len(self._bootstrapped), retired=len(ended))

    def _end(self, request: FakeRequest, outcome: str) -> None:
        if request.outcome is None:
            request.outcome = outcome
            self.outcomes.setdefault(request.name, []).append(outcome)
            if request in self._waiting:
                self._waiting.remove(request)

    def on_idle(self, now: float) -> None:
        """See `PrefillHost.on_idle`."""
        assert self.last_batch is None, f"idle while forward {self.last_batch} is believed to run"
        self.idle_calls += 1
        self.log.append("idle")

    def next_timer(self) -> float | None:
        """See `PrefillHost.next_timer`."""
        return None

    def begin_drain(self, now: float) -> None:
        """See `PrefillHost.begin_drain`."""
        self._draining = True
        self._inbox = deque(item for item in self._inbox if not isinstance(item, FakeControl))
        for request in list(self._requests.values()):
            if request.launched_end < request.tokens:
                self._end(request, "dropped")

    def end_drain(self, now: float) -> None:
        """See `PrefillHost.end_drain`."""
        for request in self._requests.values():
            self._end(request, "dropped")

    def open_requests(self) -> Sequence[str]:
        """See `PrefillHost.open_requests`."""
        return [request.name for request in self._requests.values() if request.outcome is None]

    def stats(self) -> Mapping[str, int | float | str]:
        """See `PrefillHost.stats`."""
        return {"waiting": len(self._waiting)}

    async def aclose(self, error: AioprefillError) -> None:
        """See `PrefillHost.aclose`."""
        self.closed_with = error
        for request in self._requests.values():
            self._end(request, error.code)
