"""The native host in a world of its own: what holds in it, and how it comes to an end."""

from __future__ import annotations

import asyncio

from aioprefill.native.pause_state import Phase
from aioprefill.testing.simulate.draws import Draws
from aioprefill.testing.simulate.endings import PATIENCE_S
from aioprefill.testing.simulate.native_moves import NativeMoves
from aioprefill.testing.simulate.native_parts import (
    PAGE,
)
from aioprefill.testing.simulate.native_rules import (
    check_counts,
    check_host,
    check_leader,
    check_nothing_left,
    state_of,
)
from aioprefill.testing.simulate.story import Story
from aioprefill.testing.simulate.twins import State
from aioprefill.tp_agree import CallToken


class NativeWorld(NativeMoves):
    """See `World`."""

    kind = "native"

    def __init__(self, draws: Draws, size: int, story: Story) -> None:
        super().__init__(draws, size, story)
        self._states: set[str] = set()
        self._stalled = (-1.0, -1)
        """When nothing was in flight although somebody could be admitted, and the next call then."""

    # Checks

    def pausing(self) -> bool:
        """See `World.pausing`."""
        return self.leader.intake.pause.phase is not Phase.RUNNING

    def state(self, rank: int) -> State:
        """See `World.state`."""
        state = state_of(self.hosts[rank])
        if rank == 0:
            for request in self.leader.ledger.requests.values():
                self._states.add(request.state._value_)
        return state

    def check_host(self, rank: int, token: CallToken, description: bytes) -> None:
        """See `World.check_host`."""
        check_host(self.hosts[rank], self.transfers[rank], token, description)
        if rank == 0:
            check_leader(self.leader, token, description)

    def check(self) -> None:
        """See `World.check`."""
        super().check()
        check_counts(self.leader)
        for transfer in self.transfers:
            transfer.check()
        self._check_stalled()

    def _check_stalled(self) -> None:
        """With nothing in flight and room for all who may be admitted, one is, before time passes."""
        host = self.leader
        waiting = [request for request in host.ledger.waiting.values() if request.grammar_ready]
        idle = waiting and not self.rules.depth and not self.rules.held and host.intake.pause.admits
        if not idle or host.memory.pool.available < max(-(-r.length // PAGE) for r in waiting):
            self._stalled = (-1.0, -1)
            return
        now, call = asyncio.get_running_loop().time(), self.twins.next_calls[0]
        since, then = self._stalled
        if call == then and now > since:
            raise self.story.violate(
                f"none of {[r.request_id for r in waiting]} is admitted although there is room"
            )
        self._stalled = (now, call)

    # The end

    async def come_to_an_end(self) -> None:
        """See `World.come_to_an_end`."""
        self.draws.devices.faulty = 0.0
        for transfer in self.transfers:
            transfer.heal()
        for _ in range(int(PATIENCE_S / 0.25)):
            if not self.leader.ledger.requests and not self.leader.frontend.arrivals:
                break
            self._run("resume", self.scheduler.resume)
            await asyncio.sleep(0.25)
            self.raise_what_broke()
        await asyncio.sleep(1.0)  # messages that are on their way to followers
        for rank, host in enumerate(self.hosts):
            check_nothing_left(rank, host, self.transfers[rank])

    def provoke(self) -> None:
        """See `World.provoke`."""
        for transfer in self.transfers:
            transfer.heal()
        self._run("resume", self.scheduler.resume)
        self._submit()

    def check_end(self, *, healed: bool) -> None:
        """See `World.check_end`."""
        self.outcomes.check_end()
        for state in sorted(self._states):
            self.story.count(f"state {state}")
        for task in (*self._commands, *self._callers):
            assert task.done(), f"the answer to {task.get_name()!r} never comes"
        if healed:
            for rank, host in enumerate(self.hosts):
                check_nothing_left(rank, host, self.transfers[rank])
