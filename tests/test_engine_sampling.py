"""Sampling: against a straightforward reference, alone and among others, at the edges of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from aioprefill.engine import sampling
from aioprefill.engine.batch import SampleRow
from aioprefill.engine.port import SampledToken
from aioprefill.engine.sampling import Sampler, uniform
from aioprefill.sampling_params import SamplingParams

VOCAB = 1000


def logits_of(rows: int, *, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    """Random logits in bfloat16, so with many ties."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator) * spread).bfloat16()


def choose(logits: torch.Tensor, params: Sequence[SamplingParams], first: int = 10) -> list[SampledToken]:
    """Sample all rows at positions first, first + 1, …"""
    sampler = Sampler([SampleRow(i, first + i, p) for i, p in enumerate(params)])
    return sampler.tokens(sampler.sample(logits, torch.from_numpy))


def kept(logits: torch.Tensor, params: SamplingParams) -> tuple[list[int], list[float]]:
    """The tokens that may be drawn with their probabilities, by the book: sort, cut k, cut p, renormalize."""
    values = logits.double().tolist()
    highest = max(values)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    weights = {t: math.exp((values[t] - highest) / params.temperature) for t in order}
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[t] for t in order)
    nucleus: list[int] = []
    mass = 0.0
    for token in order:
        if mass >= params.top_p * total and params.top_p < 1.0:
            break
        nucleus.append(token)
        mass += weights[token]
    return nucleus, [weights[t] / mass for t in nucleus]


def by_the_book(logits: torch.Tensor, params: SamplingParams, position: int) -> tuple[int, float]:
    """The token that the row's uniform number picks, and how far the number is from the next token's."""
    tokens, probabilities = kept(logits, params)
    pairs = list(zip(tokens, probabilities, strict=True))
    if params.top_k == 0 and params.top_p == 1.0:
        pairs.sort()
    assert params.seed is not None
    target, mass = uniform(params.seed, position), 0.0
    for token, probability in pairs:
        if target < mass + probability:
            return token, min(target - mass, mass + probability - target)
        mass += probability
    return pairs[-1][0], 0.0


def test_greedy_takes_the_largest_logit_and_the_smaller_id_of_equal_ones() -> None:
    """Ties are decided the same everywhere."""
    logits = torch.zeros(2, VOCAB)
    logits[0, [7, 3, 900]] = 5.0
    logits[1, 999] = 1.0
    assert [t.token_id for t in choose(logits, [SamplingParams()] * 2)] == [3, 999]


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        *((0, 1.0), (1, 1.0), (5, 1.0), (256, 1.0), (257, 1.0), (5000, 1.0)),
        *((0, 1e-9), (0, 0.3), (0, 0.9), (0, 0.999999), (7, 0.5), (300, 0.7), (2000, 0.9)),
    ],
)
def test_draws_equal_a_straightforward_reference(top_k: int, top_p: float, spread: float) -> None:
    """Every truncation, on sharp and flat distributions with ties, picks the reference's token."""
    rows = 24
    logits = logits_of(rows, spread=spread, seed=top_k)
    params = [
        SamplingParams(temperature=0.5 + i / rows, top_k=top_k, top_p=top_p, seed=1000 + i)
        for i in range(rows)
    ]
    got = choose(logits, params)
    for i, token in enumerate(got):
        expected, margin = by_the_book(logits[i], params[i], 10 + i)
        assert token.token_id == expected or margin < 1e-6, f"row {i}"


def test_draws_follow_the_distribution() -> None:
    """Over many positions each token comes as often as its probability says, and no other comes."""
    draws = 4000
    logits = logits_of(1, spread=2.0)
    params = SamplingParams(temperature=1.3, top_k=20, top_p=0.8, seed=5)
    got = choose(logits.expand(draws, -1), [params] * draws)
    tokens, probabilities = kept(logits[0], params)
    counts = np.array([sum(t.token_id == token for t in got) for token in tokens])
    assert counts.sum() == draws
    expected = np.array(probabilities) * draws
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < len(tokens) + 5 * math.sqrt(2 * len(tokens))


def test_a_seeded_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Each row alone, first, last, and among rows of every kind: the same token."""
    kinds = [
        SamplingParams(temperature=0.9, seed=1),
        SamplingParams(temperature=0.9, seed=1, top_k=40),
        SamplingParams(temperature=1.5, seed=2, top_p=0.95),
        SamplingParams(temperature=1.5, seed=2, top_p=0.95, top_k=400),
        SamplingParams(),
        SamplingParams(temperature=2.0),
        SamplingParams(logprobs=5, temperature=1.0, seed=3, top_p=0.2),
    ]
    logits = logits_of(len(kinds), spread=1.0)
    rows = [SampleRow(i, 50 + i, params) for i, params in enumerate(kinds)]

    def tokens(order: Sequence[int]) -> dict[int, int]:
        sampler = Sampler([rows[i] for i in order])
        found = sampler.tokens(sampler.sample(logits[list(order)], torch.from_numpy))
        return {i: t.token_id for i, t in zip(order, found, strict=True) if kinds[i].temperature != 2.0}

    together = tokens(range(len(kinds)))
    assert tokens(list(reversed(range(len(kinds))))) == together
    assert {k: v for i in range(len(kinds)) for k, v in tokens([i]).items()} == together


def test_the_random_number_is_fixed_by_seed_and_position_alone() -> None:
    """Equal for equal pairs (pinned: ranks and releases must agree), different otherwise, in [0, 1)."""
    assert (uniform(0, 0), uniform(7, 123)) == (0.011546754286331562, 0.13777895988078537)
    numbers = {uniform(seed, position) for seed in (0, 1, 2**63 - 1) for position in range(100)}
    assert len(numbers) == 300
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_unseeded_rows_draw_a_fresh_seed_each_and_others_none() -> None:
    """Only random rows without a seed ask for one, and what they get decides."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=9),
        *[SamplingParams(temperature=1.0)] * 2,
    ]
    rows = [SampleRow(i, 7, p) for i, p in enumerate(params)]
    seeds = iter([9, 10])
    logits = logits_of(1).expand(4, -1)
    sampler = Sampler(rows, fresh_seed=lambda: next(seeds))
    tokens = [t.token_id for t in sampler.tokens(sampler.sample(logits, torch.from_numpy))]
    assert next(seeds, None) is None
    assert tokens[1] == tokens[2]
    assert len({choose(logits[:1], [params[2]])[0].token_id for _ in range(50)}) > 1


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    """The chosen token's is always reported; temperature and truncation do not change it."""
    logits = logits_of(3)
    params = [
        SamplingParams(),
        SamplingParams(temperature=7.0, top_k=3, seed=4),
        SamplingParams(temperature=0.1, seed=4),
    ]
    expected = torch.log_softmax(logits.float(), -1)
    for i, token in enumerate(choose(logits, params)):
        assert token.logprob == pytest.approx(float(expected[i, token.token_id]), abs=1e-5)
        assert token.top_logprobs == ()


def test_each_row_reports_as_many_top_logprobs_as_it_asked_for() -> None:
    """Most likely first, equal to log_softmax; rows that asked for none get none."""
    logits = logits_of(3).float()
    wanted = [4, 0, 64]
    got = choose(logits, [SamplingParams(logprobs=n) for n in wanted])
    expected = torch.log_softmax(logits, -1)
    for i, token in enumerate(got):
        assert len(token.top_logprobs) == wanted[i]
        best = expected[i].topk(wanted[i]).values.tolist()
        assert [lp for _, lp in token.top_logprobs] == pytest.approx(best, abs=1e-5)
        assert all(lp == pytest.approx(float(expected[i, t]), abs=1e-5) for t, lp in token.top_logprobs)


def test_more_logprobs_than_tokens_gives_all_tokens() -> None:
    """A vocabulary smaller than the number asked for is reported whole."""
    (token,) = choose(torch.zeros(1, 5), [SamplingParams(logprobs=64)])
    assert sorted(t for t, _ in token.top_logprobs) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6, 100.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.5), (500, 5e-324)])
def test_extreme_settings_and_logits_give_finite_possible_tokens(
    temperature: float, top_k: int, top_p: float
) -> None:
    """Excluded tokens (-inf) are never drawn and nothing becomes NaN, at any temperature."""
    logits = torch.full((40, VOCAB), -math.inf)
    logits[:, [3, 500]] = torch.tensor([3e38, -3e38])
    logits[20:, [3, 500]] = torch.tensor([1.0, 1.0])
    params = [SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=i) for i in range(40)]
    for token in choose(logits, params):
        assert token.token_id in (3, 500)
        assert math.isfinite(token.logprob)


def test_the_ends_of_the_random_range_pick_possible_tokens() -> None:
    """Zero skips leading tokens of no weight, the largest number below one skips trailing ones."""
    for total in (2.0, 3.0, 1.0 + 2**-20, 7e5 / 3):
        weights = torch.tensor([[0.0, total / 2, total / 2, 0.0]], dtype=torch.float64)
        ends = torch.tensor([[0.0], [1.0 - 2**-53]], dtype=torch.float64)
        assert sampling._inverse(weights.expand(2, -1), ends).tolist() == [[1], [2]]


def test_nan_logits_are_visible_in_the_logprob() -> None:
    """The engine recognizes a broken model by it, however the row is sampled."""
    logits = torch.zeros(3, VOCAB)
    logits[:, 17] = math.nan
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)]
    assert all(math.isnan(token.logprob) for token in choose(logits, params))


def test_no_rows_give_no_tokens() -> None:
    """A batch of middle chunks."""
    assert choose(torch.zeros(0, VOCAB), []) == []
