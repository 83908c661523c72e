"""A ROUTER that speaks `aioprefill.wire.messages`: hello and version, dispatch, who is there and who left.

Rules:
- What one client sends never hurts another, nor the server: what cannot be understood is answered with
  `Failed` and counted.
- Nothing is done for a client before its `Hello` with the right version.
- A client is gone when its connection is: closed, reset, killed, or silent past the heartbeat. ZMQ does
  not say whose connection broke, so after each loss all clients are sent a `Ping`, which ROUTER_MANDATORY
  refuses for those who left.
- A client that does not read what it is sent is dropped before it fills the memory.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import zmq

from aioprefill.errors import AioprefillError, ConfigError, WireError
from aioprefill.wire.failures import failed_from
from aioprefill.wire.messages import (
    VERSION,
    Failed,
    Hello,
    Message,
    Ping,
    Pong,
    Welcome,
    decode,
    encode,
    ids_of,
)
from aioprefill.wire.pump import ZmqPump
from aioprefill.wire.security import Authenticator, CurveKeys, apply_server_security
from aioprefill.wire.sockets import Context, SocketLimits, end_context

Handlers = Mapping[type[Any], Callable[[bytes, Any], None]]
"""By message type: called with the client's identity and the message, on the loop. Must not block."""

MAX_CLIENTS = 4096
PROBE_SOON_S = 0.02
PROBE_LATE_S = 0.5
"""When to look who left after a connection was lost: ZMQ takes a moment to forget a peer."""


@dataclass(slots=True)
class ServerCounters:
    """Since the start."""

    hellos: int = 0
    gone: int = 0
    malformed: int = 0
    unexpected: int = 0
    """Well-formed messages that this server does not take."""
    without_hello: int = 0
    wrong_version: int = 0
    disconnects: int = 0
    """Connections that ended, also before their handshake was done."""
    slow_clients: int = 0
    """Dropped because they did not read."""


class WireServer:
    """Serves one endpoint: tcp://HOST:PORT, port 0 takes any free one (`endpoint` then says which).

    `welcome` answers a good `Hello`; `on_hello(identity, hello)` comes right after it was sent.
    `handlers` get the messages of greeted clients (`Hello`, `Ping` and `Pong` are handled here); an
    `AioprefillError` that one raises is answered with `Failed`. `on_gone(identity)` is called once for
    a greeted client that left. All callbacks run on the loop. `async with` starts and ends it.
    """

    def __init__(
        self,
        endpoint: str,
        handlers: Handlers,
        *,
        welcome: Welcome,
        on_hello: Callable[[bytes, Hello], None] | None = None,
        on_gone: Callable[[bytes], None] | None = None,
        keys: CurveKeys | None = None,
        limits: SocketLimits | None = None,
        max_clients: int = MAX_CLIENTS,
        max_outbox: int = 1 << 18,
        name: str | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.counters = ServerCounters()
        self._handlers = handlers
        self._welcome = welcome
        self._on_hello = on_hello
        self._on_gone = on_gone
        self._keys = keys
        self._limits = limits or SocketLimits()
        self._max_clients = max_clients
        self._max_outbox = max_outbox
        self._name = name or f"{welcome.role} server"
        self._ping = encode(Ping(welcome.epoch))
        self._clients: dict[bytes, str] = {}  # identity -> epoch
        self._context: Context | None = None
        self._pump: ZmqPump | None = None
        self._authenticator: Authenticator | None = None
        self._probes: dict[float, asyncio.TimerHandle] = {}

    def __repr__(self) -> str:
        return f"<WireServer {self._name} {self.endpoint} clients={len(self._clients)}>"

    @property
    def clients(self) -> int:
        """Greeted clients that are connected."""
        return len(self._clients)

    @property
    def closed(self) -> bool:
        """True when nothing can be sent: before `start` and after `close`."""
        return self._pump is None or self._pump.closed

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def start(self) -> None:
        """Bind and serve, on the running loop.

        Raises `ConfigError` when the endpoint is malformed, taken, not ours, or off loopback without keys.
        """
        context = self._context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            self._limits.apply(socket, self.endpoint)
            for option in (zmq.ROUTER_HANDOVER, zmq.ROUTER_MANDATORY):
                socket.setsockopt(option, 1)
            socket.setsockopt(zmq.BACKLOG, 1024)
            self._authenticator = apply_server_security(socket, self.endpoint, self._keys)
            if self._authenticator is not None:
                self._authenticator.start()
            pump = ZmqPump(
                socket,
                self._on_frames,
                name=f"{self._name} {self.endpoint}",
                max_outbox=self._max_outbox,
                on_unreachable=self._lose,
            )
            pump.watch_connections(_ignore, self._on_disconnected)
            self._bind(socket)
        except BaseException:
            self.close()  # first, since a watched descriptor must not be closed
            context.destroy(linger=0)
            self._context = None
            raise
        self._pump = pump
        pump.start()

    def _bind(self, socket: zmq.Socket[bytes]) -> None:
        try:
            socket.bind(self.endpoint)
        except zmq.ZMQError as err:
            port = self.endpoint.rpartition(":")[2]
            reason = {
                errno.EADDRINUSE: f"port {port} is in use: stop the process that has it, or choose another "
                "port (0 takes any free one)",
                errno.EADDRNOTAVAIL: "this machine has no such address",
                errno.ENODEV: "this machine has no such interface or address",
            }.get(err.errno or 0, str(err))
            raise ConfigError(f"{self._name} cannot serve on {self.endpoint}: {reason}") from err
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def send(self, identity: bytes, message: Message) -> None:
        """Queue a message for a client. Never blocks; for one that left it is dropped and counted.

        A client that lets too many messages wait is dropped (`on_gone`). Raises `WireError` for a
        message that is too large, or when the server is closed.
        """
        if self._pump is None:
            raise WireError(f"{self._name} {self.endpoint}: not serving")
        frames = [identity, encode(message)]
        try:
            self._pump.send(frames)
        except WireError:
            if self._pump.closed:
                raise
            slowest = self._pump.slowest_peer()
            self._drop_slow(identity if slowest is None else slowest)
            if slowest != identity:
                self._pump.send(frames)

    def receive_pending(self) -> None:
        """Handle what has arrived already, before closing."""
        if self._pump is not None:
            self._pump.receive_pending()

    def drop(self, identity: bytes, reason: str) -> None:
        """Forget a client, which is told to say hello again; `on_gone` is called."""
        if self._pump is not None and not self.closed:
            self._pump.forget(identity)
            self._pump.send([identity, encode(Failed("hello_required", reason))])
        self._lose(identity)

    def close(self, linger_ms: int = 0) -> None:
        """Stop serving; does not wait. Queued messages go out within `linger_ms`. Idempotent.

        `on_gone` is not called. `aclose` must follow, to end the context.
        """
        for timer in self._probes.values():
            timer.cancel()
        self._probes.clear()
        self._clients.clear()
        if self._pump is not None:
            self._pump.close(linger_ms)
        if self._authenticator is not None:
            self._authenticator.close()

    async def aclose(self, linger_ms: int = 500) -> None:
        """Close and wait until queued messages are out, at most `linger_ms`, and threads are gone."""
        self.close(linger_ms)
        context, self._context = self._context, None
        if context is not None:
            await end_context(context)

    def _on_frames(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            if len(frames) != 2:
                raise WireError(f"malformed message: expected 1 frame, got {len(frames) - 1}")
            message = decode(frames[1])
        except WireError as err:
            self.counters.malformed += 1
            # with its id, or whoever waits for its answer does so for ever
            request_id, op_id = ids_of(frames[1]) if len(frames) == 2 else (None, None)
            self.send(identity, failed_from(err, request_id, op_id=op_id))
            return
        if type(message) is Hello:
            self._greet(identity, message)
        elif identity not in self._clients:
            self.counters.without_hello += 1
            self.send(
                identity, Failed("hello_required", f"{self._name}: say hello first (was it restarted?)")
            )
        elif type(message) is Ping:
            self.send(identity, Pong(self._welcome.epoch))
        elif type(message) is not Pong:
            self._dispatch(identity, message)

    def _dispatch(self, identity: bytes, message: Message) -> None:
        handler = self._handlers.get(type(message))
        request_id, op_id = (getattr(message, name, None) for name in ("request_id", "op_id"))
        if handler is None:
            self.counters.unexpected += 1
            text = f"a {self._welcome.role} server takes no {type(message).__name__} messages"
            self.send(identity, Failed(WireError.code, text, request_id, op_id=op_id))
            return
        try:
            handler(identity, message)
        except AioprefillError as err:
            self.send(identity, failed_from(err, request_id, op_id=op_id))
        except Exception:
            text = "the server failed to handle the message"
            self.send(identity, Failed("internal", text, request_id, op_id=op_id))
            raise

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if hello.version != VERSION:
            self.counters.wrong_version += 1
            text = (
                f"{self.endpoint} speaks version {VERSION} of the protocol, this client version "
                f"{hello.version}: install the same aioprefill on both sides"
            )
            self.send(identity, Failed(WireError.code, text))
            return
        known = self._clients.get(identity)
        if known is not None and known != hello.epoch:
            self._lose(identity)  # another process took over the identity
        if identity not in self._clients and len(self._clients) >= self._max_clients:
            text = f"{self.endpoint} has {self._max_clients} clients already, and takes no more"
            self.send(identity, Failed(WireError.code, text))
            return
        self.counters.hellos += 1
        self._clients[identity] = hello.epoch
        self.send(identity, self._welcome)
        if self._on_hello is not None:
            self._on_hello(identity, hello)

    def _drop_slow(self, identity: bytes) -> None:
        self.counters.slow_clients += 1
        self.drop(identity, f"{self.endpoint} dropped this client because it did not read")

    def _lose(self, identity: bytes) -> None:
        if self._clients.pop(identity, None) is None:
            return
        self.counters.gone += 1
        if self._on_gone is not None:
            self._on_gone(identity)

    def _on_disconnected(self, endpoint: str) -> None:
        self.counters.disconnects += 1
        loop = asyncio.get_running_loop()
        if PROBE_SOON_S not in self._probes:
            self._probes[PROBE_SOON_S] = loop.call_later(PROBE_SOON_S, self._probe, PROBE_SOON_S)
        late = self._probes.pop(PROBE_LATE_S, None)
        if late is not None:
            late.cancel()
        self._probes[PROBE_LATE_S] = loop.call_later(PROBE_LATE_S, self._probe, PROBE_LATE_S)

    def _probe(self, timer: float) -> None:
        del self._probes[timer]
        if self._pump is None:
            return
        for identity in list(self._clients):
            try:
                self._pump.send([identity, self._ping])
            except WireError:
                self._drop_slow(identity)


def _ignore(endpoint: str) -> None:
    """A connection is nothing before its hello."""
