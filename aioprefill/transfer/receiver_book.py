"""All rooms of one decode process. Decides what to answer and what to tell the worker; does no I/O. Pure.

A sender is any string that names one prefill process's connection; a room is its sender and a ticket. Of a
hand-off in shards each shard is a room; `shard_assembler.py` knows which belong together.
"""

from __future__ import annotations

from collections.abc import Callable

from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.receiver_check import handoff_of, misfit, part_of
from aioprefill.transfer.receiver_moves import ReceiverMoves, Reply
from aioprefill.transfer.receiver_port import ReceiverHandler
from aioprefill.transfer.receiver_rooms import (
    Cancelled,
    Committed,
    GivenUp,
    Input,
    ReceiverRoom,
    ReceiverState,
    SenderDead,
    Settled,
    Written,
)
from aioprefill.transfer.shard_assembler import Origin
from aioprefill.wire.messages import Bootstrap, Cancel, Commit, Refused

_LOST = (ReceiverState.QUARANTINED, ReceiverState.SETTLING)
_COMING = (ReceiverState.RESERVED, ReceiverState.ASSEMBLING)


class ReceiverBook:
    """Rooms in the order of their Bootstrap, which is the order in which they get pages.

    `settle(sender, ticket)` asks for a call of `settled` with the same arguments, when what that sender has
    sent before has come in. `room_timeout_s` is how long a reserved room may go without a sign of
    progress. `now` is in seconds on any monotonic clock.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        handler: ReceiverHandler,
        reply: Reply,
        settle: Callable[[str, int], None],
        *,
        room_timeout_s: float,
    ) -> None:
        self._layout = layout
        self._num_pages = num_pages
        self._reply = reply
        self._room_timeout_s = room_timeout_s
        self._moves = ReceiverMoves(handler, reply, settle, self.retry_reservations)
        self._rooms = self._moves.rooms
        self._shards = self._moves.shards
        self._retrying = False
        self._retry_again = False

    def __repr__(self) -> str:
        return f"<ReceiverBook rooms={len(self._rooms)} holding_pages={self._moves.holding}>"

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def expecting(self) -> bool:
        """True while anybody may be writing into our pages."""
        return self._moves.holding > 0

    def holds_pages_of(self, sender: str) -> bool:
        """True while a sender may be writing into our pages."""
        return self._moves.holds_pages_of(sender)

    def is_queued(self, room: str) -> bool:
        """A room of that name is announced and waits for pages."""
        queued = ReceiverState.QUEUED
        return any(known.handoff.room == room and known.state is queued for known in self._rooms.values())

    def stats(self) -> dict[str, int]:
        """Number of rooms in each state, and of pages in quarantine.

        A room counts once for each of its shards; `rooms_awaiting_shards` are rooms of which some are here.
        """
        counts = {f"rooms_{state.value}": 0 for state in ReceiverState if state is not ReceiverState.GONE}
        pages: dict[Origin, int] = {}
        for room in self._rooms.values():
            counts[f"rooms_{room.state.value}"] += 1
            if room.state in _LOST:
                pages[room.origin] = len(room.pages)
        awaiting = self._shards.awaiting
        return {**counts, "rooms_awaiting_shards": awaiting, "pages_quarantined": sum(pages.values())}

    # What senders say

    def bootstrap(self, sender: str, message: Bootstrap, now: float) -> None:
        """A sender announces a room."""
        room = ReceiverRoom(handoff_of(sender, message), sender, message.ticket, now, part_of(message))
        problem = misfit(self._layout, self._num_pages, message) or self._conflict(room)
        if problem is not None:
            self._reply(sender, Refused(message.room, problem, message.ticket))
            return
        for other in list(self._rooms.values()):
            if other.handoff.room == message.room and _supersedes(room, other):
                self._moves.make([other], GivenUp("its prefill server begins it anew"), now)
        self._moves.add(room, now)
        self.retry_reservations(now)

    def awaits(self, message: Bootstrap) -> bool:
        """True when an announcement is of a shard whose room has its pages already."""
        return message.shards > 1 and self._shards.holds_pages((message.group, message.ticket))

    def _conflict(self, room: ReceiverRoom) -> str | None:
        name = room.handoff.room
        for other in self._rooms.values():
            if other.handoff.room != name or other.state in _LOST or other.origin == room.origin:
                continue
            if not _supersedes(room, other):
                return f"room {name} is being received already"
        if (room.sender, room.ticket) in self._rooms:
            return f"ticket {room.ticket} is that of another room"
        return self._shards.objection(room) if room.part.shards > 1 else None

    def written(self, sender: str, ticket: int, number: int, now: float) -> None:
        """A write of a sender is complete."""
        self._handle((sender, ticket), Written(number), now)

    def commit(self, sender: str, message: Commit, now: float) -> None:
        """A sender has posted all writes of a room."""
        self._handle((sender, message.ticket), Committed(message), now)

    def cancel(self, sender: str, message: Cancel, now: float) -> None:
        """A sender gives a room up."""
        self._handle((sender, message.ticket), Cancelled(message.message, message.quiet), now)

    def sender_left(self, sender: str, reason: str, now: float) -> None:
        """A sender cannot be reached; it may still be writing."""
        self._handle_all(sender, GivenUp(reason), now)

    def sender_dead(self, sender: str, now: float) -> None:
        """A sender's process is known dead: it writes no more."""
        self._handle_all(sender, SenderDead(), now)

    def settled(self, sender: str, ticket: int, now: float) -> None:
        """The answer to `settle`."""
        self._handle((sender, ticket), Settled(), now)

    # What we do ourselves

    def give_up(self, room: str, reason: str, now: float) -> None:
        """Refuse a room that has not arrived; nothing for one that is unknown or lost."""
        for key, known in list(self._rooms.items()):
            if known.handoff.room == room:
                self._handle(key, GivenUp(reason), now)

    def give_up_waiting(self, reason: str, now: float) -> None:
        """Refuse the rooms that have no pages yet."""
        for key, room in list(self._rooms.items()):
            if room.state is ReceiverState.QUEUED:
                self._handle(key, GivenUp(reason), now)

    def expire(self, now: float) -> None:
        """Give up reserved rooms that show no progress."""
        for key, room in list(self._rooms.items()):
            if room.state in _COMING and now - room.touched_at > self._room_timeout_s:
                shortfall = self._shards.shortfall(room) if room.part.shards > 1 else ""
                self._handle(key, GivenUp(f"no KV came for {self._room_timeout_s:g} s{shortfall}"), now)

    def close(self, reason: str, now: float) -> None:
        """Nothing can be written any more: lose all rooms and release their pages."""
        for key in list(self._rooms):
            for event in (GivenUp(reason), SenderDead(), Settled()):
                self._handle(key, event, now)

    def retry_reservations(self, now: float) -> None:
        """Ask for pages for the rooms that wait, oldest first, until there are none.

        May be called by the handler from inside its own callbacks.
        """
        self._retry_again = True
        if self._retrying:
            return
        self._retrying = True
        try:
            while self._retry_again:
                self._retry_again = False
                self._reserve_waiting(now)
        finally:
            self._retrying = False

    def _reserve_waiting(self, now: float) -> None:
        for room in list(self._rooms.values()):
            if room.state is not ReceiverState.QUEUED or self._moves.is_held(room.handoff.room):
                continue  # its name's predecessor still has pages: one room of a name at a time
            if not self._moves.reserve(room, now):
                return

    def _handle_all(self, sender: str, event: Input, now: float) -> None:
        for key in [key for key in self._rooms if key[0] == sender]:
            self._handle(key, event, now)

    def _handle(self, key: tuple[str, int], event: Input, now: float) -> None:
        room = self._rooms.get(key)
        if room is not None:
            self._moves.make([room], event, now)


def _supersedes(room: ReceiverRoom, other: ReceiverRoom) -> bool:
    """Both are shards of rooms of one server, which has ended the older hand-off."""
    return room.part.shards > 1 and room.part.group == other.part.group and room.ticket > other.ticket
