"""The vote's two collectives over a torch.distributed group on the CPU (Gloo)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

GATHER_BYTES = 2048
"""What one rank may say in a gathering; longer texts are cut by who says them."""


class GroupCollectives:
    """Implements `tp_agree.Collectives`. All calls are made by one thread."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)

    def least(self, vector: Sequence[int]) -> Sequence[int]:
        """See `Collectives.least`. Raises `RuntimeError` when a rank is lost or too late."""
        tensor = torch.tensor(vector, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        least: list[int] = tensor.tolist()
        return least

    def gather(self, data: bytes) -> Sequence[bytes]:
        """See `Collectives.gather`. Raises `ValueError` for more than `GATHER_BYTES`."""
        if len(data) > GATHER_BYTES:
            raise ValueError(f"{len(data)} bytes are to be gathered, the limit is {GATHER_BYTES}")
        mine = torch.zeros(4 + GATHER_BYTES, dtype=torch.uint8)
        framed = len(data).to_bytes(4, "little") + data
        mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        gathered = [torch.zeros_like(mine) for _ in range(self._size)]
        dist.all_gather(gathered, mine, group=self._group)
        return [_unframed(bytes(one.numpy())) for one in gathered]


def _unframed(framed: bytes) -> bytes:
    length = int.from_bytes(framed[:4], "little")
    return framed[4 : 4 + length]
