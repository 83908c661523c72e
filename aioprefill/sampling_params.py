"""How the next token is chosen from logits, as asked by a request. Pure."""

from __future__ import annotations

import math

import msgspec

from aioprefill.errors import InvalidRequest

MAX_LOGPROBS = 64


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling of one request. The default is greedy.

    `seed` together with the position of the sampled token fixes the random draw, so a seeded request
    gives the same token whatever else is in its batch.
    """

    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p."""
    seed: int | None = None
    """0 to 2**63-1. None draws a fresh one."""
    logprobs: int = 0
    """Number of most likely tokens to report with their log-probabilities (0: only the chosen token's)."""

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the field that is out of range, NaN or infinite."""
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise InvalidRequest("sampling.temperature", f"must be within 0..100, got {self.temperature}")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidRequest("sampling.top_p", f"must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.top_k <= 1 << 30:
            raise InvalidRequest("sampling.top_k", f"must be 0 (off) or positive, got {self.top_k}")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise InvalidRequest("sampling.seed", f"must be within 0..2**63-1, got {self.seed}")
        if not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest("sampling.logprobs", f"must be 0..{MAX_LOGPROBS}, got {self.logprobs}")
