"""`aioprefill serve`: the native host as a process, served over ZMQ, handing KV over by NIXL."""

from __future__ import annotations

import asyncio
import logging

from aioprefill.config import ServeConfig
from aioprefill.native.host import NativeHost
from aioprefill.native.load import load_engine, pool_view
from aioprefill.native.welcome import welcome_of
from aioprefill.process import EXIT_DRAINED, Process, run_process
from aioprefill.scheduler import PrefillScheduler
from aioprefill.transfer.nixl_sender import NixlTransfer
from aioprefill.wire.prefill_service import PrefillService
from aioprefill.wire.security import CurveKeys, load_keys

logger = logging.getLogger(__name__)


def run_serve(config: ServeConfig) -> int:
    """Run until told to stop; the exit code (see `aioprefill.process`)."""
    return run_process("serve", lambda process: serve(process, config), log_level=config.log_level)


async def serve(process: Process, config: ServeConfig) -> int:
    """Load, serve, drain."""
    keys: CurveKeys | None = None if config.curve_keys is None else load_keys(config.curve_keys)
    engine = await asyncio.to_thread(load_engine, config.engine)
    transfer = NixlTransfer(pool_view(engine.pool), engine.spec.layout, keys=keys, lease_s=config.lease_s)
    await asyncio.to_thread(transfer.prepare)
    host = NativeHost(engine, transfer, config.native)
    async with PrefillScheduler(host, config.scheduler) as scheduler:
        process.report = lambda: f"open requests: {', '.join(host.open_requests()) or 'none'}"
        async with PrefillService(
            config.listen,
            submit=scheduler.submit,
            stats=lambda: scheduler.stats().flat(),
            welcome=welcome_of("prefill", engine.spec),
            keys=keys,
        ) as service:
            process.ready(service.endpoint, model=engine.spec.name, pages=engine.num_pages)
            await process.wait_any(scheduler.wait_stopped())
            report = await scheduler.drain(config.scheduler.drain_timeout_s)
            for request_id in report.dropped:
                logger.warning("dropped: %s", request_id)
            logger.info("drained: %d finished, %d dropped", len(report.finished), len(report.dropped))
    return EXIT_DRAINED
