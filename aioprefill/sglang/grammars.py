"""Looks at SGLang's grammars when one has been compiled, not at every preparation.

SGLang's own look waits up to 5 ms for those that are not ready, and each look counts towards their timeout.
So preparations see no waiting grammar unless a look is due, and a look waits next to nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

LOOK_S = 0.00005
"""How long one look of SGLang's may take for those that are not ready; long enough for one pass."""


class GrammarGate:
    """Stands in `has_waiting_grammars` of a grammar manager, from `__init__` to `close`.

    `wake` is called when a look is due.
    """

    def __init__(self, manager: Any, wake: Callable[[], None]) -> None:
        self._manager = manager
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._waiting: Callable[[], bool] = manager.has_waiting_grammars
        self._look_s: float = manager.SGLANG_GRAMMAR_POLL_INTERVAL
        self._limit_s = self._look_s * manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS
        """SGLang's timeout: so many looks, each that long."""
        self._since: dict[Future[Any], float] = {}
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
            self.watch(now)

    def watch(self, now: float) -> None:
        """Take note of grammars that have come, and of time that has passed."""
        queue = self._manager.grammar_queue
        if not queue:
            self._since.clear()
            self.due = False
            return
        since: dict[Future[Any], float] = {}
        due = False
        for request in queue:
            grammar = request.grammar
            if not isinstance(grammar, Future) or request.finished():
                due = True
                continue
            if grammar not in self._since:
                grammar.add_done_callback(self._compiled)
            since[grammar] = self._since.get(grammar, now)
            if now - since[grammar] >= self._limit_s:
                request.grammar_wait_ct = self._manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS
                due = True
            due = due or grammar.done()
        self._since = since
        self.due = due
        if due:
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
