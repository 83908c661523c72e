"""Chooses tokens from logits. Pure torch, CPU and CUDA; on CUDA nothing here waits for the device.

Each row is decided by its own parameters alone, never by what else is in the batch: a random row turns
one uniform number, fixed by (seed, position), into a token by the inverse of its own cumulative
distribution. Truncation is top-k first, then top-p of what is left; ties go to the smaller token id.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from aioprefill.engine.batch import SampleRow
from aioprefill.engine.port import SampledToken

ToDevice: TypeAlias = Callable[[npt.NDArray[Any]], torch.Tensor]

# Up to so many candidates are selected without sorting the vocabulary.
_FEW = 256
_ALL = 1 << 30
# Colder is the same, and would be 0 in float32.
_COLDEST = 1e-30


@dataclass(frozen=True, slots=True)
class Sampled:
    """Chosen tokens of all rows, on the device or on the host."""

    token_ids: torch.Tensor
    """int64, shape (rows,)."""
    logprobs: torch.Tensor
    """float32, shape (rows,): of the chosen tokens. NaN where the logits are unusable."""
    top_ids: torch.Tensor | None = None
    """int64, shape (rows, most that any row asked for), most likely first."""
    top_logprobs: torch.Tensor | None = None
    """float32, same shape."""

    def move(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Sampled:
        """The same, with each tensor moved."""
        if self.top_ids is None or self.top_logprobs is None:
            return Sampled(move(self.token_ids), move(self.logprobs))
        return Sampled(*(move(t) for t in (self.token_ids, self.logprobs, self.top_ids, self.top_logprobs)))


class _Settings(NamedTuple):
    """How to draw, as columns of shape (rows, 1)."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor

    def take(self, rows: torch.Tensor) -> _Settings:
        return _Settings(*(column[rows] for column in self))


_Draw: TypeAlias = Callable[[torch.Tensor, _Settings], torch.Tensor]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but (seed, position)."""
    key = np.array([seed, position], dtype=np.uint64)
    return (int(np.random.Philox(key=key).random_raw()) >> 11) * 2.0**-53


def fresh_seed() -> int:
    """A seed that nobody can guess, for rows without one."""
    return secrets.randbits(63)


class Sampler:
    """How one batch is sampled. Made before the device runs; then `sample` queues the work.

    `fresh_seed` gives seeds to the rows without one.
    """

    def __init__(self, rows: Sequence[SampleRow], *, fresh_seed: Callable[[], int] = fresh_seed) -> None:
        self._rows = rows
        self._top = max((row.params.logprobs for row in rows), default=0)
        self._random: dict[_Draw, tuple[npt.NDArray[np.int64], list[npt.NDArray[Any]]]] = {}
        for draw in (_draw_whole, _draw_few, _draw_nucleus):
            indices = [i for i, row in enumerate(rows) if _draw_for(row) is draw]
            if indices:
                columns = _columns([rows[i] for i in indices], fresh_seed)
                self._random[draw] = np.array(indices, dtype=np.int64), columns

    def sample(self, logits: torch.Tensor, to_device: ToDevice) -> Sampled:
        """Tokens for logits of shape (rows, vocabulary); `to_device` as in `PagedAttention`."""
        logits = logits.float()
        allowed = self._restrict(logits, to_device)
        chosen = allowed.argmax(-1)
        for draw, (rows, columns) in self._random.items():
            indices = to_device(rows)
            settings = _Settings(*(to_device(column) for column in columns))
            chosen[indices] = draw(allowed[indices], settings)
        normalizer = logits.logsumexp(-1)
        logprobs = logits.gather(1, chosen[:, None])[:, 0] - normalizer
        if not self._top:
            return Sampled(chosen, logprobs)
        top = logits.topk(min(self._top, logits.shape[1]), -1)
        return Sampled(chosen, logprobs, top.indices, top.values - normalizer[:, None])

    def _restrict(self, logits: torch.Tensor, to_device: ToDevice) -> torch.Tensor:
        """The logits with tokens that masks forbid at -inf. Rows without a mask are left as they are.

        A mask without any token is not applied: NaN would be taken for a fault of the device, and whoever
        made the mask sees by the token that it does not fit.
        """
        masked = [(i, row.mask) for i, row in enumerate(self._rows) if row.mask is not None]
        if not masked:
            return logits
        words = np.stack([mask() for _, mask in masked])
        words[~words.any(axis=1)] = -1
        bits = np.unpackbits(~words.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
        rows = to_device(np.array([i for i, _ in masked], dtype=np.int64))
        forbidden = to_device(bits.view(np.bool_))
        return logits.index_copy(0, rows, logits[rows].masked_fill(forbidden, -torch.inf))

    def tokens(self, sampled: Sampled) -> list[SampledToken]:
        """One token per row, from tensors on the host."""
        ids, logprobs = sampled.token_ids.tolist(), sampled.logprobs.tolist()
        if sampled.top_ids is None or sampled.top_logprobs is None:
            return [SampledToken(*pair) for pair in zip(ids, logprobs, strict=True)]
        tops = zip(sampled.top_ids.tolist(), sampled.top_logprobs.tolist(), strict=True)
        return [
            SampledToken(token, logprob, tuple(zip(*top, strict=True))[: row.params.logprobs])
            for row, token, logprob, top in zip(self._rows, ids, logprobs, tops, strict=True)
        ]


def _columns(rows: Sequence[SampleRow], fresh_seed: Callable[[], int]) -> list[npt.NDArray[Any]]:
    """The arrays of `_Settings`."""
    params = [row.params for row in rows]
    seeds = [fresh_seed() if p.seed is None else p.seed for p in params]
    uniforms = [uniform(seed, row.position) for seed, row in zip(seeds, rows, strict=True)]
    return [
        np.array([max(p.temperature, _COLDEST) for p in params], dtype=np.float32)[:, None],
        np.array([p.top_k or _ALL for p in params], dtype=np.int64)[:, None],
        np.array([p.top_p for p in params], dtype=np.float64)[:, None],
        np.array(uniforms, dtype=np.float64)[:, None],
    ]


def _draw_for(row: SampleRow) -> _Draw | None:
    """None: the likeliest token."""
    params = row.params
    if params.temperature == 0.0:
        return None
    if 0 < params.top_k <= _FEW:
        return _draw_few
    return _draw_whole if params.top_k == 0 and params.top_p == 1.0 else _draw_nucleus


def _draw_whole(logits: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """From the whole vocabulary, in the order of token ids."""
    return _inverse(_weights(logits, settings.temperature), settings.uniform)[:, 0]


def _draw_few(logits: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """For rows that keep at most `_FEW` tokens by their top-k."""
    values, order = _likeliest(logits, _FEW)
    weights = _top_k(_weights(values, settings.temperature), settings.top_k)
    return _draw_top_p(weights, _total(weights), order, settings)


def _draw_nucleus(logits: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """For rows whose kept set can have any size."""
    total = _total(_weights(logits, settings.temperature))
    if logits.device.type == "cuda":
        return _draw_sorted(logits, total, settings)
    # looking at a result costs nothing here: sort the vocabulary only for rows that need it. The other
    # rows' candidates are the same up to where their set ends, and so is the token.
    values, order = _likeliest(logits, _FEW)
    weights = _weights(values, settings.temperature)
    enough = _total(weights) > settings.top_p * total
    chosen = _draw_top_p(weights, total, order, settings)
    short = ~(enough & (settings.top_k >= logits.shape[1]))[:, 0]
    if short.any():
        chosen[short] = _draw_sorted(logits[short], total[short], settings.take(short))
    return chosen


def _draw_sorted(logits: torch.Tensor, total: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """With the whole vocabulary in order; `total` is the weight of all of it."""
    values, order = _likeliest(logits, logits.shape[1])
    weights = _top_k(_weights(values, settings.temperature), settings.top_k)
    cut = settings.top_k < logits.shape[1]
    return _draw_top_p(weights, torch.where(cut, _total(weights), total), order, settings)


def _draw_top_p(
    weights: torch.Tensor, total: torch.Tensor, order: torch.Tensor, settings: _Settings
) -> torch.Tensor:
    """Among weights in descending order, of which those behind a share of top_p of `total` are cut."""
    before = weights.cumsum(-1, dtype=torch.float64) - weights
    weights = weights.masked_fill(before >= settings.top_p * total, 0.0)
    return order.gather(1, _inverse(weights, settings.uniform))[:, 0]


def _top_k(weights: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    return weights.masked_fill(torch.arange(weights.shape[1], device=weights.device) >= top_k, 0.0)


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest `count` logits of each row (all, if there are fewer), descending, and their token ids.

    Sorts int64 keys (the float's bits in an order that compares like the float; then the id, reversed),
    because `topk` on floats leaves the order of equal ones open and a stable sort is many times slower.
    """
    last = logits.shape[1] - 1
    bits = (logits + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) | torch.arange(last, -1, -1, device=logits.device)
    best = keys.topk(count, -1).values if count <= last else keys.sort(-1, descending=True).values
    order = last - (best & 0xFFFFFFFF)
    return logits.gather(1, order), order


def _weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Unnormalized probabilities, to be summed in float64; the likeliest has 1, whatever the temperature."""
    return ((logits - logits.amax(-1, keepdim=True)) / temperature).exp()


def _total(weights: torch.Tensor) -> torch.Tensor:
    return weights.sum(-1, keepdim=True, dtype=torch.float64)


def _inverse(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulative weight exceeds the row's uniform share of the total.

    Never a column of weight 0: the total is at least 1 and a uniform at most 1 - 2**-53, so the target
    stays below the total also after rounding. Rows of NaN give some column, because an index out of range
    would break a CUDA context.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return found.clamp_max(weights.shape[1] - 1)
