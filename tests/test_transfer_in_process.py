"""The in-process hand-off: the same rules as NIXL's, with copies on a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import pytest_asyncio

from aioprefill.engine.port import SampledToken
from aioprefill.errors import InvalidMove
from aioprefill.kv_layout import KVLayout
from aioprefill.sampling_params import SamplingParams
from aioprefill.transfer.in_process import InProcessPeer, InProcessTransfer
from aioprefill.transfer.port import Handoff, KVTransfer, TransferEvent, TransferState

LAYOUT = KVLayout("w", layers=1, kv_heads=1, head_dim=1, page_size=16, dtype="float32")
FIRST = SampledToken(3, -0.5)
WAITING, SUCCESS, FAILED = TransferState.WAITING_FOR_INPUT, TransferState.SUCCESS, TransferState.FAILED


class Pair:
    """A prefill pool of 32 pages, a decode pool of 16, the transfer between them, and a gate for copies."""

    def __init__(self) -> None:
        self.source = np.arange(32 * 4, dtype=np.int64).reshape(32, 4)
        self.target = np.zeros((16, 4), dtype=np.int64)
        self.gate = threading.Event()
        self.gate.set()
        self.copying = threading.Event()
        self.error: Exception | None = None
        self.free = list(range(16))
        self.heard: list[tuple[object, ...]] = []
        self.events: list[TransferEvent] = []
        self.peer = InProcessPeer("decoder", LAYOUT, 16, self, self._copy)
        self.transfer: KVTransfer = InProcessTransfer(LAYOUT)

    def start(self) -> None:
        self.transfer.add_peer(self.peer)
        self.transfer.start(lambda: self.events.extend(self.transfer.poll()))

    def _copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.copying.set()
        self.gate.wait(5)
        if self.error is not None:
            raise self.error
        self.target[target] = self.source[source]

    def reserve(self, handoff: Handoff) -> list[int] | None:
        return None if len(self.free) < handoff.pages else [self.free.pop() for _ in range(handoff.pages)]

    def arrived(self, room: str, pages: list[int], first: SampledToken, handoff: Handoff) -> None:
        self.heard.append(("arrived", room, self.target[pages].tolist(), first.token_id))
        self.free += pages
        self.peer.retry_reservations()

    def lost(self, room: str, reason: str) -> None:
        self.heard.append(("lost", room, reason))

    def release_pages(self, room: str, pages: list[int]) -> None:
        self.heard.append(("released", room, len(pages)))
        self.free += pages

    def open(self, room: str, pages: int, peer: str = "decoder") -> None:
        self.transfer.open(Handoff(room, peer, pages * 16, pages, SamplingParams(), 8))

    def of(self, room: str) -> list[tuple[TransferState, bool]]:
        return [(event.state, event.released) for event in self.events if event.room == room]

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline, f"not within 5 s: {what}; {self.events} {self.heard}"
            await asyncio.sleep(0.001)

    async def opened(self, room: str, pages: int) -> None:
        self.open(room, pages)
        await self.until(lambda: (WAITING, False) in self.of(room), f"{room} is waiting")

    async def released(self, room: str, state: TransferState) -> None:
        await self.until(lambda: (state, True) in self.of(room), f"{room} is released")


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    pair.start()
    yield pair
    pair.gate.set()
    await pair.transfer.aclose()
    await asyncio.sleep(0)
    assert sorted(pair.free) == list(range(16)), "pages of the decode pool are lost"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv copy")]


@pytest.mark.asyncio
async def test_chunks_of_rooms_arrive_in_order_with_the_first_token(pair: Pair) -> None:
    """Pages are copied, the room arrives once, success is the release."""
    await pair.opened("a", 3)
    await pair.opened("b", 2)
    pair.transfer.send("a", [30, 1], 0, None)
    pair.transfer.send("b", [4, 5], 0, FIRST)
    pair.transfer.send("a", [9], 2, FIRST)
    await pair.released("a", SUCCESS)
    await pair.released("b", SUCCESS)
    assert ("arrived", "a", pair.source[[30, 1, 9]].tolist(), 3) in pair.heard
    assert ("arrived", "b", pair.source[[4, 5]].tolist(), 3) in pair.heard
    assert (
        pair.of("a") == [(WAITING, False), (SUCCESS, True)]
        and pair.transfer.stats()["rooms_waiting_for_input"] == 0
    )


@pytest.mark.asyncio
async def test_a_room_waits_for_pages_of_the_peer(pair: Pair) -> None:
    """Nothing is reserved while there are none; the next arrival frees them."""
    await pair.opened("big", 16)
    pair.open("small", 1)
    await asyncio.sleep(0.01)
    assert pair.of("small") == [] and pair.peer.stats()["rooms_queued"] == 1
    pair.transfer.send("big", range(16), 0, FIRST)
    await pair.until(lambda: pair.of("small") == [(WAITING, False)], "small is waiting")


@pytest.mark.asyncio
async def test_T3_an_abandoned_copy_that_runs_keeps_its_pages_and_one_that_waits_is_dropped(
    pair: Pair,
) -> None:
    """The running copy cannot be stopped: both sides release only when it has ended."""
    await pair.opened("a", 2)
    pair.gate.clear()
    pair.transfer.send("a", [1], 0, None)
    pair.transfer.send("a", [2], 1, FIRST)
    await pair.until(pair.copying.is_set, "the copy runs")
    pair.transfer.abandon("a", "enough")
    await pair.until(lambda: ("lost", "a", "enough") in pair.heard, "the peer was told")
    assert pair.of("a") == [(WAITING, False)] and pair.peer.stats()["pages_quarantined"] == 2
    pair.gate.set()
    await pair.released("a", FAILED)
    await pair.until(lambda: ("released", "a", 2) in pair.heard, "the peer's pages are back")
    assert pair.of("a") == [(WAITING, False), (FAILED, True)]
    assert pair.target.sum(axis=1).nonzero()[0].size == 1  # the second copy was never made


@pytest.mark.asyncio
async def test_T1_abandon_before_and_after_the_handshake_releases_at_once(pair: Pair) -> None:
    """In the same turn as `open`, and while waiting; unknown rooms are ignored."""
    pair.open("early", 1)
    pair.transfer.abandon("early", "x")
    assert pair.of("early") == [(FAILED, True)]
    await pair.opened("late", 1)
    pair.transfer.abandon("late", "x")
    assert pair.of("late") == [(WAITING, False), (FAILED, True)]
    pair.transfer.abandon("late", "x")
    pair.transfer.send("late", [1], 0, FIRST)
    assert pair.of("late") == [(WAITING, False), (FAILED, True)]
    await pair.until(lambda: ("released", "late", 1) in pair.heard, "the peer's pages are back")


@pytest.mark.asyncio
async def test_T2_a_copy_that_fails_fails_its_room_alone(pair: Pair) -> None:
    """The error's text is the reason."""
    await pair.opened("a", 1)
    await pair.opened("b", 1)
    pair.error = MemoryError("no room")
    pair.transfer.send("a", [1], 0, FIRST)
    await pair.released("a", FAILED)
    assert "MemoryError: no room" in pair.events[-1].reason
    pair.error = None
    pair.transfer.send("b", [1], 0, FIRST)
    await pair.released("b", SUCCESS)


@pytest.mark.asyncio
async def test_T2_a_peer_that_leaves_fails_its_rooms_and_takes_no_new_ones(pair: Pair) -> None:
    """Rooms with a running copy are released after it; unknown names fail too."""
    await pair.opened("live", 1)
    await pair.opened("idle", 1)
    pair.gate.clear()
    pair.transfer.send("live", [1], 0, FIRST)
    await pair.until(pair.copying.is_set, "the copy runs")
    pair.peer.leave("it shuts down")
    pair.peer.leave("again")
    assert pair.of("idle")[-1] == (FAILED, True) and pair.of("live")[-1] == (FAILED, False)
    pair.open("new", 1)
    pair.open("unknown", 1, peer="nobody")
    await pair.released("new", FAILED)
    await pair.released("unknown", FAILED)
    assert {event.reason for event in pair.events if event.released} == {
        "it shuts down", "there is no such peer in this process"
    }  # fmt: skip
    pair.gate.set()
    await pair.released("live", FAILED)


@pytest.mark.asyncio
async def test_the_peer_refuses_other_weights_and_gives_rooms_up(pair: Pair) -> None:
    """A transfer of another layout is refused; a room given up by the peer fails with its words."""
    other = InProcessTransfer(KVLayout("v", 1, 1, 1, 16, "float32"))
    other.add_peer(pair.peer)
    refused: list[TransferEvent] = []
    other.start(lambda: refused.extend(other.poll()))
    other.open(Handoff("x", "decoder", 16, 1, SamplingParams(), 8))
    await pair.until(lambda: refused, "refused")
    assert "fingerprint is 'v', expected 'w'" in refused[0].reason
    await other.aclose()
    await pair.opened("a", 1)
    pair.peer.give_up("a", "nobody reads it")
    await pair.released("a", FAILED)
    assert pair.events[-1].reason == "refused: nobody reads it"


@pytest.mark.asyncio
async def test_rooms_expire_at_the_peer(pair: Pair) -> None:
    """A reserved room without progress is given up when the peer looks after it."""
    pair.peer = InProcessPeer("slow", LAYOUT, 16, pair, pair._copy, room_timeout_s=0.0)
    pair.transfer.add_peer(pair.peer)
    pair.open("a", 1, peer="slow")
    await pair.until(lambda: (WAITING, False) in pair.of("a"), "a is waiting")
    pair.peer.expire()
    await pair.released("a", FAILED)
    assert "InProcessPeer slow" in repr(pair.peer)


@pytest.mark.asyncio
async def test_closing_with_a_running_copy_waits_for_it_and_releases_everything(pair: Pair) -> None:
    """All rooms end with one release, in whatever state they were; rooms opened after it fail."""
    await pair.opened("live", 1)
    await pair.opened("idle", 1)
    pair.gate.clear()
    pair.transfer.send("live", [1], 0, None)
    await pair.until(pair.copying.is_set, "the copy runs")
    pair.open("fresh", 1)
    closing = asyncio.ensure_future(pair.transfer.aclose())
    await asyncio.sleep(0.01)
    assert not closing.done() and (FAILED, True) not in pair.of("live")
    pair.gate.set()
    await closing
    for room in ("live", "idle", "fresh"):
        assert pair.of(room)[-1] == (FAILED, True) and "InProcessTransfer" in repr(pair.transfer)


@pytest.mark.asyncio
async def test_sending_before_the_handshake_is_a_bug_of_the_caller(pair: Pair) -> None:
    """InvalidMove, which is an AssertionError."""
    pair.open("a", 1)
    with pytest.raises(InvalidMove):
        pair.transfer.send("a", [1], 0, FIRST)
