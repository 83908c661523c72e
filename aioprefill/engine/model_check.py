"""Examines a model at load: does it run on paged attention, in what shapes, and with the right result?

Anything that paged attention does not know must be refused here, by name: at run time it would only give
wrong tokens. Two looks: one forward with a recorder in place of the pool, which sees what every layer asks
of its attention; then a few tokens in chunks over pages, against the model's own attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from aioprefill.engine.model_loader import text_config, vocab_size
from aioprefill.engine.paged_attention import ATTENTION_NAME, register
from aioprefill.engine.shard import whole
from aioprefill.errors import ModelError

# What a layer may ask of its attention. Anything else that is set is a feature we do not have.
_KNOWN = frozenset({"scaling", "sliding_window", "position_ids", "cache_position", "use_cache"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dropout": (0.0,),
    "is_causal": (True,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
    "return_dict": (True,),
}
_FEATURES = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}


class _Recorder:
    """Stands in for `PagedAttention`: notes each layer's shapes and refuses unknown features."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        self.windows: set[int] = set()

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        for name, argument in arguments.items():
            if argument is None or name in _KNOWN or argument in _NEUTRAL.get(name, ()):
                continue
            feature = _FEATURES.get(name, f"the attention argument {name}={argument!r}")
            raise ModelError(f"{type(module).__name__} uses {feature}: paged attention has no support for it")
        if not getattr(module, "is_causal", True):
            raise ModelError(f"{type(module).__name__} looks at later tokens too: it is no decoder")
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.shapes:
            raise ModelError(f"{type(module).__name__} does not number its layers, or attends twice in one")
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            raise ModelError(
                f"{type(module).__name__} has queries, keys and values of different head sizes "
                f"({query.shape[-1]}, {key.shape[-1]}, {value.shape[-1]}), which the KV pool cannot hold"
            )
        self.shapes[layer] = (key.shape[1], key.shape[3])
        if isinstance(window := arguments.get("sliding_window"), int):
            self.windows.add(window)
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=arguments.get("scaling"), enable_gqa=True
        )
        return out.transpose(1, 2)


def own_logits(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits (tokens, vocabulary) by the model's own attention; switches it to ours afterwards."""
    try:
        with torch.inference_mode():
            logits = whole(model(input_ids=token_ids[None], use_cache=False).logits)[0].float()
    except Exception as err:
        raise ModelError(f"{type(model).__name__} does not run as a language model: {err}") from err
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ModelError(f"{type(model).__name__} does not let its attention be replaced")
    return logits


def kv_shape(model: PreTrainedModel, token_ids: torch.Tensor) -> tuple[int, int, int]:
    """(layers, KV heads, head size), as seen in a forward: of a sharded model, one rank's KV heads.

    Raises `ModelError` naming what is missing.
    """
    recorder = _Recorder()
    name = type(model).__name__
    try:
        with torch.inference_mode():
            model(input_ids=token_ids[None], use_cache=False, paged=recorder)
    except ModelError:
        raise
    except Exception as err:
        raise ModelError(f"{name} does not run with replaced attention: {err}") from err
    layers = int(text_config(model).num_hidden_layers)
    if sorted(recorder.shapes) != list(range(layers)):
        missing = sorted(set(range(layers)) - set(recorder.shapes))
        raise ModelError(f"{name} keeps state outside of a KV cache, or shares it, in layers {missing[:8]}")
    if len(set(recorder.shapes.values())) != 1:
        raise ModelError(f"{name} has layers of different KV shapes: {sorted(set(recorder.shapes.values()))}")
    _check_windows(model, recorder.windows)
    return layers, *recorder.shapes[0]


def check_shard(model: PreTrainedModel, kv_heads: int, size: int, logits: torch.Tensor) -> None:
    """Raise `ModelError` unless one of `size` ranks has its part of the KV heads, and all of the logits.

    A tensor-parallel plan need not divide attention, and need not put the vocabulary together again.
    """
    name, config = type(model).__name__, text_config(model)
    total = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if kv_heads * size != total:
        raise ModelError(
            f"transformers' tensor-parallel plan of {name} gives each of {size} ranks {kv_heads} of its "
            f"{total} KV heads, which is not an equal part; use --tp 1"
        )
    if logits.shape[-1] < vocab_size(model):
        raise ModelError(
            f"transformers' tensor-parallel plan of {name} gives each rank {logits.shape[-1]} of "
            f"{vocab_size(model)} logits; use --tp 1"
        )


def _check_windows(model: PreTrainedModel, seen: set[int]) -> None:
    """A window that the config declares must reach the attention function."""
    config = text_config(model)
    kinds = getattr(config, "layer_types", None)
    declared = getattr(config, "sliding_window", None)
    windowed = kinds is None or any("sliding" in kind for kind in kinds)
    if isinstance(declared, int) and windowed and getattr(config, "use_sliding_window", True) and not seen:
        raise ModelError(f"{type(model).__name__} has a sliding window that its attention is not told")


def probe_tokens(model: PreTrainedModel, count: int) -> torch.Tensor:
    """Some token ids, spread over the vocabulary."""
    ids = (torch.arange(count) * 7919 + 13) % vocab_size(model)
    return ids.to(model.device)


def compare(model: PreTrainedModel, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raise `ModelError` when logits (rows, vocabulary) are further apart than rounding explains."""
    allowed = 1e-3 if model.dtype == torch.float32 else 0.05
    apart = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))
    if not apart <= allowed:
        raise ModelError(
            f"{type(model).__name__} gives other logits on paged attention than on its own "
            f"(relative difference {apart:.2g}): its architecture is not supported"
        )
