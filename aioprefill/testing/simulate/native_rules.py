"""What holds on one rank's native host behind every host call, and what ranks must agree on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aioprefill.host import Ingested, Progress
from aioprefill.native.facts import AbortFact, GrammarFact
from aioprefill.native.frontend import Arrival, Controlled
from aioprefill.native.host import NativeHost
from aioprefill.testing.simulate.native_parts import SimulatedTransfer
from aioprefill.testing.simulate.twins import State
from aioprefill.tp_agree import CallToken

CHANGING = frozenset({"process_result", "fail_result", "begin_drain", "end_drain"})
"""Calls that can change who holds what, whatever they came to."""

Pieces = list[tuple[str, int, int, bytes]]
"""What `NativeBatch.describe` says: (id, start, end, pages)."""
_pieces = msgspec.msgpack.Decoder(Pieces)
_ingested = msgspec.msgpack.Decoder(Ingested)
_progress = msgspec.msgpack.Decoder(Progress)


def pieces_of(description: bytes) -> Pieces:
    """The batch that a preparation has found."""
    return _pieces.decode(description) if description else []


def held_back(host: NativeHost) -> tuple[str, ...]:
    """What came and is not dispatched, in order."""
    return tuple(map(_label, host.frontend.inbox))


def _label(item: object) -> str:
    match item:
        case Arrival():
            return item.request.request_id
        case AbortFact() | GrammarFact():
            return f"{type(item).__name__} {item.request_id}"
        case Controlled():
            return f"{type(item.command).__name__} {item.number}"
    return type(item).__name__


def state_of(host: NativeHost) -> State:
    """What ranks must agree on."""
    pool, intake = host.memory.pool, host.intake
    return (
        held_back(host) if host.frontend.inbox else (),
        intake.pause.phase._value_,
        intake.pause.swapping,
        intake.weight_version,
        pool._refs.tobytes(),
        pool._stack[: pool.free].tobytes(),
        pool.idle,
        [
            (
                *(r.request_id, r.state._value_, r.planned, r.computed, r.sent_pages),
                *(r.in_flight, r.room_open, r.first_mask is None),
            )
            for r in host.ledger.requests.values()
        ],
    )


def check_host(host: NativeHost, transfer: SimulatedTransfer, token: CallToken, description: bytes) -> None:
    """What holds on every rank. Raises `AssertionError`."""
    assert len(host.forwards.pending) <= 2, "three forwards are in flight"
    if changed(token, description):
        check_use(host, transfer)


def check_leader(host: NativeHost, token: CallToken, description: bytes) -> None:
    """What holds on the leader, and therefore on followers that are alike. Raises `AssertionError`."""
    if changed(token, description):
        host.memory.check()
    if token.kind == "prepare" and description:
        check_waiting(host, token.now, pieces_of(description))


def changed(token: CallToken, description: bytes) -> bool:
    """The call may have changed who holds what."""
    match token.kind:
        case "prepare":
            return bool(description)
        case "ingest":
            return _ingested.decode(description).admission_changed
        case "progress_transfers":
            progress = _progress.decode(description)
            return bool(progress.retired or progress.failed or progress.freed)
    return token.kind in CHANGING


def check_use(host: NativeHost, transfer: SimulatedTransfer) -> None:
    """No page that a forward or a transfer may touch is free."""
    refs = host.memory.pool._refs
    for forward in host.forwards.pending:
        for span in forward.engine_forward.spans:  # type: ignore[attr-defined]
            assert refs[span.pages].all(), f"forward {forward.number} uses pages that nobody holds"
    held = transfer.held_pages()
    if held:
        assert refs[list(held)].all(), f"pages of live transfers are free: {sorted(held)}"


def check_waiting(host: NativeHost, now: float, pieces: Pieces) -> None:
    """Nobody is admitted before an earlier one that is admissible and has waited for its bound."""
    limit = host.config.policy_max_wait_s
    requests = host.ledger.requests
    admitted = [
        requests[name].arrival
        for name, start, _, _ in pieces
        if requests[name].cached == requests[name].planned == start and not requests[name].in_flight
    ]
    if not admitted:
        return
    last = max(admitted)
    for request in host.ledger.waiting.values():
        late = now - request.arrival_s >= limit and request.grammar_ready
        if late and request.arrival < last:
            raise AssertionError(f"{request.request_id} waits past its bound while later ones are admitted")


def check_counts(host: NativeHost) -> None:
    """The leader's queue counts are those of what waits."""
    queued = [request for request in host.ledger.requests.values() if request.waits]
    coming: Sequence[Arrival] = [
        item for item in (*host.frontend.inbox, *host.frontend.coming) if isinstance(item, Arrival)
    ]
    assert host.frontend.queued_requests == len(queued) + len(coming), "the queue is counted wrongly"
    tokens = sum(request.length for request in queued) + sum(len(item.tokens) for item in coming)
    assert host.frontend.queued_tokens == tokens, "queued tokens are counted wrongly"


def check_nothing_left(rank: int, host: NativeHost, transfer: SimulatedTransfer) -> None:
    """Everything is released on this rank."""
    assert not host.ledger.requests, f"rank {rank} is left with {list(host.ledger.requests)}"
    assert host.memory.pool.held == 0, f"rank {rank} holds pages: {host.memory.pool!r}"
    assert not transfer.open_rooms, f"rank {rank} has rooms: {transfer.open_rooms}"
    assert not host.frontend._live, f"rank {rank} keeps ids: {list(host.frontend._live)}"
    assert not host.frontend.aborting, f"rank {rank} keeps aborts: {host.frontend.aborting}"
    assert host.timers.next() is None, f"rank {rank} keeps a timer"
    assert not host.forwards.pending, f"rank {rank} has forwards without a result"
