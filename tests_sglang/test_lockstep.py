"""With arrivals keyed to results, all loops see the same inputs at the same points: nothing may differ."""

from __future__ import annotations

import random

import pytest
from harness import Arrival, Bench, Run, results, whole
from messages import abort, pause, prompt, request, resume

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
