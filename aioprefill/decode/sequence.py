"""One sequence that is being decoded. Pure."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass

import numpy as np

from aioprefill.engine.grammar_port import Matcher
from aioprefill.engine.port import PageIds, SampledToken, Span
from aioprefill.errors import HostError
from aioprefill.transfer.port import Handoff


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt whose KV has arrived, and the tokens generated behind it."""

    handoff: Handoff
    pages: PageIds
    """Page table for the prompt and everything that may be generated."""
    last_token: int
    generated: int = 0
    """Tokens generated so far, the first one (sampled by prefill) included."""
    matcher: Matcher | None = None
    """Follows the output through its grammar."""
    assembled: concurrent.futures.Future[None] | None = None
    """When pages that came in shards are in order; until then the device writes to them."""

    @property
    def room(self) -> str:
        """The request's id."""
        return self.handoff.room

    def span(self) -> Span:
        """The next step: the last token, at its position."""
        return Span(
            token_ids=np.array([self.last_token], dtype=np.uint32),
            start=self.handoff.prompt_tokens + self.generated - 1,
            pages=self.pages,
            sample=self.handoff.sampling,
            mask=None if self.matcher is None else self.matcher.mask,
        )

    def take(self, token: SampledToken, eos: frozenset[int]) -> str | None:
        """Append a token; the reason to finish ("eos", "grammar" or "length"), or None: go on.

        "grammar": complete, with a model that has no end token. Raises `HostError`, and appends nothing, when
        the token does not fit the grammar.
        """
        matcher = self.matcher
        if matcher is not None and not matcher.accept(token.token_id):
            raise HostError(
                f"room {self.room}: token {token.token_id} does not fit the grammar: "
                "do both sides have the same tokenizer and the same xgrammar?"
            )
        self.last_token = token.token_id
        self.generated += 1
        if matcher is not None and matcher.over:
            return "eos" if token.token_id in eos else "grammar"
        if token.token_id in eos and not self.handoff.ignore_eos:
            return "eos"
        return "length" if self.generated >= self.handoff.max_new_tokens else None


def pages_needed(handoff: Handoff, page_size: int) -> int:
    """Pages for the prompt and for what may be generated; the last token's KV is never needed."""
    tokens = handoff.prompt_tokens + handoff.max_new_tokens - 1
    return max(handoff.pages, -(-tokens // page_size))
