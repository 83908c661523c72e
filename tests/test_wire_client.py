"""The client: streams, errors by class, servers that die, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq
from wire_fakes import FAST_HEARTBEAT, FakeDecode, FakeScheduler, welcome
from wire_support import LOOPS, run, wait_until, zmq_context

from aioprefill.errors import ConfigError, DeviceError, InvalidRequest, QueueFull, RequestAborted, WireError
from aioprefill.sampling_params import SamplingParams
from aioprefill.wire.client import PairClient
from aioprefill.wire.connection import Connection
from aioprefill.wire.messages import Accepted, Attach, Finished, Stats, Token, encode
from aioprefill.wire.server import WireServer

__all__ = ["run"]


@asynccontextmanager
async def pair(**options):
    """A scheduler, a decode worker, and a client of both."""
    scheduler, decode = FakeScheduler(), FakeDecode()
    async with (
        scheduler.service() as service,
        decode.server,
        PairClient(service.endpoint, decode.server.endpoint, **options) as client,
    ):
        yield scheduler, decode, client


async def submitted(scheduler, decode, client, request_id="r", **options):
    """A stream whose request and attachment have arrived."""
    stream = client.submit([1, 2, 3], request_id=request_id, **options)
    await wait_until(lambda: request_id in scheduler.handles and request_id in decode.attached, "the request")
    return stream


@LOOPS
def test_whole_life_of_a_request(run):
    """First token, hand-off, tokens in order from the decode worker, times; then nothing is kept."""

    async def scenario():
        async with pair() as (scheduler, decode, client):
            options = {"sampling": SamplingParams(seed=1), "max_new_tokens": 4, "ignore_eos": True}
            stream = await submitted(scheduler, decode, client, **options)
            request = scheduler.requests["r"]
            assert request.token_ids.tolist() == [1, 2, 3]
            assert request.peer == decode.server.endpoint
            assert (request.sampling, request.max_new_tokens, request.ignore_eos) == tuple(options.values())
            scheduler.publish("r")
            assert (await stream.first_token()).token_id == 7
            scheduler.finish("r")
            assert (await stream.transferred()).kv_bytes == 4096
            decode.stream("r", [7, 8, 9])
            assert [token async for token in stream] == [7, 8, 9]
            assert (await stream.finished()).reason == "eos"
            times = stream.times
            assert times.submitted_s <= times.accepted_s <= times.first_token_s <= times.transferred_s
            assert len(times.tokens_s) == 3
            assert times.tokens_s[-1] <= times.finished_s
            assert client.live == 0
            stream.abort()  # too late: does nothing
            assert decode.aborted == scheduler.aborts == []

    run(scenario())


def test_tokens_may_come_before_the_prefill_side_reports_the_handoff(run):
    """The two connections are independent: neither half waits for the other."""

    async def scenario():
        async with pair() as (scheduler, decode, client):
            stream = await submitted(scheduler, decode, client)
            decode.stream("r", [7, 8])
            assert [token async for token in stream] == [7, 8]
            assert client.live == 1
            scheduler.publish("r")
            scheduler.finish("r")
            await stream.transferred()
            assert client.live == 0

    run(scenario())


def test_without_decode_worker_the_stream_is_the_first_token(run):
    """No hand-off is asked for, and the stream ends after one token."""

    async def scenario():
        scheduler = FakeScheduler()
        async with scheduler.service() as service, PairClient(service.endpoint) as client:
            stream = client.submit(np.array([5, 6], dtype=np.int64), request_id="r")
            await wait_until(lambda: "r" in scheduler.handles, "the request")
            assert scheduler.requests["r"].peer is None
            scheduler.publish("r", token_id=42)
            assert [token async for token in stream] == [42]
            scheduler.finish("r")
            await stream.transferred()
            assert client.live == 0
            with pytest.raises(ConfigError, match="decode_endpoint"):
                await client.ping("decode")

    run(scenario())


def test_peer_address_may_differ_and_handoff_may_be_declined(run):
    """The prefill server is told `peer`; handoff=False sends neither peer nor Attach."""

    async def scenario():
        async with pair(peer="tcp://10.1.1.1:7") as (scheduler, decode, client):
            await submitted(scheduler, decode, client, "with")
            client.submit([1], request_id="without", handoff=False)
            await wait_until(lambda: "without" in scheduler.handles, "the request")
            assert scheduler.requests["with"].peer == "tcp://10.1.1.1:7"
            assert scheduler.requests["without"].peer is None
            assert "without" not in decode.attached

    run(scenario())


def test_errors_keep_their_class_and_end_the_other_half(run):
    """A refusal raises what submit raised; the decode worker is told to forget the room."""

    async def scenario():
        async with pair() as (scheduler, decode, client):
            for error in (QueueFull("full", retry_after_s=2.0), InvalidRequest("prompt", "too long")):
                scheduler.error = error
                stream = client.submit([1], request_id=error.code)
                with pytest.raises(type(error)) as caught:
                    await stream.first_token()
                assert vars(caught.value) == vars(error)
                with pytest.raises(type(error)):
                    async for _ in stream:
                        pass
            scheduler.error = None
            stream = await submitted(scheduler, decode, client)
            scheduler.publish("r")
            scheduler.handles["r"].fail(DeviceError("cudaErrorAssert", "boom", sticky=True))
            assert (await stream.first_token()).token_id == 7
            with pytest.raises(DeviceError, match="cudaErrorAssert: boom"):
                await stream.transferred()
            await wait_until(lambda: len(decode.aborted) == 3, "three rooms to be forgotten")
            assert client.live == 0

    run(scenario())


def test_abort_ends_the_stream_at_once_and_tells_both_servers(run):
    """Also while somebody iterates; a second abort does nothing."""

    async def scenario():
        async with pair() as (scheduler, decode, client):
            stream = await submitted(scheduler, decode, client)
            decode.server.send(decode.attached["r"], Token("r", 0, 7))
            assert await anext(stream) == 7
            reader = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            stream.abort()
            stream.abort()
            with pytest.raises(RequestAborted, match="request r was aborted"):
                await reader
            assert client.live == 0
            await wait_until(lambda: scheduler.aborts and decode.aborted == ["r"], "both servers told")
            again = await submitted(scheduler, decode, client)  # the id is free again, at both ends
            assert not again.prefill_done

    run(scenario())


def test_cancelled_wait_leaves_the_request_be(run):
    """A timeout around one wait is not an abort."""

    async def scenario():
        async with pair() as (scheduler, decode, client):
            stream = await submitted(scheduler, decode, client)
            for wait in (stream.first_token, stream.transferred, stream.finished, stream.__anext__):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.002):
                        await wait()
            scheduler.publish("r")
            decode.stream("r", [7])
            assert (await stream.first_token()).token_id == 7
            assert await anext(stream) == 7
            assert scheduler.aborts == []

    run(scenario())


@pytest.mark.parametrize(
    "messages",
    [
        [Token("r", 1, 5)],
        [Token("r", 0, 5), Token("r", 0, 5)],
        [Token("r", 0, 5), Token("r", 1, 5), Token("r", 2, 5)],
        [Token("r", 0, 5), Finished("r", "eos", 2)],
    ],
    ids=["gap", "repeated", "too many", "cut short"],
)
def test_decode_worker_that_loses_tokens_fails_the_stream(run, messages):
    """Never a silent gap: the error names the decode worker."""

    async def scenario():
        async with pair() as (scheduler, decode, client):
            stream = await submitted(scheduler, decode, client, max_new_tokens=2)
            for message in messages:
                decode.server.send(decode.attached["r"], message)
            with pytest.raises(WireError, match=decode.server.endpoint):
                await stream.finished()
            assert client.live == 0
            await wait_until(lambda: scheduler.aborts and decode.aborted, "both servers told")

    run(scenario())


def test_bad_arguments_are_invalid_requests(run):
    """Found before anything is sent."""

    async def scenario():
        async with pair() as (_scheduler, _decode, client):
            for ids in ([-1], [1 << 32], [1.5], ["x"]):
                with pytest.raises(InvalidRequest, match="prompt"):
                    client.submit(ids)
            client.submit([1], request_id="twice")
            with pytest.raises(InvalidRequest, match="live already"):
                client.submit([1], request_id="twice")
            assert client.live == 1
        with pytest.raises(WireError, match="not open"):
            client.submit([1])

    run(scenario())


@LOOPS
def test_stats_and_ping_of_both_servers(run):
    """Many at once are answered in order."""

    async def scenario():
        async with pair() as (_, _decode, client):
            answers = await asyncio.gather(*(client.stats() for _ in range(50)))
            assert answers == [{"live": 0, "ratio": 0.5, "nothing": "None"}] * 50
            assert 0 < await client.ping() < 5
            assert 0 < await client.ping("decode") < 5
            assert client.welcome() == welcome()
            assert client.welcome("decode").role == "decode"

    run(scenario())


def test_question_without_answer_is_an_error_and_does_not_shift_the_next(run):
    """A late answer to a question that was given up is not taken for the next question's."""

    async def scenario():
        asked = []
        server = WireServer("tcp://127.0.0.1:0", {}, welcome=welcome())
        async with server, PairClient(server.endpoint, timeout_s=0.1) as client:
            server._dispatch = lambda identity, message: asked.append(identity)
            with pytest.raises(WireError, match=r"no answer from tcp://.* within 0.1 s"):
                await client.stats()
            client._timeout_s = 5
            second = asyncio.create_task(client.stats())
            await wait_until(lambda: len(asked) == 2, "both questions")
            server.send(asked[0], Stats({"n": 1}))
            server.send(asked[0], Stats({"n": 2}))
            assert await second == {"n": 2}

    run(scenario())


def test_no_server_is_an_error_that_names_the_endpoint_and_the_command(run):
    """For either side; the client that could not enter leaves nothing open."""

    async def scenario():
        with pytest.raises(WireError, match=r"no answer from tcp://127.0.0.1:1 .*`aioprefill serve` running"):
            await PairClient("tcp://127.0.0.1:1", timeout_s=0.1).__aenter__()
        async with FakeScheduler().service() as service:
            with pytest.raises(WireError, match=r"127.0.0.1:1 .*`aioprefill decode` running"):
                await PairClient(service.endpoint, "tcp://127.0.0.1:1", timeout_s=0.1).__aenter__()
        with pytest.raises(ConfigError, match="aioprefill keygen"):
            await PairClient("tcp://10.0.0.1:5").__aenter__()

    run(scenario())


def test_server_of_another_version_is_an_error_with_its_words(run, monkeypatch):
    """The server's refusal, which names both versions, is what the caller sees."""

    async def scenario():
        async with FakeScheduler().service() as service:
            monkeypatch.setattr("aioprefill.wire.server.VERSION", 99)
            with pytest.raises(WireError, match=r"speaks version 99 .* version 1: install the same"):
                await PairClient(service.endpoint).__aenter__()

    run(scenario())


@LOOPS
def test_server_that_shuts_down_fails_requests_and_is_found_again(run):
    """In one process: pending requests end with the server's words, and new ones work after a restart."""

    async def scenario():
        scheduler, decode = FakeScheduler(), FakeDecode()
        service = scheduler.service()
        service.start()
        async with decode.server, PairClient(service.endpoint, decode.server.endpoint) as client:
            stream = await submitted(scheduler, decode, client)
            await service.aclose()
            with pytest.raises(RequestAborted, match="shutting down"):
                await stream.first_token()
            other = FakeScheduler()
            async with other.service(service.endpoint, welcome=welcome(epoch="e2")):
                stream = await submitted(other, decode, client, "again")
                other.publish("again")
                assert (await stream.first_token()).token_id == 7
                assert client.welcome().epoch == "e2"

    run(scenario())


def test_decode_worker_that_goes_away_fails_its_streams_and_aborts_their_prefill(run):
    """The error names the decode endpoint; first-token-only requests are not touched."""

    async def scenario():
        async with pair() as (scheduler, decode, client):
            stream = await submitted(scheduler, decode, client)
            alone = client.submit([1], request_id="alone", handoff=False)
            await wait_until(lambda: "alone" in scheduler.handles, "the request")
            await decode.server.aclose()
            with pytest.raises(WireError, match=f"{decode.server.endpoint}: the server went away"):
                async for _ in stream:
                    pass
            await wait_until(lambda: [name for name, _ in scheduler.aborts] == ["r"], "the abort")
            scheduler.publish("alone")
            assert (await alone.first_token()).token_id == 7

    run(scenario())


def test_prefill_server_that_goes_away_after_the_handoff_does_not_hurt_the_stream(run):
    """The decode worker has all it needs."""

    async def scenario():
        scheduler, decode = FakeScheduler(), FakeDecode()
        service = scheduler.service()
        service.start()
        async with (
            decode.server,
            PairClient(service.endpoint, decode.server.endpoint, timeout_s=0.3) as client,
        ):
            stream = await submitted(scheduler, decode, client)
            scheduler.publish("r")
            scheduler.finish("r")
            await stream.transferred()
            await service.aclose()
            with pytest.raises(WireError, match=service.endpoint):
                await client.ping()
            decode.stream("r", [7, 8])
            assert [token async for token in stream] == [7, 8]

    run(scenario())


def test_server_that_forgot_the_client_fails_its_requests(run):
    """hello_required after the hello means that the server lost its memory of us."""

    async def scenario():
        async with pair() as (scheduler, decode, client):
            stream = await submitted(scheduler, decode, client)
            decode.server.drop(decode.attached["r"], "the server did something odd")
            with pytest.raises(WireError, match="forgot this client: the server did something odd"):
                await stream.finished()
            assert decode.gone
            await submitted(scheduler, decode, client, "again")

    run(scenario())


def test_last_words_of_a_server_come_before_its_loss(run):
    """A message that arrived before the connection broke is handled, whichever is noticed first."""

    async def scenario():
        async with zmq_context() as context:
            router = context.socket(zmq.ROUTER)
            endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
            order = []
            connection = Connection(
                context, endpoint, on_message=order.append, on_lost=order.append, command="aioprefill serve"
            )
            connection.open()
            await wait_until(lambda: router.poll(0), "hello")
            identity, _ = router.recv_multipart()
            router.send_multipart([identity, encode(welcome())])
            await connection.wait_ready()
            router.send_multipart([identity, encode(Accepted("last words"))])
            assert connection._pump._socket.poll(5000)
            connection._on_disconnected(endpoint)
            assert order[0] == Accepted("last words")
            assert isinstance(order[1], WireError)
            connection.close()

    run(scenario())


@contextmanager
def server_process(port=0):
    """A server in its own process; yields it and its port, and kills it at the end."""
    script = Path(__file__).with_name("wire_server_process.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(port)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_killed_server_is_an_error_not_a_hang_and_a_restarted_one_is_used_again(run):
    """SIGKILL: every pending request and question fails within a second, naming the endpoint; the same
    client then works with a new process on the same port."""

    async def scenario():
        with server_process() as (process, port):
            endpoint = f"tcp://127.0.0.1:{port}"
            async with PairClient(endpoint, timeout_s=10) as client:
                streams = [client.submit([1]) for _ in range(20)]
                async with asyncio.timeout(10):
                    while not all(stream.times.accepted_s for stream in streams):
                        await client.ping()
                epoch = client.welcome().epoch
                process.kill()
                async with asyncio.timeout(5):
                    for stream in streams:
                        with pytest.raises(WireError, match=rf"{endpoint}: the server went away"):
                            await stream.first_token()
                assert client.live == 0
                early = client.submit([1])  # before the server is back
                process.wait()
                with server_process(port):
                    await wait_until(lambda: early.times.accepted_s, "the early request's acceptance")
                    assert client.welcome().epoch != epoch
                    assert (await client.stats())["live"] == 1

    run(scenario())


def test_connection_that_breaks_before_the_welcome_is_tried_again(run):
    """A port that takes connections and closes them, as a starting or dying server does, is no verdict:
    requests wait until the server is there. If it never comes, the error tells of it."""

    async def scenario():
        closed = []

        async def accept(reader, writer):
            closed.append(writer)
            writer.close()

        door = await asyncio.start_server(accept, "127.0.0.1", 0)
        endpoint = f"tcp://127.0.0.1:{door.sockets[0].getsockname()[1]}"
        scheduler = FakeScheduler()
        client = PairClient(endpoint, timeout_s=20)
        entering = asyncio.create_task(client.__aenter__())
        await wait_until(lambda: len(closed) >= 2, "two attempts")
        with pytest.raises(WireError, match=r"closed the connection \d+ times"):
            await PairClient(endpoint, timeout_s=0.3).__aenter__()
        stream = client.submit([1], request_id="r")
        door.close()
        await door.wait_closed()
        async with scheduler.service(endpoint):
            await entering
            await wait_until(lambda: stream.times.accepted_s, "the acceptance")
            await client.aclose()

    run(scenario())


def test_stopped_server_is_noticed_by_its_heartbeat(run):
    """SIGSTOP: no connection breaks, yet the requests fail."""

    async def scenario():
        with server_process() as (process, port):
            async with PairClient(f"tcp://127.0.0.1:{port}", limits=FAST_HEARTBEAT) as client:
                stream = client.submit([1])
                await client.ping()
                os.kill(process.pid, signal.SIGSTOP)
                async with asyncio.timeout(5):
                    with pytest.raises(WireError, match="went away"):
                        await stream.first_token()

    run(scenario())


@LOOPS
def test_closing_leaves_no_task_thread_or_descriptor(run):
    """With requests live; they fail, and the servers abort them."""

    async def scenario():
        scheduler, decode = FakeScheduler(), FakeDecode()
        async with scheduler.service() as service, decode.server:

            def held():
                """Tasks, threads (libzmq's included) and descriptors."""
                counted = (list(Path(f"/proc/self/{what}").iterdir()) for what in ("task", "fd"))
                return [len(asyncio.all_tasks()), *map(len, counted)]

            before = held()
            for cycle in range(4):  # more than the threads of an earlier test that may just be ending
                async with PairClient(service.endpoint, decode.server.endpoint) as client:
                    stream = await submitted(scheduler, decode, client, f"r{cycle}")
                    assert held()[0] == before[0]  # no tasks while working either
                with pytest.raises(WireError, match="the client was closed"):
                    await stream.first_token()
                await client.aclose()
            await wait_until(lambda: len(scheduler.aborts) == len(decode.gone) == 4, "both servers to notice")
            await wait_until(
                lambda: all(now <= was for now, was in zip(held(), before, strict=True)),
                "all to be given back",
            )

    run(scenario())


def test_many_streams_at_once(run):
    """200 requests of 50 tokens each, interleaved: every stream has its own tokens."""

    async def scenario():
        async with pair() as (scheduler, decode, client):
            streams = {f"r{i}": client.submit([i], request_id=f"r{i}", max_new_tokens=50) for i in range(200)}
            await wait_until(lambda: len(decode.attached) == 200 == len(scheduler.handles), "the requests")
            for index in range(50):
                for i, name in enumerate(streams):
                    decode.server.send(decode.attached[name], Token(name, index, i * 100 + index))
                await asyncio.sleep(0)
            for name in streams:
                decode.server.send(decode.attached[name], Finished(name, "length", 50))
                scheduler.publish(name)
                scheduler.finish(name)
            for i, stream in enumerate(streams.values()):
                assert [token async for token in stream] == [i * 100 + index for index in range(50)]
                await stream.transferred()
            assert client.live == 0

    run(scenario())


def test_attach_goes_out_before_the_request(run):
    """A decode worker that is gone is noticed when the request is made, not later."""

    async def scenario():
        order = []
        async with pair() as (_scheduler, _decode, client):
            for side in ("prefill", "decode"):
                connection = client._connections[side]
                send = connection.send
                connection.send = lambda m, send=send: (order.append(type(m)), send(m))
            client.submit([1])
            assert order[0] is Attach

    run(scenario())
