"""One hand-off, or one shard of it, as the decode side sees it: a pure state machine.

Rule: pages that were reserved come back when their sender says that it is quiet, or is known dead, and
what it sent before has come in; until then a lost room stays in quarantine, because a write that has
begun cannot be stopped. A shard that is complete is written to no more: its pages come back at once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from aioprefill.engine.port import SampledToken
from aioprefill.errors import InvalidMove
from aioprefill.transfer.part import WHOLE, Part
from aioprefill.transfer.port import Handoff
from aioprefill.wire.messages import Commit


class ReceiverState(enum.Enum):
    """Where a room is."""

    QUEUED = "queued"
    """No pages for it yet."""
    RESERVED = "reserved"
    ASSEMBLING = "assembling"
    """All of a shard is here; other shards are not."""
    QUARANTINED = "quarantined"
    """Lost, but its sender may still be writing."""
    SETTLING = "settling"
    """Lost, its sender writes no more; what it sent before may still be on its way."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class PagesGranted:
    """The decode worker has pages for it."""

    pages: list[int]


@dataclass(frozen=True, slots=True)
class Written:
    """A write is complete."""

    number: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The sender has posted everything."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Assembled:
    """All shards are here."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The sender gives the room up; `quiet`: and writes no more."""

    reason: str
    quiet: bool


@dataclass(frozen=True, slots=True)
class GivenUp:
    """We give the room up: its sender left or is too slow, or nobody wants it any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class SenderDead:
    """The sender's process is known dead: it writes no more."""


@dataclass(frozen=True, slots=True)
class Settled:
    """All that was sent before the sender ended has come in."""


Input = PagesGranted | Written | Committed | Assembled | Cancelled | GivenUp | SenderDead | Settled


class Effect(enum.Enum):
    """What is to be done, in order."""

    RESERVED = "tell the sender its pages"
    REFUSED = "tell the sender that the room is given up"
    ACKNOWLEDGED = "tell the sender that all has arrived"
    ARRIVED = "hand the room to the worker"
    COMPLETE = "answer with Assembled when the other shards are here too"
    LOST = "tell the worker that the room will not arrive"
    SETTLE = "answer with Settled, soon"
    RELEASED = "give the worker its pages back"


_S = ReceiverState

MOVES: dict[tuple[ReceiverState, type[Input]], str] = {
    (_S.QUEUED, PagesGranted): "grant",
    (_S.QUEUED, Cancelled): "lose",
    (_S.QUEUED, GivenUp): "give_up",
    (_S.QUEUED, SenderDead): "lose",
    (_S.QUEUED, Written): "ignore",
    (_S.QUEUED, Committed): "ignore",
    (_S.RESERVED, Written): "write",
    (_S.RESERVED, Committed): "commit",
    (_S.RESERVED, Cancelled): "cancel",
    (_S.RESERVED, GivenUp): "give_up",
    (_S.RESERVED, SenderDead): "lose",
    (_S.ASSEMBLING, Assembled): "assemble",
    (_S.ASSEMBLING, GivenUp): "give_up_complete",
    **{(_S.ASSEMBLING, kind): "lose_complete" for kind in (Cancelled, SenderDead)},
    **{(_S.ASSEMBLING, kind): "ignore" for kind in (Written, Committed)},
    (_S.QUARANTINED, Cancelled): "cancel",
    (_S.QUARANTINED, SenderDead): "lose",
    **{(_S.QUARANTINED, kind): "ignore" for kind in (Written, Committed, GivenUp)},
    (_S.SETTLING, Settled): "settle",
    **{(_S.SETTLING, kind): "ignore" for kind in (Written, Committed, Cancelled, GivenUp, SenderDead)},
}


class ReceiverRoom:
    """State of one hand-off. `touched_at` is the time of the last sign of progress."""

    def __init__(self, handoff: Handoff, sender: str, ticket: int, now: float, part: Part = WHOLE) -> None:
        self.handoff = handoff
        self.sender = sender
        self.ticket = ticket
        self.part = part
        self.origin = (part.group or sender, ticket)
        """Names the hand-off: the same for all its shards."""
        self.touched_at = now
        self.state = ReceiverState.QUEUED
        self.reason = ""
        self.pages: list[int] = []
        self.first: SampledToken | None = None
        self._written: set[int] = set()
        self._writes: int | None = None

    def __repr__(self) -> str:
        return (
            f"<ReceiverRoom {self.handoff.room} {self.state.value} pages={len(self.pages)}"
            f" writes={len(self._written)}/{self._writes}>"
        )

    def handle(self, event: Input) -> list[Effect]:
        """Make the move that `event` asks for. Raises `InvalidMove` where that is a bug of ours."""
        move = MOVES.get((self.state, type(event)))
        if move is None:
            raise InvalidMove(f"{self!r}: {event} is not allowed")
        effects: list[Effect] = getattr(self, f"_{move}")(event)
        return effects

    def _ignore(self, event: Input) -> list[Effect]:
        return []

    def _grant(self, event: PagesGranted) -> list[Effect]:
        self.pages = event.pages
        self.state = ReceiverState.RESERVED
        return [Effect.RESERVED]

    def _write(self, event: Written) -> list[Effect]:
        self._written.add(event.number)
        return self._arrive_if_complete()

    def _commit(self, event: Committed) -> list[Effect]:
        commit = event.commit
        self._writes = commit.writes
        self.first = SampledToken(commit.token_id, commit.logprob, commit.top_logprobs)
        return self._arrive_if_complete()

    def _arrive_if_complete(self) -> list[Effect]:
        if len(self._written) != self._writes:
            return []
        if self.part.shards > 1:
            self.state = ReceiverState.ASSEMBLING
            return [Effect.COMPLETE]
        self.state = ReceiverState.GONE
        return [Effect.ACKNOWLEDGED, Effect.ARRIVED]

    def _assemble(self, event: Assembled) -> list[Effect]:
        self.state = ReceiverState.GONE
        return [Effect.ACKNOWLEDGED]

    def _give_up_complete(self, event: GivenUp) -> list[Effect]:
        return [Effect.REFUSED, *self._lose_complete(event)]

    def _lose_complete(self, event: GivenUp | Cancelled | SenderDead) -> list[Effect]:
        self.reason = _reason(event)
        self.state = ReceiverState.GONE
        return [Effect.LOST, Effect.RELEASED]

    def _give_up(self, event: GivenUp) -> list[Effect]:
        self.reason = event.reason
        self.state = ReceiverState.QUARANTINED if self.pages else ReceiverState.GONE
        return [Effect.REFUSED, Effect.LOST]

    def _cancel(self, event: Cancelled) -> list[Effect]:
        if event.quiet:
            return self._lose(event)
        effects = [] if self.state is ReceiverState.QUARANTINED else [Effect.LOST]
        self.reason = self.reason or event.reason
        self.state = ReceiverState.QUARANTINED
        return effects

    def _lose(self, event: Cancelled | SenderDead) -> list[Effect]:
        """The end of a room that no write touches any more."""
        effects = [] if self.state is ReceiverState.QUARANTINED else [Effect.LOST]
        if not self.reason:
            self.reason = _reason(event)
        if not self.pages:
            self.state = ReceiverState.GONE
            return effects
        self.state = ReceiverState.SETTLING
        return [*effects, Effect.SETTLE]

    def _settle(self, event: Settled) -> list[Effect]:
        self.state = ReceiverState.GONE
        return [Effect.RELEASED]


def _reason(event: GivenUp | Cancelled | SenderDead) -> str:
    return "its prefill process died" if isinstance(event, SenderDead) else event.reason
