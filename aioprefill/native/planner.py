"""Which chunks the next forward computes. Pure.

Chunked prefill with a token budget: prompts that are under way come first, then waiting ones in the
policy's order. Chunks but the last end on a page boundary, so that a KV chunk is a range of whole pages.

Rules that keep a huge prompt from taking every chunk, and anybody from starving:
- A prompt that takes more than `LONG_FORWARDS` forwards is long. All long ones together get at
  most `share` of the budget, in equal parts, while others want tokens; what nobody else wants is theirs too.
- At most `long_prompts` long ones are under way. Others wait, and may be passed by shorter ones, until they
  are overdue; then they are admitted all the same.
- A waiting request that cannot get its pages ends the batch, for passing it by would starve it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from aioprefill.native.request_state import Request

LONG_FORWARDS = 4
"""A prompt that is done within so many forwards delays others little enough to run at full speed."""
LONG_PROMPTS = 2
"""So that a long prompt need not wait for a much longer one, and half-done ones hold few pages."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One request's part of a batch: its tokens [start, end)."""

    request: Request
    start: int
    end: int

    @property
    def final(self) -> bool:
        """The chunk ends the prompt: its forward samples the first token."""
        return self.end == self.request.length

    @property
    def tokens(self) -> int:
        """Tokens to compute."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one batch."""

    tokens: int
    requests: int
    page_size: int
    share: float = 1.0
    """Part of `tokens` that long prompts may have while others want some."""
    long_prompts: int = LONG_PROMPTS

    def is_long(self, request: Request) -> bool:
        """The prompt takes many forwards, as far as known; once admitted, it stays what it is."""
        uncached = request.length - max(request.cached, request.expected_cached)
        return self.share < 1 and uncached > LONG_FORWARDS * self.tokens


def cut(request: Request, budget: int, page_size: int) -> Piece | None:
    """The next chunk of a request within `budget` tokens; None when not even a page fits."""
    start = request.planned
    end = min(request.length, start + budget)
    if end < request.length:
        end -= end % page_size
    return Piece(request, start, end) if end > start else None


@dataclass(slots=True)
class _Draft:
    """A batch in the making."""

    limits: Limits
    left: int
    """Tokens that are not given away."""
    quota: int
    """Of these, what long prompts may have for now."""
    pieces: list[Piece] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.pieces) >= self.limits.requests

    def add(self, request: Request, most: int) -> bool:
        """Take a chunk of at most `most` tokens, or of one page; False: nothing fits."""
        if self.full:
            return False
        budget = min(max(most, self.limits.page_size), self.left)
        piece = cut(request, budget, self.limits.page_size)
        if piece is None:
            return False
        self.pieces.append(piece)
        self.left -= piece.tokens
        return True

    def add_long(self, request: Request, sharers: int) -> bool:
        """Take a chunk of a long prompt: its part of a quota that so many have to share."""
        before = self.left
        added = self.add(request, self.quota // sharers)
        self.quota = max(0, self.quota - (before - self.left))
        return added

    def use_up(self) -> None:
        """Give what is left to those that were kept short."""
        for index, piece in enumerate(self.pieces):
            if self.left <= 0:
                return
            if not piece.final:
                longer = cut(piece.request, piece.tokens + self.left, self.limits.page_size)
                assert longer is not None, "a piece got shorter"
                self.pieces[index] = longer
                self.left -= longer.tokens - piece.tokens


def plan(
    under_way: Iterable[Request],
    waiting: Iterable[Request],
    limits: Limits,
    admit: Callable[[Request], bool],
    may_pass: Callable[[Request], bool] = lambda request: True,
) -> list[Piece]:
    """Pieces of the next forward, within `limits`.

    `admit` gives a waiting request its pages (and sets `planned` to what the prefix cache covers), or
    returns False: no pages now. `may_pass` tells whether others may be admitted before a waiting long prompt
    for which there is no room yet.
    """
    long: list[Request] = []
    short: list[Request] = []
    for request in under_way:
        (long if limits.is_long(request) else short).append(request)
    draft = _Draft(limits, limits.tokens, int(limits.share * limits.tokens))
    places = max(1, limits.requests - 1)  # one is for the others, who would wait for all long ones else
    for index, request in enumerate(long[:places]):
        draft.add_long(request, len(long) - index)
    if all(draft.add(request, limits.tokens) for request in short):
        _admit(draft, waiting, len(long), admit, may_pass)
    for index, request in enumerate(long[places:], places):
        draft.add_long(request, len(long) - index)
    draft.use_up()
    return draft.pieces


def _admit(
    draft: _Draft,
    waiting: Iterable[Request],
    long: int,
    admit: Callable[[Request], bool],
    may_pass: Callable[[Request], bool],
) -> None:
    """Add waiting ones, in their order."""
    limits = draft.limits
    for request in waiting:
        # A page is the least that can be cut; asking first keeps pages from being taken in vain.
        if draft.full or draft.left < min(limits.page_size, request.length):
            return
        if limits.is_long(request) and long >= limits.long_prompts and may_pass(request):
            continue
        if not admit(request):
            return
        if limits.is_long(request):
            long += 1
            added = draft.add_long(request, 1)
        else:
            added = draft.add(request, limits.tokens)
        assert added, "a page fits, so a chunk does"
