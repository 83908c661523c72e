"""Rows L of the behaviours, on SGLang's own scheduler."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fake_transfer import BOOK, After, Gate, Peer
from harness import Arrival, Bench, Run, answered, behind, launches, looks, results, seconds, whole
from messages import Act, abort, finish, prompt, request
from plugin_loop import CONFIG, with_config

from aioprefill.config import SchedulerConfig, SglangConfig
from aioprefill.sglang.shape import Shape

HELD = None
"""Copies end when the test says so."""


def long_and_short() -> list[Arrival]:
    """A prompt of five chunks, and one that fits."""
    return [Arrival(request("long", prompt(1, 300))), Arrival(request("short", prompt(2, 20)))]


def ends(bench: Bench, count: int) -> list[Arrival]:
    """End the copies of forwards 0 to `count` - 1, each when its successor is launched too."""
    return [
        Arrival(finish(bench, number), behind(launches(min(number + 2, count)), 0.01))
        for number in range(count)
    ]


def test_L1_second_forward_is_launched_while_the_first_is_pending(bench: Bench) -> None:
    """Both are launched before any result; a third never is."""
    run = bench.run("plugin", [*long_and_short(), *ends(bench, 5)], delay_s=HELD)
    assert run.order[:3] == ["launch 0", "launch 1", "result 0"]
    assert run.most_in_flight == 2


@pytest.mark.parametrize("loop", ["polling", "plugin"])
def test_L1_request_that_comes_during_a_launch_joins_the_forward_behind_it(bench: Bench, loop: str) -> None:
    """The first chunk of `a` is launched, then `late` comes: it shares the forward of the second chunk."""
    script = [
        Arrival(request("a", prompt(1, 100))),
        Arrival(request("late", prompt(2, 10)), launches(1)),
        *(Arrival(finish(bench, n), behind(launches(2), 0.02)) for n in (0, 1)),
    ]
    run = bench.run(loop, script, delay_s=HELD)
    assert [sorted(rid for rid, *_ in batch) for batch in run.batches] == [["a"], ["a", "late"]]
    assert run.order[:3] == ["launch 0", "launch 1", "result 0"]


def test_L2_results_are_processed_in_launch_order(bench: Bench) -> None:
    """The second forward ends 30 ms before the first one."""
    script = [
        Arrival(request("a", prompt(1, 100))),
        Arrival(finish(bench, 1), launches(2)),
        Arrival(finish(bench, 0), behind(launches(2), 0.03)),
    ]
    run = bench.run("plugin", script, delay_s=HELD)
    assert run.order[:4] == ["launch 0", "launch 1", "result 0", "result 1"]
    assert whole(run.sends["a"], 100)


def test_L3_request_that_came_with_both_slots_full_is_launched_behind_the_oldest_result(bench: Bench) -> None:
    """Nothing further comes in: the result alone makes room."""
    script = [
        Arrival(request("a", prompt(1, 128))),
        Arrival(request("b", prompt(2, 30)), launches(2)),
        *(Arrival(finish(bench, n), behind(launches(2), 0.02)) for n in (0, 1)),
        Arrival(finish(bench, 2), launches(3)),
    ]
    run = bench.run("plugin", script, delay_s=HELD)
    assert run.order.index("launch 2") == run.order.index("result 0") + 1
    assert run.seen_at["b"] < run.answered_at["a"]


def test_L4_empty_preparation_is_not_retried_on_polls(bench: Bench) -> None:
    """One forward is pending for 100 ms, with 50 intakes: preparations are counted on the fingers."""
    script = [Arrival(request("a", prompt(1, 20))), Arrival(finish(bench, 0), seconds(0.1))]
    run = bench.run("plugin", script, delay_s=HELD)
    assert run.calls > 8
    assert len(run.preparations) <= 6


def test_L4_each_event_retries_a_preparation(bench: Bench) -> None:
    """A request that comes while a forward is pending is launched at once, not behind the forward."""
    script = [
        Arrival(request("a", prompt(1, 20))),
        Arrival(request("b", prompt(2, 20)), behind(launches(1), 0.02)),
        *(Arrival(finish(bench, n), behind(launches(2), 0.02)) for n in (0, 1)),
    ]
    run = bench.run("plugin", script, delay_s=HELD)
    assert run.order[:3] == ["launch 0", "launch 1", "result 0"]


def test_L4_a_handshake_that_ends_retries_a_preparation(bench: Bench) -> None:
    """The peer of `b` becomes ready while the forward of `a` runs."""
    script = [
        Arrival(request("a", prompt(1, 20))),
        Arrival(request("b", prompt(2, 20)), launches(1)),
        *(Arrival(finish(bench, n), behind(launches(2), 0.02)) for n in (0, 1)),
    ]
    run = bench.run("plugin", script, delay_s=HELD, peers={"b": Peer(bootstrapped=After(0.05))})
    assert run.order[:3] == ["launch 0", "launch 1", "result 0"]


def test_L5_with_nothing_in_flight_each_step_prepares(bench: Bench) -> None:
    """`b` waits for the pages of `a`, and nothing runs: no step is left out as one before found nothing."""
    transfer, counted = Gate(), []

    def prepare(run: Run) -> None:
        counted.append(run.preparations)

    def count() -> None:
        counted.append(list(counted[0]))

    script = [
        Arrival(request("a", prompt(1, 1200))),
        Arrival(request("b", prompt(2, 1000)), results(19)),
        Arrival(Act(count), looks(results(19), 3)),
        *(Arrival(abort(f"nobody{n}"), looks(results(19), 3 * n)) for n in range(2, 7)),
        Arrival(Act(count), looks(results(19), 21)),
        Arrival(Act(transfer.open)),
    ]
    run = bench.run("plugin", script, delay_s=0.001, peers={"a": Peer(transferred=transfer)}, prepare=prepare)
    _, before, behind_aborts = counted
    assert len(behind_aborts) >= len(before) + 5
    assert all(behind_aborts[len(before) :]), "without a forward in flight each is a scheduling step"
    assert whole(run.sends["b"], 1000)


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_L6_chunk_bookkeeping_runs_once_per_forward(bench: Bench, delay_s: float) -> None:
    """Also when both results are ready together; ranges are those of one-at-a-time completion."""
    run = bench.run("plugin", long_and_short(), delay_s=delay_s)
    assert run.chunk_steps == run.launches
    assert whole(run.sends["long"], 300)
    assert [chunk.end for chunk in run.sends["long"]] == [64, 128, 192, 256, 300]


def test_L6_both_results_ready_together(bench: Bench) -> None:
    """The copies of two chunks end in the same moment: the step between them still runs in full."""
    script = [
        Arrival(request("long", prompt(1, 190))),
        Arrival(finish(bench, 1, 0), behind(launches(2), 0.02)),
        Arrival(finish(bench, 2), behind(launches(3), 0.02)),
    ]
    run = bench.run("plugin", script, delay_s=HELD)
    assert run.order[:5] == ["launch 0", "launch 1", "result 0", "launch 2", "result 1"]
    assert run.chunk_steps == run.launches == 3
    assert [(chunk.start, chunk.end) for chunk in run.sends["long"]] == [(0, 64), (64, 128), (128, 190)]


def test_L7_storage_retries_advance_at_scheduling_steps_only(bench: Bench) -> None:
    """Thirteen arrivals during one forward: each prepares, none advances a retry."""
    script = [Arrival(request("a", prompt(1, 20)))]
    script += [Arrival(abort(f"nobody{n}"), behind(launches(1), 0.003 * n)) for n in range(13)]
    script += [Arrival(finish(bench, 0), behind(launches(1), 0.08))]
    run = bench.run("plugin", script, delay_s=HELD)
    first_result = run.preparations_at_result[0]
    during = run.preparations[1:first_result]
    assert len(during) >= 5
    assert not any(during)
    assert run.preparations[0]


def test_L8_delayed_sample_follows_the_result_before_it(bench: Bench) -> None:
    """Two grammar requests in two forwards in flight: the second is sampled behind the first result."""
    schema = {"json_schema": '{"type": "boolean"}'}
    script = [
        Arrival(request("a", prompt(1, 60), **schema)),
        Arrival(request("b", prompt(2, 60), **schema)),
    ]
    runs = [bench.run(loop, script_again(script), delay_s=0.005) for loop in ("blocking", "plugin")]
    assert runs[0].tokens() == runs[1].tokens()
    assert all(chr(o[0][0][0] - 2) for o in runs[1].tokens().values())
    assert runs[1].delayed_samples >= 1
    assert runs[1].order.index("result 0") < runs[1].order.index("sample 1") < runs[1].order.index("result 1")


def script_again(script: list[Arrival]) -> list[Arrival]:
    """The same messages in fresh rooms: SGLang keeps what it was given."""
    return [
        Arrival(
            request(
                a.message.rid, list(a.message.input_ids), json_schema=a.message.sampling_params.json_schema
            ),
            a.when,
        )
        for a in script
    ]


def test_L9_transfers_are_retired_while_a_forward_runs(bench: Bench) -> None:
    """A transfer ends under a forward that does not. SGLang's own loops answer behind the forward."""
    order: dict[str, list[str]] = {}
    looked: list[int] = []
    for loop in ("polling", "plugin"):
        transfer = Gate()
        looked.clear()
        told = answered("a") if loop == "plugin" else looks(launches(2), 40)
        script = [
            Arrival(request("a", prompt(1, 20))),
            Arrival(request("b", prompt(2, 20)), results(1)),
            Arrival(Act(transfer.open), launches(2)),
            Arrival(Act(lambda: looked.append(BOOK.polls)), launches(2)),
            Arrival(Act(lambda: looked.append(BOOK.polls)), told),
            Arrival(finish(bench, 1)),
        ]
        run = bench.run(
            loop,
            script,
            delay_s=lambda number: 0.005 if number == 0 else HELD,
            peers={"a": Peer(transferred=transfer)},
        )
        order[loop] = [event for event in run.order if event in ("answer a", "result 1")]
    assert order["plugin"] == ["answer a", "result 1"]
    assert order["polling"] == ["result 1", "answer a"]
    assert looked[1] - looked[0] <= 3, "the first look that sees the end is followed up at once"


def test_L9_pages_freed_by_a_transfer_admit_a_request_at_once(bench: Bench) -> None:
    """`b` fits only when the pages of `a` are back, and the forward of `c` ends when `b` was launched."""
    transfer = Gate()
    script = [
        Arrival(request("a", prompt(1, 1200))),
        Arrival(request("c", prompt(3, 40)), results(19)),
        Arrival(request("b", prompt(2, 1000)), launches(20)),
        Arrival(Act(transfer.open), looks(launches(20), 3)),
        Arrival(finish(bench, 19), launches(21)),
    ]
    run = bench.run(
        "plugin",
        script,
        delay_s=lambda number: HELD if number == 19 else 0.002,
        peers={"a": Peer(transferred=transfer)},
    )
    assert run.order.index("launch 20") < run.order.index("result 19")
    assert whole(run.sends["b"], 1000)


def test_L10_switch_off_waits_in_the_blocking_way(bench: Bench) -> None:
    """Nothing is taken in while a result is pending; nothing else changes."""
    off = SglangConfig(input_poll_s=0.002, loop=SchedulerConfig(continuous_intake=False))
    with with_config(off):
        run = bench.run("plugin", long_and_short(), delay_s=0.05)
    on = bench.run("plugin", long_and_short(), delay_s=0.05)
    assert run.tokens() == on.tokens()
    assert run.sends == on.sends
    assert run.order == on.order
    assert run.calls < on.calls


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(pipeline_ranks=2), "pipeline"),
        (Shape(attention_data_ranks=2), "data parallelism"),
        (Shape(attention_context_ranks=2), "context parallelism"),
        (Shape(speculative=True), "speculative"),
        (Shape(generation=False), "embedding"),
        (Shape(diffusion=True), "diffusion"),
        (Shape(overlap=False), "overlap"),
        (Shape(multiplexed=True), "multiplexing"),
    ],
)
def test_L11_unsupported_shapes_are_named(shape: Shape, words: str) -> None:
    """Each by its own words; the plain shape has none."""
    assert words in str(shape.unsupported)
    assert Shape().unsupported is None


def test_L12_launched_forwards_are_seen_by_abort_and_weight_version(bench: Bench) -> None:
    """Both requests are in forwards in flight when the abort and the new version come."""
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

    script = [
        Arrival(request("a", prompt(1, 60))),
        Arrival(request("b", prompt(2, 60))),
        Arrival(abort("b"), launches(2)),
        Arrival(UpdateWeightVersionReqInput(new_version=f"v{id(bench)}"), launches(2)),
        Arrival(finish(bench, 0, 1), behind(launches(2), 0.02)),
    ]
    versions: list[set[str]] = []

    def prepare(_: Run) -> None:
        record = bench.scheduler.record_weight_version_change

        def spy(new_version: str) -> None:
            versions.append({req.rid for req in bench.scheduler.collect_inflight_reqs()})
            record(new_version)

        bench.scheduler.record_weight_version_change = spy

    try:
        run = bench.run("plugin", script, delay_s=HELD, prepare=prepare)
    finally:
        del bench.scheduler.record_weight_version_change
    assert [o.finish for o in run.outcomes["b"]] == ["FINISH_ABORT"]
    assert [o.finish for o in run.outcomes["a"]] == ["FINISH_LENGTH"]
    assert versions == [{"a", "b"}]


def test_L13_after_the_last_result_the_host_believes_nothing_to_run(bench: Bench) -> None:
    """One empty step: no batch, idle accounting and one `on_idle`, and then next to no calls."""
    seen: list[Any] = []
    scheduler = bench.scheduler

    def look(_: Run) -> bool:
        seen.append((scheduler.last_batch, scheduler.cur_batch_for_debug, scheduler._sched_idled))
        return True

    script = [Arrival(request("a", prompt(1, 20))), Arrival(abort("nobody"), behind(results(1), 0.3))]
    run = bench.run("plugin", script, until=lambda run: run.results == 1 and look(run))
    assert seen[-1] == (None, None, True)
    assert 1 <= run.idle_calls <= 4


def test_active_line_says_versions_ranks_and_pacing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """One line on start."""
    with caplog.at_level(logging.INFO, logger="aioprefill"):
        bench.run("plugin", [Arrival(request("a", prompt(1, 20)))])
    lines = [r.getMessage() for r in caplog.records if "runs the prefill loop of SGLang" in r.getMessage()]
    assert len(lines) == 1
    assert "0.5.23" in lines[0]
    assert "1 rank" in lines[0]
    assert "timerfd" in lines[0]
    assert CONFIG.pause_barrier is False
