"""The scripted host in a world of its own: delayed samples, and the exact ends of KV chunks.

It stands for hosts that are as fragile as the reference host: they sample a forward that was launched behind
another one when that one's result is processed, and send what the chunk bookkeeping has left behind. The
native host knows neither, so it cannot show that the loop spares them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aioprefill.errors import DeviceError
from aioprefill.testing.host import FakeForward, FakePiece
from aioprefill.testing.ranked_host import RankedFakeHost
from aioprefill.testing.simulate.draws import Draws, Run
from aioprefill.testing.simulate.endings import PATIENCE_S
from aioprefill.testing.simulate.story import Story
from aioprefill.testing.simulate.twins import State
from aioprefill.testing.simulate.world import Move, World
from aioprefill.tp_agree import CallToken

CHUNK_TOKENS = 100


class SimulatedHost(RankedFakeHost):
    """Ends forwards and transfers by itself."""

    def __init__(self, rank: int, draws: Draws, story: Story, **options: Any) -> None:
        super().__init__(chunk_tokens=CHUNK_TOKENS, **options)
        self._rank = rank
        self._draws = draws
        self._story = story
        self._ends_s = 0.0
        self._slow_s = draws.transfers[rank].choice((0.0, 0.02, 0.3))

    def launch(self, now: float, batch: list[FakePiece], number: int) -> FakeForward:
        """See `PrefillHost.launch`."""
        oldest = self._pending[0] if self._pending else None
        assert oldest is None or oldest.completion.submitted, (
            f"forward {number} is launched before the delayed sample of {oldest.number if oldest else ''}"
        )
        forward = super().launch(now, batch, number)
        for piece in batch:
            assert piece.request.outcome is None, f"{piece.request.name} is over and was launched"
        run = self._draws.devices.run(self._rank, number)
        loop = asyncio.get_running_loop()
        self._ends_s = max(self._ends_s, loop.time()) + run.seconds
        loop.call_at(self._ends_s, self._end_forward, forward, run)
        return forward

    def _end_forward(self, forward: FakeForward, run: Run) -> None:
        """The device is done. Who polls a forward whose sample was not submitted is told so all the same."""
        if run.error:
            self._story.counters["device error on some ranks only"] += run.alone
            self._story.event("device error", f"forward {forward.number} on rank {self._rank}")
            forward.completion.fail(DeviceError(run.error, "by chance", sticky=run.sticky))
        else:
            self._story.event("forward ended", f"{forward.number} on rank {self._rank}")
            forward.completion.complete()

    def process_result(self, now: float, forward: FakeForward) -> None:
        """See `PrefillHost.process_result`. Checks what was sent; ends the transfers of whole prompts."""
        sending = [piece for piece in forward.pieces if piece.request.outcome is None]
        super().process_result(now, forward)
        for piece in sending:
            request, sends = piece.request, self.sends[piece.request.name]
            assert sends[-1] == (piece.start, piece.end), f"{request.name}: sent {sends[-1]}, not {piece}"
            if piece.end == request.tokens:
                transfers = self._draws.transfers[self._rank]
                asyncio.get_running_loop().call_later(
                    self._slow_s * transfers.random(), self._end_one, request.name
                )

    def _end_one(self, name: str) -> None:
        self._story.event("transfer ended", f"{name} on rank {self._rank}")
        self.end_transfer(name)

    def state(self) -> State:
        """See `World.state`."""
        return (
            tuple(self.held),
            self.paused,
            self.last_batch,
            [request.name for request in self._waiting],
            [
                (request.name, request.launched_end, request.chunk_end, request.sent_end, request.outcome)
                for request in self._requests.values()
                if request.outcome is None
            ],
            [(forward.number, forward.completion.submitted) for forward in self._pending],
        )


class ScriptedWorld(World):
    """See `World`."""

    kind = "scripted"

    def __init__(self, draws: Draws, size: int, story: Story) -> None:
        pick = draws.world
        self._options = {
            "slots": pick.choice((2, 4, 1000)),
            "batch_requests": pick.choice((1, 2, 4)),
            "delayed_sampling": pick.random() < 0.8,
        }
        super().__init__(draws, size, story)
        self.leader: SimulatedHost = self.hosts[0]
        self._names: list[str] = []
        self._bootstrapping: list[str] = []
        self._pausing = False
        self._asked: list[tuple[str, int]] = []
        """Pauses that have not begun: mode, and the depth at which they were asked for."""
        self._order: dict[str, int] = {}
        """In which order requests became admissible."""

    def make_host(self, rank: int) -> SimulatedHost:
        """See `World.make_host`."""
        return SimulatedHost(rank, self.draws, self.story, **self._options)

    # Moves

    def moves(self) -> Sequence[Move]:
        """See `World.moves`."""
        return (
            (self._arrive, 10.0),
            (self._bootstrap, 3.0),
            (self._abort, 1.0),
            (self._resume, 3.0) if self._pausing else (self._pause, 2.0),
            (self._weights, 0.0 if self._pausing else 0.6),
        )

    def _arrive(self) -> None:
        pick = self.draws.moves
        name = f"r{len(self._names)}"
        tokens, ready = pick.choice((1, 50, 100, 150, 350)), pick.random() < 0.7
        self._names.append(name)
        if not ready:
            self._bootstrapping.append(name)
        self.story.event("arrive", f"{name}: {tokens} tokens{', ready' * ready}")
        self.leader.arrive(name, tokens, bootstrapped=ready)

    def _bootstrap(self) -> None:
        known = [name for name in self._bootstrapping if name in self.leader._requests]
        if known:
            name = self.draws.moves.choice(known)
            self._bootstrapping.remove(name)
            self.story.event("handshake ended", name)
            self.leader.bootstrap(name)

    def _abort(self) -> None:
        live = [name for name in self._names[-30:] if name not in self.leader.outcomes]
        if live:
            name = self.draws.moves.choice(live)
            self.story.event("abort", name)
            self.leader.abort(name)

    def _pause(self) -> None:
        mode = self.draws.moves.choice(("in_place", "retract"))
        self._pausing = True
        self._asked.append((mode, self.rules.depth))
        self.story.event("pause", mode)
        self.leader.control(mode)

    def _resume(self) -> None:
        self._pausing = False
        self.story.event("resume")
        self.leader.control("resume")

    def _weights(self) -> None:
        """Only where no pause is on: an in-place one may keep a sample back, and nothing is ever still."""
        self.story.event("update weights")
        self.leader.control("weights")

    # Checks

    def pausing(self) -> bool:
        """See `World.pausing`."""
        return self.leader.paused

    def state(self, rank: int) -> State:
        """See `World.state`."""
        host: SimulatedHost = self.hosts[rank]
        return host.state()

    def check_host(self, rank: int, token: CallToken, description: bytes) -> None:
        """See `World.check_host`."""
        host: SimulatedHost = self.hosts[rank]
        assert len(host.in_flight) <= 2, "three forwards are in flight"
        if rank == 0 and token.kind == "ingest":
            self._count_pauses(host)
        if token.kind == "prepare":
            busy = sum(1 for r in host._requests.values() if r.launched_end and r.outcome is None)
            assert busy <= host._slots, f"{busy} requests are in {host._slots} slots"
            if rank == 0:
                self._check_order(host)
        elif rank == 0:
            for request in host._waiting:
                self._order.setdefault(request.name, len(self._order))

    def _check_order(self, host: SimulatedHost) -> None:
        """Who became admissible first is admitted first."""
        waiting = [self._order[request.name] for request in host._waiting if not request.launched_end]
        admitted = [place for name, place in self._order.items() if host._requests[name].launched_end]
        assert not waiting or max(admitted, default=-1) < min(waiting), "a request was passed by a later one"

    def _count_pauses(self, host: SimulatedHost) -> None:
        waiting = sum(1 for item in host.held if item in ("in_place", "retract"))
        coming = sum(1 for item in host._coming if item[1] in ("in_place", "retract"))
        while len(self._asked) > waiting + coming:
            mode, depth = self._asked.pop(0)
            self.story.count(f"scripted pause {mode} at {depth}")

    # The end

    async def come_to_an_end(self) -> None:
        """See `World.come_to_an_end`."""
        self.draws.devices.faulty = 0.0
        if self._pausing:
            self._resume()
        for _ in range(int(PATIENCE_S / 0.1)):
            if all(name in self.leader.outcomes for name in self._names):
                break
            self._bootstrap()
            await asyncio.sleep(0.1)
            self.raise_what_broke()
        await asyncio.sleep(2.0)
        for rank, host in enumerate(self.hosts):
            assert not host.open_requests(), f"rank {rank} is left with {host.open_requests()}"
            assert not host.in_flight, f"rank {rank} has forwards without a result"

    def provoke(self) -> None:
        """See `World.provoke`."""
        if self._pausing:
            self._resume()
        self._arrive()

    def check_end(self, *, healed: bool) -> None:
        """See `World.check_end`."""
        for name in self._names:
            for rank, host in enumerate(self.hosts):
                outcomes = host.outcomes.get(name, ())
                assert len(outcomes) == 1 or (not outcomes and not healed), f"{name} on {rank}: {outcomes}"
            for outcome in self.leader.outcomes.get(name, ()):
                self.story.count(f"outcome: scripted {outcome}")
