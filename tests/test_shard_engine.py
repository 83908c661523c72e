"""Shards put together: on a real pool against a plain permutation, and by the decode worker in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_support import load, run

from aioprefill.decode.streams import Streams
from aioprefill.decode.worker import DecodeWorker
from aioprefill.engine.assemble import assemble
from aioprefill.engine.kv_pool import KVPool
from aioprefill.engine.port import SampledToken, Span
from aioprefill.errors import DeviceError, HostError
from aioprefill.kv_layout import KVLayout
from aioprefill.sampling_params import SamplingParams
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine, fake_spec
from aioprefill.transfer.port import Handoff
from aioprefill.wire.messages import Token

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ),
]
GREEDY = SamplingParams(logprobs=3)
TOKENS = np.random.default_rng(3).integers(0, 500, 40).astype(np.uint32)


def in_shards(whole: torch.Tensor, shards: int) -> torch.Tensor:
    """Pages (n, layers, 2, page_size, kv_heads, head_dim) as ranks write them: (n, bytes of a page)."""
    parts = [part.contiguous().flatten(1) for part in whole.chunk(shards, dim=4)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("scratch_pages", [0, 1, 2, 100])
def test_pages_are_put_in_order_in_blocks_and_no_other_page_is_touched(
    device: str, dtype: str, shards: int, scratch_pages: int
) -> None:
    """Every byte of the pool, for pages in any order, in blocks that do and do not divide them."""
    layout = KVLayout("x", layers=3, kv_heads=4, head_dim=8, page_size=4, dtype=dtype)
    pool = KVPool(layout, 9, device)
    pool.storage.copy_(torch.randn(pool.storage.shape, generator=torch.Generator().manual_seed(1)))
    wanted = pool.storage.clone()
    pages = torch.tensor([7, 0, 3, 8, 4])
    pool.storage[pages] = in_shards(wanted[pages], shards).view(5, *pool.storage.shape[1:])
    assert not torch.equal(pool.storage, wanted)
    assemble(pool.storage, pages.to(device), shards, scratch_bytes=scratch_pages * layout.page_bytes)
    assert torch.equal(pool.storage, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_a_forward_launched_behind_the_assembly_finds_whole_pages(tiny_llama: Path, device: str) -> None:
    """Nothing waits in between: shards written, assembly queued, the next token as without shards."""
    engine = load(tiny_llama, device=device)
    table = np.array([3, 1, 2], dtype=np.int32)
    (token,) = run(engine, [Span(TOKENS, 0, table, GREEDY)])
    assert token is not None
    follow = Span(np.array([token.token_id], dtype=np.uint32), 40, table, GREEDY)
    (expected,) = run(engine, [follow])
    storage, rows = engine.pool.storage, torch.from_numpy(table).long().to(device)

    def write_as_shards() -> None:
        storage[rows] = in_shards(storage[rows], 2).view(3, *storage.shape[1:])
        if device == "cuda":
            torch.cuda.synchronize()

    write_as_shards()
    assembled = engine.assemble_pages(table, 2)
    forward = engine.launch([follow])
    forward.completion.synchronize()
    (found,) = forward.outputs()
    assert assembled.result(10) is None
    write_as_shards()
    (garbled,) = run(engine, [follow])
    assert found == expected and garbled != expected
    with pytest.raises(ValueError, match="2 KV heads cannot come in 3 shards"):
        engine.assemble_pages(table, 3)
    engine.close()
    with pytest.raises(HostError):
        engine.assemble_pages(table, 2)


def test_forwards_fail_after_pages_that_could_not_be_assembled(tiny_llama: Path) -> None:
    """For they count on these pages: a sticky error, which stops the process, not a wrong token."""
    engine = load(tiny_llama)
    assembled = engine.assemble_pages(np.array([1 << 20], dtype=np.int32), 2)
    forward = engine.launch([Span(TOKENS, 0, np.array([0, 1, 2], dtype=np.int32), GREEDY)])
    with pytest.raises(DeviceError, match=r"kvAssembleFailed.*could not be assembled"):
        assembled.result(10)
    with pytest.raises(DeviceError) as caught:
        forward.completion.synchronize()
    assert caught.value.sticky
    engine.close()


def make_worker(new: int) -> tuple[FakeEngine, DecodeWorker, list[object], Handoff]:
    """A worker on a fake device with four KV heads, and a hand-off of 20 tokens."""
    spec = fake_spec(context_length=512)
    layout = KVLayout("fake", layers=1, kv_heads=4, head_dim=1, page_size=16, dtype="float32")
    engine = FakeEngine(num_pages=8, duration_s=1.0, spec=type(spec)("fake", 1000, 512, (), layout))
    sent: list[object] = []
    streams = Streams(lambda reader, message: sent.append(message), lambda room: worker.drop(room))
    worker = DecodeWorker(engine, streams, max_batch_requests=4)
    streams.attach(b"reader", "r")
    return engine, worker, sent, Handoff("r", "prefill", 20, 2, SamplingParams(), new)


@virtual_time
async def test_the_worker_has_pages_assembled_ahead_of_the_first_step() -> None:
    """The prompt's pages, those alone, once; a room without shards is not assembled."""
    engine, worker, sent, handoff = make_worker(new=20)
    for shards in (2, 1):
        pages = worker.reserve(handoff)
        assert pages is not None
        if shards == 2:
            worker.arrived("r", pages, SampledToken(7, -0.1), handoff, shards)
            assert [(at, n) for at, n, _ in engine.assemblies] == [(pages, 2)] and not engine.forwards
        else:
            worker.arrived("r", pages, SampledToken(7, -0.1), handoff)
        running = asyncio.ensure_future(worker.run())
        await asyncio.wait_for(worker.wait_idle(), 60)
        running.cancel()
        await asyncio.wait([running])
        assert worker.pool.free == 8 and len(engine.assemblies) == 1
    assert next(message.token_id for message in sent if isinstance(message, Token)) == 7


@virtual_time
async def test_T3_pages_that_the_device_still_puts_in_order_are_not_given_to_others() -> None:
    """A room that ends with its first token: its pages come back when the assembly is done."""
    engine, worker, _, handoff = make_worker(new=1)
    engine.assemblies_by_hand = True
    freed: list[int] = []
    worker.on_pages_free = lambda: freed.append(worker.pool.free)
    pages = worker.reserve(handoff)
    assert pages is not None
    worker.arrived("r", pages, SampledToken(7, -0.1), handoff, 4)
    await settle()
    assert worker.pool.free == 6 and freed == []
    engine.assemblies[0][2].set_result(None)
    await settle()
    assert worker.pool.free == 8 and freed == [8]


@virtual_time
async def test_a_room_that_nobody_reads_is_not_assembled() -> None:
    """Its pages come back at once."""
    engine, worker, _, handoff = make_worker(new=9)
    pages = worker.reserve(handoff)
    assert pages is not None
    worker.drop("r")
    worker.arrived("r", pages, SampledToken(7, -0.1), handoff, 2)
    assert engine.assemblies == [] and worker.pool.free == 8


def test_the_fake_engine_puts_shards_in_order_as_the_real_one_does() -> None:
    """On the bytes that stand for KV."""
    layout = KVLayout("x", layers=2, kv_heads=4, head_dim=2, page_size=4, dtype="float32")
    engine = FakeEngine(num_pages=3, spec=type(fake_spec())("x", 100, 100, (), layout))
    pool = KVPool(layout, 3)
    pool.storage.copy_(torch.randn(pool.storage.shape))
    engine.write_pages(np.arange(3), pool.storage.flatten(1).view(torch.uint8).numpy().copy())
    engine.assemble_pages(np.array([2, 0], dtype=np.int32), 2).result()
    assemble(pool.storage, torch.tensor([2, 0]), 2)
    found = engine.read_pages(np.arange(3)).result().blocks()
    assert np.array_equal(found, pool.storage.flatten(1).view(torch.uint8).numpy())
    with pytest.raises(ValueError, match="3 shards"):
        engine.assemble_pages(np.array([0], dtype=np.int32), 3)
