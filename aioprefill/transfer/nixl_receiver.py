"""KV hand-off over NIXL, decode side: reserves pages, learns what was written, keeps lost rooms' pages safe.

The decode worker's server passes on messages and departures of prefill processes. Rooms decide
(`receiver_rooms.py`); this file knows who the senders are, and whether they still exist.

Rule: a prefill process that has left may be stopped or cut off, and go on writing when it is back. It is
taken for dead when it has been away for the lease and NIXL says that no process has its agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aioprefill.errors import ConfigError, WireError
from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.agent_events import AgentEvent, AgentStopped, Notified, ProbeFailed
from aioprefill.transfer.nixl_agent import NixlAgent
from aioprefill.transfer.notification import decode_notification
from aioprefill.transfer.pool_info import pool_info
from aioprefill.transfer.pool_view import PoolView
from aioprefill.transfer.receiver_book import ReceiverBook
from aioprefill.transfer.receiver_port import ReceiverHandler
from aioprefill.wire.messages import (
    Bootstrap,
    Cancel,
    Commit,
    Failed,
    Hello,
    Message,
    PoolInfo,
    Refused,
)

MESSAGES = (PoolInfo, Bootstrap, Commit, Cancel)
"""Types that a server must pass to `NixlReceiver.on_message`, besides `Hello`."""
TICK_S = 1.0
SETTLE_S = 0.1
"""How long what a sender sent before its end may take to come in; over tcp it waits in our own kernel."""
MAX_PROBE_S = 30.0


@dataclass(slots=True)
class _Sender:
    epoch: str
    identity: bytes
    agent: PoolInfo | None = None
    left_at: float | None = None
    proven_dead: bool = False
    probe_at: float = 0.0
    probe_s: float = TICK_S


class NixlReceiver:
    """Receives rooms into `pool` (in the layout `layout`) for `handler`.

    `send(identity, message)` sends to a prefill process. `start` it on the loop; then the server calls
    `on_message` (types `Hello` and `MESSAGES`) and `on_gone`. Close it before the server.
    """

    def __init__(
        self,
        pool: PoolView,
        layout: KVLayout,
        handler: ReceiverHandler,
        send: Callable[[bytes, Message], None],
        *,
        lease_s: float = 10.0,
        room_timeout_s: float = 300.0,
        agent: NixlAgent | None = None,
    ) -> None:
        if layout.shards > 1:
            raise ConfigError(f"a decode worker assembles whole pages, not those of {layout.shards} shards")
        if pool.page_bytes != layout.page_bytes:
            raise ConfigError(
                f"the pool's pages have {pool.page_bytes} bytes, in its layout {layout.page_bytes}"
            )
        self._pool = pool
        self._layout = layout
        self._send = send
        self._lease_s = lease_s
        self._agent = agent or NixlAgent(f"decode-{secrets.token_hex(8)}", pool)
        self._book = ReceiverBook(
            layout,
            pool.num_pages,
            handler,
            self._reply,
            self._settle,
            room_timeout_s=room_timeout_s,
        )
        self._senders: dict[str, _Sender] = {}
        self._epochs: dict[bytes, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped: str | None = None
        self._refusal: str | None = None

    def __repr__(self) -> str:
        return f"<NixlReceiver {self._agent.name} senders={len(self._senders)} {self._book!r}>"

    def prepare(self) -> None:
        """See `NixlTransfer.prepare`."""
        self._agent.prepare()

    def start(self) -> None:
        """Begin, on the running loop; prepares first, where that was not done. Raises `ConfigError`."""
        self._agent.start(self._on_agent_events)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def is_queued(self, room: str) -> bool:
        """A room of that name is announced and waits for pages."""
        return self._book.is_queued(room)

    def stats(self) -> dict[str, int]:
        """Rooms in each state, pages in quarantine, prefill processes."""
        away = sum(sender.left_at is not None for sender in self._senders.values())
        return {**self._book.stats(), "senders": len(self._senders), "senders_away": away}

    # The server's side

    def on_message(self, identity: bytes, message: Message) -> None:
        """Take a message of a prefill process. Types that are not ours are ignored."""
        if isinstance(message, Hello):
            if message.role == "prefill":
                self._greet(identity, message.epoch)
            return
        if not isinstance(message, MESSAGES):
            return
        epoch = self._epochs.get(identity)
        if epoch is None:
            self._send_to(identity, Failed("hello_required", "the KV receiver does not know this connection"))
            return
        now = self._now()
        match message:
            case PoolInfo():
                self._senders[epoch].agent = message
            case Bootstrap() if self._refusal is not None and not self._book.awaits(message):
                self._send_to(identity, Refused(message.room, self._refusal, message.ticket))
            case Bootstrap():
                self._book.bootstrap(epoch, message, now)
            case Commit():
                self._book.commit(epoch, message, now)
            case Cancel():
                self._book.cancel(epoch, message, now)
        self._note_expectations()

    def on_gone(self, identity: bytes) -> None:
        """The connection of a prefill process was lost, for whatever reason."""
        epoch = self._epochs.pop(identity, None)
        if epoch is None:
            return
        sender = self._senders[epoch]
        sender.left_at = sender.probe_at = self._now()
        sender.probe_s, sender.proven_dead = TICK_S, False
        self._book.sender_left(epoch, "the connection to its prefill process was lost", self._now())
        self._note_expectations()

    def _greet(self, identity: bytes, epoch: str) -> None:
        sender = self._senders.get(epoch)
        if sender is None:
            sender = self._senders[epoch] = _Sender(epoch, identity)
        self._epochs.pop(sender.identity, None)
        self._epochs[identity] = epoch
        sender.identity, sender.left_at = identity, None
        self._send_to(identity, pool_info(self._agent.name, self._agent.metadata, self._pool, self._layout))

    # The decode worker's side

    def retry_reservations(self) -> None:
        """Ask the handler again for pages for the rooms that wait. Call it when pages became free."""
        self._book.retry_reservations(self._now())
        self._note_expectations()

    def give_up(self, room: str, reason: str) -> None:
        """Refuse a room that has not arrived; its pages come back when they are safe."""
        self._book.give_up(room, reason, self._now())
        self._note_expectations()

    def refuse_new(self, reason: str) -> None:
        """Take no more rooms; those that have pages may still arrive."""
        self._refusal = self._refusal or reason
        self._book.give_up_waiting(reason, self._now())

    async def aclose(self) -> None:
        """Destroy the agent, then lose all rooms and release their pages. Idempotent.

        Cancelling the wait leaves the agent's end under way.
        """
        if self._timer is not None:
            self._timer.cancel()
        await self._agent.aclose()
        self._stop("the decode worker shuts down")

    def _stop(self, reason: str) -> None:
        if self._stopped is None:
            self._stopped = reason
            self._refusal = self._refusal or reason
            self._book.close(reason, self._now())

    # Inside

    def _now(self) -> float:
        return self._loop.time() if self._loop is not None else 0.0

    def _note_expectations(self) -> None:
        self._agent.expect(self._book.expecting)

    def _reply(self, epoch: str, message: Message) -> None:
        sender = self._senders.get(epoch)
        if sender is not None and sender.left_at is None:
            self._send_to(sender.identity, message)

    def _send_to(self, identity: bytes, message: Message) -> None:
        with contextlib.suppress(WireError):  # the server is closed, and its clients know
            self._send(identity, message)

    def _settle(self, epoch: str, ticket: int) -> None:
        if self._loop is not None and self._stopped is None:
            self._loop.call_later(SETTLE_S, self._settled, epoch, ticket)

    def _settled(self, epoch: str, ticket: int) -> None:
        self._book.settled(epoch, ticket, self._now())
        self._note_expectations()

    def _tick(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(TICK_S, self._tick)
        now = self._now()
        self._book.expire(now)
        for sender in list(self._senders.values()):
            if sender.left_at is not None:
                self._look_after(sender, sender.left_at, now)
        self._note_expectations()

    def _look_after(self, sender: _Sender, left_at: float, now: float) -> None:
        """A sender that is away: find out whether it is dead, and forget it when nothing hangs on it."""
        if self._book.holds_pages_of(sender.epoch):
            if sender.proven_dead and now - left_at >= self._lease_s:
                self._book.sender_dead(sender.epoch, now)
            elif sender.agent is not None and now >= sender.probe_at:
                sender.probe_at = now + sender.probe_s
                sender.probe_s = min(2 * sender.probe_s, MAX_PROBE_S)
                self._agent.probe(sender.agent.agent, sender.agent.metadata)
        elif now - left_at >= self._lease_s:
            del self._senders[sender.epoch]
            if sender.agent is not None:
                self._agent.end_probe(sender.agent.agent)

    def _on_agent_events(self, events: Sequence[AgentEvent]) -> None:
        now = self._now()
        for event in events:
            match event:
                case Notified(_, payload):
                    with contextlib.suppress(WireError):  # not one of ours
                        epoch, ticket, number = decode_notification(payload)
                        self._book.written(epoch, ticket, number, now)
                case ProbeFailed(name, _):
                    for sender in self._senders.values():
                        if sender.agent is not None and sender.agent.agent == name:
                            sender.proven_dead = sender.left_at is not None
                case AgentStopped(reason):
                    self._stop(f"the NIXL agent of the decode worker ended: {reason}")
        self._note_expectations()
