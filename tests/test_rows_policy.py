"""Rows C4, F1 and F2 on the native host, with a fake device and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.engine.port import Span
from aioprefill.errors import InvalidRequest, RequestTimeout
from aioprefill.native.host import NativeHost
from aioprefill.native.policy import POLICIES
from aioprefill.request import PrefillHandle, PrefillRequest
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import run_virtual, settle, virtual_time
from aioprefill.testing.engine import FakeEngine

BUDGET = 8192
HUGE = 590_000
PASSES = -(-HUGE // BUDGET)


def by_tokens(spans: Any) -> float:
    """1,000 tokens a second."""
    return sum(len(span.token_ids) for span in spans) / 1000


@asynccontextmanager
async def serving(engine: FakeEngine, **settings: Any) -> AsyncIterator[tuple[PrefillScheduler, NativeHost]]:
    """A scheduler on a native host; at the end nothing is in use."""
    host = NativeHost(engine, None, NativeConfig(**settings))
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=1e4)) as scheduler:
        await settle()
        yield scheduler, host
        await settle()
        host.memory.check()
        assert host.memory.pool.held == 0 and host.frontend.queued_requests == 0
        assert host.ledger.requests == {}


def prompt(length: int, start: int = 0) -> np.ndarray:
    """Token ids that differ from those of another `start` from the first page on."""
    return (np.arange(length) * 7 + start * 131) % 1000


def passes_of(engine: FakeEngine, length: int) -> list[int]:
    """Numbers of the forwards that compute a part of a prompt of that length, final chunk last."""
    ends = [(f.number, span) for f in engine.forwards for span in f.spans]
    return [number for number, span in ends if span.sample is not None and span.end == length]


def tokens_of_long(spans: list[Span]) -> int:
    """Tokens of all but the final chunks."""
    return sum(len(span.token_ids) for span in spans if span.sample is None)


# C4


@pytest.mark.parametrize("policy", POLICIES)
def test_C4_one_huge_prompt_does_not_take_every_pass(policy: str) -> None:
    """Short requests behind 590,000 tokens are in the second forward after their coming, at each policy; the
    huge prompt has every forward to itself when it is alone."""

    async def main() -> None:
        engine = FakeEngine(num_pages=40_000, duration_s=1.0)
        async with serving(engine, chunk_tokens=BUDGET, policy=policy) as (scheduler, _):
            huge = scheduler.submit(PrefillRequest(prompt(HUGE)))
            await asyncio.sleep(10.5)
            assert [len(f.spans[0].token_ids) for f in engine.forwards[:9]] == [BUDGET] * 9, "alone"
            launched = engine.launched
            shorts = [scheduler.submit(PrefillRequest(prompt(100 + i, 1 + i))) for i in range(20)]
            results = await asyncio.gather(*shorts)
            assert max(result.launched_s for result in results) <= 10.5 + 1.0
            assert passes_of(engine, 119) == [launched], (
                "the first forward that was formed after their coming"
            )
            await huge
            assert engine.launched <= PASSES + 2, "what others leave of a forward is the huge prompt's"

    run_virtual(main())


@virtual_time
async def test_C4_a_stream_of_short_requests_and_a_huge_prompt_both_advance() -> None:
    """More short requests than fit: the huge prompt keeps half of each forward, and they get the other."""
    engine = FakeEngine(num_pages=60_000, duration_s=1.0)
    async with serving(engine, chunk_tokens=BUDGET, max_batch_requests=64) as (scheduler, _):
        huge = scheduler.submit(PrefillRequest(prompt(HUGE)))
        await settle()
        shorts = [scheduler.submit(PrefillRequest(prompt(1024, 1 + i))) for i in range(400)]
        await huge
        crowded = [forward.spans for forward in engine.forwards[2:90]]
        assert all(tokens_of_long(spans) >= BUDGET // 2 for spans in crowded[:90])
        assert all(sum(span.sample is not None for span in spans) >= 3 for spans in crowded)
        await asyncio.gather(*shorts)


@virtual_time
async def test_C4_several_huge_prompts_leave_room_for_short_ones() -> None:
    """Six huge prompts in front: few are under way at a time, short requests pass, each huge one ends."""
    engine = FakeEngine(num_pages=250_000, duration_s=1.0)
    async with serving(engine, chunk_tokens=BUDGET, policy_max_wait_s=100.0) as (scheduler, host):
        huge = [scheduler.submit(PrefillRequest(prompt(HUGE, i))) for i in range(6)]
        await asyncio.sleep(5.5)
        for i in range(60):
            short = scheduler.submit(PrefillRequest(prompt(100, 50 + i)))
            result = await short
            assert result.launched_s - result.arrival_s <= 1.0, i
            if result.arrival_s < 90.0:
                assert len(host.ledger.under_way) + len(host.forwards.pending) <= 2 + 2
        results = await asyncio.gather(*huge)
        ends = sorted(result.first_token_s for result in results)
        assert ends[-1] <= 6 * PASSES + 8, "no forward was wasted"


# F1


def attractive(policy: str, number: int) -> PrefillRequest:
    """A request that the policy would always rather serve than `unattractive`."""
    common = np.concatenate([prompt(256, 900), prompt(64, number)])
    return PrefillRequest(common, priority=5, deadline_s=2.0 if policy == "deadline" else None)


def unattractive() -> PrefillRequest:
    """Long, not cached, of low priority, without a deadline."""
    return PrefillRequest(prompt(640, 500), request_id="victim", priority=-5)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "fcfs"])
def test_F1_nobody_waits_past_the_bound_while_others_pass(policy: str) -> None:
    """A flood of requests that the policy prefers: the one it likes least comes when its bound is over."""

    async def main() -> None:
        engine = FakeEngine(num_pages=4096, duration_s=1.0)
        bound = 20.0
        settings = {"chunk_tokens": 640, "policy": policy, "policy_max_wait_s": bound}
        async with serving(engine, **settings, late_deadlines="serve", max_batch_requests=2) as (
            scheduler,
            _,
        ):
            handles = [scheduler.submit(attractive(policy, i)) for i in range(8)]
            await asyncio.sleep(0.5)
            victim = scheduler.submit(unattractive())
            for second in range(40):
                handles += [scheduler.submit(attractive(policy, 1000 + 3 * second + i)) for i in range(3)]
                await asyncio.sleep(1.0)
            result = await victim
            waited = result.launched_s - result.arrival_s
            assert bound <= waited <= bound + 8.0, "after the bound, behind those who came before it"
            later = [handle for handle in handles if handle.arrival_s > victim.arrival_s]
            passed = 0
            for handle in later:
                other = await handle
                passed += other.launched_s < result.launched_s
                assert not (result.arrival_s + bound < other.launched_s < result.launched_s), "passed by"
            assert passed > 2, "before the bound the policy decided"
            await asyncio.gather(*handles)

    run_virtual(main())


@virtual_time
async def test_F1_a_large_request_gets_its_pages_although_small_ones_keep_coming() -> None:
    """Pages for half a pool: small requests take them first, until the large one is overdue and they wait."""
    engine = FakeEngine(num_pages=24, duration_s=1.0)
    settings: dict[str, Any] = {"policy": "shortest-first", "policy_max_wait_s": 10.0, "prefix_cache": False}
    async with serving(engine, chunk_tokens=512, **settings) as (scheduler, _):
        handles: list[PrefillHandle] = []

        async def flood() -> None:
            for i in range(60):
                handles.extend(scheduler.submit(PrefillRequest(prompt(96, 3 * i + k))) for k in range(3))
                await asyncio.sleep(0.5)

        task = asyncio.create_task(flood())
        await asyncio.sleep(2.25)
        large = scheduler.submit(PrefillRequest(prompt(320, 7)))
        result = await large
        assert 10.0 <= result.launched_s - result.arrival_s <= 16.0
        await task
        await asyncio.gather(*handles)


# F2


async def learned(scheduler: PrefillScheduler, tokens: int = 500) -> None:
    """Let the scheduler see how fast the device is."""
    for i in range(3):
        await scheduler.submit(PrefillRequest(prompt(tokens, 300 + i)))


@virtual_time
async def test_F2_a_deadline_that_cannot_be_met_is_refused_before_any_work() -> None:
    """At 1,000 tokens a second, 3,000 tokens in 2 s: refused at once, by a clear error; 4 s are enough."""
    engine = FakeEngine(duration_s=by_tokens)
    async with serving(engine, chunk_tokens=512) as (scheduler, host):
        await learned(scheduler)
        tokens = engine.tokens
        late = scheduler.submit(PrefillRequest(prompt(3000), request_id="late", deadline_s=2.0))
        before = asyncio.get_running_loop().time()
        with pytest.raises(RequestTimeout, match=r"late: its deadline, 2 s .* 3000 tokens .* 1000 tokens/s"):
            await late
        with pytest.raises(RequestTimeout):
            await late.wait_transferred()
        assert asyncio.get_running_loop().time() == before and engine.tokens == tokens
        assert host.ledger.totals.failed == 1
        good = await scheduler.submit(PrefillRequest(prompt(3000), deadline_s=4.0))
        assert good.first_token_s - good.arrival_s <= 4.0


@pytest.mark.parametrize("paused", [False, True])
def test_F2_a_deadline_becomes_hopeless_while_the_request_waits(paused: bool) -> None:
    """Behind a forward of a minute, or a pause: refused by a timer, not when there is time to look."""

    async def main() -> None:
        engine = FakeEngine(num_pages=8192, duration_s=by_tokens)
        async with serving(engine, chunk_tokens=60_000, max_batch_requests=1) as (scheduler, _):
            await learned(scheduler, 30_000)
            blockers = []
            if paused:
                await scheduler.pause()
            else:
                blockers = [scheduler.submit(PrefillRequest(prompt(length))) for length in (60_000, 700)]
            await settle()
            waiting = scheduler.submit(PrefillRequest(prompt(1000, 5), deadline_s=5.0))
            with pytest.raises(RequestTimeout, match="cannot be met"):
                await waiting
            waited = asyncio.get_running_loop().time() - waiting.arrival_s
            assert waited == pytest.approx(4.0, abs=0.1), "one second before its deadline, which it needs"
            if paused:
                await scheduler.resume()
            await asyncio.gather(*blockers)

    run_virtual(main())


@virtual_time
async def test_F2_slow_small_forwards_refuse_nobody() -> None:
    """A device that takes a second for a few tokens may take no longer for many: only large forwards tell."""
    engine = FakeEngine(duration_s=1.0)
    async with serving(engine, chunk_tokens=8192) as (scheduler, _):
        for i in range(20):
            await scheduler.submit(PrefillRequest(prompt(10, i)))
        result = await scheduler.submit(PrefillRequest(prompt(8000), deadline_s=2.0))
        assert result.first_token_s - result.arrival_s == 1.0


@virtual_time
async def test_F2_late_requests_are_served_where_the_option_says_so() -> None:
    """Not refused, not dropped; behind those whose deadlines can be met."""
    engine = FakeEngine(duration_s=by_tokens)
    settings = {"policy": "deadline", "late_deadlines": "serve", "max_batch_requests": 1}
    async with serving(engine, chunk_tokens=512, **settings) as (scheduler, _):
        await learned(scheduler)
        await scheduler.pause()
        late = scheduler.submit(PrefillRequest(prompt(400, 1), deadline_s=0.1))
        relaxed = scheduler.submit(PrefillRequest(prompt(400, 2), deadline_s=9.0))
        urgent = scheduler.submit(PrefillRequest(prompt(400, 3), deadline_s=1.0))
        await settle()
        await scheduler.resume()
        results = [await handle for handle in (urgent, relaxed, late)]
        ends = [result.first_token_s for result in results]
        assert ends == sorted(ends)
        assert ends[0] - results[0].arrival_s <= 1.0


@virtual_time
async def test_F2_a_request_under_way_is_not_given_up() -> None:
    """Refusal is early or not at all: what has been launched is finished, late."""
    engine = FakeEngine(duration_s=10.0)
    async with serving(engine, chunk_tokens=512) as (scheduler, _):
        result = await scheduler.submit(PrefillRequest(prompt(600), deadline_s=5.0))
        assert result.first_token_s - result.arrival_s == 20.0


@pytest.mark.parametrize(
    "wrong",
    [{"deadline_s": 0.0}, {"deadline_s": -1.0}, {"deadline_s": float("nan")}, {"priority": 1.5}],
)
def test_F2_bad_deadlines_and_priorities_are_refused_by_name(wrong: dict[str, Any]) -> None:
    """`InvalidRequest` names the field."""

    async def main() -> None:
        async with serving(FakeEngine()) as (scheduler, _):
            with pytest.raises(InvalidRequest) as caught:
                scheduler.submit(PrefillRequest(prompt(5), **wrong))
            assert caught.value.field == next(iter(wrong))

    run_virtual(main())
