"""What ranks do in tests: each function is one scenario, played by every rank of a group.

Rank 0 runs a scheduler and the scenario's script, the others follow. `World.found` is what a rank saw; the
test compares. Nothing here judges, but what has to be seen inside a rank.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch
import torch.distributed as dist
import uvloop
from rank_world import RankHost, World

from aioprefill.bench.intake import time_dispatch
from aioprefill.bench.ranks_process import SleepingEngine, Times, Usage
from aioprefill.config import NativeConfig
from aioprefill.engine.port import Span
from aioprefill.errors import AioprefillError, HostError
from aioprefill.host import Hold, Ingested, Progress
from aioprefill.native.host import NativeHost
from aioprefill.native.welcome import welcome_of
from aioprefill.process import settle_memory
from aioprefill.request import PrefillHandle, PrefillRequest, Timeouts
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.engine import FakeEngine, FakeEngineForward
from aioprefill.wire.prefill_service import PrefillService


async def play_fake(world: World, host: RankHost, script: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A scripted host; what is held is looked at after each call."""
    try:
        await world.play(host, lambda _: script(), lambda: host.held, host.log)
    finally:
        world.found |= {
            "outcomes": host.outcomes,
            "sends": host.sends,
            "processed": [entry for entry in host.log if entry.startswith("result ")],
            "answer": str(host.closed_with),
        }


async def ready_in_turn(world: World) -> None:
    """R1: the device of rank 0 is ready first for ten forwards, then that of rank 1, then both at once."""
    late = {0: (0.0, 0.02), 1: (0.02, 0.0), 2: (0.0, 0.0)}
    host = RankHost(0.03, lambda number: late[number // 10 % 3][world.rank], chunk_tokens=40)

    async def script() -> None:
        for number in range(10):
            host.arrive(f"r{number}", 120)
        await world.until(lambda: host.done == 10)

    await play_fake(world, host, script)


async def delayed_samples(world: World) -> None:
    """L8: forwards that are sampled behind the result before them; on rank `forgets` forward 6 never is."""
    rng = random.Random(world.rank)
    host = RankHost(0.02, lambda _: rng.uniform(0, 0.015), delayed_sampling=True)
    sample = host.sample_delayed

    def forgetful() -> None:
        if not (host._pending and host._pending[0].number == 6):
            sample()

    if world.options.get("forgets") == world.rank:
        host.sample_delayed = forgetful  # type: ignore[method-assign]

    async def script() -> None:
        for number in range(12):
            host.arrive(f"r{number}")
        await world.until(lambda: host.done == 12)

    await play_fake(world, host, script)


async def paused(world: World) -> None:
    """P1: a pause comes while `depth` forwards are in flight, and more behind it; then a resume."""
    mode, depth = world.options["mode"], world.options["depth"]
    host = RankHost(0.15, lambda number: 0.05 * (world.rank == number % 2))

    async def script() -> None:
        for number in range(depth):
            host.arrive(f"before{number}")
        await world.until(lambda: host.in_flight == list(range(depth)))
        host.control(mode)
        await world.until(lambda: host.held == [mode])
        host.arrive("behind")
        await world.until(lambda: host.held == [mode, "behind"])
        host.abort("behind")
        host.arrive("last")
        await world.until(lambda: host.paused)
        kept = [] if mode == "retract" else host.in_flight
        await world.until(lambda: all(f"agreed {number}" in host.log for number in kept))
        host.control("resume")
        await world.until(lambda: host.done == depth + 2)

    await play_fake(world, host, script)


class SlowCalls(NativeHost):
    """Its host calls take long; the clocks that it could read are an hour ahead."""

    def ingest(self, now: float, *, hold: Hold) -> Ingested:
        """See `PrefillHost.ingest`."""
        time.sleep(0.05)
        return super().ingest(now, hold=hold)

    def progress_transfers(self, now: float) -> Progress:
        """See `PrefillHost.progress_transfers`."""
        time.sleep(0.05)
        return super().progress_transfers(now)


async def timed_out(world: World) -> None:
    """A4: two waiting requests and a running one pass their limits; a follower lags, its clock differs."""
    engine = FakeEngine(duration_s=0.4)
    host = (SlowCalls if world.rank else NativeHost)(engine, None, NativeConfig(chunk_tokens=64))
    failed: list[tuple[str, str]] = []
    fail = host.ledger.fail

    def noted(request: Any, error: AioprefillError) -> None:
        failed.append((request.request_id, str(error)))
        fail(request, error)

    host.ledger.fail = noted  # type: ignore[method-assign]

    async def script(scheduler: PrefillScheduler) -> None:
        limits = [None, Timeouts(running_s=0.5), Timeouts(queue_s=0.1), Timeouts(queue_s=0.3), None]
        handles = [
            scheduler.submit(prompt(f"r{number}", limit or Timeouts())) for number, limit in enumerate(limits)
        ]
        await answers(world, handles)

    await world.play(host, script, lambda: len(failed), [])
    world.found["failed"] = failed


class CollectiveHost(RankHost):
    """A host that makes collectives of its own in every call, over a group of its own, as some engines do.

    Each says which call it is in: ranks that are not in the same call see it at once.
    """

    def __init__(
        self, group: dist.ProcessGroup, rng: random.Random, wrong_at: int | None, **options: Any
    ) -> None:
        super().__init__(0.0, lambda _: rng.choice((0.0, 0.0005, 0.003)), **options)
        self._group, self._rng, self._wrong_at = group, rng, wrong_at
        self.made = 0

    def meet(self, kind: str) -> None:
        """Meet the other ranks in a call. Raises `HostError` when one is in another call."""
        if self._rng.random() < 0.03:
            time.sleep(self._rng.uniform(0, 0.002))  # as long as real host calls take at times
        code = sum(map(ord, kind)) + (self.made == self._wrong_at)
        least = torch.tensor([self.made, -self.made, code, -code])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        low_call, minus_high_call, low_code, minus_high_code = least.tolist()
        if (low_call, low_code) != (-minus_high_call, -minus_high_code):
            raise HostError(f"a rank is in another call than {kind}, call {self.made}")
        self.made += 1


def _meeting(kind: str) -> Any:
    def call(host: CollectiveHost, *arguments: Any, **options: Any) -> Any:
        host.meet(kind)
        return getattr(RankHost, kind)(host, *arguments, **options)

    return call


HOST_CALLS = (
    *("ingest", "prepare", "launch", "process_result", "collect_bootstrapped", "progress_transfers"),
    *("on_idle", "begin_drain", "end_drain"),
)
for each in HOST_CALLS:
    setattr(CollectiveHost, each, _meeting(each))


async def collectives(world: World) -> None:
    """At least `calls` host calls with a collective in each; in call `wrong_at` rank 1 is elsewhere."""
    rng = random.Random(world.rank)
    wrong_at = world.options.get("wrong_at") if world.rank == 1 else None
    host = CollectiveHost(dist.new_group(backend="gloo"), rng, wrong_at, chunk_tokens=40)
    loop = asyncio.get_running_loop()

    async def script() -> None:
        number, paused = 0, False
        while host.made < world.options["calls"]:
            number += 1
            host.arrive(f"r{number}", rng.choice((40, 80, 120)))
            draw = rng.random()
            if draw < 0.2:
                host.abort(f"r{rng.randint(1, number)}")
            elif draw < 0.3:
                host.control("resume" if paused else rng.choice(("in_place", "retract")))
                paused = not paused
            await world.until(lambda: paused or number - host.done < 12)  # noqa: B023
            came = asyncio.Event()
            loop.call_later(rng.choice((0.0, 0.0, 0.001, 0.003)), came.set)
            await came.wait()
        if paused:
            host.control("resume")
        await world.until(lambda: host.done == number)

    try:
        await play_fake(world, host, script)
    finally:
        del world.found["calls"], world.found["log"], world.found["sends"]
        world.found["made"] = host.made


def prompt(name: str, timeouts: Timeouts = Timeouts(), length: int = 60) -> PrefillRequest:
    """A request of its own prefix."""
    tokens = [(position * 7 + sum(map(ord, name)) * 131) % 1000 for position in range(length)]
    return PrefillRequest(tokens, request_id=name, timeouts=timeouts)


async def answers(world: World, handles: Sequence[PrefillHandle]) -> None:
    """Each request's one answer."""
    ends = await asyncio.gather(*handles, return_exceptions=True)
    world.found["answers"] = [
        str(end) if isinstance(end, BaseException) else f"token of {end.request_id}" for end in ends
    ]


class RankEngine(FakeEngine):
    """The first forward ends at once, later ones after `takes_s`, or never; a launch may not return."""

    def __init__(self, takes_s: float | None, *, blocks: bool) -> None:
        super().__init__(num_pages=64)
        self._takes_s, self._blocks = takes_s, blocks

    def launch(self, spans: Sequence[Span]) -> FakeEngineForward:
        """See `Engine.launch`."""
        if self.launched and self._blocks:
            threading.Event().wait()
        forward = super().launch(spans)
        takes_s = 0.0 if forward.number == 0 else self._takes_s
        if takes_s is not None:
            forward.completion.complete(at=asyncio.get_running_loop().time() + takes_s)
        return forward


async def lost(world: World) -> None:
    """R2: rank `victim` comes to grief at `moment`, by what the test does to it or by itself.

    "idle": nothing runs. "vote": it sits in a vote, while the devices of the others go on for ever.
    "forward": its device goes on for ever, while the others sit in a vote. "call": a launch never returns.
    "differs": it plans other chunks.
    """
    moment, is_victim = world.options["moment"], world.rank == world.options["victim"]
    first = is_victim if moment == "vote" else not is_victim
    engine = RankEngine(0.02 if first or moment == "differs" else None, blocks=moment == "call" and is_victim)
    chunk = 16 if moment == "differs" and is_victim else 64
    host = NativeHost(engine, None, NativeConfig(chunk_tokens=chunk, max_batch_requests=1))
    world.options["say_joins"] = True

    async def script(scheduler: PrefillScheduler) -> None:
        await scheduler.submit(prompt("first", length=10))
        if moment != "idle":
            handles = [scheduler.submit(prompt(f"r{number}")) for number in range(4)]
            await answers(world, handles)
        world.say(event="quiet", rank=0)
        await scheduler.wait_stopped()

    logging.getLogger("aioprefill").addHandler(SayErrors(world))
    hearing = asyncio.create_task(say_heard(world))
    try:
        await world.play(host, script, lambda: None, [])
    finally:
        hearing.cancel()
        world.found["open"] = list(host.open_requests())


class SayErrors(logging.Handler):
    """Says what is logged as an error."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        """See `Handler.emit`."""
        self._world.say(event="logs", rank=self._world.rank, text=record.getMessage())


async def say_heard(world: World) -> None:
    """Say when this rank's watch has heard of all ranks."""
    while world.link is None or world.link._watch is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    table = world.link._watch._table
    while not all(known.beat for known in table._ranks):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    world.say(event="hears", rank=world.rank)


async def waiting(world: World) -> None:
    """R3: serve requests whose forwards take 2 s, on a device whose thread sleeps; the CPU time of each."""
    times = Times(world.rank, argparse.Namespace(forward_ms=2000.0, skew_ms=5.0))
    host = NativeHost(
        SleepingEngine(times), None, NativeConfig(chunk_tokens=1 << 16, max_batch_requests=1024)
    )
    took_us = time_dispatch(host)
    settle_memory()
    log: list[str] = []
    usages: list[Usage] = [Usage()]
    percent: list[float] = []

    async def script(scheduler: PrefillScheduler) -> None:
        service = PrefillService(
            "tcp://127.0.0.1:0",
            submit=scheduler.submit,
            stats=lambda: scheduler.stats().flat(),
            welcome=welcome_of("prefill", host.engine.spec),
        )
        async with service:
            world.say(event="serves", rank=0, endpoint=service.endpoint)
            await world.until(lambda: len(percent) == 3)
            await world.until(lambda: not host.open_requests())

    def measured() -> int:
        """Behind each call: has another forward ended?"""
        while f"agreed {len(percent)}" in log:
            percent.append(usages.pop().percent())
            usages.append(Usage())
        return len(percent)

    await world.play(host, script, measured, log)
    world.found |= {"took_us": took_us, "percent": percent}


def run(name: str, world: World) -> None:
    """Play the scenario `name`. Raises what stops this rank."""
    scenario: Callable[[World], Coroutine[Any, Any, None]] = SCENARIOS[name]
    if scenario is timed_out and world.rank:
        monotonic = time.monotonic
        time.monotonic = lambda: monotonic() + 3600.0
        try:
            asyncio.run(scenario(world))
        finally:
            time.monotonic = monotonic
    else:
        uvloop.run(scenario(world))


SCENARIOS = {
    one.__name__: one
    for one in (ready_in_turn, delayed_samples, paused, timed_out, collectives, lost, waiting)
}
