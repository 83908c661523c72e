"""Puts a prefill scheduler on the wire. Knows of it only `submit` and `stats`; control is the desk's.

Rules:
- Receiving does no more than the scheduler's own validation, so a burst is read at once.
- No task per request: the futures of its handle call back.
- A request belongs to the client that sent it: nobody else can abort it, and it is aborted when that
  client leaves. What is kept per request is bounded by the scheduler's own limit (`QueueFull`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from aioprefill.errors import AioprefillError, HostError, InvalidRequest, RequestAborted, WireError
from aioprefill.host import DrainReport
from aioprefill.request import HandoffResult, PrefillHandle, PrefillRequest, PrefillResult
from aioprefill.wire.control_desk import ControlDesk, Operated
from aioprefill.wire.failures import failed_from
from aioprefill.wire.messages import (
    Abort,
    Accepted,
    Control,
    FirstToken,
    Message,
    Stats,
    StatsQuery,
    Submit,
    Transferred,
    Welcome,
    unpack_ids,
)
from aioprefill.wire.security import CurveKeys
from aioprefill.wire.server import WireServer
from aioprefill.wire.sockets import SocketLimits

Settled = asyncio.Future[PrefillResult] | asyncio.Future[HandoffResult]


class PrefillService:
    """Serves `submit` and `stats` at an endpoint.

    `submit` returns a handle at once, or raises `InvalidRequest`, `QueueFull` or another
    `AioprefillError`, which the client gets as `Failed`. `stats` returns numbers and short texts by name.
    With `operated` (a `PrefillScheduler`) it takes control commands too: from every client, so who may
    connect may operate; see `ControlDesk` for the two options of drains. `async with` starts and ends it.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        submit: Callable[[PrefillRequest], PrefillHandle],
        stats: Callable[[], Mapping[str, Any]],
        welcome: Welcome,
        keys: CurveKeys | None = None,
        limits: SocketLimits | None = None,
        operated: Operated | None = None,
        drain_timeout_s: float | None = None,
        on_drained: Callable[[DrainReport], None] | None = None,
    ) -> None:
        self._submit = submit
        self._stats = stats
        self._live: dict[bytes, dict[str, PrefillHandle]] = {}
        self._desk: ControlDesk | None = None
        handlers: dict[type[Any], Callable[[bytes, Any], None]] = {
            Submit: self._on_submit,
            Abort: self._on_abort,
            StatsQuery: self._on_stats,
        }
        if operated is not None:
            self._desk = ControlDesk(
                operated, self._send, drain_timeout_s=drain_timeout_s, on_drained=on_drained
            )
            handlers[Control] = self._desk.on_control
        self.server = WireServer(
            endpoint,
            handlers,
            welcome=welcome,
            on_gone=self._on_gone,
            keys=keys,
            limits=limits,
        )

    def __repr__(self) -> str:
        return f"<PrefillService {self.endpoint} clients={self.server.clients} live={self.live}>"

    @property
    def endpoint(self) -> str:
        """Where clients connect; the real port once started."""
        return self.server.endpoint

    @property
    def live(self) -> int:
        """Requests that wait for their outcome."""
        return sum(map(len, self._live.values()))

    @property
    def commands(self) -> int:
        """Control commands that wait for their effect."""
        return 0 if self._desk is None else self._desk.under_way

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def start(self) -> None:
        """Serve, on the running loop. Raises `ConfigError` as `WireServer.start` does."""
        self.server.start()

    async def aclose(self, linger_ms: int = 500) -> None:
        """Stop serving; returns when the last answers are out, or after `linger_ms`. Idempotent.

        Requests that still wait are aborted and their clients told, and so are callers of control commands
        that still wait. Drain the scheduler first to avoid it.
        """
        self.server.receive_pending()  # commands that came while the last ones were carried out
        for _ in range(5):  # handles that were settled just now, and such commands, answer by themselves
            await asyncio.sleep(0)
        reason = f"{self.endpoint} is shutting down"
        for identity, handles in list(self._live.items()):
            for request_id, handle in list(handles.items()):
                self._end(identity, handle, failed_from(RequestAborted(reason), request_id))
                handle.abort(reason)
        if self._desk is not None:
            await self._desk.aclose(reason)
        await self.server.aclose(linger_ms)

    def _on_submit(self, identity: bytes, message: Submit) -> None:
        try:
            token_ids = unpack_ids(message.prompt)
        except WireError as err:
            raise InvalidRequest("prompt", str(err)) from err
        handle = self._submit(
            PrefillRequest(
                token_ids,
                request_id=message.request_id,
                peer=message.peer,
                sampling=message.sampling,
                max_new_tokens=message.max_new_tokens,
                ignore_eos=message.ignore_eos,
                grammar=message.grammar,
                priority=message.priority,
                deadline_s=message.deadline_s,
                timeouts=message.timeouts,
            )
        )
        self._live.setdefault(identity, {})[handle.request_id] = handle
        # behind what the request woke: its way to admission is not to wait for its receipt
        asyncio.get_running_loop().call_soon(self._follow, identity, handle)

    def _follow(self, identity: bytes, handle: PrefillHandle) -> None:
        """Send the receipt, then what comes of the request."""
        if not self._is_live(identity, handle):
            return  # the client has left meanwhile
        self._send(identity, Accepted(handle.request_id))
        handle.result.add_done_callback(partial(self._on_result, identity, handle))
        handle.transferred.add_done_callback(partial(self._on_transferred, identity, handle))

    def _on_abort(self, identity: bytes, message: Abort) -> None:
        handle = self._live.get(identity, {}).get(message.request_id)
        if handle is not None:  # else it has its outcome already: the two messages crossed
            handle.abort("aborted by the client")

    def _on_stats(self, identity: bytes, message: StatsQuery) -> None:
        values = {
            key: value if isinstance(value, int | float | str) else str(value)
            for key, value in self._stats().items()
        }
        self.server.send(identity, Stats(values))

    def _on_gone(self, identity: bytes) -> None:
        for handle in self._live.pop(identity, {}).values():
            handle.abort("the client disconnected")

    def _on_result(
        self, identity: bytes, handle: PrefillHandle, future: asyncio.Future[PrefillResult]
    ) -> None:
        if not self._is_live(identity, handle):
            return
        error = _error_of(future)
        if error is not None:
            self._end(identity, handle, failed_from(error, handle.request_id))
            return
        result = future.result()
        self._send(
            identity,
            FirstToken(
                handle.request_id,
                token_id=result.token_id,
                logprob=result.logprob,
                top_logprobs=result.top_logprobs,
                prompt_tokens=result.prompt_tokens,
                cached_tokens=result.cached_tokens,
                launched_ms=1e3 * (result.launched_s - result.arrival_s),
                first_token_ms=1e3 * (result.first_token_s - result.arrival_s),
                weight_versions=result.weight_versions,
            ),
        )

    def _on_transferred(
        self, identity: bytes, handle: PrefillHandle, future: asyncio.Future[HandoffResult]
    ) -> None:
        if not self._is_live(identity, handle):
            return
        error = _error_of(future)
        if error is not None:
            self._end(identity, handle, failed_from(error, handle.request_id))
            return
        handoff = future.result()
        transferred_ms = 1e3 * (handoff.transferred_s - handle.arrival_s)
        self._end(identity, handle, Transferred(handle.request_id, transferred_ms, handoff.kv_bytes))

    def _is_live(self, identity: bytes, handle: PrefillHandle) -> bool:
        return self._live.get(identity, {}).get(handle.request_id) is handle

    def _end(self, identity: bytes, handle: PrefillHandle, outcome: Message) -> None:
        """Send the outcome and forget the request."""
        handles = self._live.get(identity, {})
        if handles.pop(handle.request_id, None) is None:
            return  # its client was dropped while it was sent to
        if not handles:
            del self._live[identity]
        self._send(identity, outcome)

    def _send(self, identity: bytes, message: Message) -> None:
        if not self.server.closed:  # a handle may settle while the service ends
            self.server.send(identity, message)


def _error_of(future: Settled) -> AioprefillError | None:
    """The error of a settled future; one of our own if it is a bug's."""
    if future.cancelled():
        return RequestAborted("the request was cancelled")
    error = future.exception()
    if error is None or isinstance(error, AioprefillError):
        return error
    return HostError(f"{type(error).__name__}: {error}")
