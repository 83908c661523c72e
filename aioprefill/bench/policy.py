"""Policies on a trace: time to first token, replayed through the real loop, host and prefix cache.

The device is a fake and the clock virtual: a forward takes 2 ms and its tokens' time at a rate. The rate is
set so that the trace keeps the device busy for the given part of its duration, when the cache never evicts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aioprefill.bench.report import Report, Row, percentile
from aioprefill.bench.trace import BLOCK, TraceRequest, read_trace, uncached_tokens
from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.engine.port import Span
from aioprefill.native.host import NativeHost
from aioprefill.native.policy import POLICIES
from aioprefill.request import PrefillHandle, PrefillRequest, PrefillResult
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import run_virtual
from aioprefill.testing.engine import FakeEngine, fake_spec

STEP_S = 0.002
CLASSES = {"short": (0, 4096), "medium": (4096, 16_384), "long": (16_384, 1 << 62)}
"""Prompt-length classes: tokens, more than the first number, at most the second."""
COMPARED = tuple(name for name in POLICIES if name not in ("priority", "deadline"))
"""The policies that a trace without priorities and deadlines tells apart."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    default = NativeConfig()
    parser.add_argument("--trace", type=Path, required=True, help="a trace in the format of Mooncake's")
    parser.add_argument("--utilisation", type=_parts, default=(0.85, 0.92), help="such as 0.85,0.92")
    parser.add_argument("--policies", type=_names, default=COMPARED, help=f"of {','.join(POLICIES)}")
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--max-wait-s", type=float, default=default.policy_max_wait_s)
    parser.add_argument("--max-chunk-share", type=float, default=default.max_chunk_share)
    parser.add_argument("--cache-tokens", type=int, help="size of the KV pool; default: nothing is evicted")
    parser.add_argument("--requests", type=int, help="replay only so many")
    parser.add_argument("--plot", type=Path, help="draw the figures into this file (.svg, .png)")


def _parts(text: str) -> tuple[float, ...]:
    parts = tuple(float(word) for word in text.split(","))
    if not all(0 < part < 10 for part in parts):
        raise argparse.ArgumentTypeError(f"utilisations must be above 0, got {text}")
    return parts


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no policy {unknown[0]!r}; there are {', '.join(POLICIES)}")
    return names


def run(options: argparse.Namespace) -> Report:
    """Replay once per utilisation and policy."""
    try:
        trace = read_trace(options.trace)[: options.requests]
    except OSError as err:
        raise SystemExit(f"bench policy: no trace: {err}") from None
    names = ("chunk_tokens", "max_wait_s", "max_chunk_share", "cache_tokens")
    parameters = {name: getattr(options, name) for name in names}
    report = Report(
        "policy", {"trace": options.trace.name, "requests": len(trace), **parameters}, columns=TABLE_COLUMNS
    )
    started = time.perf_counter()
    for utilisation in options.utilisation:
        rate = token_rate(trace, utilisation, options.chunk_tokens)
        for policy in options.policies:
            replay = Replay(trace, policy, rate, options)
            run_virtual(replay.run())
            report.rows.append({"policy": policy, "utilisation": utilisation, **replay.row()})
    report.summary = summarise(report.rows)
    report.summary["real_seconds"] = round(time.perf_counter() - started, 1)
    if options.plot is not None:
        from aioprefill.bench.policy_plot import draw

        draw(report.rows, options.plot)
    return report


def token_rate(trace: Sequence[TraceRequest], utilisation: float, chunk_tokens: int) -> float:
    """Tokens a second at which the trace's work fills `utilisation` of its duration."""
    tokens = uncached_tokens(trace)
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    busy_s = utilisation * span_s - STEP_S * tokens / chunk_tokens
    if busy_s <= 0:
        raise SystemExit("bench policy: the trace is too short for this utilisation")
    return tokens / busy_s


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request, seconds."""

    length: int
    ttft_s: float
    wait_s: float


class Replay:
    """One pass of a trace through a scheduler on a fake device."""

    def __init__(
        self, trace: Sequence[TraceRequest], policy: str, rate: float, options: argparse.Namespace
    ) -> None:
        self._trace = trace
        pool_tokens = options.cache_tokens or sum(request.length + BLOCK for request in trace)
        self._engine = FakeEngine(
            num_pages=-(-pool_tokens // BLOCK),
            spec=fake_spec(
                vocab_size=1 + max(int(request.blocks.max()) for request in trace), page_size=BLOCK
            ),
            duration_s=_duration(rate),
        )
        self._engine.keep_forwards = self._engine.check_pages = False
        config = NativeConfig(
            chunk_tokens=options.chunk_tokens,
            policy=policy,
            policy_max_wait_s=options.max_wait_s,
            max_chunk_share=options.max_chunk_share,
            max_queue_requests=1 << 24,
            max_queue_tokens=1 << 32,
        )
        self._host = NativeHost(self._engine, None, config)
        self.served: list[Served] = []

    async def run(self) -> None:
        """Submit each request at its time; return when all are served."""
        loop = asyncio.get_running_loop()
        start = self._trace[0].arrival_s
        async with PrefillScheduler(self._host, SchedulerConfig(drain_timeout_s=86_400)) as scheduler:
            handles: set[PrefillHandle] = set()
            for request in self._trace:
                await asyncio.sleep(request.arrival_s - start - loop.time())
                handle = scheduler.submit(PrefillRequest(request.tokens()))
                handles.add(handle)
                handle.result.add_done_callback(self._note)
                handle.transferred.add_done_callback(partial(_forget, handles, handle))
            for handle in list(handles):
                await handle.wait_transferred()

    def _note(self, future: asyncio.Future[PrefillResult]) -> None:
        result = future.result()
        self.served.append(
            Served(
                result.prompt_tokens,
                result.first_token_s - result.arrival_s,
                result.launched_s - result.arrival_s,
            )
        )

    def row(self) -> Row:
        """The figures."""
        assert len(self.served) == len(self._trace), "a request got lost"
        totals = self._host.ledger.totals
        row: Row = {
            **ttft_figures("", self.served),
            "longest_ttft_ms": _ms(max(item.ttft_s for item in self.served)),
            "longest_wait_ms": _ms(max(item.wait_s for item in self.served)),
            "prefix_hit_percent": round(100 * totals.cached_tokens / totals.prompt_tokens, 2),
            "steps": self._engine.launched,
        }
        for name, (low, high) in CLASSES.items():
            row |= ttft_figures(f"{name}_", [item for item in self.served if low < item.length <= high])
        return row


def _forget(handles: set[PrefillHandle], handle: PrefillHandle, _: object) -> None:
    handles.discard(handle)


def _duration(rate: float) -> Callable[[Sequence[Span]], float]:
    return lambda spans: STEP_S + sum(len(span.token_ids) for span in spans) / rate


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


FIGURES = ("ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms")
TABLE_COLUMNS = (
    "policy", "utilisation", *FIGURES, "longest_ttft_ms", "longest_wait_ms", "prefix_hit_percent", "steps"
)  # fmt: skip
"""What fits on a screen; the figures by prompt-length class are in the JSON object."""


def ttft_figures(prefix: str, served: Sequence[Served]) -> dict[str, float | None]:
    """Mean and percentiles of the time to first token; None where nobody was served."""
    times = sorted(item.ttft_s for item in served)
    if not times:
        return {prefix + name: None for name in FIGURES}
    values = (sum(times) / len(times), *(percentile(times, percent) for percent in (50, 90, 99)))
    return {prefix + name: _ms(value) for name, value in zip(FIGURES, values, strict=True)}


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Ratios to first come, first served at the same utilisation."""
    summary: dict[str, Any] = {}
    keys = ("ttft_mean_ms", "ttft_p99_ms", "longest_ttft_ms", "longest_wait_ms")
    measure = {row["utilisation"]: row for row in rows if row["policy"] == "fcfs"}
    for row in rows:
        base = measure.get(row["utilisation"])
        if base is None or row is base:
            continue
        for key in keys:
            name = f"{row['policy']}_{row['utilisation']:g}_{key.removesuffix('_ms')}_ratio"
            summary[name] = round(row[key] / base[key], 3) if base[key] else None
    return summary
