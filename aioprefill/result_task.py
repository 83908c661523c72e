"""Result handling: waits for the oldest forward, here and on all ranks, then runs the scheduling step."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from aioprefill.errors import DeviceError
from aioprefill.loop_core import LoopCore
from aioprefill.pipeline import Flight

# After a blocking wait, sockets have not been looked at for a whole forward. One turn of the loop polls
# them, the next runs what they woke, the third the intake behind it.
TURNS_FOR_INPUT = 3


async def result_task(core: LoopCore) -> NoReturn:
    """Runs until cancelled. Raises `DeviceError` when the device is lost."""
    while True:
        flight = core.pipeline.next_vote
        if flight is not None:
            error = await _completion_error(core, flight)
            error = await core.agreement.vote(flight.number, error)
            core.pipeline.voted(flight.number, error, core.calls.now())
            core.signals.progress.set()
            if core.pipeline.held:
                core.signals.input.set()
        elif not core.pipeline.may_process:
            await core.signals.results.wait()
        while core.pipeline.may_process:
            core.finish_oldest()
            await asyncio.sleep(0)


async def _completion_error(core: LoopCore, flight: Flight) -> DeviceError | None:
    """Wait for the forward; its error, if it failed."""
    completion = flight.forward.completion
    try:
        if core.config.continuous_intake:
            await completion.wait()
        else:
            for _ in range(TURNS_FOR_INPUT):
                await asyncio.sleep(0)
            completion.synchronize()
    except DeviceError as error:
        return error
    return None
