"""A client's connection to one server: opened when needed, greeted, and given up as soon as it breaks.

Rules:
- ZMQ would reconnect by itself and deliver old messages to a new server. Here a lost connection is closed,
  everything that waits on it fails, and the next message opens a fresh one.
- Nothing but `Hello` is sent before `Welcome`; until then messages are held. A connection that breaks
  before it is tried again (a server that starts or dies does that), until the timeout fails all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable

import zmq

from aioprefill.errors import WireError
from aioprefill.wire.messages import Failed, Hello, Message, Ping, Pong, Welcome, decode, encode
from aioprefill.wire.outbox import Offer, Outbox
from aioprefill.wire.pump import MAX_OUTBOX_BYTES, ZmqPump
from aioprefill.wire.security import CurveKeys, apply_client_security
from aioprefill.wire.sockets import Context, SocketLimits

MAX_HELD = 65536
RETRY_S = 0.1
log = logging.getLogger(__name__)

# many small messages, so that a client that is busy for a moment does not hold its heartbeat back
CLIENT_LIMITS = SocketLimits(receive_queue=100_000)


class Connection:
    """Messages to and from the server at `endpoint`; `command` is how to start one, for error messages.

    `on_message` gets all but `Welcome`, `Ping` and hello errors. `on_lost(error)` is called once for each
    connection that ended other than by `close`. Both run on the loop. Times are seconds.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        on_message: Callable[[Message], None],
        on_lost: Callable[[WireError], None],
        command: str,
        role: str = "client",
        epoch: str | None = None,
        keys: CurveKeys | None = None,
        timeout_s: float = 5.0,
        limits: SocketLimits = CLIENT_LIMITS,
    ) -> None:
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        """Of the server now connected, or the last one."""
        self._context = context
        self._on_message = on_message
        self._on_lost = on_lost
        self._command = command
        self._hello = Hello(role, epoch or secrets.token_hex(8))
        self._keys = keys
        self._timeout_s = timeout_s
        self._limits = limits
        self._pump: ZmqPump | None = None
        self._ready: asyncio.Future[Welcome] | None = None
        """None: there is no connection. Not done: it is being made."""
        self._held = self._new_outbox()
        self._timers: list[asyncio.TimerHandle] = []
        self._broken = 0
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._ready is None else "ready" if self._is_ready else "opening"
        return f"<Connection {self.endpoint} {state}>"

    @property
    def _is_ready(self) -> bool:
        return self._ready is not None and self._ready.done()

    def open(self) -> None:
        """Connect and say hello, if there is no connection. Does not wait. Raises as `send` does."""
        self._open()

    def send(self, message: Message) -> None:
        """Queue a message; opens the connection when there is none. Never blocks.

        Raises `WireError` when too much waits already, or after `close`; `ConfigError` for an endpoint
        that is malformed, or off loopback without keys.
        """
        frame = encode(message)
        self._open()
        if self._is_ready and self._pump is not None:
            self._pump.send([frame])
        else:
            self._held.push([frame])

    def send_if_open(self, message: Message) -> None:
        """Queue a message that is of no use to another connection than this one, or drop it."""
        if self._ready is not None:
            with contextlib.suppress(WireError):
                self.send(message)

    async def wait_ready(self) -> Welcome:
        """Open the connection and wait for the server's `Welcome`.

        Raises `WireError` when none comes within the timeout, or the server refuses. Cancelling the wait
        leaves the connection as it is.
        """
        return await asyncio.shield(self._open())

    def close(self) -> None:
        """Close at once; `on_lost` is not called. What was queued may be lost. Idempotent."""
        self._closed = True
        self._shut(WireError(f"{self.endpoint}: the client was closed"))

    def _open(self) -> asyncio.Future[Welcome]:
        if self._closed:
            raise WireError(f"{self.endpoint}: the client was closed")
        if self._ready is None:
            self._connect()
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            self._ready.add_done_callback(_consume)
            self._timers = [loop.call_later(self._timeout_s, self._on_timeout)]
            self._broken = 0
        return self._ready

    def _connect(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        pump = ZmqPump(socket, self._on_frames, name=f"connection to {self.endpoint}", eager=True)
        try:
            self._limits.apply(socket, self.endpoint)
            apply_client_security(socket, self.endpoint, self._keys)
            pump.watch_connections(_ignore, self._on_disconnected, self._on_refused)
            socket.connect(self.endpoint)
        except zmq.ZMQError as err:
            pump.close()
            raise WireError(f"cannot connect to {self.endpoint}: {err}") from err
        except BaseException:
            pump.close()
            raise
        self._pump = pump
        pump.start()
        pump.send([encode(self._hello)])

    def _reconnect(self) -> None:
        try:
            self._connect()
        except WireError as err:
            self._lose(err)

    def _new_outbox(self) -> Outbox:
        return Outbox(
            f"connection to {self.endpoint}",
            by_peer=False,
            max_messages=MAX_HELD,
            max_per_lane=MAX_HELD,
            max_bytes=MAX_OUTBOX_BYTES,
        )

    def _shut(self, error: WireError) -> None:
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.close()
        for timer in self._timers:
            timer.cancel()
        ready, self._ready = self._ready, None
        self._held = self._new_outbox()
        if ready is not None and not ready.done():
            ready.set_exception(error)

    def _lose(self, error: WireError) -> None:
        if self._ready is not None:
            self._shut(error)
            self._on_lost(error)

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames[-1])
        except WireError as err:
            self._lose(WireError(f"{self.endpoint}: the server sent something unreadable: {err}"))
            return
        if isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Ping):
            self.send_if_open(Pong(self._hello.epoch))
        elif isinstance(message, Failed) and message.request_id is None and message.op_id is None:
            self._on_failed(message)
        else:
            self._on_message(message)

    def _on_welcome(self, welcome: Welcome) -> None:
        pump, ready = self._pump, self._ready
        if pump is None or ready is None or ready.done():
            return
        self.welcome = welcome
        for timer in self._timers:
            timer.cancel()
        ready.set_result(welcome)
        held, self._held = self._held, self._new_outbox()

        def forward(frames: list[bytes]) -> Offer:
            pump.send(frames)
            return Offer.SENT

        held.drain(forward, len(held))

    def _on_failed(self, failed: Failed) -> None:
        if failed.code == "hello_required":
            self._lose(WireError(f"{self.endpoint}: the server forgot this client: {failed.message}"))
        elif not self._is_ready:
            self._lose(WireError(f"{self.endpoint}: the server refused this client: {failed.message}"))
        else:
            log.warning("%s: %s", self.endpoint, failed.message)

    def _on_disconnected(self, endpoint: str) -> None:
        pump = self._pump
        if pump is None:
            return
        pump.receive_pending()  # its last words come before its death
        if self._pump is not pump:
            return
        if self._is_ready:
            text = "the server went away (connection lost): submit the request again when it is back"
            self._lose(WireError(f"{self.endpoint}: {text}"))
            return
        self._pump = None
        pump.close()
        self._broken += 1
        self._timers[1:] = [asyncio.get_running_loop().call_later(RETRY_S, self._reconnect)]

    def _on_refused(self, endpoint: str, reason: str) -> None:
        self._lose(WireError(f"{self.endpoint}: the server refused the connection: {reason}"))

    def _on_timeout(self) -> None:
        text = f"no answer from {self.endpoint} within {self._timeout_s:g} s"
        if self._broken:
            text += f", it closed the connection {self._broken} times (keys on one side only?)"
        self._lose(WireError(f"{text}: is `{self._command}` running?"))


def _consume(future: asyncio.Future[Welcome]) -> None:
    """Mark the exception as seen: nobody need wait for the welcome."""
    if not future.cancelled():
        future.exception()


def _ignore(endpoint: str) -> None:
    """The answer to the hello is what counts."""
