"""A scripted KV transfer for tests under a virtual clock; it checks that its caller keeps the port's rules.

By default handshakes and writes end by themselves, `handshake_s` after `open` and `write_s` after the write
before. With None the test ends them: `finish_handshake`, `finish_write`. Peers refuse, die and fall silent
when the test says so. What violates a rule raises AssertionError: at once where a call does, and again in
`check` (which `aclose` calls) where an event loop may have swallowed it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aioprefill.engine.port import SampledToken
from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.port import Handoff, TransferEvent
from aioprefill.transfer.room_book import RoomBook
from aioprefill.transfer.room_events import (
    Abandoned,
    Acknowledged,
    PagesReserved,
    PeerLost,
    PeerReady,
    RefusedByPeer,
    Send,
    Write,
    WriteEnded,
)
from aioprefill.transfer.rooms import RoomState
from aioprefill.wire.messages import Bootstrap, Cancel, Commit

FAKE_LAYOUT = KVLayout("fake", layers=1, kv_heads=1, head_dim=1, page_size=16, dtype="float32")


@dataclass(frozen=True, slots=True)
class FakeSend:
    """One `send` call that took effect."""

    room: str
    pages: tuple[int, ...]
    first_page: int
    final: SampledToken | None


class FakeTransfer:
    """Implements `KVTransfer`.

    `page_stamp(page)` gives anything that changes when a page is given to someone else or written again;
    with it, reuse of a page before its room's release is seen. `sends` records in order, `cancelled`
    what peers were told of rooms that ended otherwise than well.
    """

    def __init__(
        self,
        *,
        handshake_s: float | None = 0.0,
        write_s: float | None = 0.0,
        page_stamp: Callable[[int], object] | None = None,
    ) -> None:
        self.sends: list[FakeSend] = []
        self.opened: list[Handoff] = []
        self.abandoned: list[tuple[str, str]] = []
        self.cancelled: list[Cancel] = []
        self.ended: list[TransferEvent] = []
        """Events with `released`, in order."""
        self.violations: list[str] = []
        self._handshake_s = handshake_s
        self._write_s = write_s
        self._page_stamp = page_stamp
        self._book = RoomBook(self, FAKE_LAYOUT, self._wake_host)
        self._wake: Callable[[], None] = lambda: None
        self._writes: deque[tuple[str, Write]] = deque()
        self._stamps: dict[str, dict[int, object]] = {}
        self._committed: set[int] = set()
        self._free_at = 0.0
        self._refusing: dict[str, str] = {}
        self._dead: dict[str, str] = {}
        self._silent: set[str] = set()
        self._started = self._closed = False

    def __repr__(self) -> str:
        return f"<FakeTransfer writes={len(self._writes)} {self._book!r}>"

    # The test's side

    def finish_handshake(self, room: str) -> None:
        """The peer has reserved its pages: the room becomes WAITING_FOR_INPUT."""
        ticket = self._book.ticket_of(room)
        known = None if ticket is None else self._book.room(ticket)
        if ticket is None or known is None or known.handoff.peer in self._silent:
            return
        peer, pages = known.handoff.peer, known.handoff.pages
        if peer in self._refusing:
            self._book.handle(ticket, RefusedByPeer(f"refused: {self._refusing[peer]}"))
        else:
            self._book.handle(ticket, PagesReserved(np.arange(pages, dtype=np.uint32), max(pages, 1)))

    def finish_write(self, room: str | None = None, error: str | None = None) -> None:
        """The oldest live write (of a room) ends, well or with an error."""
        for peer, write in self._writes:
            if room is None or self._book.ticket_of(room) == write.ticket:
                self._end_write(peer, write, error)
                return
        raise AssertionError(f"no write of {room or 'any room'} is live")

    def refuse(self, peer: str, reason: str = "no pages") -> None:
        """From now on the peer refuses rooms."""
        self._refusing[peer] = reason

    def give_up(self, room: str, reason: str) -> None:
        """The peer gives one room up."""
        ticket = self._book.ticket_of(room)
        if ticket is not None:
            self._book.handle(ticket, RefusedByPeer(reason))

    def kill(self, peer: str, reason: str = "the connection was closed") -> None:
        """The peer's process dies: its rooms fail, its writes end, new rooms fail."""
        self._dead[peer] = reason
        self._silent.discard(peer)
        self._book.lose_peer(peer, reason, unannounced_too=True)
        for other, write in list(self._writes):
            if other == peer:
                self._end_write(peer, write, reason)

    def silence(self, peer: str, reason: str = "silent for 10 s") -> None:
        """The peer is stopped and its lease over: rooms fail, writes stay live until `revive` or `kill`."""
        self._silent.add(peer)
        self._book.lose_peer(peer, reason, unannounced_too=True)

    def revive(self, peer: str) -> None:
        """A silent or dead peer is back; the writes of a silent one end."""
        self._silent.discard(peer)
        self._dead.pop(peer, None)
        for other, write in list(self._writes):
            if other == peer:
                self._end_write(peer, write, None)

    @property
    def live_writes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(room, local pages) of writes that are not terminal, oldest first."""
        found = []
        for _, write in self._writes:
            room = self._book.room(write.ticket)
            assert room is not None, "a room outlives its writes"
            found.append((room.handoff.room, tuple(write.local.tolist())))
        return found

    @property
    def open_rooms(self) -> list[str]:
        """Rooms that are not released."""
        return [room.handoff.room for room in self._book.rooms()]

    def held_pages(self) -> set[int]:
        """Pages that must not be reused: sent for rooms that are not released."""
        return {page for stamps in self._stamps.values() for page in stamps}

    def assert_free(self, pages: Sequence[int]) -> None:
        """Raise AssertionError when any of these pages is held; for a page pool's `free`."""
        held = self.held_pages().intersection(pages)
        assert not held, self._violate(f"pages {sorted(held)} are reused before their room is released")

    def received(self, room: str) -> list[int]:
        """Pages sent for a room, in order; of its last incarnation."""
        return [page for send in self.sends if send.room == room for page in send.pages]

    def check(self) -> None:
        """Raise AssertionError with every violation so far."""
        assert not self.violations, "; ".join(self.violations)

    # The port

    def start(self, wake: Callable[[], None]) -> None:
        """See `KVTransfer.start`."""
        self._started = True
        self._wake = wake

    def open(self, handoff: Handoff) -> None:
        """See `KVTransfer.open`."""
        assert self._started and not self._closed, self._violate(
            f"open({handoff.room}) outside start..aclose"
        )
        self.opened.append(handoff)
        ticket = self._guarded(lambda: self._book.open(handoff))
        self._stamps[handoff.room] = {}
        loop = asyncio.get_running_loop()
        if handoff.peer in self._dead:
            lost = PeerLost(self._dead[handoff.peer])
            loop.call_later(self._handshake_s or 0.0, self._book.handle, ticket, lost)
            return
        self._book.handle(ticket, PeerReady())
        if self._handshake_s is not None:
            loop.call_later(self._handshake_s, self.finish_handshake, handoff.room)

    def send(self, room: str, pages: Sequence[int], first_page: int, final: SampledToken | None) -> None:
        """See `KVTransfer.send`."""
        ticket = self._book.ticket_of(room)
        known = None if ticket is None else self._book.room(ticket)
        if ticket is None or known is None:
            return  # failed meanwhile; the caller has not polled yet
        draining = known.state is RoomState.DRAINING
        self._guarded(lambda: self._book.handle(ticket, Send(pages, first_page, final)))
        if not draining:
            self.sends.append(FakeSend(room, tuple(pages), first_page, final))
            self._stamps[room].update((page, self._stamp(page)) for page in pages)

    def abandon(self, room: str, reason: str) -> None:
        """See `KVTransfer.abandon`."""
        ticket = self._book.ticket_of(room)
        if ticket is not None:
            self.abandoned.append((room, reason))
            self._book.handle(ticket, Abandoned(reason))

    def poll(self) -> Sequence[TransferEvent]:
        """See `KVTransfer.poll`."""
        events = self._book.poll()
        for event in events:
            if event.released:
                self.ended.append(event)
                for page, stamp in self._stamps.pop(event.room, {}).items():
                    reused = self._stamp(page) != stamp
                    assert not reused, self._violate(f"page {page} was reused before {event.room}'s release")
        return events

    async def aclose(self) -> None:
        """See `KVTransfer.aclose`. Live writes end at once. Raises as `check` does."""
        self._closed = True
        for room in self.open_rooms:
            self.abandon(room, "closed")
        for peer, write in list(self._writes):
            self._end_write(peer, write, "closed")
        self.check()

    # Inside

    def _wake_host(self) -> None:
        self._wake()

    def _stamp(self, page: int) -> object:
        return None if self._page_stamp is None else self._page_stamp(page)

    def _violate(self, what: str) -> str:
        self.violations.append(what)
        return what

    def _guarded(self, call: Callable[[], int | None]) -> int:
        try:
            return call() or 0
        except AssertionError as err:
            self._violate(str(err))
            raise

    def tell(self, peer: str, message: Bootstrap | Commit | Cancel) -> None:
        """See `Carrier`."""
        if isinstance(message, Cancel):
            self.cancelled.append(message)
        elif isinstance(message, Commit):
            self._committed.add(message.ticket)
            asyncio.get_running_loop().call_soon(self._acknowledge_if_complete, message.ticket)

    def post(self, peer: str, write: Write) -> None:
        """See `Carrier`."""
        self._writes.append((peer, write))
        if self._write_s is not None:
            loop = asyncio.get_running_loop()
            self._free_at = max(self._free_at, loop.time()) + self._write_s
            loop.call_at(self._free_at, self._end_write, peer, write, None)

    def drop_unposted(self, peer: str, ticket: int) -> None:
        """See `Carrier`. All writes of the fake are posted."""

    def _end_write(self, peer: str, write: Write, error: str | None) -> None:
        if (peer, write) not in self._writes or (error is None and peer in self._silent):
            return
        self._writes.remove((peer, write))
        self._book.handle(write.ticket, WriteEnded(write.number, error))
        self._acknowledge_if_complete(write.ticket)

    def _acknowledge_if_complete(self, ticket: int) -> None:
        room = self._book.room(ticket)
        if room is None or room.live or room.handoff.peer in self._silent:
            return
        if ticket in self._committed:
            self._book.handle(ticket, Acknowledged())
