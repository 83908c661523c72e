"""What a host call came to, in words; and the first call that comes to something else than recorded. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from aioprefill.errors import RecordingError
from aioprefill.host_calls import RAISED


class BatchPiece(NamedTuple):
    """A piece of a recorded batch: tokens [start, end) of a request, and its pages."""

    request_id: str
    start: int
    end: int
    pages: bytes
    """Little-endian int32."""

    @property
    def range(self) -> str:
        """Request and tokens."""
        return f"{self.request_id} [{self.start}, {self.end})"

    @property
    def page_numbers(self) -> list[int]:
        """The request's page table."""
        numbers: list[int] = np.frombuffer(self.pages, dtype="<i4").tolist()
        return numbers


_batches = msgspec.msgpack.Decoder(list[BatchPiece])


def batch_of(description: bytes) -> list[BatchPiece]:
    """The pieces that a `prepare` found. Raises `RecordingError` for what is no batch."""
    try:
        return _batches.decode(description) if description else []
    except msgspec.MsgspecError as err:
        raise RecordingError(f"a batch makes no sense: {err}") from err


def raised(description: bytes) -> str | None:
    """The error of a call that raised; None for one that did not."""
    fields = _fields(description)
    return str(fields[RAISED]) if isinstance(fields, dict) and RAISED in fields else None


def plain(kind: str, description: bytes) -> Any:
    """What a call of this kind came to, as values for JSON; None for nothing to tell."""
    if not description:
        return None
    if kind != "prepare" or raised(description) is not None:
        return _fields(description)
    return [
        {"request": piece.request_id, "start": piece.start, "end": piece.end, "pages": piece.page_numbers}
        for piece in batch_of(description)
    ]


def in_words(kind: str, description: bytes) -> str:
    """The same for people, on one line."""
    error = raised(description)
    if error is not None:
        return f"raised {error}"
    if kind == "prepare":
        pieces = batch_of(description)
        found = [f"{piece.range} in pages {ranges(piece.page_numbers)}" for piece in pieces]
        return "; ".join(found) or "no batch"
    fields = _fields(description)
    if isinstance(fields, dict):
        return " ".join(f"{name}={value}" for name, value in fields.items())
    return "nothing to tell" if fields is None else str(fields)


def ranges(numbers: list[int]) -> str:
    """ "3-6, 9" for [3, 4, 5, 6, 9]."""
    if not numbers:
        return "none"
    cuts = [at + 1 for at, (a, b) in enumerate(pairwise(numbers)) if b != a + 1]
    runs = [numbers[start:end] for start, end in pairwise([0, *cuts, len(numbers)])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _fields(description: bytes) -> Any:
    if not description:
        return None
    try:
        return msgspec.msgpack.decode(description)
    except msgspec.MsgspecError as err:
        raise RecordingError(f"what a call came to makes no sense: {err}") from err


@dataclass(frozen=True, slots=True)
class Difference:
    """A call that came to something else than it did when it was recorded."""

    number: int
    kind: str
    time_s: float
    """Seconds since the recording began."""
    recorded: bytes
    now: bytes

    def lines(self) -> list[str]:
        """For people."""
        told = [f"first difference: call {self.number}, {self.kind}, {self.time_s:.6f} s after the start"]
        before, after = (_fields(one) for one in (self.recorded, self.now))
        if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
            names = [name for name in before if before[name] != after[name]]
            return told + [f"  {name}: recorded {before[name]}, now {after[name]}" for name in names]
        return [
            *told,
            f"  recorded: {in_words(self.kind, self.recorded)}",
            f"  now:      {in_words(self.kind, self.now)}",
        ]

    def table(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "call": self.number,
            "kind": self.kind,
            "time_s": self.time_s,
            "recorded": plain(self.kind, self.recorded),
            "now": plain(self.kind, self.now),
        }
