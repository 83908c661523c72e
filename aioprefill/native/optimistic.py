"""Optimistic prefill: launched before the handshake with the decode peer has ended. Pure.

Rules: those that are ready go first; where pages are short, an optimistic prompt yields its own and waits
again, but only when no chunk of it is in flight. The latest one yields first.
"""

from __future__ import annotations

from collections.abc import Iterable

from aioprefill.native.request_state import Request


def is_early(request: Request) -> bool:
    """Its peer cannot take its KV yet."""
    return request.peer is not None and not request.bootstrapped


def split(under_way: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """Prompts under way that are ready for their peer, and those that are early; each in order."""
    ready: list[Request] = []
    early: list[Request] = []
    for request in under_way:
        (early if is_early(request) else ready).append(request)
    return ready, early


def victim(wanting: Request, under_way: Iterable[Request]) -> Request | None:
    """Who yields its pages to `wanting`; None: nobody can, or `wanting` is early itself."""
    if is_early(wanting):
        return None
    found = None
    for request in under_way:
        if is_early(request) and request.in_flight == 0:
            found = request
    return found
