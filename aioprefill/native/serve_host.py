"""Serves a native host over ZMQ until told to stop: what `aioprefill serve` does once its model is loaded."""

from __future__ import annotations

import logging

from aioprefill.config import ServeConfig
from aioprefill.host import DrainReport
from aioprefill.native.host import NativeHost
from aioprefill.native.welcome import welcome_of
from aioprefill.process import EXIT_DRAINED, EXIT_STUCK, Process
from aioprefill.ranks.port import RankLink
from aioprefill.record.recorder import make_recording
from aioprefill.scheduler import PrefillScheduler
from aioprefill.wire.prefill_service import PrefillService
from aioprefill.wire.security import CurveKeys

logger = logging.getLogger(__name__)


async def serve_host(
    process: Process,
    host: NativeHost,
    config: ServeConfig,
    keys: CurveKeys | None = None,
    ranks: RankLink | None = None,
) -> int:
    """Serve and drain; the exit code. What stops it: a signal, `aioprefill ctl drain`, or a broken loop.

    With `ranks` this is rank 0, and a signal to any other rank stops it too. Raises what broke the loop.
    """

    def on_drained(report: DrainReport) -> None:
        """`aioprefill ctl drain` ends the process, as a signal does."""
        _tell(report)
        process.stop.set()

    def report() -> str:
        return f"open requests: {', '.join(host.open_requests()) or 'none'}"

    def stuck() -> str:
        return "a forward hangs on the device" if host.hung else ""

    process.report, process.stuck = report, stuck
    recording = make_recording(config, host, tp=1 if ranks is None else ranks.size)
    async with (
        PrefillScheduler(host, config.scheduler, ranks=ranks, recording=recording) as scheduler,
        PrefillService(
            config.listen,
            submit=scheduler.submit,
            stats=lambda: scheduler.stats().flat(),
            welcome=welcome_of("prefill", host.engine.spec),
            keys=keys,
            operated=scheduler,
            drain_timeout_s=config.scheduler.drain_timeout_s,
            on_drained=on_drained,
        ) as service,
    ):
        process.ready(service.endpoint, model=host.engine.spec.name, pages=host.engine.num_pages)
        await process.wait_any(scheduler.wait_stopped(), scheduler.stop_wanted.wait())
        _tell(await scheduler.drain(config.scheduler.drain_timeout_s))
    return EXIT_STUCK if host.hung else EXIT_DRAINED


def _tell(report: DrainReport) -> None:
    """Log what a drain has finished and dropped; nothing when nothing was open."""
    for request_id in report.dropped:
        logger.warning("dropped: %s", request_id)
    if report.finished or report.dropped:
        logger.info("drained: %d finished, %d dropped", len(report.finished), len(report.dropped))
