"""The soak's questions with their right answers, from a solo run of the same engine in this process."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from aioprefill.decode.sequence import Sequence, pages_needed
from aioprefill.engine.port import Engine, SampledToken, Span, TokenIds
from aioprefill.sampling_params import SamplingParams
from aioprefill.transfer.port import Handoff

VARIANTS = 4
"""Ways to sample each prompt: greedy, and with seeds."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request and the tokens that it must get, whatever else happens."""

    prompt: TokenIds
    sampling: SamplingParams
    max_new_tokens: int
    ignore_eos: bool
    tokens: tuple[int, ...]


async def make_cases(engine: Engine, rng: random.Random, *, prompts: int, longest: int) -> list[Case]:
    """`prompts` prompts of 1 to `longest` tokens, two in three begin like others; four samplings each."""
    vocabulary = engine.spec.vocab_size
    generator = np.random.default_rng(rng.getrandbits(32))
    beginnings = [generator.integers(0, vocabulary, longest // 2, dtype=np.uint32) for _ in range(3)]
    cases = []
    for number in range(prompts):
        tokens = generator.integers(0, vocabulary, rng.randint(1, longest), dtype=np.uint32)
        if number % 3:
            shared = beginnings[number % len(beginnings)][: len(tokens)]
            tokens[: len(shared)] = shared
        for variant in range(VARIANTS):
            sampling = SamplingParams()
            if variant:
                sampling = SamplingParams(temperature=1.0, top_k=20, seed=rng.getrandbits(62))
            length, ignore_eos = rng.randint(1, 24), rng.random() < 0.5
            answer = await _solo(engine, tokens, sampling, length, ignore_eos)
            cases.append(Case(tokens, sampling, length, ignore_eos, answer))
    return cases


async def _solo(
    engine: Engine, prompt: TokenIds, sampling: SamplingParams, length: int, ignore_eos: bool
) -> tuple[int, ...]:
    """One request alone on the engine: its prompt in one forward, then token by token."""
    layout = engine.spec.layout
    handoff = Handoff(
        room="solo",
        peer="",
        prompt_tokens=len(prompt),
        pages=layout.pages_for(len(prompt)),
        sampling=sampling,
        max_new_tokens=length,
        ignore_eos=ignore_eos,
    )
    pages = np.arange(pages_needed(handoff, layout.page_size), dtype=np.int32)
    eos = frozenset(engine.spec.eos_token_ids)
    token = await _run(engine, Span(prompt, 0, pages, sampling))
    sequence = Sequence(handoff, pages, token.token_id)
    tokens = [token.token_id]
    while sequence.take(token, eos) is None:
        token = await _run(engine, sequence.span())
        tokens.append(token.token_id)
    return tuple(tokens)


async def _run(engine: Engine, span: Span) -> SampledToken:
    forward = engine.launch([span])
    await forward.completion.wait()
    token = forward.outputs()[0]
    assert token is not None
    return token
