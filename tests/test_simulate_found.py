"""What random schedules have found, each as the shortest story that shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aioprefill.control import AbortMatching
from aioprefill.errors import AioprefillError
from aioprefill.follower import Follower
from aioprefill.native.host import NativeHost
from aioprefill.request import PrefillRequest
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
