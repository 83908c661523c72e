"""Which waiting requests wait for their prefix from the tier, and for how long. Pure.

Rule: `step` is called once per scheduling step and is the only thing that brings a deadline nearer; polls,
arrivals and wakes do not. (A clock bounds the wait too, for on an idle loop there are no steps.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aioprefill.engine.port import TokenIds

DEADLINE_STEPS = 16
"""Scheduling steps after which a request is admitted with what has come so far."""
LIMIT_S = 5.0
"""Seconds, for a loop that makes no steps because nothing else is there to do."""


@dataclass(slots=True, eq=False)
class Prefetch:
    """One request's pages on their way from the tier into the pool."""

    request_id: str
    tokens: TokenIds
    names: list[str]
    """Of pages [first, first + len(names)) of the prompt."""
    first: int
    steps_left: int
    until_s: float
    done: int = 0
    """Names that are in the pool, or given up."""
    reading: bool = False
    """A read is under way."""
    stalled: bool = False
    """What was read found no room: not tried again before the next scheduling step."""
    over: bool = False
    """Nothing more is expected: the request may be admitted."""

    def batch(self, count: int) -> list[str]:
        """The next names to read."""
        return self.names[self.done : self.done + count]


class PrefetchBook:
    """The prefetches of requests that are in the queue; also those that are over, so none begins twice."""

    def __init__(self, deadline_steps: int = DEADLINE_STEPS, limit_s: float = LIMIT_S) -> None:
        self._deadline_steps = deadline_steps
        self._limit_s = limit_s
        self._known: dict[str, Prefetch | None] = {}
        """None: the tier has nothing for this request."""

    def __repr__(self) -> str:
        return f"<PrefetchBook active={sum(1 for _ in self.active)} known={len(self._known)}>"

    def __len__(self) -> int:
        return len(self._known)

    @property
    def active(self) -> Iterator[Prefetch]:
        """Those that are not over, oldest first."""
        return (item for item in self._known.values() if item is not None and not item.over)

    def knows(self, request_id: str) -> bool:
        """The tier was asked about this request."""
        return request_id in self._known

    def blocks(self, request_id: str) -> bool:
        """The request should not be admitted yet."""
        item = self._known.get(request_id)
        return item is not None and not item.over

    def nothing(self, request_id: str) -> None:
        """The tier has nothing for this request."""
        self._known[request_id] = None

    def begin(self, request_id: str, tokens: TokenIds, names: list[str], first: int, now: float) -> Prefetch:
        """Have a request wait for its pages."""
        item = Prefetch(request_id, tokens, names, first, self._deadline_steps, until_s=now + self._limit_s)
        self._known[request_id] = item
        return item

    def forget(self, request_id: str) -> None:
        """The request has left the queue; whatever is being read for it is not wanted any more."""
        item = self._known.pop(request_id, None)
        if item is not None:
            item.over = True

    def forget_all(self) -> None:
        """As if no request had been asked about: the weights have changed."""
        for request_id in list(self._known):
            self.forget(request_id)

    def step(self) -> int:
        """A scheduling step: prefetches at their deadline are over; how many."""
        expired = 0
        for item in self.active:
            item.steps_left -= 1
            item.stalled = False
            if item.steps_left <= 0:
                item.over = True
                expired += 1
        return expired

    def expire(self, now: float) -> int:
        """The same by the clock."""
        late = [item for item in self.active if now >= item.until_s]
        for item in late:
            item.over = True
        return len(late)
