"""The scripted host, on several ranks: what comes to the leader's is a fact on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from aioprefill.host import Wake
from aioprefill.testing.host import FakeHost, FakePiece, FakeRequest

FakeFact = tuple[str, str, int, bool]
"""What ("arrive", "abort", "control", "bootstrap", "ended"), name, tokens, bootstrapped."""


class RankedFakeHost(FakeHost):
    """Implements `ReplicatedHost`. The test drives the leader's; transfers end on each rank by itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._coming: list[FakeFact] = []
        self._size = 1
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
        self._coming.append((what, name, tokens, bootstrapped))
        self.wake.input()

    # The port

    def bind(self, wake: Wake) -> None:
        """See `PrefillHost.bind`."""
        self._wake = wake

    def lead(self, size: int, *, recorded: bool) -> None:
        """See `ReplicatedHost.lead`."""
        self._size = size

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
            self._coming.append(("ended", name, 0, True))
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

    def at_rest(self) -> bool:
        """See `ReplicatedHost.at_rest`. Never: it is recorded for no replay."""
        return False

    def restart(self, now: float) -> None:
        """See `ReplicatedHost.restart`."""

    def describe(self, batch: list[FakePiece]) -> bytes:
        """See `ReplicatedHost.describe`."""
        return msgspec.msgpack.encode([(piece.request.name, piece.start, piece.end) for piece in batch])
