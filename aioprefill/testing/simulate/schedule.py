"""One schedule: a seed's world, from its beginning to its end."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from aioprefill.testing.simulate.clock import SimulationLoop, run
from aioprefill.testing.simulate.draws import Draws
from aioprefill.testing.simulate.native import NativeWorld
from aioprefill.testing.simulate.scripted import ScriptedWorld
from aioprefill.testing.simulate.story import Story
from aioprefill.testing.simulate.world import World

MOVES, EVENTS = 60, 100
"""A schedule has at least so many moves, and what happens in it, ends of forwards and transfers included."""
LONGEST_S = 3600.0
"""Virtual seconds that a schedule may take."""


@dataclass(slots=True)
class Played:
    """What came of a seed."""

    seed: int
    size: int
    kind: str
    events: int
    counters: dict[str, int]
    failure: str = ""
    """The rule that was broken, or the error; "" when all went well."""
    trace: str = ""
    lines: list[str] = field(default_factory=list)


def shape(seed: int, sizes: Sequence[int]) -> tuple[int, type[World]]:
    """Number of ranks and kind of world of a seed."""
    size = sizes[seed % len(sizes)]
    scripted = seed // len(sizes) % 3 == 2
    return size, ScriptedWorld if scripted else NativeWorld


def play(seed: int, sizes: Sequence[int], *, told: bool = False) -> Played:
    """Play one seed. Raises nothing: what goes wrong is in the answer."""
    size, make = shape(seed, sizes)
    story = Story(told=told)
    played = Played(seed, size, make.kind, 0, {})
    loop = SimulationLoop()
    logging.disable(logging.CRITICAL)  # what goes wrong on purpose is no news
    try:
        run(_play(seed, size, make, story), loop)
        if loop.broken:
            raise story.violate(f"a callback or a task broke: {loop.broken[0]}")
    except Exception as error:
        played.failure = story.violation or f"{type(error).__name__}: {error}"
        played.trace = "".join(traceback.format_exception(error))
    finally:
        logging.disable(logging.NOTSET)
    played.events, played.lines = story.events, story.lines
    played.counters = dict(sorted(story.counters.items()))
    return played


async def _play(seed: int, size: int, make: type[World], story: Story) -> None:
    draws = Draws(seed, size)
    world = make(draws, size, story)
    story.count(f"world {make.kind} on {size}")
    try:
        async with asyncio.timeout(LONGEST_S):
            await world.play(MOVES, EVENTS)
    except TimeoutError:
        raise story.violate("the schedule comes to no end") from None
