"""`aioprefill decode`: the reference decode worker as a process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aioprefill.config import DecodeConfig
from aioprefill.decode.streams import Streams
from aioprefill.decode.worker import DecodeWorker
from aioprefill.engine.transformers_engine import TransformersEngine
from aioprefill.errors import AioprefillError, HostError, RequestAborted
from aioprefill.native.load import load_engine, load_grammars, pool_view
from aioprefill.native.welcome import welcome_of
from aioprefill.process import EXIT_DRAINED, Process, run_process
from aioprefill.transfer.nixl_receiver import MESSAGES, NixlReceiver
from aioprefill.wire.messages import Abort, Attach, Hello, Message, Stats, StatsQuery
from aioprefill.wire.security import load_keys
from aioprefill.wire.server import WireServer

logger = logging.getLogger(__name__)


def run_decode(config: DecodeConfig) -> int:
    """Run until told to stop; the exit code (see `aioprefill.process`)."""
    return run_process("decode", lambda process: decode(process, config), log_level=config.log_level)


async def decode(process: Process, config: DecodeConfig) -> int:
    """Load, serve, finish what runs."""
    engine = await asyncio.to_thread(load_engine, config.engine)
    service = DecodeService(engine, config)
    try:
        await service.run(process)
    finally:
        await asyncio.to_thread(engine.close)
    return EXIT_DRAINED


class DecodeService:
    """One socket for clients and prefill instances; a receiver, a worker and the streams between them."""

    def __init__(self, engine: TransformersEngine, config: DecodeConfig) -> None:
        self._config = config
        self._engine = engine
        self._streams = Streams(self._send, self._unread)
        self._grammars = load_grammars(engine, config.engine)
        self._worker = DecodeWorker(
            engine,
            self._streams,
            max_batch_requests=config.max_batch_requests,
            grammars=self._grammars,
        )
        self._receiver = NixlReceiver(
            pool_view(engine.pool),
            engine.spec.layout,
            self._worker,
            self._send,
            lease_s=config.lease_s,
            room_timeout_s=config.room_timeout_s,
        )
        self._worker.on_pages_free = self._receiver.retry_reservations
        self._streams.is_coming = self._receiver.is_queued
        handlers: dict[type[Any], Callable[[bytes, Any], None]] = dict.fromkeys(
            MESSAGES, self._receiver.on_message
        )
        self._server = WireServer(
            config.listen,
            {**handlers, Attach: self._attach, Abort: self._abort, StatsQuery: self._stats},
            welcome=welcome_of("decode", engine.spec),
            on_hello=self._hello,
            on_gone=self._gone,
            keys=None if config.curve_keys is None else load_keys(config.curve_keys),
        )

    async def run(self, process: Process) -> None:
        """Serve until the process is told to stop, then decode what runs to its end, up to the deadline."""
        await asyncio.to_thread(self._receiver.prepare)
        decoding = None
        try:
            async with self._server:
                self._receiver.start()
                decoding = asyncio.create_task(self._worker.run(), name="aioprefill.decode")
                process.report = lambda: repr(self._worker)
                process.ready(
                    self._server.endpoint, model=self._engine.spec.name, pages=self._engine.num_pages
                )
                await process.wait_any(asyncio.wait([decoding]))
                self._receiver.refuse_new("the decode worker stops")
                stopped: AioprefillError = RequestAborted("the decode worker stops")
                idle = asyncio.ensure_future(self._worker.wait_idle())
                await asyncio.wait(
                    [idle, decoding],
                    timeout=self._config.drain_timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                idle.cancel()
                if decoding.done():  # it broke: nothing will be decoded any more
                    stopped = HostError(f"the decode worker broke: {decoding.exception()!r}")
                self._worker.close(stopped)
                self._streams.close()
        finally:
            if self._grammars is not None:
                await self._grammars.aclose()
            await self._receiver.aclose()
            if decoding is not None:
                decoding.cancel()
                await asyncio.wait([decoding])
                if not decoding.cancelled() and (error := decoding.exception()) is not None:
                    raise error

    def _send(self, identity: bytes, message: Message) -> None:
        if not self._server.closed:
            self._server.send(identity, message)

    def _unread(self, room: str) -> None:
        self._worker.drop(room)

    def _hello(self, identity: bytes, hello: Hello) -> None:
        if hello.role == "prefill":
            self._receiver.on_message(identity, hello)

    def _gone(self, identity: bytes) -> None:
        self._streams.gone(identity)
        self._receiver.on_gone(identity)

    def _attach(self, identity: bytes, message: Attach) -> None:
        self._streams.attach(identity, message.request_id)

    def _abort(self, identity: bytes, message: Abort) -> None:
        self._streams.abandon(identity, message.request_id)

    def _stats(self, identity: bytes, message: StatsQuery) -> None:
        awaiting = self._receiver.stats()["rooms_awaiting_shards"]
        self._send(identity, Stats({**self._worker.stats(), "rooms_awaiting_shards": awaiting}))
