"""Rows P of the behaviours, on SGLang's own scheduler."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_transfer import Gate, Peer
from harness import Arrival, Bench, Moment, Run, answered, behind, launches, looks, results, start, whole
from messages import Act, abort, finish, pause, prompt, request, resume
from plugin_loop import with_config
from tiny_model import VOCABULARY

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


def everywhere(scheduler: Any) -> list[str]:
    """Ids of the requests in all its queues, a request as often as it is counted."""
    flying = {req.rid for batch, _ in scheduler.result_queue for req in batch.reqs}
    if scheduler.chunked_req is not None:
        flying.add(scheduler.chunked_req.rid)
    queues = (
        scheduler.waiting_queue,
        scheduler.disagg_prefill_bootstrap_queue.queue,
        scheduler.disagg_prefill_inflight_queue,
        scheduler.running_batch.reqs,
    )
    return sorted([*flying, *(req.rid for queue in queues for req in queue)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_P5_requests_before_a_pause_are_those_after_it(bench: Bench, mode: str, depth: int) -> None:
    """None is lost, counted twice or left in the running set; `depth` forwards are in flight."""
    scheduler = bench.scheduler
    found: list[list[str]] = []
    gates = {"handshake": Gate(), "moving": Gate(), "flying": Gate()}

    def look() -> None:
        found.append(everywhere(scheduler))

    length = {1: 60, 2: 300}.get(depth)
    at = looks(launches(1 + depth), 2) if depth else looks(results(1), 3)
    flying = [] if length is None else [Arrival(request("flying", prompt(3, length)), results(1))]
    waiting = [Arrival(request(f"w{n}", prompt(4 + n, 64)), at) for n in range(3 if depth == 2 else 0)]
    paused = looks(lambda _: scheduler._engine_paused, 3)
    script = [
        Arrival(request("handshake", prompt(1, 30))),
        Arrival(request("moving", prompt(2, 30))),
        *flying,
        *waiting,
        Arrival(Act(look), looks(at, 3)),
        Arrival(pause(mode)),
        *(Arrival(finish(bench, n)) for n in range(1, 1 + depth)),
        Arrival(Act(look), paused),
        Arrival(resume()),
        Arrival(Act(look), looks(paused, 3)),
        *(Arrival(Act(gate.open)) for gate in gates.values()),
    ]
    peers = {
        "handshake": Peer(bootstrapped=gates["handshake"]),
        "moving": Peer(transferred=gates["moving"]),
        "flying": Peer(transferred=gates["flying"]),
    }
    run = bench.run(
        "plugin", script, delay_s=lambda number: HELD if 1 <= number <= depth else 0.002, peers=peers
    )
    wanted = sorted(["handshake", "moving", *(a.message.rid for a in (*flying, *waiting))])
    assert found[:2] == [wanted, wanted]
    assert not scheduler.running_batch.reqs
    assert {rid: len(outcomes) for rid, outcomes in run.outcomes.items()} == dict.fromkeys(wanted, 1)


@pytest.mark.parametrize("mode", MODES)
def test_P8_nothing_is_launched_between_a_pause_and_its_resume(bench: Bench, mode: str) -> None:
    """A prompt goes on, requests come, a handshake ends, one is aborted: all of it waits for the resume."""
    handshake = Gate()
    paused = looks(lambda _: bench.scheduler._engine_paused, 2)
    script = [
        Arrival(request("first", prompt(1, 300))),
        Arrival(request("early", prompt(2, 30))),
        Arrival(pause(mode), results(1)),
        Arrival(request("during", prompt(3, 30)), paused),
        Arrival(request("given up", prompt(4, 30)), paused),
        Arrival(Act(handshake.open), paused),
        Arrival(abort("given up"), looks(paused, 3)),
        Arrival(resume(), looks(paused, 9)),
    ]
    run = bench.run("plugin", script, peers={"early": Peer(bootstrapped=handshake)})
    assert run.paused_launches == 0
    finishes = {rid: [o.finish for o in outcomes] for rid, outcomes in run.outcomes.items()}
    assert finishes.pop("given up") == ["FINISH_ABORT"]
    assert finishes == {rid: ["FINISH_LENGTH"] for rid in ("first", "early", "during")}


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


@pytest.fixture
def new_weights(bench: Bench, model: Path, tmp_path: Path) -> Iterator[Path]:
    """Weights under which token 0 becomes the vocabulary's last one, and so on; the old ones come back."""
    from safetensors.torch import load_file, save_file
    from sglang.srt.runtime_context import get_context, get_serving

    folder, version = tmp_path / "new", get_serving().weight_version
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    yield folder
    restore(bench, model)
    get_context().override("the test", weight_version=version)


def update(folder: Path, version: str = "new") -> Any:
    """Load other weights, as SGLang's tokenizer asks for it."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    return UpdateWeightFromDiskReqInput(model_path=str(folder), load_format="auto", weight_version=version)


def restore(bench: Bench, model: Path) -> None:
    """The weights that all other tests count on."""
    assert bench.scheduler.weight_updater.update_weights_from_disk(update(model, "old")).success


def first_tokens(run: Run) -> dict[str, int]:
    """The token that each request was answered with."""
    return {rid: outcomes[0].tokens[0] for rid, outcomes in run.outcomes.items()}


def flipped(token: int) -> int:
    """What the new weights give for it."""
    return VOCABULARY - 1 - token


def around(depth: int, *middle: Any) -> list[Arrival]:
    """`depth` forwards of one request are pending when the messages come, and a request behind them."""
    when: Moment = looks(launches(depth), 3) if depth else start
    first = [Arrival(request("first", prompt(1, 60 if depth == 1 else 300)))] if depth else []
    return [
        *first,
        *(Arrival(message, when) for message in middle),
        Arrival(request("behind", prompt(4, 50)), when),
    ]


def held(bench: Bench, depth: int, script: list[Arrival]) -> dict[str, Any]:
    """The first `depth` forwards end when everything has come: arguments of `Bench.run`."""
    ends = [Arrival(finish(bench, *range(depth)), looks(launches(depth), 3))] if depth else []
    return {"arrivals": [*script, *ends], "delay_s": lambda number: HELD if number < depth else 0.002}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", [*MODES, "none"])
def test_P7_new_weights_are_those_of_what_is_launched_behind_them(
    bench: Bench, new_weights: Path, model: Path, mode: str, depth: int
) -> None:
    """An update while forwards run, behind a pause or without: as in SGLang's loop, down to the answer."""
    from sglang.srt.runtime_context import get_serving

    old = first_tokens(bench.run("blocking", [Arrival(a.message) for a in around(depth)]))
    runs = []
    for loop in ("polling", "plugin"):
        load = update(new_weights)
        script = around(depth, load) if mode == "none" else around(depth, pause(mode), load, resume())
        runs.append(bench.run(loop, **held(bench, depth, script)))
        assert get_serving().weight_version == "new"
        restore(bench, model)
    told = [[(c.success, c.message) for c in run.controls] for run in runs]
    assert told[0] == told[1]
    assert runs[0].tokens() == runs[1].tokens()
    assert runs[0].order == runs[1].order
    assert runs[0].sends == runs[1].sends
    new = first_tokens(runs[1])
    assert new["behind"] == flipped(old["behind"])
    if depth == 1:
        assert new["first"] == old["first"]
    if depth == 2:
        assert new["first"] == flipped(old["first"]), "its last chunk was launched behind the update"
    flushed = depth == 0 or (depth == 1 and mode != "none")
    assert told[1][0][0] == flushed, "the prefix cache is flushed when nothing is left of the old weights"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_P7_weights_behind_a_barrier_pause_meet_no_forward(
    bench: Bench, new_weights: Path, mode: str, depth: int
) -> None:
    """With AIOPREFILL_PAUSE_BARRIER every forward has ended when the weights are read."""
    running: list[int] = []
    record = bench.scheduler.record_weight_version_change

    def spy(new_version: str) -> None:
        running.append(sum(not result.copy_done.query() for _, result in bench.scheduler.result_queue))
        record(new_version)

    def prepare(_: Run) -> None:
        bench.scheduler.record_weight_version_change = spy

    script = around(depth, pause(mode), update(new_weights), resume())
    try:
        with with_config(BARRIER):
            run = bench.run("plugin", script, delay_s=0.03, prepare=prepare)
    finally:
        del bench.scheduler.record_weight_version_change
    assert running == [0]
    assert {rid: len(outcomes) for rid, outcomes in run.outcomes.items()} == {"first": 1, "behind": 1}


def test_P7_weights_that_are_not_there_leave_the_old_ones(bench: Bench, new_weights: Path) -> None:
    """An answer that says so, and the old weights go on; as in SGLang's loop."""
    missing = new_weights.parent / "missing"
    old = first_tokens(bench.run("blocking", [Arrival(a.message) for a in around(1)]))
    runs = [bench.run(loop, **held(bench, 1, around(1, update(missing)))) for loop in ("polling", "plugin")]
    told = [[(c.success, c.message) for c in run.controls] for run in runs]
    assert told[0] == told[1]
    assert told[1][0][0] is False
    assert first_tokens(runs[0]) == first_tokens(runs[1]) == old


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
