"""In what order waiting requests are tried. Pure functions of the requests alone."""

from __future__ import annotations

from collections.abc import Iterable

from aioprefill.native.request_state import Request


def first_come_first_served(waiting: Iterable[Request]) -> list[Request]:
    """Oldest arrival first."""
    return sorted(waiting, key=lambda request: request.arrival)
