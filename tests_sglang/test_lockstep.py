"""With arrivals keyed to results, all loops see the same inputs at the same points: nothing may differ."""

from __future__ import annotations

import random

import pytest
from harness import Arrival, Bench, Moment, Run, launches, looks, results, start, whole
from messages import abort, finish, pause, prompt, request, resume

LOOPS = ("blocking", "polling", "plugin")
SEEDS = range(40)


def script(seed: int) -> tuple[list[Arrival], dict[str, int]]:
    """Prompts of 5 to 300 tokens, some with a common beginning, at the start and after some results."""
    chance = random.Random(seed)
    arrivals, lengths = [], {}
    moment = 0
    for index in range(chance.randint(4, 8)):
        length = chance.choice((chance.randint(5, 60), chance.randint(65, 300)))
        tokens = prompt(chance.choice((1, 2, index + 10)), length)
        rid = f"r{index}"
        lengths[rid] = length
        arrivals.append(Arrival(request(rid, tokens), results(moment)))
        moment += chance.choice((0, 0, 1, 2))
    return arrivals, lengths


def same(runs: list[Run]) -> None:
    """What clients and peers saw, and in which batches it was computed, is the same in all runs."""
    first = runs[0]
    for other in runs[1:]:
        assert other.batches == first.batches, f"{other.loop} and {first.loop} form other batches"
        assert other.tokens() == first.tokens(), f"{other.loop} and {first.loop} answer differently"
        assert other.sends == first.sends, f"{other.loop} and {first.loop} send other chunks"
        assert other.send_order == first.send_order
        assert other.order == first.order
        assert other.state == first.state


@pytest.mark.parametrize("seed", SEEDS)
def test_same_batches_tokens_sends_and_state(bench: Bench, seed: int) -> None:
    """Random prompts: the three loops agree in everything, and every prompt is sent once, in order."""
    lengths = script(seed)[1]
    runs = [bench.run(loop, script(seed)[0]) for loop in LOOPS]
    same(runs)
    for rid, length in lengths.items():
        assert whole(runs[-1].sends[rid], length), runs[-1].sends[rid]
    assert runs[-1].most_in_flight == 2


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_same_with_a_pause_and_its_resume(bench: Bench, mode: str, at: int) -> None:
    """A pause between two chunks of a long prompt, resumed by the next message: nothing differs."""

    def arrivals() -> list[Arrival]:
        return [
            Arrival(request("long", prompt(1, 330))),
            Arrival(request("short", prompt(2, 20)), results(1)),
            Arrival(pause(mode), results(at)),
            Arrival(request("behind", prompt(3, 90)), results(at)),
            Arrival(resume(), results(at)),
        ]

    runs = [bench.run(loop, arrivals()) for loop in LOOPS]
    same(runs)
    for rid, length in (("long", 330), ("short", 20), ("behind", 90)):
        assert whole(runs[-1].sends[rid], length)


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_same_with_an_abort(bench: Bench, at: int) -> None:
    """A long prompt aborted before, between and behind its chunks."""

    def arrivals() -> list[Arrival]:
        return [
            Arrival(request("long", prompt(1, 200))),
            Arrival(request("other", prompt(2, 80))),
            Arrival(abort("long"), results(at)),
            Arrival(request("later", prompt(3, 50)), results(at)),
        ]

    runs = [bench.run(loop, arrivals()) for loop in LOOPS]
    same(runs)
    assert len(runs[-1].outcomes["long"]) == 1


ONE_RECEIVE = {
    "pause, resume": lambda mode: [pause(mode), resume()],
    "pause, resume, request": lambda mode: [pause(mode), resume(), request("late", prompt(3, 90))],
    "pause, request, resume": lambda mode: [pause(mode), request("late", prompt(3, 90)), resume()],
    "request, pause, resume, request": lambda mode: [
        request("late", prompt(3, 90)),
        pause(mode),
        resume(),
        request("later", prompt(4, 20)),
    ],
    "pause, resume, pause, resume": lambda mode: [pause(mode), resume(), pause("retract"), resume()],
}
"""What comes in by one receive, a resume among it."""


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("what", ONE_RECEIVE)
def test_P1_same_with_pause_and_resume_in_one_receive(bench: Bench, depth: int, mode: str, what: str) -> None:
    """While `depth` forwards are pending, none of them done: held as one, dispatched as one, in its order."""

    def arrivals() -> list[Arrival]:
        moment: Moment = looks(launches(depth), 3) if depth else start  # SGLang waits from the second look on
        first = [Arrival(request("first", prompt(1, 60 if depth == 1 else 300)))] if depth else []
        return [
            *first,
            *(Arrival(message, moment) for message in ONE_RECEIVE[what](mode)),
            Arrival(request("end", prompt(9, 10)), moment),
            *([Arrival(finish(bench, *range(depth)), looks(moment, 3))] if depth else []),
        ]

    runs = [
        bench.run(loop, arrivals(), delay_s=lambda number: None if number < depth else 0.004)
        for loop in ("polling", "plugin")
    ]
    same(runs)


@pytest.mark.parametrize("first", ["in_place", "retract"])
@pytest.mark.parametrize("second", ["in_place", "retract"])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("between", [False, True])
def test_P1_same_with_resume_and_pause_in_one_receive(
    bench: Bench, first: str, second: str, at: int, between: bool
) -> None:
    """While paused, with a kept result or none: the resume ends nothing that the pause behind it begins."""

    def arrivals() -> list[Arrival]:
        paused: Moment = looks(lambda _: bench.scheduler._engine_paused, 2)
        again: Moment = looks(paused, 3)
        middle = [Arrival(request("between", prompt(7, 40)), paused)] if between else []
        return [
            Arrival(request("long", prompt(1, 300))),
            Arrival(pause(first), results(at)),
            Arrival(resume(), paused),
            *middle,
            Arrival(pause(second), paused),
            Arrival(request("behind", prompt(3, 40)), paused),
            Arrival(resume(), again),
        ]

    runs = [bench.run(loop, arrivals(), delay_s=0.01) for loop in LOOPS]
    same(runs)
    assert runs[-1].paused_launches == 0
