"""A plugin of SGLang for tests: what its Mooncake sender lacks without CUDA, and a quick start."""

from __future__ import annotations

import gc
import multiprocessing
import os

PYTHONS_OWN = (700, 10, 10)


def register() -> None:
    """Called by SGLang in each of its processes. Page indices are host tensors here, not what it expects."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False
    gc.set_threshold(*PYTHONS_OWN)  # what sitecustomize changed: all is imported
    if os.environ.get("SHIMS_FORK"):
        _fork_what_sglang_spawns()


def _fork_what_sglang_spawns() -> None:
    """Its processes then share the imports of the first, which take 5 s of CPU in each."""
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: choose("fork", force=True)
