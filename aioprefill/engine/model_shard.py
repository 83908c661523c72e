"""Divides a checkpoint over ranks by transformers' tensor-parallel plan, or says why that cannot be."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig
from transformers.distributed import DistributedConfig, mixin

from aioprefill.errors import ModelError

_patching = threading.Lock()


def check_divides(path: Path, size: int) -> None:
    """Raise `ModelError` when a folder's model cannot be divided over `size` ranks. Reads its config only.

    Every rank finds the same, before any of them waits for the others.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config(decoder=True)
        heads = int(text.num_attention_heads)
        kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    except Exception as err:
        # whatever a broken or foreign folder makes transformers raise, it is the model that is wrong
        raise ModelError(f"{path}: its config does not say how to divide it over ranks: {err}") from err
    if not (getattr(text, "base_model_tp_plan", None) or getattr(config, "base_model_tp_plan", None)):
        raise ModelError(
            f"transformers has no tensor-parallel plan for {text.model_type} models, so they cannot be "
            f"divided over {size} ranks; use --tp 1"
        )
    for name, count in (("KV head", kv_heads), ("attention head", heads)):
        if count % size:
            those = f"{count} {name}s, they" if count > 1 else f"1 {name}, it"
            raise ModelError(
                f"the model has {those} cannot be divided over {size} ranks; "
                f"use {_sizes(math.gcd(heads, kv_heads))}"
            )


def _sizes(heads: int) -> str:
    """The numbers of ranks that `heads` can be divided over, as advice."""
    sizes = [f"--tp {size}" for size in range(heads, 0, -1) if heads % size == 0]
    return " or ".join(filter(None, [", ".join(sizes[:-1]), sizes[-1]]))


class _Mesh:
    """Gives transformers the mesh that we made, whichever of its dimensions it asks for."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        return self._mesh


@contextlib.contextmanager
def sharded(mesh: DeviceMesh, device: torch.device) -> Iterator[dict[str, Any]]:
    """The arguments that make `from_pretrained` give each rank of `mesh` its part of the weights.

    transformers (5.24) takes a mesh as an argument but does not use it: it makes one for each model, on
    the accelerator that the machine has, with the numbers of torchrun's environment. This rank's device,
    and whether the model is served or only staged, are known here.
    """
    config = DistributedConfig(tp_plan="auto", tp_size=mesh.size())
    with _patching:
        made = mixin.initialize_distributed_mesh
        mixin.initialize_distributed_mesh = lambda _: (device, _Mesh(mesh))
        try:
            yield {"distributed_config": config}
        finally:
            mixin.initialize_distributed_mesh = made
