"""Tells in SGLang's `/server_info` that this loop runs, and what it has done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

KEY = "aioprefill"
"""Stands in each of `internal_states` while the loop runs, and only then."""

Plain = str | int | float | bool


@contextmanager
def told_in_server_info(
    scheduler: Any, facts: Mapping[str, Plain], counters: Callable[[], Mapping[str, Plain]]
) -> Iterator[None]:
    """Add `facts`, and what `counters` says at that moment, to each answer of the scheduler's state."""
    controller = scheduler.internal_state
    own = controller.get_internal_state

    def get_internal_state(request: Any) -> Any:
        answer = own(request)
        answer.internal_state[KEY] = {**facts, **counters()}
        return answer

    controller.get_internal_state = get_internal_state
    try:
        yield
    finally:
        del controller.get_internal_state
