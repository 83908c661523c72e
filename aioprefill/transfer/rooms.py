"""One hand-off as the prefill side sees it: a pure state machine, without sockets, clock or NIXL.

Rules
- Every change of a room's state happens in `SenderRoom.handle`; `MOVES` says which are legal. A move that is
  our own bug raises `InvalidMove`; one that a peer or a race can cause is ignored or ends the room.
- A room ends with exactly one event whose `released` is true, and only when no write of it is live.
- The peer learns of a room that it may hold pages for: Commit, or Cancel with `quiet` once no write is live.
"""

from __future__ import annotations

import enum
from collections import deque

import numpy as np

from aioprefill.engine.port import SampledToken
from aioprefill.errors import InvalidMove
from aioprefill.transfer.part import WHOLE, Part
from aioprefill.transfer.port import Handoff, TransferEvent, TransferState
from aioprefill.transfer.room_events import (
    Abandoned,
    Acknowledged,
    Command,
    DropUnposted,
    Emit,
    Input,
    PagesReserved,
    PeerLost,
    PeerReady,
    RefusedByPeer,
    Send,
    Tell,
    Write,
    WriteEnded,
)
from aioprefill.wire.messages import Bootstrap, Cancel, Commit

HISTORY = 16


class RoomState(enum.Enum):
    """Finer than `TransferState`."""

    OPENED = "opened"
    """The peer does not know of it yet."""
    BOOTSTRAPPING = "bootstrapping"
    WAITING = "waiting_for_input"
    TRANSFERRING = "transferring"
    COMMITTED = "committed"
    """All writes and Commit are under way."""
    ACKNOWLEDGED = "acknowledged"
    """The peer has all; our own end of a write is not in yet."""
    DRAINING = "draining"
    """Failed or abandoned; writes are still live."""
    GONE = "gone"


_S = RoomState
_ANY_WRITING = (_S.TRANSFERRING, _S.COMMITTED)

MOVES: dict[tuple[RoomState, type[Input]], str] = {
    (_S.OPENED, PeerReady): "announce",
    (_S.OPENED, PeerLost): "fail",
    (_S.OPENED, Abandoned): "abandon",
    (_S.BOOTSTRAPPING, PagesReserved): "accept_pages",
    (_S.BOOTSTRAPPING, RefusedByPeer): "fail",
    (_S.BOOTSTRAPPING, Acknowledged): "ignore",
    (_S.BOOTSTRAPPING, PeerLost): "fail",
    (_S.BOOTSTRAPPING, Abandoned): "abandon",
    **{(state, Send): "write" for state in (_S.WAITING, _S.TRANSFERRING)},
    **{(state, PagesReserved): "ignore" for state in (_S.WAITING, *_ANY_WRITING, _S.ACKNOWLEDGED)},
    **{(state, RefusedByPeer): "fail" for state in (_S.WAITING, *_ANY_WRITING)},
    **{(state, PeerLost): "fail" for state in (_S.WAITING, *_ANY_WRITING)},
    **{(state, Abandoned): "abandon" for state in (_S.WAITING, *_ANY_WRITING, _S.ACKNOWLEDGED)},
    **{(state, WriteEnded): "end_write" for state in _ANY_WRITING},
    **{(state, Acknowledged): "ignore" for state in (_S.WAITING, _S.TRANSFERRING, _S.ACKNOWLEDGED)},
    (_S.COMMITTED, Acknowledged): "acknowledge",
    (_S.ACKNOWLEDGED, RefusedByPeer): "ignore",
    (_S.ACKNOWLEDGED, PeerLost): "ignore",
    (_S.ACKNOWLEDGED, WriteEnded): "end_acknowledged_write",
    (_S.DRAINING, WriteEnded): "drain",
    **{
        (_S.DRAINING, kind): "ignore"
        for kind in (PagesReserved, RefusedByPeer, Acknowledged, PeerLost, Send, Abandoned)
    },
}


class SenderRoom:
    """State of one hand-off. `ticket` names it on the wire: the request id may come back, a ticket never."""

    def __init__(
        self,
        handoff: Handoff,
        ticket: int,
        *,
        fingerprint: str,
        page_bytes: int,
        write_pages: int,
        part: Part = WHOLE,
    ) -> None:
        self.handoff = handoff
        self.ticket = ticket
        self.state = RoomState.OPENED
        self.live: set[int] = set()
        """Numbers of the writes that are not terminal."""
        self._fingerprint = fingerprint
        self._page_bytes = page_bytes
        self._write_pages = write_pages
        self._part = part
        self._remote = np.empty(0, dtype=np.int32)
        self._next_page = 0
        self._writes = 0
        self._reason: str | None = None
        self._history: deque[str] = deque(maxlen=HISTORY)

    def __repr__(self) -> str:
        return (
            f"<SenderRoom {self.handoff.room} {self.state.value} pages={self._next_page}/{self.handoff.pages}"
            f" live={len(self.live)}>"
        )

    def handle(self, event: Input) -> list[Command]:
        """Make the move that `event` asks for. Raises `InvalidMove` where that is a bug of ours."""
        move = MOVES.get((self.state, type(event)))
        if move is None:
            raise self._invalid(event, "not allowed")
        self._history.append(f"{self.state.value}+{type(event).__name__}")
        commands: list[Command] = getattr(self, f"_{move}")(event)
        return commands

    def _invalid(self, event: Input, why: str) -> InvalidMove:
        story = " ".join(self._history) or "nothing yet"
        return InvalidMove(f"room {self.handoff.room} is {self.state.value}: {event} {why}; before: {story}")

    def _ignore(self, event: Input) -> list[Command]:
        return []

    def _announce(self, event: PeerReady) -> list[Command]:
        self.state = RoomState.BOOTSTRAPPING
        handoff = self.handoff
        bootstrap = Bootstrap(
            room=handoff.room,
            prompt_tokens=handoff.prompt_tokens,
            pages=handoff.pages,
            sampling=handoff.sampling,
            max_new_tokens=handoff.max_new_tokens,
            ignore_eos=handoff.ignore_eos,
            fingerprint=self._fingerprint,
            page_bytes=self._page_bytes,
            ticket=self.ticket,
            grammar=handoff.grammar,
            shards=self._part.shards,
            shard=self._part.shard,
            group=self._part.group,
        )
        return [Tell(bootstrap)]

    def _accept_pages(self, event: PagesReserved) -> list[Command]:
        pages = event.pages
        if len(pages) != self.handoff.pages or (len(pages) and int(pages.max()) >= event.num_pages):
            reason = (
                f"reserved {len(pages)} pages of a pool of {event.num_pages}, {self.handoff.pages} needed"
            )
            return self._end(reason, report=True)
        self._remote = pages.astype(np.int32)
        self.state = RoomState.WAITING
        return [self._emit(TransferState.WAITING_FOR_INPUT)]

    def _write(self, event: Send) -> list[Command]:
        end = event.first_page + len(event.pages)
        if event.first_page != self._next_page or end > self.handoff.pages:
            raise self._invalid(event, f"leaves a gap or overruns: next is {self._next_page}")
        if event.final is not None and end != self.handoff.pages:
            raise self._invalid(event, f"is final but ends at page {end} of {self.handoff.pages}")
        local = np.asarray(event.pages, dtype=np.int32)
        commands: list[Command] = []
        for start in range(0, len(local), self._write_pages):
            part = slice(start, start + self._write_pages)
            remote = self._remote[event.first_page : end][part]
            commands.append(Write(self.ticket, self._writes, local[part], remote))
            self.live.add(self._writes)
            self._writes += 1
        self._next_page = end
        self.state = RoomState.TRANSFERRING
        if event.final is not None:
            self.state = RoomState.COMMITTED
            commands.append(Tell(self._commit(event.final)))
        return commands

    def _commit(self, final: SampledToken) -> Commit:
        return Commit(
            room=self.handoff.room,
            writes=self._writes,
            token_id=final.token_id,
            logprob=final.logprob,
            top_logprobs=final.top_logprobs,
            ticket=self.ticket,
        )

    def _end_write(self, event: WriteEnded) -> list[Command]:
        self.live.remove(event.number)
        return [] if event.error is None else self._end(event.error, report=True)

    def _acknowledge(self, event: Acknowledged) -> list[Command]:
        self.state = RoomState.ACKNOWLEDGED
        return self._succeed_if_still()

    def _end_acknowledged_write(self, event: WriteEnded) -> list[Command]:
        # an error is of no account: the peer has said that all pages are there
        self.live.remove(event.number)
        return self._succeed_if_still()

    def _succeed_if_still(self) -> list[Command]:
        if self.live:
            return []
        self.state = RoomState.GONE
        return [self._emit(TransferState.SUCCESS, released=True)]

    def _fail(self, event: RefusedByPeer | PeerLost) -> list[Command]:
        return self._end(event.reason, report=True)

    def _abandon(self, event: Abandoned) -> list[Command]:
        return self._end(event.reason, report=False)

    def _drain(self, event: WriteEnded) -> list[Command]:
        self.live.remove(event.number)
        return [] if self.live else self._release()

    def _end(self, reason: str, *, report: bool) -> list[Command]:
        """Fail or abandon. The pages stay ours to protect until the last live write is terminal."""
        self._reason = reason
        if not self.live:
            return self._release()
        self.state = RoomState.DRAINING
        commands: list[Command] = [Tell(self._cancel(quiet=False)), DropUnposted(self.ticket)]
        if report:
            commands.append(self._emit(TransferState.FAILED))
        return commands

    def _release(self) -> list[Command]:
        told = self.state is not RoomState.OPENED
        self.state = RoomState.GONE
        commands: list[Command] = [Tell(self._cancel(quiet=True))] if told else []
        return [*commands, self._emit(TransferState.FAILED, released=True)]

    def _cancel(self, *, quiet: bool) -> Cancel:
        return Cancel(room=self.handoff.room, message=self._reason or "", quiet=quiet, ticket=self.ticket)

    def _emit(self, state: TransferState, *, released: bool = False) -> Emit:
        return Emit(TransferEvent(self.handoff.room, state, self._reason, released))
