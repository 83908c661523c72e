"""A real engine beside the stock model that it must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from aioprefill.engine.batch import pack
from aioprefill.engine.port import SampledToken, Span, TokenIds
from aioprefill.engine.transformers_engine import TransformersEngine
from aioprefill.sampling_params import SamplingParams

GREEDY = SamplingParams()


def load(
    folder: Path, *, memory: int = 8 << 20, dtype: str = "float32", device: str = "cpu"
) -> TransformersEngine:
    """An engine with a small pool on one thread."""
    return TransformersEngine.load(
        folder,
        name="tiny",
        fingerprint="tiny",
        dtype=dtype,
        device=device,
        kv_memory_bytes=memory,
        threads=1,
    )


@dataclass
class Prompt:
    """One sequence under test: its tokens, its scattered pages, and how far its KV is computed."""

    tokens: TokenIds
    pages: np.ndarray[tuple[int], np.dtype[np.int32]]
    done: int = 0

    def span(self, count: int, *, sample: SamplingParams | None = GREEDY) -> Span:
        """The next `count` tokens."""
        start, self.done = self.done, self.done + count
        return Span(self.tokens[start : self.done], start, self.pages, sample)


@dataclass
class World:
    """Engine, stock model, and pages handed out at random."""

    engine: TransformersEngine
    stock: torch.nn.Module
    rng: np.random.Generator
    free: list[int] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path, **options: object) -> World:
        """Load both."""
        engine = load(folder, **options)  # type: ignore[arg-type]
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        rng = np.random.default_rng(0)
        return cls(engine, stock, rng, rng.permutation(engine.num_pages).tolist())

    def take(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Pages of nobody else."""
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return np.array(taken, dtype=np.int32)

    def sequence(self, length: int, *, room: int = 0) -> Prompt:
        """A random prompt with pages for `room` more tokens."""
        vocab = self.engine.spec.vocab_size
        tokens = self.rng.integers(0, vocab, length).astype(np.uint32)
        return Prompt(tokens, self.take(self.engine.spec.layout.pages_for(length + room)))

    def logits(self, spans: Sequence[Span]) -> torch.Tensor:
        """The engine's logits, shape (spans that sample, vocabulary)."""
        engine = self.engine
        batch = pack(spans, engine.spec, engine.num_pages, engine.pool.rows_per_page)
        return engine._stream.compute(partial(engine._logits, batch)).float()

    @torch.inference_mode()
    def expected(self, tokens: TokenIds) -> torch.Tensor:
        """The stock model's logits at every position, shape (tokens, vocabulary)."""
        logits: torch.Tensor = self.stock(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
        return logits

    def check(self, spans: Sequence[tuple[Prompt, Span]]) -> None:
        """Run the spans in one forward; each span's logits must be the stock model's."""
        got = self.logits([span for _, span in spans])
        sampled = [(sequence, span) for sequence, span in spans if span.sample is not None]
        for row, (sequence, span) in zip(got, sampled, strict=True):
            right = self.expected(sequence.tokens[: span.end])[-1]
            assert float((row - right).abs().max()) < 1e-3, f"span [{span.start}, {span.end})"
            assert int(row.argmax()) == int(right.argmax())


def run(engine: TransformersEngine, spans: Sequence[Span]) -> list[SampledToken | None]:
    """Launch and wait."""
    forward = engine.launch(spans)
    forward.completion.synchronize()
    return list(forward.outputs())
