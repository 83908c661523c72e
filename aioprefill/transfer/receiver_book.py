"""All rooms of one decode process. Decides what to answer and what to tell the worker; does no I/O. Pure.

A sender is any string that names one prefill process's connection; a room is its sender and a ticket.
"""

from __future__ import annotations

from collections.abc import Callable

from aioprefill.errors import AioprefillError
from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.port import Handoff
from aioprefill.transfer.receiver_port import ReceiverHandler
from aioprefill.transfer.receiver_rooms import (
    Cancelled,
    Committed,
    Effect,
    GivenUp,
    Input,
    PagesGranted,
    ReceiverRoom,
    ReceiverState,
    SenderDead,
    Settled,
    Written,
)
from aioprefill.wire.messages import Arrived, Bootstrap, Cancel, Commit, Refused, Reserved, pack_ids

_LOST = (ReceiverState.QUARANTINED, ReceiverState.SETTLING)

Reply = Callable[[str, Reserved | Refused | Arrived], None]
"""Sends a message to a sender; one that has left does not get it."""


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
        self._handler = handler
        self._reply = reply
        self._settle = settle
        self._room_timeout_s = room_timeout_s
        self._rooms: dict[tuple[str, int], ReceiverRoom] = {}
        self._held: dict[str, ReceiverRoom] = {}
        """Rooms that have pages, by name."""
        self._retrying = False
        self._retry_again = False

    def __repr__(self) -> str:
        return f"<ReceiverBook rooms={len(self._rooms)} holding_pages={len(self._held)}>"

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def expecting(self) -> bool:
        """True while anybody may be writing into our pages."""
        return bool(self._held)

    def holds_pages_of(self, sender: str) -> bool:
        """True while a sender may be writing into our pages."""
        return any(room.sender == sender for room in self._held.values())

    def is_queued(self, room: str) -> bool:
        """A room of that name is announced and waits for pages."""
        queued = ReceiverState.QUEUED
        return any(known.handoff.room == room and known.state is queued for known in self._rooms.values())

    def stats(self) -> dict[str, int]:
        """Number of rooms in each state, and of pages in quarantine."""
        counts = {f"rooms_{state.value}": 0 for state in ReceiverState if state is not ReceiverState.GONE}
        pages = 0
        for room in self._rooms.values():
            counts[f"rooms_{room.state.value}"] += 1
            pages += len(room.pages) if room.state in _LOST else 0
        return {**counts, "pages_quarantined": pages}

    # What senders say

    def bootstrap(self, sender: str, message: Bootstrap, now: float) -> None:
        """A sender announces a room."""
        handoff = Handoff(
            room=message.room,
            peer=sender,
            prompt_tokens=message.prompt_tokens,
            pages=message.pages,
            sampling=message.sampling,
            max_new_tokens=message.max_new_tokens,
            ignore_eos=message.ignore_eos,
            grammar=message.grammar,
        )
        problem = self._misfit(message)
        if problem is not None:
            self._reply(sender, Refused(message.room, problem, message.ticket))
            return
        self._rooms[sender, message.ticket] = ReceiverRoom(handoff, sender, message.ticket, now)
        self.retry_reservations(now)

    def _misfit(self, message: Bootstrap) -> str | None:
        layout = self._layout
        if message.fingerprint != layout.fingerprint:
            return f"fingerprint is {message.fingerprint!r}, expected {layout.fingerprint!r}: other weights"
        if message.page_bytes != layout.page_bytes:
            return f"page_bytes is {message.page_bytes}, expected {layout.page_bytes}"
        if message.prompt_tokens < 1 or message.pages != layout.pages_for(message.prompt_tokens):
            return f"{message.prompt_tokens} tokens do not fill {message.pages} pages of {layout.page_size}"
        if message.pages > self._num_pages:
            return f"needs {message.pages} KV pages, the decode worker has {self._num_pages}"
        for room in self._rooms.values():
            if room.handoff.room == message.room and room.state not in _LOST:
                return f"room {message.room} is being received already"
        return None

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
            if room.state is ReceiverState.RESERVED and now - room.touched_at > self._room_timeout_s:
                self._handle(key, GivenUp(f"no KV came for {self._room_timeout_s:g} s"), now)

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
        for key, room in list(self._rooms.items()):
            if room.state is not ReceiverState.QUEUED or room.handoff.room in self._held:
                continue  # its name's predecessor still has pages: one room of a name at a time
            try:
                pages = self._handler.reserve(room.handoff)
            except AioprefillError as err:
                del self._rooms[key]
                self._reply(room.sender, Refused(room.handoff.room, str(err), room.ticket))
                continue
            if pages is None:
                return
            self._handle(key, PagesGranted([int(page) for page in pages]), now)

    def _handle_all(self, sender: str, event: Input, now: float) -> None:
        for key in [key for key in self._rooms if key[0] == sender]:
            self._handle(key, event, now)

    def _handle(self, key: tuple[str, int], event: Input, now: float) -> None:
        room = self._rooms.get(key)
        if room is None:
            return
        room.touched_at = now
        effects = room.handle(event)
        if room.state is ReceiverState.RESERVED:
            self._held[room.handoff.room] = room
        elif room.state is ReceiverState.GONE:
            del self._rooms[key]
            if self._held.get(room.handoff.room) is room:
                del self._held[room.handoff.room]
        for effect in effects:
            self._perform(room, effect)
        if Effect.RELEASED in effects:
            self.retry_reservations(now)

    def _perform(self, room: ReceiverRoom, effect: Effect) -> None:
        name, ticket = room.handoff.room, room.ticket
        match effect:
            case Effect.RESERVED:
                self._reply(room.sender, Reserved(name, pack_ids(room.pages), ticket))
            case Effect.REFUSED:
                self._reply(room.sender, Refused(name, room.reason, ticket))
            case Effect.ACKNOWLEDGED:
                self._reply(room.sender, Arrived(name, ticket))
            case Effect.ARRIVED:
                assert room.first is not None, "a room arrives with its Commit"
                self._handler.arrived(name, room.pages, room.first, room.handoff)
            case Effect.LOST:
                self._handler.lost(name, room.reason)
            case Effect.SETTLE:
                self._settle(room.sender, ticket)
            case Effect.RELEASED:
                self._handler.release_pages(name, room.pages)
