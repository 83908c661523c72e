"""What `/server_info` tells of the loop."""

from __future__ import annotations

from typing import Any

from harness import Arrival, Bench, results
from messages import pause, prompt, request, resume

from aioprefill.sglang.server_info import KEY
from aioprefill.version import __version__


def answers(bench: Bench, loop: str) -> list[dict[str, Any]]:
    """The scheduler's state as told behind the first and behind the second result."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    script = [
        Arrival(request("a", prompt(1, 20))),
        Arrival(GetInternalStateReq(), results(1)),
        Arrival(request("b", prompt(2, 20)), results(1)),
        Arrival(GetInternalStateReq(), results(2)),
    ]
    run = bench.run(loop, script)
    return [answer.internal_state for answer in run.controls]


def test_server_info_tells_of_the_loop_and_its_counters(bench: Bench) -> None:
    """Versions, ranks and pacing; counters are those of the moment."""
    first, second = answers(bench, "plugin")
    assert first["disaggregation_mode"] == second["disaggregation_mode"] == "prefill"
    told = first[KEY]
    facts = [told[name] for name in ("version", "sglang", "ranks", "waits", "timer", "pause_barrier")]
    assert facts == [__version__, "0.5.23", 1, "paced looks", "timerfd", False]
    assert (told["processed"], second[KEY]["processed"]) == (1, 2)


def test_server_info_behind_a_pause_says_paused(bench: Bench) -> None:
    """Also when the question comes in the same intake as the pause, and as the resume."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    script = [Arrival(request("a", prompt(1, 20)))]
    script += [
        Arrival(message, results(1))
        for message in (pause("in_place"), GetInternalStateReq(), resume(), GetInternalStateReq())
    ]
    run = bench.run("plugin", script)
    assert [answer.internal_state[KEY]["paused"] for answer in run.controls] == [True, False]


def test_server_info_of_the_stock_loop_has_nothing_of_it(bench: Bench) -> None:
    """Also when the plugin's loop ran before on the same scheduler."""
    assert all(KEY in state for state in answers(bench, "plugin"))
    assert not any(KEY in state for state in answers(bench, "blocking"))
