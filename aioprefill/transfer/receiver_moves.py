"""What follows from rooms' moves: answers to senders, words to the worker, moves of other rooms. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aioprefill.errors import AioprefillError
from aioprefill.transfer.receiver_port import ReceiverHandler
from aioprefill.transfer.receiver_rooms import (
    Assembled,
    Effect,
    GivenUp,
    Input,
    PagesGranted,
    ReceiverRoom,
    ReceiverState,
)
from aioprefill.transfer.shard_assembler import Origin, ShardAssembler
from aioprefill.wire.messages import Arrived, Refused, Reserved, pack_ids

Reply = Callable[[str, Reserved | Refused | Arrived], None]
"""Sends a message to a sender; one that has left does not get it."""


class ReceiverMoves:
    """The rooms of a decode process, by sender and ticket, and who of them has pages.

    `on_released(now)` is called when pages have come back.
    """

    def __init__(
        self,
        handler: ReceiverHandler,
        reply: Reply,
        settle: Callable[[str, int], None],
        on_released: Callable[[float], None],
    ) -> None:
        self.rooms: dict[tuple[str, int], ReceiverRoom] = {}
        self.shards = ShardAssembler()
        self._handler = handler
        self._reply = reply
        self._settle = settle
        self._on_released = on_released
        self._held: dict[tuple[str, int], ReceiverRoom] = {}
        """Rooms that have pages."""
        self._holding: dict[str, Origin] = {}
        """Hand-offs that have pages, by room name."""

    def __repr__(self) -> str:
        return f"<ReceiverMoves rooms={len(self.rooms)} holding_pages={len(self._holding)}>"

    @property
    def holding(self) -> int:
        """Hand-offs that have pages."""
        return len(self._holding)

    def is_held(self, name: str) -> bool:
        """True while a hand-off of a room of that name has pages."""
        return name in self._holding

    def holds_pages_of(self, sender: str) -> bool:
        """True while a sender may be writing into our pages."""
        return any(room.sender == sender for room in self._held.values())

    def add(self, room: ReceiverRoom, now: float) -> None:
        """Take a room that waits for pages; a shard gets those that its siblings have."""
        self.rooms[room.sender, room.ticket] = room
        if room.part.shards > 1:
            pages = self.shards.join(room)
            if pages is not None:
                self.make([room], PagesGranted(pages), now)

    def reserve(self, room: ReceiverRoom, now: float) -> bool:
        """Ask the worker for a room's pages; False: it has none now. A refusal is passed on."""
        name, in_shards = room.handoff.room, room.part.shards > 1
        try:
            given = self._handler.reserve(room.handoff)
        except AioprefillError as err:
            del self.rooms[room.sender, room.ticket]
            self._reply(room.sender, Refused(name, str(err), room.ticket))
            if in_shards:
                self.make(self.shards.refused(room, str(err)), GivenUp(str(err)), now)
            return True
        if given is None:
            return False
        pages = [int(page) for page in given]
        self._holding[name] = room.origin
        granted = self.shards.reserved(room, pages) if in_shards else [room]
        self.make(granted, PagesGranted(pages), now)
        return True

    def make(self, rooms: Sequence[ReceiverRoom], event: Input, now: float) -> None:
        """Let rooms make a move: first all of them, then what follows from it, which may be more moves."""
        moved = [(room, self._step(room, event, now)) for room in rooms]
        for room, effects in moved:
            for effect in effects:
                self._perform(room, effect, now)
        if any(Effect.RELEASED in effects for _, effects in moved):
            self._on_released(now)

    def _step(self, room: ReceiverRoom, event: Input, now: float) -> list[Effect]:
        key = (room.sender, room.ticket)
        if self.rooms.get(key) is not room:
            return []
        room.touched_at = now
        if room.part.shards > 1:
            self.shards.touch(room, now)
        effects = room.handle(event)
        if room.state is ReceiverState.RESERVED:
            self._held[key] = room
        elif room.state is ReceiverState.GONE:
            del self.rooms[key]
            if self._held.pop(key, None) is not None and room.part.shards == 1:
                del self._holding[room.handoff.room]
        return effects

    def _perform(self, room: ReceiverRoom, effect: Effect, now: float) -> None:
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
            case Effect.COMPLETE:
                self._assemble(room, now)
            case Effect.LOST:
                self._lose(room, now)
            case Effect.SETTLE:
                self._settle(room.sender, ticket)
            case Effect.RELEASED:
                self._release(room)

    def _assemble(self, room: ReceiverRoom, now: float) -> None:
        shards = self.shards.complete(room)
        if not shards:
            return
        del self._holding[room.handoff.room]
        self.make(shards, Assembled(), now)
        first = shards[0]
        assert first.first is not None, "a shard arrives with its Commit"
        self._handler.arrived(first.handoff.room, first.pages, first.first, first.handoff, len(shards))

    def _lose(self, room: ReceiverRoom, now: float) -> None:
        if room.part.shards == 1:
            self._handler.lost(room.handoff.room, room.reason)
        elif (loss := self.shards.lost(room)) is not None:
            reason, others = loss
            self._handler.lost(room.handoff.room, reason)
            self.make(others, GivenUp(reason), now)

    def _release(self, room: ReceiverRoom) -> None:
        if room.part.shards > 1:
            if not self.shards.released(room):
                return
            del self._holding[room.handoff.room]
        self._handler.release_pages(room.handoff.room, room.pages)
