"""What both servers still hold when nothing is asked of them, and how much they grew."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil

from aioprefill.pair import Pair
from aioprefill.wire.client import PairClient

MIB = 1 << 20
RSS_SLACK_MIB = 32.0
"""Growth of a process's memory that is not called a leak: allocators keep what they had at the peak."""
HELD = {
    "prefill": ("pages_held", "open_requests", "queued_requests", "queued_tokens", "held", "in_flight"),
    "decode": ("rooms_reserved", "rooms_queued", "rooms_running", "streams"),
}


async def still_held(client: PairClient) -> dict[str, int]:
    """Everything that a server holds, by name; streams that end by their own timer are not counted."""
    held: dict[str, int] = {}
    for side, names in HELD.items():
        stats = await client.stats("prefill" if side == "prefill" else "decode")
        values: dict[str, Any] = {name: stats[name] for name in names}
        if side == "decode":
            values["pages"] = stats["pages"] - stats["pages_free"]  # type: ignore[operator]
            values["streams"] -= stats["streams_expiring"]
        held |= {f"{side}_{name}": int(value) for name, value in values.items() if value}
    return held


async def settle(client: PairClient, timeout_s: float) -> dict[str, int]:
    """Wait until nothing is held; what still is after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while held := await still_held(client):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.1)
    return held


def size(pair: Pair) -> dict[str, float]:
    """Descriptors, threads and resident memory of both processes."""
    sizes: dict[str, float] = {}
    for side in ("prefill", "decode"):
        process = psutil.Process(getattr(pair, side).pid)
        sizes[f"{side}_fds"] = process.num_fds()
        sizes[f"{side}_threads"] = process.num_threads()
        sizes[f"{side}_children"] = len(process.children())
        sizes[f"{side}_rss_mib"] = round(process.memory_info().rss / MIB, 1)
    return sizes


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What became more than it may; empty when nothing leaks."""
    grown = {name: round(after[name] - before[name], 1) for name in before}
    return {
        name: more
        for name, more in grown.items()
        if more > (RSS_SLACK_MIB if name.endswith("_rss_mib") else 0)
    }


async def settled_growth(pair: Pair, before: dict[str, float], timeout_s: float) -> dict[str, float]:
    """`growth` when descriptors of connections that just ended are closed, or after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while grown := growth(before, size(pair)):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.2)
    return grown
