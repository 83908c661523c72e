"""The packed, paged model equals the stock one: every way of cutting prompts into forwards, fp32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_support import GREEDY, Prompt, World, run
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aioprefill.engine.port import Span
from aioprefill.sampling_params import SamplingParams

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
)


@pytest.fixture(scope="module", params=["cpu", CUDA])
def world(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[World]:
    """A Llama with 4 heads over 2 KV heads, on each device that is here."""
    world = World.make(tiny_llama, device=request.param)
    yield world
    world.engine.close()


@pytest.fixture(autouse=True)
def fresh_pages(request: pytest.FixtureRequest) -> None:
    """Each test begins with all pages free, and full of NaN: whoever reads a slot not its own shows it."""
    if "world" in request.fixturenames:
        world: World = request.getfixturevalue("world")
        world.engine.pool.storage.fill_(math.nan)
        world.free = world.rng.permutation(world.engine.num_pages).tolist()


def test_a_packed_batch_of_prompts_of_every_size(world: World) -> None:
    """Lengths around a page, one token, and more than a block of queries, in one forward."""
    prompts = [world.sequence(n) for n in (1, 2, 15, 16, 17, 300, 64)]
    world.check([(p, p.span(len(p.tokens))) for p in prompts])


@pytest.mark.parametrize("cuts", [[100, 300, 1, 299], [16, 16, 668], [1, 1, 1, 697], [257, 443], [699, 1]])
def test_a_prompt_in_chunks(world: World, cuts: list[int]) -> None:
    """Chunks of any size, page-aligned or not, longer than a block or one token."""
    prompt = world.sequence(sum(cuts))
    for count in cuts:
        world.check([(prompt, prompt.span(count))])


def test_middle_chunks_sample_nothing_and_yet_leave_their_kv(world: World) -> None:
    """Without a sampled row the forward still fills the pages for the last chunk."""
    prompt = world.sequence(90)
    assert run(world.engine, [prompt.span(40, sample=None)]) == [None]
    assert run(world.engine, [prompt.span(30, sample=None)]) == [None]
    world.check([(prompt, prompt.span(20))])


def test_prompts_share_the_pages_of_a_prefix(world: World) -> None:
    """Two prompts continue the pages of a third, in one forward, one of them in chunks."""
    first = world.sequence(64)
    world.check([(first, first.span(64))])
    others = []
    for extra in (30, 7):
        tail = world.sequence(extra)
        tokens = np.concatenate([first.tokens[:48], tail.tokens])
        others.append(Prompt(tokens, np.concatenate([first.pages[:3], tail.pages]), done=48))
    world.check([(others[0], others[0].span(10)), (others[1], others[1].span(7))])
    world.check([(others[0], others[0].span(20))])


def test_a_prefix_that_the_same_forward_computes_can_be_shared(world: World) -> None:
    """K and V of all tokens are written before any are read."""
    first, tail = world.sequence(32), world.sequence(9)
    second = Prompt(
        np.concatenate([first.tokens, tail.tokens]), np.concatenate([first.pages, tail.pages]), done=32
    )
    world.check([(second, second.span(9)), (first, first.span(32))])


def test_decode_steps_equal_a_greedy_generation(world: World) -> None:
    """Sequences of very different lengths, decoded together for 12 steps, are what generate gives."""
    prompts = [world.sequence(n, room=12) for n in (1990, 3, 7, 5, 40)]
    generated: list[list[int]] = [[] for _ in prompts]
    outputs = run(world.engine, [p.span(len(p.tokens)) for p in prompts])
    for _ in range(12):
        spans = []
        for prompt, tokens, output in zip(prompts, generated, outputs, strict=True):
            assert output is not None
            tokens.append(output.token_id)
            prompt.tokens = np.append(prompt.tokens, np.uint32(output.token_id))
            spans.append(prompt.span(1))
        outputs = run(world.engine, spans)
    for prompt, tokens in zip(prompts, generated, strict=True):
        rows = world.expected(prompt.tokens)[-13:-1]
        assert rows.argmax(-1).tolist() == tokens


def test_prompts_chunks_and_decodes_in_one_forward(world: World) -> None:
    """Every kind of span at once, sampled and not."""
    chunked, prefixed, decoding, idle = (world.sequence(n) for n in (400, 100, 51, 2000))
    world.check([(chunked, chunked.span(70)), (prefixed, prefixed.span(32)), (decoding, decoding.span(50))])
    run(world.engine, [idle.span(1999, sample=None)])
    fresh, single = world.sequence(33), world.sequence(1)
    world.check(
        [
            (decoding, decoding.span(1)),
            (fresh, fresh.span(33)),
            (chunked, chunked.span(300, sample=None)),
            (single, single.span(1)),
            (prefixed, prefixed.span(68)),
            (idle, idle.span(1)),
        ]
    )
    world.check([(chunked, chunked.span(30))])


def test_random_schedules(world: World) -> None:
    """Twelve prompts cut at random and packed at random: every sampled row is right."""
    rng = np.random.default_rng(7)
    left = [world.sequence(int(n)) for n in rng.integers(1, 200, 12)]
    while left:
        chosen = rng.permutation(len(left))[: rng.integers(1, 6)]
        spans = []
        for index in chosen:
            prompt = left[index]
            rest = len(prompt.tokens) - prompt.done
            count = int(rng.choice([1, rest, rng.integers(1, rest + 1)]))
            spans.append((prompt, prompt.span(count, sample=GREEDY if rng.random() < 0.8 else None)))
        world.check(spans)
        left = [prompt for prompt in left if prompt.done < len(prompt.tokens)]


def test_reported_logprobs_equal_the_stock_models(world: World) -> None:
    """Through launch, completion and outputs: token, log-probability and the most likely ones."""
    prompts = [world.sequence(n) for n in (30, 20, 10)]
    wanted = [SamplingParams(logprobs=8), None, SamplingParams()]
    outputs = run(
        world.engine,
        [p.span(len(p.tokens), sample=s) for p, s in zip(prompts, wanted, strict=True)],
    )
    assert outputs[1] is None
    for index, count in ((0, 8), (2, 0)):
        output = outputs[index]
        assert output is not None
        right = torch.log_softmax(world.expected(prompts[index].tokens)[-1].float(), -1)
        assert output.token_id == int(right.argmax())
        assert output.logprob == pytest.approx(float(right.max()), abs=1e-3)
        assert [token for token, _ in output.top_logprobs] == right.topk(count).indices.tolist()


def test_a_seed_gives_the_same_token_in_any_batch(world: World) -> None:
    """Alone, in chunks, or packed with others: the forward differs, the token does not."""
    sample = SamplingParams(temperature=1.0, top_p=0.9, seed=42)
    prompt = world.sequence(50)

    def restart(count: int) -> Span:
        prompt.done = 0
        return prompt.span(count, sample=sample)

    alone = run(world.engine, [restart(50)])[0]
    other = world.sequence(80)
    packed = run(world.engine, [other.span(80), restart(50)])[1]
    run(world.engine, [restart(20)])
    chunked = run(world.engine, [prompt.span(30, sample=sample)])[0]
    assert alone is not None and packed is not None and chunked is not None
    assert alone.token_id == packed.token_id == chunked.token_id


SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
MODELS = {
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "mistral_window": lambda: MistralForCausalLM(
        MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=24)
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=4, sliding_window=None)
    ),
    "qwen3_every_other_layer_windowed": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **SMALL,
            num_key_value_heads=2,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=40,
            max_window_layers=1,
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_other_architectures(name: str, tmp_path: Path) -> None:
    """Other attention layouts, experts and sliding windows, in chunks, behind a context and decoding."""
    torch.manual_seed(0)
    model: PreTrainedModel = MODELS[name]()
    model.save_pretrained(tmp_path)
    world = World.make(tmp_path)
    try:
        long, short, middle = (world.sequence(n) for n in (600, 20, 90))
        world.check([(long, long.span(290)), (short, short.span(19)), (middle, middle.span(90))])
        world.check([(long, long.span(300)), (short, short.span(1))])
        world.check([(long, long.span(1))])
        world.check([(long, long.span(9))])
    finally:
        world.engine.close()


def test_bfloat16_stays_close_to_float32(tiny_llama: Path) -> None:
    """The pool and the model in bf16 give the fp32 logits but for rounding."""
    world = World.make(tiny_llama, dtype="bfloat16")
    try:
        prompt = world.sequence(120)
        world.logits([prompt.span(50, sample=None)])
        (row,) = world.logits([prompt.span(70)])
        right = world.expected(prompt.tokens)[-1]
        assert float((row - right).norm() / right.norm()) < 0.05
    finally:
        world.engine.close()
