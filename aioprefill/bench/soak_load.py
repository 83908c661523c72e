"""The soak's load: clients, and requests that are read, aborted or cut off."""

from __future__ import annotations

import asyncio
import random
from typing import Literal

from aioprefill.bench.soak_book import Book
from aioprefill.bench.soak_cases import Case
from aioprefill.errors import AioprefillError, PeerError, QueueFull, RequestAborted, WireError
from aioprefill.wire.client import PairClient
from aioprefill.wire.messages import Message
from aioprefill.wire.stream import TokenStream

OUTCOME_WITHIN_S = 60.0
"""A request without an outcome for so long is lost."""
PAUSE_REASON = "aborted by a pause"


class WatchedClient(PairClient):
    """A client whose every message is booked."""

    def __init__(self, book: Book, prefill_endpoint: str, decode_endpoint: str) -> None:
        super().__init__(prefill_endpoint, decode_endpoint, timeout_s=30.0)
        self._book = book
        self.cut = False
        """We close it while requests are live."""

    def _on_message(self, side: Literal["prefill", "decode"], message: Message) -> None:
        self._book.heard(side, message)
        super()._on_message(side, message)


class Load:
    """`workers` readers with pauses between their requests, over `clients` connections."""

    def __init__(
        self, book: Book, cases: list[Case], endpoints: tuple[str, str], rng: random.Random, *, clients: int
    ) -> None:
        self._book = book
        self._cases = cases
        self._endpoints = endpoints
        self._rng = rng
        self._clients: list[WatchedClient] = []
        self._wanted = clients
        self._number = 0
        self.live = 0
        """Requests without an outcome."""
        self.abort_marks = 0
        """Begins and answers of pauses in mode abort: odd while one may end any request."""

    async def connect(self) -> None:
        """Open the clients."""
        while len(self._clients) < self._wanted:
            client = WatchedClient(self._book, *self._endpoints)
            await client.__aenter__()
            self._clients.append(client)

    async def disconnect(self) -> None:
        """Close all clients."""
        clients, self._clients = self._clients, []
        for client in clients:
            client.cut = True
            await client.aclose()

    async def cut_one(self) -> None:
        """Close a client with what it has under way, without a word to the servers; open another one."""
        client = self._clients.pop(self._rng.randrange(len(self._clients)))
        client.cut = True
        self._book.counts["disconnects"] += 1
        self._book.counts["cut_requests"] += client.live
        await client.aclose()
        await self.connect()

    async def worker(self, stop: asyncio.Event, think_s: float) -> None:
        """Requests one after the other, until `stop`; returns when the last one has its outcome."""
        while not stop.is_set():
            await self._one()
            await asyncio.sleep(self._rng.expovariate(1 / think_s))

    async def _one(self) -> None:
        if not self._clients:  # the only one is being replaced
            return
        rng, client = self._rng, self._rng.choice(self._clients)
        case = rng.choice(self._cases)
        self._number += 1
        request_id, handoff = f"soak-{self._number}", rng.random() > 0.05
        self._book.opened(request_id, case, handoff=handoff)
        started = self.abort_marks
        self.live += 1
        try:
            async with asyncio.timeout(OUTCOME_WITHIN_S):
                await self._read(client, request_id, case, handoff)
        except TimeoutError:
            self._book.fault("lost", f"{request_id}: no outcome within {OUTCOME_WITHIN_S:g} s")
        except AioprefillError as error:
            self._book.counts[self._reason(client, request_id, error, started)] += 1
        finally:
            self.live -= 1

    async def _read(self, client: WatchedClient, request_id: str, case: Case, handoff: bool) -> None:
        """Read a request to its end, or abort it at some point."""
        rng = self._rng
        stream = client.submit(
            case.prompt,
            request_id=request_id,
            sampling=case.sampling,
            max_new_tokens=case.max_new_tokens,
            ignore_eos=case.ignore_eos,
            handoff=handoff,
        )
        abort_after = rng.randint(0, case.max_new_tokens) if rng.random() < 0.1 else None
        timer = None
        if rng.random() < 0.1:
            timer = asyncio.get_running_loop().call_later(rng.expovariate(1 / 0.03), _abort, stream)
        try:
            tokens: list[int] = []
            async for token in stream:
                tokens.append(token)
                if len(tokens) == abort_after:
                    _abort(stream)
            await stream.transferred()
            self._book.finished(request_id, tokens)
        finally:
            if timer is not None:
                timer.cancel()

    def _reason(self, client: WatchedClient, request_id: str, error: AioprefillError, started: int) -> str:
        """Who ended the request. An end that nobody caused counts as lost."""
        if client.cut and isinstance(error, WireError):
            return "disconnected"
        if isinstance(error, RequestAborted) and "by the caller" in str(error):
            return "aborted"
        pausing = started % 2 or self.abort_marks > started
        if pausing and isinstance(error, RequestAborted | PeerError) and PAUSE_REASON in str(error):
            return "aborted_by_pause"
        if isinstance(error, QueueFull):
            return "refused"
        self._book.fault("lost", f"{request_id}: {type(error).__name__}: {error}")
        return "failed"


def _abort(stream: TokenStream) -> None:
    if not (stream.prefill_done and stream.decode_done):
        stream.abort()
