"""KV hand-off over NIXL, prefill side: announces rooms to decode workers and writes pages into their pools.

Control messages go over ZMQ (`PeerLink`, one for each decode endpoint), pages through one NIXL agent.
Rooms decide (`rooms.py`), sessions decide (`peer_session.py`); this file carries out.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence

from aioprefill.engine.port import SampledToken
from aioprefill.errors import ConfigError, WireError
from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.agent_events import (
    AgentEvent,
    AgentStopped,
    RemoteAdded,
    RemoteFailed,
    RemotePool,
    WriteFinished,
    WriteOrder,
)
from aioprefill.transfer.link_table import LinkTable
from aioprefill.transfer.nixl_agent import NixlAgent
from aioprefill.transfer.notification import encode_notification
from aioprefill.transfer.peer_link import PeerLink
from aioprefill.transfer.peer_session import SessionState
from aioprefill.transfer.pool_info import pool_info
from aioprefill.transfer.pool_view import PoolView
from aioprefill.transfer.port import Handoff, TransferEvent
from aioprefill.transfer.room_book import RoomBook
from aioprefill.transfer.room_events import (
    Abandoned,
    Acknowledged,
    Input,
    PagesReserved,
    PeerLost,
    PeerReady,
    RefusedByPeer,
    Send,
    Write,
    WriteEnded,
)
from aioprefill.transfer.rooms import RoomState
from aioprefill.wire.messages import (
    Arrived,
    Bootstrap,
    Cancel,
    Commit,
    Message,
    Refused,
    Reserved,
    unpack_ids,
)
from aioprefill.wire.security import CurveKeys

CLOSE_S = 1.0
"""How long `aclose` waits for live writes to become terminal."""


class NixlTransfer:
    """Implements `KVTransfer`; `Handoff.peer` is a decode worker's endpoint (tcp://HOST:PORT).

    `pool` is the KV pool that pages are read from, in the layout `layout`. A peer that is silent for
    `lease_s` fails its rooms; the peers hear from us each `ping_s`. `keys` are needed off loopback.

    With tensor-parallel ranks each rank has a transfer of its own, for a pool whose layout says which shard
    it is. `group` is one random text for all ranks of the server, fresh at each start, and all ranks open
    the same rooms in the same order; the peer hands a room to its worker, and acknowledges each shard, when
    all shards are there. Raises `ConfigError` for a shard without a group.
    """

    def __init__(
        self,
        pool: PoolView,
        layout: KVLayout,
        *,
        lease_s: float = 10.0,
        ping_s: float = 1.0,
        keys: CurveKeys | None = None,
        agent: NixlAgent | None = None,
        group: str = "",
    ) -> None:
        if pool.page_bytes != layout.page_bytes:
            raise ConfigError(
                f"the pool has pages of {pool.page_bytes} bytes, its layout {layout.page_bytes}"
            )
        if layout.shards > 1 and not group:
            raise ConfigError(
                f"KV transfer of {layout.shards} ranks needs a group: one random text, the same at all ranks"
            )
        self._pool = pool
        self._layout = layout
        self._agent = agent or NixlAgent(f"prefill-{secrets.token_hex(8)}", pool)
        self._book = RoomBook(self, layout, self._wake_host, group=group)
        self._wake: Callable[[], None] = lambda: None
        self._links = LinkTable(self, layout, lease_s=lease_s, ping_s=ping_s, keys=keys)
        self._stopped: str | None = None
        self._empty = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<NixlTransfer {self._agent.name} links={len(self._links)} {self._book!r}>"

    def prepare(self) -> None:
        """Import NIXL and register the pool: blocks for up to seconds; `start` does it where it was not done.

        Raises `ConfigError` when NIXL cannot run here.
        """
        self._agent.prepare()

    # The host's side

    def start(self, wake: Callable[[], None]) -> None:
        """See `KVTransfer.start`."""
        self._wake = wake
        self._agent.start(self._on_agent_events)
        self._links.start()

    def open(self, handoff: Handoff) -> None:
        """See `KVTransfer.open`."""
        ticket = self._book.open(handoff)
        self._empty.clear()
        if self._stopped is not None:
            self._book.handle(ticket, PeerLost(self._stopped))
            return
        try:
            session = self._links.open(handoff.peer).session
        except ConfigError as err:
            self._book.handle(ticket, PeerLost(str(err)))
            return
        if session.rejection is not None:
            self._book.handle(ticket, PeerLost(session.rejection))
        elif session.state is SessionState.READY:
            self._book.handle(ticket, PeerReady())

    def send(self, room: str, pages: Sequence[int], first_page: int, final: SampledToken | None) -> None:
        """See `KVTransfer.send`. Nothing happens for a room that has failed meanwhile."""
        ticket = self._book.ticket_of(room)
        if ticket is not None:
            self._book.handle(ticket, Send(pages, first_page, final))

    def abandon(self, room: str, reason: str) -> None:
        """See `KVTransfer.abandon`."""
        ticket = self._book.ticket_of(room)
        if ticket is not None:
            self._book.handle(ticket, Abandoned(reason))

    def poll(self) -> Sequence[TransferEvent]:
        """See `KVTransfer.poll`."""
        return self._book.poll()

    def stats(self) -> dict[str, int]:
        """Rooms in each state, links, and links that are usable."""
        return {**self._book.stats(), **self._links.stats()}

    async def aclose(self) -> None:
        """See `KVTransfer.aclose`. Waits up to a second for live writes, then ends them with the agent.

        The last events can still be polled. Cancelling the wait leaves the closing under way.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="close nixl transfer")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._stopped = self._stopped or "the prefill server shuts down"
        for room in self._book.rooms():
            self._book.handle(room.ticket, Abandoned(self._stopped))
        if len(self._book):
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._empty.wait()
            except TimeoutError:
                pass  # the agent's end is the end of its writes
        await self._agent.aclose()
        await self._links.aclose()

    def _wake_host(self) -> None:
        self._wake()

    # Carrying out what rooms decide (`Carrier`)

    def tell(self, peer: str, message: Bootstrap | Commit | Cancel) -> None:
        """See `Carrier`."""
        self._links.get(peer).tell(message)

    def post(self, peer: str, write: Write) -> None:
        """See `Carrier`."""
        link = self._links.get(peer)
        notification = encode_notification(link.epoch, write.ticket, write.number)
        order = WriteOrder(write.ticket, write.number, write.local, write.remote, notification)
        self._agent.write(link.session.agent or "", order)

    def drop_unposted(self, peer: str, ticket: int) -> None:
        """See `Carrier`."""
        self._agent.drop_unposted(self._links.get(peer).session.agent or "", ticket)

    # What links report (`LinkOwner`)

    def add_remote(self, link: PeerLink, remote: RemotePool) -> None:
        """See `LinkOwner`."""
        self._agent.add_remote(remote)

    def remove_remote(self, name: str, grace_s: float) -> None:
        """See `LinkOwner`."""
        self._agent.remove_remote(name, grace_s=grace_s)

    def peer_ready(self, link: PeerLink) -> None:
        """See `LinkOwner`."""
        link.introduce(pool_info(self._agent.name, self._agent.metadata, self._pool, self._layout))
        for room in self._book.rooms_of(link.endpoint):
            if room.state is RoomState.OPENED:
                self._book.handle(room.ticket, PeerReady())

    def peer_lost(self, link: PeerLink, reason: str, *, unannounced_too: bool) -> None:
        """See `LinkOwner`."""
        self._book.lose_peer(link.endpoint, reason, unannounced_too=unannounced_too)
        self._note_emptiness()

    def room_message(self, link: PeerLink, message: Message) -> None:
        """See `LinkOwner`."""
        if not isinstance(message, Reserved | Refused | Arrived):
            return
        room = self._book.room(message.ticket)
        if room is None or room.handoff.peer != link.endpoint:
            if isinstance(message, Reserved):  # given up while this was under way: nothing writes there
                cancel = Cancel(message.room, "given up before", quiet=True, ticket=message.ticket)
                link.tell(cancel)
            return
        self._book.handle(message.ticket, _room_event(message, link.session.pool_pages))
        self._note_emptiness()

    def is_waiting(self, link: PeerLink) -> bool:
        """See `LinkOwner`."""
        return any(room.state is not RoomState.DRAINING for room in self._book.rooms_of(link.endpoint))

    def link_idle(self, link: PeerLink) -> None:
        """See `LinkOwner`."""
        if not self._book.rooms_of(link.endpoint):
            self._links.drop(link)
            if link.session.agent is not None:
                self._agent.remove_remote(link.session.agent, grace_s=math.inf)

    # What the agent reports

    def _on_agent_events(self, events: Sequence[AgentEvent]) -> None:
        for event in events:
            match event:
                case WriteFinished(ticket, number, error):
                    self._book.handle(ticket, WriteEnded(number, error))
                case RemoteAdded(name):
                    for link in self._links.of_agent(name):
                        link.remote_added()
                case RemoteFailed(name, reason):
                    for link in self._links.of_agent(name):
                        link.remote_failed(reason)
                case AgentStopped(reason):
                    self._stopped = f"the NIXL agent of the prefill server ended: {reason}"
                    for room in self._book.rooms():
                        self._book.handle(room.ticket, PeerLost(self._stopped))
        self._note_emptiness()

    def _note_emptiness(self) -> None:
        if not len(self._book):
            self._empty.set()


def _room_event(message: Reserved | Refused | Arrived, pool_pages: int) -> Input:
    match message:
        case Reserved():
            try:
                return PagesReserved(unpack_ids(message.pages), pool_pages)
            except WireError as err:
                return RefusedByPeer(str(err))
        case Refused():
            return RefusedByPeer(f"refused: {message.message}")
        case Arrived():
            return Acknowledged()
