"""The random numbers of a schedule: one stream for each thing that happens, all from one seed.

Streams are apart so that one thing more or less of one kind leaves the others what they were.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

SPREAD = (0.0, 0.5, 1.0, 3.0)
"""How much slower or faster than usual a message is."""


class Draws:
    """The streams of one seed, and the temper of its world: how slow, how skewed, how faulty it is."""

    def __init__(self, seed: int, size: int) -> None:
        self._seed = seed
        world = self.world = self.stream("world")
        self.moves = self.stream("moves")
        self.links = self.stream("links")
        self.votes = self.stream("votes")
        self.ending = self.stream("ending")
        self.devices = Devices(
            self.stream("devices"), [self.stream(f"device {rank}") for rank in range(size)]
        )
        self.transfers = [self.stream(f"transfer {rank}") for rank in range(size)]
        self.size = size
        slowest = world.choice((0.0, 0.001, 0.01, 0.2))
        self._link_s = [world.random() * slowest for _ in range(size)]
        self._vote_s = world.choice((0.0, 0.001, 0.03))

    def stream(self, name: str) -> random.Random:
        """A stream of its own."""
        return random.Random(f"{self._seed} {name}")

    def link_s(self, sender: int, receiver: int) -> float:
        """How long a message takes, seconds: some ranks are always slower than others."""
        return self._link_s[max(sender, receiver)] * SPREAD[int(self.links.random() * len(SPREAD))]

    def vote_s(self, rank: int) -> float:
        """How long the end of a vote takes to reach a rank, seconds."""
        return self._vote_s * self.votes.random()


@dataclass(frozen=True, slots=True)
class Run:
    """What a device does with one forward: `seconds` from its beginning to its end, and the error, if any."""

    seconds: float
    error: str = ""
    alone: bool = False
    """It fails, and on another rank it does not."""
    sticky: bool = False
    """The device is lost by it."""


@dataclass(slots=True)
class Devices:
    """How long forwards take on each rank's device, and which of them fail."""

    common: random.Random
    own: list[random.Random]
    skew_s: float = field(init=False)
    lost: int | None = None
    """The rank whose device is going to be lost with its next forward."""
    faulty: float = field(init=False)
    """Chance of a forward to fail."""
    _base_s: list[float] = field(default_factory=list)
    _failing: list[frozenset[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.skew_s = self.common.choice((0.0, 0.002, 0.05))
        self.faulty = self.common.choice((0.0, 0.02, 0.06))

    def run(self, rank: int, number: int) -> Run:
        """Forward `number` on a rank."""
        if rank == self.lost:
            return Run(0.01, "cudaErrorIllegalAddress", alone=len(self.own) > 1, sticky=True)
        while len(self._base_s) <= number:
            self._draw()
        seconds = self._base_s[number] + self.own[rank].random() * self.skew_s
        failed = rank in self._failing[number] and self.faulty > 0
        alone = failed and len(self._failing[number]) < len(self.own)
        return Run(seconds, "cudaErrorSimulated" if failed else "", alone)

    def _draw(self) -> None:
        common = self.common
        self._base_s.append(common.choice((0.0, 0.01, 0.05, 0.1, 0.2)))
        ranks = range(len(self.own))
        if common.random() >= self.faulty:
            self._failing.append(frozenset())
        elif common.random() < 0.5:
            self._failing.append(frozenset(ranks))
        else:
            self._failing.append(frozenset({common.choice(ranks)}))
