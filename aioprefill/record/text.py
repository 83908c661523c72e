"""A recording as a schedule to read: one line per call that did something. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from aioprefill.errors import RecordingError
from aioprefill.native.facts import OutputsFact, decode_facts
from aioprefill.record.fact_text import Part, fact_part
from aioprefill.record.outcome import BatchPiece, batch_of, plain, raised
from aioprefill.tp_agree import CallToken


@dataclass(frozen=True, slots=True)
class Filter:
    """Which lines are wanted. Times are seconds since the recording began."""

    request_id: str | None = None
    """Only what concerns this request."""
    from_s: float | None = None
    to_s: float | None = None

    def takes(self, time_s: float) -> bool:
        """A call at this time may be shown."""
        return (self.from_s is None or time_s >= self.from_s) and (self.to_s is None or time_s <= self.to_s)

    def parts(self, parts: list[Part]) -> list[Part]:
        """Those that are wanted."""
        wanted = self.request_id
        return parts if wanted is None else [part for part in parts if part.concerns(wanted)]


class Line(NamedTuple):
    """A call that did something."""

    time_s: float
    number: int
    kind: str
    did: list[str]

    def __str__(self) -> str:
        return f"{self.time_s:12.6f}  {self.kind:<20} {'; '.join(self.did)}"

    def table(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict()


class Schedule:
    """Reads calls in order and keeps what a later line needs: batches by forward, and what they sampled."""

    def __init__(self, origin_s: float) -> None:
        self._origin_s = origin_s
        self._prepared: list[BatchPiece] = []
        self._forwards: dict[int, list[BatchPiece]] = {}
        """In flight, oldest first."""
        self._sampled: dict[int, OutputsFact] = {}
        self._held = 0
        self._paused = False

    def lines(self, calls: Iterable[tuple[CallToken, bytes]], wanted: Filter | None = None) -> Iterator[Line]:
        """The lines that `wanted` takes. Raises `RecordingError` for calls that make no sense."""
        chosen = wanted or Filter()
        for token, description in calls:
            time_s = token.now - self._origin_s
            parts = self._facts(token) + self._call(token, description)
            shown = chosen.parts(parts) if chosen.takes(time_s) else []
            if shown:
                yield Line(time_s, token.number, token.kind, [part.text for part in shown])

    def _facts(self, token: CallToken) -> list[Part]:
        try:
            facts = decode_facts(token.facts) if token.facts else []
        except msgspec.MsgspecError as err:
            raise RecordingError(f"the facts of call {token.number} make no sense: {err}") from err
        parts = []
        for fact in facts:
            if isinstance(fact, OutputsFact):
                self._sampled[fact.number] = fact
            else:
                parts.append(fact_part(fact))
        return parts

    def _call(self, token: CallToken, description: bytes) -> list[Part]:
        error = raised(description)
        if error is not None:
            return [Part(f"raised {error}")]
        match token.kind:
            case "prepare":
                self._prepared = batch_of(description)
                return []
            case "launch":
                self._forwards[token.detail] = self._prepared
                names, what = _names(self._prepared), ", ".join(piece.range for piece in self._prepared)
                return [Part(f"forward {token.detail}: {what}", names)]
            case "process_result":
                return self._result(token.detail)
            case "fail_result":
                pieces = self._take(token.detail)
                name, message, _ = token.error or ("?", "?", False)
                failed = ", ".join(_names(pieces)) or "requests launched before the recording"
                return [Part(f"forward {token.detail} failed, {name}: {message} ({failed})", _names(pieces))]
            case "ingest":
                return self._ingested(plain(token.kind, description) or {})
            case "progress_transfers":
                fields = plain(token.kind, description) or {}
                return [
                    Part(f"{name} {value}") for name, value in fields.items() if value and name != "freed"
                ]
            case "collect_bootstrapped":
                found = plain(token.kind, description)
                return [Part(f"admissible {found}")] if found else []
            case "begin_drain":
                return [Part("the drain begins")]
            case "end_drain":
                return [Part("the drain ends")]
            case "restart":
                return [Part("at rest: cached prefixes are forgotten, the recording goes on in a new file")]
        return []

    def _ingested(self, fields: dict[str, Any]) -> list[Part]:
        parts = []
        if fields.get("requests"):
            parts.append(Part(f"dispatched {fields['requests']}"))
        if fields.get("held", 0) != self._held:
            self._held = fields["held"]
            parts.append(Part(f"held {self._held}"))
        if fields.get("paused", False) != self._paused:
            self._paused = fields["paused"]
            parts.append(Part("paused" if self._paused else "goes on"))
        for _ in range(fields.get("consumed", 0)):
            parts += self._result(next(iter(self._forwards), -1))
        return parts

    def _result(self, number: int) -> list[Part]:
        """One part for each request of a forward."""
        pieces, sampled = self._take(number), self._sampled.pop(number, None)
        if not pieces:
            return [Part(f"result of forward {number}, launched before this recording")]
        tokens = deque(sampled.tokens) if sampled is not None else deque()
        parts = [Part(f"result of forward {number}", _names(pieces))]
        for piece in pieces:
            token = tokens.popleft() if tokens else None
            came_to = f"sampled {token.token_id}" if token is not None else f"computed to {piece.end}"
            parts.append(Part(f"{piece.request_id} {came_to}", (piece.request_id,)))
        return parts

    def _take(self, number: int) -> list[BatchPiece]:
        return self._forwards.pop(number, [])


def _names(pieces: list[BatchPiece]) -> tuple[str, ...]:
    return tuple(piece.request_id for piece in pieces)
