"""Which shapes of an SGLang server the loop serves. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """What matters of a server's arguments."""

    tensor_ranks: int = 1
    world_ranks: int | None = None
    """Of the torch.distributed group that the tensor-parallel ones are in; None: not known."""
    pipeline_ranks: int = 1
    attention_data_ranks: int = 1
    attention_context_ranks: int = 1
    speculative: bool = False
    generation: bool = True
    diffusion: bool = False
    overlap: bool = True
    multiplexed: bool = False
    """Prefill and decode share a device by SGLang's PD multiplexing."""

    @property
    def unsupported(self) -> str | None:
        """What is not supported, in words, or None."""
        if self.pipeline_ranks > 1:
            return f"pipeline parallelism ({self.pipeline_ranks} stages)"
        if not self.overlap:
            return "a server without the overlap schedule (--disable-overlap-schedule)"
        if self.attention_data_ranks > 1:
            return f"attention data parallelism ({self.attention_data_ranks} ranks)"
        if self.attention_context_ranks > 1:
            return f"attention context parallelism ({self.attention_context_ranks} ranks)"
        if self.speculative:
            return "speculative decoding"
        if not self.generation:
            return "an embedding or reward model"
        if self.diffusion:
            return "a diffusion language model"
        if self.multiplexed:
            return "PD multiplexing"
        if self.tensor_ranks > 1 and self.world_ranks not in (None, self.tensor_ranks):
            return f"tensor parallelism ({self.tensor_ranks} ranks) among {self.world_ranks} processes"
        return None


def shape_of(scheduler: Any) -> Shape:
    """The shape of a scheduler; needs SGLang's published configuration."""
    import torch.distributed
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return Shape(
        tensor_ranks=parallel.tp_size,
        world_ranks=torch.distributed.get_world_size() if torch.distributed.is_initialized() else None,
        pipeline_ranks=parallel.pp_size,
        attention_data_ranks=parallel.attn_dp_size,
        attention_context_ranks=parallel.attn_cp_size,
        speculative=not scheduler.spec_algorithm.is_none(),
        generation=bool(scheduler.is_generation),
        diffusion=scheduler.dllm_config is not None,
        overlap=bool(scheduler.enable_overlap),
        multiplexed=bool(getattr(scheduler, "enable_pdmux", False)),
    )
