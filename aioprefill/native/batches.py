"""Forms the native host's batches: who is tried in what order, who gets pages, and who yields them."""

from __future__ import annotations

from functools import partial

from aioprefill.config import NativeConfig
from aioprefill.native import optimistic
from aioprefill.native.admission import Admission
from aioprefill.native.ledger import Ledger
from aioprefill.native.planner import Limits, Piece, plan
from aioprefill.native.request_state import Request, State
from aioprefill.native.stage_timers import StageTimers
from aioprefill.native.tier.tier import Tier


class Batches:
    """Turns the ledger's queues into pieces of the next forward, within the configured limits."""

    def __init__(
        self,
        config: NativeConfig,
        page_size: int,
        num_pages: int,
        ledger: Ledger,
        admission: Admission,
        timers: StageTimers,
        tier: Tier,
    ) -> None:
        self._limits = Limits(
            max(config.chunk_tokens, page_size),  # a page is the least that can be cut
            config.max_batch_requests,
            page_size,
            config.max_chunk_share,
        )
        self._early_attempts = config.optimistic_attempts if config.optimistic else 0
        self._num_pages = num_pages
        self._ledger = ledger
        self._admission = admission
        self._timers = timers
        self._tier = tier

    def of_admitted(self) -> list[Piece]:
        """Pieces of prompts that are under way only."""
        return plan(self._ledger.under_way.values(), (), self._limits, self._ledger.admit)

    def form(self, now: float) -> list[Piece]:
        """Pieces of the next forward; those who are admitted into it have their pages."""
        waiting = self._admission.order(self._ledger.waiting.values(), now)
        ready, early = optimistic.split(self._ledger.under_way.values())
        if self._early_attempts:
            queue = self._ledger.bootstrapping.values()
            eligible = [request for request in queue if request.early_launches < self._early_attempts]
            early += self._admission.order(eligible, now)
        candidates = [request for request in waiting + early if request.grammar_ready]
        may_pass = partial(self._admission.may_pass, now)
        admit = partial(self._admit, now, [])
        return plan(ready, self._tier.gate(now, candidates), self._limits, admit, may_pass)

    def _room_for_early(self, request: Request) -> bool:
        """Early prompts may hold half of the pool together, or one of them any part: a parked one yields no
        more, and a pool full of them would keep out those that are ready."""
        others = [other for other in self._ledger.requests.values() if optimistic.is_early(other)]
        held = sum(len(other.pages) for other in others)
        needed = -(-request.length // self._limits.page_size)
        return held == 0 or held + needed <= self._num_pages // 2

    def _admit(self, now: float, yielded: list[Request], request: Request) -> bool:
        """Give a request its pages; where they are short, one whose handshake has not ended yields its own.

        `yielded` are those that have in this preparation, in which they are not admitted again.
        """
        if request.state is State.RUNNING:
            return True  # launched before its handshake, and goes on behind those that are ready
        if optimistic.is_early(request) and not self._room_for_early(request):
            return False
        while request not in yielded and not self._ledger.admit(request):
            victim = optimistic.victim(request, self._ledger.under_way.values())
            if victim is None:
                return False
            yielded.append(victim)
            self._ledger.requeue(victim)
            self._timers.wait_again(victim, now)
        return request not in yielded
