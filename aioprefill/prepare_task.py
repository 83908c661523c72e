"""Batch preparation: fills free slots when something may have become admissible."""

from __future__ import annotations

from typing import NoReturn

from aioprefill.loop_core import LoopCore


async def prepare_task(core: LoopCore) -> NoReturn:
    """Runs until cancelled, which can only happen between host calls."""
    while True:
        await core.signals.preparation.wait()
        if core.pipeline.result_pending:
            core.run_preparation(scheduling_step=False)
        else:
            core.scheduling_step()
