"""How fast prompts are prefilled, learned from forwards. Pure."""

from __future__ import annotations

DECAY = 0.95
"""What a forward's weight falls to with each later one: the last 20 count most."""


class Speed:
    """Tokens a second of the device while it is busy.

    A ratio of sums, not a mean of ratios: a forward of a few tokens says little about the speed. What a
    full forward would do is learned from those of at least `full_tokens` alone, for a device is much slower
    with few tokens at a time, and who is refused because of a speed must not be refused wrongly.
    """

    def __init__(self, full_tokens: int) -> None:
        self._full_tokens = full_tokens
        self._all = (0.0, 0.0)
        self._full = (0.0, 0.0)
        self._last_done_s = 0.0

    def __repr__(self) -> str:
        return f"<Speed {self.tokens_per_s:.0f} tokens/s, full {self.full_tokens_per_s:.0f}>"

    @property
    def tokens_per_s(self) -> float:
        """Of late; 0 when nothing is known yet."""
        return _ratio(self._all)

    @property
    def full_tokens_per_s(self) -> float:
        """Of large forwards; 0 when none has been seen."""
        return _ratio(self._full)

    def learn(self, tokens: int, launched_s: float, done_s: float) -> None:
        """A forward was done. One that was launched behind another began when that one was done."""
        seconds = done_s - max(launched_s, self._last_done_s)
        self._last_done_s = done_s
        if seconds <= 0:
            return
        self._all = _decayed(self._all, tokens, seconds)
        if tokens >= self._full_tokens:
            self._full = _decayed(self._full, tokens, seconds)


def _ratio(sums: tuple[float, float]) -> float:
    return sums[0] / sums[1] if sums[1] > 0 else 0.0


def _decayed(sums: tuple[float, float], tokens: int, seconds: float) -> tuple[float, float]:
    return DECAY * sums[0] + tokens, DECAY * sums[1] + seconds
