"""Both sides of a NIXL hand-off for tests: real servers, agents and pools, also as child processes.

Run as a script it is such a child: `nixl_support.py decode|prefill JSON`. It reports in JSON lines on stdout
and takes commands in JSON lines on stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from aioprefill.engine.port import SampledToken
from aioprefill.kv_layout import KVLayout
from aioprefill.sampling_params import SamplingParams
from aioprefill.transfer.nixl_receiver import MESSAGES, NixlReceiver
from aioprefill.transfer.nixl_sender import NixlTransfer
from aioprefill.transfer.pool_view import PoolView
from aioprefill.transfer.port import Handoff
from aioprefill.wire.messages import Welcome
from aioprefill.wire.server import WireServer
from aioprefill.wire.sockets import SocketLimits

LAYOUT = KVLayout("weights-1", layers=2, kv_heads=4, head_dim=64, page_size=16, dtype="float32")
"""Pages of 64 KiB."""
FIRST = SampledToken(42, -0.5, ((42, -0.5), (7, -1.5)))


def make_pool(
    num_pages: int, seed: int | None = None, layout: KVLayout = LAYOUT
) -> tuple[np.ndarray, PoolView]:
    """Host memory, shape (num_pages, page_bytes), zero or random; and its view."""
    memory = np.zeros((num_pages, layout.page_bytes), dtype=np.uint8)
    if seed is not None:
        memory[:] = np.random.default_rng(seed).integers(0, 256, memory.shape, dtype=np.uint8)
    return memory, PoolView(memory.ctypes.data, num_pages, layout.page_bytes)


def handoff(room: str, peer: str, pages: int) -> Handoff:
    """A hand-off of `pages` full pages."""
    return Handoff(room, peer, pages * LAYOUT.page_size, pages, SamplingParams(), max_new_tokens=8)


class DecodeSide:
    """A decode worker without a model: server, receiver, and a handler with a list of free pages.

    `report(kind, **facts)` hears what happens: arrived (with a checksum of each page), lost, released.
    """

    def __init__(
        self,
        report: Callable[..., None],
        *,
        num_pages: int = 256,
        lease_s: float = 1.0,
        heartbeat_ms: int = 200,
        endpoint: str = "tcp://127.0.0.1:0",
        **layout: object,
    ) -> None:
        self.memory, self.pool = make_pool(num_pages)
        self.layout = replace(LAYOUT, **layout)
        self.free = list(range(num_pages))[::-1]
        self.holding = False
        self.report = report
        welcome = Welcome(
            "decode", f"epoch-{os.getpid()}", "test", self.layout.fingerprint, 100, 1000, eos_token_ids=(0,)
        )
        self.receiver = NixlReceiver(
            self.pool, self.layout, self, lambda i, m: self.server.send(i, m), lease_s=lease_s
        )
        self.server = WireServer(
            endpoint,
            dict.fromkeys(MESSAGES, self.receiver.on_message),
            welcome=welcome,
            on_hello=self.receiver.on_message,
            on_gone=self.receiver.on_gone,
            limits=SocketLimits(heartbeat_ms=heartbeat_ms, heartbeat_timeout_ms=4 * heartbeat_ms),
        )

    async def __aenter__(self) -> DecodeSide:
        await asyncio.get_running_loop().run_in_executor(None, self.receiver.prepare)
        self.receiver.start()
        self.server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.receiver.aclose()
        await self.server.aclose()

    def reserve(self, handoff: Handoff) -> list[int] | None:
        if self.holding or len(self.free) < handoff.pages:
            return None
        return [self.free.pop() for _ in range(handoff.pages)]

    def arrived(self, room: str, pages: list[int], first: SampledToken, handoff: Handoff) -> None:
        sums = [zlib.crc32(self.memory[page]) for page in pages]
        self.free += pages
        self.report("arrived", room=room, sums=sums, token=first.token_id, tokens=handoff.prompt_tokens)
        self.receiver.retry_reservations()

    def lost(self, room: str, reason: str) -> None:
        self.report("lost", room=room, reason=reason)

    def release_pages(self, room: str, pages: list[int]) -> None:
        self.free += pages
        self.report("released", room=room, pages=pages)

    def hold(self, holding: bool) -> None:
        self.holding = holding
        self.receiver.retry_reservations()


class Child:
    """This file as a child process. `facts` are its reports so far, newest last."""

    def __init__(self, side: str, **options: object) -> None:
        self.facts: list[dict] = []
        self.process = subprocess.Popen(
            [sys.executable, __file__, side, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, name="reads child", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):
            for line in self.process.stdout:
                self.facts.append(json.loads(line))

    def tell(self, do: str, **arguments: object) -> None:
        """Give a command."""
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def find(self, kind: str, **wanted: object) -> dict | None:
        """The newest report of a kind with these facts."""
        for fact in reversed(self.facts):
            if fact["kind"] == kind and all(fact.get(key) == value for key, value in wanted.items()):
                return fact
        return None

    async def wait(self, kind: str, timeout_s: float = 10.0, **wanted: object) -> dict:
        """Wait for such a report."""
        deadline = time.monotonic() + timeout_s
        while (fact := self.find(kind, **wanted)) is None:
            assert self.process.poll() is None or self._reader.is_alive(), f"child has ended: {self.facts}"
            assert time.monotonic() < deadline, f"no {kind} {wanted} within {timeout_s} s: {self.facts[-5:]}"
            await asyncio.sleep(0.005)
        return fact

    async def stats(self) -> dict:
        """Fresh statistics."""
        known = len(self.facts)
        self.tell("stats")
        deadline = time.monotonic() + 10
        while not any(fact["kind"] == "stats" for fact in self.facts[known:]):
            assert time.monotonic() < deadline, "no stats within 10 s"
            await asyncio.sleep(0.005)
        return self.find("stats")

    async def wait_stats(self, timeout_s: float = 10.0, **wanted: object) -> dict:
        """Wait until the statistics have these values."""
        deadline = time.monotonic() + timeout_s
        while True:
            stats = await self.stats()
            if all(stats[key] == value for key, value in wanted.items()):
                return stats
            assert time.monotonic() < deadline, f"not {wanted} within {timeout_s} s: {stats}"
            await asyncio.sleep(0.02)

    async def quit(self) -> int:
        """Ask it to end; its exit code."""
        self.tell("quit")
        return await asyncio.get_running_loop().run_in_executor(None, self.process.wait, 10)

    def join(self) -> None:
        """Wait until all its reports are in."""
        self._reader.join(5)

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        self.process.stdin.close()
        self.process.stdout.close()


# --- inside the child -----------------------------------------------------------------------------------


def report(kind: str, **facts: object) -> None:
    """One JSON line."""
    print(json.dumps({"kind": kind, **facts}), flush=True)


async def commands() -> asyncio.Queue:
    """Commands from stdin, as they come."""
    queue: asyncio.Queue = asyncio.Queue()
    loop = asyncio.get_running_loop()

    rest = bytearray()

    def on_input() -> None:
        read = os.read(0, 65536)
        *lines, rest[:] = (bytes(rest) + read).split(b"\n")
        for line in lines if read else [b'{"do": "quit"}']:
            queue.put_nowait(json.loads(line))

    loop.add_reader(0, on_input)
    return queue


async def run_decode(options: dict) -> None:
    queue = await commands()
    async with DecodeSide(report, **options) as side:
        report("ready", endpoint=side.server.endpoint)
        while (command := await queue.get())["do"] != "quit":
            match command["do"]:
                case "hold":
                    side.hold(command["holding"])
                    report("held")
                case "give_up":
                    side.receiver.give_up(command["room"], command["reason"])
                case "stats":
                    report("stats", free=len(side.free), cpu_s=time.process_time(), **side.receiver.stats())


async def run_prefill(options: dict) -> None:
    queue = await commands()
    shards = options.get("shards", 1)
    layout = LAYOUT if shards == 1 else LAYOUT.shard_of(options["shard"], shards)
    memory, pool = make_pool(options["num_pages"], seed=options["seed"], layout=layout)
    group = options.get("group", "")
    transfer = NixlTransfer(pool, layout, lease_s=options["lease_s"], ping_s=0.2, group=group)
    transfer.prepare()

    def on_wake() -> None:
        for event in transfer.poll():
            report(
                "event",
                room=event.room,
                state=event.state.value,
                reason=event.reason,
                released=event.released,
            )

    transfer.start(on_wake)
    report("ready")
    while (command := await queue.get())["do"] != "quit":
        match command["do"]:
            case "open":
                transfer.open(handoff(command["room"], command["peer"], command["pages"]))
            case "send":
                transfer.send(command["room"], list(range(command["pages"])), 0, FIRST)
                if command.get("stop_after_s") is not None:
                    await asyncio.sleep(command["stop_after_s"])
                    os.kill(os.getpid(), signal.SIGSTOP)
            case "stats":
                report("stats", cpu_s=time.process_time(), **transfer.stats())
    await transfer.aclose()
    del memory  # it had to live until here


if __name__ == "__main__":
    run = {"decode": run_decode, "prefill": run_prefill}[sys.argv[1]]
    asyncio.run(run(json.loads(sys.argv[2])))
    for thread in threading.enumerate():
        if thread.name == "aioprefill-zmq-end":
            thread.join(5)
    report("closed", threads=[thread.name for thread in threading.enumerate()])
