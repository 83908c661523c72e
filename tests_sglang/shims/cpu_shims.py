"""A plugin of SGLang for tests: what its Mooncake sender lacks on a machine without CUDA."""

from __future__ import annotations


def register() -> None:
    """Called by SGLang in each of its processes. Page indices are host tensors here, not what it expects."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False
