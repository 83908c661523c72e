"""Runs aioprefill's loop on the thread of SGLang's scheduler, in place of SGLang's own loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aioprefill.config import SglangConfig
from aioprefill.errors import HostLeft
from aioprefill.scheduler import PrefillScheduler
from aioprefill.sglang.completion import Pacing, cuda_for
from aioprefill.sglang.host import SglangHost
from aioprefill.sglang.server_info import Plain, told_in_server_info
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
        facts = facts_of(scheduler, config, pacing, release)
        logger.info(describe(facts))
        on_entered(running)
        with told_in_server_info(scheduler, facts, partial(_counters, scheduler, running)):
            await _either(exiting.wait(), running.wait_stopped())
        if exiting.is_set():
            await running.drain(config.shutdown_timeout_s)
            if left := host.unfinished():
                logger.warning("not finished at shutdown: %s", ", ".join(left))


def _counters(scheduler: Any, running: PrefillScheduler) -> dict[str, Plain]:
    """The loop learns of a pause when intake returns, and the question may be part of the same intake."""
    return {**running.stats().flat(), "paused": bool(scheduler._engine_paused)}


async def _either(*waits: Any) -> None:
    """Return when one of the waits is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def facts_of(scheduler: Any, config: SglangConfig, pacing: Pacing, release: str) -> dict[str, Plain]:
    """What does not change while the loop runs."""
    return {
        "version": __version__,
        "sglang": release,
        "ranks": int(scheduler.tp_size),
        "waits": "paced looks" if config.loop.continuous_intake else "blocking waits",
        "asks": "cudaEventQuery" if pacing.cuda is not None else "copy_done.query",
        "timer": "timerfd" if pacing.timer.fine else "1 ms timer",
        "pause_barrier": config.pause_barrier,
    }


def describe(facts: Mapping[str, Plain]) -> str:
    """The line that says the loop is active."""
    ranks = f"{facts['ranks']} rank" + "s" * (facts["ranks"] != 1)
    return (
        f"aioprefill {facts['version']} runs the prefill loop of SGLang {facts['sglang']}: {ranks}, "
        f"{facts['waits']} ({facts['asks']}, {facts['timer']}), "
        f"pause barrier {'on' if facts['pause_barrier'] else 'off'}"
    )
