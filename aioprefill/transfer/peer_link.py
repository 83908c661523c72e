"""The prefill side's connection to one decode peer: a DEALER, its session, and one timer.

A socket serves one connection. When that is lost the socket is closed and a new one connects, so that
nothing meant for a dead process reaches its successor.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Protocol

import zmq

from aioprefill.errors import ConfigError, WireError
from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.agent_events import RemotePool
from aioprefill.transfer.peer_session import (
    AddRemote,
    Lost,
    PeerSession,
    Ready,
    RemoveRemote,
    Say,
    SessionCommand,
)
from aioprefill.wire.messages import Bootstrap, Cancel, Commit, Message, Ping, Pong, PoolInfo, decode, encode
from aioprefill.wire.pump import ZmqPump
from aioprefill.wire.security import CurveKeys, apply_client_security
from aioprefill.wire.sockets import Context, SocketLimits

# Without ZMQ's heartbeats a connection is closed only by its other end, and a stopped peer keeps it: its
# messages wait for it. Silence is what the lease is for.
LIMITS = SocketLimits(heartbeat_ms=0, heartbeat_timeout_ms=0)
RECONNECT_S = 0.1
LINGER_MS = 200
IDLE_LINK_S = 300.0
"""A link that no room has waited for in this time is reported idle, each second."""


class LinkOwner(Protocol):
    """What a link needs of the transfer that it belongs to. All calls are on the loop."""

    def add_remote(self, link: PeerLink, remote: RemotePool) -> None: ...

    def remove_remote(self, name: str, grace_s: float) -> None: ...

    def peer_ready(self, link: PeerLink) -> None: ...

    def peer_lost(self, link: PeerLink, reason: str, *, unannounced_too: bool) -> None: ...

    def room_message(self, link: PeerLink, message: Message) -> None: ...

    def is_waiting(self, link: PeerLink) -> bool: ...

    def link_idle(self, link: PeerLink) -> None: ...


class PeerLink:
    """Messages to and from the decode worker at `endpoint`. Times are seconds."""

    def __init__(
        self,
        endpoint: str,
        owner: LinkOwner,
        context: Context,
        layout: KVLayout,
        *,
        keys: CurveKeys | None,
        lease_s: float,
        ping_s: float,
    ) -> None:
        self.endpoint = endpoint
        self.epoch = secrets.token_hex(8)
        self._owner = owner
        self._context = context
        self._keys = keys
        self._ping_s = ping_s
        self._loop = asyncio.get_running_loop()
        self.session = PeerSession(endpoint, layout, self.epoch, self._loop.time(), lease_s=lease_s)
        self._used_at = self._loop.time()
        self._pump: ZmqPump | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reconnect: asyncio.TimerHandle | None = None
        self._cancels: dict[int, Cancel] = {}
        """By ticket, those that the peer may not have got: said again when the same process is back."""
        self._confirming: dict[int, Cancel] | None = None
        """Cancels that the next `Pong` confirms, since they went out before its `Ping`."""
        self._closed = False

    def __repr__(self) -> str:
        return f"<PeerLink {self.endpoint} {self.session.state.value}>"

    def start(self) -> None:
        """Connect. Raises `ConfigError` for an endpoint that is malformed, or off loopback without keys."""
        self._connect()
        self._timer = self._loop.call_later(self._ping_s, self._tick)

    def close(self) -> None:
        """Send what is queued, within a moment, and close. Does not wait. Idempotent."""
        self._closed = True
        for timer in (self._timer, self._reconnect):
            if timer is not None:
                timer.cancel()
        if self._pump is not None:
            self._pump.close(LINGER_MS)

    def tell(self, message: Bootstrap | Commit | Cancel) -> None:
        """Send a room's message. A Cancel is kept until the process that it is meant for has it."""
        if isinstance(message, Cancel):
            self._cancels[message.ticket] = message
            if not self.session.can_cancel:
                return
        self._send(message)

    def introduce(self, info: PoolInfo) -> None:
        """Tell the peer who we are, so that it can find out whether we still exist."""
        self._send(info)

    def remote_added(self) -> None:
        """Our agent knows this peer's."""
        self._obey(self.session.remote_added())

    def remote_failed(self, reason: str) -> None:
        """Our agent cannot use this peer's."""
        self._obey(self.session.remote_failed(reason, self._loop.time()))

    def _connect(self) -> None:
        self._reconnect = None
        socket = self._context.socket(zmq.DEALER)
        pump = ZmqPump(socket, self._on_frames, name=f"link to {self.endpoint}")
        try:
            LIMITS.apply(socket, self.endpoint)
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            apply_client_security(socket, self.endpoint, self._keys)
            pump.watch_connections(self._on_connected, self._on_disconnected, self._on_refused)
            socket.connect(self.endpoint)
        except zmq.ZMQError as err:
            pump.close()
            raise ConfigError(f"endpoint {self.endpoint}: {err}") from err
        except BaseException:
            pump.close()
            raise
        pump.start()
        self._pump = pump

    def _on_connected(self, endpoint: str) -> None:
        self._obey(self.session.connected(self._loop.time()))

    def _on_disconnected(self, endpoint: str) -> None:
        pump, self._pump = self._pump, None
        if pump is None or self._closed:
            return
        pump.receive_pending()  # its last words come before its death
        pump.close()
        self._obey(self.session.disconnected())
        self._confirming = None
        self._reconnect = self._loop.call_later(RECONNECT_S, self._connect_again)

    def _connect_again(self) -> None:
        try:
            self._connect()
        except ConfigError as err:  # it worked before: out of sockets or memory, which may pass
            self.session.refused(str(err))
            self._reconnect = self._loop.call_later(self._ping_s, self._connect_again)

    def _on_refused(self, endpoint: str, reason: str) -> None:
        self.session.refused(reason)

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames[-1])
        except WireError as err:
            self.session.refused(str(err))  # it will fall silent, for this reason
            return
        self._obey(self.session.message(message, self._loop.time()))
        if isinstance(message, Pong):
            self._confirm_cancels()
        self._owner.room_message(self, message)

    def _tick(self) -> None:
        now = self._loop.time()
        self._timer = self._loop.call_later(self._ping_s, self._tick)
        waiting = self._owner.is_waiting(self)
        if waiting:
            self._used_at = now
        self._obey(self.session.tick(now, waiting=waiting))
        if now - self._used_at > IDLE_LINK_S:
            self._owner.link_idle(self)

    def _obey(self, commands: list[SessionCommand]) -> None:
        for command in commands:
            match command:
                case Say(message):
                    if isinstance(message, Ping) and self._confirming is None:
                        self._confirming = dict(self._cancels)
                    self._send(message)
                case AddRemote(remote):
                    self._cancels.clear()  # another process: what was to be cancelled went with the old one
                    self._owner.add_remote(self, remote)
                case RemoveRemote(name, grace_s):
                    self._owner.remove_remote(name, grace_s)
                case Ready():
                    for cancel in self._cancels.values():
                        self._send(cancel)
                    self._owner.peer_ready(self)
                case Lost(reason, unannounced_too):
                    self._owner.peer_lost(self, reason, unannounced_too=unannounced_too)

    def _confirm_cancels(self) -> None:
        confirmed, self._confirming = self._confirming or {}, None
        for ticket, cancel in confirmed.items():
            if self._cancels.get(ticket) is cancel:
                del self._cancels[ticket]

    def _send(self, message: Message) -> None:
        if self._pump is None or self._closed:
            return
        if isinstance(message, Ping) and self._pump.waiting:
            return  # it does not read: pings would only pile up
        try:
            self._pump.send([encode(message)])
        except WireError as err:
            self._owner.peer_lost(self, str(err), unannounced_too=True)
