"""New weights for a model that serves: read and examined beside it, then copied in at one blow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from aioprefill.engine.model_folder import weight_files
from aioprefill.engine.model_loader import load_model
from aioprefill.engine.model_manifest import model_fingerprint, record_files
from aioprefill.engine.shard import local_part
from aioprefill.errors import ModelError

if TYPE_CHECKING:
    from aioprefill.engine.shard_group import ShardGroup


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Every tensor of a checkpoint, or this rank's part of it, fitting the model it was staged for."""

    folder: Path
    tensors: dict[str, torch.Tensor]
    fingerprint: str
    """Names the weights: that of a server which begins with this folder."""


def stage(model: PreTrainedModel, folder: Path, dtype: str, device: torch.device) -> StagedWeights:
    """Read a folder of safetensors and compare it with `model`, which is not touched.

    Blocks for seconds. Raises `ModelError` naming the first tensor that does not fit.
    """
    before = _times(folder)
    fresh = load_model(folder, dtype=dtype, device=device)
    tensors = _fitting(model, fresh, folder)
    fingerprint = _fingerprint(folder)
    _check_unchanged(folder, before)
    return StagedWeights(folder, tensors, fingerprint)


def stage_shard(model: PreTrainedModel, folder: Path, dtype: str, group: ShardGroup) -> StagedWeights:
    """The same for one rank's part, on the CPU. All ranks stage the same folder at the same time.

    Raises `ModelError` on all ranks when one rank cannot, or sees other files; `HostError` when one is gone.
    """
    with group.same_outcome():
        before = _times(folder)
        fingerprint = _fingerprint(folder)
    # first: ranks that read the same files find the same faults in them
    group.check_same("new weights", fingerprint)
    with group.same_outcome():
        fresh = load_model(folder, dtype=dtype, device=torch.device("cpu"), mesh=group.staging_mesh)
        tensors = _fitting(model, fresh, folder)
        _check_unchanged(folder, before)
        device = model.device
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return StagedWeights(folder, tensors, fingerprint)


def _fitting(model: PreTrainedModel, fresh: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """The local part of every tensor of `fresh`, in the formats of `model`, which it must fit."""
    if type(fresh) is not type(model):
        raise ModelError(
            f"{folder} holds a {type(fresh).__name__}, this server runs a {type(model).__name__}"
        )
    theirs, mine = fresh.state_dict(), model.state_dict()
    for name in sorted(mine.keys() | theirs.keys()):
        if name not in theirs or name not in mine:
            raise ModelError(f"{folder}: tensor {name} is {'missing' if name in mine else 'one too many'}")
        if theirs[name].shape != mine[name].shape:
            shapes = f"{tuple(theirs[name].shape)}, this server's is {tuple(mine[name].shape)}"
            raise ModelError(f"{folder}: tensor {name} has shape {shapes}")
    return {name: local_part(tensor).to(mine[name].dtype) for name, tensor in theirs.items()}


def _fingerprint(folder: Path) -> str:
    return model_fingerprint(folder, record_files(folder, weight_files(folder), "new weights"))


def _check_unchanged(folder: Path, before: dict[str, int]) -> None:
    if _times(folder) != before:
        raise ModelError(f"{folder} was changed while it was read: try again when it is complete")


def _times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def copy_in(model: PreTrainedModel, staged: StagedWeights) -> None:
    """Put staged weights in place. For the stream thread: no forward may run meanwhile."""
    # not in the stream thread's inference mode: a DTensor that is detached there has no local part to write
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in model.state_dict().items():
            local_part(tensor).copy_(staged.tensors[name])
