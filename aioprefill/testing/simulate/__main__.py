"""`python -m aioprefill.testing.simulate [--seeds N] [--first-seed K] [--ranks 1,2,4] [--json]`.

`--seed K --verbose` plays one seed and tells its story. Exit code 1 when a seed fails, or a run of enough
seeds has not reached everything that there is to reach.
"""

from __future__ import annotations

import argparse
import os
import sys

from aioprefill.testing.simulate.bugs import BUGS, planted
from aioprefill.testing.simulate.pool import Total, play_many
from aioprefill.testing.simulate.reach import ENOUGH
from aioprefill.testing.simulate.schedule import play


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(word) for word in text.split(","))
    if not all(1 <= size <= 64 for size in sizes):
        raise argparse.ArgumentTypeError(f"numbers of ranks are 1 to 64, got {text}")
    return sizes


def main(arguments: list[str] | None = None) -> int:
    """Play and print; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m aioprefill.testing.simulate",
        description="Random schedules on simulated ranks; the loop's rules are checked at every host call.",
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many schedules")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ranks", type=_sizes, default=(1, 2, 4), help="a seed is played on one of these")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seed", type=int, help="play this one only")
    parser.add_argument("--verbose", action="store_true", help="tell the story of --seed")
    parser.add_argument("--bug", choices=sorted(BUGS), default="", help="plant this mistake first")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _one(options)
    total = play_many(
        options.first_seed, options.seeds, options.ranks, workers=options.workers, bug=options.bug
    )
    print(total.json() if options.json else _summary(total))
    return int(total.failed)


def _one(options: argparse.Namespace) -> int:
    with planted(options.bug):
        played = play(options.seed, options.ranks, told=options.verbose)
    if options.json:
        total = Total(1, options.ranks)
        total.add(played)
        print(total.json())
        return int(bool(played.failure))
    if options.verbose:
        print("\n".join(played.lines))
    print(f"seed {played.seed}: {played.kind} host on {played.size} ranks, {played.events} events")
    if played.failure:
        print(f"FAILS: {played.failure}\n{played.trace if options.verbose else ''}".rstrip())
    return int(bool(played.failure))


def _summary(total: Total) -> str:
    lines = [
        f"{total.schedules} schedules, {total.events} events, at least {total.least_events} in each",
        f"{total.schedules / max(total.seconds, 1e-9):.1f} schedules per second",
    ]
    lines += [f"seed {seed} FAILS: {text[:300]}" for seed, text in total.failures.items()]
    lines += [f"NOT REACHED: {name}" for name in total.missing]
    if total.schedules < ENOUGH:
        lines.append(f"what was reached is looked at from {ENOUGH} seeds on")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
