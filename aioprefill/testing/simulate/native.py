"""The native host in a world of its own: requests, commands and peers, by chance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from aioprefill.config import NativeConfig
from aioprefill.control import AbortMatching, Pause
from aioprefill.errors import AioprefillError
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.native.facts import AbortFact
from aioprefill.native.frontend import Controlled, Input
from aioprefill.native.host import NativeHost
from aioprefill.native.pause_state import Phase
from aioprefill.native.policy import POLICIES
from aioprefill.request import PrefillHandle, PrefillRequest, Timeouts
from aioprefill.testing.simulate.draws import Draws
from aioprefill.testing.simulate.endings import PATIENCE_S
from aioprefill.testing.simulate.native_parts import (
    PAGE,
    PEERS,
    UNREADABLE,
    SimulatedEngine,
    SimulatedGrammars,
    SimulatedTransfer,
)
from aioprefill.testing.simulate.native_rules import (
    check_counts,
    check_host,
    check_leader,
    check_nothing_left,
    pieces_of,
    state_of,
)
from aioprefill.testing.simulate.outcomes import Outcomes
from aioprefill.testing.simulate.story import Story
from aioprefill.testing.simulate.twins import State
from aioprefill.testing.simulate.world import Move, World
from aioprefill.tp_agree import CallToken

FAMILIES = 4
"""Prompts of one family share their beginnings."""
GRAMMARS = ("{}", "bad", '{"a": 1}', '{"a": 2}', '{"a": 3}')
PAUSES = ("in_place", "in_place", "retract", "retract", "wait", "abort")


def draw_config(draws: Draws) -> NativeConfig:
    """Settings of a world: the same on all ranks."""
    pick = draws.world
    limit = (None, None, 0.3, 5.0)
    return NativeConfig(
        chunk_tokens=pick.choice((16, 32, 64)),
        max_batch_requests=pick.choice((1, 2, 8)),
        max_queue_requests=pick.choice((6, 1000)),
        policy=pick.choice(sorted(POLICIES)),
        policy_max_wait_s=pick.choice((0.0, 0.5, 5.0)),
        late_deadlines=pick.choice(("refuse", "serve")),
        max_chunk_share=pick.choice((0.5, 1.0)),
        optimistic=pick.random() < 0.5,
        prefix_cache=pick.random() < 0.8,
        handshake_timeout_s=pick.choice((0.3, 2.0, 20.0)),
        queue_timeout_s=pick.choice(limit),
        running_timeout_s=pick.choice(limit),
        transfer_timeout_s=pick.choice((0.3, 2.0, 20.0)),
    )


class NativeWorld(World):
    """See `World`. Commands and callers run beside the moves."""

    kind = "native"

    def __init__(self, draws: Draws, size: int, story: Story) -> None:
        self._config = draw_config(draws)
        self._pages = draws.world.choice((8, 16, 40))
        self.transfers: list[SimulatedTransfer] = []
        self.outcomes = Outcomes(story)
        super().__init__(draws, size, story)
        self.leader: NativeHost = self.hosts[0]
        self._count = 0
        self._callers: list[asyncio.Task[None]] = []
        self._commands: list[asyncio.Task[Any]] = []
        self._states: set[str] = set()
        self._stalled = (-1.0, -1)
        """When nothing was in flight although somebody could be admitted, and the next call then."""

    def make_host(self, rank: int) -> NativeHost:
        """See `World.make_host`."""
        engine = SimulatedEngine(rank, self.draws, self.story, self._pages)
        transfer = SimulatedTransfer(rank, self.draws, self.story, engine)
        self.transfers.append(transfer)
        return NativeHost(engine, transfer, self._config, grammars=SimulatedGrammars(self.draws, self.story))

    def started(self) -> None:
        """See `World.started`."""
        frontend = self.leader.frontend
        post = frontend.post

        def posted(item: Input) -> None:
            match item:
                case AbortFact():
                    self._count_abort(item.request_id)
                    self.outcomes.abort(item.request_id)
                case Controlled(command=AbortMatching() as command):
                    self.outcomes.abort_matching(command)
                case Controlled(command=Pause(mode)):
                    depth = self.rules.depth
                    item.answer.add_done_callback(lambda done: self._paused(f"pause {mode} at {depth}", done))
            post(item)

        frontend.post = posted  # type: ignore[method-assign]

    def _paused(self, what: str, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self.story.count(what)

    def _count_abort(self, request_id: str) -> None:
        request = self.leader.ledger.requests.get(request_id)
        if request is None:
            self.story.count("abort while queued")
        elif request.in_flight and request.all_launched:
            self.story.count("abort in the final forward")
        else:
            self.story.count(f"abort while {request.state.value}")

    # Moves

    def moves(self) -> Sequence[Move]:
        """See `World.moves`."""
        paused = self.leader.intake.pause.phase is not Phase.RUNNING
        return (
            (self._submit, 10.0),
            (self._abort, 1.2),
            (self._stop_waiting, 0.4),
            (self._pause, 0.3 if paused else 1.2),
            (self._resume, 2.5 if paused else 0.1),
            (self._update, 0.5),
            (self._other_command, 0.6),
            (self._withdraw, 0.2),
            (self._peer, 0.8),
        )

    def _submit(self) -> None:
        pick = self.draws.moves
        most = self._pages * PAGE
        length = min(most, pick.choice((1, 15, 16, 17, 40, pick.randint(1, 100), pick.randint(1, most))))
        family = pick.randrange(FAMILIES)
        self._count += 1
        name = f"{'abcd'[family]}{self._count}"
        over = [entry.name for entry in self.outcomes.entries[-20:] if entry.ended]
        if over and pick.random() < 0.1:
            name = pick.choice(over)
        request = PrefillRequest(
            (family + 1) * 100 + (np.arange(length) * 7 + 1) % 97,
            request_id=name,
            peer=None if pick.random() < 0.3 else pick.choice(PEERS),
            grammar=GrammarSpec("json_schema", pick.choice(GRAMMARS)) if pick.random() < 0.12 else None,
            priority=pick.randint(0, 2),
            deadline_s=pick.choice((None, None, None, 0.2, 5.0)),
            timeouts=Timeouts(
                queue_s=pick.choice((None, None, None, 0.5)), running_s=pick.choice((None, None, None, 0.1))
            ),
        )
        self.story.event("submit", f"{name}: {length} tokens to {request.peer}")
        try:
            handle = self.scheduler.submit(request)
        except AioprefillError as error:
            self.story.count(f"refused: {error.code}")
            return
        self.outcomes.submitted(handle)
        if pick.random() < 0.3:
            self._callers.append(asyncio.create_task(self._wait_for(handle)))

    async def _wait_for(self, handle: PrefillHandle) -> None:
        with contextlib.suppress(AioprefillError):
            await handle

    def _abort(self) -> None:
        pick = self.draws.moves
        live = list(self.outcomes.live)
        final = [
            request.request_id
            for forward in self.leader.forwards.pending
            for request in (piece.request for piece in forward.pieces if piece.final)
        ]
        if final and pick.random() < 0.4:
            name = pick.choice(final)
        elif live and pick.random() < 0.9:
            name = pick.choice(live)
        else:
            name = "nobody"
        self.story.event("abort", name)
        self.scheduler.abort(name)

    def _stop_waiting(self) -> None:
        self._callers = [caller for caller in self._callers if not caller.done()]
        if self._callers:
            self.story.event("caller stops waiting")
            self.draws.moves.choice(self._callers).cancel()

    def _pause(self) -> None:
        pick = self.draws.moves
        mode, barrier = pick.choice(PAUSES), pick.random() < 0.4
        self.story.event("pause", f"{mode}{' with a barrier' * barrier}")
        what = f"pause {mode}{' barrier' * barrier}"
        self._run(what, lambda: self._do_pause(mode, barrier))

    async def _do_pause(self, mode: str, barrier: bool) -> Any:
        launched = self.rules.launched
        answer = await self.scheduler.pause(mode, barrier=barrier)
        if barrier:
            self._check_still(launched)
        return answer

    def _check_still(self, launched: int) -> None:
        for rank, host in enumerate(self.hosts):
            running = [forward.number for forward in host.engine.forwards if forward.number < launched]
            if running:
                raise self.story.violate(f"rank {rank}: a barrier returned while {running} run")

    def _resume(self) -> None:
        self.story.event("resume")
        self._run("resume", self.scheduler.resume)

    def _update(self) -> None:
        pick = self.draws.moves
        folder = UNREADABLE if pick.random() < 0.1 else str(pick.randint(1, 40))
        kind = (
            "unreadable"
            if folder == UNREADABLE
            else {8: "read in part", 9: "not swapped"}.get(int(folder) % 10, "good")
        )
        self.story.event("update weights", folder)
        self._run(f"update ({kind})", lambda: self.scheduler.update_weights(folder))

    def _other_command(self) -> None:
        pick = self.draws.moves
        what = pick.choices(("flush", "abort prefix", "abort all"), (4, 3, 1))[0]
        prefix = pick.choice("abcd") if what == "abort prefix" else ""
        self.story.event(what, prefix)
        if what == "flush":
            self._run(what, self.scheduler.flush_cache)
        else:
            self._run(what, lambda: self.scheduler.abort_matching(prefix))

    def _run(self, what: str, make: Callable[[], Awaitable[Any]]) -> None:
        self._commands = [task for task in self._commands if not task.done()]
        self._commands.append(asyncio.create_task(self.command(what, make), name=what))

    def _withdraw(self) -> None:
        waiting = [task for task in self._commands if not task.done()]
        if waiting:
            self.story.event("command withdrawn")
            self.draws.moves.choice(waiting).cancel()

    def _peer(self) -> None:
        """Something happens to a peer, as one rank or all of them see it."""
        pick = self.draws.moves
        peer = pick.choice(PEERS)
        what = pick.choices(("accept", "kill", "silence", "refuse", "give up"), (8, 2, 2, 1.5, 3))[0]
        who = self.transfers if pick.random() < 0.6 else [pick.choice(self.transfers)]
        self.story.event(f"peer: {what}", f"{peer} on {len(who)} ranks")
        for transfer in who:
            match what:
                case "accept":
                    transfer.accept(peer)
                case "kill":
                    transfer.kill(peer)
                case "silence":
                    transfer.silence(peer)
                case "refuse":
                    transfer.refuse(peer)
                case _:
                    transfer.give_up_one(pick)

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

    def describe(self, kind: str, description: bytes) -> str:
        """See `World.describe`."""
        if kind == "prepare":
            return "".join(f" {name}[{start}:{end}]" for name, start, end, _ in pieces_of(description))
        return ""

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
