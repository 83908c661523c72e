"""Agreement between tensor-parallel ranks: the completion vote and the call order.

At TP = 1 there is no group, no executor thread and no socket: a vote is the rank's own opinion, and the
call order is a bounded log with nobody to go to.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from aioprefill.errors import DeviceError

ORDER_LOG_LENGTH = 4096
"""Calls that a log remembers."""


class CallToken(NamedTuple):
    """One host call, in the order that every rank follows."""

    number: int
    kind: str
    """Name of the host call."""
    now: float
    """Clock reading that the host decides by, seconds."""
    detail: int
    """Forward number, or -1."""


class CallOrder:
    """The numbered sequence of host calls."""

    def __init__(self) -> None:
        self.log: deque[CallToken] = deque(maxlen=ORDER_LOG_LENGTH)
        self.next_number = 0

    def append(self, kind: str, now: float, detail: int = -1) -> CallToken:
        """Number the next host call."""
        token = CallToken(self.next_number, kind, now, detail)
        self.next_number += 1
        self.log.append(token)
        return token


class Agreement(Protocol):
    """Decides when a forward is complete on all ranks."""

    async def vote(self, number: int, error: DeviceError | None) -> DeviceError | None:
        """Join the vote of forward `number`, which is ready here or failed with `error`.

        Returns the error of the first rank that failed, or None. Every launched forward gets exactly one
        vote. Cancelling the await does not abandon a vote that has begun.
        """


class SoloAgreement:
    """One rank: it agrees with itself."""

    async def vote(self, number: int, error: DeviceError | None) -> DeviceError | None:
        """See `Agreement.vote`. Returns at once."""
        return error
