"""One rank of `aioprefill serve --tp N`: rank 0 serves, the others follow."""

from __future__ import annotations

import asyncio
import logging

from aioprefill.config import ServeConfig
from aioprefill.engine.shard import EngineShard
from aioprefill.errors import RankError
from aioprefill.follower import Follower
from aioprefill.native.host import NativeHost
from aioprefill.native.load import load_engine, load_grammars, pool_view
from aioprefill.native.serve_host import serve_host
from aioprefill.process import (
    EXIT_DRAINED,
    EXIT_FAILED,
    EXIT_RANK_LOST,
    EXIT_STUCK,
    Process,
    leave,
    run_process,
)
from aioprefill.ranks.group import RankGroup
from aioprefill.ranks.place import RankPlace
from aioprefill.ranks.runtime import GroupLink
from aioprefill.transfer.nixl_sender import NixlTransfer
from aioprefill.wire.security import load_keys

logger = logging.getLogger(__name__)


def run_rank(config: ServeConfig, place: RankPlace) -> int:
    """Join the other ranks and run until told to stop; the exit code (see `aioprefill.process`).

    Raises `ConfigError` or `RankError` when the ranks do not come together.
    """
    group = RankGroup.join(place, device=config.engine.device, vote_timeout_s=config.ranks.rank_timeout_s)
    name = "serve" if place.leads else f"serve rank {place.rank}"
    code = run_process(name, lambda process: _rank(process, config, group), log_level=config.log_level)
    group.close()
    return code


async def _rank(process: Process, config: ServeConfig, group: RankGroup) -> int:
    place = group.place
    keys = None if config.curve_keys is None else load_keys(config.curve_keys)
    shard = EngineShard(place.rank, place.size)
    engine = await asyncio.to_thread(load_engine, config.engine, shard)
    transfer = NixlTransfer(
        pool_view(engine.pool),
        engine.spec.layout,
        keys=keys,
        lease_s=config.lease_s,
        group=group.shared_id,
    )
    await asyncio.to_thread(transfer.prepare)
    grammars = load_grammars(engine, config.engine) if place.leads else None
    host = NativeHost(engine, transfer, config.native, grammars=grammars)
    # watches begin together: a rank that loads for longer is not a silent one
    await asyncio.to_thread(group.meet, "loaded")
    link = GroupLink(group, timeout_s=config.ranks.rank_timeout_s, on_stuck=_leave_stuck)
    try:
        if place.leads:
            code = await serve_host(process, host, config, keys, link)
        else:
            code = await _follow(process, host, link, config)
    except RankError as error:
        # threads may sit in collectives that will never end: nobody waits for them
        leave(EXIT_RANK_LOST, f"error: {error}")
    except Exception as error:
        if hanging := _hanging(host, link):
            leave(EXIT_FAILED, f"error: {error}; {hanging}, leaving without it")
        raise
    if hanging := _hanging(host, link):
        leave(code, f"{hanging}, leaving without it")
    return code


def _hanging(host: NativeHost, link: GroupLink) -> str:
    """What a thread of this process sits in that may never end, so that the process must not wait for it."""
    return "a forward hangs on the device" if host.hung else "a vote hangs" if link.voting else ""


async def _follow(process: Process, host: NativeHost, link: GroupLink, config: ServeConfig) -> int:
    """Follow until rank 0 stops; a signal to this rank asks rank 0 to drain and stop all."""
    follower = Follower(host, link, slow_call_s=config.scheduler.slow_call_s)
    following = asyncio.create_task(follower.run(), name="aioprefill.follower")
    logger.info("rank %d of %d follows", link.rank, link.size)
    try:
        await process.wait_any(asyncio.wait([following]))
        if not following.done():
            follower.ask_to_stop()
        await following
    finally:
        following.cancel()
        await asyncio.wait([following])
    return EXIT_STUCK if host.hung else EXIT_DRAINED


def _leave_stuck(error: RankError) -> None:
    """The loop does not react: it sits in a host call. Nobody can be answered any more."""
    leave(EXIT_RANK_LOST, f"error: {error}; this rank's loop does not react, leaving at once")
