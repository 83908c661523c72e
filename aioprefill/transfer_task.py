"""Transfers: handshakes progress and hand-offs are retired while a forward of any length runs."""

from __future__ import annotations

from typing import NoReturn

from aioprefill.loop_core import LoopCore


async def transfer_task(core: LoopCore) -> NoReturn:
    """Runs until cancelled, which can only happen between host calls."""
    while True:
        due = core.host.next_timer()
        timeout_s = None if due is None else max(0.001, due - core.calls.now())
        await core.signals.transfers.wait(timeout_s)
        progress = core.calls.progress_transfers()
        changed = core.pipeline.transfers_progressed(progress)
        if progress.bootstrapped:
            changed = core.collect_bootstrapped() or changed
        if changed:
            core.signals.preparation.set()
        core.signals.progress.set()
