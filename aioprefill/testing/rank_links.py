"""Ranks in one process: links in memory that delay what they carry, and votes that need no group.

For tests and simulations on a virtual clock. Messages of one link stay in order; each takes what `delay()`
says. A vote ends for every rank some delay after the last one has joined. Delays may differ between ranks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from aioprefill.errors import DeviceError, RankError
from aioprefill.tp_agree import Ballot, Seen, ballot, settle, unanimous, verdict

Deliver = Callable[[int, bytes], None]


@dataclass(slots=True)
class _Vote:
    """A vote under way."""

    ballots: dict[int, Ballot] = field(default_factory=dict)
    ends: dict[int, asyncio.Future[Seen]] = field(default_factory=dict)


class MemoryRanks:
    """Makes the links of `size` ranks: `ranks[n]` is that of rank n. Made on a running loop.

    `delay()` is for messages and votes alike, in seconds; `link_delay(sender, receiver)` and
    `vote_delay(rank)` are for either of them instead.
    """

    def __init__(
        self,
        size: int,
        delay: Callable[[], float] = lambda: 0.0,
        *,
        link_delay: Callable[[int, int], float] | None = None,
        vote_delay: Callable[[int], float] | None = None,
    ) -> None:
        self.size = size
        self.link_delay = link_delay or (lambda _sender, _receiver: delay())
        self.vote_delay = vote_delay or (lambda _rank: delay())
        self.links = [MemoryLink(self, rank) for rank in range(size)]
        self.collectives = 0
        """Votes that were held; each is one round trip of a real group."""
        self._votes: dict[int, _Vote] = {}

    def __getitem__(self, rank: int) -> MemoryLink:
        return self.links[rank]

    def joined(self, number: int) -> set[int]:
        """Ranks that have joined a vote that is not over."""
        vote = self._votes.get(number)
        return set() if vote is None else set(vote.ballots)

    def lose(self, rank: int, cause: str) -> None:
        """A rank is gone: every other one is told."""
        for link in self.links:
            if link.rank != rank:
                link.lost(RankError(rank, cause))

    async def join(self, rank: int, number: int, digest: int, seen: Seen) -> Seen:
        """A rank joins the vote on a forward; what the vote comes to."""
        vote = self._votes.setdefault(number, _Vote())
        assert rank not in vote.ballots, f"rank {rank} votes twice on forward {number}"
        vote.ballots[rank] = ballot(rank, number, digest, seen)
        end = vote.ends[rank] = asyncio.get_running_loop().create_future()
        if len(vote.ballots) == self.size:
            self.collectives += 1
            del self._votes[number]
            self._end(vote)
        return await asyncio.shield(end)

    def _end(self, vote: _Vote) -> None:
        ballots = [vote.ballots[rank] for rank in range(self.size)]
        least = [min(column) for column in zip(*(one.vector for one in ballots), strict=True)]
        outcome = None if unanimous(least) else verdict(ballots)
        loop = asyncio.get_running_loop()
        for rank, end in vote.ends.items():
            loop.call_later(self.vote_delay(rank), _resolve, end, outcome)


def _resolve(end: asyncio.Future[Seen], outcome: Seen) -> None:
    if not end.done():
        end.set_result(outcome)


class MemoryLink:
    """Implements `RankLink`, and is its own `Agreement` and `CallProgress`."""

    def __init__(self, ranks: MemoryRanks, rank: int) -> None:
        self._ranks = ranks
        self.rank = rank
        self._on_message: Deliver | None = None
        self._on_lost: Callable[[RankError], None] = lambda _: None
        self._waiting: list[tuple[int, bytes]] = []
        self._coming: dict[int, deque[bytes]] = {}
        self._last_s: dict[int, float] = {}
        """When the last message to each rank arrives."""
        self.executed = -1
        """Number of the last host call."""
        self.forward: int | None = None
        self.reason = ""
        self.closed = False

    def __repr__(self) -> str:
        return f"<MemoryLink rank={self.rank} of {self.size}>"

    @property
    def size(self) -> int:
        """See `RankLink.size`."""
        return self._ranks.size

    @property
    def agreement(self) -> MemoryLink:
        """See `RankLink.agreement`."""
        return self

    async def vote(self, number: int, digest: int, seen: Seen) -> DeviceError | None:
        """See `Agreement.vote`."""
        return settle(await self._ranks.join(self.rank, number, digest, seen))

    @property
    def progress(self) -> MemoryLink:
        """See `RankLink.progress`."""
        return self

    def begin_call(self, kind: str) -> None:
        """See `CallProgress`."""

    def end_call(self, number: int) -> None:
        """See `CallProgress`."""
        self.executed = number

    def start(self, on_message: Deliver, on_lost: Callable[[RankError], None]) -> None:
        """See `RankLink.start`."""
        self._on_message, self._on_lost = on_message, on_lost
        waiting, self._waiting = self._waiting, []
        for rank, data in waiting:
            on_message(rank, data)

    async def wait_connected(self) -> None:
        """See `RankLink.wait_connected`."""

    def send(self, data: bytes) -> None:
        """See `RankLink.send`."""
        others = range(1, self.size) if self.rank == 0 else (0,)
        loop = asyncio.get_running_loop()
        for rank in others:
            arrives_s = max(
                self._last_s.get(rank, 0.0), loop.time() + self._ranks.link_delay(self.rank, rank)
            )
            self._last_s[rank] = arrives_s
            self._ranks[rank].coming(self.rank, data)
            loop.call_at(arrives_s, self._ranks[rank].arrive, self.rank)

    def coming(self, rank: int, data: bytes) -> None:
        """A message is on its way."""
        self._coming.setdefault(rank, deque()).append(data)

    def arrive(self, rank: int) -> None:
        """The oldest message of another rank has arrived: timers of one moment fire in any order."""
        data = self._coming[rank].popleft()
        if self.closed:
            return
        if self._on_message is None:
            self._waiting.append((rank, data))
        else:
            self._on_message(rank, data)

    def lost(self, error: RankError) -> None:
        """A rank is gone."""
        self._on_lost(error)

    def failed(self, error: BaseException) -> None:
        """See `RankLink.failed`."""
        self.reason = str(error)
        if isinstance(error, RankError):
            self._ranks.lose(error.rank, error.cause)
        else:
            self._ranks.lose(self.rank, f"stopped: {error}")

    async def aclose(self) -> None:
        """See `RankLink.aclose`."""
        self.closed = True
