"""Rows that are also run on the native host with a real model, in one process: C1, T5, A1, L1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import Reference, compare

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.decode.streams import Streams
from aioprefill.decode.worker import DecodeWorker
from aioprefill.engine.model_files import ResolvedModel
from aioprefill.engine.port import SampledToken
from aioprefill.engine.transformers_engine import TransformersEngine
from aioprefill.errors import RequestAborted
from aioprefill.native.host import NativeHost
from aioprefill.request import PrefillHandle, PrefillRequest
from aioprefill.scheduler import PrefillScheduler
from aioprefill.transfer.in_process import InProcessPeer, InProcessTransfer
from aioprefill.transfer.port import Handoff
from aioprefill.wire.messages import Finished, Message, Token

PAGE = 16
NEW_TOKENS = 6


class Recorder(DecodeWorker):
    """A decode worker that remembers the pages of each room as they arrived."""

    arrived_kv: dict[str, torch.Tensor]
    storage: torch.Tensor

    def arrived(self, room: str, pages: list[int], first: SampledToken, handoff: Handoff) -> None:
        """Copy the pages, shape (pages, layers, 2, page_size, kv_heads, head_dim)."""
        self.arrived_kv[room] = self.storage[torch.tensor(pages)].clone()
        super().arrived(room, pages, first, handoff)


@dataclass
class RealWorld:
    """A scheduler and a decode worker with real models, and what the worker streamed."""

    scheduler: PrefillScheduler
    host: NativeHost
    worker: Recorder
    streams: Streams
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, asyncio.Event] = field(default_factory=dict)

    def submit(self, prompt: np.ndarray, name: str) -> PrefillHandle:
        """A request that the worker continues."""
        self.tokens[name], self.finished[name] = [], asyncio.Event()
        self.streams.attach(b"reader", name)
        request = PrefillRequest(
            prompt, request_id=name, peer="decoder", max_new_tokens=NEW_TOKENS, ignore_eos=True
        )
        return self.scheduler.submit(request)


def load(folder: Path) -> TransformersEngine:
    """The model of a folder, fp32, with 64 MiB of KV."""
    return TransformersEngine.load(
        folder,
        name="m",
        fingerprint="f",
        dtype="float32",
        page_size=PAGE,
        kv_memory_bytes=64 << 20,
        threads=2,
    )


@asynccontextmanager
async def real_world(folder: Path, chunk_tokens: int) -> AsyncIterator[RealWorld]:
    """At the end no page is held on either side."""
    prefill, decode = load(folder), load(folder)

    def copy_pages(source: np.ndarray, target: np.ndarray) -> None:
        decode.pool.storage[torch.from_numpy(target)] = prefill.pool.storage[torch.from_numpy(source)]

    def take(reader: bytes, message: Message) -> None:
        if isinstance(message, Token):
            world.tokens[message.request_id].append(message.token_id)
        elif isinstance(message, Finished):
            world.finished[message.request_id].set()

    streams = Streams(take, lambda room: worker.drop(room))
    worker = Recorder(decode, streams, max_batch_requests=8)
    worker.arrived_kv, worker.storage = {}, decode.pool.storage
    peer = InProcessPeer("decoder", decode.spec.layout, decode.num_pages, worker, copy_pages)
    worker.on_pages_free = peer.retry_reservations
    transfer = InProcessTransfer(prefill.spec.layout)
    transfer.add_peer(peer)
    host = NativeHost(prefill, transfer, NativeConfig(chunk_tokens=chunk_tokens))
    decoding = asyncio.create_task(worker.run())
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=20)) as scheduler:
        world = RealWorld(scheduler, host, worker, streams)
        yield world
        async with asyncio.timeout(20):
            await worker.wait_idle()
        host.memory.check()
        assert host.memory.pool.held == 0
    decoding.cancel()
    await asyncio.wait([decoding])
    worker.close(RequestAborted("the test ends"))
    streams.close()
    worker.pool.check()
    assert worker.pool.free == worker.pool.num_pages
    await decode.aclose()


def prompts(vocabulary: int, lengths: list[int], shared: int) -> list[np.ndarray]:
    """Random prompts, every other one with the same beginning."""
    generator = np.random.default_rng(7)
    beginning = generator.integers(0, vocabulary, shared)
    made = []
    for number, length in enumerate(lengths):
        tokens = generator.integers(0, vocabulary, length)
        if number % 2:
            tokens[: min(shared, length)] = beginning[: min(shared, length)]
        made.append(tokens)
    return made


async def check_kv_and_tokens(folder: Path, lengths: list[int], chunk_tokens: int) -> None:
    """Every page that arrives equals the reference's KV, and decoding on gives its tokens."""
    reference = Reference(folder)
    async with real_world(folder, chunk_tokens) as w:
        made = prompts(w.host.engine.spec.vocab_size, lengths, shared=100)
        first = w.submit(made[1], "warm")  # so that later ones find a prefix
        await first.wait_transferred()
        handles = {f"p{number}": w.submit(prompt, f"p{number}") for number, prompt in enumerate(made)}
        async with asyncio.timeout(60):
            for name, handle in handles.items():
                await handle.wait_transferred()
                await w.finished[name].wait()
        worst = 0.0
        for number, prompt in enumerate(made):
            name = f"p{number}"
            pages = w.worker.arrived_kv[name]
            layers, _, _, heads, dim = pages.shape[1:]
            got = pages.permute(1, 2, 0, 3, 4, 5).reshape(layers, 2, -1, heads, dim)[:, :, : len(prompt)]
            worst = max(worst, float((got - reference.kv(prompt.tolist())).abs().max()))
            answer = reference.generate(prompt.tolist(), NEW_TOKENS)
            assert compare(answer, w.tokens[name]) in ("same", "tie"), name
        assert worst < 1e-3, f"largest difference of a KV value: {worst}"
        stats = w.scheduler.stats()
        assert stats.max_in_flight == 2
        assert stats.flat()["cached_tokens"] > 0, "prefix pages were reused, and sent"


@pytest.mark.asyncio
async def test_T5_C1_kv_that_arrives_equals_a_single_process_run_tiny_llama(tiny_llama: Path) -> None:
    """Chunks of 64, shared prefixes, mixed batches; GQA."""
    await check_kv_and_tokens(tiny_llama, [1, 150, 33, 260, 16, 17, 300, 101], chunk_tokens=64)


@pytest.mark.asyncio
async def test_T5_C1_kv_that_arrives_equals_a_single_process_run_smollm2(
    embedded_model: ResolvedModel,
) -> None:
    """The embedded model in fp32."""
    await check_kv_and_tokens(embedded_model.path, [5, 130, 70, 200], chunk_tokens=96)


@pytest.mark.asyncio
async def test_A1_abort_in_any_state_on_the_real_host_leaks_nothing(tiny_llama: Path) -> None:
    """Aborts spread over the life of requests; each has one outcome, the others' tokens are right."""
    reference = Reference(tiny_llama)
    async with real_world(tiny_llama, chunk_tokens=64) as w:
        generator = np.random.default_rng(3)
        handles: dict[str, PrefillHandle] = {}
        made: dict[str, np.ndarray] = {}
        for number in range(40):
            name = f"r{number}"
            made[name] = generator.integers(0, 512, int(generator.integers(1, 300)))
            handles[name] = w.submit(made[name], name)
            if number % 2:
                victim = handles[f"r{int(generator.integers(0, number))}"]
                victim.abort("random")
            for _ in range(int(generator.integers(0, 30))):
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(
            *(handle.wait_transferred() for handle in handles.values()), return_exceptions=True
        )
        done = [
            name
            for name, outcome in zip(handles, outcomes, strict=True)
            if not isinstance(outcome, Exception)
        ]
        assert all(
            isinstance(outcome, RequestAborted) for outcome in outcomes if isinstance(outcome, Exception)
        )
        assert 0 < len(done) < 40
        for name in done:
            async with asyncio.timeout(30):
                await w.finished[name].wait()
            answer = reference.generate(made[name].tolist(), NEW_TOKENS)
            assert compare(answer, w.tokens[name]) in ("same", "tie"), name
