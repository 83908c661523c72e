"""Intake over SGLang's own ZMQ sockets: woken by their descriptors, nothing lost, idle for nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from harness import Bench, Run
from messages import abort, prompt, request, shutdown

from aioprefill.sglang.sockets import InputSockets


class Client:
    """Stands for SGLang's tokenizer process: a thread with the other end of the scheduler's socket."""

    def __init__(self, bench: Bench) -> None:
        receiver = self.receiver = bench.receiver
        endpoint = receiver.recv_from_tokenizer.getsockopt_string(zmq.LAST_ENDPOINT)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.bind(endpoint)

    def send(self, *messages: Any) -> None:
        """Send as SGLang does."""
        from sglang.srt.managers.io_struct import sock_send

        for message in messages:
            sock_send(self._socket, message)

    def during(self, talk: Callable[[], None]) -> threading.Thread:
        """Talk in a thread, then shut the loop down."""

        def work() -> None:
            talk()
            self.send(shutdown())

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Give the socket back."""
        self._context.destroy(linger=0)


@pytest.fixture
def client(bench: Bench) -> Any:
    """A client for one test."""
    client = Client(bench)
    yield client
    client.close()


def serve(bench: Bench, client: Client, talk: Callable[[], None], **changes: Any) -> Run:
    """Run the plugin's loop on the scheduler's own receiver while the client talks."""
    receiver = dataclasses.replace(client.receiver, **changes)
    thread = client.during(talk)
    run = bench.run("plugin", receiver=receiver)
    thread.join(5)
    return run


def test_requests_come_in_over_the_socket_at_once(bench: Bench, client: Client) -> None:
    """Twenty requests, 10 ms apart: taken in within a few milliseconds, and all answered."""
    sent: dict[str, float] = {}

    def talk() -> None:
        time.sleep(0.2)
        for index in range(20):
            sent[f"r{index}"] = time.monotonic()
            client.send(request(f"r{index}", prompt(index, 30)))
            time.sleep(0.01)
        time.sleep(0.3)

    run = serve(bench, client, talk)
    assert len(run.outcomes) == 20
    delays = [run.seen_at[rid] - at for rid, at in sent.items()]
    assert statistics.median(delays) < 0.03


@pytest.mark.parametrize("limit", [-1, 1, 7])
def test_H5_burst_on_one_socket_is_read_without_a_stall(bench: Bench, client: Client, limit: int) -> None:
    """1,000 messages in one go, also where SGLang takes one or seven at a time and leaves the rest."""

    def talk() -> None:
        client.send(*(abort(f"nobody{index}") for index in range(1000)))

    run = serve(bench, client, talk, max_recv_per_poll=limit)
    assert len(run.seen_at) == 1000
    assert time.monotonic() - run.started < 20


def test_H1_idle_loop_costs_next_to_nothing(bench: Bench, client: Client) -> None:
    """One second with nothing to do: ticks alone, under 10 % of a core."""
    used: list[float] = []

    def talk() -> None:
        time.sleep(0.3)
        before = time.process_time()
        time.sleep(1.0)
        used.append(time.process_time() - before)

    run = serve(bench, client, talk)
    assert run.calls < 30
    assert used[0] < 0.1


def test_first_message_after_quiet_is_taken_at_once(bench: Bench, client: Client) -> None:
    """After quiet longer than a tick, within 30 ms: it does not wait for the next one."""
    sent: list[float] = []

    def talk() -> None:
        for index in range(5):
            time.sleep(0.23)
            sent.append(time.monotonic())
            client.send(abort(f"nobody{index}"))
        time.sleep(0.2)

    run = serve(bench, client, talk)
    delays = [run.seen_at[f"nobody{index}"] - at for index, at in enumerate(sent)]
    assert statistics.median(delays) < 0.03


@pytest.mark.asyncio
async def test_message_left_in_the_socket_wakes_again() -> None:
    """The edge is used up by the first look; a look behind the read finds what was left."""
    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    push.connect(f"tcp://127.0.0.1:{port}")
    woken, first = 0, asyncio.Event()

    def wake() -> None:
        nonlocal woken
        woken += 1
        first.set()

    sockets = InputSockets([pull], wake)
    push.send(b"one")
    push.send(b"two")
    async with asyncio.timeout(5):
        await first.wait()
    assert pull.recv() == b"one"
    before = woken
    sockets.look()
    assert woken == before + 1
    assert pull.recv() == b"two"
    sockets.look()
    assert woken == before + 1
    sockets.close()
    sockets.close()
    context.destroy(linger=0)
