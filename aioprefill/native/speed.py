"""How fast prompts are prefilled, learned from forwards. Pure."""

from __future__ import annotations

DECAY = 0.95
"""What a forward's weight falls to with each later one: the last 20 count most."""


class Speed:
    """Tokens a second of the device while it is busy.

    A ratio of sums, not a mean of ratios: a forward of a few tokens says little about the speed.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._last_done_s = 0.0

    def __repr__(self) -> str:
        return f"<Speed {self.tokens_per_s:.0f} tokens/s>"

    @property
    def tokens_per_s(self) -> float:
        """0 when nothing is known yet."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def learn(self, tokens: int, launched_s: float, done_s: float) -> None:
        """A forward was done. One that was launched behind another began when that one was done."""
        seconds = done_s - max(launched_s, self._last_done_s)
        self._last_done_s = done_s
        if seconds > 0:
            self._tokens = DECAY * self._tokens + tokens
            self._seconds = DECAY * self._seconds + seconds
