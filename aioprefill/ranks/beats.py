"""Who was heard when, how far each rank has come, and who is to blame when the group does not go on. Pure.

Each rank beats to rank 0, which sends what it knows of all to everybody: so every rank judges the same
facts. Causes are looked for in the order in which they prove something:

1. A closed connection without a farewell: that process ended.
2. Silence. On a follower, what rank 0 says of a third rank ages only when rank 0 says it: otherwise a
   silent rank 0 would make everybody look silent.
3. A rank's own word that it failed.
4. Then what a rank waits for, which may be another rank's fault; it is not looked at while a rank is overdue
   with its beat: that one may be what the others wait for, and is either heard again or named as silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from aioprefill.errors import RankError

OVERDUE_BEATS = 2.5


class Beat(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a rank says of itself. Times are seconds before it was said: clocks of ranks differ."""

    rank: int
    sequence: int
    turned_s: float = 0.0
    """Since its loop last turned; up to a beat when all is well."""
    call: str = ""
    """Kind of the host call under way; "" between calls."""
    call_s: float = 0.0
    voted: int = -1
    """Last forward whose vote it has joined; -1: none yet."""
    voted_s: float = 0.0
    executed: int = -1
    """Last host call that it has carried out; -1: none yet, or not told, so nothing is concluded from it."""
    error: str = ""
    """Why it fails; "" while it does not."""
    blames: int = -1
    """Rank whose fault that is; -1: its own."""
    leaving: bool = False
    """Its last beat: it ends in order."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 tells of one rank."""

    beat: Beat | None
    """The last one; None: none yet."""
    age_s: float
    """Since it was heard, or since the start."""
    closed: bool
    """Its connection is closed."""


class _Known:
    """One rank, as far as this one knows."""

    __slots__ = ("beat", "closed", "heard_at", "judged_at", "rank")

    def __init__(self, rank: int, now: float) -> None:
        self.rank = rank
        self.beat: Beat | None = None
        self.heard_at = now
        self.judged_at: float | None = None
        """When rank 0 told of it; None: it is heard here."""
        self.closed = False

    @property
    def left(self) -> bool:
        return self.beat is not None and self.beat.leaving

    def silent_s(self, now: float) -> float:
        return (now if self.judged_at is None else self.judged_at) - self.heard_at


class BeatTable:
    """What rank `own` of `size` knows of all ranks, itself included. Times are of its own clock, seconds."""

    def __init__(self, own: int, size: int, *, beat_s: float, now: float) -> None:
        self._own = own
        self._beat_s = beat_s
        self._ranks = [_Known(rank, now) for rank in range(size)]
        self._mark = (-1, now)
        """A host call that some rank had carried out at that time, and not yet all."""

    def hear(self, beat: Beat, now: float) -> bool:
        """A beat came from its rank, or is this rank's own. One older than the last is ignored.

        True when the others should know at once: it is the first one, a farewell, or tells of an error.
        """
        known, last = self._ranks[beat.rank], self._ranks[beat.rank].beat
        if last is not None and beat.sequence <= last.sequence:
            return False
        known.beat, known.heard_at = beat, now
        self._move_mark(now)
        return last is None or (last.error, last.leaving) != (beat.error, beat.leaving)

    def relay(self, rows: Sequence[Row], now: float) -> None:
        """Rank 0 told what it knows. Raises `ValueError` when it is not of this group's size."""
        for known, row in zip(self._ranks, rows, strict=True):
            if known.rank == self._own:
                continue
            known.beat, known.heard_at = row.beat, now - row.age_s
            if known.rank:
                known.judged_at = now
                known.closed = row.closed
        self._move_mark(now)

    def close(self, rank: int) -> None:
        """The connection to a rank was closed."""
        self._ranks[rank].closed = True

    def excuse(self, seconds: float) -> None:
        """This process did not run for so long: it could not have heard anybody."""
        for known in self._ranks:
            known.heard_at += seconds

    def rows(self, now: float) -> list[Row]:
        """What rank 0 tells the others."""
        return [Row(known.beat, now - known.heard_at, known.closed) for known in self._ranks]

    def suspect(self, now: float, timeout_s: float, forward: int | None) -> RankError | None:
        """The rank that keeps the group from going on, and why; None while all is well.

        `forward` is the oldest one in flight here, which causes without a forward of their own are named
        after. Asked again with the same knowledge it says the same.
        """
        found = self._closed(forward) or self._silent(now, timeout_s, forward) or self._failed(forward)
        if found is not None or self._overdue(now):
            return found
        return (
            self._stuck(timeout_s, forward) or self._late_vote(timeout_s) or self._behind(timeout_s, forward)
        )

    def _others(self) -> list[_Known]:
        return [known for known in self._ranks if known.rank != self._own and not known.left]

    def _beats(self) -> Iterator[Beat]:
        """Last beats of ranks that are there, in rank order."""
        return (known.beat for known in self._ranks if known.beat is not None and not known.left)

    def _closed(self, forward: int | None) -> RankError | None:
        for known in self._others():
            if known.closed:
                if known.beat is not None and known.beat.error:
                    return _fault(known.beat, forward)
                return RankError(known.rank, "has closed its connection: its process ended", forward=forward)
        return None

    def _silent(self, now: float, timeout_s: float, forward: int | None) -> RankError | None:
        known = max(self._others(), key=lambda known: known.silent_s(now), default=None)
        if known is None or known.silent_s(now) <= timeout_s:
            return None
        cause = f"has been silent for {_seconds(known.silent_s(now))}: "
        if known.beat is None:
            cause += "it was never heard, so it hangs in its start or cannot be reached"
        else:
            cause += "its process is stopped, dead or unreachable"
        return RankError(known.rank, cause, forward=forward)

    def _failed(self, forward: int | None) -> RankError | None:
        for known in self._ranks:
            if known.rank != self._own and known.beat is not None and known.beat.error:
                return _fault(known.beat, forward)
        return None

    def _overdue(self, now: float) -> bool:
        return any(known.silent_s(now) > OVERDUE_BEATS * self._beat_s for known in self._others())

    def _stuck(self, timeout_s: float, forward: int | None) -> RankError | None:
        """A host call that does not end, or a loop that does not turn."""
        beats = list(self._beats())
        stuck = [beat for beat in beats if beat.call_s > timeout_s or beat.turned_s > timeout_s]
        if not stuck:
            return None
        last = min(stuck, key=lambda beat: (beat.executed, -beat.call_s, beat.rank))
        for beat in beats:  # a host call may wait in a collective for a rank that has not come to it
            missing = 0 <= beat.executed < last.executed + (not beat.call)
            if last.call and beat not in stuck and missing:
                cause = (
                    f"has not come to the host call {last.call} that rank {last.rank} has been in for "
                    f"{_seconds(last.call_s)}"
                )
                return RankError(beat.rank, cause, forward=forward)
        if last.call_s > timeout_s / 2:  # else it makes many calls, and no turn between them
            cause = f"has been in the host call {last.call} for {_seconds(last.call_s)}"
        else:
            cause = f"has not turned its event loop for {_seconds(last.turned_s)}"
        also = ", ".join(str(beat.rank) for beat in stuck if beat is not last)
        return RankError(last.rank, cause + (f"; stuck as well: {also}" if also else ""), forward=forward)

    def _late_vote(self, timeout_s: float) -> RankError | None:
        voters = [known for known in self._ranks if known.beat is not None and not known.left]
        joined = [
            (-known.beat.voted, known.heard_at - known.beat.voted_s, known.rank)
            for known in voters
            if known.beat
        ]
        if not joined:
            return None
        minus_forward, first_at, first = min(joined)
        for known in voters:
            # as of its own last beat: it may have joined since
            late_s = known.heard_at - first_at
            if known.beat and known.beat.voted < -minus_forward and late_s > timeout_s:
                cause = (
                    f"has not joined the vote on forward {-minus_forward} that rank {first} joined "
                    f"{_seconds(late_s)} ago"
                )
                return RankError(known.rank, cause, forward=-minus_forward)
        return None

    def _move_mark(self, now: float) -> None:
        """When all have carried out the marked call, mark the furthest one."""
        executed = [beat.executed for beat in self._beats() if beat.executed >= 0]
        if executed and min(executed) >= self._mark[0]:
            self._mark = (max(executed), now)

    def _behind(self, timeout_s: float, forward: int | None) -> RankError | None:
        number, marked_at = self._mark
        for known in self._ranks:
            beat, late_s = known.beat, known.heard_at - marked_at
            if beat is None or known.left:
                continue
            if 0 <= beat.executed < number and late_s > timeout_s:
                cause = (
                    f"has not carried out host call {number} of the order, which another rank did "
                    f"{_seconds(late_s)} ago"
                )
                return RankError(known.rank, cause, forward=forward)
        return None


def _fault(beat: Beat, forward: int | None) -> RankError:
    """What a rank says that it fails by."""
    culprit = beat.rank if beat.blames < 0 else beat.blames
    if beat.error.startswith(f"rank {culprit} "):
        return RankError.retold(culprit, beat.error)
    return RankError(culprit, f"failed: {beat.error}", forward=forward)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
