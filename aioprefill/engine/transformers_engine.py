"""The built-in engine: a transformers model over a paged KV pool."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from aioprefill.completion import Completion
from aioprefill.engine import model_check, weights
from aioprefill.engine.assemble import assemble
from aioprefill.engine.batch import PackedBatch, pack
from aioprefill.engine.device_errors import device_error, not_finite
from aioprefill.engine.kv_pool import KVPool, default_kv_memory, pages_for_memory
from aioprefill.engine.model_loader import (
    context_length,
    eos_token_ids,
    load_model,
    parse_device,
    vocab_size,
)
from aioprefill.engine.paged_attention import PagedAttention, make_masks
from aioprefill.engine.port import ModelSpec, PageCopy, PageIds, SampledToken, Span
from aioprefill.engine.sampling import Sampled, Sampler, ToDevice, fresh_seed
from aioprefill.engine.shard import EngineShard, default_threads, same_outcome, whole
from aioprefill.engine.streams import CpuStream, CudaStream, Running
from aioprefill.errors import ConfigError, DeviceError, HostError, ModelError
from aioprefill.kv_layout import KVLayout
from aioprefill.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aioprefill.engine.shard_group import ShardGroup

logger = logging.getLogger(__name__)


class TransformersForward:
    """A launched batch (`EngineForward`)."""

    def __init__(self, batch: PackedBatch, sampler: Sampler, running: Running) -> None:
        self._batch = batch
        self._sampler = sampler
        self._running = running

    @property
    def completion(self) -> Completion:
        """See `EngineForward.completion`."""
        return self._running.completion

    def outputs(self) -> Sequence[SampledToken | None]:
        """See `EngineForward.outputs`."""
        tokens: list[SampledToken | None] = [None] * self._batch.spans
        sampled = self._sampler.tokens(self._running.sampled())
        for row, token in zip(self._batch.samples, sampled, strict=True):
            tokens[row.span] = token
        return tokens


class TransformersEngine:
    """Implements `Engine`. Make it by `load`, or from a model whose attention is already ours."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        pool: KVPool,
        *,
        threads: int | None = None,
        group: ShardGroup | None = None,
    ) -> None:
        """`group`: the ranks that the model is divided over, owned by the engine from here on."""
        self.folder: Path | None = None
        """The checkpoint's folder, where there is one: its tokenizer is there too."""
        self._model: PreTrainedModel | None = model
        self._spec = spec
        self._pool: KVPool | None = pool
        self._num_pages = pool.num_pages
        self._group = group
        self._fresh_seed = fresh_seed if group is None else group.common_seeds()
        self._fatal: DeviceError | None = None
        """Pages could not be filled, or ranks are out of step: the stream thread sets it and then stops."""
        self._rows_per_page = pool.rows_per_page
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._masks = make_masks(pool)
        self._stream = (
            CudaStream(pool.device, threads=threads)
            if pool.device.type == "cuda"
            else CpuStream(threads=threads)
        )

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        name: str,
        fingerprint: str,
        dtype: str = "bfloat16",
        device: str = "cpu",
        page_size: int = 16,
        kv_memory_bytes: int | None = None,
        threads: int | None = None,
        shard: EngineShard | None = None,
    ) -> TransformersEngine:
        """Load a checkpoint's folder, examine it, and allocate the pool. Blocks for seconds to minutes.

        `kv_memory_bytes`: size of the pool, None for `default_kv_memory`. `threads`: CPU threads of one
        operator, None for torch's choice. The context is at most what the pool holds.

        `shard`: which part of the model to load; see `EngineShard`. All ranks get as many pages as the one
        with the least memory. What one rank refuses, all refuse.

        Raises `ModelError` naming what is not supported, `ConfigError` for settings that cannot be,
        `HostError` when another rank is gone.
        """
        if page_size < 1:
            raise ConfigError(f"page_size: must be at least 1, got {page_size}")
        with contextlib.ExitStack() as undo:
            if shard is None or shard.size == 1:
                group, target, mesh = None, parse_device(device), None
            else:
                from aioprefill.engine.shard_group import ShardGroup

                group = undo.enter_context(contextlib.closing(ShardGroup(shard)))
                target = group.place(path, fingerprint, device)
                mesh = group.mesh
                if threads is None and target.type == "cpu":
                    threads = default_threads(shard.size)
            with same_outcome(group):
                model = load_model(path, dtype=dtype, device=target, mesh=mesh)
            tokens = model_check.probe_tokens(model, min(page_size + 5, context_length(model)))
            expected = model_check.own_logits(model, tokens)
            layers, kv_heads, head_dim = model_check.kv_shape(model, tokens)
            layout = KVLayout(fingerprint, layers, kv_heads, head_dim, page_size, dtype)
            if shard is not None and group is not None:
                model_check.check_shard(model, kv_heads, shard.size, expected)
                layout = replace(layout, shards=shard.size, shard=shard.rank)
            with same_outcome(group):
                memory = default_kv_memory(target) if kv_memory_bytes is None else kv_memory_bytes
                pages = pages_for_memory(layout, memory)
            if group is not None:
                pages = group.smallest(pages)
            with same_outcome(group):
                pool = KVPool(layout, pages, target)
            spec = ModelSpec(
                name=name,
                vocab_size=vocab_size(model),
                context_length=_held_context(context_length(model), pool),
                eos_token_ids=eos_token_ids(model),
                layout=layout,
            )
            engine = undo.enter_context(
                contextlib.closing(cls(model, spec, pool, threads=threads, group=group))
            )
            engine.folder = path
            engine._check_paging(tokens[: spec.context_length], expected)
            undo.pop_all()
        return engine

    def __repr__(self) -> str:
        return f"<TransformersEngine {self._spec.name} {self._pool or 'closed'!r}>"

    @property
    def spec(self) -> ModelSpec:
        """See `Engine.spec`."""
        return self._spec

    @property
    def num_pages(self) -> int:
        """See `Engine.num_pages`."""
        return self._num_pages

    @property
    def pool(self) -> KVPool:
        """The KV pool, for a transfer to register. The memory lives as long as anybody holds the pool.

        Raises `HostError` once the engine is closed.
        """
        if self._pool is None:
            raise HostError("the engine is closed: its KV pool is gone")
        return self._pool

    def launch(self, spans: Sequence[Span]) -> TransformersForward:
        """See `Engine.launch`. Index arrays are built here, so that the device need not wait for them.

        Raises `ValueError` for spans that break their contract, `HostError` once closed.
        """
        batch = pack(spans, self._spec, self._num_pages, self._rows_per_page)
        sampler = Sampler(batch.samples, fresh_seed=self._fresh_seed)

        def work(to_device: ToDevice) -> Sampled:
            return sampler.sample(self._logits(batch, to_device), to_device)

        def check(sampled: Sampled) -> None:
            bad = np.flatnonzero(~np.isfinite(sampled.logprobs.numpy()))
            if bad.size:
                raise not_finite(batch.samples[int(bad[0])].span)

        return TransformersForward(batch, sampler, self._stream.launch(work, check))

    def _logits(self, batch: PackedBatch, to_device: ToDevice) -> torch.Tensor:
        """On the stream: run the model; logits (len(batch.samples), vocabulary)."""
        assert self._model is not None
        if self._fatal is not None:
            raise self._fatal
        last = to_device(batch.last)
        kept = {"logits_to_keep": last} if self._keeps_logits else {}
        with self._in_step():
            output = self._model(
                input_ids=to_device(batch.token_ids)[None],
                position_ids=to_device(batch.positions)[None],
                use_cache=False,
                paged=PagedAttention(batch, self.pool, self._masks, to_device),
                **kept,
            )
            logits = whole(output.logits)[0]
        return logits if self._keeps_logits else logits[last]

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Among ranks, what fails inside is final: the other ranks wait in a collective of this forward.

        They would take the next forward's for it.
        """
        try:
            yield
        except Exception as err:
            if self._group is None:
                raise
            reason = f"this rank is out of step with the others, its forward failed: {device_error(err)}"
            self._fatal = DeviceError("ranksOutOfStep", reason, sticky=True)
            raise self._fatal from err

    def _check_paging(self, tokens: torch.Tensor, expected: torch.Tensor) -> None:
        """Run a few tokens in chunks over scattered pages; compare with the model's own logits."""
        ids = tokens.cpu().numpy().astype(np.uint32)
        count = len(ids)
        pages = np.arange(self._spec.layout.pages_for(count), dtype=np.int32)[::-1].copy()
        cuts = sorted({0, count // 2, count - 1, count})
        assert self._model is not None
        found = []
        for start, end in itertools.pairwise(cuts):
            span = Span(ids[start:end], start, pages, SamplingParams())
            batch = pack([span], self._spec, self._num_pages, self._rows_per_page)
            try:
                found.append(self._stream.compute(partial(self._logits, batch)))
            except DeviceError as err:
                raise ModelError(f"{type(self._model).__name__} fails on paged attention: {err}") from err
        ends = torch.tensor(cuts[1:]) - 1
        model_check.compare(self._model, torch.cat(found).float().cpu(), expected.cpu()[ends])

    async def stage_weights(self, folder: Path) -> weights.StagedWeights:
        """See `Engine.stage_weights`."""
        if self._model is None or self._pool is None:
            raise HostError("the engine is closed")
        dtype, device = self._spec.layout.dtype, self._pool.device
        if self._group is not None:
            work = partial(weights.stage_shard, self._model, folder, dtype, self._group)
            return await asyncio.wrap_future(self._group.run(work))
        return await asyncio.to_thread(weights.stage, self._model, folder, dtype, device)

    def swap_weights(self, staged: weights.StagedWeights) -> concurrent.futures.Future[None]:
        """See `Engine.swap_weights`."""
        if self._model is None:
            raise HostError("the engine is closed")
        return self._stream.run(partial(weights.copy_in, self._model, staged))

    def weights_fingerprint(self, staged: weights.StagedWeights) -> str:
        """See `Engine.weights_fingerprint`."""
        return staged.fingerprint

    def read_pages(self, pages: PageIds) -> concurrent.futures.Future[PageCopy]:
        """See `Engine.read_pages`."""
        wanted = pages.astype(np.int64)

        def gather(to_device: ToDevice) -> torch.Tensor:
            return self.pool.storage.index_select(0, to_device(wanted))

        return self._stream.fetch(gather)

    def write_pages(self, pages: PageIds, blocks: npt.NDArray[np.uint8]) -> concurrent.futures.Future[None]:
        """See `Engine.write_pages`."""
        targets = pages.tolist()

        def fill(to_device: ToDevice) -> None:
            try:
                storage = self.pool.storage
                filled = to_device(blocks).view(storage.dtype).view(len(targets), *storage.shape[1:])
                for target, page in zip(targets, filled, strict=True):
                    storage[target].copy_(page)
            except Exception as err:
                # a forward that is launched already counts on these pages
                reason = f"KV pages could not be filled: {err}"
                self._fatal = DeviceError("kvWriteFailed", reason, sticky=True)
                raise self._fatal from err

        return self._stream.queue(fill)

    def assemble_pages(self, pages: PageIds, shards: int) -> concurrent.futures.Future[None]:
        """See `Engine.assemble_pages`."""
        if self._spec.layout.kv_heads % shards:
            raise ValueError(f"{self._spec.layout.kv_heads} KV heads cannot come in {shards} shards")
        wanted = torch.from_numpy(pages.astype(np.int64))

        def order() -> None:
            try:
                pool = self.pool
                assemble(pool.storage, wanted.to(pool.device), shards)
            except Exception as err:
                # a forward that is launched already counts on these pages
                reason = f"KV pages could not be assembled: {err}"
                self._fatal = DeviceError("kvAssembleFailed", reason, sticky=True)
                raise self._fatal from err

        return self._stream.run(order)

    def close(self) -> None:
        """See `Engine.close`."""
        self._stream.close()
        if self._group is not None:
            self._group.close()
        if self._pool is not None:
            on_cuda = self._pool.device.type == "cuda"
            self._model = self._pool = None
            if on_cuda:
                torch.cuda.empty_cache()

    async def aclose(self) -> None:
        """See `Engine.aclose`."""
        closed: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            try:
                self.close()
                closed.set_result(None)
            except BaseException as err:
                closed.set_exception(err)

        # a daemon, not the loop's executor: neither the loop nor the interpreter waits for a hung device
        threading.Thread(target=run, name="aioprefill-engine-close", daemon=True).start()
        await asyncio.shield(asyncio.wrap_future(closed))


def _held_context(wanted: int, pool: KVPool) -> int:
    held = pool.num_pages * pool.layout.page_size
    if held < wanted:
        logger.warning("the context is limited to %d tokens of %d: the KV memory holds no more", held, wanted)
    return min(wanted, held)
