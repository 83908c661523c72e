"""A native host without a model on the wire, in the test's own loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from wire_fakes import ANY_PORT, FAST_HEARTBEAT

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.native.host import NativeHost
from aioprefill.native.welcome import welcome_of
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.engine import FakeEngine
from aioprefill.wire.prefill_service import PrefillService


@dataclass
class Served:
    """All parts of it; `drained` has the reports of drains that came over the wire."""

    engine: FakeEngine
    host: NativeHost
    scheduler: PrefillScheduler
    service: PrefillService
    drained: list

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self.service.endpoint

    def complete(self) -> None:
        """The device is done with all it was given."""
        for forward in self.engine.forwards:
            forward.completion.complete()


@asynccontextmanager
async def served(
    engine: FakeEngine | None = None, config: NativeConfig | None = None, **scheduler: float
) -> AsyncIterator[Served]:
    """Serve; at the end nothing is in use."""
    engine = engine or FakeEngine()
    host = NativeHost(engine, None, config or NativeConfig(chunk_tokens=64))
    options = SchedulerConfig(**{"drain_timeout_s": 5.0, **scheduler})
    drained: list = []
    async with PrefillScheduler(host, options) as loop:
        service = PrefillService(
            ANY_PORT,
            submit=loop.submit,
            stats=lambda: loop.stats().flat(),
            welcome=welcome_of("prefill", engine.spec),
            limits=FAST_HEARTBEAT,
            operated=loop,
            drain_timeout_s=5.0,
            on_drained=drained.append,
        )
        async with service:
            found = Served(engine, host, loop, service, drained)
            yield found
            found.complete()
    assert service.live == 0 and service.commands == 0
    assert host.ledger.requests == {} and host.memory.pool.held == 0
