"""The client of the benchmark `sglang`: another process, which stands for SGLang's tokenizer.

It sends messages that the scheduler's process has encoded before, and notes the monotonic clock before each
send. Its standard input tells it what to do, a line each: `go` (send requests, with random gaps), `stop`
(send no more of them, print the times as JSON) and `end` (send the last message, which ends the loop).
"""

from __future__ import annotations

import argparse
import json
import random
import select
import sys
import time
from pathlib import Path

import msgspec
import zmq


def main() -> None:
    """Do as told until `end`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True, help="that the scheduler connects to")
    parser.add_argument("--messages", type=Path, required=True, help="an encoded list of encoded messages")
    parser.add_argument("--rate", type=float, required=True, help="requests a second, on average")
    options = parser.parse_args()
    *requests, last = msgspec.msgpack.decode(options.messages.read_bytes(), type=list[bytes])
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.bind(options.endpoint)
        print("ready", flush=True)
        expect("go")
        print(json.dumps(send(socket, requests, options.rate)), flush=True)
        expect("end")
        socket.send(last)


def expect(word: str) -> None:
    """Wait for a line."""
    line = sys.stdin.readline().strip()
    if line != word:
        raise SystemExit(f"told {line!r} instead of {word!r}")


def send(socket: zmq.Socket[bytes], requests: list[bytes], rate: float) -> list[int]:
    """Send until told to stop; when each was sent, in nanoseconds. The same gaps in each run."""
    gaps = random.Random(2)
    sent_ns: list[int] = []
    due = time.monotonic()
    for request in requests:
        due += gaps.expovariate(rate)
        if select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
            expect("stop")
            return sent_ns
        sent_ns.append(time.monotonic_ns())
        socket.send(request)
    raise SystemExit(f"all {len(requests)} requests were sent before the forwards were done")


if __name__ == "__main__":
    main()
