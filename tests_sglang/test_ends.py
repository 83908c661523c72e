"""Shutdown, role switch, health, upkeep: how the loop ends, and what SGLang counts on while it waits."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from fake_transfer import Peer, never
from harness import Arrival, Bench, Run, behind, launches, results, whole
from messages import Act, abort, finish, pause, prompt, request, resume
from plugin_loop import with_config

from aioprefill.config import SchedulerConfig, SglangConfig
from aioprefill.errors import DeviceError


@pytest.mark.parametrize("depth", [1, 2])
def test_S1_shutdown_processes_every_launched_forward(bench: Bench, depth: int) -> None:
    """With one and with two forwards in flight; what was launched whole is sent and answered."""
    script = [Arrival(request("a", prompt(1, 60)))]
    script += [Arrival(request("b", prompt(2, 60)))] if depth == 2 else []
    run = bench.run("plugin", script, delay_s=0.05, until=lambda run: run.launches == depth)
    assert run.results == run.launches == depth
    assert whole(run.sends["a"], 60)
    assert len(run.outcomes) == depth


def test_S1_shutdown_launches_no_further_chunk(bench: Bench) -> None:
    """A prompt of five chunks with two in flight: two results, sent in order, and no third launch."""
    script = [Arrival(request("long", prompt(1, 300)))]
    run = bench.run("plugin", script, delay_s=0.05, until=lambda run: run.launches == 2, clean=False)
    assert run.results == run.launches == 2
    assert [(c.start, c.end, c.last) for c in run.sends["long"]] == [(0, 64, False), (64, 128, False)]
    tidy_up(bench, "long")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_S1_shutdown_behind_a_held_pause(bench: Bench, mode: str) -> None:
    """The pause is in front of the shutdown: both come at the next step, and no result is lost."""
    script = [Arrival(request("a", prompt(1, 60))), Arrival(pause(mode), launches(1))]
    run = bench.run("plugin", script, delay_s=0.05, until=lambda run: run.launches == 1)
    assert run.results == run.launches == 1
    assert whole(run.sends["a"], 60)


def test_S1_shutdown_while_paused_with_a_kept_result(bench: Bench) -> None:
    """A kept result is processed all the same."""
    script = [Arrival(request("long", prompt(1, 120))), Arrival(pause("in_place"), results(1))]
    run = bench.run("plugin", script, delay_s=0.02, until=lambda run: run.results == 1)
    assert run.results == run.launches == 2
    assert whole(run.sends["long"], 120)


def test_S1_transfer_that_hangs_at_shutdown_is_named(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The shutdown waits up to its limit, and says which request did not finish."""
    config = SglangConfig(input_poll_s=0.002, shutdown_timeout_s=0.2)
    script = [Arrival(request("stuck", prompt(1, 60)))]
    with with_config(config), caplog.at_level(logging.WARNING, logger="aioprefill"):
        run = bench.run(
            "plugin",
            script,
            peers={"stuck": Peer(transferred=never)},
            until=lambda run: run.results == 1,
            clean=False,
        )
    assert any("stuck" in record.getMessage() for record in caplog.records)
    assert time.monotonic() - run.started < 15
    tidy_up(bench, "stuck")


def tidy_up(bench: Bench, rid: str) -> None:
    """Abort what an end left behind, so that the next run begins clean."""
    for batch, _ in bench.scheduler.result_queue:
        for req in batch.reqs:  # SGLang's process would end here, with its memory
            req.disagg_kv_sender.abort()
            bench.scheduler.disagg_prefill_inflight_queue.append(req)
    bench.scheduler.result_queue.clear()
    bench.run("blocking", [Arrival(abort(rid))], until=lambda _: bench.quiet(), clean=False)
    assert bench.quiet()


def test_role_switch_leaves_bare_and_can_come_back(bench: Bench) -> None:
    """SGLang's supervisor expects its own exception, not a group; a later entry works as the first."""
    from sglang.srt.disaggregation.role_switch import PdRoleSwitchRestart
    from sglang.srt.runtime_context import get_disagg

    def switch() -> None:
        bench.scheduler._event_loop_should_restart = True

    with get_disagg().override(enable_pd_role_switch=True):
        script = [Arrival(request("a", prompt(1, 30))), Arrival(Act(switch), results(1))]
        with pytest.raises(PdRoleSwitchRestart) as left:
            bench.run("plugin", script, until=lambda _: False)
    assert type(left.value) is PdRoleSwitchRestart
    assert bench.scheduler.grammar_manager.__dict__.get("has_waiting_grammars") is None
    run = bench.run("plugin", [Arrival(request("b", prompt(2, 30)))])
    assert [o.finish for o in run.outcomes["b"]] == ["FINISH_LENGTH"]


def test_what_sglang_raises_passes_through(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of SGLang's own ends its process, as in its own loop: bare."""

    def broken(**_: Any) -> Any:
        raise LookupError("broken by the test")

    def prepare(_: Run) -> None:
        monkeypatch.setattr(bench.scheduler, "process_prefill_chunk", broken)

    with pytest.raises(LookupError, match="broken by the test"):
        bench.run("plugin", [Arrival(request("a", prompt(1, 30)))], prepare=prepare, clean=False)
    monkeypatch.undo()
    tidy_up(bench, "a")


def test_S3_failed_copy_is_an_error_not_a_wait(bench: Bench) -> None:
    """SGLang's copy worker reports an error: it is raised with its name."""

    def fail() -> None:
        assert bench.copies is not None
        bench.copies.held[0].set_done(OSError("the link is down"))

    script = [Arrival(request("a", prompt(1, 30))), Arrival(Act(fail), launches(1))]
    with pytest.raises(DeviceError, match="the link is down"):
        bench.run("plugin", script, delay_s=None, clean=False)
    tidy_up(bench, "a")


def probe(bench: Bench, stall_limit_s: float) -> Run:
    """A health probe in the middle of a forward of 300 ms."""
    config = SglangConfig(input_poll_s=0.002, loop=SchedulerConfig(stall_limit_s=stall_limit_s))
    script = [
        Arrival(request("a", prompt(1, 30))),
        Arrival(request("HEALTH_CHECK_1", prompt(2, 3)), behind(launches(1), 0.15)),
        Arrival(Act(lambda: None), behind(launches(1), 0.2)),
        Arrival(finish(bench, 0), behind(launches(1), 0.3)),
    ]
    with with_config(config):
        return bench.run("plugin", script, delay_s=None)


def test_H3_health_probe_is_answered_while_a_forward_runs(bench: Bench) -> None:
    """Within the same host call: its answer comes before the result."""
    run = probe(bench, stall_limit_s=10)
    assert [type(c).__name__ for c in run.controls] == ["HealthCheckOutput"]
    assert run.order.index("health") < run.order.index("result 0")


def test_H3_health_probe_is_not_answered_past_the_stall_limit(bench: Bench) -> None:
    """A forward of 300 ms with a limit of 100: the probe is answered behind its result only."""
    run = probe(bench, stall_limit_s=0.1)
    assert [type(c).__name__ for c in run.controls] == ["HealthCheckOutput"]
    assert run.order.index("health") > run.order.index("launch 0")
    assert run.health_at[0] - run.started >= 0.28


def test_loads_are_reported_while_a_forward_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice a second or so during a forward of 1.2 s."""
    reports: list[float] = []
    own = bench.scheduler.publish_load_snapshot

    def spy(force: bool = False) -> Any:
        reports.append(time.monotonic())
        return own(force=force)

    monkeypatch.setattr(bench.scheduler, "publish_load_snapshot", spy)
    run = bench.run("plugin", [Arrival(request("a", prompt(1, 30)))], delay_s=1.2)
    during = [at for at in reports if 0.1 < at - run.started < 1.15]
    assert 1 <= len(during) <= 4


def test_idle_sleeper_is_out_of_the_way_and_comes_back(bench: Bench) -> None:
    """It blocks for a second; it is there again when the loop has ended."""

    class Sleeper:
        empty_cache_interval = -1

        def maybe_sleep(self) -> None:
            raise AssertionError("the loop must not block in the idle sleeper")

    sleeper = Sleeper()

    def prepare(_: Run) -> None:
        bench.scheduler.idle_sleeper = sleeper

    script = [Arrival(request("a", prompt(1, 30))), Arrival(resume(), behind(results(1), 0.05))]
    bench.run("plugin", script, prepare=prepare)
    assert bench.scheduler.idle_sleeper is sleeper
    bench.scheduler.idle_sleeper = None
