"""What the soak expects of every request, and what it counts against the servers. Pure.

Each half of a request (prefill, decode) ends once; tokens come once each, in order, and are those of the
case. What a client hears is booked before its own checks, so that nothing that comes twice is hidden.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from aioprefill.bench.soak_cases import Case
from aioprefill.wire.messages import Accepted, Failed, Finished, FirstToken, Message, Token, Transferred

logger = logging.getLogger(__name__)

KEPT = 20_000
"""Requests that are remembered after their end, for what comes late."""
EXAMPLES = 20


@dataclass(slots=True)
class Record:
    """What was heard of one request."""

    case: Case
    handoff: bool
    accepted: int = 0
    firsts: int = 0
    tokens: int = 0
    ends: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})


class Book:
    """Counts of what happened (`counts`) and of what must not (`faults`: lost, duplicated, wrong_tokens)."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter({"lost": 0, "duplicated": 0, "wrong_tokens": 0})
        self.examples: list[str] = []
        self._records: dict[str, Record] = {}

    def opened(self, request_id: str, case: Case, *, handoff: bool) -> None:
        """A request is being submitted."""
        self.counts["requests"] += 1
        self._records[request_id] = Record(case, handoff)
        if len(self._records) > KEPT:
            del self._records[next(iter(self._records))]

    def fault(self, kind: str, text: str) -> None:
        """Something that must not happen."""
        self.faults[kind] += 1
        logger.warning("%s: %s", kind, text)
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{kind}: {text}")

    def heard(self, side: str, message: Message) -> None:
        """A client got a message, which it may or may not have use for."""
        request_id = getattr(message, "request_id", None)
        record = self._records.get(request_id or "")
        if record is None:
            return
        if isinstance(message, Accepted):
            record.accepted += 1
            self._once(record.accepted, request_id, message)
        elif isinstance(message, FirstToken):
            record.firsts += 1
            self._once(record.firsts, request_id, message)
            self._check(request_id, record, 0, message.token_id)
        elif isinstance(message, Token):
            self._token(request_id, record, message)
        elif isinstance(message, Transferred | Finished | Failed):
            record.ends[side] += 1
            self._once(record.ends[side], request_id, message)

    def _once(self, times: int, request_id: str | None, message: Message) -> None:
        if times > 1:
            self.fault("duplicated", f"{request_id}: {type(message).__name__} number {times}: {message}")

    def _token(self, request_id: str | None, record: Record, message: Token) -> None:
        if message.index < record.tokens or record.ends["decode"]:
            self.fault("duplicated", f"{request_id}: token {message.index} after {record.tokens}")
            return
        if message.index > record.tokens:
            self.fault("lost", f"{request_id}: token {message.index} where {record.tokens} was due")
        record.tokens = message.index + 1
        self._check(request_id, record, message.index, message.token_id)

    def _check(self, request_id: str | None, record: Record, index: int, token_id: int) -> None:
        expected = record.case.tokens
        if index >= len(expected) or expected[index] != token_id:
            due = expected[index] if index < len(expected) else "none"
            text = (
                f"{request_id}: token {index} is {token_id}, not {due}; prompt of {len(record.case.prompt)}"
            )
            self.fault("wrong_tokens", text)

    def finished(self, request_id: str, tokens: list[int]) -> None:
        """A request ended well, with these tokens in its reader's hands."""
        self.counts["finished"] += 1
        record = self._records[request_id]
        expected = list(record.case.tokens if record.handoff else record.case.tokens[:1])
        if tokens != expected:
            self.fault("wrong_tokens", f"{request_id}: read {tokens}, not {expected}")
