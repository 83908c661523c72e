"""Rooms of the decode side: every legal move, reservations in order, and pages that come back once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioprefill.engine.port import SampledToken
from aioprefill.errors import InvalidMove, InvalidRequest, WireError
from aioprefill.kv_layout import KVLayout
from aioprefill.sampling_params import SamplingParams
from aioprefill.transfer.notification import decode_notification, encode_notification
from aioprefill.transfer.port import Handoff
from aioprefill.transfer.receiver_book import ReceiverBook
from aioprefill.transfer.receiver_rooms import (
    MOVES,
    Cancelled,
    Committed,
    Effect,
    GivenUp,
    PagesGranted,
    ReceiverRoom,
    ReceiverState,
    SenderDead,
    Settled,
    Written,
)
from aioprefill.wire.messages import Arrived, Bootstrap, Cancel, Commit, Refused, Reserved, unpack_ids

LAYOUT = KVLayout("w", layers=1, kv_heads=1, head_dim=1, page_size=16, dtype="float32")
S = ReceiverState


def make_room() -> ReceiverRoom:
    return ReceiverRoom(Handoff("r", "s", 32, 2, SamplingParams(), 8), "s", 1, 0.0)


def commit(writes: int, ticket: int = 1, room: str = "r") -> Commit:
    return Commit(room, writes, 7, -0.5, ticket=ticket)


def feed(room: ReceiverRoom, *events: object) -> list[Effect]:
    return [effect for event in events for effect in room.handle(event)]


@pytest.mark.parametrize(
    "order",
    [
        [Written(0), Written(1), Committed(commit(2))],
        [Committed(commit(2)), Written(1), Written(0)],
        [Written(1), Written(1), Committed(commit(2)), Written(0)],
    ],
)
def test_a_room_arrives_when_the_commit_and_all_its_writes_are_there(order: list) -> None:
    """In any order; a notification that comes twice counts once."""
    room = make_room()
    assert feed(room, PagesGranted([4, 5])) == [Effect.RESERVED]
    assert feed(room, *order[:-1]) == []
    assert feed(room, order[-1]) == [Effect.ACKNOWLEDGED, Effect.ARRIVED]
    assert room.first == SampledToken(7, -0.5) and room.state is S.GONE and "2/2" in repr(room)


@pytest.mark.parametrize(
    ("before", "event", "effects", "state"),
    [
        ([], Cancelled("x", quiet=False), [Effect.LOST], S.GONE),
        ([], Cancelled("x", quiet=True), [Effect.LOST], S.GONE),
        ([], GivenUp("x"), [Effect.REFUSED, Effect.LOST], S.GONE),
        ([], SenderDead(), [Effect.LOST], S.GONE),
        ([], Written(0), [], S.QUEUED),
        ([PagesGranted([4])], Cancelled("x", quiet=False), [Effect.LOST], S.QUARANTINED),
        ([PagesGranted([4])], Cancelled("x", quiet=True), [Effect.LOST, Effect.SETTLE], S.SETTLING),
        ([PagesGranted([4])], GivenUp("x"), [Effect.REFUSED, Effect.LOST], S.QUARANTINED),
        ([PagesGranted([4])], SenderDead(), [Effect.LOST, Effect.SETTLE], S.SETTLING),
        ([PagesGranted([4]), GivenUp("x")], Cancelled("y", quiet=False), [], S.QUARANTINED),
        ([PagesGranted([4]), GivenUp("x")], Committed(commit(0)), [], S.QUARANTINED),
        ([PagesGranted([4]), GivenUp("x")], Cancelled("y", quiet=True), [Effect.SETTLE], S.SETTLING),
        ([PagesGranted([4]), GivenUp("x")], SenderDead(), [Effect.SETTLE], S.SETTLING),
        ([PagesGranted([4]), SenderDead()], Written(0), [], S.SETTLING),
        ([PagesGranted([4]), SenderDead()], Settled(), [Effect.RELEASED], S.GONE),
    ],
)
def test_T3_lost_rooms_go_through_quarantine(before: list, event: object, effects: list, state: S) -> None:
    """Pages come back after a quiet cancel or the sender's death, never before; LOST is said once."""
    room = make_room()
    feed(room, *before)
    assert feed(room, event) == effects
    assert room.state is state


def test_a_queued_room_that_is_cancelled_loudly_is_not_quarantined() -> None:
    """It has no pages, so there is nothing to keep."""
    room = make_room()
    assert feed(room, Cancelled("x", quiet=False)) == [Effect.LOST] and room.state is S.GONE


def test_the_first_reason_is_kept() -> None:
    """What ended a room is not overwritten by what follows from it."""
    room = make_room()
    feed(room, PagesGranted([1]), GivenUp("too slow"), Cancelled("failed there too", quiet=True))
    assert room.reason == "too slow"
    room = make_room()
    feed(room, PagesGranted([1]), SenderDead())
    assert "died" in room.reason


def test_moves_that_are_not_in_the_table_are_refused() -> None:
    """In every state each kind of input either is in the table or raises."""
    for state in ReceiverState:
        for kind in (PagesGranted([1]), Settled(), SenderDead()):
            room = make_room()
            room.state = state
            if (state, type(kind)) not in MOVES:
                with pytest.raises(InvalidMove):
                    room.handle(kind)


class Worker:
    """A handler with a number of pages; it writes down what it hears."""

    def __init__(self, pages: int = 8) -> None:
        self.free = list(range(pages))
        self.heard: list[tuple[object, ...]] = []
        self.refusing = False
        self.book: ReceiverBook | None = None

    def reserve(self, handoff: Handoff) -> list[int] | None:
        if self.refusing:
            raise InvalidRequest("prompt_tokens", "too many")
        if len(self.free) < handoff.pages:
            return None
        return [self.free.pop(0) for _ in range(handoff.pages)]

    def arrived(self, room: str, pages: list[int], first: SampledToken, handoff: Handoff) -> None:
        self.heard.append(("arrived", room, pages, first.token_id))

    def lost(self, room: str, reason: str) -> None:
        self.heard.append(("lost", room, reason))

    def release_pages(self, room: str, pages: list[int]) -> None:
        self.heard.append(("released", room, pages))
        self.free += pages
        assert self.book is not None
        self.book.retry_reservations(0.0)  # from inside a callback, as the real worker does


class Bench:
    """A book with a worker, the replies it sent and the settlements it asked for."""

    def __init__(self, pages: int = 8) -> None:
        self.worker = Worker(pages)
        self.replies: list[tuple[str, object]] = []
        self.settling: list[tuple[str, int]] = []
        self.book = ReceiverBook(
            LAYOUT,
            8,
            self.worker,
            lambda sender, message: self.replies.append((sender, message)),
            lambda sender, ticket: self.settling.append((sender, ticket)),
            room_timeout_s=10.0,
        )
        self.worker.book = self.book

    def bootstrap(self, room: str, ticket: int, pages: int = 2, sender: str = "s", **other: object) -> None:
        fields = {"fingerprint": "w", "page_bytes": LAYOUT.page_bytes, "prompt_tokens": pages * 16, **other}
        message = Bootstrap(
            room=room, pages=pages, sampling=SamplingParams(), max_new_tokens=8, ignore_eos=False,
            ticket=ticket, **fields,
        )  # fmt: skip
        self.book.bootstrap(sender, message, 0.0)

    def settle(self) -> None:
        for sender, ticket in self.settling:
            self.book.settled(sender, ticket, 0.0)
        self.settling.clear()


def test_a_room_is_reserved_written_and_handed_over() -> None:
    """Reserved with the worker's pages; Arrived and `arrived` once; nothing is expected any more."""
    bench = Bench()
    bench.bootstrap("r", 1)
    ((sender, reserved),) = bench.replies
    assert sender == "s" and isinstance(reserved, Reserved) and unpack_ids(reserved.pages).tolist() == [0, 1]
    assert bench.book.expecting and bench.book.holds_pages_of("s") and len(bench.book) == 1
    assert "holding_pages=1" in repr(bench.book)
    bench.book.commit("s", commit(1), 0.0)
    bench.book.written("s", 1, 0, 0.0)
    assert bench.replies[-1] == ("s", Arrived("r", 1))
    assert bench.worker.heard == [("arrived", "r", [0, 1], 7)]
    assert not bench.book.expecting and not bench.book.holds_pages_of("s") and len(bench.book) == 0
    bench.book.written("s", 1, 1, 0.0)  # late news of a room that is gone
    bench.book.written("other", 1, 0, 0.0)


def test_rooms_wait_for_pages_in_order() -> None:
    """The oldest waiting room gets pages first; a smaller one behind it does not overtake."""
    bench = Bench()
    bench.bootstrap("a", 1, pages=6)
    bench.bootstrap("b", 2, pages=4)
    bench.bootstrap("c", 3, pages=1)
    assert bench.book.stats()["rooms_queued"] == 2
    bench.book.cancel("s", Cancel("a", "no", True, 1), 0.0)
    bench.settle()
    assert [message.room for _, message in bench.replies if isinstance(message, Reserved)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"fingerprint": "v"}, "fingerprint is 'v', expected 'w'"),
        ({"page_bytes": 9}, "page_bytes is 9, expected 128"),
        ({"prompt_tokens": 0}, "do not fill"),
        ({"prompt_tokens": 16}, "16 tokens do not fill 2 pages of 16"),
        ({"pages": 9}, "needs 9 KV pages, the decode worker has 8"),
    ],
)
def test_rooms_that_can_never_fit_are_refused(fields: dict, why: str) -> None:
    """The refusal names the difference; the worker is not asked."""
    bench = Bench()
    bench.bootstrap("r", 1, **fields)
    ((_, refused),) = bench.replies
    assert isinstance(refused, Refused) and why in refused.message and refused.ticket == 1
    assert bench.worker.heard == [] and len(bench.book) == 0


def test_what_the_worker_refuses_is_refused_with_its_words() -> None:
    """An `InvalidRequest` of `reserve` goes to the sender; the worker hears nothing more of the room."""
    bench = Bench()
    bench.worker.refusing = True
    bench.bootstrap("r", 1)
    assert bench.replies == [("s", Refused("r", "prompt_tokens: too many", 1))]
    assert bench.worker.heard == [] and len(bench.book) == 0


def test_a_room_of_the_same_name_is_refused_while_the_first_is_on_its_way() -> None:
    """Two hand-offs for one request at the same time: the second is refused."""
    bench = Bench()
    bench.bootstrap("r", 1)
    bench.bootstrap("r", 1, sender="t")
    assert "is being received already" in bench.replies[-1][1].message


def test_T3_a_room_waits_for_the_quarantined_pages_of_its_name() -> None:
    """A retry after a crash is reserved when its predecessor's pages are back; the two do not mix."""
    bench = Bench()
    bench.bootstrap("r", 1)
    bench.book.sender_left("s", "gone", 0.0)
    assert bench.book.stats()["pages_quarantined"] == 2 and bench.worker.heard == [("lost", "r", "gone")]
    bench.bootstrap("r", 1, sender="t")
    bench.book.written("s", 1, 0, 0.0)
    assert bench.book.stats()["rooms_queued"] == 1 and bench.book.expecting
    bench.book.sender_dead("s", 0.0)
    assert bench.book.expecting
    bench.settle()
    assert bench.worker.heard[-1] == ("released", "r", [0, 1])
    assert bench.replies[-1][0] == "t" and isinstance(bench.replies[-1][1], Reserved)


def test_rooms_without_progress_expire_and_progress_postpones_it() -> None:
    """The room timeout counts from the last write; queued rooms have none."""
    bench = Bench()
    bench.bootstrap("slow", 1)
    bench.bootstrap("busy", 2)
    bench.bootstrap("queued", 3, pages=8)
    bench.book.written("s", 2, 0, 8.0)
    bench.book.expire(10.5)
    assert bench.worker.heard == [("lost", "slow", "no KV came for 10 s")]
    assert isinstance(bench.replies[-1][1], Refused) and bench.replies[-1][1].ticket == 1


def test_giving_up_by_name_and_closing_lose_every_room_once() -> None:
    """`give_up` quarantines; `close` releases everything at once."""
    bench = Bench()
    for ticket, room in enumerate(("a", "b", "c")):
        bench.bootstrap(room, ticket)
    bench.book.give_up("a", "not wanted", 0.0)
    bench.book.give_up("unknown", "x", 0.0)
    bench.book.close("shutting down", 0.0)
    lost = [entry[1:] for entry in bench.worker.heard if entry[0] == "lost"]
    assert lost == [("a", "not wanted"), ("b", "shutting down"), ("c", "shutting down")]
    assert sorted(bench.worker.free) == list(range(8)) and len(bench.book) == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_T3_pages_come_back_exactly_once_whatever_senders_do(data: st.DataObject) -> None:
    """Random messages and departures of two senders: no page is given out twice or lost."""
    bench = Bench()
    for step in range(data.draw(st.integers(1, 25))):
        sender, ticket = data.draw(st.sampled_from(["s", "t"])), data.draw(st.integers(1, 4))
        room = f"r{ticket}"
        match data.draw(st.integers(0, 8)):
            case 0 | 1:
                if (sender, step) not in bench.settling:
                    bench.bootstrap(
                        room, 100 * step + ticket, pages=data.draw(st.integers(1, 5)), sender=sender
                    )
            case 2:
                for key in list(bench.book._rooms):
                    bench.book.written(*key, 0, 0.0)
            case 3:
                for key in list(bench.book._rooms):
                    bench.book.commit(key[0], commit(1, key[1]), 0.0)
            case 4:
                for key in list(bench.book._rooms)[:1]:
                    bench.book.cancel(key[0], Cancel(room, "c", data.draw(st.booleans()), key[1]), 0.0)
            case 5:
                bench.book.sender_left(sender, "left", 0.0)
            case 6:
                bench.book.sender_dead(sender, 0.0)
            case 7:
                bench.book.give_up(room, "given up", 0.0)
            case 8:
                bench.settle()
        for entry in [entry for entry in bench.worker.heard if entry[0] == "arrived"]:
            bench.worker.heard.remove(entry)
            bench.worker.free += entry[2]
    bench.book.close("end", 0.0)
    assert sorted(bench.worker.free) == list(range(8)) and not bench.book.expecting


def test_notifications_travel_and_strangers_are_told_apart() -> None:
    """Round trip; anything else is a `WireError`."""
    assert decode_notification(encode_notification("epoch", 1 << 50, 3)) == ("epoch", 1 << 50, 3)
    for payload in (b"", b"probe", b"\x93\x01\x02\x03"):
        with pytest.raises(WireError):
            decode_notification(payload)
