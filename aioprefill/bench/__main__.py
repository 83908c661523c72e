"""`python -m aioprefill.bench NAME [options] [--json]`."""

from __future__ import annotations

import argparse
import importlib
import sys

BENCHMARKS = {
    "overhead": "tokens per second through the scheduler against the bare engine",
    "intake": "from a client's send to the host's admission while a forward is pending",
    "idle": "CPU of an idle pair, and how soon it takes the first message",
    "memory": "resident memory over many requests, and what is left in use at the end",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m aioprefill.bench", epilog="Example: python -m aioprefill.bench intake --json"
    )
    names = parser.add_subparsers(dest="name", required=True)
    for name, text in BENCHMARKS.items():
        sub = names.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
        importlib.import_module(f"aioprefill.bench.{name}").add_arguments(sub)
    options = parser.parse_args(arguments)
    report = importlib.import_module(f"aioprefill.bench.{options.name}").run(options)
    print(report.json() if options.json else report.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
