"""Loads a decoder-only checkpoint with transformers, and reads from its config what a host must know."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from aioprefill.engine.kv_pool import TORCH_DTYPES
from aioprefill.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


def parse_device(device: str) -> torch.device:
    """The device called "cpu", "cuda" or "cuda:1". Raises `ConfigError` when it is not there."""
    try:
        parsed = torch.device(device)
    except RuntimeError as err:
        raise ConfigError(f"device: {device!r} is not a device; say cpu, cuda or cuda:N") from err
    if parsed.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: {device!r} is not supported; say cpu, cuda or cuda:N")
    if parsed.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device: {device!r} was asked for, but torch finds no CUDA device here")
    index = torch.cuda.current_device() if parsed.index is None else parsed.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device: there is no {device!r}, torch finds {torch.cuda.device_count()} devices")
    return torch.device("cuda", index)


def load_model(
    path: Path, *, dtype: str, device: torch.device, mesh: DeviceMesh | None = None
) -> PreTrainedModel:
    """The model of a local folder, ready for inference. Only safetensors are read, no code of the folder.

    With `mesh` (one dimension, of this device's type) its weights are this rank's part of the model, and
    its forwards are collectives of the mesh.

    Raises `ModelError` when the folder holds no model that transformers can load, `ConfigError` for an
    unknown dtype.
    """
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is unknown; say one of {', '.join(sorted(TORCH_DTYPES))}")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no model: there is no config.json in it")
    try:
        with _quiet(), _placed(mesh, device) as placement:
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=TORCH_DTYPES[dtype],
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **placement,
            )
        model = model.to(device)
    except Exception as err:
        # whatever a broken or foreign folder makes transformers raise, it is the model that is wrong
        raise ModelError(f"{path} cannot be loaded on {device} in {dtype}: {err}") from err
    if report["missing_keys"]:
        # transformers fills them with random numbers
        missing = sorted(report["missing_keys"])
        raise ModelError(f"{path} lacks {len(missing)} of its weights, such as {', '.join(missing[:3])}")
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def _placed(
    mesh: DeviceMesh | None, device: torch.device
) -> contextlib.AbstractContextManager[dict[str, Any]]:
    """How `from_pretrained` is to divide the model."""
    if mesh is None:
        return contextlib.nullcontext({})
    from aioprefill.engine.model_shard import sharded

    return sharded(mesh, device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for weights: a server's log is not a terminal."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def text_config(model: PreTrainedModel) -> Any:
    """The config of the language model (of multimodal ones, too)."""
    return model.config.get_text_config(decoder=True)


def context_length(model: PreTrainedModel) -> int:
    """Longest sequence for which the model means the same whatever else is in a batch.

    Some architectures behave differently past a limit: longrope switches its frequencies for the whole
    batch, chunked attention forgets what is before its chunk. Those are served up to that limit.
    """
    config = text_config(model)
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise ModelError(f"{type(model).__name__} does not say its context length (max_position_embeddings)")
    limits = [
        ("attention_chunk_size", getattr(config, "attention_chunk_size", None)),
        ("longrope's original_max_position_embeddings", _longrope_limit(config)),
    ]
    for name, limit in limits:
        if isinstance(limit, int) and 0 < limit < longest:
            logger.warning("the context is limited to %d tokens of %d: %s", limit, longest, name)
            longest = limit
    return longest


def _longrope_limit(config: Any) -> int | None:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(rope, dict) or rope.get("rope_type") != "longrope":
        return None
    limit = rope.get("original_max_position_embeddings")
    return limit or getattr(config, "original_max_position_embeddings", None)


def vocab_size(model: PreTrainedModel) -> int:
    """Number of token ids that the embedding takes."""
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return int(size if size is not None else text_config(model).vocab_size)


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config, or else of the config; may be empty."""
    for config in (getattr(model, "generation_config", None), text_config(model)):
        ids = getattr(config, "eos_token_id", None)
        if isinstance(ids, int):
            return (ids,)
        if ids:
            return tuple(int(i) for i in ids)
    return ()
