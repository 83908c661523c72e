"""When to look whether a forward is done: by what forwards of its size took. Pure.

Looking too early costs CPU, looking too late costs time. A forward is looked for from shortly before the
smallest recent duration on, finely at first and ever more coarsely the longer it takes.
"""

from __future__ import annotations

from collections import deque

REMEMBERED = 16
"""Durations kept per size."""
EARLY = 0.95
"""Part of the smallest recent duration after which looking begins."""
EARLY_AT_FIRST = 0.85
"""The same while few durations are known."""
FEW = 6
CENSORED = 0.9
"""Part of a duration that is taken where the first look already found the forward done.

It ended some time before; taken as it is, such a sample would confirm the late look that made it.
"""
FINE_S = 0.00003
"""Shortest time between two looks: beside it comes what waking up takes, which is about as long."""
FINE_FOR_S = 0.06
"""Looks stay that close for so long; from then on they grow apart with the time since they began."""
UNLIKELY = 3
"""Factor of the time between looks before the smallest recent duration, where few forwards end."""
OVERDUE_STEPS = 58
"""Looks in the age of a forward that is overdue, or that nothing is known of: how late it is found."""
MARGIN = 1.1
"""A forward is overdue at this multiple of the longest recent duration."""


class _Size:
    """What is known of forwards of one size; sums are kept, for looks are many and durations few."""

    __slots__ = ("begin", "expected", "recent", "shortest")

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=REMEMBERED)
        self.shortest = 0.0
        self.begin = 0.0
        self.expected = 0.0
        """Age up to which a forward is not overdue."""

    def observe(self, seconds: float) -> None:
        """One more duration."""
        self.recent.append(seconds)
        part = EARLY_AT_FIRST if len(self.recent) < FEW else EARLY
        self.shortest = min(self.recent)
        self.begin = part * self.shortest
        self.expected = MARGIN * max(self.recent)


class Pacer:
    """Learns durations by the number of tokens launched. Seconds throughout.

    `fine_s` is the shortest time between two looks, and longer ones are in proportion to it; `coarse_s` is
    the longest while the forward is expected, and `overdue_s` the longest of all.
    """

    def __init__(self, *, fine_s: float = FINE_S, coarse_s: float = 0.0008, overdue_s: float = 0.02) -> None:
        self._fine_s = fine_s
        self._steps = FINE_FOR_S / fine_s
        self._coarse_s = max(fine_s, coarse_s)
        self._overdue_s = max(fine_s, overdue_s)
        self._sizes: dict[int, _Size] = {}

    def begin(self, tokens: int) -> float:
        """Age at which to look for a forward of `tokens` tokens for the first time; 0 if nothing is known."""
        known = self._known(tokens)
        return 0.0 if known is None else known.begin

    def next_look(self, tokens: int, age_s: float) -> float:
        """How long to wait until the next look, for a forward that was not done at `age_s`."""
        known = self._known(tokens)
        if known is not None and age_s <= known.expected:
            if age_s < known.shortest:
                return UNLIKELY * self._fine_s
            return min(max((age_s - known.begin) / self._steps, self._fine_s), self._coarse_s)
        return min(max(age_s / OVERDUE_STEPS, self._fine_s), self._overdue_s)

    def observe(self, tokens: int, seconds: float, looks: int) -> None:
        """A forward was found done at the age of `seconds`, by the `looks`-th look."""
        known = self._sizes.setdefault(_size(tokens), _Size())
        known.observe(seconds * CENSORED if looks <= 1 else seconds)

    def _known(self, tokens: int) -> _Size | None:
        """What is known of this size, else of the largest smaller one: its forwards are not longer."""
        size = _size(tokens)
        known = self._sizes.get(size)
        if known is None and self._sizes:
            smaller = [other for other in self._sizes if other < size]
            known = self._sizes[max(smaller)] if smaller else None
        return known


def _size(tokens: int) -> int:
    """Forwards within a factor of two are one size."""
    return tokens.bit_length()
