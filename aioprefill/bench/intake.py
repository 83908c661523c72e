"""How long a request takes from its client's send to the host's admission, while forwards are pending.

The server is the native host over a fake device whose forwards take `--forward-ms`, behind the real wire; the
client is another process with a plain socket that sends at a steady rate. Both read the same monotonic clock:
the send time travels in the request id. Modes alternate: `aioprefill`, and `blocking` (the switch off: the
loop waits in synchronize).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

import numpy as np
import uvloop
import zmq

from aioprefill.bench.report import Report, Row, percentile
from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.native.host import NativeHost
from aioprefill.native.request_state import Request
from aioprefill.native.welcome import welcome_of
from aioprefill.process import settle_memory
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.engine import FakeEngine, fake_spec
from aioprefill.wire.messages import Hello, Stats, StatsQuery, Submit, Welcome, decode, encode, pack_ids
from aioprefill.wire.prefill_service import PrefillService

MODES = ("aioprefill", "blocking")
VOCABULARY = 32_000


def time_dispatch(host: NativeHost) -> list[float]:
    """Have the host note, in µs, how long each request took to be dispatched: it may be admitted then."""
    took_us: list[float] = []
    add = host.ledger.add

    def timed(request: Request) -> None:
        add(request)
        sent_ns = int(request.request_id.rpartition("-")[2])
        took_us.append((time.monotonic_ns() - sent_ns) / 1e3)

    host.ledger.add = timed  # type: ignore[method-assign]
    return took_us


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--tokens", type=int, default=2000, help="of each prompt")
    parser.add_argument("--chunk-tokens", type=int, default=8192, help="token budget of a forward")
    parser.add_argument("--forward-ms", type=float, default=500.0, help="of each forward")
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--client", metavar="ENDPOINT", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> Report:
    """Measure; or be the client process."""
    if options.client:
        send(options)
        sys.exit(0)
    report = Report(
        "intake",
        {
            "rate_per_s": options.rate,
            "seconds": options.seconds,
            "prompt_tokens": options.tokens,
            "forward_ms": options.forward_ms,
            "chunk_tokens": options.chunk_tokens,
            "alternations": options.alternations,
        },
    )
    for alternation in range(options.alternations):
        for mode in MODES:
            took_us, during = uvloop.run(measure(mode, options))
            report.rows.append(row(mode, alternation, took_us, during))
    for mode in MODES:
        for key in ("intake_p50_us", "intake_p99_us"):
            values = [row[key] for row in report.rows if row["mode"] == mode]
            report.summary[f"{mode}_{key}"] = statistics.median(values)
    ours = [row["intake_p99_us"] for row in report.rows if row["mode"] == "aioprefill"]
    theirs = [row["intake_p99_us"] for row in report.rows if row["mode"] == "blocking"]
    report.summary["intake_p99_ratio"] = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    return report


def row(mode: str, alternation: int, took_us: list[float], during: float) -> Row:
    """One measurement."""
    return {
        "mode": mode,
        "alternation": alternation,
        "requests": len(took_us),
        "arrived_during_forward_percent": round(during, 1),
        "intake_p50_us": round(percentile(took_us, 50), 1),
        "intake_p99_us": round(percentile(took_us, 99), 1),
        "intake_max_us": round(max(took_us), 1),
    }


async def measure(mode: str, options: argparse.Namespace) -> tuple[list[float], float]:
    """Serve one client process; µs per request, and the percentage that came during a forward."""
    pages = -(-options.chunk_tokens // 16) * 8
    engine = FakeEngine(
        num_pages=pages, spec=fake_spec(vocab_size=VOCABULARY), duration_s=options.forward_ms / 1e3
    )
    engine.keep_forwards = engine.check_pages = False
    host = NativeHost(
        engine,
        None,
        NativeConfig(
            chunk_tokens=options.chunk_tokens,
            max_batch_requests=1024,
            max_queue_tokens=1 << 32,
            max_queue_requests=1 << 20,
        ),
    )
    took_us = time_dispatch(host)
    settle_memory()  # as `serve` does
    async with PrefillScheduler(host, SchedulerConfig(continuous_intake=mode == "aioprefill")) as scheduler:
        service = PrefillService(
            "tcp://127.0.0.1:0",
            submit=scheduler.submit,
            stats=lambda: scheduler.stats().flat(),
            welcome=welcome_of("prefill", engine.spec),
        )
        async with service:
            words = [f"--rate={options.rate}", f"--seconds={options.seconds}", f"--tokens={options.tokens}"]
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "aioprefill.bench", "intake", f"--client={service.endpoint}", *words
            )
            if await client.wait():
                raise RuntimeError("the client process failed")
        stats = scheduler.stats()
    return took_us, 100.0 * stats.arrivals_during_forward / max(1, stats.arrivals)


def send(options: argparse.Namespace) -> None:
    """The client process: says hello, then sends at a steady rate, reading the clock before each send."""
    generator = np.random.default_rng(0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(options.client)
        socket.send(encode(Hello("client", "bench")))
        if not isinstance(decode(socket.recv()), Welcome):
            raise RuntimeError("the server did not answer the hello")
        start = time.monotonic()
        for number in range(int(options.rate * options.seconds)):
            prompt = pack_ids(generator.integers(0, VOCABULARY, options.tokens, dtype=np.uint32))
            time.sleep(max(0.0, start + number / options.rate - time.monotonic()))
            socket.send(encode(Submit(f"{number}-{time.monotonic_ns()}", prompt)))
            while socket.poll(0):
                socket.recv()
        socket.send(encode(StatsQuery()))
        while not isinstance(decode(socket.recv()), Stats):
            pass  # all requests have been taken; leaving aborts them: this is about intake
