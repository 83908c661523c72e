"""A real prefill and decode pair of SGLang over Mooncake's TCP, with the plugin on the prefill side.

Nothing of SGLang is replaced: requests come by HTTP, KV goes from process to process, and the answers must be
those of a server that is not divided. On CPU a forward runs on the scheduler's own thread, so this shows that
answers are right and queues come clean, not that anything overlaps.

All of it is done with one tensor rank and with two, each time on all servers (prefill, decode and the plain
one): 200 requests with aborts on both sides and clients that leave, pauses in both modes, every kind of load,
and an end when asked to. With two there is no stock loop beside, and prompts and loads are smaller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import servers
from pair_client import Answer, Client, Job, Jobs, Pair, differences
from pair_load import Figures, Phase, measure, phases, table
from servers import Prefill, Server

RANKS = (1, 2)
"""Tensor ranks of all servers."""
STOCK = "blocking"
"""SGLang's own loop that is measured beside the plugin's at one rank; pair_table.py has more."""


@dataclass
class World:
    """All servers of one run, and what the plain one answers."""

    ranks: int
    phases: tuple[Phase, ...]
    jobs: dict[str, list[Job]]
    references: dict[Job, Answer]
    prefills: dict[str, Prefill]
    decode: Server

    def run(self, scene: Callable[[Pair], Coroutine[Any, Any, Any]], loop: str = "aioprefill") -> Any:
        """Play a scene on a pair; afterwards both sides must be up, well and empty."""

        async def play() -> Any:
            async with Client() as client:
                pair = Pair(client, self.prefills[loop], self.decode)
                outcome = await scene(pair)
                await pair.drained()
                return outcome

        outcome = asyncio.run(play())
        for server in (self.prefills[loop].server, self.decode):
            assert server.alive, f"{server.name} has died:\n{server.log[-4000:]}"
        return outcome


def make_jobs(ranks: int, loads: Sequence[Phase]) -> dict[str, list[Job]]:
    """What the tests ask, by test. All ranks share the cores, so two of them are asked for less."""
    jobs, long_ones = Jobs(), 36 // ranks**2
    lengths = (5, 17, 40, 64, 65, 90, 128, 200)
    crowd = [jobs.plain(lengths[n % len(lengths)] // ranks) for n in range(136 - long_ones)]
    crowd += [jobs.plain((500 + 37 * (n % 19)) // ranks) for n in range(long_ones)]
    crowd += [jobs.with_schema(10 + n) for n in range(64)]
    order = sorted(crowd, key=lambda job: (job.number * 7919) % 211)

    def paused() -> list[Job]:
        long = [jobs.plain((700 + 29 * n) // ranks) for n in range(12)]
        return [*long, *(jobs.with_schema(20 + n) for n in range(8))]

    return {
        "crowd": order,
        "aborted": [jobs.plain((300 + 11 * n) // ranks) for n in range(24)],
        "left": [jobs.plain((900 + 7 * n) // ranks) for n in range(16)],
        "in_place": paused(),
        "retract": paused(),
        **{phase.name: phase.jobs(jobs) for phase in loads},
    }


@pytest.fixture(scope="module", params=RANKS, ids=lambda ranks: f"tp{ranks}")
def world(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """All servers start at once; the plain one ends when it has answered."""
    fault = servers.transfer_fault()
    if fault is not None:
        pytest.skip(f"Mooncake cannot be loaded ({fault}): apt-get install libibverbs1")
    ranks, folder = request.param, tmp_path_factory.mktemp("servers")
    started: list[Server] = []
    try:
        prefills = {}
        for loop in ("aioprefill", STOCK) if ranks == 1 else ("aioprefill",):
            prefills[loop] = servers.start_prefill(model, folder, loop, tp=ranks)
            started.append(prefills[loop].server)
        plain = servers.start_plain(model, folder, tp=ranks)
        started.append(plain)
        decode = servers.start_decode(model, folder, tp=ranks)
        started.append(decode)
        loads = phases(0.5 / ranks)
        jobs = make_jobs(ranks, loads)

        async def ask_plain() -> dict[Job, Answer]:
            async with Client() as client:
                compared = (job for part, asked in jobs.items() if part != "left" for job in asked)
                return await client.references(plain, compared)

        plain.wait_ready()
        references = asyncio.run(ask_plain())
        plain.kill()
        for server in started:
            if server is not plain:
                server.wait_ready()
        yield World(ranks, loads, jobs, references, prefills, decode)
        prefills["aioprefill"].server.stop()
    finally:
        for server in started:
            server.kill()


def test_server_says_that_the_loop_is_active(world: World) -> None:
    """One line in its log, and a table in `/server_info`; a stock server has neither."""

    async def info(pair: Pair) -> Any:
        return await pair.loop_info()

    told = world.run(info)
    assert (told["sglang"], told["ranks"], told["open_requests"]) == ("0.5.23", world.ranks, 0)
    line = "runs the prefill loop of SGLang 0.5.23"
    assert line in world.prefills["aioprefill"].server.log
    if STOCK in world.prefills:
        assert world.run(info, loop=STOCK) is None
        assert line not in world.prefills[STOCK].server.log


def test_crowd_with_aborts_and_clients_that_leave_gets_right_answers(world: World) -> None:
    """200 requests at once, schemas among long prompts; 24 others are aborted, 16 clients leave early."""
    jobs = world.jobs

    async def scene(pair: Pair) -> tuple[list[Any], list[Any], int]:
        async with asyncio.TaskGroup() as group:
            leaving = [group.create_task(pair.ask(job)) for job in jobs["left"]]
            staying = [group.create_task(pair.ask(job)) for job in jobs["crowd"]]
            aborted = [
                group.create_task(pair.ask(job, f"abort-{n}-")) for n, job in enumerate(jobs["aborted"])
            ]
            group.create_task(abort(pair, len(aborted)))
            group.create_task(probe(pair))
            await pair.progress.reached(3)
            left = sum(task.cancel() for task in leaving)
        return [task.result() for task in staying], [task.result() for task in aborted], left

    async def abort(pair: Pair, count: int) -> None:
        for n in range(count):
            await pair.progress.reached(4 * n)
            await pair.abort(f"abort-{n}-")

    async def probe(pair: Pair) -> None:
        for n in range(5):
            await pair.progress.reached(30 * n)
            assert await pair.client.healthy(pair.prefill)

    stayed, aborted, left = world.run(scene)
    assert len(stayed) == 200
    assert differences(list(zip(jobs["crowd"], stayed, strict=True)), world.references) == []
    whole = [pair for pair in zip(jobs["aborted"], aborted, strict=True) if not _given_up(pair[1])]
    assert differences(whole, world.references) == []
    assert len(whole) < len(aborted), "no abort came in time"
    assert left >= 8, "clients left when it was over"


def _given_up(answer: tuple[Answer, Answer]) -> bool:
    return any(half.finish == "abort" or half.finish.startswith("http 5") for half in answer)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pauses_amid_long_prompts_change_no_answer(world: World, mode: str) -> None:
    """Nothing is launched while the server is paused, some times within twelve prompts of many chunks."""
    jobs = world.jobs[mode]

    async def scene(pair: Pair) -> list[Any]:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(pair.ask(job)) for job in jobs]
            for answered in (0, 1, 3, 8, 14)[:: world.ranks]:
                await pair.progress.reached(answered)
                await pair.client.post(pair.prefill, "/pause_generation", mode=mode)
                try:
                    first, second = await pair.loop_info(), await pair.loop_info()
                finally:
                    await pair.client.post(pair.prefill, "/continue_generation")
                assert first is not None and second is not None
                assert first["paused"] and second["paused"]
                assert first["launched"] == second["launched"]
        return [task.result() for task in asked]

    answers = world.run(scene)
    assert differences(list(zip(jobs, answers, strict=True)), world.references) == []


def test_every_kind_of_load_is_answered_and_idle_costs_little(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheduler's CPU in each phase, for SGLang's own loop and for the plugin's."""
    figures: list[Figures] = []
    for phase in world.phases:
        for loop in world.prefills:

            async def scene(pair: Pair, phase=phase) -> tuple[Figures, list[Any]]:
                return await measure(pair, phase, world.jobs[phase.name])

            figure, answers = world.run(scene, loop=loop)
            assert differences(answers, world.references) == []
            figures.append(figure)
    with capsys.disabled():
        print(f"\n{table(figures)}")
    idle = next(f for f in figures if (f.phase, f.loop) == ("idle", "aioprefill"))
    assert idle.process_percent <= 10 * world.ranks
