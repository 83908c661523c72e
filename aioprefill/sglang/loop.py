"""Runs aioprefill's loop on the thread of SGLang's scheduler, in place of SGLang's own loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aioprefill.config import SglangConfig
from aioprefill.errors import HostLeft
from aioprefill.scheduler import PrefillScheduler
from aioprefill.sglang.completion import Pacing, cuda_for
from aioprefill.sglang.host import SglangHost
from aioprefill.timerfd import FineTimer
from aioprefill.version import __version__

logger = logging.getLogger(__name__)

Entered = Callable[[PrefillScheduler], None]
"""Is told of the loop once it runs."""


def run_loop(
    scheduler: Any, config: SglangConfig, *, release: str, on_entered: Entered = lambda _: None
) -> None:
    """Serve until SGLang is told to shut down; every launched forward is processed by then.

    Call it where SGLang's own loop would run: on its thread and inside its stream. Whatever SGLang raises
    passes through, bare: a role switch leaves that way, and the loop can be entered again afterwards.
    """
    import torch
    import uvloop

    cuda = cuda_for(scheduler.device)
    loop = uvloop.new_event_loop()
    try:
        with torch.no_grad():
            loop.run_until_complete(_serve(scheduler, config, cuda, release, on_entered))
    except HostLeft as left:
        assert left.__cause__ is not None
        raise left.__cause__ from None
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _serve(scheduler: Any, config: SglangConfig, cuda: Any, release: str, on_entered: Entered) -> None:
    loop = asyncio.get_running_loop()
    pacing = Pacing(FineTimer(), cuda)
    host = SglangHost(
        scheduler,
        pacing,
        clock=loop.time,
        pause_barrier=config.pause_barrier,
        stall_limit_s=config.loop.stall_limit_s,
        input_poll_s=config.input_poll_s,
    )
    exiting = asyncio.Event()
    host.on_exiting = exiting.set
    running = PrefillScheduler(host, config.loop)
    async with running:
        logger.info(describe(scheduler, config, pacing, release))
        on_entered(running)
        await _either(exiting.wait(), running.wait_stopped())
        if exiting.is_set():
            await running.drain(config.shutdown_timeout_s)
            if left := host.unfinished():
                logger.warning("not finished at shutdown: %s", ", ".join(left))


async def _either(*waits: Any) -> None:
    """Return when one of the waits is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def describe(scheduler: Any, config: SglangConfig, pacing: Pacing, release: str) -> str:
    """The line that says the loop is active."""
    waits = "blocking waits" if not config.loop.continuous_intake else "paced looks"
    timer = "timerfd" if pacing.timer.fine else "1 ms timer"
    device = "cudaEventQuery" if pacing.cuda is not None else "copy_done.query"
    ranks = f"{scheduler.tp_size} rank" + "s" * (scheduler.tp_size > 1)
    return (
        f"aioprefill {__version__} runs the prefill loop of SGLang {release}: {ranks}, "
        f"{waits} ({device}, {timer}), pause barrier {'on' if config.pause_barrier else 'off'}"
    )
