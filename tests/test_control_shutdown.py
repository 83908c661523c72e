"""Row S2 with real processes: signals, drains over the wire, exit codes, threads that never come back."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from operations_support import FakeServe, fake_serve

from aioprefill.errors import AioprefillError, DeviceError, RequestAborted, WireError
from aioprefill.wire.client import PairClient
from aioprefill.wire.stream import TokenStream


async def open_request(client: PairClient, name: str) -> TokenStream:
    """A request that is with the device."""
    stream = client.submit([1, 2, 3], request_id=name, handoff=False)
    async with asyncio.timeout(10):
        while not (await client.stats())["in_flight"]:
            pass
    return stream


@pytest.mark.asyncio
async def test_S2_sigterm_drains_and_the_exit_code_is_0() -> None:
    """What was launched gets its answer, though the signal came first; idle, the process ends as well."""
    with fake_serve("quick") as server:
        async with PairClient(server.endpoint, timeout_s=10) as client:
            streams = [client.submit(range(30), request_id=f"r{n}", handoff=False) for n in range(2)]
            await client.ping()
            server.process.send_signal(signal.SIGTERM)
            outcomes = await asyncio.gather(*(s.first_token() for s in streams), return_exceptions=True)
        assert await asyncio.to_thread(server.wait) == 0
        finished = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        dropped = [outcome for outcome in outcomes if isinstance(outcome, RequestAborted)]
        assert finished and len(finished) + len(dropped) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("device", ["endless", "hung"])
async def test_S2_a_second_sigterm_stops_at_once_with_a_report(device: str) -> None:
    """Also while a thread sits in a call that never ends: exit code 4, the open request named."""
    with fake_serve(device) as server:
        async with PairClient(server.endpoint, timeout_s=10) as client:
            stream = await open_request(client, "stuck-one")
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait_line, "SIGTERM, draining")
            async with asyncio.timeout(10):
                while (await client.health()).ready:
                    pass
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.wait) == 4
            assert time.monotonic() - began < 2.0
            with pytest.raises(AioprefillError):
                await stream.first_token()
        assert "SIGTERM again" in server.lines[-1] and "stuck-one" in server.lines[-1]


@pytest.mark.asyncio
async def test_S2_one_sigterm_is_enough_when_the_device_hangs() -> None:
    """At the drain's deadline the request is dropped by name, and nobody waits for the thread: code 3."""
    with fake_serve("hung", drain_timeout_s=0.3) as server:
        async with PairClient(server.endpoint, timeout_s=10) as client:
            stream = await open_request(client, "stuck-one")
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(RequestAborted, match="end of the drain"):
                await stream.first_token()
            assert await asyncio.to_thread(server.wait) == 3
        assert any("dropped: stuck-one" in line for line in server.lines)
        assert "a forward hangs" in server.lines[-1]


@pytest.mark.asyncio
async def test_S2_a_drain_by_command_answers_its_callers_and_ends_the_process() -> None:
    """Two callers, each gets the answer; a request that was never launched is named; exit code 0."""
    with fake_serve("slow") as server:
        async with PairClient(server.endpoint, timeout_s=10) as client:
            running = []
            for number in (1, 2):
                running.append(client.submit([number, 2, 3], handoff=False))
                while (await client.stats())["in_flight"] != number:
                    pass
            waiting = client.submit([3, 2, 1], request_id="waits", handoff=False)
            answers = await asyncio.gather(client.drain(), client.drain(5.0))
            assert answers[0] == {"finished": 2, "dropped": 1, "dropped_ids": ["waits"]}
            assert answers[1]["dropped"] == 0, "it was gone when the second drain began"
            with pytest.raises(RequestAborted):
                await waiting.first_token()
            for stream in running:
                assert (await stream.first_token()).token_id >= 0
        assert await asyncio.to_thread(server.wait) == 0


@pytest.mark.asyncio
async def test_S2_commands_that_wait_when_the_process_ends_are_answered() -> None:
    """A pause that waits for an endless forward is refused by the drain that a signal begins."""
    with fake_serve("endless", drain_timeout_s=0.3) as server:
        async with PairClient(server.endpoint, timeout_s=10) as client:
            await open_request(client, "endless")
            pausing = asyncio.create_task(client.pause("wait"))
            await client.ping()
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(AioprefillError) as caught:
                await pausing
            assert not isinstance(caught.value, WireError), "it was answered, not lost"
        assert await asyncio.to_thread(server.wait) == 0


@pytest.mark.asyncio
async def test_S3_a_lost_device_answers_its_requests_and_ends_the_process_with_1() -> None:
    """Each open request gets an answer, the one on the device by the error's name, which is logged too."""
    with fake_serve("lost") as server:
        async with PairClient(server.endpoint, timeout_s=10) as client:
            await client.pause()
            streams = [client.submit([n] * 64, handoff=False) for n in range(3)]
            await client.ping()
            await client.resume()
            outcomes = await asyncio.gather(*(s.first_token() for s in streams), return_exceptions=True)
        assert isinstance(outcomes[0], DeviceError) and outcomes[0].name == "cudaErrorIllegalAddress"
        for outcome in outcomes[1:]:
            assert isinstance(outcome, AioprefillError) and not isinstance(outcome, WireError)
            assert "cudaErrorIllegalAddress" in str(outcome)
        assert await asyncio.to_thread(server.wait) == 1
        assert any("the loop stopped: cudaErrorIllegalAddress" in line for line in server.lines)


def test_the_process_tells_where_it_serves() -> None:
    """The support of these tests works: a process that has ended says so at once."""
    with fake_serve("quick") as server:
        assert isinstance(server, FakeServe) and server.endpoint.startswith("tcp://127.0.0.1:")
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
