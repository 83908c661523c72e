"""What random schedules have found, each as the shortest story that shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.control import AbortMatching
from aioprefill.errors import AioprefillError, HostError
from aioprefill.follower import Follower
from aioprefill.native.host import NativeHost
from aioprefill.native.memory import KVMemory
from aioprefill.native.request_state import Request
from aioprefill.request import PrefillRequest
from aioprefill.sampling_params import SamplingParams
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine
from aioprefill.testing.rank_links import MemoryRanks


@virtual_time
async def test_R4_an_abort_of_many_names_nobody_who_comes_behind_it() -> None:
    """The leader's front door knows a later request already; it would abort what followers go on with."""
    ranks = MemoryRanks(2, lambda: 0.001)
    hosts = [NativeHost(FakeEngine(duration_s=0.1)) for _ in range(2)]
    following = asyncio.create_task(Follower(hosts[1], ranks[1]).run())
    async with PrefillScheduler(hosts[0], ranks=ranks[0]) as scheduler:
        answer = hosts[0].frontend.control(AbortMatching("", "all"))
        handle = scheduler.submit(PrefillRequest(range(1, 20), request_id="later"))
        assert await answer == {"aborted": 0}
        assert (await handle).prompt_tokens == 19
    await following


def prefilling(memory: KVMemory, name: str, length: int) -> Request:
    """A prompt of one family, with its pages."""
    made = Request(
        request_id=name,
        tokens=np.arange(length, dtype=np.uint32),
        sampling=SamplingParams(),
        peer=None,
        max_new_tokens=1,
        ignore_eos=False,
        handle=None,
        arrival=0,
    )
    assert memory.admit(made)
    return made


def test_R4_a_flush_leaves_no_held_page_below_an_idle_one() -> None:
    """Two prompts compute one page; a third one holds that of the first, and the next page of the second."""
    memory = KVMemory(16, 16, prefix_cache=True)
    first, second = prefilling(memory, "first", 16), prefilling(memory, "second", 48)
    first.computed = 16
    memory.keep_prefix(first)
    second.computed = 32
    memory.keep_prefix(second)
    third = prefilling(memory, "third", 40)
    assert third.pages[:2].tolist() == [first.pages[0], second.pages[1]]
    memory.release(first)
    live = [second, third]
    memory.flush(live)
    second.computed = 48
    memory.keep_prefix(second)  # in a tree of its own page the third one's would lie below
    memory.release(second)
    memory.check()
    assert not any(request.cacheable for request in live)


def test_R4_a_prompt_without_a_part_in_the_cache_is_cached_after_a_flush() -> None:
    """Nobody else holds its pages."""
    memory = KVMemory(16, 16, prefix_cache=True)
    alone = prefilling(memory, "alone", 40)
    memory.flush([alone])
    alone.computed = 40
    memory.keep_prefix(alone)
    memory.release(alone)
    memory.check()
    assert memory.pool.idle == 2


class SlowToStage(FakeEngine):
    """Never done with reading weights."""

    async def stage_weights(self, folder: Path) -> int:
        """See `Engine.stage_weights`."""
        return await asyncio.get_running_loop().create_future()


@virtual_time
async def test_R4_an_update_that_waits_for_its_turn_is_answered_when_the_scheduler_stops() -> None:
    """Its turn comes when the host is closed; nobody reads weights then."""
    async with PrefillScheduler(NativeHost(SlowToStage())) as scheduler:
        updates = [asyncio.create_task(scheduler.update_weights("1")) for _ in range(3)]
        await settle()
    await settle()
    assert all(update.done() for update in updates)
    for update in updates:
        with pytest.raises(AioprefillError):
            update.result()


@virtual_time
async def test_R4_a_pause_right_behind_a_resume_waits_for_the_step_behind_the_kept_result() -> None:
    """Both come at once: what the loop said of the first pause is not true of the second one."""
    engine = FakeEngine()
    host = NativeHost(engine, config=NativeConfig(chunk_tokens=16, max_chunk_share=1.0))
    async with PrefillScheduler(host) as scheduler:
        handle = scheduler.submit(PrefillRequest(range(1, 65)))
        await settle()
        pause = asyncio.create_task(scheduler.pause("in_place"))
        await settle()
        engine.forwards[0].complete()
        await pause
        engine.forwards[1].complete()
        await settle()
        assert scheduler.stats().processed == 1 and scheduler.stats().in_flight == 1
        commands = [scheduler.resume(), scheduler.pause("in_place")]
        await asyncio.gather(*commands)
        assert scheduler.stats().processed == 2 and scheduler.stats().paused
        await scheduler.resume()
        for number in (2, 3):
            await settle()
            engine.forwards[number].complete()
        await handle


@virtual_time
async def test_R4_a_barrier_does_not_return_when_the_scheduler_stops_with_a_forward_running() -> None:
    """Whoever waits for it wants to touch the weights."""
    host = NativeHost(FakeEngine(), config=NativeConfig(chunk_tokens=16, max_chunk_share=1.0))
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=1.0)) as scheduler:
        handle = scheduler.submit(PrefillRequest(range(1, 65)))
        await settle()
        pause = asyncio.create_task(scheduler.pause("in_place", barrier=True))
        await settle()
        host.engine.forwards[0].complete()
        await settle()
        assert scheduler.stats().paused and not pause.done()
    with pytest.raises(HostError, match="stopped before the forwards were done"):
        await pause
    assert handle.done
