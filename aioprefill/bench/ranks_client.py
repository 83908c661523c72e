"""The client of the benchmark `ranks` for its plain loop: sends the time and a prompt at a steady rate."""

from __future__ import annotations

import argparse
import time

import numpy as np
import zmq


def main() -> None:
    """Send for as long as the options say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--client", required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 1000
        socket.connect(options.client)
        start = time.monotonic()
        for number in range(int(options.rate * options.seconds)):
            prompt = generator.integers(0, 32_000, options.tokens, dtype=np.uint32).tobytes()
            time.sleep(max(0.0, start + number / options.rate - time.monotonic()))
            socket.send(time.monotonic_ns().to_bytes(8, "little") + prompt)


if __name__ == "__main__":
    main()
