"""Decode workers are killed and stopped at each stage of 100 concurrent requests.

One prefill process outlives them all. What a stage is, is read off the messages that the client gets.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from aioprefill.bench.soak_book import Book
from aioprefill.bench.soak_cases import Case, make_cases
from aioprefill.config import EngineConfig
from aioprefill.errors import PeerError, WireError
from aioprefill.native.load import load_engine
from aioprefill.pair import LOOPBACK, ServerProcess
from aioprefill.wire.client import PairClient
from aioprefill.wire.messages import Accepted, FirstToken, Message, Token

REQUESTS = 100
LEASE_S = 1.5
LIMIT_S = 60.0
STAGES = ("handshake", "prefill", "transfer", "decoding")
MESSAGE_OF = {
    "handshake": (Accepted, REQUESTS),
    "prefill": (FirstToken, 30),
    "transfer": (FirstToken, 1),
    "decoding": (Token, 300),
}
"""Which message, and how many of it, shows that a stage is reached."""


class WatchingClient(PairClient):
    """Books every message, then calls `on_message(message)`."""

    def __init__(self, book: Book, prefill: str, decode: str, watch: Callable[[Message], None]) -> None:
        super().__init__(prefill, decode, timeout_s=30.0)
        self.book = book
        self.watch = watch

    def _on_message(self, side: Literal["prefill", "decode"], message: Message) -> None:
        self.book.heard(side, message)
        super()._on_message(side, message)
        self.watch(message)


class Round:
    """100 requests to one worker, which gets `number` (a signal) when `stage` is reached."""

    def __init__(
        self, prefill: ServerProcess, worker: ServerProcess, cases: list[Case], stage: str, number: int
    ) -> None:
        self.book = Book()
        self.hit = asyncio.Event()
        self.client = WatchingClient(self.book, prefill.endpoint, worker.endpoint, self._watch)
        self._worker = worker
        self._cases = cases
        self._stage = stage
        self._number = number
        self._accepted = self._seen = 0

    def _watch(self, message: Message) -> None:
        """Act in the very turn in which the stage shows."""
        self._accepted += isinstance(message, Accepted)
        if isinstance(message, Accepted) and self._accepted == REQUESTS and self._stage != "handshake":
            self._worker.signal(signal.SIGCONT)
        kind, count = MESSAGE_OF[self._stage]
        self._seen += isinstance(message, kind)
        if self._seen >= count and not self.hit.is_set():
            self._act()

    def _act(self) -> None:
        self._worker.signal(self._number)
        self.at = {
            "accepted": sum(s.times.accepted_s is not None for s in self.streams),
            "prefilled": sum(s.times.first_token_s is not None for s in self.streams),
            "transferring": sum(
                s.times.first_token_s is not None and not s.prefill_done for s in self.streams
            ),
            "decoding": sum(bool(s.times.tokens_s) and not s.decode_done for s in self.streams),
        }
        self.hit.set()

    def _check_stage(self) -> None:
        """The signal came when it was meant to."""
        at = self.at
        assert at["accepted"] == REQUESTS, at
        if self._stage == "handshake":
            assert at["prefilled"] == 0, at
        elif self._stage == "decoding":
            assert at["decoding"] > 0, at
        elif self._stage == "transfer":
            assert at["transferring"] == at["prefilled"] > 0 and at["decoding"] == 0, at
        else:
            assert 0 < at["prefilled"] < REQUESTS, at

    async def begin(self) -> None:
        """Submit; returns when the worker has got its signal.

        The worker is stopped until all are accepted, so that they are concurrent: no handshake ends before.
        A transfer is held up: the forwards wait until the worker has reserved pages for all and is stopped
        again, so no KV can have arrived when the first token comes.
        """
        self._worker.signal(signal.SIGSTOP)
        if self._stage == "transfer":
            await self.client.pause("in_place")
        self.streams = []
        for index in range(REQUESTS):
            case = self._cases[index % len(self._cases)]
            name = f"{self._stage}-{index}"
            self.book.opened(name, case, handoff=True)
            self.streams.append(
                self.client.submit(
                    case.prompt,
                    request_id=name,
                    sampling=case.sampling,
                    max_new_tokens=case.max_new_tokens,
                    ignore_eos=case.ignore_eos,
                )
            )
        async with asyncio.timeout(LIMIT_S):
            if self._stage == "transfer":
                while (await self.client.stats("decode"))["rooms_reserved"] < REQUESTS:
                    pass
                self._worker.signal(signal.SIGSTOP)
                await self.client.resume()
            await self.hit.wait()
        self._check_stage()

    async def outcomes(self) -> int:
        """Each request's one outcome: right tokens, or an error that tells of the peer. How many failed."""
        failed = 0
        async with asyncio.timeout(LIMIT_S):
            for stream in self.streams:
                try:
                    tokens = [token async for token in stream]
                    await stream.transferred()
                    self.book.finished(stream.request_id, tokens)
                except (PeerError, WireError) as error:
                    assert "decode peer" in str(error) or self._worker.endpoint in str(error), error
                    failed += 1
        assert not any(self.book.faults.values()), self.book.examples
        assert self.book.counts["finished"] + failed == REQUESTS and self.client.live == 0
        return failed


class Bench:
    """The prefill process, known answers, and fresh workers that start while others run."""

    def __init__(self, prefill: ServerProcess, cases: list[Case], options: tuple[str, ...]) -> None:
        self.prefill = prefill
        self.cases = cases
        self._options = options
        self.workers: list[ServerProcess] = []
        self._next: ServerProcess | None = None

    async def worker(self, *, last: bool = False) -> ServerProcess:
        """A fresh, ready worker at a fresh endpoint; the one after it begins to load."""
        worker, self._next = self._next or await self._start(), None
        await worker.wait_ready()
        self._next = None if last else await self._start()
        return worker

    async def _start(self) -> ServerProcess:
        worker = await ServerProcess.start("decode", "--listen", LOOPBACK, *self._options)
        self.workers.append(worker)
        return worker

    async def until_held(self, *, none: bool) -> None:
        """Wait until no page is held on the prefill side, or look that some are."""
        async with PairClient(self.prefill.endpoint, timeout_s=30) as client, asyncio.timeout(LIMIT_S):
            stats = await client.stats()
            while none and (stats["pages_held"] or stats["open_requests"]):
                stats = await client.stats()
            assert none or stats["pages_held"], stats

    async def serves(self, worker: ServerProcess) -> None:
        """Right tokens by way of this worker, which then holds nothing."""
        async with PairClient(self.prefill.endpoint, worker.endpoint, timeout_s=30) as client:
            async with asyncio.timeout(LIMIT_S):
                for case in self.cases[:6]:
                    stream = client.submit(
                        case.prompt,
                        sampling=case.sampling,
                        max_new_tokens=case.max_new_tokens,
                        ignore_eos=case.ignore_eos,
                    )
                    assert [token async for token in stream] == list(case.tokens)
                while (stats := await client.stats("decode"))["pages_free"] != stats["pages"]:
                    pass


@pytest.fixture(scope="module")
def answers(tiny_llama: Path) -> list[Case]:
    """Known answers, from an engine of this process."""

    async def make() -> list[Case]:
        engine = load_engine(
            EngineConfig(model=str(tiny_llama), dtype="float32", kv_memory=4 << 20, threads=1)
        )
        cases = await make_cases(engine, random.Random(5), prompts=10, longest=400)
        await engine.aclose()
        return cases

    return asyncio.run(make())


@asynccontextmanager
async def bench(tiny_llama: Path, answers: list[Case]) -> AsyncIterator[Bench]:
    """Ends with the prefill process told to stop: it must have outlived everything.

    Without a prefix cache, so that the prompts take some hundred forwards: a signal comes while most wait.
    """
    options = ("--model", str(tiny_llama), "--dtype", "fp32", "--kv-memory", "16MiB", "--threads", "1")
    options += ("--lease-s", str(LEASE_S))
    prefill = await ServerProcess.start(
        "serve", "--listen", LOOPBACK, "--chunk-tokens", "128", "--no-prefix-cache", *options
    )
    world = Bench(prefill, answers, options)
    try:
        await prefill.wait_ready()
        yield world
        assert await prefill.stop() == 0
    finally:
        for worker in world.workers:
            worker.signal(signal.SIGKILL)
            await worker.stop()
        await prefill.stop()


def tell(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Show what the rounds met."""
    with capsys.disabled():
        print(f"\n  {text}", end="")


@pytest.mark.asyncio
async def test_T2_a_worker_killed_at_any_stage_costs_its_own_requests_only(
    tiny_llama: Path, answers: list[Case], capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL: one outcome each, every page back, and the next, fresh worker is served right tokens."""
    async with bench(tiny_llama, answers) as b:
        for stage in STAGES:
            worker = await b.worker()
            await b.serves(worker)
            async with (r := Round(b.prefill, worker, answers, stage, signal.SIGKILL)).client:
                await r.begin()
                failed = await r.outcomes()
            assert failed > 0, stage
            tell(capsys, f"killed at {stage}: {r.at}, {failed} failed")
            assert await worker.wait() == -signal.SIGKILL
            await b.until_held(none=True)
        await b.serves(await b.worker(last=True))


@pytest.mark.asyncio
async def test_T2_T3_a_worker_stopped_at_any_stage_keeps_its_pages_until_it_runs_or_is_dead(
    tiny_llama: Path, answers: list[Case], capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGSTOP: requests fail by the lease, pages being written stay held; SIGCONT or SIGKILL frees them."""
    async with bench(tiny_llama, answers) as b:
        worker = await b.worker()
        for stage, end in (*((stage, signal.SIGCONT) for stage in STAGES), ("transfer", signal.SIGKILL)):
            async with (r := Round(b.prefill, worker, answers, stage, signal.SIGSTOP)).client:
                await r.begin()
                async with asyncio.timeout(LIMIT_S):
                    await asyncio.gather(*(s.transferred() for s in r.streams), return_exceptions=True)
                if stage == "transfer":
                    await b.until_held(none=False)
                worker.signal(end)
                failed = await r.outcomes()
            assert failed > 0 or stage == "decoding", stage
            tell(capsys, f"stopped at {stage}, then {end.name}: {r.at}, {failed} failed")
            await b.until_held(none=True)
            if end is signal.SIGCONT:
                await b.serves(worker)
        assert await worker.wait() == -signal.SIGKILL
        await b.serves(await b.worker(last=True))
