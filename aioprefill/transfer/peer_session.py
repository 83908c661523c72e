"""What the prefill side knows of one decode peer: connected, greeted, usable, silent. Pure.

Rules
- A closed connection fails the rooms that the peer knows of; those it does not may wait for its return.
- Silence past the lease fails all rooms: a stopped process breaks no connection. Silence is no proof of
  death, so the agent of a silent peer is kept, and with it the pages of live writes.
- Known dead is a peer in whose place another process (another agent) has answered for a whole lease. In all
  other cases NIXL's own verdict on each write is waited for.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.agent_events import RemotePool
from aioprefill.transfer.pool_info import misfit, remote_pool
from aioprefill.wire.messages import VERSION, Failed, Hello, Message, Ping, Pong, PoolInfo, Welcome


class SessionState(enum.Enum):
    """How far the connection to a peer is."""

    UNCONNECTED = "unconnected"
    GREETING = "greeting"
    ADDING = "adding"
    """Its pool fits; our agent is making its agent known."""
    READY = "ready"
    SILENT = "silent"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Say:
    """Send to the peer, outside any room."""

    message: Hello | Ping | Pong


@dataclass(frozen=True, slots=True)
class AddRemote:
    """Make the peer's agent known to ours."""

    remote: RemotePool


@dataclass(frozen=True, slots=True)
class RemoveRemote:
    """Forget the peer's agent when its writes are terminal, or after `grace_s`: it is dead by then."""

    name: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """Rooms may be announced. `returned`: it is the process that we had before."""

    returned: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """Rooms fail: all, or those that the peer knows of."""

    reason: str
    unannounced_too: bool


SessionCommand = Say | AddRemote | RemoveRemote | Ready | Lost


class PeerSession:
    """State of the connection to `endpoint`. Times are seconds on any monotonic clock."""

    def __init__(self, endpoint: str, layout: KVLayout, epoch: str, now: float, *, lease_s: float) -> None:
        self.endpoint = endpoint
        self.epoch = epoch
        self.state = SessionState.UNCONNECTED
        self.agent: str | None = None
        """The peer's NIXL agent, while ours knows it (or is being told)."""
        self.pool_pages = 0
        self.rejection: str | None = None
        self._layout = layout
        self._lease_s = lease_s
        self._added = False
        self._peer_epoch: str | None = None
        self._problem = ""
        self._last_heard = self._waiting_since = self._last_tick = self._rejected_at = now

    def __repr__(self) -> str:
        return f"<PeerSession {self.endpoint} {self.state.value} agent={self.agent}>"

    @property
    def can_cancel(self) -> bool:
        """True while a Cancel reaches the process that it is meant for."""
        return self.state in (SessionState.READY, SessionState.SILENT)

    def connected(self, now: float) -> list[SessionCommand]:
        """The connection is up (again)."""
        self.state = SessionState.GREETING
        self.rejection = None
        self._last_heard = now
        return [Say(Hello(role="prefill", epoch=self.epoch))]

    def disconnected(self) -> list[SessionCommand]:
        """The connection was closed."""
        if self.state is SessionState.UNCONNECTED:
            return []
        self.state = SessionState.UNCONNECTED
        self.rejection = None
        return [Lost("the connection was closed: its process ended or restarts", unannounced_too=False)]

    def refused(self, problem: str) -> None:
        """A connection attempt failed; kept for the message of a later failure."""
        self._problem = f" ({problem})"

    def message(self, message: Message, now: float) -> list[SessionCommand]:
        """Take a message that does not belong to a room; others only count as a sign of life."""
        self._last_heard = now
        commands: list[SessionCommand] = []
        if self.state is SessionState.SILENT:
            commands += self.connected(now)
        match message:
            case Ping():
                commands.append(Say(Pong(epoch=self.epoch)))
            case Pong(epoch=epoch) if self._peer_epoch not in (None, epoch):
                commands += self._start_over(now)
            case Failed() if self.state is SessionState.GREETING:
                if message.code != "hello_required":
                    commands += self._reject(message.message, now)
            case Failed(code="hello_required") if self.state is not SessionState.UNCONNECTED:
                commands += self._start_over(now)
            case Welcome() if self.state is SessionState.GREETING:
                commands += self._welcome(message, now)
            case PoolInfo() if self.state is SessionState.GREETING:
                commands += self._pool(message, now)
        return commands

    def _start_over(self, now: float) -> list[SessionCommand]:
        """Another process answers on the same connection, or it has lost its memory of us."""
        return [*self.disconnected(), *self.connected(now)]

    def _welcome(self, welcome: Welcome, now: float) -> list[SessionCommand]:
        self._peer_epoch = welcome.epoch
        if welcome.version != VERSION:
            return self._reject(f"speaks version {welcome.version}, expected {VERSION}", now)
        if welcome.role != "decode":
            return self._reject(f"is a {welcome.role} server, expected a decode worker", now)
        return []

    def _pool(self, info: PoolInfo, now: float) -> list[SessionCommand]:
        difference = misfit(self._layout, info)
        if difference is not None:
            return self._reject(f"its KV pages do not fit ours: {difference}", now)
        self.pool_pages = info.num_pages
        if self.agent == info.agent and self._added:
            self.state = SessionState.READY
            return [Ready(returned=True)]
        commands: list[SessionCommand] = []
        if self.agent is not None:
            commands.append(RemoveRemote(self.agent, self._lease_s))
        self.agent, self._added = info.agent, False
        self.state = SessionState.ADDING
        return [*commands, AddRemote(remote_pool(self._layout, info))]

    def _reject(self, reason: str, now: float) -> list[SessionCommand]:
        self.state = SessionState.REJECTED
        self.rejection = reason
        self._rejected_at = now
        return [Lost(reason, unannounced_too=True)]

    def remote_added(self) -> list[SessionCommand]:
        """Our agent knows the peer's."""
        self._added = self.agent is not None
        if self.state is not SessionState.ADDING:
            return []
        self.state = SessionState.READY
        return [Ready(returned=False)]

    def remote_failed(self, reason: str, now: float) -> list[SessionCommand]:
        """Our agent cannot use the peer's (any more)."""
        self.agent, self._added = None, False
        if self.state is SessionState.UNCONNECTED:
            return []
        return self._reject(f"its NIXL agent cannot be used: {reason}", now)

    def tick(self, now: float, *, waiting: bool) -> list[SessionCommand]:
        """Once a second or so; `waiting` says whether any room waits for the peer."""
        if now - self._last_tick > self._lease_s / 2:
            self._last_heard = now  # we were away ourselves: its messages are not read yet
        self._last_tick = now
        commands: list[SessionCommand] = []
        if not waiting:
            self._waiting_since = now
        elif now - max(self._last_heard, self._waiting_since) > self._lease_s:
            commands.append(self._fell_silent())
        if self.state is SessionState.REJECTED and now - self._rejected_at > self._lease_s:
            commands += self.connected(now)  # what we were refused for may be over
        elif self.state is not SessionState.UNCONNECTED:
            commands.append(Say(Ping(epoch=self.epoch)))
        return commands

    def _fell_silent(self) -> Lost:
        if self.state is SessionState.UNCONNECTED:
            reason = (
                f"no connection within {self._lease_s:g} s{self._problem}: is it running, at that address, "
                "with the same keys?"
            )
        else:
            self.state = SessionState.SILENT
            reason = f"silent for {self._lease_s:g} s: stopped, hung or unreachable"
        return Lost(reason, unannounced_too=True)
