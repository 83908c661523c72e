"""What may happen in a world of the native host: requests, commands and peers, by chance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from aioprefill.control import AbortMatching, Pause
from aioprefill.errors import AioprefillError
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.native.facts import AbortFact
from aioprefill.native.frontend import Controlled, Input
from aioprefill.native.host import NativeHost
from aioprefill.native.pause_state import Phase
from aioprefill.request import PrefillHandle, PrefillRequest, Timeouts
from aioprefill.testing.simulate.draws import Draws
from aioprefill.testing.simulate.native_parts import (
    PAGE,
    PEERS,
    UNREADABLE,
    SimulatedEngine,
    SimulatedGrammars,
    SimulatedTransfer,
    draw_config,
)
from aioprefill.testing.simulate.outcomes import Outcomes
from aioprefill.testing.simulate.story import Story
from aioprefill.testing.simulate.world import Move, World

FAMILIES = 4
"""Prompts of one family share their beginnings."""
GRAMMARS = ("one", "two", "three", "bad")
PAUSES = ("in_place", "in_place", "retract", "retract", "wait", "abort")


class NativeMoves(World):
    """The moves of a `NativeWorld`. Commands and callers run beside them."""

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
            grammar=GrammarSpec("regex", pick.choice(GRAMMARS)) if pick.random() < 0.12 else None,
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
