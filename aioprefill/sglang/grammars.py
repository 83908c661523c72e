"""Looks at SGLang's grammars when one has been compiled, not at every preparation.

SGLang's own look waits up to 5 ms for those that are not ready, and each look counts towards their timeout.
So preparations see no waiting grammar unless a look is due, and a look waits next to nothing.

Where there are several ranks, each compiles for itself, and a look finds what is ready on all of them. So
what a look has left is not due again until another rank tells of one, or `RETRY_S` later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

LOOK_S = 0.00005
"""How long one look of SGLang's may take for those that are not ready; long enough for one pass."""
RETRY_S = 0.05
"""After a look that has left something which is ready here."""


class GrammarGate:
    """Stands in `has_waiting_grammars` of a grammar manager, from `__init__` to `close`.

    `wake` is called when a look is due; on a follower, when the leader should be told of one. `alone` says
    that there is one rank.
    """

    def __init__(
        self, manager: Any, wake: Callable[[], None], *, alone: bool = True, follows: bool = False
    ) -> None:
        self._manager = manager
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._waiting: Callable[[], bool] = manager.has_waiting_grammars
        self._look_s: float = manager.SGLANG_GRAMMAR_POLL_INTERVAL
        self._limit_s = self._look_s * manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS
        """SGLang's timeout: so many looks, each that long."""
        self._since: dict[Future[Any], float] = {}
        self._alone = alone
        self._follows = follows
        self._tried: dict[int, float] = {}
        """When a look has left what is ready here, or the leader was told of it, by the request's `id`."""
        self._open = False
        self.due = False
        """A grammar is ready, failed, aborted or too late."""
        manager.has_waiting_grammars = self._has_waiting
        manager.SGLANG_GRAMMAR_POLL_INTERVAL = LOOK_S

    def _has_waiting(self) -> bool:
        return self._open and self._waiting()

    def open(self, *, look: bool) -> None:
        """Let the preparation to come look, or not. Until `shut`."""
        self._open = look

    def shut(self, now: float) -> None:
        """The preparation is over."""
        looked, self._open = self._open, False
        if looked:
            self.watch(now, looked=True)

    def watch(self, now: float, *, looked: bool = False) -> None:
        """Take note of grammars that have come, and of time that has passed."""
        queue = self._manager.grammar_queue
        if not queue:
            self._since.clear()
            self._tried.clear()
            self.due = False
            return
        since: dict[Future[Any], float] = {}
        ready: list[int] = []
        for request in queue:
            grammar = request.grammar
            if not isinstance(grammar, Future) or request.finished():
                ready.append(id(request))
                continue
            if grammar not in self._since:
                grammar.add_done_callback(self._compiled)
            since[grammar] = self._since.get(grammar, now)
            if now - since[grammar] >= self._limit_s:
                request.grammar_wait_ct = self._manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS
                ready.append(id(request))
            elif grammar.done():
                ready.append(id(request))
        self._since = since
        self.due = bool(ready) if self._alone else self._untried(ready, now, looked)
        if self.due:
            self._wake()

    def _untried(self, ready: list[int], now: float, looked: bool) -> bool:
        """Something is ready that the ranks have not tried to take, or not lately."""
        tried = {key: self._tried[key] for key in ready if key in self._tried}
        untried = any(now - tried.get(key, -RETRY_S) >= RETRY_S for key in ready)
        if looked or (untried and self._follows):
            tried = dict.fromkeys(ready, now)
        self._tried = tried
        return untried and not looked

    def others_ready(self) -> None:
        """Leader: on another rank one has become ready."""
        self._tried.clear()
        queue = self._manager.grammar_queue
        if any(not isinstance(r.grammar, Future) or r.finished() or r.grammar.done() for r in queue):
            self.due = True
            self._wake()

    def _compiled(self, _: Future[Any]) -> None:
        """In the compiling thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look_is_due)

    def _look_is_due(self) -> None:
        if self._manager.grammar_queue:
            self.due = True
            self._wake()

    def close(self) -> None:
        """Give SGLang its own way of looking back. Idempotent."""
        self._manager.__dict__.pop("has_waiting_grammars", None)
        self._manager.SGLANG_GRAMMAR_POLL_INTERVAL = self._look_s
