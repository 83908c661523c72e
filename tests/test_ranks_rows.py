"""Rows of behaviour that concern ranks, with real processes and real Gloo: what both ranks survive."""

from __future__ import annotations

import asyncio
import re
import signal
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rank_forks import Event, Forge, Ranks, running

from aioprefill.errors import HostError, WireError
from aioprefill.process import EXIT_RANK_LOST
from aioprefill.testing.models import make_tiny_llama
from aioprefill.wire.client import PairClient
from aioprefill.wire.messages import Accepted
from aioprefill.wire.stream import TokenStream

SCENARIOS = {
    "in turn": ("ready_in_turn", {}),
    "delayed": ("delayed_samples", {}),
    "forgotten 0": ("delayed_samples", {"forgets": 0}),
    "forgotten 1": ("delayed_samples", {"forgets": 1}),
    "in_place 1": ("paused", {"mode": "in_place", "depth": 1}),
    "in_place 2": ("paused", {"mode": "in_place", "depth": 2}),
    "retract 1": ("paused", {"mode": "retract", "depth": 1}),
    "retract 2": ("paused", {"mode": "retract", "depth": 2}),
    "timeouts": ("timed_out", {}),
    "collectives": ("collectives", {"calls": 10_000}),
}
Both = tuple[Event, Event]
"""What ranks 0 and 1 saw."""


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    """Forks ranks."""
    process = Forge()
    yield process
    process.close()


@pytest.fixture(scope="module")
def played(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Both]:
    """All scenarios, one after the other in one pair of processes."""
    folder = tmp_path_factory.mktemp("ranks") / "played"
    with running(forge, folder, 2, scenarios=list(SCENARIOS.values())) as ranks:
        return dict(zip(SCENARIOS, map(tuple, ranks.finish()), strict=True))


def decided_alike(both: Both) -> None:
    """The same calls with the same state behind each, and one vote on each forward, on both ranks."""
    first, second = both
    assert first["calls"] == second["calls"]
    votes = [[vote[:2] for vote in one["votes"]] for one in both]
    assert votes[0] == votes[1], "digests at the launches"
    launched = [call[2] for call in first["calls"] if call[1] == "launch"]
    assert [number for number, _ in votes[0]] == launched == list(range(len(launched)))
    assert first["voted"] == second["voted"] == first["collectives"] == second["collectives"] == len(launched)


def test_R1_whichever_rank_is_ready_first_the_processed_order_is_the_same(played: dict[str, Both]) -> None:
    """Ten forwards each: rank 0 is ready first, rank 1 is, both at once; one collective for each."""
    both = played["in turn"]
    decided_alike(both)
    assert both[0]["processed"] == both[1]["processed"] == [f"result {number}" for number in range(30)]
    assert both[0]["sends"] == both[1]["sends"] and len(both[0]["sends"]) == 10
    late_s = [second[2] - first[2] for first, second in zip(both[0]["votes"], both[1]["votes"], strict=True)]
    assert statistics.median(late_s[:10]) > 0.01
    assert statistics.median(late_s[10:20]) < -0.01
    assert abs(statistics.median(late_s[20:])) < 0.01


def test_L8_a_delayed_sample_is_submitted_between_the_result_before_and_its_vote(
    played: dict[str, Both],
) -> None:
    """On both ranks, for every forward that was launched behind another one."""
    both = played["delayed"]
    decided_alike(both)
    for one in both:
        log: list[str] = one["log"]
        sampled = [int(entry.split()[1]) for entry in log if entry.startswith("sample ")]
        assert len(sampled) >= 10
        for number in sampled:
            at = log.index(f"sample {number}")
            assert log.index(f"result {number - 1}") < at < log.index(f"vote {number}")


@pytest.mark.parametrize("forgetful", [0, 1])
def test_L8_a_sample_that_is_never_submitted_is_an_error_on_every_rank(
    played: dict[str, Both], forgetful: int
) -> None:
    """It is a `HostError` that names the rank which forgot it; every open request is answered."""
    for one in played[f"forgotten {forgetful}"]:
        code, text = one["error"]
        assert code == "rank" and text.startswith(f"rank {forgetful} failed: ") and "(forward 6)" in text
        assert "never submitted" in text
        assert [vote[0] for vote in one["votes"]] == list(range(7))
        assert one["processed"] == [f"result {number}" for number in range(6)]
        assert text in one["answer"] and len(one["outcomes"]) == 12


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_P1_a_pause_with_results_pending_is_held_and_dispatched_alike(
    played: dict[str, Both], mode: str, depth: int
) -> None:
    """The suffix is the same behind each call on both ranks; what came behind the pause follows in order."""
    both = played[f"{mode} {depth}"]
    decided_alike(both)
    suffixes = [call[3] for call in both[0]["calls"] if call[3]]
    assert suffixes[0] == [mode] and [mode, "behind", "behind", "last"] in suffixes, "it went on receiving"
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(suffixes))
    for one in both:
        assert one["outcomes"]["behind"] == ["aborted"]
        assert sorted(one["outcomes"]) == sorted([*(f"before{n}" for n in range(depth)), "behind", "last"])
        log: list[str] = one["log"]
        at, last = log.index(mode), depth - 1
        done = [entry for entry in log[:at] if entry.startswith("result ")]
        if mode == "retract":
            assert log.index(f"agreed {last}") < at < log.index(f"result {last}")
            assert len(done) == depth - 1, "at most one was in flight"
        else:
            assert log[at - 1] == "result 0", "the next scheduling step"
            assert log.index("resume") < log.index(f"launch {depth}")
            if depth == 2:
                assert at < log.index("agreed 1") < log.index("resume") < log.index("result 1")
        assert one["processed"] == [f"result {number}" for number in range(depth + 1)]


def test_A4_timeouts_are_the_leaders_and_fall_on_the_same_call(played: dict[str, Both]) -> None:
    """The follower is late in every call, and its clock is an hour ahead: it would fail everything."""
    both = played["timeouts"]
    decided_alike(both)
    assert both[0]["failed"] == both[1]["failed"]
    failed = dict(both[0]["failed"])
    assert list(failed) == ["r2", "r3", "r1"]
    assert "running timeout" in failed["r1"] and "queue timeout" in failed["r2"]
    assert both[0]["answers"] == ["token of r0", *(failed[f"r{n}"] for n in (1, 2, 3)), "token of r4"]


def test_host_collectives_stay_in_order(played: dict[str, Both]) -> None:
    """A host that makes a collective in each of 10,000 calls, at random times, meets its like in each."""
    both = played["collectives"]
    for one in both:
        assert "error" not in one, one["error"]
        assert one["made"] >= 10_000
    assert both[0]["made"] == both[1]["made"] and both[0]["outcomes"] == both[1]["outcomes"]
    assert both[0]["collectives"] == both[1]["collectives"] == len(both[0]["votes"])


def test_host_collectives_out_of_order_are_seen(forge: Forge, tmp_path: Path) -> None:
    """What the test above shows can fail: here one rank says once that it is in another call."""
    wrong = ("collectives", {"calls": 10_000, "wrong_at": 200})
    with running(forge, tmp_path / "ranks", 2, scenarios=[wrong]) as ranks:
        ranks.wait_said("ended")
        for rank in range(2):
            (one,) = ranks.saw(rank)
            assert one["error"][0] == "host" and "call 200" in one["error"][1]


class PingClient(PairClient):
    """Sends the next request when the last one is accepted; 30 of them."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, timeout_s=30.0)
        self.streams = []

    def ping(self) -> None:  # type: ignore[override]
        """One request, with its time in its name."""
        prompt = np.arange(len(self.streams), len(self.streams) + 100)
        self.streams.append(self.submit(prompt, request_id=f"ping-{time.monotonic_ns()}"))

    def _on_message(self, side, message) -> None:  # type: ignore[no-untyped-def]
        super()._on_message(side, message)
        if isinstance(message, Accepted) and len(self.streams) < 30:
            self.ping()


def test_R3_waiting_for_a_forward_of_2_s_is_cheap_and_requests_are_admitted_at_once(
    forge: Forge, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On both ranks at most 5 % CPU; requests over the wire are dispatched by rank 0 within 10 ms."""

    async def load(endpoint: str) -> None:
        async with PingClient(endpoint) as client:
            client.ping()
            async with asyncio.timeout(30):
                while client.live or len(client.streams) < 30:
                    for stream in list(client.streams):
                        _ = [token async for token in stream]

    folder = tmp_path_factory.mktemp("ranks") / "waiting"
    with running(forge, folder, 2, beat_s=1.0, scenarios=[("waiting", {})]) as ranks:
        (serves,) = ranks.wait_said("serves", {0})
        asyncio.run(load(serves["endpoint"]))
        ((first, second),) = ranks.finish()
    assert len(first["took_us"]) == 30 and statistics.median(first["took_us"]) < 10_000
    for one in (first, second):
        assert len(one["percent"]) == 3 and statistics.median(one["percent"][1:]) <= 5.0, one["percent"]


TIMEOUT_S, BEAT_S, SLACK_S = 1.5, 0.1, 1.5
"""Of ranks that lose one. The slack is for a busy machine, and for one that was just told to fork."""
MOMENTS = [
    (moment, number, victim)
    for moment in ("idle", "forward", "vote")
    for number in (signal.SIGKILL, signal.SIGSTOP)
    for victim in (0, 2)
]


def bring_to(ranks: Ranks, moment: str, victim: int) -> None:
    """Wait until the victim and the others are where the scenario brings them."""
    ranks.wait_said("hears")
    if moment == "idle":
        ranks.wait_said("quiet", {0})
        return
    voters = {victim} if moment == "vote" else {0, 1, 2} - {victim}
    missing = {(rank, 1) for rank in voters}
    missing -= {(event["rank"], event["forward"]) for event in ranks.events if event["event"] == "joins"}
    while missing:
        event = ranks.wait(lambda event: event["event"] == "joins")
        missing.discard((event["rank"], event["forward"]))


def named_by(ranks: Ranks, survivor: int, victim: int, since: float, limit_s: float) -> str:
    """A survivor names the victim in time and leaves with its exit code; what it said."""
    ranks.wait_said("ended", {survivor})
    lost = ranks.said("lost", survivor)
    assert lost["culprit"] == victim and lost["error"].startswith(f"rank {victim} "), lost
    logged = ranks.said("logs", survivor)
    assert lost["error"] in logged["text"]
    assert logged["at"] - since < limit_s, f"after {logged['at'] - since:.2f} s: {lost}"
    assert ranks.ends[survivor]["code"] == EXIT_RANK_LOST
    assert ranks.ends[survivor]["at"] - logged["at"] < 4.0, "it lingers"
    assert f"error: {lost['error']}" in ranks.printed(survivor)
    return str(lost["error"])


def answered(ranks: Ranks, victim: int, open_requests: int) -> None:
    """Rank 0 has told each open request what happened."""
    (seen,) = ranks.saw(0)
    assert len(seen.get("answers", [])) == open_requests and seen["open"] == []
    for answer in seen.get("answers", []):
        assert answer.startswith(f"the scheduler stopped: rank {victim} "), answer


@pytest.mark.parametrize(("moment", "number", "victim"), MOMENTS)
def test_R2_a_rank_that_is_killed_or_stopped_is_named_by_the_others(
    forge: Forge, tmp_path: Path, moment: str, number: signal.Signals, victim: int
) -> None:
    """While idle, while the others wait for its vote, and while it waits in a vote for the others'."""
    lost = ("lost", {"moment": moment, "victim": victim})
    job = {"timeout_s": TIMEOUT_S, "beat_s": BEAT_S, "scenarios": [lost]}
    with running(forge, tmp_path / "ranks", 3, **job) as ranks:
        bring_to(ranks, moment, victim)
        at = ranks.signal(victim, number)
        killed = number is signal.SIGKILL
        limit_s = (0.0 if killed else TIMEOUT_S) + 2 * BEAT_S + SLACK_S
        for survivor in {0, 1, 2} - {victim}:
            said = named_by(ranks, survivor, victim, at, limit_s)
            assert ("has closed its connection" if killed else "has been silent") in said
            assert moment == "idle" or "forward 1" in said
        if victim:
            answered(ranks, victim, 0 if moment == "idle" else 4)
        if not killed:
            ranks.signal(victim, signal.SIGCONT)
            ranks.wait_said("ended", {victim})
            assert ranks.ends[victim]["code"] == EXIT_RANK_LOST, "it finds the others gone"


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("moment", "cause"),
    [
        ("forward", "has not joined the vote on forward 1"),
        ("call", "has been in the host call launch|has not joined the vote on forward 1"),
        ("differs", "decided differently"),
    ],
)
def test_R2_a_rank_that_hangs_or_differs_by_itself_is_named_by_all(
    forge: Forge, tmp_path: Path, moment: str, cause: str, victim: int
) -> None:
    """Its device never ends, a host call blocks, or it plans other chunks; it ends with the others."""
    lost = ("lost", {"moment": moment, "victim": victim})
    job = {"timeout_s": TIMEOUT_S, "beat_s": BEAT_S, "scenarios": [lost]}
    with running(forge, tmp_path / "ranks", 3, **job) as ranks:
        joined = ranks.wait(lambda event: event["event"] == "joins" and event["forward"] == 1)
        limit_s = (0.0 if moment == "differs" else TIMEOUT_S) + 2 * BEAT_S + SLACK_S
        stuck = {victim} if moment == "call" else set()
        for rank in {0, 1, 2} - stuck:
            assert re.search(cause, named_by(ranks, rank, victim, joined["at"], limit_s))
        for rank in stuck:
            ranks.wait_said("ended", stuck)
            assert ranks.said("stuck", rank)["culprit"] == victim
            assert ranks.ends[rank]["code"] == EXIT_RANK_LOST
        if 0 not in stuck:
            answered(ranks, victim, 4)


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that takes long prompts, so that a forward takes a while."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "long-llama", context=16_384)


async def until_in_flight(client: PairClient) -> list[TokenStream]:
    """Three requests, the first of them being computed for the next half second or so."""
    prompt = np.arange(12_000) % 250
    streams = [client.submit(prompt + number, request_id=f"r{number}") for number in range(3)]
    while (await client.stats())["in_flight"] == 0:
        pass
    return streams


async def served(ranks: Ranks, endpoint: str, moment: str, victim: int, number: signal.Signals) -> float:
    """Serve, bring the victim down, and see that each open request gets its one answer. When it was hit."""
    async with PairClient(endpoint, timeout_s=30.0) as client, asyncio.timeout(60):
        first = client.submit(np.arange(100), request_id="first")
        assert len([token async for token in first]) == 1
        streams = await until_in_flight(client) if moment == "forward" else []
        at = ranks.signal(victim, number)
        for stream in streams:
            with pytest.raises((HostError, WireError)) as caught:
                _ = [token async for token in stream]
            if victim:  # rank 0 is there to answer; else the client sees that it is not
                assert str(caught.value).startswith("the scheduler stopped: rank 1 has ")
    return at


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", ["idle", "forward"])
def test_R2_a_serving_rank_that_is_killed_or_stopped_is_named_and_requests_are_answered(
    forge: Forge, long_llama: Path, tmp_path: Path, moment: str, number: signal.Signals, victim: int
) -> None:
    """`aioprefill serve --tp 2`: the other rank leaves by the exit code of a lost rank, at once."""
    options = ["--tp", "2", "--rank-timeout-s", "2", "--listen", "tcp://127.0.0.1:0"]
    options += ["--model", str(long_llama), "--dtype", "fp32", "--kv-memory", "64MiB", "--threads", "1"]
    options += ["--chunk-tokens", "16384"]
    with running(forge, tmp_path / "ranks", 2, serve=options) as ranks:
        (ready,) = ranks.wait_said("printed", {0})
        endpoint = ready["text"].split("endpoint=")[1].split()[0]
        at = asyncio.run(served(ranks, endpoint, moment, victim, number))
        ranks.wait_said("ended", {1 - victim})
        end, printed = ranks.ends[1 - victim], ranks.printed(1 - victim)
    killed = number is signal.SIGKILL
    cause = "has closed its connection" if killed else r"has been silent for \d\.\d s"
    assert end["code"] == EXIT_RANK_LOST
    assert re.search(rf"error: rank {victim} {cause}", printed), printed
    # two beats of a second, the forward that hangs gets another one, and a busy machine
    assert end["at"] - at < (0.0 if killed else 2.0) + 2.0 + 1.0 + SLACK_S + 2.0
