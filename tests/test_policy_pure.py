"""Policies, the planner's shares and deadlines, as pure functions."""

from __future__ import annotations

import random
import time
from typing import Any, cast

import numpy as np
import pytest

from aioprefill.config import NativeConfig
from aioprefill.errors import ConfigError
from aioprefill.native.admission import REFRESHED, Admission
from aioprefill.native.memory import KVMemory
from aioprefill.native.planner import LONG_FORWARDS, Limits, Piece, plan
from aioprefill.native.policy import POLICIES, Outlook, hopeless, hopeless_from, remaining
from aioprefill.native.request_state import Move, Request
from aioprefill.native.speed import Speed
from aioprefill.sampling_params import SamplingParams

BOUND = 40.0
OUTLOOK = Outlook(max_wait_s=BOUND, tokens_per_s=1000.0)


def request(arrival: int, length: int = 10, **fields: Any) -> Request:
    """A waiting request that came at second `arrival`, unless `arrival_s` says otherwise."""
    return Request(
        request_id=f"r{arrival}",
        tokens=np.arange(length, dtype=np.uint32),
        sampling=SamplingParams(),
        peer=None,
        max_new_tokens=1,
        ignore_eos=False,
        handle=cast(Any, None),
        arrival=arrival,
        **{"arrival_s": float(arrival), **fields},
    )


def order(policy: str, requests: list[Request], now: float = 10.0, outlook: Outlook = OUTLOOK) -> list[int]:
    """Arrival numbers in the policy's order."""
    return [item.arrival for item in POLICIES[policy](requests, now, outlook)]


# Orders


def test_fcfs_goes_by_arrival() -> None:
    """Whatever the order of handshakes, lengths, priorities and deadlines."""
    assert order("fcfs", [request(7, 1, priority=9, due_s=1.0), request(3, 99)]) == [3, 7]


def test_longest_prefix_goes_by_cached_tokens() -> None:
    """Ties by arrival."""
    some = [request(i, 100, expected_cached=cached) for i, cached in enumerate((0, 64, 32, 64))]
    assert order("longest-prefix", some[::-1]) == [1, 3, 2, 0]


def test_shortest_first_counts_what_is_to_be_computed() -> None:
    """A long prompt that is cached is short."""
    some = [request(0, 50), request(1, 100, expected_cached=80), request(2, 20), request(3, 5)]
    assert order("shortest-first", some[::-1]) == [3, 1, 2, 0]


def test_hrrn_prefers_short_ones_but_waiting_counts() -> None:
    """10 tokens after 1 s against 100 tokens after 5 s, and after 11 s; ties by arrival."""
    short = request(20, 10, arrival_s=9.0)
    assert order("hrrn", [request(1, 100, arrival_s=5.0), short]) == [20, 1]
    assert order("hrrn", [request(1, 100, arrival_s=-1.0), short]) == [1, 20]
    assert order("hrrn", [request(4, 10, arrival_s=5.0), request(2, 10, arrival_s=5.0)]) == [2, 4]


def test_priority_goes_by_priority() -> None:
    """Higher first, ties by arrival."""
    some = [request(i, priority=priority) for i, priority in enumerate((0, 5, -3, 5))]
    assert order("priority", some[::-1]) == [1, 3, 0, 2]


def test_deadline_goes_by_what_can_still_be_met() -> None:
    """Without a deadline the bound on the wait stands for one; hopeless ones come last."""
    some = [
        request(0, due_s=30.0),
        request(1),  # due at 41
        request(2, due_s=60.0),
        request(3, due_s=12.0),
        request(4, 5000, due_s=11.0),  # needs 5 s, has 1
    ]
    assert order("deadline", some) == [3, 0, 1, 2, 4]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_deterministic_and_keep_everybody(policy: str) -> None:
    """The order of the input does not matter; nobody is lost or doubled."""
    generator = random.Random(7)
    some = [
        request(
            i,
            generator.randrange(1, 50),
            arrival_s=generator.uniform(0, 60),
            priority=generator.randrange(3),
            due_s=generator.choice([None, 70.0, 90.0]),
        )
        for i in range(60)
    ]
    first = order(policy, some, 60.0)
    generator.shuffle(some)
    assert order(policy, some, 60.0) == first
    assert sorted(first) == list(range(60))


@pytest.mark.parametrize("policy", POLICIES)
def test_F1_who_has_waited_for_the_bound_comes_before_everybody_later(policy: str) -> None:
    """Overdue ones are first, oldest first, however unattractive they are to the policy."""
    bad = {"length": 5000, "priority": -9, "due_s": 1e6}
    old = [request(2, **bad, arrival_s=1.0), request(1, **bad, arrival_s=0.5)]
    fresh = [request(10 + i, 1, priority=9, due_s=100.0, expected_cached=1) for i in range(5)]
    now = 1.0 + BOUND
    assert order(policy, fresh + old, now)[:2] == [1, 2]
    if policy != "fcfs":
        assert order(policy, fresh + old, 0.4 + BOUND)[0] == 10, "before the bound the policy decides"


@pytest.mark.parametrize("policy", POLICIES)
def test_ordering_ten_times_as_many_takes_little_more_than_ten_times_as_long(policy: str) -> None:
    """4,000 waiting requests against 400: CPU time, the best of seven."""
    generator = random.Random(1)
    many = [
        request(i, 8, expected_cached=generator.randrange(8), priority=generator.randrange(5), due_s=1e4 + i)
        for i in range(4000)
    ]

    def best(requests: list[Request]) -> float:
        times = []
        for _ in range(7):
            started = time.thread_time()
            POLICIES[policy](requests, 4000.0, Outlook(3900.0, 1000.0))
            times.append(time.thread_time() - started)
        return min(times)

    assert best(many) < 40 * best(many[:400])


# Deadlines


def test_a_deadline_is_hopeless_when_the_whole_device_could_not_meet_it() -> None:
    """By the learned speed; by the clock alone while none is known; never without a deadline."""
    late = request(0, 3000, due_s=5.0)
    assert hopeless_from(late, OUTLOOK) == 2.0
    assert not hopeless(late, 2.0, OUTLOOK) and hopeless(late, 2.1, OUTLOOK)
    unknown = Outlook(BOUND)
    assert not hopeless(late, 5.0, unknown) and hopeless(late, 5.1, unknown)
    assert hopeless_from(request(0), OUTLOOK) is None and not hopeless(request(0), 1e9, OUTLOOK)
    late.expected_cached = 2900
    assert not hopeless(late, 4.8, OUTLOOK), "cached tokens are not computed"


def test_speed_is_learned_from_busy_time() -> None:
    """Queued forwards begin when the one before ends; small ones weigh little; instant ones nothing."""
    speed = Speed(full_tokens=100)
    assert speed.tokens_per_s == speed.full_tokens_per_s == 0.0
    speed.learn(1000, 0.0, 1.0)
    speed.learn(1000, 0.1, 2.0)
    assert speed.tokens_per_s == pytest.approx(1000)
    speed.learn(1, 5.0, 5.01)
    assert speed.tokens_per_s == pytest.approx(1000, rel=0.01)
    speed.learn(1, 5.0, 5.0)
    for _ in range(100):
        speed.learn(500, 0.0, speed._last_done_s + 1.0)
    assert speed.tokens_per_s == pytest.approx(500, rel=0.02) and "full 50" in repr(speed)
    for _ in range(100):
        speed.learn(10, 0.0, speed._last_done_s + 0.1)
    assert speed.tokens_per_s < 150 and speed.full_tokens_per_s == pytest.approx(500, rel=0.02)


# What is cached


def admission(**settings: Any) -> tuple[Admission, KVMemory]:
    """An admission over a small memory with pages of 4 tokens."""
    memory = KVMemory(64, 4, prefix_cache=True)
    return Admission(NativeConfig(**settings), memory), memory


def compute(memory: KVMemory, length: int) -> None:
    """Leave the prefix of that many tokens in the cache."""
    one = request(0, length)
    assert memory.admit(one)
    one.computed = length
    memory.keep_prefix(one)
    memory.release(one)


def test_the_cache_is_looked_at_for_new_requests_and_in_turn_for_others() -> None:
    """A bounded number per ordering; requests that left are dropped from the round."""
    chosen, memory = admission(policy="longest-prefix")
    many = [request(i, 20) for i in range(REFRESHED + 5)]
    chosen.order(many, 0.0)
    assert {item.expected_cached for item in many} == {0} and "longest_prefix" in repr(chosen)
    compute(memory, 12)
    chosen.order(many, 0.0)
    assert sum(item.expected_cached == 12 for item in many) == REFRESHED
    many[-1].move(Move.ADMITTED)
    many[-2].move(Move.FAILED)
    chosen.order(many[:-2], 0.0)
    assert all(item.expected_cached == 12 for item in many[:-2])
    assert not many[-1].looked_up and many[-1].expected_cached == 0
    assert memory.pool.held == 0, "a look holds nothing"


def test_a_look_sees_what_a_match_would_find() -> None:
    """Whole pages, one token left out, stopping in the middle of an edge or below a branch."""
    _, memory = admission()
    compute(memory, 12)
    assert memory.cached_tokens(np.arange(12, dtype=np.uint32)) == 8
    assert memory.cached_tokens(np.arange(13, dtype=np.uint32)) == 12
    assert memory.cached_tokens(np.array([0, 1, 2, 3, 9, 9, 9, 9, 9], dtype=np.uint32)) == 4
    compute(memory, 24)
    assert memory.cached_tokens(np.arange(30, dtype=np.uint32)) == 24
    assert KVMemory(4, 4, prefix_cache=False).cached_tokens(np.arange(9, dtype=np.uint32)) == 0


# Refusals


def test_refusals_name_the_reason_and_are_made_once_possible() -> None:
    """Only waiting requests with a deadline; `next_refusal` says when; served late, none at all."""
    chosen, _ = admission()
    woken: list[int] = []
    chosen.on_earlier = lambda: woken.append(1)
    chosen.speed.learn(1000, 0.0, 1.0)
    assert chosen.next_refusal() is None
    late, running, over = (request(i, 2000, due_s=5.0) for i in range(3))
    for item in (late, running, over):
        chosen.watch(item)
    running.move(Move.ADMITTED)
    over.move(Move.FAILED)
    assert len(woken) == 3 and chosen.next_refusal() == 3.0
    assert chosen.refused(3.0) == []
    ((found, error),) = chosen.refused(3.5)
    assert found is late
    assert "request r0" in str(error) and "in 1.500 s" in str(error) and "2000 tokens" in str(error)
    ((_, error),) = chosen.refused(6.0)
    assert "1.000 s ago" in str(error)
    late.move(Move.FAILED)
    assert chosen.next_refusal() is None
    serving, _ = admission(late_deadlines="serve")
    serving.watch(request(3, due_s=0.0))
    assert serving.next_refusal() is None and serving.refused(9.0) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "lifo"},
        {"policy_max_wait_s": -1.0},
        {"late_deadlines": "drop"},
        {"max_chunk_share": 0.0},
        {"max_chunk_share": 1.5},
    ],
)
def test_bad_policy_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    """The error names the setting."""
    with pytest.raises(ConfigError, match=next(iter(settings))):
        NativeConfig(**settings)


# Shares of a forward

LIMITS = Limits(tokens=32, requests=10, page_size=4, share=0.5)
HUGE = 32 * LONG_FORWARDS + 1000


def parts(pieces: list[Piece]) -> dict[int, int]:
    """Tokens by arrival number."""
    return {piece.request.arrival: piece.tokens for piece in pieces}


def admit(_: Request) -> bool:
    """There are pages."""
    return True


def test_a_long_prompt_gets_its_share_while_others_want_tokens_and_all_of_it_otherwise() -> None:
    """Work conserving: what nobody wants is its own too."""
    huge = request(0, HUGE)
    short = [request(i, 6) for i in range(1, 5)]
    assert parts(plan([huge], [], LIMITS, admit)) == {0: 32}
    assert parts(plan([huge], short[:1], LIMITS, admit)) == {0: 24, 1: 6}
    assert parts(plan([huge], short, LIMITS, admit)) == {0: 16, 1: 6, 2: 6, 3: 4}
    assert parts(plan([huge], short, LIMITS, lambda _: False)) == {0: 32}, "nobody else can be admitted"
    assert parts(plan([], [huge, *short], LIMITS, admit)) == {0: 16, 1: 6, 2: 6, 3: 4}
    whole = Limits(32, 10, 4, share=1.0)
    assert parts(plan([huge], short, whole, admit)) == {0: 32}, "the bound is off"


def test_a_prompt_of_few_forwards_runs_at_full_speed() -> None:
    """It delays others little enough."""
    medium = request(0, 32 * LONG_FORWARDS)
    assert parts(plan([medium], [request(1, 6)], LIMITS, admit)) == {0: 32}
    cached = request(2, HUGE, expected_cached=HUGE - 10)
    assert remaining(cached) == 10 and not LIMITS.is_long(cached)


def test_several_long_prompts_share_one_share() -> None:
    """Equal parts, whole pages, and at least a page for as many as it lasts."""
    long = [request(i, HUGE) for i in range(3)]
    assert parts(plan(long[:2], [request(9, 16)], LIMITS, admit)) == {0: 8, 1: 8, 9: 16}
    assert parts(plan(long, [request(9, 16)], LIMITS, admit)) == {0: 4, 1: 4, 2: 8, 9: 16}
    tiny = Limits(8, 10, 4, share=0.5)
    assert parts(plan(long, [request(9, 6)], tiny, admit)) == {0: 4, 1: 4}
    assert parts(plan(long, [], Limits(32, 2, 4, 0.5), admit)) == {0: 28, 1: 4}


def test_long_prompts_under_way_are_few_and_others_pass_those_that_wait() -> None:
    """Until one is overdue: it is admitted all the same, so that nothing passes it."""
    long = [request(i, HUGE) for i in range(2)]
    waiting = [request(5, HUGE), request(6, 6)]
    assert 5 not in parts(plan(long, waiting, LIMITS, admit)) and 6 in parts(
        plan(long, waiting, LIMITS, admit)
    )
    overdue = plan(long, waiting, LIMITS, admit, lambda _: False)
    assert {5, 6} <= set(parts(overdue))
    blocked = plan(long, waiting, LIMITS, lambda _: False, lambda _: False)
    assert set(parts(blocked)) == {0, 1}, "without pages for it, nobody passes it either"
