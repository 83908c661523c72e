"""Reads a recording's file. A process that was killed leaves its last entry cut off: that is a normal end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from aioprefill.errors import RecordingError
from aioprefill.record.format import (
    FORMAT,
    FRAME_HEAD,
    MAGIC,
    Header,
    checked,
    decode_entry,
    decode_format,
    decode_header,
    frame_length,
)
from aioprefill.tp_agree import CallToken
from aioprefill.version import __version__

CUT_OFF = "cut off"


class RecordingReader:
    """One segment, opened: `header`, then its calls by iteration, once, then `end`.

    Raises `RecordingError`, here and in the iteration: what is wrong, where, and what to do.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.end = CUT_OFF
        """How it ended: "closed", "continued" (in the next segment), or "cut off"."""
        self.calls = 0
        """Read so far."""
        try:
            self._file = path.open("rb")
        except OSError as err:
            raise RecordingError(f"{path}: {err.strerror}") from err
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> RecordingReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[tuple[CallToken, bytes]]:
        """Every call, and the description of what it came to."""
        while (content := self._frame()) is not None:
            try:
                token, description = decode_entry(content)
            except msgspec.MsgspecError as err:
                raise self._broken(f"what stands for call {self._next_call} is none: {err}") from err
            if token is None:
                self.end = description.decode(errors="replace")
                return
            if token.number != self._next_call:
                raise self._broken(f"call {self._next_call} is missing, {token.number} follows")
            self.calls += 1
            yield token, description

    @property
    def _next_call(self) -> int:
        return self.header.first_call + self.calls

    def _read_header(self) -> Header:
        begins = self._read(len(MAGIC))
        if not begins:
            raise RecordingError(f"{self._path} is empty: nothing was recorded")
        if not MAGIC.startswith(begins):
            raise RecordingError(f"{self._path} is no recording of aioprefill")
        content = self._frame()
        if content is None:
            raise RecordingError(f"{self._path} ends before its first call: nothing was recorded")
        try:
            known = decode_format(content)
            if known.format <= FORMAT:
                return decode_header(content)
        except msgspec.MsgspecError as err:
            raise self._broken(f"its header makes no sense: {err}") from err
        raise RecordingError(
            f"{self._path} has format {known.format}, and aioprefill {__version__} reads up to {FORMAT}: "
            f"use the version that recorded it, {known.software}, or a later one"
        )

    def _frame(self) -> bytes | None:
        """The content of the next frame; None: the file ends, perhaps within it."""
        at = self._file.tell()
        head = self._read(FRAME_HEAD.size)
        if len(head) < FRAME_HEAD.size:
            return None
        try:
            length, check = frame_length(head)
            content = self._read(length)
            return checked(content, check) if len(content) == length else None
        except ValueError as err:
            raise self._broken(f"{err} at byte {at}") from err

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as err:
            raise RecordingError(f"{self._path}: {err.strerror}") from err

    def _broken(self, what: str) -> RecordingError:
        return RecordingError(f"{self._path} is damaged: {what}; the {self.calls} calls before can be read")
