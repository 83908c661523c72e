"""All rooms of one prefill process and the events for its host. Decides; a carrier does. Pure."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from aioprefill.errors import InvalidMove
from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.part import WHOLE, Part, first_ticket
from aioprefill.transfer.port import Handoff, TransferEvent
from aioprefill.transfer.room_events import (
    Command,
    DropUnposted,
    Emit,
    Input,
    PeerLost,
    Tell,
    Write,
)
from aioprefill.transfer.rooms import RoomState, SenderRoom
from aioprefill.wire.messages import Bootstrap, Cancel, Commit

MAX_WRITE_PAGES = 1000
MAX_WRITE_BYTES = 64 << 20
"""Bounds of one write: they bound how long posting it holds the thread that owns the agent."""


class Carrier(Protocol):
    """Carries out what rooms decide. None of it blocks; answers come later through `RoomBook.handle`."""

    def tell(self, peer: str, message: Bootstrap | Commit | Cancel) -> None: ...

    def post(self, peer: str, write: Write) -> None: ...

    def drop_unposted(self, peer: str, ticket: int) -> None: ...


class RoomBook:
    """Rooms by name (the host's calls) and by ticket (the peers' messages).

    With a layout of several shards `group` names the server, the same at all its ranks. These open the same
    rooms in the same order, so that the tickets agree.
    """

    def __init__(
        self, carrier: Carrier, layout: KVLayout, wake: Callable[[], None], *, group: str = ""
    ) -> None:
        self._carrier = carrier
        self._layout = layout
        self._wake = wake
        self._write_pages = max(1, min(MAX_WRITE_PAGES, MAX_WRITE_BYTES // layout.page_bytes))
        self._rooms: dict[int, SenderRoom] = {}
        self._tickets: dict[str, int] = {}
        self._events: deque[TransferEvent] = deque()
        self._part = WHOLE if layout.shards == 1 else Part(layout.shards, layout.shard, group)
        # random start: a peer that outlives us must not take our tickets for those of our predecessor
        first = secrets.randbits(48) if self._part is WHOLE else first_ticket(group)
        self._next_ticket = itertools.count(first)

    def __repr__(self) -> str:
        return f"<RoomBook rooms={len(self._rooms)} events={len(self._events)}>"

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._rooms

    def open(self, handoff: Handoff) -> int:
        """Begin a room; its ticket. Raises `InvalidMove` when a room of that name is not yet released."""
        if handoff.room in self._tickets:
            raise InvalidMove(f"room {handoff.room} was opened before and is not yet released")
        ticket = next(self._next_ticket)
        self._tickets[handoff.room] = ticket
        self._rooms[ticket] = SenderRoom(
            handoff,
            ticket,
            fingerprint=self._layout.fingerprint,
            page_bytes=self._layout.page_bytes,
            write_pages=self._write_pages,
            part=self._part,
        )
        return ticket

    def ticket_of(self, room: str) -> int | None:
        """The ticket of a room that is not yet released."""
        return self._tickets.get(room)

    def room(self, ticket: int) -> SenderRoom | None:
        """The room of a ticket, None once released."""
        return self._rooms.get(ticket)

    def rooms(self) -> list[SenderRoom]:
        """All rooms that are not released, oldest first."""
        return list(self._rooms.values())

    def rooms_of(self, peer: str) -> list[SenderRoom]:
        """Rooms with one peer, oldest first."""
        return [room for room in self._rooms.values() if room.handoff.peer == peer]

    def handle(self, ticket: int, event: Input) -> None:
        """Let a room make a move and carry out its commands. Nothing for one that is released."""
        room = self._rooms.get(ticket)
        if room is None:
            return
        commands = room.handle(event)
        if room.state is RoomState.GONE:
            del self._rooms[ticket]
            del self._tickets[room.handoff.room]
        for command in commands:
            self._perform(room, command)

    def lose_peer(self, peer: str, reason: str, *, unannounced_too: bool) -> None:
        """Fail the rooms with a peer; those it has not heard of may wait for its return."""
        for room in self.rooms_of(peer):
            if unannounced_too or room.state is not RoomState.OPENED:
                self.handle(room.ticket, PeerLost(reason))

    def _perform(self, room: SenderRoom, command: Command) -> None:
        peer = room.handoff.peer
        match command:
            case Emit(event):
                self._emit(event)
            case Tell(message):
                self._carrier.tell(peer, message)
            case Write():
                self._carrier.post(peer, command)
            case DropUnposted(ticket):
                self._carrier.drop_unposted(peer, ticket)

    def _emit(self, event: TransferEvent) -> None:
        self._events.append(event)
        if len(self._events) == 1:
            self._wake()

    def poll(self) -> Sequence[TransferEvent]:
        """Take the events since the last poll, in order."""
        events = list(self._events)
        self._events.clear()
        return events

    def stats(self) -> dict[str, int]:
        """Number of rooms in each state."""
        counts = {f"rooms_{state.value}": 0 for state in RoomState if state is not RoomState.GONE}
        for room in self._rooms.values():
            counts[f"rooms_{room.state.value}"] += 1
        return counts
