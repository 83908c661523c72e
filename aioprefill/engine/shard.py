"""Where an engine stands among tensor-parallel ranks. Imports no torch; at one rank it does nothing."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from aioprefill.engine.shard_group import ShardGroup


@dataclass(frozen=True, slots=True)
class EngineShard:
    """One engine's place: part `rank` of `size`. Its KV pages hold the heads of that part only.

    The process has initialized torch.distributed's default group of `size` ranks before it loads the
    engine; all ranks load the same model at the same time with the same settings.
    """

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside of 0..{self.size - 1}")


def default_threads(size: int) -> int:
    """CPU threads of one operator, where `size` ranks share the machine's cores and nobody says."""
    return max(1, len(os.sched_getaffinity(0)) // size)


def device_name(device: str, shard: EngineShard) -> str:
    """ "cuda" without a number is a device of this rank's own; anything else stays as it is.

    The number is LOCAL_RANK, which whoever starts ranks on several machines sets, or else the rank.
    """
    if device != "cuda":
        return device
    return f"cuda:{os.environ.get('LOCAL_RANK', shard.rank)}"


def same_outcome(group: ShardGroup | None) -> contextlib.AbstractContextManager[None]:
    """`ShardGroup.same_outcome`; nothing at one rank."""
    return contextlib.nullcontext() if group is None else group.same_outcome()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight; the tensor itself where it is not divided."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of everything, on every rank. A collective where it is divided."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()
