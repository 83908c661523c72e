"""Rows S, H and A that concern operators: health, order of commands, limits, shutdown. Virtual time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.errors import ControlError, DeviceError, HostError, RequestAborted
from aioprefill.health import Facts, verdict
from aioprefill.native.host import NativeHost
from aioprefill.request import PrefillRequest
from aioprefill.scheduler import PrefillScheduler
from aioprefill.stats import Health
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine


def prompt(length: int, start: int = 0) -> np.ndarray:
    """Token ids that differ from those of another `start`."""
    return (np.arange(length) * 7 + start * 131) % 1000


def native(engine: FakeEngine, **config: int) -> NativeHost:
    """A host without transfers."""
    return NativeHost(engine, None, NativeConfig(chunk_tokens=64, **config))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Facts(running=False), Health(False, False, "the loop is not running")),
        (Facts(running=False, failure="boom"), Health(False, False, "the loop is not running: boom")),
        (Facts(running=True), Health(True, True)),
        (Facts(running=True, forward=3, forward_age_s=120.0), Health(True, True)),
        (
            Facts(running=True, forward=3, forward_age_s=120.5, draining=True),
            Health(True, False, "forward 3 runs for 120.5 s, the stall limit is 120 s"),
        ),
        (Facts(running=True, draining=True, paused=True), Health(True, False, "draining")),
        (Facts(running=True, pausing=True, mode="wait"), Health(True, False, "pausing")),
        (Facts(running=True, paused=True), Health(True, False, "paused")),
        (Facts(running=True, paused=True, mode="retract"), Health(True, False, "paused (retract)")),
    ],
)
def test_H3_the_verdict_names_what_is_wrong(facts: Facts, expected: Health) -> None:
    """What an operator must know first comes first: a dead loop, a stalled device, a drain, a pause."""
    assert verdict(facts) == expected


@virtual_time
async def test_H3_a_forward_of_60_s_is_healthy_and_one_past_its_limit_is_named() -> None:
    """Asked every second while forwards run; the second forward's age begins when the first has ended."""
    engine = FakeEngine(duration_s=60.0)
    async with PrefillScheduler(native(engine), SchedulerConfig(stall_limit_s=61.0)) as scheduler:
        for number in range(2):
            scheduler.submit(PrefillRequest(prompt(60, number)))
        await settle()
        assert scheduler.stats().in_flight == 2
        for _ in range(119):
            await asyncio.sleep(1.0)
            assert scheduler.health() == Health(True, True)
        await asyncio.sleep(2.0)
        stuck = FakeEngine()
    async with PrefillScheduler(native(stuck), SchedulerConfig(stall_limit_s=61.0)) as scheduler:
        scheduler.submit(PrefillRequest(prompt(60)))
        await asyncio.sleep(61.5)
        health = scheduler.health()
        assert (health.live, health.ready) == (True, False)
        assert health.reason == "forward 0 runs for 61.5 s, the stall limit is 61 s"
        stuck.forwards[0].complete()
        await settle()
        assert scheduler.health().ready, "it has ended after all"


@virtual_time
async def test_H3_a_result_kept_by_a_pause_is_no_stall() -> None:
    """The device has done its part; what is reported is the pause, and a pause on its way."""
    engine = FakeEngine()
    async with PrefillScheduler(native(engine), SchedulerConfig(stall_limit_s=1.0)) as scheduler:
        scheduler.submit(PrefillRequest(prompt(9)))
        scheduler.submit(PrefillRequest(prompt(64, 1)))
        await settle()
        pausing = asyncio.ensure_future(scheduler.pause(barrier=True))
        await settle()
        assert scheduler.health() == Health(True, False, "pausing")
        engine.forwards[0].complete()
        engine.forwards[1].complete()
        await pausing
        await asyncio.sleep(500.0)
        assert scheduler.stats().in_flight == 1, "its result waits for the resume"
        assert scheduler.health() == Health(True, False, "paused (in_place)")
        await scheduler.resume()
        assert scheduler.health() == Health(True, True)


@virtual_time
async def test_H3_a_lost_device_is_told_by_its_name() -> None:
    """After a sticky error the loop is over; nothing that is asked of it afterwards hangs."""
    engine = FakeEngine()
    scheduler = PrefillScheduler(native(engine))
    with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
        async with scheduler:
            scheduler.submit(PrefillRequest(prompt(9)))
            await settle()
            engine.forwards[0].fail(DeviceError("cudaErrorIllegalAddress", "lost", sticky=True))
            await scheduler.wait_stopped()
            health = scheduler.health()
            assert not health.live and "cudaErrorIllegalAddress" in health.reason
            with pytest.raises(ControlError, match="not running"):
                await scheduler.resume()


@virtual_time
async def test_S3_what_comes_while_the_host_is_being_closed_is_refused_at_once() -> None:
    """Closing takes a moment; a request or a command in that moment is not left without an answer."""
    engine = FakeEngine()
    closing, may_end = asyncio.Event(), asyncio.Event()

    async def slow_close() -> None:
        closing.set()
        await may_end.wait()
        engine.close()

    engine.aclose = slow_close  # type: ignore[method-assign]
    scheduler = PrefillScheduler(native(engine))
    async with scheduler:
        await settle()
        scheduler._stop.set()
        await closing.wait()
        with pytest.raises(HostError):
            scheduler.submit(PrefillRequest(prompt(3)))
        with pytest.raises(ControlError):
            await scheduler.flush_cache()
        assert not scheduler.health().live
        may_end.set()


@virtual_time
async def test_P7_pauses_resumes_and_updates_take_effect_in_the_order_of_their_calls() -> None:
    """The first update takes a second to read; what was called after it does not overtake it."""
    engine = FakeEngine()
    host = native(engine)
    stage = engine.stage_weights

    async def slow_stage(folder):  # type: ignore[no-untyped-def]
        await asyncio.sleep(1.0 if folder.name == "1" else 0.0)
        return await stage(folder)

    engine.stage_weights = slow_stage  # type: ignore[method-assign]
    async with PrefillScheduler(host) as scheduler:
        await settle()
        done: list[str] = []

        async def call(name: str, command: object) -> None:
            await command  # type: ignore[misc]
            done.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(call("first", scheduler.update_weights("1")))
            group.create_task(call("second", scheduler.update_weights("2")))
            group.create_task(call("pause", scheduler.pause()))
            group.create_task(call("resume", scheduler.resume()))
            group.create_task(call("abort", scheduler.abort_matching("nobody")))
            await asyncio.sleep(0.5)
            assert done == ["abort"], "an abort waits for nobody's weights"
        assert done == ["abort", "first", "second", "pause", "resume"]
        assert engine.weights == 2 and host.intake.weight_version == 2


@virtual_time
async def test_A2_an_abort_of_many_behind_a_held_pause_comes_before_the_result() -> None:
    """The result comes first in the step, the held input after it; the abort was there before both."""
    engine = FakeEngine()
    async with PrefillScheduler(native(engine)) as scheduler:
        victims = [scheduler.submit(PrefillRequest(prompt(9, n), request_id=f"v{n}")) for n in range(2)]
        other = scheduler.submit(PrefillRequest(prompt(9, 2), request_id="other"))
        await settle()
        pausing = asyncio.ensure_future(scheduler.pause())
        await settle()
        late = scheduler.submit(PrefillRequest(prompt(9, 3), request_id="v-late"))
        aborting = asyncio.ensure_future(scheduler.abort_matching("v"))
        await settle()
        assert not aborting.done(), "held, behind the pause"
        engine.forwards[0].complete()
        for victim in (*victims, late):
            with pytest.raises(RequestAborted, match="operator"):
                await victim
        assert await aborting == {"aborted": 3}
        assert (await other).token_id >= 0
        await pausing


@virtual_time
async def test_S1_drains_at_once_end_together_and_a_later_one_waits_for_nothing() -> None:
    """Over a forward that never ends: the shorter deadline holds, and leaving the block waits no more."""
    engine = FakeEngine()
    loop = asyncio.get_running_loop()
    async with PrefillScheduler(native(engine), SchedulerConfig(drain_timeout_s=500.0)) as scheduler:
        scheduler.submit(PrefillRequest(prompt(9), request_id="stuck"))
        await settle()
        reports = await asyncio.gather(scheduler.drain(100.0), scheduler.drain(3.0))
        assert loop.time() == 3.0
        assert [report.dropped for report in reports] == [("stuck",), ("stuck",)]
        assert [report.finished for report in reports] == [(), ()]
        assert (await scheduler.drain(50.0)).dropped == ()
    assert loop.time() == 3.0


@virtual_time
async def test_A6_an_exact_abort_takes_the_one_request_and_says_when_there_is_none() -> None:
    """A longer id with the same beginning lives on."""
    engine = FakeEngine()
    async with PrefillScheduler(native(engine)) as scheduler:
        victim = scheduler.submit(PrefillRequest(prompt(9), request_id="a"))
        other = scheduler.submit(PrefillRequest(prompt(9, 1), request_id="ab"))
        await settle()
        assert await scheduler.abort_matching("a", exact=True) == {"aborted": 1}
        assert await scheduler.abort_matching("a", exact=True) == {"aborted": 0}
        assert victim.done and not other.done
        assert await scheduler.abort_matching("a") == {"aborted": 1}
        assert other.done
        engine.forwards[0].complete()
