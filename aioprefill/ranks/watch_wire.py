"""The sockets of a watch thread: rank 0 hears everybody and tells everybody, the others have rank 0.

Made in the loop's thread, then used in the watch thread alone. ZMQ's monitor tells of a closed connection
at once. Connections of strangers come and go without being told of: rank 0 knows a rank's connection by the
descriptor that its beats come from.

Rule: the monitor is read before the mail and counts after it, so that what a rank said before it closed its
connection, such as a farewell, comes first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from aioprefill.ranks.beats import Beat, Row
from aioprefill.ranks.wires import Socket, Wired, dial

QUEUE = 64
"""Messages that wait for a rank which does not read; further ones are dropped: newer ones say more."""
LINGER_MS = 200
"""For the farewell."""
BATCH = 1000
"""Messages read in one go."""

_encoder = msgspec.msgpack.Encoder()
_beat_decoder = msgspec.msgpack.Decoder(Beat)
_rows_decoder = msgspec.msgpack.Decoder(list[Row])


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection of a rank is closed."""

    rank: int


News: TypeAlias = "Beat | list[Row] | Closed"


class WatchWire(Protocol):
    """What a watch thread needs of its sockets."""

    def register(self, poller: zmq.Poller) -> None:
        """Wake the poller when there is something to `take`."""

    def take(self) -> list[News]:
        """What came. Raises `msgspec.MsgspecError` for what is no message of this version."""

    def tell(self, beat: Beat, rows: Sequence[Row]) -> None:
        """This rank's beat, or on rank 0 what it knows; never blocks."""

    def close(self) -> None:
        """Deliver what was told within `LINGER_MS`, and end. Idempotent."""


class Hub:
    """Rank 0's side."""

    def __init__(self, group: Wired) -> None:
        bound = group.wires.take_watch()
        self._context = bound.context
        self._gate = bound.gate
        (self._socket,) = bound.sockets
        self._socket.sndhwm = QUEUE
        self._monitor: Socket = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._ranks = range(1, group.place.size)
        self._connections: dict[int, int] = {}
        """Ranks by the descriptor of their connection."""

    def register(self, poller: zmq.Poller) -> None:
        """See `WatchWire.register`."""
        for socket in (self._socket, self._monitor, self._gate.socket):
            poller.register(socket, zmq.POLLIN)

    def take(self) -> list[News]:
        """See `WatchWire.take`."""
        for question in _mail(self._gate.socket, 1):  # a REP socket wants its answer first
            self._gate.socket.send_multipart(self._gate.answer(question))
        ended = [parse_monitor_message(frames)["value"] for frames in _mail(self._monitor, BATCH)]
        news: list[News] = list(self._beats())
        for descriptor in ended:
            rank = self._connections.pop(descriptor, None)
            if rank is not None:
                news.append(Closed(rank))
        return news

    def _beats(self) -> list[Beat]:
        beats: list[Beat] = []
        with contextlib.suppress(zmq.Again):
            while len(beats) < BATCH:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                beat = _beat_decoder.decode(frames[-1].buffer)
                if frames[-1].get("User-Id") != str(beat.rank):
                    raise msgspec.ValidationError(f"a beat says that it is of rank {beat.rank}, and is not")
                self._connections[int(frames[-1].get(zmq.SRCFD))] = beat.rank
                beats.append(beat)
        return beats

    def tell(self, beat: Beat, rows: Sequence[Row]) -> None:
        """See `WatchWire.tell`. A rank that is not connected, or does not read, misses it."""
        data = _encoder.encode(rows)
        for rank in self._ranks:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([identity_of(rank), data], zmq.NOBLOCK)

    def close(self) -> None:
        """See `WatchWire.close`."""
        _end(self._context, self._socket, self._monitor)
        self._gate.socket.close()
        self._context.term()


class Spoke:
    """A follower's side."""

    def __init__(self, group: Wired) -> None:
        wires, rank = group.wires, group.place.rank
        self._context: zmq.Context[Socket] = zmq.Context()
        endpoint = wires.addresses.watch
        self._socket = dial(self._context, endpoint, wires.server, wires.keys, identity_of(rank))
        self._socket.sndhwm = QUEUE
        # CLOSED: rank 0 was gone before the connection was made
        self._monitor: Socket = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._socket.connect(endpoint)

    def register(self, poller: zmq.Poller) -> None:
        """See `WatchWire.register`."""
        for socket in (self._socket, self._monitor):
            poller.register(socket, zmq.POLLIN)

    def take(self) -> list[News]:
        """See `WatchWire.take`."""
        ended = _mail(self._monitor, BATCH)
        news: list[News] = [_rows_decoder.decode(frames[-1]) for frames in _mail(self._socket, BATCH)]
        return [*news, Closed(0)] if ended else news

    def tell(self, beat: Beat, rows: Sequence[Row]) -> None:
        """See `WatchWire.tell`."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(_encoder.encode(beat), zmq.NOBLOCK)

    def close(self) -> None:
        """See `WatchWire.close`."""
        _end(self._context, self._socket, self._monitor)
        self._context.term()


def identity_of(rank: int) -> bytes:
    """A rank's name on the watch's socket."""
    return b"rank-%d" % rank


def _mail(socket: Socket, limit: int) -> list[list[bytes]]:
    mail: list[list[bytes]] = []
    with contextlib.suppress(zmq.Again):
        while len(mail) < limit:
            mail.append(socket.recv_multipart(zmq.NOBLOCK))
    return mail


def _end(context: zmq.Context[Socket], socket: Socket, monitor: Socket) -> None:
    if not socket.closed:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=LINGER_MS)
