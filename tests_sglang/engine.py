"""A real SGLang Scheduler in this process, with a tiny model and no sockets that anybody listens to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 64
POOL_TOKENS = 2048

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SGLANG_HOST_IP", "127.0.0.1")
# CUDA events that CPU torch does not have
os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")


def make_scheduler(model: Path, *, rank: int = 0, **settings: Any) -> Any:
    """A prefill Scheduler; one at a time in a process. `settings` are SGLang's server arguments."""
    import fake_transfer
    from sglang.srt.disaggregation import prefill
    from sglang.srt.distributed import bootstrap
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    prefill.get_kv_class = fake_transfer.scripted_kv_class
    bootstrap.maybe_init_shared_mooncake_transfer_engine = lambda **_: None
    chosen = {
        "model_path": str(model),
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "xgrammar",
        "disaggregation_mode": "prefill",
        "disaggregation_transfer_backend": "mooncake_tcp",
        "max_total_tokens": POOL_TOKENS,
        "context_length": 2048,
        "chunked_prefill_size": CHUNK_TOKENS,
        "mem_fraction_static": 0.5,
        "disable_cuda_graph": True,
        "log_level": "warning",
        **settings,
    }
    arguments = ServerArgs(**chosen)
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
    return Scheduler(arguments, PortArgs.init_new(arguments))
