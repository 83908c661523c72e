"""Moves messages between one raw ZMQ socket and the event loop; works on uvloop and asyncio.

Why not `zmq.asyncio`: it loses a message when a receive is cancelled, and starves the loop while mail
is waiting. Rules of the raw socket, each of which stalls the connection for ever when broken:

- The socket's file descriptor says "something happened", not "a message is there", and any send,
  receive or look at EVENTS may swallow that signal. So every turn ends with a look at EVENTS, and
  schedules the next turn itself when there is more to do.
- A turn is bounded in messages and time, and a turn that hit its bound schedules another one.
- A send only appends to the outbox and schedules a turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from aioprefill.errors import WireError
from aioprefill.wire.outbox import Offer, Outbox

MAX_OUTBOX_BYTES = 256 << 20
TURN_S = 0.002
"""Longest time that one turn goes on taking messages."""
RETRY_S = 0.01
"""How soon a message is offered again to a ROUTER peer that was full; nothing signals that case."""
# EHOSTUNREACH: a ROUTER does not know the peer. The others: its connection broke just now.
_GONE = frozenset({zmq.EHOSTUNREACH, zmq.ENOTCONN, zmq.ENETUNREACH, zmq.ENETRESET})
# EVENT_HANDSHAKE_FAILED_NO_DETAIL is not here: the connection broke meanwhile, so DISCONNECTED follows
_REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "not authorised (CURVE key not accepted)",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake failed (CURVE on one side only, or not ZMTP)",
}
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
for _event in _REFUSALS:
    _WATCHED |= _event


@dataclass(slots=True)
class PumpCounters:
    """Messages since the start."""

    received: int = 0
    sent: int = 0
    unreachable: int = 0
    """Dropped because the peer they were for is gone (ROUTER)."""
    errors: int = 0
    """Exceptions of `on_message`, and errors of the socket."""
    turns: int = 0


class ZmqPump:
    """Calls `on_message(frames)` for each message of `socket`, and sends without ever blocking.

    At most `batch` messages a turn; `max_outbox` messages wait to be sent, at most `max_per_peer` of them
    for one peer of a ROUTER (default: an eighth). `eager` hands a message to the socket within `send`, for
    clients, whose message is late otherwise by a turn of the loop. `name` is for error messages. An
    exception of `on_message` goes to `on_error` (default: the loop's exception handler); the pump goes on. A
    ROUTER with ROUTER_MANDATORY tells `on_unreachable` the identity whose message was dropped because that
    peer has left. The socket belongs to the pump, which closes it in `close`; closed by anybody else, it
    makes uvloop abort the process. Not thread-safe.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None],
        *,
        name: str,
        batch: int = 64,
        max_outbox: int = 65536,
        max_per_peer: int | None = None,
        eager: bool = False,
        on_error: Callable[[Exception], None] | None = None,
        on_unreachable: Callable[[bytes], None] | None = None,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._on_error = on_error or self._report
        self._on_unreachable = on_unreachable
        self._batch = batch
        self._eager = eager
        self._router = socket.type == zmq.ROUTER
        self._send_only = socket.type in (zmq.PUSH, zmq.PUB)
        self._outbox = Outbox(
            name,
            by_peer=self._router,
            max_messages=max_outbox,
            max_per_lane=(max_per_peer or max(1, max_outbox // 8)) if self._router else max_outbox,
            max_bytes=MAX_OUTBOX_BYTES,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._scheduled = False
        self._closed = False
        self._retry: asyncio.TimerHandle | None = None
        self._monitor: ZmqPump | None = None
        self.name = name
        self.counters = PumpCounters()

    def __repr__(self) -> str:
        counters = self.counters
        return (
            f"<ZmqPump {self.name} received={counters.received} sent={counters.sent} outbox={self.waiting}"
            f"{' closed' if self._closed else ''}>"
        )

    @property
    def waiting(self) -> int:
        """Messages that wait to be sent."""
        return len(self._outbox)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def start(self) -> None:
        """Begin, on the running loop. Raises `WireError` when closed or already started."""
        if self._closed or self._loop is not None:
            raise WireError(f"{self.name}: the pump is closed or was started before")
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._turn)
        self._schedule()  # the descriptor does not report what happened before
        if self._monitor is not None:
            self._monitor.start()

    def send(self, frames: list[bytes]) -> None:
        """Queue one message; `frames[0]` is the peer's identity on a ROUTER. Never blocks.

        Also before `start`. Raises `WireError` when the outbox is full or the pump is closed. A message
        to a ROUTER peer that has left is dropped and counted.
        """
        if self._closed:
            raise WireError(f"{self.name}: the connection is closed")
        self._outbox.push(frames)
        if self._eager and self._loop is not None:
            self._flush()
        self._schedule()

    def forget(self, identity: bytes) -> None:
        """Drop what waits for one peer of a ROUTER."""
        self._outbox.drop(identity)

    def slowest_peer(self) -> bytes | None:
        """The peer of a ROUTER for which most messages wait."""
        return self._outbox.fullest()

    def receive_pending(self) -> None:
        """Handle what has arrived already, without waiting for the loop's next turn.

        For use when the connection was lost: what the other side said before comes first.
        """
        while not self._closed and self._receive():
            pass

    def watch_connections(
        self,
        on_connected: Callable[[str], None],
        on_disconnected: Callable[[str], None],
        on_refused: Callable[[str, str], None] | None = None,
    ) -> None:
        """Report connections by endpoint: usable (handshake done), lost, refused (with a reason).

        Call it before `start`, and before connecting or binding, or early events are missed. A message
        that was received before a connection broke may be reported after the loss, and the other way
        round: the two come on different sockets.
        """

        def on_event(frames: list[bytes]) -> None:
            event = parse_monitor_message(frames)
            kind, endpoint = zmq.Event(event["event"]), event["endpoint"].decode(errors="replace")
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                on_connected(endpoint)
            elif kind == zmq.EVENT_DISCONNECTED:
                on_disconnected(endpoint)
            elif kind in _REFUSALS and on_refused is not None:
                on_refused(endpoint, _REFUSALS[kind])

        monitor = self._socket.get_monitor_socket(_WATCHED)
        self._monitor = ZmqPump(monitor, on_event, name=f"{self.name} monitor", on_error=self._on_error)

    def close(self, linger_ms: int = 0) -> None:
        """Stop and close the socket; does not wait. Idempotent.

        What the socket takes at once is handed to it and delivered within `linger_ms`; the rest of the
        outbox is dropped. May be called inside `on_message`.
        """
        if self._closed:
            return
        self._closed = True
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        if self._retry is not None:
            self._retry.cancel()
        if linger_ms and self._loop is not None:
            self._outbox.drain(self._offer, self.waiting)
        self._socket.close(linger=linger_ms)

    def _schedule(self) -> None:
        if self._loop is not None and not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_turn)

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        self._turn()

    def _turn(self) -> None:
        """Send, receive, look at EVENTS: in this order, see the rules at the top.

        What is answered to the messages received goes out in the next turn, so that what they woke runs
        first: a send may cost 150 µs, and a request's way to its admission is not to wait for its receipt.
        """
        if self._closed:
            return
        self.counters.turns += 1
        self._flush()
        hit_bound = self._receive()
        if self._closed:
            return
        events = int(self._socket.getsockopt(zmq.EVENTS))
        if not self._router and events & zmq.POLLOUT:
            self._outbox.retry_blocked()
        if hit_bound or events & zmq.POLLIN or self._outbox.has_ready:
            self._schedule()
        if self._outbox.has_blocked and self._router and self._retry is None and self._loop is not None:
            self._retry = self._loop.call_later(RETRY_S, self._retry_blocked)

    def _receive(self) -> bool:
        """Take messages; True when there may be more."""
        if self._send_only:
            return False
        deadline = time.perf_counter() + TURN_S
        for _ in range(self._batch):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            except zmq.ZMQError as err:
                self._fail(err)
                self.close()  # its context was ended under our feet
                return False
            self.counters.received += 1
            try:
                self._on_message(frames)
            except Exception as err:
                self._fail(err)
            if self._closed:
                return False
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False  # cheaper to ask than to be refused
            if time.perf_counter() >= deadline:
                break
        return True

    def _flush(self) -> None:
        sent, dropped = self._outbox.drain(self._offer, 4 * self._batch)
        self.counters.sent += sent
        self.counters.unreachable += dropped

    def _offer(self, frames: list[bytes]) -> Offer:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return Offer.BLOCKED
        except zmq.ZMQError as err:
            if err.errno not in _GONE:
                self._fail(err)
            elif self._on_unreachable is not None and self._loop is not None:
                self._loop.call_soon(self._on_unreachable, frames[0])  # not amid a walk over the outbox
            return Offer.GONE
        return Offer.SENT

    def _retry_blocked(self) -> None:
        self._retry = None
        self._outbox.retry_blocked()
        self._turn()

    def _fail(self, error: Exception) -> None:
        self.counters.errors += 1
        self._on_error(error)

    def _report(self, error: Exception) -> None:
        context: dict[str, Any] = {"message": f"{self.name}: error in a message handler", "exception": error}
        (self._loop or asyncio.get_running_loop()).call_exception_handler(context)
