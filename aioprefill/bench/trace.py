"""Traces of real requests: when each came, how long it was, and which blocks of its prompt were seen before.

One JSON object a line, as in the Mooncake traces: `timestamp` (ms since the start), `input_length` (tokens)
and `hash_ids` (one per block of 512 tokens; the same id means the same prompt up to the end of that block).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from aioprefill.errors import ConfigError

BLOCK = 512
"""Tokens of a block."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    length: int
    """Prompt tokens."""
    blocks: npt.NDArray[np.uint32]
    """Block ids, shape (ceil(length / BLOCK),)."""

    def tokens(self) -> npt.NDArray[np.uint32]:
        """Token ids, shape (length,), made from the block ids: shared blocks are shared prefixes."""
        return np.repeat(self.blocks, BLOCK)[: self.length]


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests by arrival. Raises `OSError` when there is no such file, `ConfigError` for a bad one."""
    requests = []
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            item = decoder.decode(line)
            blocks = np.array(item.hash_ids, dtype=np.uint32)
        except (msgspec.MsgspecError, OverflowError) as err:
            raise ConfigError(f"{path}, line {number}: {err}") from err
        if item.input_length < 1 or len(blocks) != -(-item.input_length // BLOCK):
            message = f"{item.input_length} tokens in {len(blocks)} blocks of {BLOCK}"
            raise ConfigError(f"{path}, line {number}: {message}")
        requests.append(TraceRequest(item.timestamp / 1e3, item.input_length, blocks))
    if not requests:
        raise ConfigError(f"{path} holds no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def uncached_tokens(trace: Sequence[TraceRequest]) -> int:
    """Tokens to compute with a prefix cache that never evicts, one request after the other.

    Only full blocks are reused, and at least one token of a prompt is computed.
    """
    seen: set[int] = set()
    total = 0
    for request in trace:
        ids = request.blocks.tolist()
        most = (request.length - 1) // BLOCK
        hit = next((place for place, block in enumerate(ids[:most]) if block not in seen), most)
        total += request.length - hit * BLOCK
        seen.update(ids[: request.length // BLOCK])
    return total
