"""Runs aioprefill's loop on the thread of SGLang's scheduler, in place of SGLang's own loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from aioprefill.config import SglangConfig
from aioprefill.errors import HostError, HostLeft
from aioprefill.follower import Follower
from aioprefill.pacer import Pacer
from aioprefill.ranks.port import RankLink
from aioprefill.scheduler import PrefillScheduler
from aioprefill.sglang.completion import Pacing, cuda_for
from aioprefill.sglang.host import SglangHost
from aioprefill.sglang.server_info import Plain, told_in_server_info
from aioprefill.timerfd import FineTimer
from aioprefill.version import __version__

logger = logging.getLogger(__name__)

Entered = Callable[[PrefillScheduler], None]
"""Is told of the loop once it runs; not on a rank that follows."""


def run_loop(
    scheduler: Any, config: SglangConfig, *, release: str, on_entered: Entered = lambda _: None
) -> None:
    """Serve until SGLang is told to shut down; every launched forward is processed by then.

    Call it where SGLang's own loop would run: on its thread and inside its stream, at TP > 1 on every rank.
    Whatever SGLang raises passes through, bare: a role switch leaves that way, and the loop can be entered
    again afterwards. Raises `RankError` when another rank is lost.
    """
    import torch
    import uvloop

    cuda = cuda_for(scheduler.device)
    loop = uvloop.new_event_loop()
    try:
        with torch.no_grad(), _linked(scheduler) as link:
            loop.run_until_complete(_serve(scheduler, config, cuda, release, on_entered, link))
    except HostLeft as left:
        assert left.__cause__ is not None
        raise left.__cause__ from None
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@contextmanager
def _linked(scheduler: Any) -> Iterator[RankLink | None]:
    """The way to the other ranks, where there are any. Blocking."""
    if int(scheduler.tp_size) == 1:
        yield None
        return
    from aioprefill.sglang.ranks import SglangGroup

    group = SglangGroup.of(scheduler)
    link = group.link()
    try:
        yield link
    except RuntimeError as error:
        if link.lost is None:
            raise
        raise link.lost from error
    finally:
        if not link.voting:  # else its thread sits in a collective, and this process ends
            group.close()


async def _serve(
    scheduler: Any,
    config: SglangConfig,
    cuda: Any,
    release: str,
    on_entered: Entered,
    link: RankLink | None,
) -> None:
    loop = asyncio.get_running_loop()
    pacing = Pacing(FineTimer(), cuda, Pacer(fine_s=config.look_s))
    host = SglangHost(
        scheduler,
        pacing,
        clock=loop.time,
        pause_barrier=config.pause_barrier,
        stall_limit_s=config.loop.stall_limit_s,
        input_poll_s=config.input_poll_s,
    )
    if link is not None and link.rank > 0:
        await _follow(scheduler, Follower(host, link, slow_call_s=config.loop.slow_call_s), link, release)
        return
    exiting = asyncio.Event()
    host.on_exiting = exiting.set
    running = PrefillScheduler(host, config.loop, ranks=link)
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


async def _follow(scheduler: Any, follower: Follower, link: RankLink, release: str) -> None:
    """Make rank 0's host calls until it stops."""
    logger.info(
        "aioprefill %s follows rank 0 in the prefill loop of SGLang %s: rank %d of %d",
        *(__version__, release, link.rank, link.size),
    )
    await follower.run()
    if not scheduler.gracefully_exit:
        raise HostError("rank 0 has ended the loop, though SGLang was not told to shut down")


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
