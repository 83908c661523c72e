"""What SGLang's scheduler has at a moment: its requests and how many of each kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def unfinished(scheduler: Any, launched: Iterable[Any]) -> list[str]:
    """Ids of all its requests; `launched` are those of the forwards in flight."""
    half = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    waiting = [*scheduler.waiting_queue, *scheduler.disagg_prefill_bootstrap_queue.queue]
    moving = scheduler.disagg_prefill_inflight_queue
    return _ids([*moving, *launched, *half, *waiting, *scheduler.grammar_manager.grammar_queue])


def ending(scheduler: Any, launched: Iterable[Any]) -> list[str]:
    """Ids of those that will still end when nothing more is launched: no half prompts."""
    whole = [request for request in launched if request is not scheduler.chunked_req]
    return _ids([*whole, *scheduler.disagg_prefill_inflight_queue])


def counts(scheduler: Any) -> Mapping[str, int]:
    """Lengths of its queues."""
    return {
        "waiting": len(scheduler.waiting_queue),
        "bootstrapping": len(scheduler.disagg_prefill_bootstrap_queue.queue),
        "transferring": len(scheduler.disagg_prefill_inflight_queue),
    }


def aborted(request: Any) -> bool:
    """It has ended by an abort or a failure."""
    return type(request.finished_reason).__name__ == "FINISH_ABORT"


def _ids(requests: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(request.rid for request in requests))
