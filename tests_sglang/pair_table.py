"""Prints the table of docs/benchmarks/sglang_pair.md: SGLang's two loops and the plugin's in one run.

    .venv-sglang/bin/python tests_sglang/pair_table.py --rounds 3

The order of the loops turns with each round; figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "stubs")]

import servers  # noqa: E402  behind the paths
from pair_client import Answer, Client, Job, Jobs, Pair, differences  # noqa: E402
from pair_load import Figures, measure, phases, table  # noqa: E402
from servers import Cpu, Prefill, Server  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402

LOOPS = ("blocking", "polling", "aioprefill")
PHASES = phases()


async def run(
    prefills: dict[str, Prefill], decode: Server, plain: Server, rounds: int
) -> tuple[list[Figures], list[str]]:
    """All phases with all loops, and the answers that were wrong."""
    jobs, figures, wrong = Jobs(), [], []
    async with Client() as client:
        pairs = {loop: Pair(client, prefill, decode) for loop, prefill in prefills.items()}
        for number in range(rounds + 1):
            for phase in PHASES:
                asked: list[Job] = phase.jobs(jobs)
                references: dict[Job, Answer] = await client.references(plain, asked)
                for turn in range(len(LOOPS)):
                    pair = pairs[LOOPS[(turn + number) % len(LOOPS)]]
                    figure, answers = await measure(pair, phase, asked)
                    await pair.drained()
                    wrong += differences(answers, references)
                    if number > 0:  # the first round warms up
                        figures.append(figure)
    return figures, wrong


def medians(figures: list[Figures]) -> list[Figures]:
    """One row for each phase and loop."""
    rows = []
    for phase in PHASES:
        for loop in LOOPS:
            mine = [f for f in figures if (f.phase, f.loop) == (phase.name, loop)]
            cpu = Cpu(
                statistics.median(f.cpu.process_s for f in mine),
                statistics.median(f.cpu.main_thread_s for f in mine),
            )
            wall_s = statistics.median(f.wall_s for f in mine)
            rows.append(Figures(phase.name, loop, mine[0].requests, wall_s, cpu))
    return rows


def main() -> int:
    """1 if an answer was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), []
        model = make_tiny_model(folder / "tiny")
        try:
            prefills = {loop: servers.start_prefill(model, folder, loop, tp=chosen.tp) for loop in LOOPS}
            started += [prefill.server for prefill in prefills.values()]
            decode = servers.start_decode(model, folder, tp=chosen.tp)
            started.append(decode)
            plain = servers.start_plain(model, folder, tp=chosen.tp)
            started.append(plain)
            for server in started:
                server.wait_ready()
            figures, wrong = asyncio.run(run(prefills, decode, plain, chosen.rounds))
        finally:
            for server in started:
                server.kill()
    print(table(medians(figures)))
    print("\n".join(["wrong answers:", *wrong]) if wrong else "all answers as the plain server's")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
