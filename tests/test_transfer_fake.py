"""The fake transfer: scripted peers under a virtual clock, and violations of the port's rules are seen."""

from __future__ import annotations

import asyncio

import pytest

from aioprefill.engine.port import SampledToken
from aioprefill.sampling_params import SamplingParams
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.transfer import FakeSend, FakeTransfer
from aioprefill.transfer.port import Handoff, TransferEvent, TransferState

FIRST = SampledToken(3, -0.5)
WAITING, SUCCESS, FAILED = TransferState.WAITING_FOR_INPUT, TransferState.SUCCESS, TransferState.FAILED


def make(**options: object) -> tuple[FakeTransfer, list[tuple[float, TransferEvent]]]:
    transfer, events = FakeTransfer(**options), []
    transfer.start(
        lambda: events.extend((asyncio.get_running_loop().time(), event) for event in transfer.poll())
    )
    return transfer, events


def handoff(room: str = "r", pages: int = 2, peer: str = "p") -> Handoff:
    return Handoff(room, peer, pages * 16, pages, SamplingParams(), 8)


def brief(events: list[tuple[float, TransferEvent]]) -> list[tuple[float, str, str, bool]]:
    return [(at, event.room, event.state.value, event.released) for at, event in events]


@virtual_time
async def test_handshakes_and_writes_take_their_time_one_after_the_other() -> None:
    """`handshake_s` after open; each write `write_s` after the one before; success with the last."""
    transfer, events = make(handshake_s=1.0, write_s=0.5)
    transfer.open(handoff("a"))
    transfer.open(handoff("b"))
    await asyncio.sleep(1.0)
    transfer.send("a", [7], 0, None)
    transfer.send("b", [8, 9], 0, FIRST)
    transfer.send("a", [5], 1, FIRST)
    assert transfer.live_writes == [("a", (7,)), ("b", (8, 9)), ("a", (5,))]
    await asyncio.sleep(5.0)
    assert brief(events) == [
        (1.0, "a", "waiting_for_input", False),
        (1.0, "b", "waiting_for_input", False),
        (2.0, "b", "success", True),
        (2.5, "a", "success", True),
    ]
    assert transfer.sends == [
        FakeSend("a", (7,), 0, None), FakeSend("b", (8, 9), 0, FIRST), FakeSend("a", (5,), 1, FIRST)
    ]  # fmt: skip
    assert transfer.received("a") == [7, 5] and not transfer.open_rooms and not transfer.held_pages()
    await transfer.aclose()


@virtual_time
async def test_the_test_can_decide_everything_itself() -> None:
    """With None nothing ends by itself; writes end in the order that the test wants, also with an error."""
    transfer, events = make(handshake_s=None, write_s=None)
    transfer.open(handoff("a"))
    transfer.open(handoff("b", pages=1))
    await asyncio.sleep(100)
    assert events == []
    transfer.finish_handshake("a")
    transfer.finish_handshake("b")
    transfer.finish_handshake("unknown")
    transfer.send("a", [1, 2], 0, FIRST)
    transfer.send("b", [3], 0, FIRST)
    transfer.finish_write("b")
    transfer.finish_write(error="broken")
    with pytest.raises(AssertionError, match="no write of a is live"):
        transfer.finish_write("a")
    assert [(e.room, e.state, e.reason) for _, e in events[2:]] == [
        ("b", SUCCESS, None),
        ("a", FAILED, "broken"),
    ]


@virtual_time
async def test_T1_a_first_token_without_pages_commits() -> None:
    """All pages were sent before: the empty last send ends the room."""
    transfer, events = make()
    transfer.open(handoff(pages=1))
    await settle()
    transfer.send("r", [4], 0, None)
    await settle()
    transfer.send("r", [], 1, FIRST)
    await settle()
    assert brief(events)[-1] == (0.0, "r", "success", True)


@virtual_time
async def test_T2_peers_refuse_die_fall_silent_and_come_back() -> None:
    """Each fails its rooms; only live writes of a silent peer hold the release back."""
    transfer, events = make(write_s=None)
    transfer.refuse("no", "no pages")
    for room, peer in (("a", "no"), ("b", "dies"), ("c", "stops"), ("d", "well"), ("e", "stops")):
        transfer.open(handoff(room, 1, peer))
    await settle()
    for room in "bcd":
        transfer.send(room, [1], 0, FIRST)
    transfer.kill("dies")
    transfer.silence("stops")
    state = {room: [(e.state, e.released) for _, e in events if e.room == room][-1] for room in "abcde"}
    assert state == {
        "a": (FAILED, True), "b": (FAILED, True), "c": (FAILED, False), "d": (WAITING, False),
        "e": (FAILED, True),
    }  # fmt: skip
    transfer.open(handoff("f", 1, "dies"))
    transfer.open(handoff("g", 1, "stops"))
    await settle()
    assert brief(events)[-1] == (0.0, "f", "failed", True) and transfer.open_rooms == ["c", "d", "g"]
    transfer.revive("stops")
    transfer.give_up("d", "it restarts")
    transfer.give_up("unknown", "x")
    transfer.finish_write("d")
    assert transfer.open_rooms == ["g"]
    transfer.kill("stops")
    assert transfer.ended[-1].room == "g" and len(transfer.ended) == 7
    assert [message.quiet for message in transfer.cancelled if message.room == "c"] == [False, True]


@virtual_time
async def test_T3_a_silent_peers_writes_do_not_end_by_themselves() -> None:
    """Also where writes have a time: it passes, and the pages stay held until the peer is back."""
    transfer, events = make(write_s=1.0)
    transfer.open(handoff())
    await settle()
    transfer.send("r", [1, 2], 0, FIRST)
    transfer.silence("p")
    await asyncio.sleep(60.0)
    assert transfer.held_pages() == {1, 2} and brief(events)[-1] == (0.0, "r", "failed", False)
    transfer.revive("p")
    assert brief(events)[-1] == (60.0, "r", "failed", True) and not transfer.held_pages()


@virtual_time
async def test_T3_pages_are_held_until_the_release() -> None:
    """`assert_free` sees reuse by a pool, `page_stamp` reuse by whoever changes a page."""
    stamps = {1: "x", 2: "x"}
    transfer, _ = make(write_s=None, page_stamp=stamps.get)
    transfer.open(handoff())
    await settle()
    transfer.send("r", [1, 2], 0, FIRST)
    transfer.abandon("r", "enough")
    assert transfer.held_pages() == {1, 2} and transfer.abandoned == [("r", "enough")]
    with pytest.raises(AssertionError, match=r"pages \[2\] are reused"):
        transfer.assert_free([2, 3])
    transfer.assert_free([3])
    stamps[1] = "someone else's"
    with pytest.raises(AssertionError, match="page 1 was reused before r's release"):
        transfer.finish_write("r")
    with pytest.raises(AssertionError, match=r"pages \[2\].*; page 1"):
        transfer.check()


@virtual_time
async def test_sends_out_of_order_or_before_the_handshake_are_violations() -> None:
    """Gaps, a send while bootstrapping, a room opened twice: AssertionError, and again at the end."""
    transfer, _ = make(handshake_s=1.0)
    transfer.open(handoff())
    with pytest.raises(AssertionError, match="is bootstrapping"):
        transfer.send("r", [1], 0, None)
    with pytest.raises(AssertionError, match="not yet released"):
        transfer.open(handoff())
    await asyncio.sleep(1.0)
    with pytest.raises(AssertionError, match="leaves a gap"):
        transfer.send("r", [1], 1, FIRST)
    assert transfer.sends == [] and len(transfer.violations) == 3
    with pytest.raises(AssertionError, match="is bootstrapping"):
        await transfer.aclose()
    with pytest.raises(AssertionError, match=r"outside start\.\.aclose"):
        transfer.open(handoff("late"))


@virtual_time
async def test_closing_ends_writes_and_rooms_and_late_calls_are_ignored() -> None:
    """Every room gets its release; sends and abandons for rooms that are gone do nothing."""
    transfer, events = make(write_s=None)
    transfer.open(handoff("a"))
    transfer.open(handoff("b"))
    await settle()
    transfer.send("a", [1, 2], 0, FIRST)
    await transfer.aclose()
    assert [(e.room, e.released) for _, e in events if e.state is FAILED] == [("b", True), ("a", True)]
    transfer.send("a", [1, 2], 0, FIRST)
    transfer.abandon("a", "x")
    assert len(transfer.sends) == 1 and "FakeTransfer writes=0" in repr(transfer)


@virtual_time
async def test_a_send_for_a_room_that_fails_at_the_same_time_does_nothing() -> None:
    """The caller has not polled yet."""
    transfer = FakeTransfer(write_s=None)
    transfer.start(lambda: None)
    transfer.open(handoff())
    await settle()
    transfer.send("r", [1], 0, None)
    transfer.silence("p")
    transfer.send("r", [2], 1, FIRST)
    assert transfer.received("r") == [1]
    assert [(e.state, e.released) for e in transfer.poll()] == [(WAITING, False), (FAILED, False)]
