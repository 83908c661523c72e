"""`python -m aioprefill.bench NAME [options] [--json]`."""

from __future__ import annotations

import argparse
import importlib
import sys

BENCHMARKS = {
    "overhead": "tokens per second through the scheduler against the bare engine",
    "intake": "from a client's send to the host's admission while a forward is pending",
    "idle": "CPU of an idle pair, and how soon it takes the first message",
    "policy": "time to first token of the policies, on a trace of real requests",
    "memory": "resident memory over many requests, and what is left in use at the end",
    "ranks": "two tensor-parallel ranks that wait for forwards, against a loop that polls without sleeping",
    "sglang": "the plugin inside SGLang's scheduler, against SGLang's own two prefill loops",
    "soak": "random load with aborts, lost clients, pauses and new weights: nothing lost, wrong or leaked",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m aioprefill.bench", epilog="Example: python -m aioprefill.bench intake --json"
    )
    parser.add_argument(
        "name", choices=BENCHMARKS, help="; ".join(f"{k}: {v}" for k, v in BENCHMARKS.items())
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    words = sys.argv[1:] if arguments is None else arguments
    name = words[0] if words and words[0] in BENCHMARKS else None
    if name is None:
        parser.parse_args(words[:1] or ["--help"])
    module = importlib.import_module(f"aioprefill.bench.{name}")  # only this one: others import torch
    module.add_arguments(parser)
    options = parser.parse_args(words)
    report = module.run(options)
    print(report.json() if options.json else report.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
