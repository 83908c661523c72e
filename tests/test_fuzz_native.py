"""Random schedules on the native host, on virtual time: whatever comes when, the rules of the loop hold.

A failing seed is printed. To replay it: `python tests/test_fuzz_native.py SEED`; more seeds: `FIRST LAST`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.engine.port import SampledToken, Span
from aioprefill.errors import AioprefillError, ControlError, DeviceError, ModelError, QueueFull
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.native.forwards import NativeBatch, NativeForward
from aioprefill.native.frontend import Arrival
from aioprefill.native.host import NativeHost
from aioprefill.native.policy import POLICIES
from aioprefill.native.tier.tier import StorageTier
from aioprefill.request import PrefillHandle, PrefillRequest, Timeouts
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import run_virtual, settle
from aioprefill.testing.engine import FakeEngine, fake_spec
from aioprefill.testing.grammars import FakeGrammars
from aioprefill.testing.tier import MemoryStore
from aioprefill.testing.transfer import FakeTransfer
from aioprefill.transfer.rooms import RoomState

SEEDS = 60
STEPS = 120
PAGE = 16
PEERS = ("p0", "p1", "p2")
FAMILIES = 4
"""Prompts of one family share their beginnings."""


class CheckedEngine(FakeEngine):
    """What stands for KV tells the weights, too: token + 1000 * weights."""

    def _compute_kv(self, spans: Sequence[Span]) -> None:
        super()._compute_kv([replace(span, token_ids=span.token_ids + 1000 * self.weights) for span in spans])

    def kv_of(self, pages: Iterable[int], tokens: int) -> np.ndarray:
        """The first tokens of some pages, one after the other."""
        return np.array([token for page in pages for token in self.page_tokens(page)], dtype=np.int64)[
            :tokens
        ]


class CheckedHost(NativeHost):
    """Whatever is launched finds the KV of what it skips: of its own prompt, by the present weights."""

    engine: CheckedEngine

    def launch(self, now: float, batch: NativeBatch, number: int) -> NativeForward:
        """See `PrefillHost.launch`."""
        for piece in batch.pieces:
            request = piece.request
            found = self.engine.kv_of(request.pages.tolist(), piece.start)
            assert (found % 1000 == request.tokens[: piece.start]).all(), f"{request.request_id}: wrong KV"
            if request.planned == request.cached:
                assert (found // 1000 == self.engine.weights).all(), (
                    f"{request.request_id}: KV of old weights"
                )
        return super().launch(now, batch, number)


class CheckedTransfer(FakeTransfer):
    """What is sent is the prompt's KV; that there are no gaps is checked by the rooms."""

    engine: CheckedEngine

    def send(self, room: str, pages: Sequence[int], first_page: int, final: SampledToken | None) -> None:
        """See `KVTransfer.send`."""
        tokens = self.prompts[room][first_page * PAGE :][: len(pages) * PAGE]
        found = self.engine.kv_of(pages, len(tokens))
        assert (found % 1000 == tokens).all(), self._violate(
            f"{room}: wrong KV is sent from page {first_page}"
        )
        super().send(room, pages, first_page, final)

    @property
    def prompts(self) -> dict[str, np.ndarray]:
        """Prompts by request id."""
        return self.__dict__.setdefault("_prompts", {})


def prompt(family: int, length: int) -> np.ndarray:
    """Token ids that tell their family and something of their position."""
    return (family + 1) * 100 + (np.arange(length) * 7 + 1) % 97


class Fuzz:
    """One seed's world, its moves and its invariants."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random
        spec = fake_spec(page_size=PAGE)
        self.engine = CheckedEngine(
            num_pages=pick.choice((8, 16, 40)), spec=spec, duration_s=pick.choice((None, None, 0.2))
        )
        self.engine.keep_kv = True
        self.engine.swaps_by_hand = pick.random() < 0.3
        manual = pick.random() < 0.6
        self.transfer = CheckedTransfer(
            handshake_s=None if manual else pick.choice((0.0, 0.3)),
            write_s=pick.choice((None, 0.0, 0.1)),
            page_stamp=self._stamp,
        )
        self.transfer.engine = self.engine
        self.store = None
        if pick.random() < 0.5:
            self.store = MemoryStore(
                page_bytes=spec.layout.page_bytes,
                read_s=pick.choice((None, 0.0, 0.2)),
                write_s=pick.choice((None, 0.0, 0.2)),
            )
        self.grammars = FakeGrammars(timeout_s=3.0)
        limit = (None, 0.5, 5.0)
        self.config = NativeConfig(
            chunk_tokens=pick.choice((16, 40, 64, 128)),
            max_batch_requests=pick.choice((1, 2, 8)),
            max_queue_requests=pick.choice((4, 100)),
            policy=pick.choice(sorted(POLICIES)),
            policy_max_wait_s=pick.choice((0.0, 1.0, 40.0)),
            late_deadlines=pick.choice(("refuse", "serve")),
            max_chunk_share=pick.choice((0.5, 1.0)),
            optimistic=pick.random() < 0.5,
            prefix_cache=self.store is not None or pick.random() < 0.8,
            handshake_timeout_s=pick.choice((1.0, 20.0)),
            queue_timeout_s=pick.choice(limit),
            running_timeout_s=pick.choice(limit),
            transfer_timeout_s=pick.choice((1.0, 20.0)),
            tier_size=1 << 20,
        )
        self.host = CheckedHost(
            self.engine, self.transfer, self.config, grammars=self.grammars, tier_store=self.store
        )
        self.scheduler = PrefillScheduler(
            self.host,
            SchedulerConfig(drain_timeout_s=pick.choice((0.5, 30.0)), continuous_intake=True),
        )
        self.handles: dict[str, PrefillHandle] = {}
        self.awaits: list[asyncio.Task[Any]] = []
        self.commands: list[asyncio.Task[Any]] = []
        self.outcomes: dict[int, int] = {}
        """By submission, for ids come back."""
        self.count = 0
        self.log: list[str] = []

    def _stamp(self, page: int) -> object:
        """Changes when a page that was sent is written by somebody else."""
        return tuple(self.engine.page_tokens(page))

    # Moves

    def submit(self) -> None:
        """A request; sometimes with an id that was used before."""
        pick = self.random
        most = self.engine.num_pages * PAGE
        length = pick.choice((1, 15, 16, 17, pick.randint(1, 100), pick.randint(1, most)))
        self.count += 1
        name = f"r{self.count}"
        if self.handles and pick.random() < 0.15:
            name = pick.choice(sorted(self.handles))
            if not self.handles[name].done:
                return
        request = PrefillRequest(
            prompt(pick.randrange(FAMILIES), min(length, most)),
            request_id=name,
            peer=None if pick.random() < 0.3 else pick.choice(PEERS),
            grammar=GrammarSpec("json_schema", pick.choice(("{}", "bad", '{"a": 1}')))
            if pick.random() < 0.15
            else None,
            priority=pick.randint(0, 2),
            deadline_s=pick.choice((None, None, 0.3, 5.0)),
            timeouts=Timeouts(
                queue_s=pick.choice((None, None, 1.0)), running_s=pick.choice((None, None, 1.0))
            ),
        )
        try:
            handle = self.scheduler.submit(request)
        except (QueueFull, AioprefillError):
            return
        self.handles[name] = handle
        self.transfer.prompts[name] = np.asarray(request.token_ids)
        number = self.count
        self.outcomes[number] = 0
        handle.transferred.add_done_callback(lambda _: self._ended(number))
        if pick.random() < 0.3:
            self.awaits.append(asyncio.ensure_future(self._wait(handle)))

    def _ended(self, number: int) -> None:
        self.outcomes[number] += 1

    async def _wait(self, handle: PrefillHandle) -> None:
        with contextlib.suppress(AioprefillError):
            await handle

    def complete(self) -> None:
        """The device is done with a forward, in any order."""
        live = [forward for forward in self.engine.forwards if not forward.completion.done]
        if live:
            forward = self.random.choice(live)
            if self.random.random() < 0.05:
                forward.fail(DeviceError("cudaErrorFake", "chance", sticky=False))
            else:
                forward.complete()

    def abort(self) -> None:
        """An abort of one request, live or not; a caller that stops waiting."""
        if self.awaits and self.random.random() < 0.3:
            self.random.choice(self.awaits).cancel()
        elif self.handles:
            self.scheduler.abort(self.random.choice(sorted(self.handles)))

    def command(self) -> None:
        """A control command; sometimes nobody waits for its answer."""
        pick, scheduler = self.random, self.scheduler
        if self.commands and pick.random() < 0.2:
            pick.choice(self.commands).cancel()
            return
        make = pick.choice(
            (
                lambda: scheduler.pause(
                    pick.choice(("in_place", "retract", "wait", "abort")), barrier=pick.random() < 0.5
                ),
                lambda: scheduler.pause("retract"),
                lambda: scheduler.resume(),
                lambda: scheduler.resume(),
                lambda: scheduler.resume(),
                lambda: scheduler.update_weights(str(pick.randint(1, 3))),
                lambda: scheduler.flush_cache(),
                lambda: scheduler.flush_cache(),
                lambda: scheduler.abort_matching(pick.choice(("r1", "r2", "none"))),
            )
        )
        self.commands.append(asyncio.ensure_future(self._command(make)))

    async def _command(self, make: Callable[[], Any]) -> None:
        with contextlib.suppress(ControlError, ModelError, AioprefillError):
            await make()

    def peer(self) -> None:
        """Something happens to a peer."""
        peer, transfer = self.random.choice(PEERS), self.transfer
        what = self.random.random()
        if what < 0.2:
            transfer.kill(peer)
        elif what < 0.35:
            transfer.silence(peer)
        elif what < 0.8:
            transfer.revive(peer)
            transfer._refusing.pop(peer, None)
        elif what < 0.9:
            transfer.refuse(peer)
        else:
            known = [
                room.handoff.room for room in transfer._book.rooms() if room.state is not RoomState.OPENED
            ]
            if known:
                transfer.give_up(self.random.choice(known), "chance")

    def handshake(self) -> None:
        """A handshake ends."""
        rooms = [room for room in self.transfer.open_rooms if self._booting(room)]
        if rooms:
            self.transfer.finish_handshake(self.random.choice(rooms))

    def _booting(self, room: str) -> bool:
        ticket = self.transfer._book.ticket_of(room)
        known = None if ticket is None else self.transfer._book.room(ticket)
        return known is not None and known.state is RoomState.BOOTSTRAPPING

    def write(self) -> None:
        """A write ends, sometimes with an error."""
        if self.transfer._write_s is None and self.transfer.live_writes:
            room = self.random.choice(self.transfer.live_writes)[0]
            self.transfer.finish_write(room, "chance" if self.random.random() < 0.05 else None)

    def outside(self) -> None:
        """Grammars, weights and the tier's store make progress."""
        if self.grammars.running:
            self.grammars.finish()
        if self.engine.swaps:
            self.engine.swaps.pop(0).set_result(None)
        if self.store is not None:
            for calls in (self.store.reads, self.store.writes):
                if calls:
                    calls.pop(0)()

    async def move(self) -> None:
        """One random move, with the loop at some random point behind it."""
        moves = (
            (self.submit, 6),
            (self.complete, 6),
            (self.handshake, 4),
            (self.write, 4),
            (self.outside, 4),
            (self.abort, 1),
            (self.command, 2),
            (self.peer, 0.5),
        )
        (chosen,) = self.random.choices([m for m, _ in moves], [weight for _, weight in moves])
        self.log.append(chosen.__name__)
        chosen()
        what = self.random.random()
        if what < 0.3:
            await settle()
        elif what < 0.7:
            await settle(self.random.randint(0, 6))
        elif what < 0.9:
            await asyncio.sleep(self.random.choice((0.01, 0.3, 1.0)))
        self.check()

    # Invariants

    def check(self) -> None:
        """What holds at every point between two host calls."""
        assert not self.scheduler._runner.done(), self.scheduler._failure  # type: ignore[union-attr]
        host, ledger = self.host, self.host.ledger
        host.memory.check()
        self.transfer.check()
        assert len(host.forwards.pending) <= 2
        assert all(count <= 1 for count in self.outcomes.values())
        queued = [r for r in ledger.requests.values() if r.waits]
        coming = [item for item in (*host.frontend.inbox, *host.frontend.coming) if isinstance(item, Arrival)]
        assert host.frontend.queued_requests == len(queued) + len(coming)
        tokens = sum(r.length for r in queued) + sum(len(item.tokens) for item in coming)
        assert host.frontend.queued_tokens == tokens
        assert set(ledger.waiting) | set(ledger.bootstrapping) == {r.request_id for r in queued}
        holding = any(len(r.pages) for r in ledger.requests.values())
        assert holding or host.memory.pool.held == 0
        if isinstance(host.tier, StorageTier):
            host.tier.index.check()

    async def finish(self) -> None:
        """Everything outside goes well from now on: every request gets its outcome, and nothing is held."""
        for peer in PEERS:
            self.transfer.revive(peer)
            self.transfer._refusing.pop(peer, None)
        for _ in range(400):
            self.commands.append(asyncio.ensure_future(self._command(self.scheduler.resume)))
            await settle()
            for forward in self.engine.forwards:
                forward.complete()
            for room in [room for room in self.transfer.open_rooms if self._booting(room)]:
                self.transfer.finish_handshake(room)
            while self.transfer._write_s is None and self.transfer.live_writes:
                self.transfer.finish_write()
            for _ in range(3):
                self.outside()
            await settle()
            await asyncio.sleep(0.1)
            self.check()
            if not self.host.ledger.requests and not self.host.frontend.arrivals:
                break
        assert not self.host.ledger.requests, f"hangs: {list(self.host.ledger.requests.values())}"
        assert self.host.memory.pool.held == 0
        assert not self.host.frontend._live and not self.host.frontend.aborting
        assert self.host.frontend.queued_requests == self.host.frontend.queued_tokens == 0
        assert self.host.timers.next() is None
        await asyncio.sleep(60)
        assert all(task.done() for task in self.commands), f"commands hang: {self.commands}"
        assert all(task.done() for task in self.awaits)

    async def run(self) -> None:
        """The whole life of a scheduler; half of the time it drains in the middle of things."""
        drains = self.random.random() < 0.4
        async with self.scheduler:
            for _ in range(self.random.randint(1, STEPS)):
                await self.move()
            if not drains:
                await self.finish()
            elif self.random.random() < 0.5:
                draining = asyncio.ensure_future(self.scheduler.drain(self.random.choice((0.0, 1.0, 30.0))))
                for _ in range(20):
                    await self.move()
                if self.random.random() < 0.3:
                    draining.cancel()
                else:
                    report = await asyncio.wait_for(draining, 40)
                    assert not set(report.finished) & set(report.dropped)
        await asyncio.sleep(20)
        assert all(count == 1 for count in self.outcomes.values()), self.outcomes
        assert all(h.result.done() and h.transferred.done() for h in self.handles.values())
        assert all(task.done() for task in self.commands), f"commands hang: {self.commands}"
        assert all(task.done() for task in self.awaits)
        if self.host.forwards.pending or self.engine.swaps:
            return
        assert not any(r.in_flight for r in self.host.ledger.requests.values())


def play(seed: int) -> None:
    """Run one seed; its number is part of what fails."""
    fuzz: list[Fuzz] = []

    async def main() -> None:
        fuzz.append(Fuzz(seed))
        loop = asyncio.get_running_loop()
        broken: list[Any] = []
        loop.set_exception_handler(lambda _, context: broken.append(context))
        await fuzz[0].run()
        assert not broken, broken

    try:
        run_virtual(main())
    except BaseException as error:
        print(f"seed {seed} fails: {type(error).__name__}: {str(error)[:300]}")
        raise


def test_random_schedules_keep_the_rules() -> None:
    """Each request has one outcome, nothing is held at the end, counts and pages are right at every step."""
    for seed in range(SEEDS):
        play(seed)


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    if len(numbers) == 1:
        play(numbers[0])
    else:
        failed = []
        for number in range(*numbers):
            try:
                play(number)
            except BaseException as err:
                if isinstance(err, KeyboardInterrupt):
                    raise
                failed.append(number)
        print(f"{len(failed)} of {numbers[1] - numbers[0]} failed: {failed[:40]}")
