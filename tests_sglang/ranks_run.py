"""Two ranks, each a process with a real Scheduler at --tp 2 over real Gloo, on random schedules.

    OMP_NUM_THREADS=1 .venv-sglang/bin/python tests_sglang/ranks_run.py --schedules 2000

One pair of processes plays all schedules, one after the other, and enters the loop anew for each. Ends of
forwards, handshakes and transfers come at other times on each rank. What each rank decided and sent must be
the same, and what is left behind nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
HERE = Path(__file__).parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE / "stubs")]

RANKS = 2
START_S = 120.0
SCHEDULE_S = 35.0
"""Longer than the harness lets one run take."""
LOST = 3
"""Exit code of ranks after one was lost."""
DELAYS_S = (0.0, 0.003, 0.02)
REFERENCE_EVERY = 8
"""Every so manieth schedule is compared with SGLang's own loop, at the same number of ranks."""


@dataclass(frozen=True)
class Kinds:
    """What a schedule has beside requests and pauses in both modes."""

    faults: bool
    """Aborts, and peers that refuse, fail, die or hang."""
    optimistic: bool
    grammars: bool

    @classmethod
    def of(cls, seed: int) -> Kinds:
        """Each combination comes within 12 seeds."""
        return cls(faults=seed % 2 == 0, optimistic=seed % 3 == 0, grammars=seed % 4 == 1)


# In a rank


def be_rank(rank: int, options: argparse.Namespace) -> None:
    """Play all schedules; one line of JSON for each on stdout."""
    import engine
    import torch
    from harness import Bench

    torch.set_num_threads(1)
    scheduler = engine.make_scheduler(
        Path(options.model), rank=rank, tp_size=RANKS, dist_init_addr=f"127.0.0.1:{options.port}"
    )

    class RankBench(Bench):
        """Only rank 0 has the script; the others get it as SGLang tells it to them."""

        def _attach(self, run: Any, receiver: Any) -> None:
            super()._attach(run, Broadcast(self.receiver, receiver if rank == 0 else None))

    bench = RankBench(scheduler)
    _say({"ready": rank})
    for seed in range(options.first, options.first + options.schedules):
        _say(play(bench, rank, seed))
    if options.then == "ends":
        _say(switch_role(bench))
        _say(play(bench, rank, options.first))
        lose_a_rank(bench, rank)
    sys.stdout.flush()
    os._exit(0)  # SGLang's threads have no end of their own


class Broadcast:
    """Stands for SGLang's receiver: what the script shows goes through SGLang's own broadcast."""

    def __init__(self, own: Any, script: Any) -> None:
        self._own = own
        self._script = script

    def recv_requests(self, local_reqs: Sequence[Any] | None = None) -> list[Any]:
        """See SGLang's receiver."""
        shown = None if self._script is None else self._script.recv_requests()
        told: list[Any] = self._own._broadcast_reqs_across_ranks(shown, list(local_reqs or ()))
        return told


def play(bench: Any, rank: int, seed: int) -> dict[str, Any]:
    """One schedule; what this rank has decided, and what is wrong with it."""
    from sglang.srt.runtime_context import get_disagg
    from test_free import Script

    kinds = Kinds.of(seed)
    reference = None
    if seed % REFERENCE_EVERY == 0:
        plain = Script(seed, faults=False, pauses=False, grammars=kinds.grammars)
        reference = bench.run("blocking", plain.arrivals)
    script = Script(seed, faults=kinds.faults, pauses=True, late=kinds.optimistic, grammars=kinds.grammars)
    aborted = [a.message.rid for a in script.arrivals if type(a.message).__name__ == "AbortReq"]
    script.spoilt |= {rid for rid in script.lengths if rid.startswith(tuple(aborted))}  # as SGLang takes them
    chance = random.Random(seed * RANKS + rank)
    attempts = get_disagg().override(optimistic_prefill_attempts=2) if kinds.optimistic else nullcontext()
    started = time.monotonic()
    with attempts:
        run = bench.run(
            "plugin",
            script.arrivals,
            peers=skewed(script.peers, chance) if rank else script.peers,
            delay_s=lambda _: chance.choice(DELAYS_S),
        )
    try:
        script.check(run, reference or run)
    except AssertionError as error:
        raise AssertionError(f"schedule {seed}: {error}") from error
    decided = {
        "order": [what for what in run.order if what != "health"],
        "batches": run.batches,
        "sends": {rid: [(s.start, s.end, s.last) for s in sends] for rid, sends in sorted(run.sends.items())},
        "tokens": run.tokens(),
        "state": run.state,
    }
    data = json.dumps(decided).encode()
    return {
        "seed": seed,
        "decided": hashlib.blake2b(data, digest_size=16).hexdigest(),
        "forwards": run.launches,
        "two": run.most_in_flight == 2,
        "requests": len(run.outcomes),
        "seconds": round(time.monotonic() - started, 3),
    }


def skewed(peers: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """The same peers, as another rank sees them: what comes, comes at another time."""
    from fake_transfer import After

    def other(due: Any) -> Any:
        return After(chance.choice((0.0, 0.004, 0.03))) if isinstance(due, After) else due

    return {
        rid: replace(
            peer,
            bootstrapped=other(peer.bootstrapped),
            transferred=other(peer.transferred),
            dies=other(peer.dies),
        )
        for rid, peer in peers.items()
    }


def switch_role(bench: Any) -> dict[str, Any]:
    """SGLang leaves its loop on all ranks, as for another role: how each has left, and at which call."""
    from harness import Arrival, Run
    from messages import prompt, request
    from sglang.srt.disaggregation.role_switch import PdRoleSwitchRestart

    scheduler, seen = bench.scheduler, []

    def prepare(run: Run) -> None:
        own = scheduler.process_input_requests

        def process(messages: Any) -> None:
            own(messages)
            seen.extend(message.rid for message in messages)
            if seen:
                raise PdRoleSwitchRestart

        scheduler.process_input_requests = process

    try:
        bench.run("plugin", [Arrival(request("gone", prompt(1, 20)))], prepare=prepare)
    except PdRoleSwitchRestart as left:
        told = {"left": type(left).__name__, "seen": seen}
    else:
        told = {"left": "", "seen": seen}
    del scheduler.process_input_requests
    for request_ in scheduler.disagg_prefill_bootstrap_queue.queue:
        scheduler.req_to_metadata_buffer_idx_allocator.free(request_.metadata_buffer_index)
    scheduler.disagg_prefill_bootstrap_queue.queue.clear()  # a real switch is made without requests
    return told


def lose_a_rank(bench: Any, rank: int) -> None:
    """Rank 1 dies while both are in the loop: what leaves that of rank 0."""
    from harness import Arrival, Run
    from messages import prompt, request

    def prepare(run: Run) -> None:
        if rank == 1:
            bench.scheduler.run_batch = lambda batch: os._exit(LOST)

    try:
        bench.run("plugin", [Arrival(request("late", prompt(1, 20)))], prepare=prepare)
    except Exception as error:
        _say({"lost": f"{type(error).__name__}: {error}"})
    os._exit(LOST)


def _say(fact: Mapping[str, Any]) -> None:
    print(json.dumps(fact), flush=True)


# Around the ranks


@dataclass
class Outcome:
    """What the ranks have said."""

    lines: list[list[dict[str, Any]]]
    """By rank."""
    codes: list[int]
    seconds: float
    """From the last rank's readiness to the end."""
    errors: list[str]
    """The ends of their error outputs."""

    def schedules(self) -> int:
        """How many both ranks have played alike. Fails at the first that differs."""
        played = [[line for line in lines if "seed" in line] for lines in self.lines]
        assert len(played[0]) == len(played[1])
        for first, second in zip(*played, strict=True):
            same = ("seed", "decided", "forwards", "requests")
            assert all(first[key] == second[key] for key in same), f"the ranks differ: {first}, {second}"
        return len(played[0])


def run_ranks(model: Path, port: int, schedules: int, *, first: int = 0, then: str = "end") -> Outcome:
    """Start the ranks, and wait for their ends."""
    arguments = [f"--model={model}", f"--port={port}", f"--schedules={schedules}", f"--first={first}"]
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(RANKS)),
    }
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / f"out{rank}", Path(folder) / f"err{rank}") for rank in range(RANKS)]
        processes = []
        for rank, (out, err) in enumerate(files):
            command = [sys.executable, __file__, f"--as-rank={rank}", f"--then={then}", *arguments]
            with out.open("wb") as stdout, err.open("wb") as stderr:
                processes.append(subprocess.Popen(command, env=environ, stdout=stdout, stderr=stderr))
        try:
            codes = [process.wait(START_S + SCHEDULE_S * (1 + schedules)) for process in processes]
        finally:
            for process in processes:
                process.kill()
        texts = [(out.read_text(), err.read_text()) for out, err in files]
        lines = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in texts]
        seconds = sum(line.get("seconds", 0.0) for line in lines[0])
        return Outcome(lines, codes, seconds, [err[-6000:] for _, err in texts])


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--as-rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--then", default="end", choices=("end", "ends"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank >= 0:
        be_rank(options.as_rank, options)
        return
    from servers import free_port
    from tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder))
        outcome = run_ranks(model, free_port(), options.schedules, first=options.first)
    if any(outcome.codes):
        sys.exit(f"the ranks ended with {outcome.codes}:\n" + "\n".join(outcome.errors))
    count = outcome.schedules()
    forwards = sum(line.get("forwards", 0) for line in outcome.lines[0])
    print(f"{count} schedules, {forwards} forwards, alike on {RANKS} ranks; {outcome.seconds:.1f} s")


if __name__ == "__main__":
    main()
