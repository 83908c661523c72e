"""When to look whether a forward is done: by what forwards of its size took. Pure.

Looking too early costs CPU, looking too late costs time. A forward is looked for from shortly before the
smallest recent duration on, finely at first and ever more coarsely the longer it takes.
"""

from __future__ import annotations

from collections import deque

REMEMBERED = 16
"""Durations kept per size."""
EARLY = 0.88
"""Part of the smallest recent duration after which looking begins."""
CENSORED = 0.75
"""Part of a duration that is taken where the first look already found the forward done.

It ended some time before; taken as it is, such a sample would confirm the late look that made it.
"""
STEPS = 32
"""Looks per span since looking began: the span's share that a detection may be late by."""
OVERDUE_STEPS = 64
MARGIN = 1.25
"""A forward is overdue at this multiple of the longest recent duration."""


class Pacer:
    """Learns durations by the number of tokens launched. Seconds throughout.

    `fine_s` is the shortest time between two looks, `coarse_s` the longest while the forward is expected, and
    `overdue_s` the longest of all.
    """

    def __init__(self, *, fine_s: float = 0.0002, coarse_s: float = 0.0008, overdue_s: float = 0.02) -> None:
        self._fine_s = fine_s
        self._coarse_s = coarse_s
        self._overdue_s = overdue_s
        self._recent: dict[int, deque[float]] = {}

    def begin(self, tokens: int) -> float:
        """Age at which to look for a forward of `tokens` tokens for the first time; 0 if nothing is known."""
        known = self._known(tokens)
        return EARLY * min(known) if known else 0.0

    def next_look(self, tokens: int, age_s: float) -> float:
        """How long to wait until the next look, for a forward that was not done at `age_s`."""
        recent = self._recent.get(_size(tokens))
        if recent and age_s <= MARGIN * max(recent):
            since_begin = max(0.0, age_s - self.begin(tokens))
            return min(max(since_begin / STEPS, self._fine_s), self._coarse_s)
        return min(max(age_s / OVERDUE_STEPS, self._fine_s), self._overdue_s)

    def observe(self, tokens: int, seconds: float, looks: int) -> None:
        """A forward was found done at the age of `seconds`, by the `looks`-th look."""
        recent = self._recent.setdefault(_size(tokens), deque(maxlen=REMEMBERED))
        recent.append(seconds * CENSORED if looks <= 1 else seconds)

    def _known(self, tokens: int) -> deque[float] | None:
        """Durations of forwards of this size, else of the largest smaller one: those are not longer."""
        size = _size(tokens)
        smaller = [known for known in self._recent if known <= size]
        return self._recent[max(smaller)] if smaller else None


def _size(tokens: int) -> int:
    """Forwards within a factor of two are one size."""
    return tokens.bit_length()
