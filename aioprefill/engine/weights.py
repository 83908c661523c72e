"""New weights for a model that serves: read and examined beside it, then copied in at one blow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from aioprefill.engine.model_folder import weight_files
from aioprefill.engine.model_loader import load_model
from aioprefill.engine.model_manifest import model_fingerprint, record_files
from aioprefill.errors import ModelError


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Every tensor of a checkpoint, in memory, fitting the model it was staged for."""

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
    fingerprint = model_fingerprint(folder, record_files(folder, weight_files(folder), "new weights"))
    if _times(folder) != before:
        raise ModelError(f"{folder} was changed while it was read: try again when it is complete")
    tensors = {name: tensor.to(mine[name].dtype) for name, tensor in theirs.items()}
    return StagedWeights(folder, tensors, fingerprint)


def _times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def copy_in(model: PreTrainedModel, staged: StagedWeights) -> None:
    """Put staged weights in place. For the stream thread: no forward may run meanwhile."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(staged.tensors[name])
