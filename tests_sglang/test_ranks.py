"""Two tensor-parallel ranks: processes with a real Scheduler each, over real Gloo; and the parts alone.

RANKS_SCHEDULES says how many random schedules are played; `ranks_run.py` plays any number by itself.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks_run import LOST, Outcome, run_ranks
from servers import free_port
from test_parts import Manager, waiting

from aioprefill.errors import ConfigError, RankError
from aioprefill.host import Wake
from aioprefill.ranks.place import RankPlace
from aioprefill.sglang.grammars import RETRY_S, GrammarGate
from aioprefill.sglang.ranks import SglangLink, address_for
from aioprefill.sglang.replica import GRAMMARS_READY, TRANSFERS_MOVED, Replica
from aioprefill.sglang.shape import Shape
from aioprefill.sglang.wakes import Wakes

SCHEDULES = int(os.environ.get("RANKS_SCHEDULES", "24"))


@pytest.fixture(scope="module")
def outcome(model: Path) -> Outcome:
    """Of the one pair of processes that plays everything in this file."""
    return run_ranks(model, free_port(), SCHEDULES, then="ends")


def told(outcome: Outcome, rank: int, key: str) -> list[Any]:
    """What a rank has said of something."""
    return [line[key] for line in outcome.lines[rank] if key in line]


def test_ranks_decide_alike_in_random_schedules(outcome: Outcome) -> None:
    """Pauses in both modes, aborts, peers with faults, optimistic prefill, grammars; ends that are skewed.

    Launches, results, samples, answers and their order, batches, KV ranges, tokens and end state are the
    same, and right by themselves (`Script.check`), which each rank has looked at before it said so.
    """
    assert outcome.schedules() == SCHEDULES + 1, outcome.errors
    assert any(told(outcome, 0, "two"))


def test_a_role_switch_leaves_on_all_ranks_at_one_call_and_comes_back(outcome: Outcome) -> None:
    """SGLang's own exception leaves on both, bare; afterwards the loop is entered again and serves."""
    for rank in (0, 1):
        assert told(outcome, rank, "left") == ["PdRoleSwitchRestart"], outcome.errors[rank]
        assert told(outcome, rank, "seen") == [["gone"]]
    assert told(outcome, 0, "seed")[-1] == told(outcome, 0, "seed")[0]


def test_R4_a_rank_that_dies_is_named_by_what_leaves_the_loop(outcome: Outcome) -> None:
    """Though SGLang's own collective, in a host call, is the first to notice."""
    assert outcome.codes == [LOST, LOST]
    (error,) = told(outcome, 0, "lost")
    assert error.startswith("RankError: rank 1 has closed its connection")


# The parts


def gate_on(manager: Any, woken: list[str], *, follows: bool = False) -> GrammarGate:
    """A gate of one of several ranks."""
    return GrammarGate(manager, lambda: woken.append("look"), alone=False, follows=follows)


@pytest.mark.asyncio
async def test_grammar_that_is_not_ready_elsewhere_is_tried_again_when_it_is() -> None:
    """Not at once, which would spin; another rank's word makes it due, and so does time."""
    future: Future[Any] = Future()
    future.set_result("compiled")
    woken: list[str] = []
    gate = gate_on(Manager(waiting(future)), woken)
    gate.watch(10.0)
    assert gate.due and woken == ["look"]
    gate.open(look=True)
    gate.shut(10.0)
    assert not gate.due
    gate.watch(10.0 + RETRY_S / 2)
    assert not gate.due and woken == ["look"]
    gate.others_ready()
    assert gate.due and woken == ["look", "look"]
    gate.open(look=True)
    gate.shut(11.0)
    gate.watch(11.0 + RETRY_S)
    assert gate.due
    gate.close()


@pytest.mark.asyncio
async def test_word_of_another_rank_means_nothing_before_it_is_ready_here() -> None:
    """The look would find nothing on this one."""
    woken: list[str] = []
    gate = gate_on(Manager(waiting(Future())), woken)
    gate.others_ready()
    assert not gate.due and not woken
    gate.close()


@pytest.mark.asyncio
async def test_follower_tells_of_a_grammar_once() -> None:
    """Not with each intake; again where it has stayed, for the word may have come too early."""
    future: Future[Any] = Future()
    future.set_result("compiled")
    told_: list[str] = []
    gate = gate_on(Manager(waiting(future)), told_, follows=True)
    for now in (10.0, 10.01, 10.02):
        gate.watch(now)
    assert told_ == ["look"]
    gate.watch(10.0 + RETRY_S)
    assert told_ == ["look", "look"]
    gate.close()


@pytest.mark.asyncio
async def test_follower_reports_that_its_peers_have_moved() -> None:
    """The leader's own may have moved before; it has no sockets to be woken by."""

    class Rank(Replica):
        grammars_due = False

    reports: asyncio.Queue[bytes] = asyncio.Queue()
    rank = Rank()
    rank.follow(reports.put_nowait)
    sender = SimpleNamespace(poll=lambda: 4)
    scheduler = SimpleNamespace(
        disagg_prefill_inflight_queue=[SimpleNamespace(rid="r", disagg_kv_sender=sender)],
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=["handshake"]),
        waiting_queue=[],
        grammar_manager=Manager(),
        request_receiver=None,
    )
    scheduler.disagg_prefill_bootstrap_queue.queue.clear()
    wakes = Wakes(scheduler, rank.reporting(), lambda: reports.put_nowait(GRAMMARS_READY), follows=True)
    wakes.after_input(0.0, new=True, resumed=True)
    assert reports.empty()
    async with asyncio.timeout(5):
        assert await reports.get() == TRANSFERS_MOVED
    wakes.close()


@pytest.mark.asyncio
async def test_report_of_a_follower_wakes_the_leader() -> None:
    """Each kind its own task; of what is unknown nothing comes."""
    from aioprefill.sglang.completion import Pacing
    from aioprefill.sglang.host import SglangHost
    from aioprefill.timerfd import FineTimer

    scheduler = SimpleNamespace(
        idle_sleeper=None, grammar_manager=Manager(), request_receiver=None, return_health_check_ipcs=[]
    )
    pacing = Pacing(FineTimer())
    host = SglangHost(scheduler, pacing, clock=lambda: 0.0)
    host.lead(2, recorded=False)
    woken: list[str] = []
    host.bind(Wake(lambda: woken.append("input"), lambda: woken.append("transfers"), lambda: None))
    host.take_report(1, b"of another version")
    host.take_report(1, TRANSFERS_MOVED)
    assert woken == ["transfers"]
    await host.aclose(ConfigError("the end"))


@pytest.mark.asyncio
async def test_error_of_a_collective_is_told_as_the_rank_that_was_lost() -> None:
    """Without a suspect, as it is; an error of another kind is told at once."""

    class Link(SglangLink):
        def __init__(self) -> None:
            self._lost = asyncio.get_running_loop().create_future()
            self._closed = True
            self.progress = SimpleNamespace(blames=-1, error="")  # type: ignore[assignment]
            self._watch = None
            self._group = SimpleNamespace(place=RankPlace(0, 3, 0))  # type: ignore[assignment]

    link = Link()
    link.failed(RuntimeError("Connection closed by peer"))
    assert link.progress.blames == -1
    link._lost.set_result(RankError(2, "is gone"))
    await link.aclose()
    assert link.lost is not None and link.progress.blames == 2
    other = Link()
    other.failed(ConfigError("wrong"))
    assert other.progress.blames == 0


@pytest.mark.parametrize(
    ("nodes", "init", "address"),
    [(1, None, "127.0.0.1"), (1, "10.0.0.9:5000", "127.0.0.1"), (2, "10.0.0.9:5000", "10.0.0.9")],
)
def test_rank_0_listens_where_the_others_can_reach_it(nodes: int, init: str | None, address: str) -> None:
    """Loopback on one machine."""
    assert address_for(SimpleNamespace(nnodes=nodes, dist_init_addr=init)) == address


def test_shapes_of_ranks() -> None:
    """Tensor parallelism is served where its ranks are all there are."""
    assert Shape(tensor_ranks=2, world_ranks=2).unsupported is None
    assert "among 4 processes" in str(Shape(tensor_ranks=2, world_ranks=4).unsupported)
