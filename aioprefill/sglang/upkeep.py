"""What SGLang does between two passes of its loop, for a loop that moves on events only.

Its loop turns all the time, so idle accounting, load reports and answers to health probes hang on its turns.
"""

from __future__ import annotations

from typing import Any

IDLE_S = 1.0
"""Interval of `on_idle` while nothing runs."""
LOAD_S = 0.5
"""Interval of load reports while something runs or is paused."""


class Upkeep:
    """Makes those calls by the clock readings of the host calls it is told of."""

    def __init__(self, scheduler: Any, *, stall_limit_s: float) -> None:
        self._scheduler = scheduler
        self._stall_limit_s = stall_limit_s
        self._sleeper: Any = None
        self._idle_at = 0.0
        self._loads_at = 0.0

    def begin(self) -> None:
        """Take the idle sleeper away: it blocks for up to a second, and uvloop sleeps as well."""
        self._sleeper, self._scheduler.idle_sleeper = self._scheduler.idle_sleeper, None

    def end(self) -> None:
        """Give the idle sleeper back."""
        if self._sleeper is not None:
            self._scheduler.idle_sleeper, self._sleeper = self._sleeper, None

    def idle(self, now: float) -> None:
        """Nothing runs."""
        self._idle_at = now
        self._scheduler.on_idle()
        self._empty_cache()

    def tick(self, now: float, *, in_flight: int, busy_since: float | None) -> None:
        """`in_flight` forwards are not processed; the device has been at one since `busy_since`."""
        scheduler = self._scheduler
        stalled = busy_since is not None and now - busy_since > self._stall_limit_s
        while scheduler.return_health_check_ipcs and not stalled:
            scheduler.maybe_send_health_check_signal()
        if in_flight or scheduler._engine_paused:
            if now - self._loads_at >= LOAD_S:
                self._loads_at = now
                self._report_load()
        elif not scheduler._deferred_input_requests and now - self._idle_at >= IDLE_S:
            self.idle(now)

    def _report_load(self) -> None:
        scheduler = self._scheduler
        snapshot = scheduler.publish_load_snapshot(force=True)
        scheduler.load_publisher.publish_load_stat(
            scheduler.load_inquirer.get_loads, force=True, snapshot=snapshot
        )

    def _empty_cache(self) -> None:
        """What the idle sleeper does beside sleeping."""
        sleeper = self._sleeper
        interval_s = getattr(sleeper, "empty_cache_interval", -1)
        if interval_s <= 0:
            return
        from sglang.srt.observability.req_time_stats import real_time
        from sglang.srt.platforms import current_platform

        if real_time() - sleeper.last_empty_time <= interval_s:
            return
        sleeper.last_empty_time = real_time()
        if sleeper.can_empty_cache is None or sleeper.can_empty_cache():
            current_platform.empty_cache()
