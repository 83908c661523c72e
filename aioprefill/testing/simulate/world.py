"""What both kinds of worlds share: ranks, links, a scheduler, followers, and checks at every host call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from aioprefill.config import SchedulerConfig
from aioprefill.errors import AioprefillError
from aioprefill.follower import Follower
from aioprefill.host import ReplicatedHost
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.rank_links import MemoryRanks
from aioprefill.testing.simulate.draws import Draws
from aioprefill.testing.simulate.endings import (
    Ending,
    bring_about,
    check_leader_broke,
    draw_ending,
    end_followers,
)
from aioprefill.testing.simulate.rules import LoopRules
from aioprefill.testing.simulate.story import Story, in_words
from aioprefill.testing.simulate.twins import Made, State, Twins
from aioprefill.tp_agree import CallToken

Move = tuple[Callable[[], None], float]
"""A move, and its weight against the others."""
RAISED = msgspec.msgpack.encode({"raised": ""})[:-1]
"""How the description of a call begins that has raised: the error is on its way already."""


class World:
    """One schedule's scheduler with its followers. Made on its running loop."""

    kind = ""

    def __init__(self, draws: Draws, size: int, story: Story) -> None:
        self.draws = draws
        self.size = size
        self.story = story
        self.hosts: list[Any] = [self.make_host(rank) for rank in range(size)]
        self.ranks: MemoryRanks | None = None
        if size > 1:
            self.ranks = MemoryRanks(size, link_delay=draws.link_s, vote_delay=draws.vote_s)
        self.scheduler = PrefillScheduler(
            self.hosts[0], SchedulerConfig(), ranks=None if self.ranks is None else self.ranks[0]
        )
        self.rules = LoopRules(story.violate, self.pausing)
        self.twins = Twins(size, story.violate)
        self.followers: list[Follower] = []
        self.following: list[asyncio.Task[None]] = []
        self.lost: int | None = None
        """A rank that went away."""

    # What a kind of world is

    def make_host(self, rank: int) -> ReplicatedHost:
        """The host of a rank."""
        raise NotImplementedError

    def moves(self) -> Sequence[Move]:
        """What may happen next."""
        raise NotImplementedError

    def pausing(self) -> bool:
        """The leader's host has begun a pause, in whatever mode."""
        raise NotImplementedError

    def state(self, rank: int) -> State:
        """See `State`."""
        raise NotImplementedError

    def check_host(self, rank: int, token: CallToken, description: bytes) -> None:
        """What holds on a rank behind every host call. Raises `AssertionError`."""
        raise NotImplementedError

    def check(self) -> None:
        """What holds between any two moves. Raises `AssertionError`."""
        ends = self.twins.next_calls
        if self.ranks is not None and min(ends) < max(ends):
            self.story.count("call that waits for a rank")
        if self.ranks is not None and self.rules.depth and self.ranks.joined(self.rules.flying[0]):
            self.story.count("vote that waits for a rank")

    async def come_to_an_end(self) -> None:
        """Everything goes well from now on: wait until nothing is left. Raises `AssertionError`."""
        raise NotImplementedError

    def provoke(self) -> None:
        """Do what lets the device run: resume, and bring a request."""
        raise NotImplementedError

    def check_end(self, *, healed: bool) -> None:
        """What holds when all is over. Raises `AssertionError`."""
        raise NotImplementedError

    # The schedule

    async def play(self, moves: int, events: int) -> None:
        """The whole life of a scheduler, with at least so many of both. Raises what breaks it."""
        self._start_followers()
        ending = draw_ending(self)
        try:
            async with self.scheduler:
                self._watch_calls()
                self.started()
                while self.story.counters["moves"] < moves or self.story.events < events:
                    await self._move()
                await bring_about(self, ending)
        except AioprefillError as error:
            if not ending.breaks:
                raise
            check_leader_broke(self, ending, error)
        await end_followers(self, ending)
        await asyncio.sleep(1.0)  # commands that wait for one another get their answers one by one
        self.check_end(healed=ending is Ending.HEALED)
        if self.story.violation is not None:
            raise self.story.violate(self.story.violation)

    def started(self) -> None:
        """The scheduler runs."""

    def _start_followers(self) -> None:
        for rank in range(1, self.size):
            assert self.ranks is not None
            follower = Follower(self.hosts[rank], self.ranks[rank])
            follower._runner.observers.append(self._follows(rank, follower))
            self.followers.append(follower)
            self.following.append(asyncio.create_task(follower.run(), name=f"rank {rank}"))

    async def _move(self) -> None:
        """One move, with the loop at some random point behind it."""
        pick = self.draws.moves
        moves = self.moves()
        (chosen,) = pick.choices([move for move, _ in moves], [weight for _, weight in moves])
        self.story.counters["moves"] += 1
        chosen()
        await self._wait(pick.random())
        self.raise_what_broke()
        self.check()

    async def _wait(self, chance: float) -> None:
        if chance < 0.15:
            return
        if chance < 0.45:
            for _ in range(self.draws.moves.randint(1, 5)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self.draws.moves.choice((0.0005, 0.005, 0.02, 0.05, 0.1, 0.3)))

    def raise_what_broke(self) -> None:
        """Raises what has ended the loop, a rule's violation first."""
        if self.story.violation is not None:
            raise self.story.violate(self.story.violation)
        tasks = [self.scheduler._runner, *self.following]
        for task in tasks:
            assert task is not None
            if task.done():
                error = task.exception()
                if error is not None:
                    raise error
                raise self.story.violate(f"{task.get_name()} has ended too early")

    async def command(self, what: str, make: Callable[[], Awaitable[Any]]) -> bool:
        """Carry out a command; False: it was refused. Cancelling it cancels the command."""
        try:
            answer = await make()
        except AioprefillError as error:
            self.story.count(f"refused: {what}")
            if self.story.told:
                self.story.tell("", f"   {what}: {type(error).__name__}: {error}")
            return False
        self.story.count(f"done: {what}")
        if self.story.told:
            self.story.tell("", f"   {what}: {answer}")
        return True

    # Host calls

    def _watch_calls(self) -> None:
        """Of the leader: before they are made, and behind the digest's observer."""
        runner = self.scheduler._runner_of_calls
        run = runner.run

        def checked(token: CallToken) -> Any:
            self.rules.calling(token)
            return run(token)

        runner.run = checked  # type: ignore[method-assign]
        runner.observers.append(self._led)

    def _led(self, token: CallToken, description: bytes) -> None:
        """A host call of the leader."""
        self._told(0, token, description)
        if description.startswith(RAISED):
            self._raised(0, token, description)
            return
        self.rules.called(token, description)
        core = self.scheduler._core
        digest = 0
        if token.kind == "launch" and core is not None and core.digest is not None:
            digest = core.digest.value
        self.twins.lead(Made(token, description, digest, self._checked(0, token, description)))

    def _follows(self, rank: int, follower: Follower) -> Callable[[CallToken, bytes], None]:
        def made(token: CallToken, description: bytes) -> None:
            self._told(rank, token, description)
            if description.startswith(RAISED):
                self._raised(rank, token, description)
                return
            digest = follower.digest if token.kind == "launch" else 0
            state = self._checked(rank, token, description)
            self.twins.follow(rank, Made(token, description, digest, state))

        return made

    def _raised(self, rank: int, token: CallToken, description: bytes) -> None:
        text = msgspec.msgpack.decode(description)["raised"]
        self.story.violate(f"rank {rank}, call {token.number} ({token.kind}) raised {text}")

    def _checked(self, rank: int, token: CallToken, description: bytes) -> State:
        try:
            self.check_host(rank, token, description)
            return self.state(rank)
        except AssertionError as error:
            raise self.story.violate(f"rank {rank}, call {token.number} ({token.kind}): {error}") from error

    def _told(self, rank: int, token: CallToken, description: bytes) -> None:
        if self.story.told:
            detail = "" if token.detail < 0 else f" {token.detail}"
            self.story.tell(
                f"rank {rank}",
                f"#{token.number} {token.kind}{detail}{in_words(token.kind, description)}",
            )
