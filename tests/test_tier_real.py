"""The storage tier with a real model and a real directory: evict, restart, hit, same tokens."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from aioprefill.config import NativeConfig
from aioprefill.engine.model_files import resolve_model
from aioprefill.engine.transformers_engine import TransformersEngine
from aioprefill.native.host import NativeHost
from aioprefill.request import PrefillRequest, PrefillResult
from aioprefill.sampling_params import SamplingParams
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.models import make_tiny_llama

PAGE = 16
KV_MEMORY = 512 << 10
"""64 pages of the tiny model: prompts of 40 pages push each other out."""
LENGTH = 40 * PAGE + 5


@asynccontextmanager
async def serving(
    model: Path, tier: Path, *, fingerprint: str = "tiny", tier_size: int = 64 << 20
) -> AsyncIterator[tuple[PrefillScheduler, NativeHost]]:
    """A fresh engine, host and scheduler, as after a restart."""
    engine = await asyncio.to_thread(
        lambda: TransformersEngine.load(
            model,
            name="tiny",
            fingerprint=fingerprint,
            dtype="float32",
            page_size=PAGE,
            kv_memory_bytes=KV_MEMORY,
            threads=1,
        )
    )
    config = NativeConfig(chunk_tokens=256, tier_dir=tier, tier_size=tier_size)
    host = NativeHost(engine, None, config)
    async with asyncio.timeout(60):
        async with PrefillScheduler(host) as scheduler:
            while not host.tier.saver.usable:  # type: ignore[union-attr]  # noqa: ASYNC110  a condition, bounded above
                await asyncio.sleep(0.001)
            yield scheduler, host
        host.memory.check()
        assert host.memory.pool.held == 0


def prompt(seed: int) -> np.ndarray:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, 500, LENGTH)


async def run(scheduler: PrefillScheduler, tokens: np.ndarray) -> PrefillResult:
    """One greedy token with the five likeliest."""
    return await scheduler.submit(PrefillRequest(tokens, sampling=SamplingParams(logprobs=5)))


def same(one: PrefillResult, two: PrefillResult) -> bool:
    """The same token, and logits that differ by rounding at most."""
    ids = [token for token, _ in one.top_logprobs] == [token for token, _ in two.top_logprobs]
    close = np.allclose([p for _, p in one.top_logprobs], [p for _, p in two.top_logprobs], atol=1e-4)
    return one.token_id == two.token_id and ids and bool(close)


async def evict(scheduler: PrefillScheduler, host: NativeHost) -> None:
    """Push earlier prompts out of the pool, and wait until they are on disk."""
    for seed in (100, 101):
        await run(scheduler, prompt(seed))
    while host.tier.saver.busy:  # type: ignore[union-attr]  # noqa: ASYNC110  a condition, bounded by the world
        await asyncio.sleep(0.001)


@pytest.mark.asyncio
async def test_a_restart_finds_evicted_prefixes_and_gives_the_same_tokens(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Evicted in one process's life, read in the next, in the same life too; then damaged on disk."""
    tier = tmp_path / "tier"
    async with serving(tiny_llama, tier) as (scheduler, host):
        fresh = await run(scheduler, prompt(1))
        assert fresh.cached_tokens == 0
        await evict(scheduler, host)
        again = await run(scheduler, prompt(1))
        assert again.cached_tokens == 40 * PAGE and same(again, fresh)
        await evict(scheduler, host)
    files = list(tier.glob("*.safetensors"))
    assert len(files) >= 80
    async with serving(tiny_llama, tier) as (scheduler, host):
        restarted = await run(scheduler, prompt(1))
        assert restarted.cached_tokens == 40 * PAGE and same(restarted, fresh)
        stats = host.stats()
        assert stats["tier_hits"] == 40 and stats["tier_errors"] == 0
        assert stats["tier_pages"] == len(files)
    for path in files:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    async with serving(tiny_llama, tier) as (scheduler, host):
        damaged = await run(scheduler, prompt(1))
        assert same(damaged, fresh) and damaged.cached_tokens == 0
        assert host.stats()["tier_errors"] == 1
    assert len(list(tier.glob("*.safetensors"))) == len(files) - 1, "the damaged one that was met is removed"


@pytest.mark.asyncio
async def test_other_weights_never_use_a_tier_of_these(tiny_llama: Path, tmp_path: Path) -> None:
    """A server of other weights on the same directory; and an update of the weights, to and from."""
    tier = tmp_path / "tier"
    other = make_tiny_llama(tmp_path / "other", seed=5)
    async with serving(tiny_llama, tier) as (scheduler, host):
        mine = await run(scheduler, prompt(1))
        await evict(scheduler, host)
    async with serving(other, tier, fingerprint="other") as (scheduler, _):
        theirs = await run(scheduler, prompt(1))
        assert theirs.cached_tokens == 0 and not same(theirs, mine)
    async with serving(tiny_llama, tier) as (scheduler, host):
        await scheduler.update_weights(other)
        updated = await run(scheduler, prompt(1))
        assert updated.cached_tokens == 0 and same(updated, theirs)
        await evict(scheduler, host)
        back = await run(scheduler, prompt(1))
        assert back.cached_tokens == 40 * PAGE and same(back, theirs)
    resolved = await asyncio.to_thread(resolve_model, str(other), cache_dir=tmp_path / "cache")
    async with serving(other, tier, fingerprint=resolved.fingerprint) as (scheduler, _):
        known = await run(scheduler, prompt(1))
        assert known.cached_tokens == 40 * PAGE and same(known, theirs), "named by what the weights are"


@pytest.mark.asyncio
async def test_the_size_limit_holds_on_disk_also_when_it_was_larger_before(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Looked at after every prompt."""
    tier = tmp_path / "tier"

    def used() -> int:
        return sum(path.stat().st_size for path in tier.glob("*.safetensors"))

    async with serving(tiny_llama, tier) as (scheduler, host):
        for seed in range(6):
            await run(scheduler, prompt(seed))
    assert used() > 1 << 20
    async with serving(tiny_llama, tier, tier_size=1 << 20) as (scheduler, host):
        for seed in range(6, 10):
            await run(scheduler, prompt(seed))
            assert host.stats()["tier_bytes"] <= 1 << 20  # type: ignore[operator]
    assert used() <= 1 << 20


@pytest.mark.asyncio
async def test_a_directory_deleted_while_running_costs_nothing_but_the_tier(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests go on, with the right tokens; one warning for writing and one for reading."""
    tier = tmp_path / "tier"
    async with serving(tiny_llama, tier) as (scheduler, host):
        fresh = await run(scheduler, prompt(1))
        await evict(scheduler, host)
        shutil.rmtree(tier)
        again = await run(scheduler, prompt(1))
        assert again.cached_tokens == 0 and same(again, fresh)
        for seed in range(5, 9):
            await run(scheduler, prompt(seed))
        assert host.stats()["tier_errors"] >= 2
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("cannot be written to" in text for text in warnings) == 1
    assert sum("cannot be read" in text for text in warnings) == 1
