"""Who is admitted next: the configured policy, what it knows of the prefix cache, and deadlines. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from aioprefill.config import NativeConfig
from aioprefill.errors import RequestTimeout
from aioprefill.native.memory import KVMemory
from aioprefill.native.policy import POLICIES, Outlook, hopeless, hopeless_from, overdue, remaining
from aioprefill.native.request_state import Request
from aioprefill.native.speed import Speed

REFRESHED = 32
"""Requests per ordering whose look into the prefix cache is renewed, so that 4,000 cost no more than 40."""


class Admission:
    """Orders waiting requests for the planner, and finds those whose deadline cannot be met."""

    def __init__(self, config: NativeConfig, memory: KVMemory) -> None:
        self._full_tokens = config.chunk_tokens // 2
        self.speed = Speed(self._full_tokens)
        self._order = POLICIES[config.policy]
        self._max_wait_s = config.policy_max_wait_s
        self._refuses = config.late_deadlines == "refuse"
        self._memory = memory
        self.on_earlier: Callable[[], None] = lambda: None
        """Called when `next_refusal` may have moved forward: who sleeps until then must look again."""
        self._dated: list[Request] = []
        """Requests with a deadline that may be refused."""
        self._looked_up: deque[Request] = deque()
        """Oldest look first; requests that wait no longer are left out when their turn comes."""

    def __repr__(self) -> str:
        return f"<Admission {self._order.__name__} {self.speed!r}>"

    @property
    def outlook(self) -> Outlook:
        """What policies may know."""
        return Outlook(self._max_wait_s, self.speed.full_tokens_per_s)

    def order(self, waiting: Iterable[Request], now: float) -> list[Request]:
        """The requests in the order in which the planner tries them."""
        requests = list(waiting)
        self._look_up(requests)
        return self._order(requests, now, self.outlook)

    def may_pass(self, now: float, request: Request) -> bool:
        """Others may be admitted before this one, for which there is no room yet."""
        return not overdue(request, now, self.outlook)

    def _look_up(self, requests: list[Request]) -> None:
        """See what of the prompts is cached: of new ones at once, of the others in turn."""
        refreshed = 0
        for _ in range(len(self._looked_up)):
            if refreshed == REFRESHED:
                break
            request = self._looked_up.popleft()
            if request.waits:
                request.expected_cached = self._memory.cached_tokens(request.tokens)
                self._looked_up.append(request)
                refreshed += 1
            else:  # these cost next to nothing, and would pile up where many are admitted at a time
                request.looked_up = False
        for request in requests:
            if not request.looked_up:
                request.looked_up = True
                request.expected_cached = self._memory.cached_tokens(request.tokens)
                self._looked_up.append(request)

    def restart(self) -> None:
        """As after a start: nothing is known of the device's speed. No request may be live."""
        self.speed = Speed(self._full_tokens)
        self._dated.clear()
        self._looked_up.clear()

    # Deadlines

    def watch(self, request: Request) -> None:
        """A request with a deadline has come."""
        if self._refuses:
            self._dated.append(request)
            self.on_earlier()

    def refused(self, now: float) -> list[tuple[Request, RequestTimeout]]:
        """Waiting requests to give up, for their deadlines cannot be met; with the error they get."""
        outlook = self.outlook
        return [
            (request, _refusal(request, now, outlook))
            for request in self._dated
            if request.waits and hopeless(request, now, outlook)
        ]

    def next_refusal(self) -> float | None:
        """When `refused` finds somebody next, as things stand; None: never."""
        if not self._dated:
            return None
        self._dated = [request for request in self._dated if not request.over]
        outlook = self.outlook
        times = [hopeless_from(request, outlook) for request in self._dated if request.waits]
        return min((time for time in times if time is not None), default=None)


def _refusal(request: Request, now: float, outlook: Outlook) -> RequestTimeout:
    assert request.due_s is not None
    left = request.due_s - now
    when = f"in {left:.3f} s" if left > 0 else f"{-left:.3f} s ago"
    speed = f"at {outlook.tokens_per_s:.0f} tokens/s" if outlook.tokens_per_s else "at a speed not known yet"
    return RequestTimeout(
        f"request {request.request_id}: its deadline, {request.due_s - request.arrival_s:g} s after arrival "
        f"and {when}, cannot be met: {remaining(request)} tokens are to be computed, {speed}; allow more "
        "time, or serve late (late-deadlines)"
    )
