"""Checks that a request can be served at all, before anything is done for it. Pure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from aioprefill.engine.port import ModelSpec, TokenIds
from aioprefill.errors import InvalidRequest
from aioprefill.request import PrefillRequest, Timeouts

MAX_ID_LENGTH = 128
NO_LIMITS = Timeouts()
UINT32 = np.dtype(np.uint32)


def validate(request: PrefillRequest, spec: ModelSpec, num_pages: int) -> TokenIds:
    """The prompt as uint32 of shape (n,). Raises `InvalidRequest` naming the field that is wrong."""
    if not 1 <= len(request.request_id) <= MAX_ID_LENGTH:
        raise InvalidRequest("request_id", f"must have 1 to {MAX_ID_LENGTH} characters")
    tokens = prompt_tokens(request, spec)
    if len(tokens) >= spec.context_length:
        raise InvalidRequest(
            "prompt",
            f"has {len(tokens)} tokens, the model's context is {spec.context_length} with the first new one",
        )
    pages = spec.layout.pages_for(len(tokens))
    if pages > num_pages:
        raise InvalidRequest("prompt", f"needs {pages} KV pages, the whole pool has {num_pages}")
    if request.peer is not None and not request.peer:
        raise InvalidRequest("peer", "must name a decode peer, or be left out")
    if request.max_new_tokens < 1:
        raise InvalidRequest("max_new_tokens", f"must be at least 1, got {request.max_new_tokens}")
    if isinstance(request.priority, bool) or not isinstance(request.priority, int):
        raise InvalidRequest("priority", f"must be a whole number, got {request.priority!r}")
    deadline_s = request.deadline_s
    if deadline_s is not None and not (math.isfinite(deadline_s) and deadline_s > 0):
        raise InvalidRequest("deadline_s", f"must be a number of seconds above 0, got {deadline_s!r}")
    if request.timeouts != NO_LIMITS:
        _check_timeouts(request.timeouts)
    request.sampling.validate()
    if request.grammar is not None:
        request.grammar.validate()
    if request.sampling.top_k > spec.vocab_size:
        raise InvalidRequest("sampling.top_k", f"must be at most the vocabulary's {spec.vocab_size}")
    return tokens


def _check_timeouts(timeouts: Timeouts) -> None:
    for name in timeouts.__slots__:
        limit: float | None = getattr(timeouts, name)
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise InvalidRequest(f"timeouts.{name}", f"must be positive and finite, got {limit}")


def prompt_tokens(request: PrefillRequest, spec: ModelSpec) -> TokenIds:
    """The prompt as an array, checked against the vocabulary."""
    ids = request.token_ids
    if isinstance(ids, np.ndarray) and ids.dtype == UINT32 and ids.ndim == 1 and ids.size:
        return _in_vocabulary(ids, 0, spec)  # as it comes from the wire
    try:
        tokens = np.asarray(request.token_ids)
    except ValueError as err:
        raise InvalidRequest("prompt", f"is no list of token ids: {err}") from err
    if tokens.size == 0:
        raise InvalidRequest("prompt", "is empty")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidRequest("prompt", f"must be a flat list of integers, got {tokens.dtype} {tokens.shape}")
    return _in_vocabulary(tokens, int(tokens.min()), spec)


def _in_vocabulary(tokens: npt.NDArray[np.integer[Any]], low: int, spec: ModelSpec) -> TokenIds:
    high = int(tokens.max())
    if low < 0 or high >= spec.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest("prompt", f"token id {bad} is outside the vocabulary of {spec.vocab_size}")
    return np.ascontiguousarray(tokens, dtype=np.uint32)
