"""In what order waiting requests are tried. Pure functions: (requests, now, outlook) -> ordered list.

Rules:
- Deterministic: ties go to the earlier arrival.
- No policy starves: a request that has waited `max_wait_s` is overdue, and overdue ones come before all
  others, oldest first. So nothing that arrived later is tried before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aioprefill.native.request_state import Request


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a policy may know besides the requests."""

    max_wait_s: float
    """Bound on the wait, seconds since arrival."""
    tokens_per_s: float = 0.0
    """Prefill speed of large forwards as learned; 0: not known yet."""


Order = Callable[[Iterable[Request], float, Outlook], list[Request]]


def remaining(request: Request) -> int:
    """Tokens to compute, as far as the prefix cache was seen to cover the prompt; at least 1."""
    return max(1, request.length - max(request.planned, request.expected_cached))


def overdue(request: Request, now: float, outlook: Outlook) -> bool:
    """The request has waited for its bound: nothing may pass it any more."""
    return now - request.arrival_s >= outlook.max_wait_s


def hopeless_from(request: Request, outlook: Outlook) -> float | None:
    """Time from which the request's deadline cannot be met, even if it were next; None: no deadline.

    Optimistic, so that nothing is given up that could still be in time: the whole device, at full speed.
    """
    if request.due_s is None:
        return None
    if outlook.tokens_per_s <= 0:
        return request.due_s
    return request.due_s - remaining(request) / outlook.tokens_per_s


def hopeless(request: Request, now: float, outlook: Outlook) -> bool:
    """The request's deadline cannot be met any more."""
    latest = hopeless_from(request, outlook)
    return latest is not None and now > latest


def _arrival(request: Request) -> int:
    return request.arrival


def _bounded(
    waiting: Iterable[Request], now: float, outlook: Outlook, key: Callable[[Request], Any]
) -> list[Request]:
    """Overdue ones by age, then the others by `key`, ties by arrival."""
    late: list[Request] = []
    others: list[Request] = []
    for request in waiting:
        (late if overdue(request, now, outlook) else others).append(request)
    late.sort(key=_arrival)
    others.sort(key=_arrival)  # sorts are stable, and `waiting` mostly is in this order: nearly free
    others.sort(key=key)
    return late + others


def first_come_first_served(waiting: Iterable[Request], now: float, outlook: Outlook) -> list[Request]:
    """Oldest arrival first."""
    return sorted(waiting, key=_arrival)


def longest_prefix(waiting: Iterable[Request], now: float, outlook: Outlook) -> list[Request]:
    """Most cached tokens first, while they are in the cache."""
    return _bounded(waiting, now, outlook, lambda request: -request.expected_cached)


def shortest_first(waiting: Iterable[Request], now: float, outlook: Outlook) -> list[Request]:
    """Fewest tokens to compute first: the lowest mean, at the cost of long prompts."""
    return _bounded(waiting, now, outlook, remaining)


def highest_response_ratio(waiting: Iterable[Request], now: float, outlook: Outlook) -> list[Request]:
    """Highest (wait + service) / service first, where service is in proportion to the tokens to compute.

    Short prompts go first, yet a long one gains on them with every second that it waits.
    """
    return _bounded(waiting, now, outlook, lambda request: (request.arrival_s - now) / remaining(request))


def by_priority(waiting: Iterable[Request], now: float, outlook: Outlook) -> list[Request]:
    """Highest `priority` first."""
    return _bounded(waiting, now, outlook, lambda request: -request.priority)


def earliest_deadline(waiting: Iterable[Request], now: float, outlook: Outlook) -> list[Request]:
    """Earliest deadline first; without one, a request is due when its wait reaches the bound.

    Deadlines that cannot be met come last, or they would make others late in vain.
    """

    def key(request: Request) -> tuple[bool, float]:
        due = request.arrival_s + outlook.max_wait_s if request.due_s is None else request.due_s
        return hopeless(request, now, outlook), due

    return _bounded(waiting, now, outlook, key)


POLICIES: dict[str, Order] = {
    "fcfs": first_come_first_served,
    "longest-prefix": longest_prefix,
    "shortest-first": shortest_first,
    "hrrn": highest_response_ratio,
    "priority": by_priority,
    "deadline": earliest_deadline,
}
"""By the names of the option `policy`."""
