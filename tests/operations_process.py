"""A prefill process without a model, for tests: `operations_process.py DEVICE DRAIN_TIMEOUT_S`.

DEVICE is "quick" (a forward takes 10 ms), "slow" (one second), "endless" (none ever completes), "lost" (the
first fails with a sticky error) or "hung" (as endless, and a thread sits in a blocking call that nothing
ends, as inside a device call or a collective).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Sequence

from aioprefill.config import NativeConfig, SchedulerConfig, ServeConfig
from aioprefill.engine.port import Span
from aioprefill.errors import DeviceError
from aioprefill.native import host as native_host
from aioprefill.native.host import NativeHost
from aioprefill.native.serve_host import serve_host
from aioprefill.process import Process, run_process
from aioprefill.testing.engine import FakeEngine, FakeEngineForward


class LostEngine(FakeEngine):
    """Its device is lost at the first forward."""

    def launch(self, spans: Sequence[Span]) -> FakeEngineForward:
        """See `Engine.launch`."""
        forward = super().launch(spans)
        forward.fail(DeviceError("cudaErrorIllegalAddress", "an illegal memory access", sticky=True))
        return forward


class HungEngine(FakeEngine):
    """Its stream thread never comes back from the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = concurrent.futures.ThreadPoolExecutor(1)

    def launch(self, spans: Sequence[Span]) -> FakeEngineForward:
        """See `Engine.launch`."""
        self._stream.submit(threading.Event().wait)
        return super().launch(spans)

    async def aclose(self) -> None:
        """Waits for the thread, as real engines do."""
        closed: concurrent.futures.Future[None] = concurrent.futures.Future()

        def close() -> None:
            self._stream.shutdown(wait=True)
            closed.set_result(None)

        threading.Thread(target=close, daemon=True).start()
        await asyncio.shield(asyncio.wrap_future(closed))


def main() -> int:
    """Serve until told to stop."""
    device, drain_timeout_s = sys.argv[1], float(sys.argv[2])
    native_host.CLOSE_TIMEOUT_S = 0.2

    async def serve(process: Process) -> int:
        special: dict[str, type[FakeEngine]] = {"hung": HungEngine, "lost": LostEngine}
        if device in special:
            engine = special[device]()
        else:
            engine = FakeEngine(duration_s={"quick": 0.01, "slow": 1.0}.get(device))
        host = NativeHost(engine, None, NativeConfig(chunk_tokens=64, max_queue_requests=3))
        config = ServeConfig(
            listen="tcp://127.0.0.1:0",
            scheduler=SchedulerConfig(drain_timeout_s=drain_timeout_s, stall_limit_s=0.5),
        )
        return await serve_host(process, host, config)

    return run_process("serve", serve, log_level="info")


if __name__ == "__main__":
    sys.exit(main())
