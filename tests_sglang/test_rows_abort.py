"""Rows C and A of the behaviours, on SGLang's own scheduler."""

from __future__ import annotations

import pytest
from fake_transfer import After, Gate, Peer, never
from harness import Arrival, Bench, Moment, answered, behind, launches, results, whole
from messages import Act, abort, finish, pause, prompt, request, resume

HELD = None


def ends_of(run: object, rid: str) -> list[str]:
    """Finish reasons of a request."""
    return [o.finish for o in run.outcomes[rid]]  # type: ignore[attr-defined]


def test_C1_long_prompt_is_sent_in_exact_chunks(bench: Bench) -> None:
    """Ranges in order, of the chunk size, the final one last."""
    run = bench.run("plugin", [Arrival(request("long", prompt(1, 300)))])
    assert [(c.start, c.end, c.last) for c in run.sends["long"]] == [
        (0, 64, False),
        (64, 128, False),
        (128, 192, False),
        (192, 256, False),
        (256, 300, True),
    ]


def test_C1_decode_side_prefix_is_not_sent(bench: Bench) -> None:
    """The peer has the first 100 tokens: ranges begin there."""
    run = bench.run("plugin", [Arrival(request("long", prompt(1, 300)))], peers={"long": Peer(prefix=100)})
    assert whole(run.sends["long"], 300, prefix=100)


def test_C2_optimistic_request_yields_to_a_bootstrapped_one(bench: Bench) -> None:
    """The long prompt's handshake ends when the short one is answered; both are sent whole."""
    from sglang.srt.runtime_context import get_disagg

    handshake = Gate()
    script = [
        Arrival(request("early", prompt(1, 300))),
        Arrival(request("ready", prompt(2, 100)), launches(2)),
        Arrival(Act(handshake.open), answered("ready")),
    ]
    with get_disagg().override(optimistic_prefill_attempts=3):
        run = bench.run("plugin", script, delay_s=0.01, peers={"early": Peer(bootstrapped=handshake)})
    assert run.answered_at["ready"] < run.answered_at["early"]
    assert whole(run.sends["early"], 300)
    assert whole(run.sends["ready"], 100)


def test_C2_parked_request_is_sent_when_its_peer_is_ready(bench: Bench) -> None:
    """Prefill ends before the handshake: the whole prompt is sent at its end, while nothing runs."""
    from sglang.srt.runtime_context import get_disagg

    handshake = Gate()
    script = [
        Arrival(request("early", prompt(1, 100))),
        Arrival(Act(handshake.open), behind(results(2), 0.02)),
    ]
    with get_disagg().override(optimistic_prefill_attempts=3):
        run = bench.run("plugin", script, peers={"early": Peer(bootstrapped=handshake)})
    assert whole(run.sends["early"], 100)
    assert run.results == 2


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("depth", [1, 2])
def test_C3_abort_in_any_chunk_frees_everything_once(bench: Bench, at: int, depth: int) -> None:
    """At each chunk, with one and with two forwards in flight; `Bench.run` compares what is left."""
    when: Moment = launches(at) if depth == 1 else behind(launches(min(at + 1, 5)), 0.005)
    script = [
        Arrival(request("long", prompt(1, 300))),
        Arrival(abort("long"), when),
        Arrival(request("next", prompt(2, 100)), when),
    ]
    run = bench.run("plugin", script, delay_s=0.01)
    assert len(run.outcomes["long"]) == 1
    assert ends_of(run, "next") == ["FINISH_LENGTH"]
    assert whole(run.sends["next"], 100)


@pytest.mark.parametrize(("policy", "bound"), [("shortest-prefill-first", 5), ("fcfs", None)])
def test_C4_short_request_behind_a_long_prompt(bench: Bench, policy: str, bound: int | None) -> None:
    """SGLang's policy says whether the short one is admitted between chunks; all loops do as it says."""
    from sglang.srt.managers import schedule_policy
    from sglang.srt.runtime_context import get_schedule

    def script() -> list[Arrival]:
        return [
            Arrival(request("long", prompt(1, 1200))),
            Arrival(request("short", prompt(2, 20)), results(2)),
        ]

    chosen, own = bench.scheduler.policy, bench.scheduler.policy.policy
    try:
        chosen.policy = chosen._validate_and_adjust_policy(policy, bench.scheduler.tree_cache)
        assert isinstance(chosen.policy, schedule_policy.CacheAwarePolicy) == (bound is not None)
        with get_schedule().override(schedule_policy=policy):
            runs = [bench.run(loop, script()) for loop in ("blocking", "polling", "plugin")]
    finally:
        chosen.policy = own
    batches = runs[-1].batches
    with_short = next(n for n, batch in enumerate(batches) if any(rid == "short" for rid, _, _ in batch))
    assert bound is None or with_short <= bound
    long_goes_on = any(rid == "long" for batch in batches[with_short + 1 :] for rid, _, _ in batch)
    assert long_goes_on == (bound is not None)
    assert batches == runs[0].batches == runs[1].batches
    assert runs[-1].sends == runs[0].sends == runs[1].sends
    assert whole(runs[-1].sends["long"], 1200)


def test_A1_abort_in_each_state(bench: Bench) -> None:
    """Bootstrapping, waiting, held behind a pause, in flight, transferring, finished, unknown."""
    script = [
        Arrival(abort("unknown")),
        Arrival(request("handshake", prompt(1, 30))),
        Arrival(request("moving", prompt(2, 30))),
        Arrival(abort("handshake"), results(1)),
        Arrival(abort("moving"), results(1)),
        Arrival(request("flying", prompt(3, 30)), results(1)),
        Arrival(abort("flying"), launches(2)),
        Arrival(request("other", prompt(4, 40)), launches(2)),
        Arrival(pause("in_place"), launches(2)),
        Arrival(request("held", prompt(5, 40))),
        Arrival(abort("held")),
        Arrival(resume()),
    ]
    run = bench.run(
        "plugin",
        script,
        delay_s=0.02,
        peers={"handshake": Peer(bootstrapped=never), "moving": Peer(transferred=never)},
    )
    finishes = {rid: ends_of(run, rid) for rid in run.outcomes}
    assert finishes == {
        "handshake": ["FINISH_ABORT"],
        "moving": ["FINISH_ABORT"],
        "flying": ["FINISH_ABORT"],
        "held": ["FINISH_ABORT"],
        "other": ["FINISH_LENGTH"],
    }


def test_A2_abort_during_the_final_forward_comes_before_its_result(bench: Bench) -> None:
    """The forward ends behind the abort: nothing is sent."""
    script = [
        Arrival(request("a", prompt(1, 30))),
        Arrival(abort("a"), launches(1)),
        Arrival(finish(bench, 0), behind(launches(1), 0.02)),
    ]
    run = bench.run("plugin", script, delay_s=HELD)
    assert ends_of(run, "a") == ["FINISH_ABORT"]
    assert "a" not in run.sends


def test_A3_short_request_does_not_wait_for_an_aborted_long_prompt(bench: Bench) -> None:
    """A prompt of 19 chunks is aborted in its third: the next one is served within three forwards."""
    script = [
        Arrival(request("long", prompt(1, 1200))),
        Arrival(request("short", prompt(2, 30)), results(2)),
        Arrival(abort("long"), results(2)),
    ]
    run = bench.run("plugin", script, delay_s=0.01)
    assert run.launches <= 5
    assert ends_of(run, "short") == ["FINISH_LENGTH"]


def test_A4_running_timeout_fires_while_the_forward_runs(bench: Bench) -> None:
    """A forward of 500 ms with a limit of 50 ms: one abort with SGLang's reason."""
    from sglang.srt.environ import envs

    with envs.SGLANG_REQ_RUNNING_TIMEOUT.override(0.05):
        run = bench.run("plugin", [Arrival(request("a", prompt(1, 30)))], delay_s=0.5)
    assert ends_of(run, "a") == ["FINISH_ABORT"]
    assert "timeout" in run.outcomes["a"][0].message or run.outcomes["a"][0].message == "aborted"


def test_A5_waiting_timeout_fires_with_a_full_pool_and_nothing_new(bench: Bench) -> None:
    """`b` does not fit while the transfer of `a` hangs: it is given up at its limit, `a` at its abort."""
    from sglang.srt.environ import envs

    script = [
        Arrival(request("a", prompt(1, 1200))),
        Arrival(request("b", prompt(2, 1000)), results(19)),
        Arrival(abort("a"), answered("b")),
    ]
    with envs.SGLANG_REQ_WAITING_TIMEOUT.override(0.2):
        run = bench.run("plugin", script, delay_s=0.001, peers={"a": Peer(transferred=never)})
    assert ends_of(run, "b") == ["FINISH_ABORT"]
    assert run.answered_at["b"] < run.answered_at["a"]


def test_A6_abort_by_prefix_and_abort_all_reach_every_state(bench: Bench) -> None:
    """Queued, launched and transferring ones."""
    script = [
        Arrival(request("x1", prompt(1, 30))),
        Arrival(request("x2", prompt(2, 40)), results(1)),
        Arrival(request("y1", prompt(3, 50)), results(1)),
        Arrival(abort("x"), launches(2)),
        Arrival(request("y2", prompt(4, 200)), launches(2)),
        Arrival(abort(everything=True), launches(3)),
    ]
    run = bench.run("plugin", script, delay_s=0.02, peers={"x1": Peer(transferred=never)})
    assert {rid: len(o) for rid, o in run.outcomes.items()} == {"x1": 1, "x2": 1, "y1": 1, "y2": 1}
    assert ends_of(run, "x1") == ends_of(run, "x2") == ends_of(run, "y2") == ["FINISH_ABORT"]


def test_T4_request_whose_peer_has_died_is_dropped_before_it_is_launched(bench: Bench) -> None:
    """`b` waits for pages; its peer dies meanwhile, and it is answered while the pool is still full."""
    script = [
        Arrival(request("a", prompt(1, 1200))),
        Arrival(request("b", prompt(2, 1000)), results(19)),
        Arrival(abort("a"), answered("b")),
    ]
    run = bench.run(
        "plugin",
        script,
        delay_s=0.001,
        peers={"a": Peer(transferred=never), "b": Peer(dies=After(0.1))},
    )
    assert ends_of(run, "b") == ["FINISH_ABORT"]
    assert "b" not in run.sends


@pytest.mark.parametrize("fails", ["handshake", "transfer"])
def test_T2_failing_peer_fails_its_request_alone(bench: Bench, fails: str) -> None:
    """The other request of the same batch goes on."""
    peer = Peer(bootstrap_fails=True) if fails == "handshake" else Peer(transfer_fails=True)
    script = [Arrival(request("bad", prompt(1, 30))), Arrival(request("good", prompt(2, 30)))]
    run = bench.run("plugin", script, peers={"bad": peer})
    assert ends_of(run, "bad") == ["FINISH_ABORT"]
    assert "failed" in run.outcomes["bad"][0].message
    assert ends_of(run, "good") == ["FINISH_LENGTH"]


def test_finish_helper_ends_copies_in_any_order(bench: Bench) -> None:
    """The harness itself: a copy without a delay ends when told."""
    script = [Arrival(request("a", prompt(1, 30))), Arrival(finish(bench, 0), launches(1))]
    assert bench.run("plugin", script, delay_s=HELD).results == 1
