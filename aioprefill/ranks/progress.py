"""How far this rank has come: written by its loop and its vote thread, read by its watch thread.

No lock: every slot is written by one thread, and where two belong together the time is written before what
it is the time of. A reader in between sees a younger time than the true one, never an older one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from aioprefill.ranks.beats import Beat


class RankProgress:
    """Numbers begin at 0; -1 is none yet. Times are readings of `clock`, seconds.

    `executed` should be kept on every rank, the leader too: who has come less far than others tells who is
    to blame when several ranks sit in the same host call. Nothing is concluded from a rank that leaves it -1.
    """

    __slots__ = (
        "blames",
        "call",
        "call_since",
        "clock",
        "error",
        "executed",
        "forward",
        "turned_at",
        "voted",
        "voted_at",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.turned_at = clock()
        """When the loop last turned. The watch has it written."""
        self.call = ""
        """Kind of the host call under way; "" between calls."""
        self.call_since = self.turned_at
        self.voted = -1
        """Number of the last forward whose vote this rank has joined."""
        self.voted_at = self.turned_at
        self.executed = -1
        """Number of the last host call that this rank has carried out."""
        self.forward: int | None = None
        """The oldest forward in flight: what errors are named after."""
        self.error = ""
        """Why this rank fails."""
        self.blames = -1
        """Rank whose fault that is; -1: its own. Written before `error`."""

    def __repr__(self) -> str:
        call = f" call={self.call}" if self.call else ""
        return f"<RankProgress executed={self.executed} voted={self.voted} forward={self.forward}{call}>"

    def turn(self) -> None:
        """The loop turns."""
        self.turned_at = self.clock()

    def begin_call(self, kind: str) -> None:
        """A host call begins."""
        self.call_since = self.clock()
        self.call = kind

    def end_call(self, number: int) -> None:
        """Host call `number` has ended."""
        self.executed = number
        self.call = ""

    def join_vote(self, forward: int) -> None:
        """This rank joins the vote on a forward. May be called in the vote's thread."""
        self.voted_at = self.clock()
        self.voted = forward

    def beat(self, rank: int, sequence: int, *, leaving: bool = False) -> Beat:
        """As of now."""
        call, voted = self.call, self.voted  # before their times, see above
        now = self.clock()
        return Beat(
            rank=rank,
            sequence=sequence,
            turned_s=max(0.0, now - self.turned_at),
            call=call,
            call_s=max(0.0, now - self.call_since) if call else 0.0,
            voted=voted,
            voted_s=max(0.0, now - self.voted_at),
            executed=self.executed,
            error=self.error,
            blames=self.blames,
            leaving=leaving,
        )
