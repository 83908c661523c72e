"""The part of SGLang's host that matters where there are several ranks.

Inputs are no facts here, for SGLang broadcasts them inside `ingest`, and what became of transfers needs no
reports, for it reduces that over the ranks itself. What is left for the leader to decide is whether a
preparation looks at grammars: each rank has its own, and they are ready at different times.

Followers report what may make another host call worth while: their peers have moved, their grammars are
ready. It becomes no fact, for it decides nothing but when the leader makes that call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from aioprefill.host import Wake

_LOOK_AT_GRAMMARS = b"g"
TRANSFERS_MOVED = b"transfers"
ADMISSION_CHANGED = b"admission"
GRAMMARS_READY = b"grammars"
"""What followers report."""


class Replica:
    """Implements what `ReplicatedHost` adds to `PrefillHost`. `grammars_due` says what this rank would do."""

    def __init__(self) -> None:
        self._follows = False
        self._size = 1
        self._report: Callable[[bytes], None] = lambda _: None
        self._facts = b""
        """Came, or were sent, with the host call to come."""

    @property
    def grammars_due(self) -> bool:
        """A look at this rank's grammars would find something."""
        raise NotImplementedError

    def take_look(self) -> bool:
        """Whether the call that begins looks at grammars. To be asked at the beginning of every host call."""
        facts, self._facts = self._facts, b""
        return facts == _LOOK_AT_GRAMMARS if self._follows else self.grammars_due

    def take_facts(self) -> bytes:
        """See `ReplicatedHost.take_facts`."""
        return _LOOK_AT_GRAMMARS if self.grammars_due else b""

    def give_facts(self, facts: bytes) -> None:
        """See `ReplicatedHost.give_facts`."""
        self._facts = facts

    def describe(self, batch: Any) -> bytes:
        """See `ReplicatedHost.describe`: request ids, token ranges and rows. Pages are on the device."""
        pieces = [(r.rid, r.prefix_len, r.extend_end, int(r.kv.req_pool_idx)) for r in batch.reqs]
        return msgspec.msgpack.encode(pieces)

    def follow(self, report: Callable[[bytes], None]) -> None:
        """See `ReplicatedHost.follow`."""
        self._follows = True
        self._report = report

    @property
    def alone(self) -> bool:
        """There is one rank."""
        return self._size == 1 and not self._follows

    def reporting(self) -> Wake:
        """On a follower: what wakes a leader's tasks is reported to it instead."""
        return Wake(
            input=lambda: None,
            transfers=lambda: self._report(TRANSFERS_MOVED),
            admission=lambda: self._report(ADMISSION_CHANGED),
        )

    def lead(self, size: int, *, recorded: bool) -> None:
        """See `ReplicatedHost.lead`."""
        self._size = size

    def take_report(self, rank: int, report: bytes) -> None:
        """See `ReplicatedHost.take_report`: the leader is woken as by what it sees itself."""
        raise NotImplementedError

    def at_rest(self) -> bool:
        """See `ReplicatedHost.at_rest`: what SGLang decides by cannot be forgotten."""
        return False

    def restart(self, now: float) -> None:
        """See `ReplicatedHost.restart`."""
        raise AssertionError("an SGLang host is never at rest")
