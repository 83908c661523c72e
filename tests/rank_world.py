"""What a rank does and sees in the scenarios of `rank_scenarios`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from aioprefill.config import SchedulerConfig
from aioprefill.errors import DeviceError
from aioprefill.follower import Follower
from aioprefill.host import PrefillHost
from aioprefill.ranks.group import RankGroup
from aioprefill.ranks.runtime import GroupLink
from aioprefill.scheduler import PrefillScheduler
from aioprefill.signals import Signal
from aioprefill.testing.host import FakeForward, FakePiece
from aioprefill.testing.ranked_host import RankedFakeHost
from aioprefill.tp_agree import CallToken, Seen

PATIENCE_S = 30.0


@dataclass
class World:
    """One rank in one scenario."""

    rank: int
    size: int
    options: dict[str, Any]
    found: dict[str, Any]
    """What this rank saw: calls (number, kind, detail, state behind it), votes, log, counters."""
    say: Callable[..., None]
    group: RankGroup
    make_link: Callable[[], GroupLink]
    changed: Signal = field(default_factory=Signal)
    """A host call or a vote has ended."""
    link: GroupLink | None = None

    async def until(self, reached: Callable[[], Any]) -> None:
        """Wait for what host calls and votes bring about."""
        async with asyncio.timeout(PATIENCE_S):
            while not reached():
                await self.changed.wait()

    async def play(
        self,
        host: PrefillHost,
        script: Callable[[PrefillScheduler], Coroutine[Any, Any, None]],
        state: Callable[[], Any],
        log: list[str],
    ) -> None:
        """Run `host` as this rank. `state` is looked at after each host call; votes are told in `log`."""
        link = self.link = self.make_link()
        calls: list[list[Any]] = []
        self.found |= {"calls": calls, "log": log}
        self._note_votes(link, log)
        leads = PrefillScheduler(host, SchedulerConfig(drain_timeout_s=10.0), ranks=link)
        follows = Follower(host, link)

        def called(token: CallToken, description: bytes) -> None:
            calls.append([token.number, token.kind, token.detail, state()])
            self.changed.set()

        try:
            if self.rank:
                follows._runner.observers.append(called)
                await follows.run()
            else:
                leads._runner_of_calls.observers.append(called)
                async with leads:
                    await _until_either(script(leads), leads.wait_stopped())
        finally:
            counters = link.agreement.counters
            self.found |= {"voted": counters.votes, "collectives": counters.collectives}

    def _note_votes(self, link: GroupLink, log: list[str]) -> None:
        agreement, votes = link.agreement, []
        vote, joining = agreement.vote, agreement._on_joining
        self.found["votes"] = votes

        async def noted(number: int, digest: int, seen: Seen) -> DeviceError | None:
            votes.append([number, digest, time.monotonic()])
            log.append(f"vote {number}")
            error = await vote(number, digest, seen)
            log.append(f"agreed {number}")
            self.changed.set()
            return error

        def told(number: int) -> None:
            joining(number)
            self.say(event="joins", rank=self.rank, forward=number)

        agreement.vote = noted  # type: ignore[method-assign]
        if self.options.get("say_joins"):
            agreement._on_joining = told


async def _until_either(script: Coroutine[Any, Any, None], stopped: Coroutine[Any, Any, None]) -> None:
    """Run the script, unless the loop stops first. Raises what the script does."""
    tasks = [asyncio.ensure_future(script), asyncio.ensure_future(stopped)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if tasks[0].done():
        tasks[0].result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RankHost(RankedFakeHost):
    """A device of its own on each rank: forward n ends `forward_s` after the one before it, `skew(n)` late.

    Transfers end as soon as the last chunk is sent.
    """

    def __init__(
        self, forward_s: float, skew: Callable[[int], float] = lambda _: 0.0, **options: Any
    ) -> None:
        super().__init__(**options)
        self._forward_s, self._skew = forward_s, skew
        self._free_at = 0.0

    def launch(self, now: float, batch: list[FakePiece], number: int) -> FakeForward:
        """See `PrefillHost.launch`."""
        forward = super().launch(now, batch, number)
        self._free_at = max(self._free_at, now) + self._forward_s
        forward.completion.complete(at=self._free_at + self._skew(number))
        return forward

    def process_result(self, now: float, forward: FakeForward) -> None:
        """See `PrefillHost.process_result`."""
        super().process_result(now, forward)
        for piece in forward.pieces:
            if piece.end == piece.request.tokens and piece.request.outcome is None:
                asyncio.get_running_loop().call_soon(self.end_transfer, piece.request.name)

    @property
    def done(self) -> int:
        """Requests that have ended."""
        return len(self.outcomes)
