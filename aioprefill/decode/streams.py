"""Who reads which room's tokens. Tokens wait for their reader, and a reader may wait for its room.

Rule: nothing waits for ever. A reader without a room is told after `patience_s`; a stream that nobody reads
is dropped as long after its end. Their number is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from aioprefill.errors import AioprefillError, InvalidRequest, QueueFull
from aioprefill.wire.failures import failed_from
from aioprefill.wire.messages import Failed, Finished, Message, Token

MAX_STREAMS = 65_536


@dataclass(slots=True)
class Stream:
    """Messages of one room on their way to one reader."""

    reader: bytes | None = None
    known: bool = False
    """The room has been heard of: a hand-off is under way, or was."""
    ended: bool = False
    waiting: list[Message] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class Streams:
    """Routes messages by room. `send(identity, message)` must not block; `on_unread(room)` says that the
    reader left: its tokens are of no use any more."""

    def __init__(
        self,
        send: Callable[[bytes, Message], None],
        on_unread: Callable[[str], None],
        *,
        patience_s: float = 60.0,
    ) -> None:
        self._send = send
        self._on_unread = on_unread
        self.is_coming: Callable[[str], bool] = lambda room: False
        """The room is announced and waits for memory: its reader's patience begins anew."""
        self._patience_s = patience_s
        self._streams: dict[str, Stream] = {}
        self._rooms_of: dict[bytes, set[str]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def expiring(self) -> int:
        """Streams that end by themselves, within `patience_s`: without a room, or ended and unread."""
        return sum(stream.timer is not None for stream in self._streams.values())

    def attach(self, reader: bytes, room: str) -> None:
        """A client wants the tokens of a room. Raises `InvalidRequest` when another one reads it already."""
        stream = self._get(room)
        if stream.reader not in (None, reader):
            raise InvalidRequest("request_id", f"{room!r} is being read by another client")
        stream.reader = reader
        self._rooms_of.setdefault(reader, set()).add(room)
        waiting, stream.waiting = stream.waiting, []
        if stream.ended:
            self._drop(room)
        elif not stream.known:
            self._start_timer(room, stream)
        for message in waiting:  # last: sending may find that the reader does not read, and call `gone`
            self._send(reader, message)

    def opened(self, room: str) -> None:
        """A hand-off of the room is under way."""
        stream = self._get(room)
        stream.known = True
        self._stop_timer(stream)

    def token(self, room: str, index: int, token_id: int) -> None:
        """Pass on one generated token."""
        self._pass_on(room, Token(room, index, token_id))

    def finished(self, room: str, reason: str, tokens: int) -> None:
        """The room's last token has been passed on."""
        self._end(room, Finished(room, reason, tokens))

    def failed(self, room: str, error: AioprefillError) -> None:
        """The room ends with an error."""
        if room in self._streams:
            self._end(room, failed_from(error, room))

    def gone(self, reader: bytes) -> None:
        """A client left: nobody reads its rooms any more."""
        for room in sorted(self._rooms_of.get(reader, ())):
            self.abandon(reader, room)

    def abandon(self, reader: bytes, room: str) -> None:
        """A client does not want a room's tokens any more. Rooms that it does not read are left alone."""
        if room in self._rooms_of.get(reader, ()):
            known = self._streams[room].known
            self._drop(room)
            if known:
                self._on_unread(room)

    def close(self) -> None:
        """Cancel every timer and forget everything."""
        for stream in self._streams.values():
            self._stop_timer(stream)
        self._streams.clear()
        self._rooms_of.clear()

    def _get(self, room: str) -> Stream:
        stream = self._streams.get(room)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                raise QueueFull(f"{MAX_STREAMS} streams are open", retry_after_s=self._patience_s)
            stream = self._streams[room] = Stream()
        return stream

    def _pass_on(self, room: str, message: Message) -> None:
        stream = self._streams.get(room)
        if stream is None:
            return  # its reader left
        if stream.reader is None:
            stream.waiting.append(message)
        else:
            self._send(stream.reader, message)

    def _end(self, room: str, message: Message) -> None:
        stream = self._streams.get(room)
        if stream is None:
            return
        stream.ended = True
        if stream.reader is None:
            stream.waiting.append(message)
            self._start_timer(room, stream)
        else:
            self._drop(room)  # first: sending may find that the reader does not read, and call `gone`
            self._send(stream.reader, message)

    def _start_timer(self, room: str, stream: Stream) -> None:
        self._stop_timer(stream)
        stream.timer = asyncio.get_running_loop().call_later(self._patience_s, self._expire, room)

    def _stop_timer(self, stream: Stream) -> None:
        if stream.timer is not None:
            stream.timer.cancel()
            stream.timer = None

    def _expire(self, room: str) -> None:
        stream = self._streams[room]
        stream.timer = None
        if stream.reader is not None and self.is_coming(room):
            self._start_timer(room, stream)
            return
        self._drop(room)
        if stream.reader is not None:
            text = f"no prefill instance has handed the request over within {self._patience_s:.0f} s"
            self._send(stream.reader, Failed("peer", text, room, field="prefill"))

    def _drop(self, room: str) -> None:
        stream = self._streams.pop(room)
        self._stop_timer(stream)
        if stream.reader is not None:
            rooms = self._rooms_of[stream.reader]
            rooms.discard(room)
            if not rooms:
                del self._rooms_of[stream.reader]
