"""Rows P of the behaviours, on SGLang's own scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from fake_transfer import Gate, Peer
from harness import Arrival, Bench, Run, answered, behind, launches, results, whole
from messages import Act, abort, finish, pause, prompt, request, resume
from plugin_loop import with_config

from aioprefill.config import SglangConfig

MODES = ("in_place", "retract")
BARRIER = SglangConfig(input_poll_s=0.002, pause_barrier=True)
HELD = None


class Flag:
    """Notes the state of the scheduler at the moment of a message."""

    def __init__(self, bench: Bench) -> None:
        self._scheduler = bench.scheduler
        self.seen: list[tuple[bool, int, int]] = []
        """(paused, held messages, forwards in flight) at each look."""

    def look(self) -> Any:
        """A message for the script."""
        from messages import Act

        def do() -> None:
            s = self._scheduler
            self.seen.append((s._engine_paused, len(s._deferred_input_requests), len(s.result_queue)))

        return Act(do)


@pytest.mark.parametrize("mode", MODES)
def test_P1_pause_is_held_with_what_came_behind_it_until_the_result(bench: Bench, mode: str) -> None:
    """Receiving goes on meanwhile; the order of what was held is kept."""
    flag = Flag(bench)
    script = [
        Arrival(request("a", prompt(1, 20))),
        Arrival(pause(mode), behind(launches(1), 0.01)),
        Arrival(request("b", prompt(2, 20))),
        Arrival(abort("b")),
        Arrival(request("c", prompt(3, 20))),
        Arrival(flag.look(), behind(launches(1), 0.04)),
        Arrival(finish(bench, 0)),
        Arrival(flag.look(), behind(results(1), 0.02)),
        Arrival(resume()),
        Arrival(finish(bench, 1), launches(2)),
    ]
    run = bench.run("plugin", script, delay_s=HELD)
    assert flag.seen == [(False, 4, 1), (True, 0, 0)]
    assert [o.finish for o in run.outcomes["b"]] == ["FINISH_ABORT"]
    assert [o.finish for o in run.outcomes["c"]] == ["FINISH_LENGTH"]
    assert run.batches == [[("a", 0, 20)], [("c", 0, 20)]]


def test_P1_retract_waits_until_one_forward_is_left_and_ended(bench: Bench) -> None:
    """At depth two: the first result is processed before the pause, the second one inside it."""
    flag = Flag(bench)
    script = [
        Arrival(request("long", prompt(1, 300))),
        Arrival(pause("retract"), launches(2)),
        Arrival(finish(bench, 0), behind(launches(2), 0.02)),
        Arrival(flag.look(), behind(results(1), 0.02)),
        Arrival(finish(bench, 1)),
        Arrival(flag.look(), behind(results(2), 0.02)),
        Arrival(resume()),
        *(Arrival(finish(bench, n), launches(n + 1)) for n in (2, 3, 4)),
    ]
    run = bench.run("plugin", script, delay_s=HELD)
    assert flag.seen == [(False, 1, 1), (True, 0, 0)]
    assert run.order[:4] == ["launch 0", "launch 1", "result 0", "result 1"]
    assert whole(run.sends["long"], 300)


def test_P2_nothing_is_prepared_while_input_is_held(bench: Bench) -> None:
    """A slot is free and a request waits, but a pause is held in front."""
    script = [
        Arrival(request("a", prompt(1, 20))),
        Arrival(pause("in_place"), behind(launches(1), 0.01)),
        Arrival(request("b", prompt(2, 20))),
        Arrival(resume()),
        Arrival(finish(bench, 0), behind(launches(1), 0.08)),
        Arrival(finish(bench, 1), launches(2)),
    ]

    run = bench.run("plugin", script, delay_s=HELD)
    assert run.preparations_at_result[0] <= 4
    assert run.order[:3] == ["launch 0", "result 0", "answer a"]


def test_P2_no_timeout_abort_is_issued_twice(bench: Bench) -> None:
    """A running request times out behind a held pause, and intake goes on: one abort, one outcome."""
    from sglang.srt.environ import envs

    aborts: list[str] = []

    def prepare(_: Run) -> None:
        own = bench.scheduler._poll_timeout_aborts

        def spy() -> Any:
            found = own()
            aborts.extend(a.rid for a in found)
            return found

        bench.scheduler._poll_timeout_aborts = spy

    script = [
        Arrival(request("a", prompt(1, 20))),
        Arrival(pause("in_place"), behind(launches(1), 0.08)),
        Arrival(finish(bench, 0), behind(launches(1), 0.2)),
        Arrival(resume()),
    ]
    try:
        with envs.SGLANG_REQ_RUNNING_TIMEOUT.override(0.03):
            run = bench.run("plugin", script, delay_s=HELD, prepare=prepare)
    finally:
        del bench.scheduler._poll_timeout_aborts
    assert aborts == ["a"]
    assert [o.finish for o in run.outcomes["a"]] == ["FINISH_ABORT"]


def test_P3_in_place_keeps_the_pending_result_for_later(bench: Bench) -> None:
    """Its forward ends during the pause; the result is processed behind the resume, once."""
    flag = Flag(bench)
    script = [
        Arrival(request("long", prompt(1, 190))),
        Arrival(pause("in_place"), results(1)),
        Arrival(flag.look(), behind(results(1), 0.05)),
        Arrival(resume()),
    ]
    run = bench.run("plugin", script, delay_s=0.01)
    assert flag.seen == [(True, 0, 1)]
    assert run.results == 3
    assert whole(run.sends["long"], 190)


def test_P4_retract_keeps_the_send_boundary_of_a_live_chunk(bench: Bench) -> None:
    """A retract between any two chunks: no range is sent twice or missed."""
    for at in range(1, 5):
        script = [
            Arrival(request("long", prompt(1, 300))),
            Arrival(pause("retract"), results(at)),
            Arrival(resume(), behind(results(at), 0.03)),
        ]
        run = bench.run("plugin", script)
        assert [c.end for c in run.sends["long"]] == [64, 128, 192, 256, 300]
        assert whole(run.sends["long"], 300)
        assert run.paused_launches == 0


@pytest.mark.parametrize("mode", MODES)
def test_P6_barrier_pause_waits_until_no_forward_runs(bench: Bench, mode: str) -> None:
    """With AIOPREFILL_PAUSE_BARRIER the pause, and the weights behind it, come when all copies have ended."""
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

    running: list[int] = []

    def prepare(run: Run) -> None:
        record = bench.scheduler.record_weight_version_change

        def spy(new_version: str) -> None:
            ended = [result.copy_done.query() for _, result in bench.scheduler.result_queue]
            running.append(len(ended) - sum(ended))
            record(new_version)

        bench.scheduler.record_weight_version_change = spy

    for barrier in (True, False):
        script = [
            Arrival(request("long", prompt(1, 300))),
            Arrival(pause(mode), results(1)),
            Arrival(UpdateWeightVersionReqInput(new_version=f"{mode} {barrier}"), results(1)),
            Arrival(resume(), behind(results(1), 0.15)),
        ]
        try:
            if barrier:
                with with_config(BARRIER):
                    run = bench.run("plugin", script, delay_s=0.05, prepare=prepare)
            else:
                run = bench.run("plugin", script, delay_s=0.05, prepare=prepare)
        finally:
            del bench.scheduler.record_weight_version_change
        assert whole(run.sends["long"], 300)
    assert running == ([0, 1] if mode == "in_place" else [0, 0])


@pytest.mark.parametrize("mode", MODES)
def test_P6_transfers_go_on_during_a_pause(bench: Bench, mode: str) -> None:
    """A transfer ends while SGLang is paused, and the resume waits for its answer: no deadlock."""
    transfer = Gate()
    script = [
        Arrival(request("a", prompt(1, 20))),
        Arrival(pause(mode), results(1)),
        Arrival(Act(transfer.open), behind(results(1), 0.05)),
        Arrival(resume(), answered("a")),
    ]
    run = bench.run("plugin", script, peers={"a": Peer(transferred=transfer)})
    assert [o.finish for o in run.outcomes["a"]] == ["FINISH_LENGTH"]


def test_pause_twice_is_as_in_sglang(bench: Bench) -> None:
    """A retract behind an in-place pause takes the kept result; both loops end alike."""

    def script() -> list[Arrival]:
        return [
            Arrival(request("long", prompt(1, 300))),
            Arrival(pause("in_place"), results(2)),
            Arrival(pause("retract"), behind(results(2), 0.03)),
            Arrival(resume(), behind(results(2), 0.06)),
        ]

    runs = [bench.run(loop, script()) for loop in ("blocking", "plugin")]
    assert runs[0].tokens() == runs[1].tokens()
    assert runs[0].sends == runs[1].sends
    assert runs[0].order == runs[1].order
