"""One request as its client sees it: the prefill half (first token, hand-off) and the decode half (tokens).

Each half ends once, with its result or an error, and neither waits for the other.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from aioprefill.errors import AioprefillError, RequestAborted, WireError
from aioprefill.wire.messages import Accepted, Finished, FirstToken, Message, Token, Transferred

T = TypeVar("T")


@dataclass(slots=True)
class StreamTimes:
    """When things arrived here, seconds of `time.monotonic`; None: not yet."""

    submitted_s: float
    accepted_s: float | None = None
    first_token_s: float | None = None
    transferred_s: float | None = None
    tokens_s: list[float] = field(default_factory=list)
    """One entry per token of the decode worker."""
    finished_s: float | None = None


class TokenStream:
    """A submitted request. Made by `PairClient.submit`.

    `async for token_id in stream` gives the generated token ids: all of them from the decode worker,
    number 0 included. Without a decode worker that is the first token alone. It raises the request's error
    as soon as there is one; tokens that arrived before come first. One iteration at a time.
    """

    def __init__(
        self,
        request_id: str,
        *,
        max_new_tokens: int,
        decode_endpoint: str | None,
        abort: Callable[[TokenStream], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.request_id = request_id
        self.has_decode = decode_endpoint is not None
        """Tokens come from a decode worker; else the first token is the whole stream."""
        self.times = StreamTimes(time.monotonic())
        self._max_new_tokens = max_new_tokens
        self._abort = abort
        self._decode_endpoint = decode_endpoint
        self._first: asyncio.Future[FirstToken] = loop.create_future()
        self._transferred: asyncio.Future[Transferred] = loop.create_future()
        self._finished: asyncio.Future[Finished] = loop.create_future()
        for future in (self._first, self._transferred, self._finished):
            future.add_done_callback(_consume)
        self._tokens: deque[int] = deque()
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        prefill, decode = ("done" if done else "live" for done in (self.prefill_done, self.decode_done))
        tokens = len(self.times.tokens_s)
        return f"<TokenStream {self.request_id} tokens={tokens} prefill={prefill} decode={decode}>"

    @property
    def prefill_done(self) -> bool:
        """The prefill server has said its last word about the request."""
        return self._transferred.done()

    @property
    def decode_done(self) -> bool:
        """The decode worker has, too; or the request failed."""
        return self._finished.done()

    async def first_token(self) -> FirstToken:
        """The first token as the prefill server reports it. Raises the request's error.

        Cancelling the wait leaves the request be; so for the other waits.
        """
        return await asyncio.shield(self._first)

    async def transferred(self) -> Transferred:
        """Returns when all KV is with the decode worker. Raises the request's error."""
        return await asyncio.shield(self._transferred)

    async def finished(self) -> Finished:
        """Returns when the last token is here, read or not. Raises the request's error."""
        return await asyncio.shield(self._finished)

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        while not self._tokens:
            if self._finished.done():
                self._finished.result()  # raises the request's error
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._tokens.popleft()

    def abort(self) -> None:
        """Give the request up; it ends at once with `RequestAborted`. Does nothing when it has ended."""
        if not (self.prefill_done and self.decode_done):
            self._abort(self)

    # What follows is for the client that owns the stream.

    def on_message(self, message: Message) -> None:
        """Take an answer; others are ignored. Raises `WireError` for tokens out of order or missing."""
        now = time.monotonic()
        if isinstance(message, Token):
            self._on_token(message, now)
        elif isinstance(message, Finished):
            self._on_finished(message, now)
        elif isinstance(message, Accepted):
            self.times.accepted_s = now
        elif isinstance(message, FirstToken):
            self._on_first(message, now)
        elif isinstance(message, Transferred):
            self.times.transferred_s = now
            _settle(self._transferred, message)

    def _on_first(self, message: FirstToken, now: float) -> None:
        self.times.first_token_s = now
        _settle(self._first, message)
        if not self.has_decode:
            self._on_token(Token(self.request_id, 0, message.token_id), now)
            self._on_finished(Finished(self.request_id, "length", 1), now)

    def _on_token(self, message: Token, now: float) -> None:
        if self._finished.done():
            return
        expected = len(self.times.tokens_s)
        if message.index != expected or expected >= self._max_new_tokens:
            text = f"sent token {message.index} where number {expected} of {self._max_new_tokens} was due"
            raise WireError(f"{self._decode_endpoint}: the decode worker {text}")
        self.times.tokens_s.append(now)
        self._tokens.append(message.token_id)
        self._news.set()

    def _on_finished(self, message: Finished, now: float) -> None:
        if self._finished.done():
            return
        if message.tokens != len(self.times.tokens_s):
            text = f"{len(self.times.tokens_s)} of {message.tokens} tokens arrived"
            raise WireError(f"{self._decode_endpoint}: {text}")
        self.times.finished_s = now
        _settle(self._finished, message)
        self._news.set()

    def fail(self, error: AioprefillError) -> None:
        """End what has not ended with `error`."""
        for future in (self._first, self._transferred, self._finished):
            if not future.done():
                future.set_exception(error)
        self._news.set()

    def fail_aborted(self) -> None:
        """End with `RequestAborted`."""
        self.fail(RequestAborted(f"request {self.request_id} was aborted by the caller"))


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _consume(future: asyncio.Future[T]) -> None:
    """Mark the exception as seen: a caller need not wait for every half."""
    if not future.cancelled():
        future.exception()
