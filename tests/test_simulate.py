"""Random schedules on simulated ranks keep the rules of the loop, and mistakes in it are found by them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from aioprefill.testing import plugin
from aioprefill.testing.simulate.__main__ import main
from aioprefill.testing.simulate.bugs import BUGS, planted
from aioprefill.testing.simulate.pool import play_many
from aioprefill.testing.simulate.reach import ENOUGH, missing, required
from aioprefill.testing.simulate.schedule import EVENTS, play

SIZES = (1, 2, 4)
SEEDS = 2000
WORKERS = os.cpu_count() or 1
ENOUGH_FOR_A_BUG = 1000
ONE_OF_EACH = (0, 1, 2, 6, 7, 8)
"""Seeds of the native and the scripted host on 1, 2 and 4 ranks."""


RULES = {
    "skip-hold": "a pause began outside a step",
    "out-of-order": "result [0-9]+ is out of order",
    "second-before-step": "before the step that does its bookkeeping",
    "launch-before-sample": "launched before the delayed sample",
    "free-early": "uses pages that nobody holds",
    "digest-at-vote": "decided differently",
    "retract-in-vote": "processed while its vote was pending",
    "own-clock": "differs at call [0-9]+ .progress_transfers.",
    "abort-dropped": "a result was published after its abort",
}
"""By which rule each planted bug has to be found."""


@pytest.fixture(autouse=True)
def own_leak_check() -> Iterator[None]:
    """Schedules look for what is left themselves, on every rank; planted bugs leave what they like."""
    yield
    plugin._watch.take()


def test_R4_random_schedules_keep_the_rules_on_one_two_and_four_ranks() -> None:
    """No seed fails, each has its events, and together they reach every state, pause and kind of failure."""
    total = play_many(0, SEEDS, SIZES, workers=WORKERS)
    assert not total.failures, f"{list(total.failures.items())[:3]}"
    assert not total.missing
    assert total.schedules == SEEDS
    assert total.least_events >= EVENTS


@pytest.mark.parametrize("bug", BUGS)
def test_R4_a_planted_bug_is_found(bug: str, record_property: Callable[[str, object], None]) -> None:
    """A mistake of each kind makes a seed fail, soon, and one of them by the very rule that it breaks."""
    total = play_many(0, ENOUGH_FOR_A_BUG, SIZES, workers=1, bug=bug, until=RULES[bug])
    assert total.failures, f"{bug} was not found within {ENOUGH_FOR_A_BUG} seeds"
    first, last = min(total.failures), max(total.failures)
    record_property("found", f"{bug}: seed {first}: {total.failures[first][:200]}")
    assert re.search(RULES[bug], total.failures[last]), f"nothing but {total.failures[last]}"
    assert not play(first, SIZES).failure, "and without it the seed does not fail"


def test_R4_a_failing_seed_replays_to_the_same_story() -> None:
    """Whoever is given its number sees what the run saw."""
    total = play_many(0, ENOUGH_FOR_A_BUG, SIZES, workers=1, bug="abort-dropped", until="")
    ((seed, failure),) = total.failures.items()
    with planted("abort-dropped"):
        first, second = play(seed, SIZES, told=True), play(seed, SIZES, told=True)
    assert first.failure == second.failure == failure
    assert first.lines == second.lines
    assert any("!!" in line for line in first.lines)


@pytest.mark.parametrize("seed", ONE_OF_EACH)
def test_R4_a_seed_tells_the_same_story_twice(seed: int) -> None:
    """Nothing but the seed decides; not even what was played before it."""
    first = play(seed, SIZES, told=True)
    play(seed + 100, SIZES)
    second = play(seed, SIZES, told=True)
    assert first.lines == second.lines
    assert first.counters == second.counters
    assert len(first.lines) > first.events


def test_R4_a_seed_tells_the_same_story_in_another_process() -> None:
    """Hashes differ from process to process, addresses too; stories do not."""
    stories = []
    for number in ("1", "2"):
        command = (sys.executable, "-m", "aioprefill.testing.simulate", "--seed", "5", "--verbose")
        environment = {**os.environ, "PYTHONHASHSEED": number}
        stories.append(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert stories[0] == stories[1]
    assert stories[0].count(b"\n") > EVENTS


def test_R4_a_run_that_misses_something_fails() -> None:
    """A run of enough seeds that has not reached a state, a pause or a failure has not shown much."""
    everything = dict.fromkeys(required(SIZES), 1)
    assert missing(everything, ENOUGH, SIZES) == []
    assert "pause retract at 2" in everything
    del everything["pause retract at 2"]
    assert missing(everything, ENOUGH, SIZES) == ["pause retract at 2"]
    assert missing({}, ENOUGH - 1, SIZES) == []


def test_R4_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    """With the figures that are asked for; its exit code tells whether all seeds have passed."""
    arguments = ["--seeds", "4", "--first-seed", "3", "--ranks", "1,2", "--workers", "1", "--json"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schedules"] == 4 and told["failing_seeds"] == []
    assert told["schedules_per_second"] > 0 and told["counters"]["moves"] > 0
    assert main([*arguments, "--bug", "free-early"]) == 1
    assert json.loads(capsys.readouterr().out)["failing_seeds"]
