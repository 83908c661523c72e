"""Result handling: waits for the oldest forward, here and on all ranks, then runs the scheduling step."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from aioprefill.completion import end_of
from aioprefill.errors import DeviceError, HostError
from aioprefill.loop_core import LoopCore
from aioprefill.pipeline import Flight
from aioprefill.tp_agree import Seen

# After a blocking wait, sockets have not been looked at for a whole forward. One turn of the loop polls
# them, the next runs what they woke, the third the intake behind it.
TURNS_FOR_INPUT = 3


async def result_task(core: LoopCore) -> NoReturn:
    """Runs until cancelled. Raises `DeviceError` when the device is lost, `RankError` when a rank is."""
    while True:
        flight = core.pipeline.next_vote
        if flight is not None:
            seen = await _end_of(core, flight)
            core.voted(flight.number, await core.agreement.vote(flight.number, flight.digest, seen))
        elif not core.pipeline.may_process:
            await core.signals.results.wait()
        while core.pipeline.may_process:
            core.finish_oldest()
            await asyncio.sleep(0)


async def _end_of(core: LoopCore, flight: Flight) -> Seen:
    """Wait for the forward on this rank; what is seen of its end."""
    completion = flight.forward.completion
    if core.config.continuous_intake:
        return await end_of(completion)
    for _ in range(TURNS_FOR_INPUT):
        await asyncio.sleep(0)
    try:
        completion.synchronize()
    except (DeviceError, HostError) as error:
        return error
    return None
