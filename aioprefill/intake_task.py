"""Intake: takes input as it comes, also while results are pending, at any depth."""

from __future__ import annotations

from typing import NoReturn

from aioprefill.loop_core import LoopCore


async def intake_task(core: LoopCore) -> NoReturn:
    """Runs until cancelled; cancellation loses no input, for a host call never awaits."""
    while True:
        await core.signals.input.wait(core.host.intake_tick_s)
        core.take_input()
        if core.pipeline.may_admit:
            core.signals.preparation.set()
