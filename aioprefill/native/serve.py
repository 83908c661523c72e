"""`aioprefill serve`: the native host as a process, served over ZMQ, handing KV over by NIXL."""

from __future__ import annotations

import asyncio

from aioprefill.config import ServeConfig
from aioprefill.native.host import NativeHost
from aioprefill.native.load import load_engine, load_grammars, pool_view
from aioprefill.native.serve_host import serve_host
from aioprefill.process import Process, run_process
from aioprefill.ranks.place import RankPlace
from aioprefill.transfer.nixl_sender import NixlTransfer
from aioprefill.wire.security import CurveKeys, load_keys


def run_serve(config: ServeConfig, place: RankPlace | None = None) -> int:
    """Run until told to stop; the exit code (see `aioprefill.process`). `place`: of one rank of several."""
    if place is None:
        return run_process("serve", lambda process: serve(process, config), log_level=config.log_level)
    from aioprefill.native.serve_rank import run_rank  # torch.distributed is for ranks only

    return run_rank(config, place)


async def serve(process: Process, config: ServeConfig) -> int:
    """Load, then serve until told to stop."""
    keys: CurveKeys | None = None if config.curve_keys is None else load_keys(config.curve_keys)
    engine = await asyncio.to_thread(load_engine, config.engine)
    transfer = NixlTransfer(pool_view(engine.pool), engine.spec.layout, keys=keys, lease_s=config.lease_s)
    await asyncio.to_thread(transfer.prepare)
    host = NativeHost(engine, transfer, config.native, grammars=load_grammars(engine, config.engine))
    return await serve_host(process, host, config, keys)
