"""Which chunks the next forward computes. Pure.

Chunked prefill with a token budget: prompts that are under way come first, in the order in which they
were launched, then waiting ones in the policy's order. Chunks but the last end on a page boundary, so that
a KV chunk is a range of whole pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aioprefill.native.request_state import Request


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


def cut(request: Request, budget: int, page_size: int) -> Piece | None:
    """The next chunk of a request within `budget` tokens; None when not even a page fits."""
    start = request.planned
    end = min(request.length, start + budget)
    if end < request.length:
        end -= end % page_size
    return Piece(request, start, end) if end > start else None


def plan(
    under_way: Iterable[Request],
    waiting: Iterable[Request],
    limits: Limits,
    admit: Callable[[Request], bool],
) -> list[Piece]:
    """Pieces of the next forward, within `limits`.

    `admit` gives a waiting request its pages (and sets `planned` to what the prefix cache covers), or
    returns False: no pages now. The first one that cannot be admitted ends the batch, for passing it by
    would starve it.
    """
    pieces: list[Piece] = []
    budget = limits.tokens
    for request in under_way:
        piece = cut(request, budget, limits.page_size) if len(pieces) < limits.requests else None
        if piece is None:
            return pieces
        pieces.append(piece)
        budget -= piece.tokens
    for request in waiting:
        # A page is the least that can be cut; asking first keeps pages from being taken in vain.
        if len(pieces) >= limits.requests or budget < min(limits.page_size, request.length):
            break
        if not admit(request):
            break
        piece = cut(request, budget, limits.page_size)
        assert piece is not None, "a page fits, so a chunk does"
        pieces.append(piece)
        budget -= piece.tokens
    return pieces
