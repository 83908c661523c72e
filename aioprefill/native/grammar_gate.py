"""Requests whose output must match a grammar: they are not admitted before it is compiled.

What a compilation comes to is an input like any other: it waits in the inbox and is dispatched in order, so
that it is noticed while a forward runs, and at the same point on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aioprefill.engine.grammar_port import GrammarSource, Outcome
from aioprefill.errors import AioprefillError, InvalidRequest
from aioprefill.native.request_state import Request


@dataclass(frozen=True, slots=True)
class GrammarKnown:
    """Input: the grammar of a request is compiled, or will not be. The request may be over meanwhile."""

    request: Request
    outcome: Outcome


class GrammarGate:
    """`post` puts an input into the inbox; `fail` ends a request. `source` None: no grammar is taken."""

    def __init__(
        self,
        source: GrammarSource | None,
        post: Callable[[GrammarKnown], None],
        fail: Callable[[Request, AioprefillError], None],
    ) -> None:
        self._source = source
        self._post = post
        self._fail = fail

    def arrived(self, request: Request) -> None:
        """A request was dispatched: ask for its grammar, if it has one."""
        spec = request.grammar
        if spec is None or request.over:
            return
        if self._source is None:
            self._fail(request, InvalidRequest(spec.kind, "this host has no structured output"))
            return
        outcome = self._source.ask(spec, lambda outcome: self._post(GrammarKnown(request, outcome)))
        if outcome is not None:
            self.known(GrammarKnown(request, outcome))

    def known(self, item: GrammarKnown) -> None:
        """The request may be admitted now; or it ends, alone."""
        request, outcome = item.request, item.outcome
        if request.over:
            return
        if isinstance(outcome, AioprefillError):
            self._fail(request, outcome)
        else:
            request.first_mask = outcome.first_mask
