"""The two ends of the NIXL hand-off with a stand-in for NIXL: real sockets, rare turns of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nixl_fake import FakeNixl

from aioprefill.engine.port import SampledToken
from aioprefill.kv_layout import KVLayout
from aioprefill.sampling_params import SamplingParams
from aioprefill.transfer import nixl_receiver, peer_link
from aioprefill.transfer.nixl_agent import NixlAgent
from aioprefill.transfer.nixl_receiver import MESSAGES, NixlReceiver
from aioprefill.transfer.nixl_sender import NixlTransfer
from aioprefill.transfer.notification import encode_notification
from aioprefill.transfer.pool_info import pool_info
from aioprefill.transfer.pool_view import PoolView
from aioprefill.transfer.port import Handoff, TransferEvent, TransferState
from aioprefill.wire.messages import (
    Arrived,
    Bootstrap,
    Cancel,
    Commit,
    Hello,
    PoolInfo,
    Refused,
    Reserved,
    StatsQuery,
    Welcome,
    pack_ids,
)
from aioprefill.wire.security import load_keys, write_keys
from aioprefill.wire.server import WireServer

LAYOUT = KVLayout("w", layers=1, kv_heads=1, head_dim=1, page_size=16, dtype="float32")
POOL = PoolView(4096, 8, LAYOUT.page_bytes)
FIRST = SampledToken(3, -0.5)
WAITING, SUCCESS, FAILED = TransferState.WAITING_FOR_INPUT, TransferState.SUCCESS, TransferState.FAILED


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, 5 s at most."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, f"not within 5 s: {what}"
        await asyncio.sleep(0.002)


class Decode:
    """A scripted decode worker: answers Hello, writes down the rest, says what the test wants."""

    def __init__(
        self, endpoint: str = "tcp://127.0.0.1:0", agent: str = "decode-1", **options: object
    ) -> None:
        self.heard: list[object] = []
        self.identity = b""
        self.info = pool_info(agent, b"md", POOL, LAYOUT)
        self.server = WireServer(
            endpoint,
            dict.fromkeys(MESSAGES, lambda identity, message: self.heard.append(message)),
            welcome=Welcome("decode", "e1", "m", "w", 9, 9, ()),
            on_hello=self._greet,
            **options,
        )

    def _greet(self, identity: bytes, hello: Hello) -> None:
        self.identity = identity
        self.heard.append(hello)
        self.server.send(identity, self.info)

    def say(self, message: object) -> None:
        self.server.send(self.identity, message)

    def of(self, kind: type) -> list:
        return [message for message in self.heard if type(message) is kind]

    async def __aenter__(self) -> Decode:
        self.server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.server.aclose()


class Prefill:
    """A transfer on a fake NIXL, and its events."""

    def __init__(self, **options: object) -> None:
        self.nixl = FakeNixl()
        agent = NixlAgent("prefill-1", POOL, library=self.nixl)
        self.transfer = NixlTransfer(POOL, LAYOUT, agent=agent, ping_s=0.05, **options)
        self.events: list[TransferEvent] = []

    async def __aenter__(self) -> Prefill:
        self.transfer.start(lambda: self.events.extend(self.transfer.poll()))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.transfer.aclose()

    def of(self, room: str) -> list[tuple[TransferState, bool]]:
        return [(event.state, event.released) for event in self.events if event.room == room]

    def open(self, room: str, peer: str, pages: int = 2) -> None:
        self.transfer.open(Handoff(room, peer, pages * 16, pages, SamplingParams(), 8))

    async def opened(self, room: str, decode: Decode, pages: int = 2) -> Bootstrap:
        """Open a room and let the peer reserve pages for it."""
        self.open(room, decode.server.endpoint, pages)
        await until(lambda: [b for b in decode.of(Bootstrap) if b.room == room], f"Bootstrap of {room}")
        bootstrap = next(b for b in decode.of(Bootstrap) if b.room == room)
        decode.say(Reserved(room, pack_ids(range(pages)), bootstrap.ticket))
        await until(lambda: (WAITING, False) in self.of(room), f"{room} waits for input")
        return bootstrap

    async def writing(self, room: str) -> None:
        """Send the room's pages and wait until they are posted."""
        posted = self.nixl.names.count("post")
        self.transfer.send(room, [1, 2], 0, FIRST)
        await until(lambda: self.nixl.names.count("post") > posted, "the write is posted")


@pytest.mark.asyncio
async def test_success_needs_the_peers_word_and_our_own_end_of_the_write() -> None:
    """DONE alone is no success (a stopped peer can have that); Arrived alone is no release."""
    async with Decode() as decode, Prefill() as prefill:
        ticket = (await prefill.opened("r", decode)).ticket
        await prefill.writing("r")
        await until(lambda: decode.of(Commit), "Commit")
        decode.say(Arrived("r", ticket + 1))  # of no room of ours
        prefill.nixl.transfers[0].state = "DONE"
        await until(lambda: prefill.nixl.transfers[0].released, "the handle is released")
        await asyncio.sleep(0.02)
        assert prefill.of("r") == [(WAITING, False)]
        decode.say(Arrived("r", ticket))
        await until(lambda: (SUCCESS, True) in prefill.of("r"), "success")
        assert decode.of(PoolInfo)[0].agent == "prefill-1"


@pytest.mark.asyncio
async def test_a_reservation_that_comes_too_late_is_cancelled() -> None:
    """The room was abandoned while Reserved was under way: the peer learns that nothing is written there."""
    async with Decode() as decode, Prefill() as prefill:
        prefill.open("r", decode.server.endpoint)
        await until(lambda: decode.of(Bootstrap), "Bootstrap")
        prefill.transfer.abandon("r", "enough")
        assert prefill.of("r") == [(FAILED, True)]
        ticket = decode.of(Bootstrap)[0].ticket
        decode.say(Reserved("r", pack_ids([1, 2]), ticket))
        await until(lambda: len(decode.of(Cancel)) == 2, "two Cancels")
        assert [(c.ticket, c.quiet) for c in decode.of(Cancel)] == [(ticket, True)] * 2


@pytest.mark.asyncio
async def test_refusals_and_broken_reservations_fail_the_room() -> None:
    """With the peer's words, or with what is wrong."""
    async with Decode() as decode, Prefill() as prefill:
        answers = (
            ("no", lambda ticket: Refused("no", "full", ticket)),
            ("odd", lambda ticket: Reserved("odd", b"123", ticket)),
        )
        for room, answer in answers:
            prefill.open(room, decode.server.endpoint)
            await until(lambda r=room: [b for b in decode.of(Bootstrap) if b.room == r], "Bootstrap")
            decode.say(answer(decode.of(Bootstrap)[-1].ticket))
            await until(lambda r=room: (FAILED, True) in prefill.of(r), f"{room} failed")
        assert prefill.events[0].reason == "refused: full" and "no multiple of 4" in prefill.events[1].reason


@pytest.mark.asyncio
async def test_T3_cancels_reach_the_process_that_they_are_meant_for() -> None:
    """Connection lost with a live write: when the same process is back, it hears Cancel when we are quiet."""
    async with Prefill() as prefill:
        async with Decode() as first:
            endpoint = first.server.endpoint
            ticket = (await prefill.opened("r", first)).ticket
            await prefill.writing("r")
        await until(lambda: (FAILED, False) in prefill.of("r"), "failed, unreleased")
        async with Decode(endpoint) as back:
            await until(lambda: back.of(Cancel), "Cancel")
            assert [(c.ticket, c.quiet) for c in back.of(Cancel)] == [(ticket, False)]
            prefill.nixl.transfers[0].state = "DONE"
            await until(lambda: (FAILED, True) in prefill.of("r"), "released")
            await until(lambda: back.of(Cancel)[-1].quiet, "quiet Cancel")
            await until(lambda: not prefill.transfer._links.get(endpoint)._cancels, "confirmed")
        async with Decode(endpoint) as again:
            await until(lambda: again.of(PoolInfo), "back once more")
            assert again.of(Cancel) == []  # what was confirmed is not said again


@pytest.mark.asyncio
async def test_T3_another_process_at_the_address_does_not_hear_cancels_of_the_old_one() -> None:
    """And the old agent's live writes end with the grace of a lease, by which it is known dead."""
    async with Prefill(lease_s=0.3) as prefill:
        async with Decode() as first:
            endpoint = first.server.endpoint
            await prefill.opened("r", first)
            await prefill.writing("r")
        async with Decode(endpoint, agent="decode-2") as second:
            await until(lambda: (FAILED, True) in prefill.of("r"), "released after the grace")
            await prefill.opened("new", second)
            assert ("add", b"md") in prefill.nixl.calls and ("remove", "decode-1") in prefill.nixl.calls
            assert [c for c in second.of(Cancel) if not c.quiet] == []


@pytest.mark.asyncio
async def test_T2_an_agent_that_ends_fails_everything_and_new_rooms_at_once() -> None:
    """The reason is the agent's error; live rooms are released with the agent's end."""
    async with Decode() as decode, Prefill() as prefill:
        await prefill.opened("idle", decode)
        await prefill.opened("live", decode)
        await prefill.writing("live")
        prefill.nixl.raising["notifs"] = RuntimeError("lost its mind")
        await until(lambda: (FAILED, True) in prefill.of("live"), "live is released")
        assert prefill.of("idle")[-1] == (FAILED, True)
        prefill.open("new", decode.server.endpoint)
        assert prefill.of("new") == [(FAILED, True)] and "lost its mind" in prefill.events[-1].reason


@pytest.mark.asyncio
async def test_T2_a_peer_whose_agent_cannot_be_added_fails_its_rooms() -> None:
    """The NIXL error is in the reason."""
    async with Decode() as decode, Prefill() as prefill:
        prefill.nixl.raising["add"] = RuntimeError("NIXL_ERR_BACKEND")
        prefill.open("r", decode.server.endpoint)
        await until(lambda: prefill.of("r") == [(FAILED, True)], "failed")
        assert "its NIXL agent cannot be used: RuntimeError: NIXL_ERR_BACKEND" in prefill.events[0].reason


@pytest.mark.asyncio
async def test_S1_closing_ends_live_writes_with_the_agent_and_tells_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write that never ends: closed after the wait; the release and a quiet Cancel still come."""
    monkeypatch.setattr("aioprefill.transfer.nixl_sender.CLOSE_S", 0.05)
    async with Decode() as decode:
        async with Prefill() as prefill:
            await prefill.opened("r", decode)
            await prefill.writing("r")
            prefill.open("fresh", decode.server.endpoint)
            await prefill.transfer.aclose()
            assert prefill.of("r")[-1] == prefill.of("fresh")[-1] == (FAILED, True)
            prefill.transfer.send("r", [1], 0, None)
            prefill.open("late", decode.server.endpoint)
            assert prefill.of("late") == [(FAILED, True)]
        await until(lambda: [c.quiet for c in decode.of(Cancel) if c.room == "r"] == [False, True], "Cancels")


@pytest.mark.asyncio
async def test_idle_links_are_closed_and_opened_again_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that no room has wanted for a while costs nothing any more."""
    monkeypatch.setattr(peer_link, "IDLE_LINK_S", 0.1)
    async with Decode() as decode, Prefill() as prefill:
        await prefill.opened("r", decode)
        await asyncio.sleep(0.3)  # what is proven is that nothing happens
        assert prefill.transfer.stats()["peers_ready"] == 1
        prefill.transfer.abandon("r", "x")
        await until(lambda: prefill.transfer.stats()["peers"] == 0, "the link is closed")
        await until(lambda: ("remove", "decode-1") in prefill.nixl.calls, "its agent is removed")
        await prefill.opened("again", decode)
        assert "NixlTransfer prefill-1 links=1" in repr(prefill.transfer)


@pytest.mark.asyncio
async def test_a_garbled_message_is_survived() -> None:
    """What a peer sends that cannot be read does not hurt other messages."""
    async with Decode() as decode, Prefill() as prefill:
        await prefill.opened("r", decode)
        decode.server._pump.send([decode.identity, b"\xc1garbage"])
        await prefill.opened("s", decode)


@pytest.mark.asyncio
async def test_curve_keys_protect_the_control_connection(tmp_path: Path) -> None:
    """With the server's keys rooms open; without any the peer is not reached, and the reason says why."""
    write_keys(tmp_path)
    keys = load_keys(tmp_path)
    async with Decode(keys=keys) as decode:
        async with Prefill(keys=keys) as prefill:
            await prefill.opened("r", decode)
        async with Prefill(lease_s=3.0) as stranger:
            stranger.open("r", decode.server.endpoint)
            await until(lambda: stranger.of("r") == [(FAILED, True)], "failed")
            # which side sees first that the handshake fails is up to ZMQ; the keys are named either way
            reason = stranger.events[0].reason
            assert reason.startswith("no connection within 3 s") and "with the same keys?" in reason


# --- the decode side --------------------------------------------------------------------------------------


class Bench:
    """A receiver on a fake NIXL with 8 pages, and what it says to whom."""

    def __init__(self, **options: object) -> None:
        self.nixl = FakeNixl()
        agent = NixlAgent("decode-1", POOL, library=self.nixl)
        self.free = list(range(8))
        self.heard: list[tuple[object, ...]] = []
        self.sent: list[tuple[bytes, object]] = []
        self.receiver = NixlReceiver(
            POOL, LAYOUT, self, lambda i, m: self.sent.append((i, m)), agent=agent, **options
        )

    async def __aenter__(self) -> Bench:
        self.receiver.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.receiver.aclose()
        assert sorted(self.free) == list(range(8)), "pages are lost"

    def reserve(self, handoff: Handoff) -> list[int] | None:
        return None if len(self.free) < handoff.pages else [self.free.pop() for _ in range(handoff.pages)]

    def arrived(self, room: str, pages: list[int], first: SampledToken, handoff: Handoff) -> None:
        self.heard.append(("arrived", room, first.token_id))
        self.free += pages

    def lost(self, room: str, reason: str) -> None:
        self.heard.append(("lost", room, reason))

    def release_pages(self, room: str, pages: list[int]) -> None:
        self.heard.append(("released", room))
        self.free += pages

    def hello(self, identity: bytes = b"i1", epoch: str = "p1") -> None:
        self.receiver.on_message(identity, Hello("prefill", epoch))
        self.receiver.on_message(identity, pool_info(f"agent {epoch}", b"md " + epoch.encode(), POOL, LAYOUT))

    def bootstrap(self, room: str, ticket: int, pages: int = 2, identity: bytes = b"i1") -> None:
        message = Bootstrap(
            room, pages * 16, pages, SamplingParams(), 8, False, "w", LAYOUT.page_bytes, ticket
        )
        self.receiver.on_message(identity, message)

    def notify(self, *payloads: bytes) -> None:
        self.nixl.notifications = {"agent p1": list(payloads)}

    def kinds(self) -> list[str]:
        return [type(message).__name__ for _, message in self.sent]


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_receiver, "TICK_S", 0.01)
    monkeypatch.setattr(nixl_receiver, "SETTLE_S", 0.01)


@pytest.mark.asyncio
async def test_a_room_arrives_over_a_greeted_connection() -> None:
    """Hello is answered by where the pool is; writes are known by their notifications; strangers are not."""
    async with Bench() as bench:
        bench.bootstrap("r", 1)
        assert bench.sent[0][1].code == "hello_required"
        bench.receiver.on_message(b"c", Hello("client", "c1"))
        bench.receiver.on_message(b"c", StatsQuery())
        bench.hello()
        bench.bootstrap("r", 1)
        bench.notify(b"what?", encode_notification("p2", 1, 0), encode_notification("p1", 1, 0))
        bench.receiver.on_message(b"i1", Commit("r", 1, 7, -0.5, ticket=1))
        await until(lambda: ("arrived", "r", 7) in bench.heard, "arrived")
        assert bench.kinds() == ["Failed", "PoolInfo", "Reserved", "Arrived"]
        assert bench.sent[1][1].agent == "decode-1" and "senders=1" in repr(bench.receiver)


@pytest.mark.usefixtures("_fast")
@pytest.mark.asyncio
async def test_T3_a_sender_that_left_is_probed_and_its_pages_released_when_it_is_proven_dead() -> None:
    """Away and past the lease is not enough: NIXL must say that nobody has its agent."""
    async with Bench(lease_s=0.1) as bench:
        bench.hello()
        bench.bootstrap("r", 1)
        bench.receiver.on_gone(b"i1")
        bench.receiver.on_gone(b"i1")
        assert bench.heard == [("lost", "r", "the connection to its prefill process was lost")]
        await until(lambda: ("notify", "agent p1", b"probe") in bench.nixl.calls, "a probe")
        await asyncio.sleep(0.2)  # past the lease; what is proven is that nothing happens
        assert bench.receiver.stats()["pages_quarantined"] == 2
        bench.nixl.raising["notify"] = ConnectionError("reset")
        await until(lambda: ("released", "r") in bench.heard, "released")
        await until(lambda: bench.receiver.stats()["senders"] == 0, "forgotten")
        assert bench.kinds() == ["PoolInfo", "Reserved"]  # nothing is said to one that left


@pytest.mark.usefixtures("_fast")
@pytest.mark.asyncio
async def test_T3_a_sender_that_returns_says_itself_when_it_is_quiet() -> None:
    """Another connection, the same epoch: its Cancel ends the quarantine, after what is under way is in."""
    async with Bench(lease_s=0.05) as bench:
        bench.hello()
        bench.bootstrap("r", 1)
        bench.hello(b"i2")
        bench.receiver.on_gone(b"i1")  # the old connection, found dead later
        assert bench.heard == []
        bench.receiver.on_gone(b"i2")
        bench.hello(b"i3")
        assert bench.receiver.stats()["senders_away"] == 0
        bench.receiver.on_message(b"i3", Cancel("r", "x", False, 1))
        bench.receiver.on_message(b"i3", Cancel("r", "x", True, 1))
        assert bench.heard[-1][0] == "lost" and bench.receiver.stats()["pages_quarantined"] == 2
        await until(lambda: ("released", "r") in bench.heard, "released")


@pytest.mark.usefixtures("_fast")
@pytest.mark.asyncio
async def test_rooms_expire_and_are_given_up_and_waiting_ones_get_their_pages() -> None:
    """The sender is told; a quiet Cancel brings the pages back; the next room gets them."""
    async with Bench(room_timeout_s=0.05) as bench:
        bench.hello()
        bench.bootstrap("slow", 1, pages=4)
        bench.bootstrap("unwanted", 2, pages=4)
        bench.bootstrap("next", 3, pages=8)
        bench.receiver.give_up("unwanted", "nobody reads it")
        await until(lambda: len([k for k in bench.kinds() if k == "Refused"]) == 2, "both refused")
        for room, ticket in (("slow", 1), ("unwanted", 2)):
            bench.receiver.on_message(b"i1", Cancel(room, "then not", True, ticket))
        await until(lambda: bench.kinds().count("Reserved") == 3, "next is reserved")
        bench.receiver.retry_reservations()


@pytest.mark.asyncio
async def test_an_agent_that_ends_loses_all_rooms_and_refuses_new_ones() -> None:
    """Nothing can be written any more, so pages are back at once."""
    async with Bench() as bench:
        bench.hello()
        bench.bootstrap("r", 1)
        bench.nixl.raising["notifs"] = RuntimeError("lost its mind")
        await until(lambda: ("released", "r") in bench.heard, "released")
        bench.bootstrap("new", 2)
        assert isinstance(bench.sent[-1][1], Refused) and "lost its mind" in bench.sent[-1][1].message


@pytest.mark.asyncio
async def test_S1_closing_the_receiver_loses_rooms_after_the_agents_end() -> None:
    """A closed server does not matter; a receiver that never started can be closed."""
    async with Bench() as bench:
        bench.hello()
        bench.bootstrap("r", 1)
        await bench.receiver.aclose()
        assert bench.heard == [("lost", "r", "the decode worker shuts down"), ("released", "r")]
        assert bench.nixl.names[-1] == "deregister"
    unused = Bench()
    await unused.receiver.aclose()
