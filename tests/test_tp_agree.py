"""The vote and the call order, without a group: pure parts, and the executor over scripted collectives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import msgspec
import pytest

from aioprefill.errors import DeviceError, HostError, RankError
from aioprefill.tp_agree import (
    Ballot,
    CallOrder,
    CallToken,
    Digest,
    GroupAgreement,
    Seen,
    SoloAgreement,
    VoteState,
    ballot,
    decode_token,
    encode_token,
    unanimous,
    verdict,
)


def least(ballots: Sequence[Ballot]) -> list[int]:
    """What a MIN all-reduce makes of them."""
    return [min(column) for column in zip(*(one.vector for one in ballots), strict=True)]


def test_a_token_survives_the_link() -> None:
    """All of it, also the bytes of facts and an error."""
    token = CallToken(7, "fail_result", 1.25, 3, 5, 2, b"\x00facts", ("cudaErrorX", "broke", True))
    assert decode_token(encode_token(token)) == token


def test_the_order_numbers_calls_and_forgets_old_ones() -> None:
    """Numbers go on; the log is bounded."""
    order = CallOrder()
    for number in range(5000):
        assert order.append("ingest", float(number)).number == number
    assert len(order.log) == 4096 and order.log[-1].now == 4999.0


def test_a_digest_tells_pieces_apart() -> None:
    """By content, order and cut; and it fits a vote together with its negation."""
    made = []
    for pieces in ([b"ab", b"c"], [b"a", b"bc"], [b"c", b"ab"], [b"ab", b"c"]):
        digest = Digest()
        for piece in pieces:
            digest.add(piece)
        made.append(digest.value)
    assert len(set(made)) == 3 and made[0] == made[3]
    assert all(0 <= value < 1 << 62 for value in made)


@pytest.mark.parametrize("ready_first", [0, 1, 2])
def test_ranks_that_are_ready_and_agree_are_unanimous(ready_first: int) -> None:
    """Whoever comes first."""
    ballots = [ballot((ready_first + n) % 3, 4, 99, None) for n in range(3)]
    assert unanimous(least(ballots)) and verdict(ballots) is None


def test_one_failed_rank_fails_the_forward_on_all_and_is_named() -> None:
    """The first rank that failed tells its error; a sticky one stays sticky."""
    error = DeviceError("cudaErrorIllegalAddress", "an address", sticky=True)
    ballots = [ballot(0, 4, 9, None), ballot(1, 4, 9, error), ballot(2, 4, 9, error)]
    assert not unanimous(least(ballots))
    seen = verdict(ballots)
    assert isinstance(seen, DeviceError) and seen.name == "cudaErrorIllegalAddress" and seen.sticky
    assert str(seen) == "cudaErrorIllegalAddress: an address (on rank 1)"


def test_a_sample_that_was_never_submitted_is_an_error_everywhere() -> None:
    """Unless a rank failed, which counts first."""
    never = HostError("never submitted")
    seen = verdict([ballot(0, 4, 9, None), ballot(1, 4, 9, never)])
    assert isinstance(seen, RankError) and str(seen) == "rank 1 failed: never submitted (forward 4)"
    failed = DeviceError("oops", "x", sticky=False)
    assert isinstance(verdict([ballot(0, 4, 9, never), ballot(1, 4, 9, failed)]), DeviceError)


@pytest.mark.parametrize(
    ("digests", "numbers", "odd"),
    [
        ([5, 5, 6], [1, 1, 1], 2),
        ([6, 5, 5], [1, 1, 1], 0),
        ([5, 6, 5], [1, 1, 1], 1),
        ([5, 6], [1, 1], 1),  # two ranks: nobody can tell, the leader's opinion counts
        ([5, 5, 5], [1, 2, 1], 1),
        ([5, 6, 6, 5], [1, 1, 1, 1], 1),
    ],
)
def test_the_odd_one_out_is_named(digests: list[int], numbers: list[int], odd: int) -> None:
    """By majority; every rank comes to the same name."""
    ballots = [ballot(rank, numbers[rank], digest, None) for rank, digest in enumerate(digests)]
    assert not unanimous(least(ballots))
    seen = verdict(ballots)
    assert isinstance(seen, RankError) and seen.rank == odd and "decided differently" in str(seen)
    assert f"rank {odd} decided differently" in str(seen)


def test_reasons_are_cut_before_they_travel() -> None:
    """A gathering has room for a bounded text."""
    long = ballot(0, 1, 2, DeviceError("n" * 5000, "m" * 5000, sticky=False))
    assert sum(map(len, long.error[:2])) <= 800
    assert ballot(0, 1, 2, HostError("h" * 5000)).state is VoteState.NOT_SUBMITTED


@pytest.mark.asyncio
async def test_alone_a_vote_is_ones_own_opinion() -> None:
    """No thread, no group."""
    threads = threading.active_count()
    error = DeviceError("oops", "x", sticky=False)
    agreement = SoloAgreement()
    assert await agreement.vote(0, 0, None) is None
    assert await agreement.vote(1, 0, error) is error
    with pytest.raises(HostError, match="never"):
        await agreement.vote(2, 0, HostError("never submitted"))
    assert threading.active_count() == threads


class Scripted:
    """Collectives of which the test is every other rank; a call waits for `go`."""

    def __init__(self, *others: Ballot) -> None:
        self.others = others
        self.entered = threading.Event()
        self.go = threading.Event()
        self.broken = False

    def least(self, vector: Sequence[int]) -> Sequence[int]:
        self.entered.set()
        assert self.go.wait(30)
        if self.broken:
            raise RuntimeError("connection closed by peer")
        columns = zip(vector, *(other.vector for other in self.others), strict=True)
        return [min(column) for column in columns]

    def gather(self, data: bytes) -> Sequence[bytes]:
        return [data, *map(msgspec.msgpack.encode, self.others)]


async def blame(number: int, error: Exception) -> RankError:
    return RankError(2, f"broke the vote: {error}", forward=number)


@pytest.mark.asyncio
async def test_a_cancelled_vote_goes_on_and_counts() -> None:
    """The collective is not abandoned; the next vote can only begin when it has ended."""
    scripted = Scripted(ballot(1, 0, 7, None))
    joined: list[int] = []
    agreement = GroupAgreement(0, scripted, on_joining=joined.append, culprit=blame)
    waiting = asyncio.ensure_future(agreement.vote(0, 7, None))
    await asyncio.to_thread(scripted.entered.wait, 30)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert agreement.voting and joined == [0]
    scripted.go.set()
    agreement.close()
    await asyncio.to_thread(agreement._thread.shutdown, wait=True)
    assert not agreement.voting and agreement.counters.collectives == 1


@pytest.mark.asyncio
async def test_one_collective_a_forward_and_a_second_one_for_what_went_wrong() -> None:
    """The loop is free meanwhile."""
    scripted = Scripted(ballot(1, 0, 7, None))
    scripted.go.set()
    agreement = GroupAgreement(0, scripted, culprit=blame)
    assert await agreement.vote(0, 7, None) is None
    assert agreement.counters.collectives == 1
    scripted.others = (ballot(1, 1, 8, None),)
    with pytest.raises(RankError, match="rank 1 decided differently") as raised:
        await agreement.vote(1, 9, None)
    assert raised.value.forward == 1 and agreement.counters.collectives == 3
    agreement.close()
    await asyncio.to_thread(agreement._thread.shutdown, wait=True)


@pytest.mark.asyncio
async def test_a_vote_that_breaks_is_blamed_on_a_rank() -> None:
    """The group's own error names none."""
    scripted = Scripted()
    scripted.broken = True
    scripted.go.set()
    agreement = GroupAgreement(0, scripted, culprit=blame)
    seen: Seen
    with pytest.raises(RankError, match="rank 2 broke the vote: connection closed") as raised:
        await agreement.vote(3, 7, None)
    seen = raised.value
    assert seen.rank == 2 and seen.forward == 3 and isinstance(raised.value.__cause__, RuntimeError)
    agreement.close()
    await asyncio.to_thread(agreement._thread.shutdown, wait=True)
