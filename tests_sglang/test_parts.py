"""The adapter's parts alone, with fakes: grammars, peers, upkeep, completions, ranks."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from aioprefill.errors import DeviceError, HostError
from aioprefill.host import Hold, Wake
from aioprefill.pacer import Pacer
from aioprefill.sglang.completion import Pacing, SglangCompletion
from aioprefill.sglang.grammars import GrammarGate
from aioprefill.sglang.input_order import InputOrder
from aioprefill.sglang.peers import PeerWatch
from aioprefill.sglang.replica import Replica
from aioprefill.sglang.wakes import Wakes
from aioprefill.timerfd import FineTimer


class Manager:
    """Stands for SGLang's grammar manager."""

    SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = 1000
    SGLANG_GRAMMAR_POLL_INTERVAL = 0.005

    def __init__(self, *requests: Any) -> None:
        self.grammar_queue = list(requests)

    def has_waiting_grammars(self) -> bool:
        """As SGLang's."""
        return len(self.grammar_queue) > 0


def waiting(future: Future[Any]) -> Any:
    """A request that waits for its grammar."""
    return SimpleNamespace(grammar=future, grammar_wait_ct=0, finished=lambda: False)


@pytest.mark.asyncio
async def test_grammars_are_looked_at_when_one_is_compiled() -> None:
    """No preparation sees them before; the compiling thread's callback wakes, and one look is let through."""
    future: Future[Any] = Future()
    manager, woken = Manager(waiting(future)), asyncio.Event()
    gate = GrammarGate(manager, woken.set)
    gate.watch(0.0)
    assert not gate.due
    gate.open(look=gate.due)
    assert not manager.has_waiting_grammars()
    gate.shut(0.1)
    future.set_result("compiled")
    async with asyncio.timeout(5):
        await woken.wait()
    assert gate.due
    gate.open(look=gate.due)
    assert manager.has_waiting_grammars()
    manager.grammar_queue.clear()
    gate.shut(0.2)
    assert not gate.due
    gate.close()
    assert manager.SGLANG_GRAMMAR_POLL_INTERVAL == 0.005
    assert "has_waiting_grammars" not in vars(manager)


@pytest.mark.asyncio
async def test_look_that_missed_a_grammar_is_repeated() -> None:
    """SGLang's look may be over before it has begun: what is ready stays due."""
    future: Future[Any] = Future()
    gate = GrammarGate(Manager(waiting(future)), lambda: None)
    future.set_result("compiled")
    gate.watch(0.0)
    gate.open(look=gate.due)
    gate.shut(0.1)
    assert gate.due


@pytest.mark.asyncio
async def test_grammar_that_never_compiles_fails_at_sglangs_limit() -> None:
    """1,000 looks of 5 ms: after five seconds it is handed to SGLang as having had them all."""
    request = waiting(Future())
    gate = GrammarGate(Manager(request), lambda: None)
    gate.watch(10.0)
    gate.watch(14.9)
    assert not gate.due
    gate.watch(15.0)
    assert gate.due
    assert request.grammar_wait_ct == 1000


@pytest.mark.asyncio
async def test_aborted_grammar_is_due_at_once() -> None:
    """SGLang sets its grammar to None and waits for a look."""
    request = waiting(Future())
    gate = GrammarGate(Manager(request), lambda: None)
    gate.watch(0.0)
    request.grammar = None
    gate.watch(0.1)
    assert gate.due


class Sender:
    """A sender with a state."""

    def __init__(self, state: int) -> None:
        self.state = state

    def poll(self) -> int:
        """Its state."""
        return self.state


def peers_of(*senders: Sender) -> Any:
    """A scheduler whose transfer queue has these senders."""
    requests = [SimpleNamespace(rid=f"r{n}", disagg_kv_sender=s) for n, s in enumerate(senders)]
    return SimpleNamespace(
        disagg_prefill_inflight_queue=requests,
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[]),
        waiting_queue=[],
    )


@pytest.mark.asyncio
async def test_peers_are_told_of_once_per_change() -> None:
    """A state that stays is no news; looks go on, ever more rarely, and end with the queues."""
    sender, moves = Sender(3), []
    scheduler = peers_of(sender)
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()

    def moved() -> None:
        moves.append(sender.state)
        (first if len(moves) == 1 else second).set_result(None)

    watch = PeerWatch(scheduler, moved=moved, admission=lambda: None)
    watch.begin()
    watch.begin()
    async with asyncio.timeout(5):
        await first
        await asyncio.sleep(0.05)
        assert moves == [3]
        sender.state = 4
        await second
    assert moves == [3, 4]
    assert watch.needed
    scheduler.disagg_prefill_inflight_queue.clear()
    assert not watch.needed
    await asyncio.sleep(0.02)
    looks = watch.looks
    await asyncio.sleep(0.03)
    assert watch.looks == looks
    watch.close()


@pytest.mark.asyncio
async def test_peers_of_a_long_queue_are_looked_at_more_rarely() -> None:
    """A look that takes 5 ms is followed by 100 ms of rest, though the shortest interval is 1 ms."""

    class Slow(Sender):
        def poll(self) -> int:
            time.sleep(0.005)
            return self.state

    watch = PeerWatch(peers_of(Slow(3)), moved=lambda: None, admission=lambda: None)
    watch.begin()
    await asyncio.sleep(0.08)
    assert watch.looks == 1
    watch.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(("tiers", "times"), [(True, 3), (False, 0)])
async def test_requests_that_wait_for_a_cache_tier_are_tried_again(tiers: bool, times: int) -> None:
    """Every 100 ms of intake, by the clock readings of the calls; never where there is no tier."""
    scheduler = peers_of()
    scheduler.grammar_manager, scheduler.request_receiver = Manager(), None
    scheduler.enable_hicache_storage = tiers
    scheduler.waiting_queue = [SimpleNamespace(rid="w", disagg_kv_sender=Sender(2))]
    woken: list[str] = []
    wake = Wake(input=lambda: None, transfers=lambda: None, admission=lambda: woken.append("admission"))
    wakes = Wakes(scheduler, wake, wake.admission)
    for now in (1.0, 1.05, 1.09, 1.11, 1.3):
        wakes.after_input(now, new=False, resumed=False)
    assert len(woken) == times
    wakes.close()


@pytest.mark.asyncio
async def test_waiting_request_whose_peer_dies_asks_for_a_preparation() -> None:
    """The preparation is what drops it; without a slot free it would hold its place until the next result."""
    sender, told = Sender(2), asyncio.Event()
    scheduler = peers_of()
    scheduler.waiting_queue = [SimpleNamespace(rid="w", disagg_kv_sender=sender)]
    watch = PeerWatch(scheduler, moved=lambda: None, admission=told.set)
    watch.begin()
    await asyncio.sleep(0.08)
    assert not told.is_set()
    sender.state = 0
    async with asyncio.timeout(5):
        await told.wait()
    watch.close()


@pytest.mark.asyncio
async def test_new_request_and_resume_ask_for_its_handshake_at_once() -> None:
    """Its peer may be ready already; other input asks for nothing."""
    scheduler = peers_of()
    scheduler.grammar_manager, scheduler.request_receiver = Manager(), None
    woken: list[str] = []
    wake = Wake(lambda: None, lambda: woken.append("transfers"), lambda: None)
    wakes = Wakes(scheduler, wake, wake.admission)
    wakes.after_input(0.0, new=True, resumed=False)
    assert not woken
    scheduler.disagg_prefill_bootstrap_queue.queue.append("request")
    wakes.after_input(0.0, new=False, resumed=False)
    assert not woken
    wakes.after_input(0.0, new=True, resumed=False)
    wakes.after_input(0.0, new=False, resumed=True)
    assert len(woken) == 2
    wakes.close()


class Copy:
    """A `copy_done` that is done after so many questions."""

    def __init__(self, questions: int, error: BaseException | None = None) -> None:
        self._left = questions
        self.error = error

    def query(self) -> bool:
        """One question."""
        self._left -= 1
        return self._left < 0

    def synchronize(self) -> None:
        """As SGLang's: raises what went wrong."""
        self._left = 0
        if self.error is not None:
            raise RuntimeError("destination tensors are invalid") from self.error


def result(copy_done: Any, *, delayed: bool = False) -> Any:
    """A result of SGLang's `run_batch`."""
    return SimpleNamespace(copy_done=copy_done, delay_sample_func=(lambda: None) if delayed else None)


@pytest.mark.asyncio
async def test_completion_waits_and_teaches_the_pacer() -> None:
    """It is found done by the fourth look; the pacer has the duration when the next wait begins."""
    pacing = Pacing(FineTimer(), pacer=Pacer())
    completion = SglangCompletion(result(Copy(3)), 64, asyncio.get_running_loop().time(), pacing)
    assert completion.submitted
    assert not completion.ended
    await completion.wait()
    assert completion.ended
    assert pacing.looks == 4
    await SglangCompletion(result(Copy(0)), 32, completion.launched_at, pacing).wait()
    assert pacing.pacer.begin(64) > 0
    assert pacing.pacer.begin(32) == 0
    pacing.timer.close()


@pytest.mark.asyncio
async def test_completion_that_was_never_submitted_is_an_error() -> None:
    """By any way of asking; and so is a copy that failed."""
    pacing = Pacing(FineTimer())
    for never in (result(None), result(Copy(0), delayed=True)):
        completion = SglangCompletion(never, 1, 0.0, pacing)
        assert not completion.submitted
        with pytest.raises(HostError, match="never submitted"):
            completion.query()
        with pytest.raises(HostError, match="never submitted"):
            await completion.wait()
        with pytest.raises(HostError, match="never submitted"):
            completion.synchronize()
    failed = SglangCompletion(result(Copy(0, OSError("gone"))), 1, 0.0, pacing)
    with pytest.raises(DeviceError, match="gone"):
        await failed.wait()
    with pytest.raises(DeviceError, match="invalid"):
        SglangCompletion(result(Copy(0, OSError("gone"))), 1, 0.0, pacing).synchronize()
    pacing.timer.close()


class Inputs:
    """The part of SGLang's scheduler that takes input, as SGLang 0.5.23 does it."""

    def __init__(self, *messages: Any) -> None:
        self._deferred_input_requests: list[Any] = []
        self._socket = list(messages)
        self.result_queue: list[Any] = []
        self.dispatched: list[Any] = []

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
        """Receive all, dispatch up to a pause."""
        self._deferred_input_requests += self._socket
        self._socket = []
        pauses = (n for n, m in enumerate(self._deferred_input_requests) if hasattr(m, "mode"))
        count = next(pauses, None) if stop_at_pause else None
        taken = self._deferred_input_requests[:count]
        del self._deferred_input_requests[:count]
        self.process_input_requests(taken)
        return taken

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        """Write them down."""
        self.dispatched += recv_reqs


class PauseGenerationReqInput:
    """Named as SGLang's."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __repr__(self) -> str:
        return self.mode


@pytest.mark.parametrize(
    ("hold", "barrier", "dispatched", "held_retract"),
    [
        (Hold(), False, "a in_place b retract c", False),
        (Hold(pauses=True, retract=True, weights=True), False, "a", False),
        (Hold(retract=True, weights=True), False, "a in_place b", True),
        (Hold(retract=True, weights=True), True, "a", False),
        (Hold(weights=True), False, "a in_place b retract c", False),
        (Hold(weights=True), True, "a", False),
    ],
)
def test_input_is_dispatched_up_to_the_first_pause_that_is_kept(
    hold: Hold, barrier: bool, dispatched: str, held_retract: bool
) -> None:
    """In order, whatever is kept; the rest stays where SGLang looks for it."""
    inputs = Inputs("a", PauseGenerationReqInput("in_place"), "b", PauseGenerationReqInput("retract"), "c")
    order = InputOrder(inputs, barrier=barrier)
    order.take(hold)
    assert " ".join(map(str, inputs.dispatched)) == dispatched
    assert order.held == 5 - len(inputs.dispatched)
    assert order.held_retract == held_retract
    order.take(Hold())
    assert " ".join(map(str, inputs.dispatched)) == "a in_place b retract c"


def test_followers_look_at_grammars_when_the_leader_says_so() -> None:
    """The decision goes with one call, whatever kind it is, and never waits for a later one."""

    class Rank(Replica):
        due = False

        @property
        def grammars_due(self) -> bool:
            return self.due

    leader, follower = Rank(), Rank()
    follower.follow(lambda _: None)
    leader.due, follower.due = True, False
    follower.give_facts(leader.take_facts())
    assert leader.take_look()
    assert follower.take_look()
    leader.due, follower.due = False, True
    assert leader.take_facts() == b""
    assert not leader.take_look()
    assert not follower.take_look()
