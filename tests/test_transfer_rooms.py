"""Rooms of the prefill side: every legal move, and the release rule under random histories."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioprefill.engine.port import SampledToken
from aioprefill.errors import InvalidMove
from aioprefill.kv_layout import KVLayout
from aioprefill.sampling_params import SamplingParams
from aioprefill.transfer.port import Handoff, TransferEvent, TransferState
from aioprefill.transfer.room_book import RoomBook
from aioprefill.transfer.room_events import (
    Abandoned,
    Acknowledged,
    DropUnposted,
    Emit,
    PagesReserved,
    PeerLost,
    PeerReady,
    RefusedByPeer,
    Send,
    Tell,
    Write,
    WriteEnded,
)
from aioprefill.transfer.rooms import MOVES, RoomState, SenderRoom
from aioprefill.wire.messages import Bootstrap, Cancel, Commit

FIRST = SampledToken(3, -0.5)
LAYOUT = KVLayout("w", layers=1, kv_heads=1, head_dim=1, page_size=16, dtype="float32")
S = RoomState


def handoff(room: str = "r", pages: int = 4, peer: str = "tcp://peer:1") -> Handoff:
    return Handoff(room, peer, pages * 16, pages, SamplingParams(), max_new_tokens=8)


def make_room(pages: int = 4, write_pages: int = 2) -> SenderRoom:
    return SenderRoom(handoff(pages=pages), 9, fingerprint="w", page_bytes=128, write_pages=write_pages)


def reserved(pages: int = 4) -> PagesReserved:
    return PagesReserved(np.arange(100, 100 + pages, dtype=np.uint32), 200)


def feed(room: SenderRoom, *events: object) -> list[object]:
    """Let the room make moves; all commands, with writes as (number, local, remote)."""
    commands: list[object] = []
    for event in events:
        for command in room.handle(event):
            if isinstance(command, Write):
                commands.append((command.number, command.local.tolist(), command.remote.tolist()))
            else:
                commands.append(command)
    return commands


def event(state: TransferState, reason: str | None = None, released: bool = False) -> Emit:
    return Emit(TransferEvent("r", state, reason, released))


def cancel(reason: str, quiet: bool) -> Tell:
    return Tell(Cancel("r", reason, quiet, 9))


def failed(reason: str, released: bool) -> Emit:
    return event(TransferState.FAILED, reason, released)


def test_a_room_that_goes_well() -> None:
    """Announce, wait, write in parts of bounded size, commit, success with the release."""
    room = make_room()
    (announced,) = feed(room, PeerReady())
    assert isinstance(announced, Tell) and isinstance(announced.message, Bootstrap)
    assert (announced.message.pages, announced.message.ticket, announced.message.page_bytes) == (4, 9, 128)
    assert feed(room, reserved()) == [event(TransferState.WAITING_FOR_INPUT)]
    assert feed(room, Send([5], 0, None)) == [(0, [5], [100])]
    assert feed(room, WriteEnded(0, None)) == []
    assert feed(room, Send([6, 7, 8], 1, FIRST)) == [
        (1, [6, 7], [101, 102]),
        (2, [8], [103]),
        Tell(Commit("r", 3, 3, -0.5, (), 9)),
    ]
    assert "committed" in repr(room) and "live=2" in repr(room)
    assert feed(room, WriteEnded(2, None), WriteEnded(1, None)) == []
    assert feed(room, Acknowledged()) == [event(TransferState.SUCCESS, released=True)]
    assert room.state is S.GONE


def test_an_acknowledgement_may_overtake_our_own_end_of_a_write() -> None:
    """The release still waits for it; an error of it is of no account then, nor is the peer's loss."""
    room = make_room(pages=2)
    feed(room, PeerReady(), reserved(2), Send([1, 2], 0, FIRST))
    assert feed(room, Acknowledged(), Acknowledged(), PeerLost("x"), RefusedByPeer("x"), reserved(2)) == []
    assert feed(room, WriteEnded(0, "connection reset")) == [event(TransferState.SUCCESS, released=True)]


def test_an_acknowledgement_waits_for_every_live_write() -> None:
    """Two writes live: success comes with the second one's end."""
    room = make_room()
    feed(room, PeerReady(), reserved(), Send([1, 2, 3, 4], 0, FIRST), Acknowledged())
    assert feed(room, WriteEnded(1, None)) == []
    assert feed(room, WriteEnded(0, None)) == [event(TransferState.SUCCESS, released=True)]


@pytest.mark.parametrize("end", [RefusedByPeer("why"), PeerLost("why")])
@pytest.mark.parametrize("before", [[PeerReady()], [PeerReady(), reserved()]])
def test_failing_without_a_live_write_reports_and_releases_at_once(before: list, end: object) -> None:
    """One event; the peer is told that nothing is written."""
    room = make_room()
    feed(room, *before)
    assert feed(room, end) == [cancel("why", True), failed("why", True)]


def test_an_unannounced_room_ends_without_a_word_to_the_peer() -> None:
    """Lost or abandoned before its Bootstrap."""
    for end in (PeerLost("why"), Abandoned("why")):
        assert feed(make_room(), end) == [failed("why", True)]


@pytest.mark.parametrize("end", [RefusedByPeer("why"), PeerLost("why"), WriteEnded(0, "why")])
@pytest.mark.parametrize("final", [None, FIRST])
def test_T3_failing_with_live_writes_releases_when_the_last_is_terminal(end: object, final: object) -> None:
    """FAILED unreleased first, then the release; whatever comes in between changes nothing."""
    room = make_room(pages=4, write_pages=1)
    feed(room, PeerReady(), reserved(), Send([1, 2, 3], 0, None), Send([4], 3, final))
    assert feed(room, end) == [cancel("why", False), DropUnposted(9), failed("why", False)]
    noise = (
        reserved(),
        RefusedByPeer("x"),
        Acknowledged(),
        PeerLost("x"),
        Abandoned("x"),
        Send([9], 9, None),
    )
    assert feed(room, *noise) == []
    rest = sorted(room.live)
    assert feed(room, *(WriteEnded(number, None) for number in rest[:-1])) == []
    assert feed(room, WriteEnded(rest[-1], "x")) == [cancel("why", True), failed("why", True)]


@pytest.mark.parametrize(
    "before",
    [
        [Send([1, 2], 0, None)],
        [Send([1, 2], 0, None), Send([3, 4], 2, FIRST)],
        [Send([1, 2], 0, None), Send([3, 4], 2, FIRST), Acknowledged()],
    ],
)
def test_T3_after_abandon_there_is_only_the_release(before: list) -> None:
    """No outcome is reported; the release waits for live writes."""
    room = make_room()
    feed(room, PeerReady(), reserved(), *before)
    assert feed(room, Abandoned("enough")) == [cancel("enough", False), DropUnposted(9)]
    commands = feed(room, *(WriteEnded(number, None) for number in sorted(room.live)))
    assert commands == [cancel("enough", True), failed("enough", True)]


def test_abandon_without_live_writes_releases_at_once() -> None:
    """While bootstrapping, and while waiting."""
    for before in ([PeerReady()], [PeerReady(), reserved()]):
        room = make_room()
        feed(room, *before)
        assert feed(room, Abandoned("enough")) == [cancel("enough", True), failed("enough", True)]


def test_a_failed_write_without_others_fails_and_releases_at_once() -> None:
    """NIXL's own words are the reason."""
    room = make_room()
    feed(room, PeerReady(), reserved(), Send([1, 2], 0, None))
    assert feed(room, WriteEnded(0, "broken")) == [cancel("broken", True), failed("broken", True)]


@pytest.mark.parametrize("pages", [reserved(3), PagesReserved(np.full(4, 200, np.uint32), 200)])
def test_pages_that_do_not_fit_fail_the_room(pages: PagesReserved) -> None:
    """Too few, or outside the peer's pool."""
    room = make_room()
    feed(room, PeerReady())
    commands = feed(room, pages)
    assert commands[1].event.released and "4 needed" in commands[1].event.reason


def test_what_a_peer_says_out_of_turn_is_ignored() -> None:
    """A second Reserved, and an acknowledgement of what was not committed."""
    room = make_room()
    feed(room, PeerReady())
    assert feed(room, Acknowledged(), reserved())[0].event.state is TransferState.WAITING_FOR_INPUT
    assert feed(room, Acknowledged(), reserved(), Send([1], 0, None), Acknowledged(), reserved())[1:] == []
    assert room.state is S.TRANSFERRING


@pytest.mark.parametrize(
    ("send", "why"),
    [
        (Send([1], 1, None), "leaves a gap"),
        (Send([1, 2, 3, 4, 5], 0, None), "overruns"),
        (Send([1], 0, FIRST), "is final but ends at page 1 of 4"),
    ],
)
def test_a_send_that_breaks_the_order_is_our_bug(send: Send, why: str) -> None:
    """Gaps, overruns and an early final are refused with the room's story."""
    room = make_room()
    feed(room, PeerReady(), reserved())
    with pytest.raises(InvalidMove, match=why) as caught:
        room.handle(send)
    assert "opened+PeerReady bootstrapping+PagesReserved" in str(caught.value)


def test_moves_that_are_not_in_the_table_are_refused() -> None:
    """In every state each kind of input either is in the table or raises."""
    kinds = (
        PeerReady(), reserved(), RefusedByPeer("x"), PeerLost("x"), Send([], 0, None), WriteEnded(0, None),
        Acknowledged(), Abandoned("x"),
    )  # fmt: skip
    illegal = 0
    for state in RoomState:
        for kind in kinds:
            room = make_room()
            room.state = state
            if (state, type(kind)) not in MOVES:
                illegal += 1
                with pytest.raises(InvalidMove):
                    room.handle(kind)
    assert illegal == len(RoomState) * len(kinds) - len(MOVES)
    assert (S.OPENED, Send) not in MOVES and (S.BOOTSTRAPPING, Send) not in MOVES
    assert not [move for move in MOVES if move[0] is S.GONE]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_T3_any_history_ends_with_exactly_one_release_and_never_over_a_live_write(
    data: st.DataObject,
) -> None:
    """Random legal inputs: one released event, last, and no write of the room is live at that moment."""
    room = make_room(pages=6, write_pages=2)
    live: set[int] = set()
    sent = 0
    events: list[TransferEvent] = []
    while room.state is not S.GONE:
        options: list[object] = [Abandoned("a"), PeerLost("l")]
        if room.state is S.OPENED:
            options.append(PeerReady())
        else:
            options += [reserved(6), RefusedByPeer("r"), Acknowledged()]
        if room.state in (S.WAITING, S.TRANSFERRING):
            count = data.draw(st.integers(0, 6 - sent))
            final = FIRST if sent + count == 6 and data.draw(st.booleans()) else None
            options.append(Send(list(range(sent, sent + count)), sent, final))
        if live:
            options.append(WriteEnded(min(live), data.draw(st.sampled_from([None, "e"]))))
        options = [option for option in options if (room.state, type(option)) in MOVES]
        chosen = data.draw(st.sampled_from(options))
        if isinstance(chosen, WriteEnded):
            live.remove(chosen.number)
        if isinstance(chosen, Send):
            sent += len(chosen.pages)
        for command in room.handle(chosen):
            if isinstance(command, Write):
                live.add(command.number)
            elif isinstance(command, Emit):
                events.append(command.event)
                assert not (command.event.released and live)
    assert [event.released for event in events].count(True) == 1 and events[-1].released


class RecordingCarrier:
    """A carrier that only writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []
        self.posted: list[tuple[str, Write]] = []
        self.dropped: list[tuple[str, int]] = []

    def tell(self, peer: str, message: object) -> None:
        self.told.append((peer, message))

    def post(self, peer: str, write: Write) -> None:
        self.posted.append((peer, write))

    def drop_unposted(self, peer: str, ticket: int) -> None:
        self.dropped.append((peer, ticket))


def make_book() -> tuple[RoomBook, RecordingCarrier, list[str]]:
    carrier, wakes = RecordingCarrier(), []
    return RoomBook(carrier, LAYOUT, lambda: wakes.append("wake")), carrier, wakes


def test_the_book_carries_out_commands_and_wakes_once_for_a_batch_of_events() -> None:
    """Tell, post, drop and emit reach their places; `poll` empties; a released room is forgotten."""
    book, carrier, wakes = make_book()
    ticket = book.open(handoff())
    assert book.ticket_of("r") == ticket and ticket in book and len(book) == 1 and "rooms=1" in repr(book)
    book.handle(ticket, PeerReady())
    book.handle(ticket, reserved())
    book.handle(ticket, Send([1, 2], 0, None))
    book.handle(ticket, PeerLost("gone"))
    assert carrier.dropped == [("tcp://peer:1", ticket)] and len(carrier.posted) == 1
    assert wakes == ["wake"] and book.stats()["rooms_draining"] == 1
    assert [event.state for event in book.poll()] == [TransferState.WAITING_FOR_INPUT, TransferState.FAILED]
    book.handle(ticket, WriteEnded(0, None))
    assert [event.released for event in book.poll()] == [True] and wakes == ["wake", "wake"]
    assert book.room(ticket) is None and book.ticket_of("r") is None and book.poll() == []
    book.handle(ticket, Acknowledged())  # late news of a room that is gone
    assert [type(message) for _, message in carrier.told] == [Bootstrap, Cancel, Cancel]


def test_the_book_tells_incarnations_of_a_room_apart() -> None:
    """A name may come back when it was released, under another ticket; not before."""
    book, _, _ = make_book()
    first = book.open(handoff())
    with pytest.raises(InvalidMove, match="not yet released"):
        book.open(handoff())
    book.handle(first, Abandoned("x"))
    assert book.open(handoff()) != first


def test_losing_a_peer_spares_other_peers_and_what_it_has_not_heard_of() -> None:
    """A closed connection fails announced rooms; a lapsed lease all of them."""
    book, _, _ = make_book()
    tickets = {
        name: book.open(handoff(name, peer=peer)) for name, peer in (("a", "p"), ("b", "p"), ("c", "q"))
    }
    book.handle(tickets["a"], PeerReady())
    book.lose_peer("p", "closed", unannounced_too=False)
    assert [event.room for event in book.poll()] == ["a"]
    book.lose_peer("p", "silent", unannounced_too=True)
    assert [event.room for event in book.poll()] == ["b"] and [r.handoff.room for r in book.rooms()] == ["c"]


def test_writes_are_bounded_in_pages_and_bytes() -> None:
    """At most 1,000 pages and 64 MiB a write, but at least one page."""
    for page_bytes, pages, expected in ((128, 2500, [1000, 1000, 500]), (48 << 20, 3, [1, 1, 1])):
        head = page_bytes // (2 * 16 * 4)
        layout = KVLayout("w", layers=1, kv_heads=1, head_dim=head, page_size=16, dtype="float32")
        carrier = RecordingCarrier()
        book = RoomBook(carrier, layout, lambda: None)
        ticket = book.open(handoff(pages=pages))
        book.handle(ticket, PeerReady())
        book.handle(ticket, PagesReserved(np.arange(pages, dtype=np.uint32), pages))
        book.handle(ticket, Send(range(pages), 0, FIRST))
        assert [len(write.local) for _, write in carrier.posted] == expected
        assert carrier.told[-1][1].writes == len(expected)
