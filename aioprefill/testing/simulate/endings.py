"""How a schedule ends: drained when all has gone well, drained in the middle, or broken down."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING

from aioprefill.errors import AioprefillError, DeviceError, HostError, RankError

if TYPE_CHECKING:
    from aioprefill.testing.simulate.world import World

PATIENCE_S = 120.0
"""Virtual seconds in which everything has to end once nothing goes wrong any more."""
PROVOKE_S = 0.5


class Ending(enum.Enum):
    """What becomes of the scheduler."""

    HEALED = "healed"
    """Nothing goes wrong any more, and all requests come to their ends before it drains."""
    DRAINED = "drained in the middle"
    STICKY = "device lost"
    """A forward fails on some rank so that no other one can run."""
    LOST = "rank lost"

    @property
    def breaks(self) -> bool:
        """The loop stops with an error."""
        return self in (Ending.STICKY, Ending.LOST)


def draw_ending(world: World) -> Ending:
    """Of a world, by its own stream."""
    chance = world.draws.ending.random()
    if chance < 0.55:
        return Ending.HEALED
    if chance < 0.9:
        return Ending.DRAINED
    return Ending.STICKY if chance < 0.95 or world.size == 1 else Ending.LOST


async def bring_about(world: World, ending: Ending) -> None:
    """Until the scheduler can be left, or has stopped. Raises `AssertionError`."""
    world.story.event(f"ending: {ending.value}")
    match ending:
        case Ending.HEALED:
            await world.come_to_an_end()
            await drain(world, 5.0)
            world.raise_what_broke()
        case Ending.DRAINED:
            await drain(world, world.draws.ending.choice((0.0, 0.1, 1.0, 20.0)))
            world.raise_what_broke()
        case Ending.STICKY:
            world.story.breaking = True
            world.draws.devices.lost = world.draws.ending.randrange(world.size)
            await _wait_stopped(world, provoke=True)
        case Ending.LOST:
            world.story.breaking = True
            assert world.ranks is not None
            world.lost = world.draws.ending.randrange(1, world.size)
            world.following[world.lost - 1].cancel()
            world.ranks.lose(world.lost, "went away")
            await _wait_stopped(world, provoke=False)


async def drain(world: World, timeout_s: float) -> None:
    """And look at what is reported."""
    before = set(world.scheduler._host.open_requests())
    report = await world.scheduler.drain(timeout_s)
    told = [*report.finished, *report.dropped]
    if len(set(told)) != len(told) or not before <= set(told):
        raise world.story.violate(f"the report of a drain is wrong: {report}, open were {sorted(before)}")
    world.story.counters["dropped by a drain"] += len(report.dropped)


async def _wait_stopped(world: World, *, provoke: bool) -> None:
    stopped = asyncio.ensure_future(world.scheduler.wait_stopped())
    for _ in range(int(PATIENCE_S / PROVOKE_S)):
        if provoke:
            world.provoke()
        await asyncio.wait([stopped], timeout=PROVOKE_S)
        if stopped.done():
            return
    raise world.story.violate("the scheduler does not stop")


def check_leader_broke(world: World, ending: Ending, error: AioprefillError) -> None:
    """It has stopped for the right reason. Raises `Violation`."""
    if world.lost is not None:
        right = isinstance(error, RankError) and error.rank == world.lost
    else:
        right = isinstance(error, DeviceError) and error.sticky
    if not right:
        raise world.story.violate(f"{ending.value}, and the scheduler stops with {error!r}")


async def end_followers(world: World, ending: Ending) -> None:
    """They end, well if the leader does. Raises `Violation`, or what one of them has raised."""
    if world.following:
        await asyncio.wait(world.following, timeout=PATIENCE_S)
    for rank, task in enumerate(world.following, 1):
        if not task.done():
            raise world.story.violate(f"rank {rank} does not end: {world.followers[rank - 1]!r}")
        if not ending.breaks:
            task.result()
        elif rank != world.lost:
            _check_follower_broke(world, rank, task)
    if not ending.breaks:
        _check_ends(world)
        _check_votes(world)


def _check_follower_broke(world: World, rank: int, task: asyncio.Task[None]) -> None:
    error = task.exception()
    right = isinstance(error, HostError)
    if world.lost is not None:
        right = isinstance(error, RankError) and error.rank == world.lost
    if not right:
        raise world.story.violate(f"rank {rank} stops with {error!r}")


def _check_ends(world: World) -> None:
    """All ranks have made the same calls."""
    ends = world.twins.next_calls
    if any(end != ends[0] for end in ends):
        raise world.story.violate(f"ranks have made different numbers of calls: {list(ends)}")
    core = world.scheduler._core
    if core is not None and core.digest is not None:
        digests = {core.digest.value, *(follower.digest for follower in world.followers)}
        if len(digests) > 1:
            raise world.story.violate(f"ranks end with different digests: {sorted(digests)}")


def _check_votes(world: World) -> None:
    """One vote for each forward, but for those that a drain has left behind."""
    if world.ranks is None:
        return
    votes, launched, left = world.ranks.collectives, world.rules.launched, world.rules.depth
    if not launched - left <= votes <= launched:
        raise world.story.violate(f"{votes} votes on {launched} forwards, {left} of them left behind")
