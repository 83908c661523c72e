"""What the adapter uses of SGLang's scheduler, and whether this SGLang has it. Pure.

SGLang's prefill loop is no public interface. So the release is checked, and then every member by its name
and parameters: what is missing is told instead of failing in the middle of a request.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

SUPPORTED_RELEASES = ("0.5.23",)
"""Releases that the tests have run against."""

METHODS: dict[str, tuple[str, ...]] = {
    "_apply_war_barrier": (),
    "_record_scheduler_state_for_paused_engine": (),
    "_war_barrier_is_coarse": (),
    "get_next_disagg_prefill_batch_to_run": ("running_batch", "last_batch", "should_retry_storage_prefetch"),
    "ingest_requests": ("stop_at_pause",),
    "launch_batch_sample_if_needed": ("batch_result", "cur_batch"),
    "maybe_prefetch_staging_for_batch": ("batch",),
    "maybe_send_health_check_signal": (),
    "on_idle": (),
    "process_batch_result": ("batch", "result"),
    "process_disagg_prefill_inflight_queue": (),
    "process_input_requests": ("recv_reqs",),
    "process_prefill_chunk": ("last_batch", "running_batch"),
    "publish_load_snapshot": ("force",),
    "run_batch": ("batch",),
}
"""Methods of the scheduler's class and the parameters that they are called with."""

ATTRIBUTES = (
    "_deferred_input_requests",
    "_engine_paused",
    "_sched_idled",
    "chunked_req",
    "cur_batch_for_debug",
    "device",
    "disagg_prefill_bootstrap_queue.pop_bootstrapped",
    "disagg_prefill_bootstrap_queue.queue",
    "disagg_prefill_inflight_queue",
    "enable_continuous_input_polling",
    "enable_staging",
    "gracefully_exit",
    "grammar_manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS",
    "grammar_manager.SGLANG_GRAMMAR_POLL_INTERVAL",
    "grammar_manager.grammar_queue",
    "grammar_manager.has_waiting_grammars",
    "idle_sleeper",
    "internal_state.get_internal_state",
    "last_batch",
    "load_inquirer.get_loads",
    "load_publisher.publish_load_stat",
    "ngram_embedding_manager.prepare_for_forward",
    "request_receiver.recv_requests",
    "result_queue",
    "return_health_check_ipcs",
    "running_batch",
    "server_args.dist_init_addr",
    "server_args.nnodes",
    "tp_size",
    "waiting_queue",
)
"""Attributes of a scheduler that serves as prefill; a dot goes one deeper."""


def release_fault(release: str) -> str | None:
    """Why this release of SGLang is not served, or None."""
    if release in SUPPORTED_RELEASES:
        return None
    return f"SGLang {release} is not supported, only {', '.join(SUPPORTED_RELEASES)}"


def class_faults(scheduler_class: type) -> Iterator[str]:
    """What the scheduler's class lacks, a phrase each."""
    for name, parameters in METHODS.items():
        method = getattr(scheduler_class, name, None)
        if not callable(method):
            yield f"no method {name}"
            continue
        known = inspect.signature(method).parameters
        yield from (f"{name} takes no {wanted!r}" for wanted in parameters if wanted not in known)


def instance_faults(scheduler: Any) -> Iterator[str]:
    """What a scheduler that serves as prefill lacks, a phrase each."""
    yield from class_faults(type(scheduler))
    for path in ATTRIBUTES:
        owner = scheduler
        for name in path.split("."):
            if not hasattr(owner, name):
                yield f"no {path}"
                break
            owner = getattr(owner, name)
