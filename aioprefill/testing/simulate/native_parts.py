"""Settings, device, grammars and KV transfer of a rank: what takes time takes it by the schedule's draws."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from aioprefill.config import NativeConfig
from aioprefill.engine.grammar_port import Outcome
from aioprefill.engine.port import SampledToken, Span
from aioprefill.errors import DeviceError, ModelError
from aioprefill.native.policy import POLICIES
from aioprefill.testing.engine import FakeEngine, FakeEngineForward, fake_spec
from aioprefill.testing.grammars import FakeGrammars
from aioprefill.testing.simulate.draws import Draws, Run
from aioprefill.testing.simulate.story import Story
from aioprefill.testing.transfer import FakeTransfer
from aioprefill.transfer.port import Handoff
from aioprefill.transfer.room_events import Write
from aioprefill.transfer.rooms import RoomState

PAGE = 16
PEERS = ("p0", "p1", "p2")
UNREADABLE = "unreadable"
"""Weights that no rank can read."""


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


class SimulatedEngine(FakeEngine):
    """Ends forwards, readings and swaps of weights by itself.

    Folder n of weights: n % 10 == 8 cannot be read by one of the ranks, n % 10 == 9 is not swapped by any.
    """

    def __init__(self, rank: int, draws: Draws, story: Story, num_pages: int) -> None:
        super().__init__(num_pages=num_pages, spec=fake_spec(page_size=PAGE))
        self.check_pages = False
        self.stamps = [0] * num_pages
        """How often each page was written."""
        self._rank = rank
        self._draws = draws
        self._story = story
        self._ends_s = 0.0

    def launch(self, spans: Sequence[Span]) -> FakeEngineForward:
        """See `Engine.launch`."""
        forward = super().launch(spans)
        for span in spans:
            pages = span.pages.tolist()
            assert len(set(pages)) == len(pages) == -(-span.end // PAGE), f"wrong pages: {span}"
            for page in pages[span.start // PAGE :]:
                self.stamps[page] += 1
        run = self._draws.devices.run(self._rank, forward.number)
        loop = asyncio.get_running_loop()
        self._ends_s = max(self._ends_s, loop.time()) + run.seconds
        loop.call_at(self._ends_s, self._end, forward, run)
        return forward

    def _end(self, forward: FakeEngineForward, run: Run) -> None:
        self.forwards.remove(forward)
        if run.error:
            self._story.counters["device error on some ranks only"] += run.alone
            self._story.event("device error", f"forward {forward.number} on rank {self._rank}")
            forward.fail(DeviceError(run.error, "by chance", sticky=run.sticky))
        else:
            self._story.event("forward ended", f"{forward.number} on rank {self._rank}")
            forward.complete()

    async def stage_weights(self, folder: Path) -> int:
        """See `Engine.stage_weights`."""
        await asyncio.sleep(self._draws.transfers[self._rank].choice((0.0, 0.02, 0.2)))
        number = await super().stage_weights(folder)
        if number % 10 == 8 and self._rank == number % self._draws.size:
            raise ModelError(f"rank {self._rank} cannot read {folder}")
        return number

    def swap_weights(self, staged: int) -> concurrent.futures.Future[None]:
        """See `Engine.swap_weights`."""
        self.swaps_by_hand = True
        done = super().swap_weights(staged)
        self.swaps.clear()
        after_s = self._draws.transfers[self._rank].choice((0.0, 0.01, 0.1))
        asyncio.get_running_loop().call_later(after_s, self._swapped, done, staged)
        return done

    def _swapped(self, done: concurrent.futures.Future[None], staged: int) -> None:
        self._story.event("weights swapped", f"on rank {self._rank}")
        if staged % 10 == 9:
            done.set_exception(DeviceError("cudaErrorSimulated", "no swap", sticky=False))
        else:
            done.set_result(None)


class SimulatedGrammars(FakeGrammars):
    """Ends compilations by itself, some of them too late."""

    def __init__(self, draws: Draws, story: Story) -> None:
        super().__init__(timeout_s=2.0)
        self._draws = draws.stream("grammars")
        self._story = story

    def _begin(self, work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        after_s = self._draws.choice((0.0, 0.05, 0.5, 3.0))
        asyncio.get_running_loop().call_later(after_s, self._end, work, done)

    def _end(self, work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        self._story.event("grammar compiled")
        done(work())


class SimulatedTransfer(FakeTransfer):
    """Ends handshakes and writes by itself, some of them never or with an error, until it is healed."""

    def __init__(self, rank: int, draws: Draws, story: Story, engine: SimulatedEngine) -> None:
        super().__init__(handshake_s=None, write_s=None, page_stamp=lambda page: engine.stamps[page])
        self._rank = rank
        self._draws = draws.transfers[rank]
        self._slow_s = self._draws.choice((0.0, 0.01, 0.1, 0.5))
        self._story = story
        self._healed = False
        self._sent: dict[str, int] = {}
        """Pages sent of each open room."""
        self.sends.clear()

    def open(self, handoff: Handoff) -> None:
        """See `KVTransfer.open`."""
        super().open(handoff)
        self._sent[handoff.room] = 0
        ticket = self._book.ticket_of(handoff.room)
        if self._healed or self._draws.random() > 0.06:
            after_s = self._slow_s * self._draws.random()
            asyncio.get_running_loop().call_later(after_s, self._shake, handoff.room, ticket)

    def _shake(self, room: str, ticket: int | None) -> None:
        known = None if ticket is None else self._book.room(ticket)
        if known is not None and known.state is RoomState.BOOTSTRAPPING:
            self._story.event("handshake ended", f"{room} on rank {self._rank}")
            self.finish_handshake(room)

    def send(self, room: str, pages: Sequence[int], first_page: int, final: SampledToken | None) -> None:
        """See `KVTransfer.send`."""
        sent = self._sent.get(room)
        assert sent == first_page, f"{room}: pages from {first_page} on are sent after {sent}"
        self._sent[room] = first_page + len(pages)
        super().send(room, pages, first_page, final)

    def post(self, peer: str, write: Write) -> None:
        """See `Carrier`."""
        super().post(peer, write)
        error = "write failed" if not self._healed and self._draws.random() < 0.03 else None
        after_s = self._slow_s * self._draws.random()
        asyncio.get_running_loop().call_later(after_s, self._written, peer, write, error)

    def _written(self, peer: str, write: Write, error: str | None) -> None:
        self._story.event("write ended", f"{peer} on rank {self._rank}" + (f": {error}" if error else ""))
        self._end_write(peer, write, error)

    def accept(self, peer: str) -> None:
        """A peer that refused, died or fell silent is as before."""
        self._refusing.pop(peer, None)
        self.revive(peer)

    def heal(self) -> None:
        """Nothing goes wrong any more, and what hangs goes on."""
        self._healed = True
        for peer in PEERS:
            self.accept(peer)
        for room in self._book.rooms():
            self._shake(room.handoff.room, room.ticket)

    def give_up_one(self, pick: random.Random) -> None:
        """A peer gives one room up, if it knows of any."""
        known = [room.handoff.room for room in self._book.rooms() if room.state is not RoomState.OPENED]
        if known:
            self.give_up(pick.choice(known), "the peer has given up")
