"""Everything that wakes the loop from SGLang's side: sockets, peers, grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aioprefill.host import Wake
from aioprefill.sglang.grammars import GrammarGate
from aioprefill.sglang.peers import PeerWatch
from aioprefill.sglang.sockets import InputSockets, sockets_of

TIERS = ("enable_hicache_storage", "enable_lmcache")
"""SGLang's switches of cache tiers that are fetched from."""
TIERS_S = 0.1
"""Interval at which requests that wait are tried again where a cache tier may have fetched for them."""


class Wakes:
    """Made on the loop, closed once. A follower has no sockets, and what wakes it is told to its leader.

    `grammars_ready` is called when a look at grammars is due, `alone` says that there is one rank.
    """

    def __init__(
        self,
        scheduler: Any,
        wake: Wake,
        grammars_ready: Callable[[], None],
        *,
        alone: bool = False,
        follows: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._wake = wake
        self._follows = follows
        self._tiers = any(getattr(scheduler, name, False) for name in TIERS)
        self._tiers_at = 0.0
        self.grammars = GrammarGate(scheduler.grammar_manager, grammars_ready, alone=alone, follows=follows)
        self._peers = PeerWatch(scheduler, moved=wake.transfers, admission=wake.admission)
        self._sockets: InputSockets | None = None
        if not follows:
            self._sockets = InputSockets(sockets_of(scheduler.request_receiver), wake.input)

    @property
    def by_sockets(self) -> bool:
        """Intake is woken by sockets; else it must poll."""
        return self._sockets is not None and len(self._sockets) > 0

    @property
    def transfers_needed(self) -> bool:
        """There is a handshake or a transfer to move."""
        return self._peers.needed

    @property
    def peer_looks(self) -> int:
        """Looks at senders so far."""
        return self._peers.looks

    def after_input(self, now: float, *, new: bool, resumed: bool) -> None:
        """Input was dispatched: `new` requests among it, or the end of a pause."""
        self.grammars.watch(now)
        self.after_call()
        if self._follows:
            return  # the leader has the same input
        if self._tiers and self._scheduler.waiting_queue and now - self._tiers_at >= TIERS_S:
            self._tiers_at = now
            self._wake.admission()  # a preparation pumps the tiers, and admits what they have fetched
        if resumed or (new and self._scheduler.disagg_prefill_bootstrap_queue.queue):
            self._wake.transfers()  # the peer may be ready already

    def after_call(self) -> None:
        """SGLang may have used its sockets, or filled the queues whose peers are watched."""
        if self._sockets is not None:
            self._sockets.look()
        self._peers.begin()

    def close(self) -> None:
        """Give SGLang back what was its own. Idempotent."""
        for part in (self._sockets, self.grammars, self._peers):
            if part is not None:
                part.close()
