"""The links of the call order: in order, without gaps, bounded, and closed to strangers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
from ranks_support import FakeGroup, groups
from wire_support import LOOPS, run, wait_until

from aioprefill.errors import ConfigError, RankError, WireError
from aioprefill.ranks.order_link import ACK_MESSAGES, FollowerLink, LeaderLinks
from aioprefill.ranks.place import RankPlace
from aioprefill.ranks.wires import RankKeys, Wires, bind, dial

__all__ = ["run"]


class Side:
    """What one rank's link was told."""

    def __init__(self) -> None:
        self.tokens: list[bytes] = []
        self.reports: list[tuple[int, bytes]] = []
        self.lost: list[RankError] = []

    def on_report(self, rank: int, data: bytes) -> None:
        """See `LeaderLinks`."""
        self.reports.append((rank, data))


@asynccontextmanager
async def linked(
    size: int, **bounds: int
) -> AsyncIterator[tuple[LeaderLinks, Side, list[FollowerLink], list[Side]]]:
    """All ranks' links on the running loop."""
    with groups(size) as made:
        told = [Side() for _ in made]
        leader = LeaderLinks(made[0], told[0].on_report, told[0].lost.append, **bounds)
        followers = [
            FollowerLink(group, side.tokens.append, side.lost.append)
            for group, side in zip(made[1:], told[1:], strict=True)
        ]
        try:
            yield leader, told[0], followers, told[1:]
        finally:
            for link in (leader, *followers):
                await link.aclose(0.2)


@LOOPS
def test_every_follower_gets_every_token_in_order_and_its_reports_come_back_in_order(run):
    """3,000 tokens of many sizes to two followers; each answers each."""

    async def scenario():
        tokens = [b"%d " % number * (number % 50) for number in range(3000)]
        async with linked(3) as (leader, told, followers, sides):
            for follower, side in zip(followers, sides, strict=True):
                side.tokens = Echo(follower)
                follower._on_token = side.tokens.append
            for number, token in enumerate(tokens):
                leader.send(token)
                if number % 100 == 0:
                    await asyncio.sleep(0)
            await wait_until(lambda: len(told.reports) == 2 * len(tokens), "all reports")
            for rank, side in enumerate(sides, start=1):
                assert side.tokens == tokens
                assert [data for sender, data in told.reports if sender == rank] == tokens
            assert not any(side.lost for side in (told, *sides))
            assert leader.backlog == 0

    run(scenario())


class Echo(list):
    """Tokens that are reported back within the callback."""

    def __init__(self, link: FollowerLink) -> None:
        super().__init__()
        self._link = link

    def append(self, token: bytes) -> None:
        """Keep it and report it."""
        super().append(token)
        self._link.report(token)


def test_a_token_leaves_within_send(run):
    """The follower has it although the leader's loop has not turned since."""

    async def scenario():
        with groups(2) as (first, second):
            leader = LeaderLinks(first, lambda rank, data: None, pytest.fail)
            context = zmq.Context()
            endpoint = second.wires.addresses.order[0]
            socket = dial(context, endpoint, second.wires.server, second.wires.keys, b"rank-1")
            socket.connect(endpoint)
            leader.send(b"first")
            await wait_until(lambda: socket.poll(0), "the handshake, which needs turns of the leader's loop")
            assert socket.recv_multipart()[1] == b"first"
            leader.send(b"second")
            assert socket.poll(5000) == zmq.POLLIN  # blocks the loop
            assert socket.recv_multipart()[1] == b"second"
            socket.close()
            context.term()
            await leader.aclose(0.1)

    run(scenario())


def test_tokens_that_were_sent_before_a_follower_came_are_delivered(run):
    """And closing waits for them, but not for a follower that never comes."""

    async def scenario():
        with groups(3) as (first, second, _):
            leader = LeaderLinks(first, lambda rank, data: None, pytest.fail)
            for number in range(200):
                leader.send(b"%d" % number)
            tokens: list[bytes] = []
            follower = FollowerLink(second, tokens.append, pytest.fail)
            await leader.aclose(1.0)
            await leader.aclose()
            assert tokens == [b"%d" % number for number in range(200)]
            await follower.aclose()
            with pytest.raises(WireError, match="closed"):
                leader.send(b"late")
            with pytest.raises(WireError, match="closed"):
                follower.report(b"late")

    run(scenario())


def test_a_closing_leader_waits_no_longer_than_for_the_last_token(run):
    """Tokens fewer than those that a follower acknowledges by itself: it is asked."""

    async def scenario():
        async with linked(2) as (leader, _, _, (side,)):
            leader.send(b"last")
            async with asyncio.timeout(5):
                await leader.aclose(60)
            assert side.tokens == [b"last"]

    run(scenario())


def test_a_closing_leader_does_not_wait_for_a_follower_that_has_left_before(run):
    """Leaving says what was taken, before anybody has asked."""

    async def scenario():
        async with linked(2) as (leader, _, (follower,), (side,)):
            for _ in range(3):
                leader.send(b"token")
            await wait_until(lambda: len(side.tokens) == 3, "the tokens")
            await follower.aclose()
            async with asyncio.timeout(5):
                await leader.aclose(60)

    run(scenario())


def test_reports_made_before_closing_arrive(run):
    """The follower leaves at once after 50 reports, too many for the buffers between."""

    async def scenario():
        async with linked(2) as (leader, told, (follower,), (side,)):
            leader.send(b"hello")
            await wait_until(lambda: side.tokens, "the connection")
            for _ in range(50):
                follower.report(b"x" * 500_000)
            await follower.aclose(20)
            await wait_until(lambda: len(told.reports) == 50, "50 reports")
            assert not told.lost

    run(scenario())


@pytest.mark.parametrize(
    ("bounds", "text"),
    [({"max_messages": 100}, "100 messages"), ({"max_bytes": 100_000}, "100,000 bytes")],
)
def test_R2_a_follower_that_takes_nothing_is_named_when_its_backlog_is_full(run, bounds, text):
    """Rank 2 of 3 never reads; rank 1 gets everything, also afterwards. The error comes once."""

    async def scenario():
        with groups(3) as (first, second, _):
            lost: list[RankError] = []
            leader = LeaderLinks(first, lambda rank, data: None, lost.append, **bounds)
            tokens: list[bytes] = []
            follower = FollowerLink(second, tokens.append, pytest.fail)
            for number in range(300):
                leader.send(b"x" * 1000)
                await wait_until(lambda number=number: len(tokens) > number, "the token at rank 1")
            assert len(lost) == 1 and lost[0].rank == 2 and lost[0] is leader.error
            assert str(lost[0]).startswith("rank 2 does not take the call order") and text in str(lost[0])
            await leader.aclose(0.1)
            await follower.aclose()

    run(scenario())


def test_a_slow_but_living_follower_is_not_lost(run):
    """What it takes no longer counts: ten times the bound passes through."""

    async def scenario():
        async with linked(2, max_messages=2 * ACK_MESSAGES) as (leader, told, _, (side,)):
            for number in range(20 * ACK_MESSAGES):
                await wait_until(lambda: leader.backlog < 2 * ACK_MESSAGES, "room")
                leader.send(b"%d" % number)
            await wait_until(lambda: len(side.tokens) == 20 * ACK_MESSAGES, "all")
            assert not told.lost

    run(scenario())


def test_a_gap_in_the_order_is_named_and_nothing_behind_it_is_handed_on(run):
    """Rank 0 skips one number."""

    async def scenario():
        async with linked(2) as (leader, _, (follower,), (side,)):
            leader.send(b"0")
            leader._followers[0].sent += 1
            leader.send(b"2")
            leader.send(b"3")
            await wait_until(lambda: side.lost, "the error")
            assert str(side.lost[0]) == "rank 0 sent a call order with a gap: number 2 came, 1 was due"
            assert side.tokens == [b"0"] and follower.error is side.lost[0]

    run(scenario())


def test_a_gap_in_the_reports_names_the_rank(run):
    """Rank 2 of 3 loses a report; rank 1 is heard on."""

    async def scenario():
        async with linked(3) as (leader, told, (one, two), _):
            two.report(b"0")
            two._reports += 1
            two.report(b"2")
            await wait_until(lambda: told.lost, "the error")
            assert str(told.lost[0]) == "rank 2 lost reports: number 2 came, 1 was due"
            one.report(b"still here")
            await wait_until(lambda: (1, b"still here") in told.reports, "rank 1")
            assert (2, b"2") not in told.reports and len(told.lost) == 1
            assert "lost" in repr(leader)

    run(scenario())


@pytest.mark.parametrize("frames", [[b"x"], [b"x" * 8, b"y", b"z"]])
def test_messages_of_another_version_name_their_sender(run, frames):
    """On both sides."""

    async def scenario():
        async with linked(2) as (leader, told, (follower,), (side,)):
            leader._followers[0].pump.send(frames)
            follower._pump.send(frames)
            await wait_until(lambda: told.lost and side.lost, "both errors")
            assert "rank 1 sent something that is no report" in str(told.lost[0])
            assert "rank 0 sent something that is no token" in str(side.lost[0])
            assert side.tokens == [] == told.reports

    run(scenario())


def stranger(group: FakeGroup, keys: RankKeys | None) -> tuple[zmq.Context, zmq.Socket]:
    """A socket that connects to the first follower's port, with other keys or with none."""
    context = zmq.Context()
    endpoint = group.wires.addresses.order[0]
    if keys is None:
        socket = context.socket(zmq.DEALER)
    else:
        socket = dial(context, endpoint, group.wires.server, keys, b"rank-1")
    socket.linger = 0
    socket.connect(endpoint)
    return context, socket


@pytest.mark.parametrize("keys", [None, RankKeys.make()])
def test_a_stranger_neither_takes_tokens_nor_reports(run, keys):
    """Although it was first on the port of rank 1: only the key that rank 1 published gets in."""

    async def scenario():
        with groups(2) as (first, second):
            told = Side()
            leader = LeaderLinks(first, told.on_report, told.lost.append)
            context, socket = stranger(second, keys)
            socket.send_multipart([bytes(24), b"forged"], zmq.DONTWAIT)
            for number in range(20):
                leader.send(b"%d" % number)
            tokens: list[bytes] = []
            follower = FollowerLink(second, tokens.append, pytest.fail)
            follower.report(b"true")
            await wait_until(lambda: len(tokens) == 20 and told.reports, "all tokens at rank 1")
            assert told.reports == [(1, b"true")] and not told.lost
            assert not socket.poll(0)
            context.destroy(linger=0)
            await leader.aclose()
            await follower.aclose()

    run(scenario())


def test_an_address_that_is_not_of_this_machine_is_a_config_error():
    """MASTER_ADDR names another machine; nothing stays open."""
    place, keys = RankPlace(0, 2, 0), RankKeys.make()
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*MASTER_ADDR"):
        bind(zmq.DEALER, 1, "192.0.2.1", keys, {})

    class Board:
        def publish(self, key, value):
            pass

        def lookup(self, key, rank=0):
            return keys.public

    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        Wires.exchange(place, Board(), "192.0.2.1")


def test_keys_do_not_print_their_secret():
    """A repr ends up in logs."""
    keys = RankKeys.make()
    assert keys.secret.decode() not in repr(keys)
