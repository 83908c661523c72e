"""The ranks of one sharded model: the device mesh it runs on, and how the ranks agree while it is loaded.

Two process groups, because collectives of one group must come in the same order on all ranks: forwards use
that of the mesh (from the stream thread), everything else one of our own, in which weights can be staged
while forwards run.

Rule: what can fail on one rank alone stands inside `same_outcome` and makes no collectives of its own.
What makes collectives stands outside: a rank that failed in the middle of one must not wait for the others
to agree about it. It raises, and its process ends, which the others' collectives report.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from aioprefill.engine.model_loader import parse_device
from aioprefill.engine.model_shard import check_divides
from aioprefill.engine.shard import EngineShard, device_name
from aioprefill.errors import ConfigError, HostError, ModelError

T = TypeVar("T")

_TEXT_BYTES = 2048


class ShardGroup:
    """One rank's side of it. Making and placing it are collectives: all ranks do both, in the same order."""

    mesh: DeviceMesh
    """Of one dimension, over all ranks: what the model is divided over. Set by `place`."""

    def __init__(self, shard: EngineShard) -> None:
        """Raises `ConfigError` when the default process group is missing or is another one."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"tp {shard.size}: initialize torch.distributed's default group before the model is loaded"
            )
        found = dist.get_rank(), dist.get_world_size()
        if found != (shard.rank, shard.size):
            raise ConfigError(
                f"tp {shard.size}: this is rank {shard.rank} of {shard.size}, but the process group says "
                f"rank {found[0]} of {found[1]}"
            )
        self.shard = shard
        self._own: dist.ProcessGroup | None = dist.new_group(backend="gloo")
        self.staging_mesh = DeviceMesh.from_group(self._own, "cpu", mesh_dim_names=("tp",))
        """For weights that are only read. On the CPU: a second NCCL communicator could block forwards."""
        self._executor = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="aioprefill-shard-staging"
        )

    def place(self, path: Path, fingerprint: str, device: str) -> torch.device:
        """This rank's device, once all ranks have one and their model can be divided; makes the mesh.

        Raises `ModelError` on all ranks when one cannot go on, or has other model files.
        """
        with self.same_outcome():
            check_divides(path, self.shard.size)
            target = parse_device(device_name(device, self.shard))
        self.check_same("model files", fingerprint)
        if target.type == "cuda":
            torch.cuda.set_device(target)
        self.mesh = init_device_mesh(target.type, (self.shard.size,), mesh_dim_names=("tp",))
        return target

    def __repr__(self) -> str:
        return f"<ShardGroup rank={self.shard.rank}/{self.shard.size}>"

    def gather(self, text: str) -> list[str]:
        """Every rank's text, by rank; texts are cut at 2 KiB. Waits for the slowest rank.

        Raises `HostError` when a rank is gone.
        """
        data = text.encode()[:_TEXT_BYTES]
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        texts = [torch.empty_like(mine) for _ in range(self.shard.size)]
        try:
            dist.all_gather(texts, mine, group=self._own)
        except RuntimeError as err:
            raise HostError(f"the ranks cannot agree, one of them is gone: {err}") from err
        return [bytes(one.tolist()).rstrip(b"\0").decode(errors="ignore") for one in texts]

    def smallest(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return min(int(text) for text in self.gather(str(number)))

    def check_same(self, what: str, text: str) -> None:
        """Raise `ModelError` on every rank when the texts differ."""
        texts = self.gather(text)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise ModelError(f"rank {rank} has other {what} than rank 0: {other!r}, not {texts[0]!r}")

    @contextlib.contextmanager
    def same_outcome(self) -> Iterator[None]:
        """What is inside ends on all ranks the same way: where one raises, the others raise `ModelError`."""
        try:
            yield
        except Exception as err:
            with contextlib.suppress(HostError):
                self.gather(str(err) or repr(err))
            raise
        for rank, text in enumerate(self.gather("")):
            if text:
                raise ModelError(f"rank {rank}: {text}")

    def common_seeds(self) -> Callable[[], int]:
        """Seeds for rows without one: all ranks must sample the same token, so they draw the same numbers.

        Nobody outside can guess them. A collective.
        """
        return partial(random.Random(self.gather(secrets.token_hex(32))[0]).getrandbits, 63)

    def run(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Queue `work`, which uses this group, off the loop: one after the other, in the order of calls."""
        return self._executor.submit(work)

    def close(self) -> None:
        """Let go of the process group, without waiting for what is running in it. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        group, self._own = self._own, None
        if group is not None and dist.is_initialized():
            # the default group is its maker's; without it this one is gone, too
            with contextlib.suppress(ValueError, AssertionError):
                dist.destroy_process_group(group)
