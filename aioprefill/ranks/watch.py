"""One thread per rank that notices when a rank dies, hangs or falls silent, and names it.

It does not depend on the loop, so it beats while the loop sits in a host call, and tells so. It waits in
one poll for mail, closed connections and its next beat; between beats it does nothing. What is wrong is
decided in `beats`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable

import zmq

from aioprefill.errors import RankError
from aioprefill.ranks.beats import Beat, BeatTable
from aioprefill.ranks.progress import RankProgress
from aioprefill.ranks.watch_wire import Closed, Hub, Spoke, WatchWire
from aioprefill.ranks.wires import Wired

BEAT_S = 1.0
GRACE_S = 2.0
"""How long a loop may take to react to a lost rank."""


class Watch:
    """Watches the ranks of `group` from `start` until `aclose`.

    `timeout_s` is the longest silence, host call, or time between the first and the last rank's vote.
    `on_lost(error)` is called once on the loop, with the rank that is lost. When the loop does not come to
    that within `grace_s`, because it sits in a host call, `on_stuck(error)` is called in its stead, in the
    watch thread: the process should then report and leave by `os._exit`. To be made on the running loop.
    """

    def __init__(
        self,
        group: Wired,
        progress: RankProgress,
        *,
        timeout_s: float,
        on_lost: Callable[[RankError], None],
        on_stuck: Callable[[RankError], None],
        beat_s: float = BEAT_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._place = group.place
        self._progress = progress
        self._timeout_s, self._beat_s, self._grace_s = timeout_s, beat_s, grace_s
        self._on_lost, self._on_stuck = on_lost, on_stuck
        self._loop = asyncio.get_running_loop()
        self._wire: WatchWire = Hub(group) if group.place.leads else Spoke(group)
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._table = BeatTable(group.place.rank, group.place.size, beat_s=beat_s, now=time.monotonic())
        self._sequence = 0
        self._pinged_at = 0.0
        self._react_by: float | None = None
        self._reacted = threading.Lock()
        """Acquired by whoever reacts, the loop or the thread; never released."""
        self._stopping = False
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="aioprefill-watch", daemon=True)
        self.error: RankError | None = None
        """What `on_lost` was or is about to be told."""

    def __repr__(self) -> str:
        state = "watching" if self.error is None else str(self.error)
        return f"<Watch rank {self._place.rank} of {self._place.size}: {state}>"

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def tell_now(self) -> None:
        """Beat at once: `progress` has news, such as an error. From any thread."""
        with contextlib.suppress(OSError):  # full: it wakes anyhow; closed: it has ended
            self._waker.send(b"!")

    def stop(self, timeout_s: float = 1.0) -> None:
        """Say farewell and wait for the thread, at most so long. For a process that is about to leave.

        The farewell carries the error of `progress`, if there is one. From any thread; idempotent.
        """
        self._stopping = True
        self.tell_now()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    async def aclose(self) -> None:
        """Say farewell, so that no other rank takes this one's end for a death, and end. Idempotent.

        Bounded by a fraction of a second. Cancelled, the thread ends by itself.
        """
        self._stopping = True
        self.tell_now()
        if self._thread.ident is None:
            self._close()
            return
        await self._ended.wait()
        self._thread.join()  # it has nothing left to do

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as err:
            cause = f"cannot watch the other ranks any more: {type(err).__name__}: {err}"
            self._lose(RankError(self._place.rank, cause, forward=self._progress.forward), time.monotonic())
        finally:
            self._close()
            self._on_loop(self._ended.set)

    def _close(self) -> None:
        self._wire.close()
        self._woken.close()
        self._waker.close()

    def _watch(self) -> None:
        poller = zmq.Poller()
        self._wire.register(poller)
        poller.register(self._woken, zmq.POLLIN)
        next_beat = now = time.monotonic()
        while not self._stopping:
            wake_at = next_beat if self._react_by is None else min(next_beat, self._react_by)
            poller.poll(math.ceil(max(0.0, wake_at - now) * 1000))
            waited_for, now = wake_at, time.monotonic()
            if now > waited_for + self._beat_s:
                self._table.excuse(now - waited_for)  # stopped or starved: whoever spoke was not heard
            urgent = self._hear(now)
            if now >= next_beat or urgent:
                next_beat = now + self._beat_s
                self._ping(now)
                self._tell(now)
            self._judge(now)
        self._tell(time.monotonic(), leaving=True)

    def _hear(self, now: float) -> bool:
        """Take what came; True when something is to be told before the next beat is due."""
        urgent = False
        for news in self._wire.take():
            if isinstance(news, Beat):
                urgent |= self._table.hear(news, now)
            elif isinstance(news, Closed):
                self._table.close(news.rank)
            else:
                self._table.relay(news, now)
        with contextlib.suppress(BlockingIOError):
            urgent |= bool(self._woken.recv(4096))
        return urgent

    def _tell(self, now: float, *, leaving: bool = False) -> None:
        self._sequence += 1
        beat = self._progress.beat(self._place.rank, self._sequence, leaving=leaving)
        self._table.hear(beat, now)
        self._wire.tell(beat, self._table.rows(now))

    def _ping(self, now: float) -> None:
        """Have the loop say that it turns, unless it still owes an answer."""
        if self._progress.turned_at >= self._pinged_at:
            self._pinged_at = now
            self._on_loop(self._progress.turn)

    def _judge(self, now: float) -> None:
        if self.error is None:
            error = self._table.suspect(now, self._timeout_s, self._progress.forward)
            if error is not None:
                self._tell(now)  # the others judge the same facts, now
                self._lose(error, now)
        elif self._react_by is not None and now >= self._react_by:
            self._react_by = None
            if self._reacted.acquire(blocking=False):
                self._on_stuck(self.error)

    def _lose(self, error: RankError, now: float) -> None:
        if self.error is None:
            self.error = error
            self._react_by = now + self._grace_s
            self._on_loop(self._react)

    def _react(self) -> None:
        assert self.error is not None
        if self._reacted.acquire(blocking=False):
            self._on_lost(self.error)

    def _on_loop(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(call)
