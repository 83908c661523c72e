"""The pacer's predictions, and the fine timer under it."""

from __future__ import annotations

import asyncio
import os
import random
import time

import pytest
import uvloop

from aioprefill.pacer import CENSORED, EARLY, EARLY_AT_FIRST, FEW, FINE_S, UNLIKELY, Pacer
from aioprefill.timerfd import REHEARSAL, FineTimer


def detect(pacer: Pacer, tokens: int, seconds: float) -> tuple[float, int]:
    """How late a forward of `seconds` is found, and by how many looks; the pacer learns."""
    age, looks = pacer.begin(tokens), 1
    while age < seconds:
        age += pacer.next_look(tokens, age)
        looks += 1
    pacer.observe(tokens, age, looks)
    return age - seconds, looks


def test_first_forward_is_found_within_two_percent() -> None:
    """Nothing known: looks spread with the age, so their number grows with its logarithm only."""
    late, looks = detect(Pacer(), 100, 0.5)
    assert late <= 0.01
    assert looks < 400


@pytest.mark.parametrize("forward_s", [0.02, 0.1, 0.5])
def test_learned_forwards_are_found_finely_and_cheaply(forward_s: float) -> None:
    """Durations that vary by a tenth: late by 0.1 ms or less in most cases, never by a millisecond.

    And that for looks during less than a sixth of the time, of some 20 µs each.
    """
    pacer, chance = Pacer(), random.Random(4)
    found = [detect(pacer, 100, forward_s * chance.uniform(0.9, 1.1)) for _ in range(60)][10:]
    lateness = sorted(late for late, _ in found)
    looks = [count for _, count in found]
    assert lateness[len(lateness) // 2] <= 0.0001
    assert lateness[-1] <= 0.001
    assert sum(looks) / len(looks) <= 0.14 * forward_s / FINE_S
    assert max(looks) <= 0.3 * forward_s / FINE_S


def test_longer_looks_cost_less_and_are_later() -> None:
    """The shortest time between two looks is a setting: ten times longer, there are fewer, none closer."""
    chance = random.Random(4)
    durations = [0.1 * chance.uniform(0.9, 1.1) for _ in range(40)]
    looks = {}
    for fine_s in (FINE_S, 10 * FINE_S, 0.05):
        pacer = Pacer(fine_s=fine_s)
        looks[fine_s] = sum(detect(pacer, 100, seconds)[1] for seconds in durations)
        assert min(pacer.next_look(100, age / 1000) for age in range(1, 400)) >= fine_s
    fine, coarse, coarsest = looks.values()
    assert coarse <= fine / 4 and coarsest <= coarse


def test_finer_looks_find_long_forwards_sooner_too() -> None:
    """Looks at half a second grow apart with the time since they began, in proportion to the shortest."""
    chance = random.Random(4)
    durations = [0.5 * chance.uniform(0.9, 1.1) for _ in range(60)]
    late = {}
    for fine_s in (FINE_S, FINE_S / 6):
        pacer = Pacer(fine_s=fine_s)
        late[fine_s] = sorted(detect(pacer, 100, seconds)[0] for seconds in durations)[30]
    assert late[FINE_S / 6] <= late[FINE_S] / 3


def test_late_detection_does_not_confirm_itself() -> None:
    """Forwards become ten times faster: first looks that come too late shrink the estimate."""
    pacer = Pacer()
    for _ in range(20):
        detect(pacer, 100, 0.5)
    late = [detect(pacer, 100, 0.05)[0] for _ in range(30)]
    assert late[0] > 0.1
    assert late[-1] <= 0.001


def test_ready_at_the_first_look_is_a_censored_sample() -> None:
    """What the first look finds done ended before it: less is remembered."""
    pacer = Pacer()
    pacer.observe(100, 1.0, 1)
    assert pacer.begin(100) == pytest.approx(EARLY_AT_FIRST * CENSORED)


def test_looking_begins_below_the_smallest_recent_duration() -> None:
    """One short forward among long ones decides the begin."""
    pacer = Pacer()
    for seconds in (0.5, 0.2, 0.6):
        pacer.observe(100, seconds, 5)
    assert pacer.begin(100) == pytest.approx(EARLY_AT_FIRST * 0.2)
    for _ in range(FEW):
        pacer.observe(100, 0.3, 5)
    assert pacer.begin(100) == pytest.approx(EARLY * 0.2)


def test_sizes_are_learned_apart() -> None:
    """A size that was never seen takes the next smaller one's durations, never a larger one's."""
    pacer = Pacer()
    pacer.observe(4096, 1.0, 5)
    assert pacer.begin(16) == 0.0
    pacer.observe(16, 0.01, 5)
    assert pacer.begin(16) == pytest.approx(EARLY_AT_FIRST * 0.01)
    assert pacer.begin(1000) == pytest.approx(EARLY_AT_FIRST * 0.01)
    assert pacer.next_look(1000, 0.0099) == UNLIKELY * FINE_S
    assert pacer.next_look(1000, 0.0101) == FINE_S
    assert pacer.begin(8000) == pytest.approx(EARLY_AT_FIRST * 1.0)


def test_overdue_forwards_are_looked_for_ever_more_rarely() -> None:
    """A forward that hangs costs next to nothing."""
    pacer = Pacer()
    pacer.observe(100, 0.1, 5)
    intervals = [pacer.next_look(100, age) for age in (0.2, 1.0, 60.0)]
    assert intervals == sorted(intervals)
    assert intervals[-1] == 0.02


@pytest.mark.parametrize("factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_timer_sleeps_less_than_a_millisecond(factory: object) -> None:
    """Fine on both loops: ten sleeps of 200 us take 2 to 10 ms, not 10 whole milliseconds or none."""

    async def main() -> float:
        timer = FineTimer()
        if not timer.fine:
            pytest.skip("no timerfd here")
        started = time.monotonic()
        for _ in range(10):
            await timer.sleep(0.0002)
        elapsed = time.monotonic() - started
        timer.close()
        return elapsed

    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
        best = min(runner.run(main()) for _ in range(5))
    assert 0.002 <= best < 0.01


@pytest.mark.parametrize("factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_repeated_looks_end_when_told_and_raise_what_they_raise(factory: object) -> None:
    """Each look after the time that the one before it said; afterwards the timer sleeps as ever."""

    async def main() -> None:
        timer, answers, seen = FineTimer(), [0.0002, 0.0, 0.003, None], []

        def look() -> float | None:
            seen.append(time.monotonic())
            return answers[len(seen) - 1]

        await timer.repeat(look)
        assert len(seen) == 4
        assert seen[1] - seen[0] >= 0.0002
        assert seen[3] - seen[2] >= 0.003

        def fail() -> float | None:
            seen.append(0.0)
            if len(seen) > 6:
                raise OSError("lost")
            return 0.0001

        with pytest.raises(OSError, match="lost"):
            await timer.repeat(fail)
        started = time.monotonic()
        await timer.sleep(0.002)
        assert time.monotonic() - started >= 0.002
        timer.close()

    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
        runner.run(main())


@pytest.mark.parametrize("factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_long_looking_wakes_its_task_now_and_then(factory: object) -> None:
    """The task goes on in vain behind every so many looks, which end when told, and once each."""

    class Counted(FineTimer):
        sleeps = 0

        async def sleep(self, seconds: float) -> None:
            self.sleeps += 1
            await super().sleep(seconds)

    async def main() -> None:
        timer, looks = Counted(), 0

        def look() -> float | None:
            nonlocal looks
            looks += 1
            return None if looks % (3 * REHEARSAL) == 0 else 0.00002

        await timer.repeat(look)
        assert looks == 3 * REHEARSAL
        assert timer.sleeps == (3 if timer.fine else 0)
        rehearsed = asyncio.Event()

        def look_for_ever() -> float | None:
            nonlocal looks
            looks += 1
            if looks == 5 * REHEARSAL:
                rehearsed.set()
            return 0.00002

        looking = asyncio.create_task(timer.repeat(look_for_ever))
        await rehearsed.wait()
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        looks = 0
        await timer.repeat(look)
        assert looks == 3 * REHEARSAL
        timer.close()

    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
        runner.run(main())


@pytest.mark.asyncio
async def test_cancelled_sleep_leaves_a_timer_that_works() -> None:
    """A cancelled sleep is disarmed: the next one is not cut short, and its descriptor is given back."""
    timer = FineTimer()
    sleeping = asyncio.create_task(timer.sleep(0.05))
    await asyncio.sleep(0)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    started = time.monotonic()
    await timer.sleep(0.02)
    assert time.monotonic() - started >= 0.02
    await timer.sleep(0)
    await timer.sleep_until(time.monotonic() - 1)
    fd = timer._fd
    timer.close()
    timer.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
