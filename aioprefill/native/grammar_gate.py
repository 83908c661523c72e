"""Requests whose output must match a grammar: they are not admitted before it is compiled.

What a compilation comes to is an input like any other: it waits in the inbox and is dispatched in order, so
that it is noticed while a forward runs, and at the same point on every rank. Only the leader compiles.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aioprefill.engine.grammar_port import GrammarSource, Outcome
from aioprefill.errors import AioprefillError, InvalidRequest, RequestTimeout
from aioprefill.native.facts import ErrorFact, GrammarFact
from aioprefill.native.request_state import Request


class GrammarGate:
    """`post` puts an input among those that come; `fail` ends a request. No `source`: no grammar is taken."""

    def __init__(
        self,
        source: GrammarSource | None,
        post: Callable[[GrammarFact], None],
        fail: Callable[[Request, AioprefillError], None],
    ) -> None:
        self._source = source
        self._post = post
        self._fail = fail
        self.follows = False
        """Another rank compiles."""

    def arrived(self, request: Request) -> None:
        """A request was dispatched: ask for its grammar, if it has one."""
        spec = request.grammar
        if spec is None or request.over or self.follows:
            return
        outcome: Outcome | None
        if self._source is None:
            outcome = InvalidRequest(spec.kind, "this host has no structured output")
        else:
            outcome = self._source.ask(spec, lambda outcome: self._post(_fact(request, outcome)))
        if outcome is not None:
            self._post(_fact(request, outcome))

    def known(self, request: Request, fact: GrammarFact) -> None:
        """The request, which is not over, may be admitted now; or it ends, alone."""
        if fact.error is not None:
            self._fail(request, _error(fact.error))
        else:
            assert fact.mask is not None
            request.first_mask = np.frombuffer(fact.mask, dtype="<i4")


def _fact(request: Request, outcome: Outcome) -> GrammarFact:
    if isinstance(outcome, AioprefillError):
        field = outcome.field if isinstance(outcome, InvalidRequest) else None
        message = outcome.message if isinstance(outcome, InvalidRequest) else str(outcome)
        error = ErrorFact(outcome.code, message, field)
        return GrammarFact(request.request_id, request.arrival, None, error)
    mask = outcome.first_mask.astype("<i4", copy=False).tobytes()
    return GrammarFact(request.request_id, request.arrival, mask, None)


def _error(fact: ErrorFact) -> AioprefillError:
    if fact.code == InvalidRequest.code:
        return InvalidRequest(fact.field or "grammar", fact.message)
    return RequestTimeout(fact.message)
