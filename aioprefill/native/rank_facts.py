"""What the ranks know of their own shards, put together on the leader: one fact for all. Pure.

Rules
- A room is ready, or done, when it is on every rank; it has failed when it has on one.
- A room is released when it is on every rank: before that some shard may still be read.
- Weights are swapped, or staged, when they are on every rank. A swap that failed on some ranks only leaves
  ranks with different weights: nobody can go on after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aioprefill.errors import RankError
from aioprefill.native.facts import LocalFact, StagedFact, SwappedFact, TransferFact
from aioprefill.transfer.port import TransferState


@dataclass(slots=True)
class _Room:
    """What is known of one room, by rank."""

    ready: int = 0
    done: int = 0
    released: int = 0
    failed: bool = False
    reason: str | None = None


@dataclass(slots=True)
class RankFacts:
    """Takes what each rank knows; gives what is known of all."""

    size: int
    _rooms: dict[str, _Room] = field(default_factory=dict)
    _swaps: list[SwappedFact] = field(default_factory=list)
    _staged: dict[int, list[StagedFact]] = field(default_factory=dict)

    def take(self, rank: int, fact: LocalFact) -> LocalFact | None:
        """The fact that is complete now, if any. Raises `RankError` when the ranks cannot go on."""
        if isinstance(fact, TransferFact):
            return self._transfer(rank, fact)
        if isinstance(fact, SwappedFact):
            return self._swap(rank, fact)
        return self._stage(fact)

    @property
    def rooms(self) -> int:
        """Rooms that are not released on every rank."""
        return len(self._rooms)

    def _transfer(self, rank: int, event: TransferFact) -> TransferFact | None:
        room = self._rooms.setdefault(event.room, _Room())
        first_failure = event.state is TransferState.FAILED and not room.failed
        room.ready += event.state is TransferState.WAITING_FOR_INPUT
        room.done += event.state is TransferState.SUCCESS
        room.released += event.released
        if event.state is TransferState.FAILED:
            room.failed = True
            room.reason = room.reason or (event.reason and f"{event.reason} (rank {rank})")
        released = room.released == self.size
        if released:
            del self._rooms[event.room]
        if released and room.failed:
            return TransferFact(event.room, TransferState.FAILED, room.reason, released=True)
        if room.done == self.size:
            return TransferFact(event.room, TransferState.SUCCESS, released=released)
        if first_failure:
            return TransferFact(event.room, TransferState.FAILED, room.reason)
        if event.state is TransferState.WAITING_FOR_INPUT and room.ready == self.size and not room.failed:
            return TransferFact(event.room, TransferState.WAITING_FOR_INPUT)
        return None

    def _swap(self, rank: int, fact: SwappedFact) -> SwappedFact | None:
        self._swaps.append(fact)
        if len(self._swaps) < self.size:
            return None
        swaps, self._swaps = self._swaps, []
        errors = [swap.error for swap in swaps if swap.error is not None]
        if errors and len(errors) < self.size:
            raise RankError(rank, f"the weights were swapped on some ranks only: {errors[0]}")
        return SwappedFact(errors[0] if errors else None)

    def _stage(self, fact: StagedFact) -> StagedFact | None:
        known = self._staged.setdefault(fact.number, [])
        known.append(fact)
        if len(known) < self.size:
            return None
        del self._staged[fact.number]
        return next((one for one in known if one.error is not None), fact)
