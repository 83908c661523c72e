"""What can be seen of a scheduler: frozen snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """Live while the loop turns; ready while the host is well and nothing is stalled."""

    live: bool
    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot of the loop's counters and of its host's own."""

    in_flight: int
    launched: int
    processed: int
    max_in_flight: int
    arrivals: int
    arrivals_during_forward: int
    held: int
    paused: bool
    draining: bool
    open_requests: int
    host_calls: int
    slow_host_calls: int
    """Host calls that took longer than `SchedulerConfig.slow_call_s`."""
    longest_host_call_ms: float
    longest_host_call: str
    host: Mapping[str, int | float | str]

    def flat(self) -> dict[str, int | float | str]:
        """All of it in one flat table."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "host"}
        return {**own, **self.host}

    def __repr__(self) -> str:
        return "<Stats " + " ".join(f"{name}={value}" for name, value in self.flat().items()) + ">"
