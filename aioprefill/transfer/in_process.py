"""KV hand-off within one process, for embedding and tests: the rooms of NIXL's, with copies for writes.

Page copies run on one thread, in order. A copy that runs cannot be stopped, as with NIXL; one that waits
can. Neither side imports torch: the copy is a callable.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from aioprefill.engine.port import SampledToken
from aioprefill.errors import ConfigError
from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.port import Handoff, TransferEvent
from aioprefill.transfer.receiver_book import ReceiverBook
from aioprefill.transfer.receiver_port import ReceiverHandler
from aioprefill.transfer.room_book import RoomBook
from aioprefill.transfer.room_events import (
    Abandoned,
    Acknowledged,
    PageArray,
    PagesReserved,
    PeerLost,
    PeerReady,
    RefusedByPeer,
    Send,
    Write,
    WriteEnded,
)
from aioprefill.wire.messages import Arrived, Bootstrap, Cancel, Commit, Refused, Reserved, unpack_ids

CopyPages = Callable[[PageArray, PageArray], None]
"""Copies page `source[i]` of the prefill pool to page `target[i]` of the peer's; called on a thread."""


class InProcessPeer:
    """A decode worker in the same process, found by `name`; its pool has `num_pages` of `layout`.

    `handler` is called as by `NixlReceiver`. Belongs to one loop; serves any number of transfers.
    """

    def __init__(
        self,
        name: str,
        layout: KVLayout,
        num_pages: int,
        handler: ReceiverHandler,
        copy_pages: CopyPages,
        *,
        room_timeout_s: float = 300.0,
    ) -> None:
        self.name = name
        self.num_pages = num_pages
        self.copy_pages = copy_pages
        self._transfers: dict[str, InProcessTransfer] = {}
        self._left: str | None = None
        self._book = ReceiverBook(
            layout, num_pages, handler, self._reply, self._settle, room_timeout_s=room_timeout_s
        )

    def __repr__(self) -> str:
        return f"<InProcessPeer {self.name} {self._book!r}>"

    @property
    def left(self) -> str | None:
        """Why the peer takes no rooms any more, if so."""
        return self._left

    def stats(self) -> dict[str, int]:
        """Rooms in each state, and pages in quarantine."""
        return self._book.stats()

    def retry_reservations(self) -> None:
        """Ask the handler again for pages for the rooms that wait. Call it when pages became free."""
        self._book.retry_reservations(_now())

    def expire(self) -> None:
        """Give up rooms that show no progress for the room timeout."""
        self._book.expire(_now())

    def give_up(self, room: str, reason: str) -> None:
        """Refuse a room that has not arrived; its pages come back when they are safe."""
        self._book.give_up(room, reason, _now())

    def leave(self, reason: str) -> None:
        """Take no rooms any more, and fail those that have not arrived. Idempotent."""
        if self._left is None:
            self._left = reason
            for transfer in self._transfers.values():
                transfer.peer_left(self.name, reason)

    # The transfer's side

    def attach(self, key: str, transfer: InProcessTransfer) -> None:
        """Make a transfer known under its key."""
        self._transfers[key] = transfer

    def detach(self, key: str) -> None:
        """Forget a transfer, which writes no more."""
        self._transfers.pop(key, None)
        self._book.sender_dead(key, _now())

    def take(self, key: str, message: Bootstrap | Commit | Cancel) -> None:
        """A transfer says something; nothing is taken from one that was detached."""
        if key not in self._transfers:
            return
        match message:
            case Bootstrap():
                self._book.bootstrap(key, message, _now())
            case Commit():
                self._book.commit(key, message, _now())
            case Cancel():
                self._book.cancel(key, message, _now())

    def written(self, key: str, write: Write) -> None:
        """A copy of a transfer is complete."""
        self._book.written(key, write.ticket, write.number, _now())

    def _reply(self, key: str, message: Reserved | Refused | Arrived) -> None:
        transfer = self._transfers.get(key)
        if transfer is not None:
            _soon(transfer.take, self, message)

    def _settle(self, key: str, ticket: int) -> None:
        _soon(self._settled, key, ticket)  # a copy that has ended leaves nothing under way

    def _settled(self, key: str, ticket: int) -> None:
        self._book.settled(key, ticket, _now())


class InProcessTransfer:
    """Implements `KVTransfer`; `Handoff.peer` is the name of a peer that was added.

    Only whole pages: raises `ConfigError` for a layout with shards.
    """

    def __init__(self, layout: KVLayout) -> None:
        if layout.shards > 1:
            raise ConfigError(f"the in-process KV transfer cannot carry shards, one of {layout.shards} given")
        self._key = secrets.token_hex(8)
        self._peers: dict[str, InProcessPeer] = {}
        self._book = RoomBook(self, layout, self._wake_host)
        self._wake: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv copy")
        self._copies: dict[tuple[int, int], Future[None]] = {}
        self._closed = False
        self._still = asyncio.Event()
        self._still.set()

    def __repr__(self) -> str:
        return f"<InProcessTransfer peers={list(self._peers)} copies={len(self._copies)} {self._book!r}>"

    def add_peer(self, peer: InProcessPeer) -> None:
        """Make a peer reachable by its name, which replaces one that left."""
        self._peers[peer.name] = peer
        peer.attach(self._key, self)

    def start(self, wake: Callable[[], None]) -> None:
        """See `KVTransfer.start`."""
        self._wake = wake
        self._loop = asyncio.get_running_loop()

    def open(self, handoff: Handoff) -> None:
        """See `KVTransfer.open`."""
        _soon(self._announce, self._book.open(handoff), handoff.peer)

    def _announce(self, ticket: int, name: str) -> None:
        peer = self._peers.get(name)
        if self._closed or peer is None or peer.left is not None:
            reason = "there is no such peer in this process" if peer is None else peer.left or "closed"
            self._book.handle(ticket, PeerLost(reason))
        else:
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
        """Rooms in each state."""
        return self._book.stats()

    async def aclose(self) -> None:
        """See `KVTransfer.aclose`. Waits for the copy that runs; the last events can still be polled.

        When the wait is cancelled, call it again.
        """
        self._closed = True
        for room in self._book.rooms():
            self._book.handle(room.ticket, Abandoned("the prefill server shuts down"))
        await self._still.wait()
        self._executor.shutdown()  # idle by now
        for peer in self._peers.values():
            peer.detach(self._key)
        self._peers.clear()

    def _wake_host(self) -> None:
        self._wake()

    # The peers' side

    def take(self, peer: InProcessPeer, message: Reserved | Refused | Arrived) -> None:
        """A peer says something."""
        ticket = message.ticket
        match message:
            case Reserved():
                self._book.handle(ticket, PagesReserved(unpack_ids(message.pages), peer.num_pages))
            case Refused():
                self._book.handle(ticket, RefusedByPeer(f"refused: {message.message}"))
            case Arrived():
                self._book.handle(ticket, Acknowledged())

    def peer_left(self, name: str, reason: str) -> None:
        """A peer takes no rooms any more."""
        self._book.lose_peer(name, reason, unannounced_too=True)

    # Carrying out what rooms decide (`Carrier`)

    def tell(self, peer: str, message: Bootstrap | Commit | Cancel) -> None:
        """See `Carrier`."""
        if self._closed:  # no later turn is certain
            self._peers[peer].take(self._key, message)
        else:
            _soon(self._peers[peer].take, self._key, message)

    def post(self, peer: str, write: Write) -> None:
        """See `Carrier`."""
        target = self._peers[peer]
        self._still.clear()
        copy = self._executor.submit(target.copy_pages, write.local, write.remote)
        self._copies[write.ticket, write.number] = copy
        copy.add_done_callback(partial(self._on_copied, target, write))

    def drop_unposted(self, peer: str, ticket: int) -> None:
        """See `Carrier`."""
        for (of, _), copy in list(self._copies.items()):
            if of == ticket:
                copy.cancel()

    def _on_copied(self, peer: InProcessPeer, write: Write, copy: Future[None]) -> None:
        """On the copy thread, or on the loop's when it was dropped."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._copied, peer, write, copy)

    def _copied(self, peer: InProcessPeer, write: Write, copy: Future[None]) -> None:
        del self._copies[write.ticket, write.number]
        if copy.cancelled():
            error: str | None = "dropped before it was started"
        else:
            failure = copy.exception()
            error = None if failure is None else f"{type(failure).__name__}: {failure}"
        if error is None:
            peer.written(self._key, write)
        self._book.handle(write.ticket, WriteEnded(write.number, error))
        if not self._copies:
            self._still.set()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _soon(function: Callable[..., None], *arguments: object) -> None:
    """Next turn: what a room decides is never answered from inside its own move."""
    asyncio.get_running_loop().call_soon(function, *arguments)
