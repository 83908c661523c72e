"""`aioprefill ctl` against a real process without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from operations_support import FakeServe, fake_serve
from typer.testing import CliRunner

from aioprefill.cli import app
from aioprefill.wire.client import PairClient

CLEAN = {"XDG_CONFIG_HOME": "/nonexistent", "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
COMMANDS = ["pause", "resume", "update-weights", "abort", "flush-cache", "drain", "stats", "health"]
Ctl = Callable[..., Result]


def ctl_of(endpoint: str) -> Ctl:
    """Runs `aioprefill ctl ...` against an endpoint, in this process."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["ctl", *arguments, "--endpoint", endpoint], env=CLEAN)

    return run


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServe]:
    """A process whose forwards never complete; tests leave it running and unpaused."""
    with fake_serve("endless", drain_timeout_s=0.1) as found:
        yield found


@pytest.fixture
def ctl(server: FakeServe) -> Ctl:
    """`aioprefill ctl` against that process."""
    return ctl_of(server.endpoint)


def said(result: Result, code: int = 0) -> str:
    """What a command printed; it ended with `code`."""
    assert result.exit_code == code, result.output
    return (result.stdout if code == 0 else result.output).strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    """And takes --json and --endpoint."""
    text = CliRunner().invoke(app, ["ctl", command, "--help"], env=CLEAN).output
    assert "Examples:" in text and f"aioprefill ctl {command}" in text
    assert "--json" in text and "--endpoint" in text and "--answer-timeout-s" in text


def test_pause_and_resume(ctl: Ctl) -> None:
    """In each mode; a second pause and a second resume are refused in one line, exit code 1."""
    for mode in ("in_place", "retract", "wait", "abort"):
        assert said(ctl("pause", "--mode", mode, "--barrier")).startswith(f"paused ({mode})")
        assert said(ctl("pause"), 1) == "error: the scheduler is paused already: resume it first"
        assert said(ctl("resume")) == "running"
        assert said(ctl("resume"), 1) == "error: the scheduler is not paused"
    assert json.loads(said(ctl("pause", "--mode", "retract", "--json"))) == {"requeued": 0}
    assert json.loads(said(ctl("resume", "--json"))) == {}


def test_wrong_usage_is_told_before_anything_is_sent(ctl: Ctl) -> None:
    """Unknown command and mode, an abort of nothing or of two things, a negative timeout: exit code 2."""
    for arguments in (
        ["reboot"],
        ["pause", "--mode", "sideways"],
        ["abort"],
        ["abort", "a", "--all"],
        ["drain", "--timeout", "-1"],
        ["update-weights"],
    ):
        assert ctl(*arguments).exit_code == 2, arguments
    assert "'in_place'" in ctl("pause", "--mode", "sideways").output


def test_health_is_an_exit_code(ctl: Ctl) -> None:
    """0 when ready; 1 while paused, with the reason; 1 when nobody answers."""
    assert said(ctl("health")) == "ready"
    said(ctl("pause"))
    assert said(ctl("health"), 1) == "not ready: paused (in_place)"
    result = ctl("health", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"live": True, "ready": False, "reason": "paused (in_place)"}
    said(ctl("resume"))
    assert json.loads(said(ctl("health", "--json"))) == {"live": True, "ready": True, "reason": ""}
    nobody = ctl_of("tcp://127.0.0.1:1")("health", "--answer-timeout-s", "0.2")
    assert "no answer from tcp://127.0.0.1:1" in said(nobody, 1)


def test_update_weights(ctl: Ctl, tmp_path: Path) -> None:
    """The new version is told; a folder that does not fit is refused by name, and serving goes on."""
    assert said(ctl("update-weights", str(tmp_path / "12"))) == "weights updated: weight version 1"
    missing = tmp_path / "other"
    assert said(ctl("update-weights", str(missing)), 1) == f"error: {missing} holds no weights"
    assert said(ctl("health")) == "ready"


def test_flush_and_stats(ctl: Ctl) -> None:
    """Numbers by name, as text and as JSON."""
    assert said(ctl("flush-cache")) == "prefix cache flushed: pages freed 0"
    assert "in_flight=0" in said(ctl("stats")).splitlines()
    assert json.loads(said(ctl("stats", "--json")))["queued_requests"] == 0


def test_abort(ctl: Ctl, server: FakeServe) -> None:
    """By id, by the beginning of ids, all; when there is none it says so, which is no failure."""
    assert said(ctl("abort", "nobody")) == "no open request matches nobody"
    assert said(ctl("abort", "--all")) == "no request is open"
    assert json.loads(said(ctl("abort", "b*", "--json"))) == {"aborted": 0}

    async def scenario() -> None:
        async with PairClient(server.endpoint, timeout_s=10) as client:
            names = ("a", "ab", "b")
            streams = [client.submit([n], request_id=name, handoff=False) for n, name in enumerate(names)]
            await client.ping()
            for target, aborted in ((["a"], ["a"]), (["a*"], ["ab"]), (["--all"], ["b"])):
                result = await asyncio.to_thread(ctl, "abort", *target)
                assert said(result) == f"aborted {len(aborted)}"
                await client.ping()
                assert {s.request_id for s in streams if s.prefill_done} >= set(aborted)
            assert all(stream.prefill_done for stream in streams)

    asyncio.run(scenario())


def test_S2_drain_ends_the_process_with_0_and_names_what_it_dropped() -> None:
    """With a deadline, over a forward that never ends."""
    with fake_serve("endless") as server:

        async def scenario() -> Result:
            async with PairClient(server.endpoint, timeout_s=10) as client:
                client.submit([1], request_id="endless", handoff=False)
                await client.ping()
                return await asyncio.to_thread(ctl_of(server.endpoint), "drain", "--timeout", "0.1")

        assert said(asyncio.run(scenario())).splitlines() == [
            "drained: 0 finished, 1 dropped",
            "dropped endless",
        ]
        assert server.wait() == 0
        assert any("dropped: endless" in line for line in server.lines)
