"""Grammars of rooms, from their reservation until their first token is taken.

They compile while the KV is on its way, so that a room that has arrived seldom waits for its grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aioprefill.engine.grammar_port import GrammarSource, Matcher, Outcome
from aioprefill.errors import AioprefillError, InvalidRequest
from aioprefill.grammar_spec import GrammarSpec


@dataclass(slots=True, eq=False)
class _Wanted:
    outcome: Outcome | None = None
    """None: being compiled."""


class Constraints:
    """`on_known(room)` tells that a room need not wait any more. `source` None: no grammar is taken."""

    def __init__(self, source: GrammarSource | None, on_known: Callable[[str], None]) -> None:
        self._source = source
        self._on_known = on_known
        self._rooms: dict[str, _Wanted] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def check(self, spec: GrammarSpec | None) -> None:
        """Raise `InvalidRequest` for a grammar that will not be taken."""
        if spec is not None:
            spec.validate()
            if self._source is None:
                raise InvalidRequest(spec.kind, "this decode worker has no structured output")

    def reserve(self, room: str, spec: GrammarSpec | None) -> None:
        """A room is on its way: ask for its grammar, if it has one."""
        if spec is None:
            return
        assert self._source is not None, "checked before"
        wanted = self._rooms[room] = _Wanted()

        def known(outcome: Outcome) -> None:
            wanted.outcome = outcome
            if self._rooms.get(room) is wanted:  # else given up, and perhaps another one of that name now
                self._on_known(room)

        wanted.outcome = self._source.ask(spec, known)

    def waits(self, room: str) -> bool:
        """The room's grammar is being compiled."""
        wanted = self._rooms.get(room)
        return wanted is not None and wanted.outcome is None

    def take(self, room: str) -> Matcher | None:
        """A fresh matcher for a room that does not wait, which is forgotten here; None: no grammar.

        Raises the error of the compilation.
        """
        wanted = self._rooms.pop(room, None)
        if wanted is None:
            return None
        outcome = wanted.outcome
        assert outcome is not None, "the room's grammar is being compiled"
        if isinstance(outcome, AioprefillError):
            raise outcome
        return outcome.matcher()

    def forget(self, room: str) -> None:
        """The room is given up."""
        self._rooms.pop(room, None)
