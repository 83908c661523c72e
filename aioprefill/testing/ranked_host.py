"""The scripted host, on several ranks: what comes to the leader's is a fact on all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from aioprefill.errors import DeviceError
from aioprefill.host import Hold, Ingested, Wake
from aioprefill.testing.host import FakeForward, FakeHost, FakePiece, FakeRequest

FakeFact = tuple[str, str, int, bool]
"""What ("arrive", "abort", "control", "bootstrap", "ended"), name, tokens, bootstrapped."""


class RankedFakeHost(FakeHost):
    """Implements `ReplicatedHost`. The test drives the leader's; transfers end on each rank by itself.

    Alone, without followers and recordings, it is like a `FakeHost`. Unlike that it goes on after a device
    error, and drops a request that is aborted between the end of its handshake and its admission.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._coming: list[FakeFact] = []
        self._size = 1
        self._leads = self._holds = False
        self._reached: dict[str, int] = {}
        """Ranks on which a transfer has ended, by request."""
        self._report: Callable[[bytes], None] | None = None

    # The test's side

    def arrive(self, name: str, tokens: int = 100, *, bootstrapped: bool = True) -> None:
        """A request comes in."""
        self._come("arrive", name, tokens, bootstrapped)

    def abort(self, name: str) -> None:
        """An abort comes in."""
        self._come("abort", name)

    def control(self, kind: str) -> None:
        """A control command comes in."""
        self._come("control", kind)

    def bootstrap(self, name: str) -> None:
        """The handshake of a request ends well."""
        self._come("bootstrap", name)
        self.wake.transfers()

    def end_transfer(self, name: str) -> None:
        """The transfer of a request ends well on this rank."""
        if self._report is not None:
            self._report(name.encode())
        else:
            self._ended_somewhere(name)

    def _come(self, what: str, name: str, tokens: int = 0, bootstrapped: bool = True) -> None:
        assert self._report is None, "nothing comes to a follower but facts"
        self._know((what, name, tokens, bootstrapped))
        self.wake.input()

    def _know(self, fact: FakeFact) -> None:
        """The next host call sees it; where other ranks have to be told, not before they are."""
        if self._leads:
            self._coming.append(fact)
        else:
            self._place(fact)

    # The port

    def bind(self, wake: Wake) -> None:
        """See `PrefillHost.bind`."""
        self._wake = wake

    def lead(self, size: int, *, recorded: bool) -> None:
        """See `ReplicatedHost.lead`."""
        self._size = size
        self._leads = True

    def follow(self, report: Callable[[bytes], None]) -> None:
        """See `ReplicatedHost.follow`."""
        self._report = report

    def take_facts(self) -> bytes:
        """See `ReplicatedHost.take_facts`."""
        facts, self._coming = self._coming, []
        for fact in facts:
            self._place(fact)
        return msgspec.msgpack.encode(facts) if facts else b""

    def give_facts(self, facts: bytes) -> None:
        """See `ReplicatedHost.give_facts`."""
        for fact in msgspec.msgpack.decode(facts, type=list[FakeFact]):
            self._place(fact)

    def take_report(self, rank: int, report: bytes) -> None:
        """See `ReplicatedHost.take_report`."""
        self._ended_somewhere(report.decode())

    def _ended_somewhere(self, name: str) -> None:
        self._reached[name] = self._reached.get(name, 0) + 1
        if self._reached[name] == self._size:
            self._know(("ended", name, 0, True))
            self.wake.transfers()

    def _place(self, fact: FakeFact) -> None:
        what, name, tokens, bootstrapped = fact
        match what:
            case "arrive":
                self._inbox.append(FakeRequest(name, tokens, bootstrapped))
            case "abort":
                self._inbox.append(name)
            case "control":
                super().control(name)
            case "bootstrap":
                super().bootstrap(name)
            case "ended":
                super().end_transfer(name)

    def ingest(self, now: float, *, hold: Hold) -> Ingested:
        """See `PrefillHost.ingest`. Stops behind a resume, for `hold` is of the time before it."""
        names = self.held
        end = names.index("resume") + 1 if "resume" in names else len(names)
        inbox = list(self._inbox)
        self._inbox, behind = deque(inbox[:end]), inbox[end:]
        result = super().ingest(now, hold=hold)
        self._inbox.extend(behind)
        self._holds = result.held > 0
        more = bool(behind) and not self._holds
        return replace(result, held=len(self._inbox) if self._holds else 0, more=more)

    def _inbox_held(self) -> bool:
        """A command that no `ingest` has seen is not held: a fact may come with any call."""
        return self._holds

    def collect_bootstrapped(self, now: float) -> int:
        """See `PrefillHost.collect_bootstrapped`."""
        self._bootstrapped = [request for request in self._bootstrapped if request.outcome is None]
        return super().collect_bootstrapped(now)

    def fail_result(self, now: float, forward: FakeForward, error: DeviceError) -> None:
        """See `PrefillHost.fail_result`. Samples a delayed successor, as a result would."""
        super().fail_result(now, forward, error)
        self.sample_delayed()

    def at_rest(self) -> bool:
        """See `ReplicatedHost.at_rest`. Never: it is recorded for no replay."""
        return False

    def restart(self, now: float) -> None:
        """See `ReplicatedHost.restart`."""

    def describe(self, batch: list[FakePiece]) -> bytes:
        """See `ReplicatedHost.describe`."""
        return msgspec.msgpack.encode([(piece.request.name, piece.start, piece.end) for piece in batch])
