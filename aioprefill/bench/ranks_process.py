"""One rank of the benchmark `ranks`, in both modes; prints what it has measured as JSON."""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import uvloop
import zmq

from aioprefill.bench.intake import time_dispatch
from aioprefill.completion import Completion, FutureCompletion
from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.engine.port import SampledToken, Span
from aioprefill.errors import DeviceError
from aioprefill.follower import Follower
from aioprefill.native.host import NativeHost
from aioprefill.native.welcome import welcome_of
from aioprefill.process import settle_memory
from aioprefill.ranks.group import RankGroup
from aioprefill.ranks.place import place_from_environment
from aioprefill.ranks.runtime import GroupLink
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.engine import FakeEngine, fake_spec
from aioprefill.tp_agree import GroupAgreement, Seen
from aioprefill.wire.prefill_service import PrefillService

TIMEOUT_S = 60.0
SLOTS = 2


@dataclass(slots=True)
class Measured:
    """What one rank saw. Times are of the monotonic clock."""

    ready_ns: list[int] = field(default_factory=list)
    """When this rank's device was done with each forward."""
    detected_ns: list[int] = field(default_factory=list)
    """When this rank knew of each forward that all ranks are done."""
    intake_us: list[float] = field(default_factory=list)
    cpu_percent: float = 0.0
    forwards: int = 0
    collectives: int = 0


class Usage:
    """CPU time of this process, all threads, over a stretch of wall time."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.monotonic()

    def percent(self) -> float:
        """Of one core, since the start."""
        return 100 * (time.process_time() - self._cpu) / (time.monotonic() - self._wall)


class Times:
    """When forwards are done on this rank's device: one after the other, each with its own skew."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self._random = random.Random(rank)
        self._forward_ns = int(options.forward_ms * 1e6)
        self._skew_ns = options.skew_ms * 1e6
        self.ready_ns: list[int] = []

    def launch(self) -> int:
        """When the forward that is launched now will be done."""
        begins = max([time.monotonic_ns(), *self.ready_ns[-1:]])
        self.ready_ns.append(begins + self._forward_ns + int(self._random.uniform(0, self._skew_ns)))
        return self.ready_ns[-1]


class SleepingEngine(FakeEngine):
    """A device whose thread sleeps until a forward is done, as the stream thread of an engine computes."""

    def __init__(self, times: Times) -> None:
        super().__init__(num_pages=1 << 14, spec=fake_spec(vocab_size=32_000))
        self.keep_forwards = self.check_pages = False
        self._times = times
        self._queue: queue.SimpleQueue[tuple[int, concurrent.futures.Future[None]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake device", daemon=True)
        self._thread.start()

    def launch(self, spans: Sequence[Span]) -> Any:
        """See `Engine.launch`."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._queue.put((self._times.launch(), done))
        return SleepingForward(len(spans), FutureCompletion(done))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            ready_ns, done = item
            time.sleep(max(0.0, (ready_ns - time.monotonic_ns()) / 1e9))
            done.set_result(None)

    def close(self) -> None:
        """See `Engine.close`."""
        self._queue.put(None)
        self._thread.join()
        super().close()


@dataclass(frozen=True, slots=True)
class SleepingForward:
    """Implements `EngineForward`."""

    spans: int
    completion: Completion

    def outputs(self) -> list[SampledToken | None]:
        """See `EngineForward.outputs`."""
        return [SampledToken(1, -0.5)] * self.spans


def time_votes(agreement: GroupAgreement, measured: Measured) -> None:
    """Have the ends of votes noted."""
    vote = agreement.vote

    async def timed(number: int, digest: int, seen: Seen) -> DeviceError | None:
        error = await vote(number, digest, seen)
        measured.detected_ns.append(time.monotonic_ns())
        return error

    agreement.vote = timed  # type: ignore[method-assign]


def be_rank(options: argparse.Namespace) -> None:
    """Run one measurement as this rank."""
    place = place_from_environment(os.environ, 2)
    assert place is not None
    torch.set_num_threads(1)
    group = RankGroup.join(place, device="cpu", vote_timeout_s=TIMEOUT_S)
    times, measured = Times(place.rank, options), Measured()
    if options.as_rank == "spin":
        spin(group, times, measured, options)
    else:
        uvloop.run(schedule(group, times, measured, options))
    measured.ready_ns = times.ready_ns
    group.close()
    json.dump({name: getattr(measured, name) for name in measured.__slots__}, sys.stdout)


async def schedule(group: RankGroup, times: Times, measured: Measured, options: argparse.Namespace) -> None:
    """Mode `aioprefill`."""

    def stuck(error: Exception) -> None:
        print(error, file=sys.stderr)
        os._exit(1)

    host = NativeHost(
        SleepingEngine(times),
        None,
        NativeConfig(chunk_tokens=1 << 16, max_batch_requests=1024, prefix_cache=False),
    )
    link = GroupLink(group, timeout_s=TIMEOUT_S, on_stuck=stuck)
    votes = link.agreement
    settle_memory()  # as `serve` does
    if not group.place.leads:
        usage = Usage()
        await Follower(host, link).run()
    else:
        measured.intake_us = time_dispatch(host)
        time_votes(votes, measured)
        async with PrefillScheduler(host, SchedulerConfig(), ranks=link) as scheduler:
            service = PrefillService(
                "tcp://127.0.0.1:0",
                submit=scheduler.submit,
                stats=lambda: scheduler.stats().flat(),
                welcome=welcome_of("prefill", host.engine.spec),
            )
            async with service:
                client = await start_client(service.endpoint, options, plain=False)
                usage = Usage()
                if await client.wait():
                    raise RuntimeError("the client process failed")
                measured.cpu_percent = usage.percent()
    measured.cpu_percent = measured.cpu_percent or usage.percent()
    measured.forwards, measured.collectives = votes.counters.votes, votes.counters.collectives


async def start_client(
    endpoint: str, options: argparse.Namespace, *, plain: bool
) -> asyncio.subprocess.Process:
    """The process that sends requests to rank 0."""
    return await asyncio.create_subprocess_exec(*client_command(endpoint, options, plain=plain))


def client_command(endpoint: str, options: argparse.Namespace, *, plain: bool) -> list[str]:
    """Its command: `plain` for a socket that only takes."""
    words = [f"--rate={options.rate}", f"--seconds={options.seconds}", f"--tokens={options.tokens}"]
    module = ["aioprefill.bench.ranks_client"] if plain else ["aioprefill.bench", "intake"]
    return [sys.executable, "-m", *module, f"--client={endpoint}", *words]


def spin(group: RankGroup, times: Times, measured: Measured, options: argparse.Namespace) -> None:
    """Mode `spin`: what is said at the top of `bench.ranks`."""
    leads = group.place.leads
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        client = None
        if leads:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            client = subprocess.Popen(client_command(f"tcp://127.0.0.1:{port}", options, plain=True))
        spin_loop(group, times, measured, socket, client)
        if client is not None and client.wait():
            raise RuntimeError("the client process failed")


def spin_loop(
    group: RankGroup,
    times: Times,
    measured: Measured,
    socket: zmq.Socket[bytes],
    client: subprocess.Popen[bytes] | None,
) -> None:
    """Two slots, polled back to back until the client has ended."""
    vote = group.vote_group
    waiting = done = 0
    news = torch.zeros(2, dtype=torch.int64)
    ready = torch.zeros(1, dtype=torch.int64)
    usage: Usage | None = None
    while True:
        came = 0
        while client is not None and socket.poll(0):
            sent_ns = int.from_bytes(socket.recv()[:8], "little")
            measured.intake_us.append((time.monotonic_ns() - sent_ns) / 1e3)
            came += 1
        news[0], news[1] = came, client is not None and client.poll() is not None
        dist.broadcast(news, 0, group=vote)
        waiting += int(news[0])
        if waiting and usage is None:
            usage = Usage()  # not the wait for the client's start
        if waiting and len(times.ready_ns) - done < SLOTS:
            times.launch()
            waiting = 0
        pending = done < len(times.ready_ns)
        ready[0] = pending and time.monotonic_ns() >= times.ready_ns[done]
        dist.all_reduce(ready, op=dist.ReduceOp.MIN, group=vote)
        measured.collectives += 2
        if ready[0]:
            measured.detected_ns.append(time.monotonic_ns())
            done += 1
        if news[1]:
            break
    measured.cpu_percent = usage.percent() if usage is not None else 0.0
    measured.forwards = done
