"""A real prefill scheduler of SGLang's in this process, for the benchmark `sglang`, and requests for it."""

from __future__ import annotations

import os
import random
from array import array
from typing import Any

import msgspec
import zmq

BLOCKING, POLLING, PLUGIN = MODES = ("sglang_blocking", "sglang_polling", "plugin")
WARM_UP = 6
"""Results before the window of a measurement opens, in every mode."""
SERVER = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disaggregation_mode": "prefill",
    "disaggregation_transfer_backend": "mooncake_tcp",
    "max_total_tokens": 1 << 16,
    "max_running_requests": 512,
    "context_length": 2048,
    "chunked_prefill_size": 8192,
    "mem_fraction_static": 0.5,
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
}
"""SGLang's server arguments: nothing waits for memory or room in a batch, only for the device."""


class Task(msgspec.Struct):
    """What to measure."""

    mode: str
    forward_ms: float
    jitter: float
    forwards: int
    """Results in the window."""
    rate: float
    tokens: int
    """Of a prompt, on average: from a fifth of it to nine fifths."""
    idle_s: float
    alone_s: float
    """How long the side thread runs alone, before and after, to know what it manages."""
    model: str
    ranks: int = 1
    """Tensor-parallel ones, each with a process of its own."""
    rank: int = 0
    meeting: str = ""
    """Where ranks meet, HOST:PORT; rank 0 chooses it."""


def environment(mode: str, ranks: int) -> dict[str, str]:
    """What SGLang, and the plugin, read from the environment, by mode. Several ranks need cores named."""
    chosen = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",  # it uses CUDA events
        "SGLANG_ENABLE_DISAGG_PREFILL_CONTINUOUS_INPUT_POLLING": "1" if mode == POLLING else "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if ranks > 1:
        cores = os.cpu_count() or 1
        chosen["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(ranks))
    return {**chosen, "AIOPREFILL": "require"} if mode == PLUGIN else {**chosen, "AIOPREFILL": "0"}


def make_scheduler(task: Task) -> tuple[Any, str]:
    """The scheduler, with its plugins loaded as its own process does, and where it takes requests.

    Raises `RuntimeError` where the loop of another mode would run.
    """
    from sglang.srt.disaggregation import prefill
    from sglang.srt.distributed import bootstrap
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs
    from sglang.srt.utils import configure_logger

    from aioprefill.bench.sglang_device import timed_kv_class

    own_loop = Scheduler.event_loop_overlap_disagg_prefill
    load_plugins()
    if (Scheduler.event_loop_overlap_disagg_prefill is not own_loop) != (task.mode == PLUGIN):
        raise RuntimeError(f"mode {task.mode}, but SGLang's plugins have put the other loop in place")
    prefill.get_kv_class = timed_kv_class
    bootstrap.maybe_init_shared_mooncake_transfer_engine = lambda **_: None
    shape = {"tp_size": task.ranks, "dist_init_addr": task.meeting}
    arguments = ServerArgs(model_path=task.model, **shape, **SERVER)
    arguments.resolve_once()
    place = SpawnRanks(world_rank=task.rank, dp_rank=None, gpu_id=task.rank)
    publish(arguments, role="scheduler", ranks=place)
    configure_logger(arguments)
    ports = PortArgs.init_new(arguments)
    return Scheduler(arguments, ports), ports.scheduler_input_ipc_name


def encode_messages(task: Task) -> list[bytes]:
    """Enough requests for the forwards, and a shutdown, as SGLang's tokenizer sends them."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.managers.io_struct import ShutdownReq, TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    draw = random.Random(3)
    shortest, longest = max(1, task.tokens // 5), task.tokens * 9 // 5
    wall_s = (task.forwards + 2 * WARM_UP) * max(task.forward_ms / 1e3, 1 / task.rate)
    messages: list[Any] = []
    for number in range(int(2 * task.rate * wall_s) + 100):
        parameters = SamplingParams(max_new_tokens=4, temperature=0.0)
        parameters.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=str(number),
            input_text=None,
            input_ids=array("q", draw.choices(range(2, 250), k=draw.randint(shortest, longest))),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=parameters,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            bootstrap_host=FAKE_BOOTSTRAP_HOST,
            bootstrap_port=8998,
            bootstrap_room=number + 1,
        )
        messages.append(request)
    return encode([*messages, ShutdownReq()])


def encode(messages: list[Any]) -> list[bytes]:
    """What SGLang puts on its sockets for these: its encoding depends on its settings."""
    from sglang.srt.managers.io_struct import sock_send

    found: list[bytes] = []
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        there.bind("inproc://encode")
        here.connect("inproc://encode")
        for message in messages:
            sock_send(here, message)
            found.append(there.recv())
    return found
