"""Arrivals by time: earlier intake rightly changes batches, so what is compared is what must not change."""

from __future__ import annotations

import itertools
import random

import pytest
from fake_transfer import After, Peer, never
from harness import Arrival, Bench, Run, seconds, whole
from messages import abort, pause, prompt, request, resume

SCHEMAS = ('{"type": "boolean"}', '{"type": "object", "properties": {"a": {"type": "integer"}}}')
LOOPS = ("blocking", "polling", "plugin")
SEEDS = range(8)


class Script:
    """A seeded script: requests at random times, with peers that take their time, fail or hang."""

    def __init__(
        self, seed: int, *, faults: bool, pauses: bool, late: bool = False, grammars: bool = False
    ) -> None:
        prompts, chance = random.Random(seed), random.Random(seed + 1000)
        self.arrivals: list[Arrival] = []
        self.lengths: dict[str, int] = {}
        self.peers: dict[str, Peer] = {}
        self.spoilt: set[str] = set()
        """Requests that are aborted or whose peer is not well."""
        moment = 0.0
        for index in range(prompts.randint(6, 12)):
            rid = f"r{index}"
            self.lengths[rid] = prompts.choice((prompts.randint(5, 60), prompts.randint(65, 300)))
            seed_of_prompt = prompts.choice((1, 2, index + 10))
            schema = {"json_schema": SCHEMAS[index % 2]} if grammars and prompts.random() < 0.4 else {}
            message = request(rid, prompt(seed_of_prompt, self.lengths[rid]), **schema)
            self.arrivals.append(Arrival(message, seconds(moment)))
            self.peers[rid] = self._peer(chance, rid, faults, late)
            if faults and chance.random() < 0.2:
                self._abort(rid, moment + chance.uniform(0, 0.06))
            moment += chance.uniform(0, 0.03)
        if pauses:
            for start in (0.02, 0.12):
                mode = chance.choice(("in_place", "retract"))
                end = start + chance.uniform(0.01, 0.05)
                self.arrivals += [Arrival(pause(mode), seconds(start)), Arrival(resume(), seconds(end))]
        self.arrivals.sort(key=lambda arrival: arrival.when.at)  # type: ignore[attr-defined]

    def _peer(self, chance: random.Random, rid: str, faults: bool, late: bool) -> Peer:
        handshake = After(chance.choice((0, 0.02, 0.08) if late else (0, 0, 0.02)))
        peer = Peer(handshake, After(chance.choice((0, 0.005, 0.03))))
        fault = chance.random() if faults else 1.0
        if fault < 0.1:
            peer.bootstrap_fails = True
        elif fault < 0.2:
            peer.transfer_fails = True
        elif fault < 0.3:
            peer.dies = After(chance.uniform(0.001, 0.08))
        elif fault < 0.4:
            peer.transferred = never
            self._abort(rid, 0.5)
        if fault < 0.4:
            self.spoilt.add(rid)
        return peer

    def _abort(self, rid: str, at: float) -> None:
        self.spoilt.add(rid)
        self.arrivals.append(Arrival(abort(rid), seconds(at)))

    def check(self, run: Run, reference: Run) -> None:
        """One outcome each; whoever was not spoilt has the reference's tokens and was sent whole."""
        assert run.outcomes.keys() == self.lengths.keys()
        assert run.paused_launches == 0
        for rid, outcomes in run.outcomes.items():
            assert len(outcomes) == 1, f"{rid} has {len(outcomes)} outcomes: {outcomes}"
            sends = run.sends.get(rid, [])
            if rid in self.spoilt:
                assert all(a.end == b.start for a, b in itertools.pairwise(sends)), sends
                continue
            assert outcomes == reference.outcomes[rid]
            assert whole(sends, self.lengths[rid]), f"{rid}: {sends}"


def check_all(bench: Bench, seed: int, **kinds: bool) -> None:
    """The plugin's loop, and SGLang's own two, on one script."""
    plain = Script(seed, faults=False, pauses=False, grammars=kinds.get("grammars", False))
    reference = bench.run("blocking", plain.arrivals, peers={})
    for loop in LOOPS:
        script = Script(seed, **kinds)
        chance = random.Random(seed)
        run = bench.run(
            loop, script.arrivals, peers=script.peers, delay_s=lambda _, c=chance: c.choice((0, 0.003, 0.02))
        )
        script.check(run, reference)


@pytest.mark.parametrize("seed", SEEDS)
def test_free_arrivals(bench: Bench, seed: int) -> None:
    """Same tokens; gap-free ranges with one last flag; the same end state, which `Bench.run` compares."""
    check_all(bench, seed, faults=False, pauses=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_free_arrivals_with_pauses(bench: Bench, seed: int) -> None:
    """Pauses in both modes at any moment: nothing lost, sent twice or launched while paused."""
    check_all(bench, seed, faults=False, pauses=True)


@pytest.mark.parametrize("seed", range(12, 20))
def test_free_arrivals_with_faults(bench: Bench, seed: int) -> None:
    """Peers that refuse, die, fail or hang, and aborts: one outcome each, and nothing is left behind."""
    check_all(bench, seed, faults=True, pauses=False)


@pytest.mark.parametrize("seed", range(24, 32))
def test_free_arrivals_with_faults_and_pauses(bench: Bench, seed: int) -> None:
    """All of it at once."""
    check_all(bench, seed, faults=True, pauses=True)


@pytest.mark.parametrize("seed", range(36, 44))
def test_free_arrivals_with_grammars(bench: Bench, seed: int) -> None:
    """Sampling of a request with a grammar waits for the result before it; its tokens do not change."""
    check_all(bench, seed, faults=False, pauses=seed % 2 == 0, grammars=True)


@pytest.mark.parametrize("seed", range(44, 52))
def test_free_arrivals_with_optimistic_prefill(bench: Bench, seed: int) -> None:
    """Prompts launched before their handshakes: yielded, requeued and parked ones are sent whole, once."""
    from sglang.srt.runtime_context import get_disagg

    with get_disagg().override(optimistic_prefill_attempts=2):
        check_all(bench, seed, faults=seed % 4 == 0, pauses=seed % 2 == 0, late=True)
