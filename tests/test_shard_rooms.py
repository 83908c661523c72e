"""Rooms that come in shards: pages once, arrival once, loss once, and no shard left behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from shard_support import WHOLE, Bench

from aioprefill.sampling_params import SamplingParams
from aioprefill.transfer import shard_assembler
from aioprefill.transfer.part import Part, first_ticket
from aioprefill.transfer.port import Handoff
from aioprefill.transfer.receiver_rooms import (
    Assembled,
    Cancelled,
    Committed,
    Effect,
    GivenUp,
    PagesGranted,
    ReceiverRoom,
    ReceiverState,
    SenderDead,
    Written,
)
from aioprefill.wire.messages import Commit

S = ReceiverState


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A book that must be able to end without leaving anything."""
    made = Bench()
    yield made
    made.end()


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_shards_arrive_in_any_order_and_the_worker_hears_of_the_room_once(
    bench: Bench, shards: int, seed: int
) -> None:
    """Announced and finished in any order: one reservation, the same pages, acknowledged at the end."""
    orders = list(itertools.permutations(range(shards)))
    announced, finished = orders[seed % len(orders)], orders[(5 * seed + 3) % len(orders)]
    for rank in announced:
        bench.announce(rank, shards=shards)
    assert bench.worker.asked == ["r"]
    assert all(bench.pages_of(f"g{rank}") == [0, 1] for rank in range(shards))
    for count, rank in enumerate(finished):
        assert bench.worker.heard == [] and bench.book.stats()["rooms_awaiting_shards"] == (count > 0)
        bench.finish(rank, token=70 + rank)
    assert bench.worker.heard == [("arrived", "r", [0, 1], 70, shards)]
    for rank in range(shards):
        assert bench.said(f"g{rank}") == ["Reserved", "Arrived"]
    assert not bench.book.expecting and bench.book.stats()["rooms_awaiting_shards"] == 0


def test_a_shard_may_be_complete_before_another_is_announced(bench: Bench) -> None:
    """A rank that lags: its shard gets the pages that the room has, and completes it."""
    bench.announce(1)
    bench.finish(1, token=8)
    assert bench.book.stats()["rooms_assembling"] == 1 and bench.worker.heard == []
    assert "rooms=1 awaiting_shards=1" in repr(bench.book._shards)
    bench.announce(0)
    bench.finish(0, token=9)
    assert bench.worker.heard == [("arrived", "r", [0, 1], 9, 2)]


def test_a_whole_room_is_handed_over_as_ever(bench: Bench) -> None:
    """No shards: nothing is said of any."""
    bench.announce(0, shards=1, group="")
    bench.book.commit("0", Commit("r", 1, 7, -0.5, ticket=1), 0.0)
    bench.book.written("0", 1, 0, 0.0)
    assert bench.worker.heard == [("arrived", "r", [0, 1], 7, 1)] and len(bench.book._shards) == 0


def test_a_shard_gets_its_rooms_pages_while_another_room_waits_at_the_head(bench: Bench) -> None:
    """Else the head would wait for pages of a room that waits for its shard behind it."""
    bench.announce(0, "a", 1, pages=6)
    bench.announce(0, "b", 2, pages=4)
    bench.announce(0, "c", 3, pages=1)
    bench.announce(1, "b", 2, pages=4)
    assert bench.said("g0") == ["Reserved"] and bench.said("g1") == []
    bench.announce(1, "a", 1, pages=6)
    assert bench.said("g1") == ["Reserved"] and bench.pages_of("g1") == [0, 1, 2, 3, 4, 5]
    bench.announce(1, "c", 3, pages=1)
    bench.finish(0, "a", 1)
    bench.finish(1, "a", 1)
    given = [(to, m.room) for to, m in bench.replies if type(m).__name__ == "Reserved"]
    assert given == [("g0", "a"), ("g1", "a"), ("g0", "b"), ("g1", "b"), ("g0", "c"), ("g1", "c")]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("stage", ["announced", "written", "complete"])
@pytest.mark.parametrize("end", ["loud", "quiet", "left", "dead", "given_up", "expired"])
def test_T3_the_loss_of_one_shard_loses_the_room_once_and_pages_wait_for_all_shards(
    bench: Bench, stage: str, end: str, waits: bool
) -> None:
    """At each stage, with the other shard still writing or complete: lost once, released by the last."""
    for rank in range(2):
        bench.announce(rank)
    if stage != "announced":
        bench.book.commit("g0", Commit("r", 1, 7, -0.5, ticket=1), 0.0)
    if stage == "complete":
        bench.book.written("g0", 1, 0, 0.0)
    if not waits and stage != "complete":
        bench.finish(1)
    match end:
        case "loud" | "quiet":
            bench.cancel(0, quiet=end == "quiet")
        case "left":
            bench.book.sender_left("g0", "gone", 0.0)
        case "dead":
            bench.book.sender_dead("g0", 0.0)
        case "given_up":
            bench.book.give_up("r", "nobody reads it", 0.0)
        case "expired":
            bench.book.expire(10.5)
    assert bench.worker.kinds("r") in (["lost"], ["lost", "released"])
    assert bench.worker.heard[0][2].startswith("shard ")
    assert bench.said("g1")[-1] == "Refused"
    bench.settle()
    for rank in range(2):
        still = [room for room in bench.book._rooms.values() if room.part.shard == rank]
        assert ("released" in bench.worker.kinds("r")) == (len(bench.book) == 0)
        if still:
            bench.cancel(rank)
            bench.settle()
    assert bench.worker.kinds("r") == ["lost", "released"] and len(bench.book) == 0


def test_T3_pages_stay_while_any_shards_writer_may_be_live(bench: Bench) -> None:
    """One rank is dead, the other not yet quiet: in quarantine, counted once, until it is."""
    bench.announce(0)
    bench.announce(1)
    bench.book.sender_left("g0", "gone", 0.0)
    bench.book.sender_dead("g0", 0.0)
    bench.settle()
    assert bench.worker.heard == [("lost", "r", "shard 0 of 2: gone")]
    assert bench.book.stats()["pages_quarantined"] == 2 and bench.book.holds_pages_of("g1")
    bench.cancel(1, quiet=False)
    bench.cancel(1)
    assert bench.book.stats()["rooms_settling"] == 1
    bench.settle()
    assert bench.worker.kinds("r") == ["lost", "released"]


def test_a_room_that_was_lost_while_it_waited_for_pages_is_lost_once(bench: Bench) -> None:
    """No pages, nothing to release; the shard not yet announced is refused when it comes."""
    bench.announce(0, "big", 1, pages=8)
    for rank in range(3):
        bench.announce(rank, "r", 2, shards=4)
    bench.cancel(1, "r", 2)
    assert bench.worker.kinds("r") == ["lost"] and bench.worker.asked == ["big", "r", "r", "r"]
    assert bench.said("g0") == ["Reserved", "Refused"] and bench.said("g1") == []
    bench.announce(3, "r", 2, shards=4)
    assert bench.refusal("g3") == "shard 1 of 4: no more" and bench.book._shards._ended == {}


def test_what_the_worker_refuses_is_refused_to_all_shards_also_to_those_that_come_later(
    bench: Bench,
) -> None:
    """Its words, once asked; the worker hears nothing more."""
    bench.announce(0, "big", 1, pages=8, shards=1, group="")
    for rank in range(2):
        bench.announce(rank, "r", 2, shards=4)
    bench.worker.refusing = "too many"
    bench.cancel(0, "big", 1, group="")
    bench.settle()
    for rank in (2, 3):
        bench.announce(rank, "r", 2, shards=4)
    assert [bench.refusal(f"g{rank}") for rank in range(4)] == ["prompt_tokens: too many"] * 4
    assert bench.worker.kinds("r") == [] and len(bench.book._shards._ended) == 0


def test_a_shard_of_a_lost_room_that_still_holds_pages_is_refused(bench: Bench) -> None:
    """It would never be completed."""
    bench.announce(0)
    bench.book.sender_left("g0", "gone", 0.0)
    bench.announce(1)
    assert bench.refusal("g1") == "shard 0 of 2: gone"
    bench.book.sender_dead("g0", 0.0)
    bench.settle()
    assert bench.worker.kinds("r") == ["lost", "released"] and bench.book._shards._ended == {}


def test_the_memory_of_lost_rooms_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that never come do not make it grow; the oldest is forgotten."""
    monkeypatch.setattr(shard_assembler, "MAX_ENDED", 3)
    for ticket in range(5):
        bench.announce(0, f"r{ticket}", ticket)
        bench.cancel(0, f"r{ticket}", ticket)
        bench.settle()
    assert [origin[1] for origin in bench.book._shards._ended] == [2, 3, 4]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"shards": 3, "page_bytes": 1}, "shards is 3, which does not divide kv_heads, 4 here"),
        ({"shards": 0, "page_bytes": 1}, "shards is 0"),
        ({"shard": 2}, "shard is 2, expected one of 2"),
        ({"shard": -1}, "shard is -1"),
        ({"group": ""}, "group is empty"),
        (
            {"page_bytes": WHOLE.page_bytes},
            f"page_bytes is {WHOLE.page_bytes}, expected {WHOLE.page_bytes // 2}",
        ),
        ({"fingerprint": "v"}, "fingerprint is 'v'"),
        ({"pages": 9, "prompt_tokens": 144}, "needs 9 KV pages"),
    ],
)
def test_shards_that_can_never_fit_are_refused_by_the_name_of_the_field(
    bench: Bench, fields: dict, why: str
) -> None:
    """The worker is not asked."""
    message = bench.announce(0)
    bench.cancel(0)
    bench.settle()
    asked = len(bench.worker.asked)
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    bench.book.bootstrap("x", type(message)(**{**values, "ticket": 9, **fields}), 0.0)
    assert why in bench.refusal("x") and len(bench.worker.asked) == asked


@pytest.mark.parametrize(
    ("rank", "ticket", "other", "why"),
    [
        (1, 1, {"group": "h"}, "being received already"),
        (0, 0, {}, "being received already"),
        (1, 0, {}, "being received already"),
        (1, 1, {"shards": 4}, "shards is 4, expected 2"),
        (1, 1, {"max_new_tokens": 9}, "the ranks disagree"),
        (1, 1, {"room": "other"}, "the ranks disagree"),
        (0, 1, {}, "ticket 1 is that of another room"),
        (1, 1, {"shard": 0}, "shard 0 of 2 of room r is being received already"),
        (0, 2, {"shards": 1, "group": ""}, "being received already"),
    ],
)
def test_what_does_not_belong_to_the_room_being_received_is_refused(
    bench: Bench, rank: int, ticket: int, other: dict, why: str
) -> None:
    """Another server's, an older one's, another number of shards, another room; what goes on does so."""
    bench.announce(0, ticket=1)
    bench.announce(rank, **{"room": "r", "ticket": ticket, **other})
    sender = f"{other.get('group', 'g')}{rank}"
    assert why in bench.refusal(sender)
    bench.announce(1)
    bench.finish(0)
    bench.finish(1)
    assert bench.worker.kinds("r") == ["arrived"]


def test_another_server_waits_for_the_quarantined_pages_of_its_rooms_name(bench: Bench) -> None:
    """A restarted server's rooms do not mix with those of its predecessor."""
    for rank in range(2):
        bench.announce(rank)
        bench.book.sender_left(f"g{rank}", "gone", 0.0)
    for rank in range(2):
        bench.announce(rank, ticket=5, group="h")
    assert bench.book.stats()["rooms_queued"] == 2
    for rank in range(2):
        bench.finish(rank)  # late news of the old one
        bench.book.sender_dead(f"g{rank}", 0.0)
        bench.settle()
    assert bench.said("h0") == bench.said("h1") == ["Reserved"]
    for rank in range(2):
        bench.finish(rank, ticket=5, group="h", token=3)
    assert bench.worker.heard[-1] == ("arrived", "r", bench.pages_of("h0"), 3, 2)


def test_a_name_that_comes_back_at_its_server_takes_no_shard_of_the_older_room(bench: Bench) -> None:
    """A rank that lags still says the old hand-off: it is refused, and its new shard joins the new one."""
    bench.announce(0, ticket=1)
    bench.finish(0, ticket=1)
    bench.announce(0, ticket=2)  # the server has given the first up; this rank's word came first
    assert bench.worker.kinds("r") == ["lost", "released"]
    assert bench.said("g0") == ["Reserved", "Refused", "Reserved"]
    bench.announce(1, ticket=1)
    assert "already" in bench.refusal("g1")
    bench.cancel(1, ticket=1)
    bench.announce(1, ticket=2)
    bench.finish(1, ticket=2)
    bench.finish(0, ticket=2)
    assert bench.worker.kinds("r") == ["lost", "released", "arrived"]


def test_progress_of_one_shard_keeps_the_others_and_a_missing_one_is_named(bench: Bench) -> None:
    """A complete shard does not expire while another is written; one that never comes ends the room."""
    bench.announce(0)
    bench.announce(1)
    bench.finish(0)
    bench.book.written("g1", 1, 0, 9.0)
    bench.book.expire(18.0)
    assert bench.worker.heard == []
    bench.book.expire(19.5)
    why = "shard 0 of 2: no KV came for 10 s; not here: shard 1 of 2"
    assert bench.worker.heard == [("lost", "r", why)] and bench.refusal("g1") == why
    bench.cancel(1)
    bench.settle()
    bench.announce(0, "alone", 2)
    bench.finish(0, "alone", 2)
    bench.book.expire(30.0)
    assert bench.worker.kinds("alone") == ["lost", "released"]


def test_rooms_that_have_pages_get_their_last_shards_while_no_new_rooms_are_taken(bench: Bench) -> None:
    """Which is what a decode worker asks when it stops."""
    awaited = bench.announce(0, "a", 1, pages=8)
    waiting = bench.announce(0, "b", 2)
    whole = bench.announce(0, "c", 3, group="", shards=1)
    assert [bench.book.awaits(message) for message in (awaited, waiting, whole)] == [True, False, False]
    bench.book.give_up_waiting("the decode worker stops", 0.0)
    assert bench.worker.kinds("b") == ["lost"]
    bench.announce(1, "a", 1, pages=8)
    bench.finish(0, "a", 1)
    bench.finish(1, "a", 1)
    assert bench.worker.kinds("a") == ["arrived"] and not bench.book.awaits(awaited)


def test_a_sender_that_leaves_while_its_room_is_handed_over_changes_nothing(bench: Bench) -> None:
    """The server that answers it may find that it is gone, in the middle of it."""
    bench.announce(0)
    bench.announce(1)
    book, replies = bench.book, bench.replies

    def reply(sender: str, message: object) -> None:
        replies.append((sender, message))
        book.sender_left("g1", "gone", 0.0)

    book._moves._reply = reply
    bench.finish(1)
    bench.finish(0)
    assert bench.worker.kinds("r") == ["arrived"] and len(book) == 0


def test_a_sender_that_leaves_while_pages_are_granted_loses_the_room_once(bench: Bench) -> None:
    """Its shard has pages by then: they come back when it is dead, and the other quiet."""
    bench.announce(0, "big", 1, pages=8)
    bench.announce(0, "r", 2)
    bench.announce(1, "r", 2)
    book = bench.book
    inner = book._moves._reply

    def reply(sender: str, message: object) -> None:
        inner(sender, message)
        if sender == "g0":
            book.sender_left("g1", "gone", 0.0)

    book._moves._reply = reply
    bench.cancel(0, "big", 1)
    bench.settle()
    assert bench.worker.kinds("r") == ["lost"]
    book.sender_dead("g1", 0.0)
    bench.cancel(0, "r", 2)
    bench.settle()
    assert bench.worker.kinds("r") == ["lost", "released"]


@pytest.mark.parametrize(
    ("event", "effects", "state"),
    [
        (Written(0), [], S.ASSEMBLING),
        (Committed(Commit("r", 1, 7, -0.5)), [], S.ASSEMBLING),
        (Assembled(), [Effect.ACKNOWLEDGED], S.GONE),
        (GivenUp("x"), [Effect.REFUSED, Effect.LOST, Effect.RELEASED], S.GONE),
        (Cancelled("x", quiet=False), [Effect.LOST, Effect.RELEASED], S.GONE),
        (SenderDead(), [Effect.LOST, Effect.RELEASED], S.GONE),
    ],
)
def test_a_complete_shard_waits_and_gives_its_pages_back_at_once(
    event: object, effects: list, state: S
) -> None:
    """Its writes are all here, so there is no quarantine for it."""
    handoff = Handoff("r", "s", 32, 2, SamplingParams(), 8)
    room = ReceiverRoom(handoff, "s", 1, 0.0, Part(2, 1, "g"))
    given = [PagesGranted([4]), Written(0), Committed(Commit("r", 1, 7, -0.5))]
    assert [effect for one in given for effect in room.handle(one)] == [Effect.RESERVED, Effect.COMPLETE]
    assert room.handle(event) == effects and room.state is state
    assert room.origin == ("g", 1)


def test_tickets_of_a_servers_ranks_begin_alike_and_those_of_two_servers_do_not() -> None:
    """By the group, which is random."""
    assert first_ticket("a") == first_ticket("a") != first_ticket("b") and 0 <= first_ticket("a") < 1 << 48
