"""Notices that a handshake or a transfer has moved: SGLang's senders have no way to tell.

Their states are looked at here, without any collective, and `progress_transfers` is called when one has
changed. So at TP > 1 the reductions inside that call are made when there is something to reduce.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

SHORTEST_S = 0.001
LONGEST_S = 0.005
GROWTH = 1.25
"""Looks grow apart by this factor while nothing changes."""
REST = 20
"""After a look comes a rest of so many times its length: long queues must not fill the loop with looks."""
WAITING_EVERY = 10
"""Requests that wait for admission are looked at in every so manieth look: their peers may have died."""


class PeerWatch:
    """Looks at the senders of a scheduler's queues while these are not empty.

    `moved` is called when a sender of the handshake or transfer queue has changed its state, `admission`
    when one of the waiting queue has.
    """

    def __init__(self, scheduler: Any, *, moved: Callable[[], None], admission: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._moved = moved
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = SHORTEST_S
        self._states: dict[str, int] = {}
        self._waiting_states: dict[str, int] = {}
        self.looks = 0

    @property
    def needed(self) -> bool:
        """There is a handshake or a transfer to wait for."""
        scheduler = self._scheduler
        return bool(scheduler.disagg_prefill_inflight_queue or scheduler.disagg_prefill_bootstrap_queue.queue)

    def begin(self) -> None:
        """Look, if there is anything to look at. Call it after whatever may have filled the queues."""
        if self._timer is None and (self.needed or self._scheduler.waiting_queue):
            self._interval_s = SHORTEST_S
            self._timer = self._loop.call_later(self._interval_s, self._look)

    def _look(self) -> None:
        self._timer, started = None, time.perf_counter()
        self.looks += 1
        scheduler = self._scheduler
        queues = (scheduler.disagg_prefill_bootstrap_queue.queue, scheduler.disagg_prefill_inflight_queue)
        states = {r.rid: int(r.disagg_kv_sender.poll()) for queue in queues for r in queue}
        changed = any(self._states.get(key) != state for key, state in states.items())
        self._states = states
        if self.looks % WAITING_EVERY == 0:
            self._look_at_waiting()
        self._interval_s = SHORTEST_S if changed else min(self._interval_s * GROWTH, LONGEST_S)
        if self.needed or scheduler.waiting_queue:
            rest_s = REST * (time.perf_counter() - started)
            self._timer = self._loop.call_later(max(self._interval_s, rest_s), self._look)
        if changed:
            self._moved()

    def _look_at_waiting(self) -> None:
        waiting = {r.rid: int(r.disagg_kv_sender.poll()) for r in self._scheduler.waiting_queue}
        changed = any(self._waiting_states.get(key, state) != state for key, state in waiting.items())
        self._waiting_states = waiting
        if changed:
            self._admission()

    def close(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
