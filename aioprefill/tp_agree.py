"""Agreement between tensor-parallel ranks: the completion vote and the call order.

Rule: rank 0 decides. It numbers every host call and sends its token to the followers, which make the same
calls with the same arguments, clock readings and facts. Whether a forward is complete is the one thing that
nobody decides: each rank sees its own device, and one MIN all-reduce per forward joins what they see.

At TP = 1 there is no group, no executor thread and no socket: a vote is the rank's own opinion, and the
call order is a bounded log with nobody to go to.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
import hashlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from aioprefill.errors import DeviceError, HostError, RankError

ORDER_LOG_LENGTH = 4096
"""Calls that a log remembers."""
MAX_REASON = 400
"""Characters of an error that travel to the other ranks."""


class CallToken(NamedTuple):
    """One host call, in the order that every rank follows."""

    number: int
    kind: str
    """Name of the host call."""
    now: float
    """Clock reading that the host decides by, seconds on the leader's clock."""
    detail: int = -1
    """Forward number, or -1."""
    flags: int = 0
    """The call's switches, as `host_calls` packs them."""
    agreed: int = 0
    """Forwards whose votes the leader had seen the end of: a follower waits for its own ends of those."""
    facts: bytes = b""
    """What came to the leader's host from outside since the call before."""
    error: tuple[str, str, bool] | None = None
    """`fail_result`: the device's error as (name, message, sticky)."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CallToken)


def encode_token(token: CallToken) -> bytes:
    """A token for a link or a file."""
    return _encoder.encode(token)


def decode_token(data: bytes) -> CallToken:
    """Raises `msgspec.MsgspecError` for what is no token."""
    return _decoder.decode(data)


class CallOrder:
    """The numbered sequence of host calls."""

    def __init__(self) -> None:
        self.log: deque[CallToken] = deque(maxlen=ORDER_LOG_LENGTH)
        self.next_number = 0

    def append(
        self,
        kind: str,
        now: float,
        detail: int = -1,
        flags: int = 0,
        agreed: int = 0,
        facts: bytes = b"",
        error: tuple[str, str, bool] | None = None,
    ) -> CallToken:
        """Number the next host call."""
        token = CallToken(self.next_number, kind, now, detail, flags, agreed, facts, error)
        self.next_number += 1
        self.log.append(token)
        return token


class Digest:
    """A running hash over what was called and what came of it; equal on ranks that decide identically."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, data: bytes) -> None:
        """Take one more piece; pieces are told apart by their lengths."""
        self._hash.update(len(data).to_bytes(4, "little"))
        self._hash.update(data)

    @property
    def value(self) -> int:
        """The hash so far, 0 to 2**62 - 1: it and its negation fit a vote."""
        return int.from_bytes(self._hash.digest(), "little") >> 2


class VoteState(enum.IntEnum):
    """What a rank says of a forward. The least one counts."""

    FAILED = 0
    NOT_SUBMITTED = 1
    """Its sample was never submitted, so it would never be ready."""
    READY = 2


Seen: TypeAlias = DeviceError | HostError | None
"""What a rank saw of its own forward: ready (None), failed, or never submitted (`HostError`)."""


class Ballot(NamedTuple):
    """What one rank brings to a vote, or to the gathering after one that failed."""

    rank: int
    number: int
    state: VoteState
    digest: int
    error: tuple[str, str, bool] = ("", "", False)
    """Name, message, sticky."""

    @property
    def vector(self) -> list[int]:
        """What the MIN all-reduce takes: five int64."""
        return [self.state, self.number, -self.number, self.digest, -self.digest]


def ballot(rank: int, number: int, digest: int, seen: Seen) -> Ballot:
    """A rank's ballot for a forward. Pure."""
    if seen is None:
        return Ballot(rank, number, VoteState.READY, digest)
    if isinstance(seen, DeviceError):
        message = str(seen).removeprefix(f"{seen.name}: ")[:MAX_REASON]
        return Ballot(rank, number, VoteState.FAILED, digest, (seen.name[:MAX_REASON], message, seen.sticky))
    return Ballot(rank, number, VoteState.NOT_SUBMITTED, digest, ("", str(seen)[:MAX_REASON], True))


def unanimous(least: Sequence[int]) -> bool:
    """The reduced vector says that all ranks are ready for one forward and have decided alike. Pure."""
    state, number, minus_number, digest, minus_digest = least
    return state == VoteState.READY and number == -minus_number and digest == -minus_digest


def verdict(ballots: Sequence[Ballot]) -> Seen:
    """What the ballots of all ranks come to, where they are not unanimous. Pure; alike on every rank.

    A rank that decided differently (the odd one out if there is a majority), or was never asked to sample the
    forward, is named by a `RankError`.
    """
    differing = _odd_one_out([(ballot.number, ballot.digest) for ballot in ballots])
    if differing is not None:
        odd = ballots[differing]
        others = ", ".join(f"digest {b.digest:016x} at forward {b.number} on rank {b.rank}" for b in ballots)
        return RankError(
            odd.rank,
            f"decided differently from the others ({others}): the ranks run different versions or settings, "
            "or this is a bug",
            forward=odd.number,
        )
    worst = min(ballots, key=lambda ballot: (ballot.state, ballot.rank))
    name, message, sticky = worst.error
    if worst.state is VoteState.FAILED:
        return DeviceError(name, f"{message} (on rank {worst.rank})", sticky=sticky)
    if worst.state is VoteState.NOT_SUBMITTED:
        return RankError(worst.rank, f"failed: {message}", forward=worst.number)
    return None


def _odd_one_out(opinions: Sequence[tuple[int, int]]) -> int | None:
    """Index of the first opinion that differs from the most common one; None when all are equal."""
    counts = Counter(opinions)
    if len(counts) == 1:
        return None
    common = max(counts, key=lambda opinion: (counts[opinion], opinion == opinions[0]))
    return next(index for index, opinion in enumerate(opinions) if opinion != common)


class Agreement(Protocol):
    """Decides when a forward is complete on all ranks."""

    async def vote(self, number: int, digest: int, seen: Seen) -> DeviceError | None:
        """Join the vote on forward `number`, which this rank has seen the end of.

        `digest` is the digest at its launch. Returns the error of the first rank that failed, or None.
        Raises `RankError`, or the `HostError` in `seen` where there is one rank, when a rank was never asked
        to sample it; `RankError` when ranks diverge or are lost. Every launched forward gets exactly one vote
        on every rank, in launch order. Cancelling the await does not abandon a vote that has begun.
        """


class SoloAgreement:
    """One rank: it agrees with itself."""

    async def vote(self, number: int, digest: int, seen: Seen) -> DeviceError | None:
        """See `Agreement.vote`. Returns at once."""
        return settle(seen)


def settle(seen: Seen) -> DeviceError | None:
    """The error of a forward that failed, or None; raises what nobody can go on after."""
    if isinstance(seen, HostError):
        raise seen
    return seen


class Collectives(Protocol):
    """The group of the vote. Both calls block until every rank has joined, or raise when one is lost."""

    def least(self, vector: Sequence[int]) -> Sequence[int]:
        """MIN all-reduce of int64."""

    def gather(self, data: bytes) -> Sequence[bytes]:
        """Every rank's `data`, in rank order."""


@dataclass(slots=True)
class VoteCounters:
    """Totals since the start."""

    votes: int = 0
    collectives: int = 0


class GroupAgreement:
    """Votes over a group of ranks, in a thread of its own: the loop never blocks.

    `on_joining(number)` is called in that thread just before the rank joins; `culprit(number, error)` tells
    which rank is to blame when the group broke.
    """

    def __init__(
        self,
        rank: int,
        collectives: Collectives,
        *,
        on_joining: Callable[[int], None] = lambda _: None,
        culprit: Callable[[int, Exception], Awaitable[RankError]],
    ) -> None:
        self._rank = rank
        self._collectives = collectives
        self._on_joining = on_joining
        self._culprit = culprit
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="aioprefill-vote")
        self._running: concurrent.futures.Future[Seen] | None = None
        self.counters = VoteCounters()

    @property
    def voting(self) -> bool:
        """A collective is under way: its thread cannot be stopped."""
        return self._running is not None and not self._running.done()

    async def vote(self, number: int, digest: int, seen: Seen) -> DeviceError | None:
        """See `Agreement.vote`."""
        assert not self.voting, f"vote {number} while another one is under way"
        mine = ballot(self._rank, number, digest, seen)
        self._running = self._thread.submit(self._vote, mine)
        try:
            outcome = await asyncio.shield(asyncio.wrap_future(self._running))
        except Exception as error:
            raise await self._culprit(number, error) from error
        return settle(outcome)

    def _vote(self, mine: Ballot) -> Seen:
        """In the thread: one round trip, and another one when that failed."""
        self.counters.votes += 1
        self._on_joining(mine.number)
        self.counters.collectives += 1
        if unanimous(self._collectives.least(mine.vector)):
            return None
        self.counters.collectives += 1
        gathered = self._collectives.gather(msgspec.msgpack.encode(mine))
        return verdict([msgspec.msgpack.decode(data, type=Ballot) for data in gathered])

    def close(self) -> None:
        """Take no more votes. A vote under way goes on: see `voting`. Idempotent."""
        self._thread.shutdown(wait=False)
