"""The client of a prefill server and its decode worker: an asyncio API over two connections.

Rules:
- No tasks: answers are routed to streams as they arrive, and timers are the loop's.
- A server that goes away fails what waits for it, with a `WireError` that names it; never a hang. The
  next request opens a new connection, so the client works on when the server is back.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import zmq

from aioprefill.errors import AioprefillError, ConfigError, InvalidRequest, WireError
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.request import Timeouts
from aioprefill.sampling_params import SamplingParams
from aioprefill.wire.connection import CLIENT_LIMITS, Connection
from aioprefill.wire.control_calls import ControlCalls, ControlMethods
from aioprefill.wire.failures import error_from
from aioprefill.wire.messages import (
    Abort,
    Attach,
    Control,
    Failed,
    Message,
    Ping,
    Pong,
    Stats,
    StatsQuery,
    Submit,
    Welcome,
    pack_ids,
)
from aioprefill.wire.security import CurveKeys
from aioprefill.wire.sockets import SocketLimits, end_context
from aioprefill.wire.stream import TokenStream

Side = Literal["prefill", "decode"]
MAX_QUESTIONS = 1024
"""Pings and stats queries that may wait for answers at a time, per server and kind."""


class PairClient(ControlMethods):
    """Submits prompts to a prefill server and streams tokens from the decode worker that it hands over to.

    Without `decode_endpoint` streams have their first token only. `peer` is the decode worker's endpoint as
    the prefill server reaches it, where that differs; given alone, the KV goes there and nobody listens to
    its tokens. `timeout_s` bounds the wait for a server's first answer, and for answers to `ping` and
    `stats`; not that for tokens.

        async with PairClient("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5700") as client:
            async for token_id in client.submit([1, 2, 3]): ...

    Entering says hello to both. Raises `WireError` when one does not answer, `ConfigError` for an
    endpoint that is malformed, or off loopback without keys.
    """

    def __init__(
        self,
        prefill_endpoint: str,
        decode_endpoint: str | None = None,
        *,
        peer: str | None = None,
        keys: CurveKeys | None = None,
        timeout_s: float = 5.0,
        limits: SocketLimits = CLIENT_LIMITS,
    ) -> None:
        self._endpoints: dict[Side, str] = {"prefill": prefill_endpoint}
        if decode_endpoint is not None:
            self._endpoints["decode"] = decode_endpoint
        self._peer = peer or decode_endpoint
        self._keys = keys
        self._timeout_s = timeout_s
        self._limits = limits
        self._epoch = uuid.uuid4().hex
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._connections: dict[Side, Connection] = {}
        self._streams: dict[str, TokenStream] = {}
        self._questions: dict[tuple[Side, type[Message]], deque[asyncio.Future[Any]]] = {}
        self._control = ControlCalls(self._send_control, self.ping, timeout_s)

    def __repr__(self) -> str:
        return f"<PairClient {list(self._connections.values())} streams={len(self._streams)}>"

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def __aenter__(self) -> Self:
        self._context = zmq.Context()
        commands: dict[Side, str] = {"prefill": "aioprefill serve", "decode": "aioprefill decode"}
        for side, endpoint in self._endpoints.items():
            self._connections[side] = Connection(
                self._context,
                endpoint,
                on_message=partial(self._on_message, side),
                on_lost=partial(self._on_lost, side),
                command=commands[side],
                epoch=self._epoch,
                keys=self._keys,
                timeout_s=self._timeout_s,
                limits=self._limits,
            )
        try:
            for connection in self._connections.values():
                connection.open()
            for connection in self._connections.values():
                await connection.wait_ready()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close both connections; live requests fail with `WireError`, and their servers abort them.

        Returns when threads and sockets are gone. Idempotent.
        """
        for connection in self._connections.values():
            connection.close()
        for side, endpoint in self._endpoints.items():
            self._on_lost(side, WireError(f"{endpoint}: the client was closed"))
        for stream in list(self._streams.values()):
            stream.fail(WireError("the client was closed"))
        self._streams.clear()
        context, self._context = self._context, None
        if context is not None:
            await end_context(context)

    def welcome(self, side: Side = "prefill") -> Welcome:
        """What the server said about itself and its model when the connection was last made."""
        welcome = self._connection(side).welcome
        assert welcome is not None, "entering the client waits for it"
        return welcome

    def submit(
        self,
        prompt_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        request_id: str | None = None,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 128,
        ignore_eos: bool = False,
        grammar: GrammarSpec | None = None,
        handoff: bool = True,
        timeouts: Timeouts | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> TokenStream:
        """Send a request; never blocks. What the server says of it comes through the stream.

        `handoff` False asks for the first token only. Raises `InvalidRequest` for ids that are no uint32,
        or a `request_id` that is live here, and `WireError` when too much waits to be sent.
        """
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._streams:
            raise InvalidRequest("request_id", f"{request_id!r} is live already")
        message = Submit(
            request_id,
            _pack_prompt(prompt_ids),
            peer=self._peer if handoff else None,
            sampling=sampling or SamplingParams(),
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            grammar=grammar,
            timeouts=timeouts or Timeouts(),
            priority=priority,
            deadline_s=deadline_s,
        )
        decode_endpoint = self._endpoints.get("decode") if handoff else None
        try:
            if decode_endpoint is not None:
                self._connection("decode").send(Attach(request_id))  # first, so that no token is missed
            self._connection("prefill").send(message)
        except AioprefillError:
            self._tell_servers(request_id, has_decode=decode_endpoint is not None)
            raise
        stream = TokenStream(
            request_id, max_new_tokens=max_new_tokens, decode_endpoint=decode_endpoint, abort=self._abort
        )
        self._streams[request_id] = stream
        return stream

    async def ping(self, side: Side = "prefill") -> float:
        """Seconds of a round trip through the server's loop. Raises `WireError` when no answer comes."""
        start = time.perf_counter()
        await self._ask(side, Ping(self._epoch), Pong)
        return time.perf_counter() - start

    async def stats(self, side: Side = "prefill") -> dict[str, int | float | str]:
        """The server's statistics. Raises `WireError` when no answer comes."""
        answer: Stats = await self._ask(side, StatsQuery(), Stats)
        return answer.values

    async def _ask(self, side: Side, question: Message, answer: type[Message]) -> Any:
        """Answers come in the order of the questions. One that is given up keeps its place in the queue."""
        waiting = self._questions.setdefault((side, answer), deque())
        if len(waiting) >= MAX_QUESTIONS:
            raise WireError(f"{self._endpoints[side]}: {MAX_QUESTIONS} questions wait for answers already")
        connection = self._connection(side)
        await connection.wait_ready()  # has its own timeout, and a better message
        connection.send(question)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting.append(future)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError:
            text = f"no answer from {self._endpoints[side]} within {self._timeout_s:g} s"
            raise WireError(f"{text}: the server is connected, but busy or stuck") from None

    async def _send_control(self, message: Control) -> None:
        connection = self._connection("prefill")
        await connection.wait_ready()  # has its own timeout, and a better message
        connection.send(message)

    def _connection(self, side: Side) -> Connection:
        if self._context is None:
            raise WireError("the client is not open: use `async with PairClient(...)`")
        try:
            return self._connections[side]
        except KeyError:
            raise ConfigError("this client has no decode worker: give decode_endpoint") from None

    def _abort(self, stream: TokenStream) -> None:
        """Tell both servers, and end here and now: nobody waits for a server to agree."""
        stream.fail_aborted()
        self._give_up(stream)

    def _give_up(self, stream: TokenStream) -> None:
        self._streams.pop(stream.request_id, None)
        self._tell_servers(stream.request_id, has_decode=stream.has_decode)

    def _tell_servers(self, request_id: str, *, has_decode: bool) -> None:
        for side, connection in self._connections.items():
            if side == "prefill" or has_decode:
                connection.send_if_open(Abort(request_id))

    def _on_message(self, side: Side, message: Message) -> None:
        waiting = self._questions.get((side, type(message)))
        if waiting is not None:
            if waiting:
                _answer(waiting.popleft(), message)
            return
        if self._control.on_message(message):
            return
        stream = self._streams.get(getattr(message, "request_id", None) or "")
        if stream is None:
            return  # it ended here already
        if isinstance(message, Failed):
            self._fail(stream, error_from(message))
            return
        try:
            stream.on_message(message)
        except WireError as err:
            self._fail(stream, err)
            return
        if stream.prefill_done and stream.decode_done:
            del self._streams[stream.request_id]

    def _fail(self, stream: TokenStream, error: AioprefillError) -> None:
        """One half failed: the other one is of no use, and its server is told."""
        stream.fail(error)
        self._give_up(stream)

    def _on_lost(self, side: Side, error: WireError) -> None:
        for (of, _), waiting in self._questions.items():
            while of == side and waiting:
                future = waiting.popleft()
                if not future.done():
                    future.set_exception(error)
        if side == "prefill":
            self._control.fail(error)
        for stream in list(self._streams.values()):
            if side == "prefill":
                waits = not stream.prefill_done
            else:
                waits = stream.has_decode and not stream.decode_done
            if waits:
                self._fail(stream, error)


def _answer(future: asyncio.Future[Any], message: Message) -> None:
    if not future.done():
        future.set_result(message)


def _pack_prompt(prompt_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    try:
        return pack_ids(prompt_ids)
    except (OverflowError, TypeError, ValueError) as err:
        raise InvalidRequest("prompt", f"token ids must be integers within 0..2**32-1: {err}") from err
