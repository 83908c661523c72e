"""Hand-offs that come in shards: which shards are announced, which hold the pages, which are here. Pure.

The ranks of one prefill server send the shards of a room, each over its own connection, into the same pages.
To `ReceiverBook` each shard is a room of its own; what makes them one is kept here.

Rules
- Pages are asked for once, for the first shard that gets its turn; the others get the same at once, so that
  no shard waits behind a room that waits for the pages of this one.
- The worker hears once that the room arrived, when all shards are here, or once that it is lost, when the
  first of them is; the others are given up then, and those not yet announced are refused when they come.
- Pages go back when no shard holds them any more: each ends its own quarantine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from aioprefill.transfer.port import Handoff
from aioprefill.transfer.receiver_rooms import ReceiverRoom, ReceiverState

Origin = tuple[str, int]
"""`ReceiverRoom.origin`: the server and its number of the hand-off."""

MAX_ENDED = 1024
"""Lost hand-offs that are remembered for the shards of them that have not been announced."""


@dataclass(slots=True, eq=False)
class Assembly:
    """One hand-off in shards."""

    handoff: Handoff
    """As the first shard announced it."""
    shards: int
    rooms: dict[int, ReceiverRoom] = field(default_factory=dict)
    """Shards that were announced, also those that are gone."""
    pages: list[int] | None = None
    holders: set[int] = field(default_factory=set)
    """Shards that hold the pages."""
    reason: str | None = None
    """Why it is lost."""

    @property
    def missing(self) -> list[int]:
        """Shards that are not completely here."""
        here = ReceiverState.ASSEMBLING
        return [n for n in range(self.shards) if n not in self.rooms or self.rooms[n].state is not here]


class ShardAssembler:
    """All hand-offs in shards of one decode process; rooms given to it are shards."""

    def __init__(self) -> None:
        self._assemblies: dict[Origin, Assembly] = {}
        self._ended: dict[Origin, Assembly] = {}

    def __repr__(self) -> str:
        return f"<ShardAssembler rooms={len(self._assemblies)} awaiting_shards={self.awaiting}>"

    def __len__(self) -> int:
        return len(self._assemblies)

    @property
    def awaiting(self) -> int:
        """Rooms of which some shards are here and others not."""
        known = [assembly for assembly in self._assemblies.values() if assembly.reason is None]
        return sum(len(assembly.missing) < assembly.shards for assembly in known)

    def holds_pages(self, origin: Origin) -> bool:
        """True when a shard of this hand-off that comes now has pages waiting for it."""
        assembly = self._assemblies.get(origin)
        return assembly is not None and assembly.reason is None and assembly.pages is not None

    def objection(self, room: ReceiverRoom) -> str | None:
        """Why a shard that is announced cannot be taken; None: `join` it."""
        assembly = self._assemblies.get(room.origin) or self._ended.get(room.origin)
        if assembly is None:
            return None
        part, name = room.part, room.handoff.room
        if part.shards != assembly.shards:
            return f"shards is {part.shards}, expected {assembly.shards}, as its other ranks say"
        if replace(room.handoff, peer=assembly.handoff.peer) != assembly.handoff:
            return f"room {name} is another one at another rank of its server: the ranks disagree"
        if assembly.reason is not None:
            self._note_latecomer(room, assembly)
            return assembly.reason
        if part.shard in assembly.rooms:
            return f"{part} of room {name} is being received already"
        return None

    def join(self, room: ReceiverRoom) -> list[int] | None:
        """Take a shard without objection. Its pages, when the room has them already."""
        assembly = self._assemblies.get(room.origin)
        if assembly is None:
            assembly = self._assemblies[room.origin] = Assembly(room.handoff, room.part.shards)
        assembly.rooms[room.part.shard] = room
        if assembly.pages is not None:
            assembly.holders.add(room.part.shard)
        self.touch(room, room.touched_at)
        return assembly.pages

    def touch(self, room: ReceiverRoom, now: float) -> None:
        """A sign of progress of one shard is one of the room's."""
        assembly = self._assemblies.get(room.origin)
        if assembly is not None:
            for shard in assembly.rooms.values():
                shard.touched_at = now

    def reserved(self, room: ReceiverRoom, pages: list[int]) -> Sequence[ReceiverRoom]:
        """The worker has given pages; the shards that must get them now, all of them."""
        assembly = self._assemblies[room.origin]
        assembly.pages = pages
        assembly.holders.update(assembly.rooms)
        return list(assembly.rooms.values())

    def refused(self, room: ReceiverRoom, reason: str) -> Sequence[ReceiverRoom]:
        """The worker does not want the room; the other shards, which are to be given up."""
        assembly = self._assemblies[room.origin]
        assembly.reason = reason
        self._end(room.origin, assembly)
        return _others(assembly, room)

    def complete(self, room: ReceiverRoom) -> Sequence[ReceiverRoom]:
        """All of a shard is here; all shards, when that goes for all: the room is theirs no more."""
        assembly = self._assemblies[room.origin]
        if assembly.missing:
            return ()
        del self._assemblies[room.origin]
        return [assembly.rooms[shard] for shard in range(assembly.shards)]

    def lost(self, room: ReceiverRoom) -> tuple[str, Sequence[ReceiverRoom]] | None:
        """A shard will not arrive. None: the room is lost already; else why it is now lost, and the other
        shards, which are to be given up.
        """
        assembly = self._assemblies.get(room.origin)
        if assembly is None or assembly.reason is not None:
            return None
        assembly.reason = f"{room.part}: {room.reason}"
        if not assembly.holders:
            self._end(room.origin, assembly)
        return assembly.reason, _others(assembly, room)

    def released(self, room: ReceiverRoom) -> bool:
        """A shard of a lost room holds its pages no more; True when none does."""
        assembly = self._assemblies[room.origin]
        assembly.holders.discard(room.part.shard)
        if assembly.holders:
            return False
        self._end(room.origin, assembly)
        return True

    def shortfall(self, room: ReceiverRoom) -> str:
        """Which shards are not here, for the reason of a timeout."""
        assembly = self._assemblies[room.origin]
        return f"; not here: shard {', '.join(map(str, assembly.missing))} of {assembly.shards}"

    def _note_latecomer(self, room: ReceiverRoom, assembly: Assembly) -> None:
        assembly.rooms[room.part.shard] = room
        if len(assembly.rooms) == assembly.shards:
            self._ended.pop(room.origin, None)

    def _end(self, origin: Origin, assembly: Assembly) -> None:
        del self._assemblies[origin]
        if len(assembly.rooms) < assembly.shards:
            if len(self._ended) >= MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            self._ended[origin] = assembly


def _others(assembly: Assembly, room: ReceiverRoom) -> Sequence[ReceiverRoom]:
    return [other for other in assembly.rooms.values() if other is not room]
