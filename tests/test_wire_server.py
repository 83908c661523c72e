"""The server: hello first, versions, rubbish, slow and vanished clients; none of them hurts another."""

from __future__ import annotations

import asyncio
import socket as tcp

import msgspec
import pytest
import zmq
from wire_fakes import ANY_PORT, FAST_HEARTBEAT, RawClient, welcome
from wire_support import LOOPS, run, wait_until, zmq_context

from aioprefill.errors import ConfigError, QueueFull, WireError
from aioprefill.wire.messages import (
    VERSION,
    Abort,
    Failed,
    FirstToken,
    Hello,
    Ping,
    Pong,
    Refused,
    Stats,
    StatsQuery,
    Welcome,
)
from aioprefill.wire.server import WireServer
from aioprefill.wire.sockets import SocketLimits

__all__ = ["run"]
HELLO = Hello("client", "c1")


class Echo:
    """A server whose handler answers stats and remembers the rest."""

    def __init__(self, endpoint=ANY_PORT, **options):
        self.aborts, self.gone, self.hellos = [], [], []
        self.server = WireServer(
            endpoint,
            {StatsQuery: self.on_stats, Abort: self.on_abort},
            welcome=welcome(),
            on_hello=lambda identity, hello: self.hellos.append((identity, hello)),
            on_gone=self.gone.append,
            **options,
        )

    def on_stats(self, identity, message):
        self.server.send(identity, Stats({"n": 1}))

    def on_abort(self, identity, message):
        self.aborts.append(message.request_id)
        if message.request_id == "full":
            raise QueueFull("no room", retry_after_s=2.0)
        if message.request_id == "bug":
            raise ZeroDivisionError("a bug")


@LOOPS
def test_hello_is_welcomed_and_messages_are_dispatched(run):
    """Welcome, the on_hello callback, answers of handlers, and Pong."""

    async def scenario():
        echo = Echo()
        async with echo.server, zmq_context() as context:
            client = RawClient(context, echo.server.endpoint)
            client.send(HELLO, StatsQuery(), Ping("c1"), Pong("c1"))
            await wait_until(lambda: len(client.got) == 3, "three answers")
            assert client.got == [welcome(), Stats({"n": 1}), Pong("e1")]
            assert echo.hellos[0][1] == HELLO
            assert echo.server.clients == 1
            client.pump.close()

    run(scenario())


def test_other_version_is_refused_naming_both(run):
    """A client of another protocol version is told both versions, and gets nothing else."""

    async def scenario():
        echo = Echo()
        async with echo.server, zmq_context() as context:
            client = RawClient(context, echo.server.endpoint)
            client.send(Hello("client", "c1", version=VERSION + 7), StatsQuery())
            await wait_until(lambda: len(client.got) == 2, "two refusals")
            refusal = client.got[0]
            assert refusal.code == "wire"
            assert f"version {VERSION} " in refusal.message
            assert f"version {VERSION + 7}" in refusal.message
            assert client.got[1].code == "hello_required"
            assert echo.server.counters.wrong_version == 1
            client.pump.close()

    run(scenario())


def test_message_without_hello_is_refused(run):
    """How a client learns that its server was restarted."""

    async def scenario():
        echo = Echo()
        async with echo.server, zmq_context() as context:
            client = RawClient(context, echo.server.endpoint)
            client.send(Abort("a"))
            await wait_until(lambda: client.got, "an answer")
            assert client.got[0].code == "hello_required"
            assert echo.aborts == []
            client.pump.close()

    run(scenario())


RUBBISH = [
    b"",
    b"\xc1rubbish",
    b"\x00" * 100_000,
    msgspec.msgpack.encode({"type": "from the future", "x": 1}),
    msgspec.msgpack.encode({"type": "abort", "request_id": [1, 2]}),
    msgspec.msgpack.encode(["not", "a", "map"]),
]


def test_rubbish_is_answered_and_counted_and_hurts_nobody(run):
    """Malformed, unknown and wrongly framed messages: the sender and others are served on."""

    async def scenario():
        echo = Echo()
        async with echo.server, zmq_context() as context:
            bad, good = (RawClient(context, echo.server.endpoint) for _ in range(2))
            bad.send(HELLO, *RUBBISH)
            bad.pump.send([b"two", b"frames"])
            bad.pump.send([b"", b"a REQ socket would send this"])
            bad.send(StatsQuery())
            good.send(HELLO, StatsQuery())
            await wait_until(lambda: bad.of(Stats) and good.of(Stats), "both served")
            assert len(bad.of(Failed)) == echo.server.counters.malformed == len(RUBBISH) + 2
            assert {failed.code for failed in bad.of(Failed)} == {"wire"}
            assert good.of(Failed) == []
            bad.pump.close()
            good.pump.close()

    run(scenario())


def test_message_that_this_server_does_not_take_is_answered(run):
    """A well-formed message of the wrong kind names the kind, and its request."""

    async def scenario():
        echo = Echo()
        async with echo.server, zmq_context() as context:
            client = RawClient(context, echo.server.endpoint)
            client.send(HELLO, Refused("room", "why"), FirstToken("r9", 1, 0.0, (), 1, 0, 0.0, 0.0))
            await wait_until(lambda: len(client.of(Failed)) == 2, "two failures")
            assert "no Refused messages" in client.of(Failed)[0].message
            assert client.of(Failed)[1].request_id == "r9"
            assert echo.server.counters.unexpected == 2
            client.pump.close()

    run(scenario())


def test_oversized_message_costs_its_sender_the_connection_and_nobody_else(run):
    """Its requests are aborted by on_gone; other clients notice nothing."""

    async def scenario():
        echo = Echo(limits=SocketLimits(max_message_bytes=10_000))
        async with echo.server, zmq_context() as context:
            bad, good = (RawClient(context, echo.server.endpoint) for _ in range(2))
            for client in (bad, good):
                client.send(HELLO)
                await wait_until(lambda: client.of(Welcome), "welcome")  # noqa: B023
            bad.send(b"x" * 20_000)
            await wait_until(lambda: echo.gone == [echo.hellos[0][0]], "the sender is gone")
            good.send(StatsQuery())
            await wait_until(lambda: good.of(Stats), "the other one is served")
            bad.pump.close()
            good.pump.close()

    run(scenario())


def test_error_of_a_handler_is_answered_and_a_bug_is_reported(run):
    """Our errors travel with their facts; other exceptions reach the loop's handler, too."""

    async def scenario():
        reported = []
        asyncio.get_running_loop().set_exception_handler(lambda _, ctx: reported.append(ctx["exception"]))
        echo = Echo()
        async with echo.server, zmq_context() as context:
            client = RawClient(context, echo.server.endpoint)
            client.send(HELLO, Abort("full"), Abort("bug"), StatsQuery())
            await wait_until(lambda: client.of(Stats), "service goes on")
            full, bug = client.of(Failed)
            assert (full.code, full.retry_after_s, full.request_id) == ("queue_full", 2.0, "full")
            assert (bug.code, bug.request_id) == ("internal", "bug")
            assert isinstance(reported[0], ZeroDivisionError)
            client.pump.close()

    run(scenario())


@LOOPS
def test_client_that_closes_is_gone_once_and_soon(run):
    """on_gone comes for the one that left, exactly once, and not for the one that stays."""

    async def scenario():
        echo = Echo()
        async with echo.server, zmq_context() as context:
            leaver, stayer = (RawClient(context, echo.server.endpoint) for _ in range(2))
            for client in (leaver, stayer):
                client.send(HELLO)
                await wait_until(lambda: client.of(Welcome), "welcome")  # noqa: B023
            leaver.pump.close()
            await wait_until(lambda: echo.gone, "gone", timeout_s=2)
            stayer.send(StatsQuery())
            await wait_until(lambda: stayer.of(Stats), "the other one is served")
            assert echo.gone == [echo.hellos[0][0]]
            assert echo.server.clients == 1
            assert len(stayer.of(Ping)) >= 1  # that is how the server found out who left
            stayer.pump.close()

    run(scenario())


def test_client_that_takes_over_an_identity_replaces_the_old_process(run):
    """Same identity, new epoch: the old process's requests are given up first."""

    async def scenario():
        echo = Echo()
        async with echo.server, zmq_context() as context:
            clients = []
            for epoch in ("old", "new"):
                client = RawClient(context, echo.server.endpoint)
                clients.append(client)
                client.socket.disconnect(echo.server.endpoint)
                client.socket.setsockopt(zmq.IDENTITY, b"me")
                client.socket.connect(echo.server.endpoint)
                client.send(Hello("client", epoch))
                await wait_until(lambda: client.of(Welcome), "welcome")  # noqa: B023
            assert echo.gone == [b"me"]
            assert echo.server.clients == 1
            for client in clients:
                client.pump.close()

    run(scenario())


def test_silent_connection_is_gone_after_the_heartbeat(run):
    """A peer whose connection stays open but answers no heartbeat is given up."""

    async def scenario():
        echo = Echo(limits=FAST_HEARTBEAT)
        async with echo.server, zmq_context() as context:
            client = RawClient(context, "tcp://127.0.0.1:1")
            port = int(echo.server.endpoint.rpartition(":")[2])
            async with freezable_proxy(port) as (proxy_port, freeze):
                client.socket.connect(f"tcp://127.0.0.1:{proxy_port}")
                client.send(HELLO, HELLO)
                await wait_until(lambda: client.of(Welcome), "welcome")
                freeze.set()
                await wait_until(lambda: echo.gone, "gone", timeout_s=3)
            client.pump.close()

    run(scenario())


class freezable_proxy:
    """A TCP proxy that stops forwarding, without closing anything, once `freeze` is set."""

    def __init__(self, port):
        self.port, self.freeze, self.writers = port, asyncio.Event(), []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1], self.freeze

    async def accept(self, reader, writer):
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers += [writer, there_writer]
        self.tasks = [
            asyncio.create_task(self.copy(reader, there_writer)),
            asyncio.create_task(self.copy(there_reader, writer)),
        ]

    async def copy(self, reader, writer):
        while data := await reader.read(65536):
            if self.freeze.is_set():
                await asyncio.Event().wait()
            writer.write(data)

    async def __aexit__(self, *exc):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for writer in self.writers:
            writer.close()
        self.server.close()
        await self.server.wait_closed()


def test_client_that_does_not_read_is_dropped_and_told(run):
    """Its lane is bounded; it is gone for the server, and others are served."""

    async def scenario():
        limits = SocketLimits(send_queue=2, receive_queue=2)
        echo = Echo(limits=limits, max_outbox=80)
        async with echo.server, zmq_context() as context:
            slow = context.socket(zmq.DEALER)
            slow.setsockopt(zmq.RCVHWM, 2)
            slow.connect(echo.server.endpoint)
            slow.send(msgspec.msgpack.encode(HELLO))
            await wait_until(lambda: echo.hellos, "hello")
            identity = echo.hellos[0][0]
            for _ in range(2000):
                echo.server.send(identity, Stats({"x": "y" * 20_000}))
                if echo.gone:
                    break
                await asyncio.sleep(0)
            assert echo.gone == [identity]
            assert echo.server.counters.slow_clients == 1
            good = RawClient(context, echo.server.endpoint)
            good.send(HELLO, StatsQuery())
            await wait_until(lambda: good.of(Stats), "the other one is served")
            codes = []
            while "hello_required" not in codes:
                await wait_until(lambda: slow.poll(0), "a message for the slow one")
                codes.append(msgspec.msgpack.decode(slow.recv()).get("code"))
            good.pump.close()

    run(scenario())


def test_number_of_clients_is_bounded(run):
    """One more than allowed is told so; a place that becomes free is given away."""

    async def scenario():
        echo = Echo(max_clients=1)
        async with echo.server, zmq_context() as context:
            first, second = (RawClient(context, echo.server.endpoint) for _ in range(2))
            first.send(HELLO)
            await wait_until(lambda: first.of(Welcome), "welcome")
            second.send(HELLO)
            await wait_until(lambda: second.got, "an answer")
            assert "takes no more" in second.got[0].message
            first.pump.close()
            await wait_until(lambda: echo.server.clients == 0, "the first is gone")
            second.send(HELLO)
            await wait_until(lambda: second.of(Welcome), "welcome")
            second.pump.close()

    run(scenario())


def test_port_in_use_names_the_port_and_the_way_out(run):
    """A ConfigError, and nothing of the failed server stays open."""

    async def scenario():
        with tcp.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            server = Echo(f"tcp://127.0.0.1:{port}").server
            with pytest.raises(ConfigError, match=rf"port {port} is in use.*another port"):
                server.start()
            await server.aclose()

    run(scenario())


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("127.0.0.1:5555", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:http", "expected tcp://HOST:PORT"),
        ("http://127.0.0.1:80", "expected tcp://HOST:PORT"),
        ("tcp://0.0.0.0:0", "aioprefill keygen"),
    ],
)
def test_bad_endpoint_is_a_config_error(run, endpoint, text):
    """Malformed, or off loopback without keys."""

    async def scenario():
        with pytest.raises(ConfigError, match=text):
            Echo(endpoint).server.start()

    run(scenario())


def test_close_is_idempotent_and_sending_afterwards_is_an_error(run):
    """Also before start; and a last message still goes out within the linger."""

    async def scenario():
        unstarted = Echo().server
        await unstarted.aclose()
        with pytest.raises(WireError, match="not serving"):
            unstarted.send(b"x", Pong("e"))
        echo = Echo()
        echo.server.start()
        async with zmq_context() as context:
            client = RawClient(context, echo.server.endpoint)
            client.send(HELLO)
            await wait_until(lambda: echo.hellos, "hello")
            echo.server.send(echo.hellos[0][0], Stats({"last": "words"}))
            await echo.server.aclose()
            await echo.server.aclose()
            await wait_until(lambda: client.of(Stats), "the last words")
            with pytest.raises(WireError, match="closed"):
                echo.server.send(echo.hellos[0][0], Pong("e"))
            assert echo.server.closed
            client.pump.close()

    run(scenario())
