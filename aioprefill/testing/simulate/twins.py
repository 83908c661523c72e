"""Ranks do the same: every host call of a follower is compared with the leader's of the same number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aioprefill.testing.simulate.story import Violation
from aioprefill.tp_agree import CallToken

State = tuple[object, ...]
"""What a host is after a call, as far as ranks must agree; first what it holds back, in order."""


class Made(NamedTuple):
    """A host call that the leader has made."""

    token: CallToken
    description: bytes
    digest: int
    """After a launch; else 0."""
    state: State


class Twins:
    """Keeps the leader's calls until every follower has made them too."""

    def __init__(self, size: int, violate: Callable[[str], Violation]) -> None:
        self._violate = violate
        self._made: deque[Made] = deque()
        self._first = 0
        """Number of the oldest call that is kept."""
        self._next = [0] * size
        """The next call of each rank."""

    def __repr__(self) -> str:
        return f"<Twins next={self._next} kept={len(self._made)}>"

    @property
    def next_calls(self) -> Sequence[int]:
        """Number of the next call of each rank."""
        return self._next

    def lead(self, made: Made) -> None:
        """The leader has made a call. Raises `Violation`."""
        if made.token.number != self._next[0]:
            raise self._violate(f"call {made.token.number} came where {self._next[0]} was due")
        self._next[0] += 1
        if len(self._next) > 1:
            self._made.append(made)
        else:
            self._first += 1

    def follow(self, rank: int, made: Made) -> None:
        """A follower has made a call. Raises `Violation`."""
        number = made.token.number
        if number != self._next[rank] or number >= self._next[0]:
            raise self._violate(f"rank {rank} made call {number}, {self._next[rank]} was due")
        theirs = self._made[number - self._first]
        if made != theirs:
            raise self._violate(
                f"rank {rank} differs at call {number} ({made.token.kind}): {_of(made, theirs)}"
            )
        self._next[rank] += 1
        while self._made and self._first < min(self._next):
            self._made.popleft()
            self._first += 1


def _of(mine: Made, theirs: Made) -> str:
    """What differs, in words."""
    for name, one, other in zip(Made._fields, mine, theirs, strict=True):
        if one != other and name != "state":
            return f"{name} {one!r} is {other!r} on rank 0"
    for one, other in zip(mine.state, theirs.state, strict=True):
        if one != other:
            return f"state {one!r} is {other!r} on rank 0"
    return "nothing"
