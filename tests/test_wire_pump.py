"""The pump: no stall, no loss, bounded, and one bad message or peer hurts nobody else."""

from __future__ import annotations

import asyncio
import time

import pytest
import zmq
from wire_support import LOOPS, run, wait_until, zmq_context

from aioprefill.errors import WireError
from aioprefill.wire.outbox import Offer, Outbox
from aioprefill.wire.pump import ZmqPump

__all__ = ["run"]


def bind(socket, **options):
    """Bind to any loopback port, with ROUTER_MANDATORY on a ROUTER; returns the endpoint."""
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    return f"tcp://127.0.0.1:{port}"


def nothing(frames):
    """An `on_message` that ignores the message."""


@LOOPS
def test_interleaved_bursts_both_ways_arrive_completely_and_in_order(run):
    """10 bursts of 1,000 each way, each reply sent inside the handler: nothing is lost or stalls."""

    async def scenario():
        async with zmq_context() as context:
            router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
            dealer.connect(bind(router))
            seen, replies = [], []

            def on_request(frames):
                seen.append(int(frames[1]))
                server.send([frames[0], frames[1]])

            server = ZmqPump(router, on_request, name="server")
            client = ZmqPump(dealer, lambda frames: replies.append(int(frames[0])), name="client")
            server.start()
            client.start()
            for burst in range(10):
                for i in range(1000):
                    client.send([b"%d" % (burst * 1000 + i)])
                await asyncio.sleep(0)
            await wait_until(lambda: len(replies) == 10_000, "10,000 replies")
            assert seen == replies == list(range(10_000))
            assert client.counters.sent == server.counters.received == server.counters.sent == 10_000
            server.close()
            client.close()

    run(scenario())


@LOOPS
def test_messages_that_came_before_start_are_read(run):
    """The descriptor does not report old mail, so start() must look by itself."""

    async def scenario():
        async with zmq_context() as context:
            pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            push.connect(bind(pull))
            for i in range(100):
                push.send(b"%d" % i)
            assert pull.poll(5000) == zmq.POLLIN
            got = []
            pump = ZmqPump(pull, got.append, name="pull", batch=7)
            pump.start()
            await wait_until(lambda: len(got) == 100, "100 messages")
            pump.close()

    run(scenario())


@LOOPS
def test_messages_sent_before_start_and_before_the_peer_exists_are_delivered(run):
    """A refused send stays in the outbox and goes out when the peer comes."""

    async def scenario():
        async with zmq_context() as context:
            push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
            endpoint = bind(push)
            sender = ZmqPump(push, nothing, name="push")
            for i in range(2000):
                sender.send([b"%d" % i])
            sender.start()
            await wait_until(lambda: sender.counters.turns > 0, "a turn")
            assert (sender.waiting, sender.counters.errors) == (2000, 0)
            got = []
            receiver = ZmqPump(pull, got.append, name="pull")
            receiver.start()
            pull.connect(endpoint)
            await wait_until(lambda: len(got) == 2000, "2,000 messages")
            sender.close()
            receiver.close()

    run(scenario())


def test_other_callbacks_run_during_a_flood(run):
    """A turn is bounded in time: another task runs again and again while 20,000 messages are read."""

    async def scenario():
        async with zmq_context() as context:
            pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            pull.setsockopt(zmq.RCVHWM, 0)
            push.setsockopt(zmq.SNDHWM, 0)
            push.connect(bind(pull))
            for _ in range(20_000):
                push.send(b"x" * 100)
            got, seen_at = [], []

            def slow(frames):
                got.append(1)
                if len(got) % 1000 == 0:
                    time.sleep(0.001)

            pump = ZmqPump(pull, slow, name="pull", batch=1_000_000)
            pump.start()
            while len(got) < 20_000:
                await asyncio.sleep(0)
                seen_at.append(len(got))
            # neither the unlimited batch nor the slow handler kept the loop from turning
            assert len(set(seen_at)) > 5
            pump.close()

    run(scenario())


def test_idle_pump_takes_no_turns(run):
    """No busy spin, also with a message that nobody takes."""

    async def scenario():
        async with zmq_context() as context:
            push = context.socket(zmq.PUSH)
            bind(push)
            pump = ZmqPump(push, nothing, name="push")
            pump.start()
            pump.send([b"nobody is there"])
            await asyncio.sleep(0.05)
            before = pump.counters.turns
            await asyncio.sleep(0.2)
            assert pump.counters.turns - before <= 1
            pump.close()

    run(scenario())


def test_outbox_is_bounded_and_says_so(run):
    """The message behind the limit is refused with a WireError that names the pump."""

    async def scenario():
        async with zmq_context() as context:
            push = context.socket(zmq.PUSH)
            bind(push)
            pump = ZmqPump(push, nothing, name="to the moon", max_outbox=10)
            pump.start()
            for _ in range(10):
                pump.send([b"x"])
            with pytest.raises(WireError, match=r"to the moon: outbox full \(10 messages"):
                pump.send([b"x"])
            assert pump.waiting == 10
            pump.close()

    run(scenario())


def test_handler_exception_is_reported_and_the_pump_goes_on(run):
    """One bad message reaches on_error (default: the loop's handler); the next ones are handled."""

    async def scenario():
        async with zmq_context() as context:
            pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            push.connect(bind(pull))
            reported, got = [], []
            asyncio.get_running_loop().set_exception_handler(lambda _, ctx: reported.append(ctx))

            def handler(frames):
                got.append(frames[0])
                if frames[0] == b"bad":
                    raise ValueError("no")

            pump = ZmqPump(pull, handler, name="fragile")
            pump.start()
            for body in (b"bad", b"good"):
                push.send(body)
            await wait_until(lambda: len(got) == 2, "both messages")
            assert "fragile" in reported[0]["message"]
            assert isinstance(reported[0]["exception"], ValueError)
            assert pump.counters.errors == 1
            pump.close()

    run(scenario())


def test_closing_inside_a_handler_ends_the_pump(run):
    """No message is handled and no socket call is made after close()."""

    async def scenario():
        async with zmq_context() as context:
            pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            push.connect(bind(pull))
            for _ in range(10):
                push.send(b"x")
            assert pull.poll(5000)
            got = []
            pump = ZmqPump(pull, lambda frames: (got.append(frames), pump.close()), name="once")
            pump.start()
            await wait_until(lambda: pump.closed, "close")
            await asyncio.sleep(0)
            assert len(got) == 1
            pump.close()
            with pytest.raises(WireError, match="closed"):
                pump.send([b"x"])
            with pytest.raises(WireError, match="closed"):
                pump.start()

    run(scenario())


def test_close_with_linger_delivers_what_was_queued(run):
    """A farewell sent in the same turn as close() still arrives."""

    async def scenario():
        async with zmq_context() as context:
            pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            push.connect(bind(pull))
            got = []
            receiver = ZmqPump(pull, got.append, name="pull")
            receiver.start()
            sender = ZmqPump(push, nothing, name="push")
            sender.start()
            await wait_until(lambda: sender.counters.turns, "a turn")
            sender.send([b"farewell"])
            sender.close(linger_ms=1000)
            await wait_until(lambda: got == [[b"farewell"]], "the farewell")
            receiver.close()

    run(scenario())


def test_message_to_a_vanished_router_peer_is_dropped_and_counted(run):
    """EHOSTUNREACH is no error of the pump, and others still get their messages."""

    async def scenario():
        async with zmq_context() as context:
            router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, b"here")
            dealer.connect(bind(router))
            hello, got = [], []
            server = ZmqPump(router, hello.append, name="server")
            client = ZmqPump(dealer, got.append, name="client")
            server.start()
            client.start()
            client.send([b"hi"])
            await wait_until(lambda: hello, "the hello")
            server.send([b"vanished", b"1"])
            server.send([b"vanished", b"2"])
            server.send([b"here", b"3"])
            await wait_until(lambda: got == [[b"3"]], "the other peer's message")
            assert (server.counters.unreachable, server.counters.errors, server.waiting) == (2, 0, 0)
            server.close()
            client.close()

    run(scenario())


def test_one_full_router_peer_does_not_hold_up_another_and_is_served_later(run):
    """Messages for a peer that does not read wait in its own lane, without a spin, until it reads."""

    async def scenario():
        async with zmq_context() as context:
            router = context.socket(zmq.ROUTER)
            endpoint = bind(router, SNDHWM=2, SNDBUF=4096)
            seen = []
            server = ZmqPump(router, lambda frames: seen.append(frames[0]), name="server")
            server.start()
            stuck, alive = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
            for socket, identity in ((stuck, b"stuck"), (alive, b"alive")):
                socket.setsockopt(zmq.IDENTITY, identity)
                socket.setsockopt(zmq.RCVHWM, 2)
                socket.setsockopt(zmq.RCVBUF, 4096)
                socket.connect(endpoint)
                socket.send(b"hi")
            await wait_until(lambda: len(seen) == 2, "both hellos")
            for _ in range(200):
                server.send([b"stuck", b"x" * 100_000])
            got = []
            client = ZmqPump(alive, got.append, name="alive")
            client.start()
            server.send([b"alive", b"y"])
            await wait_until(lambda: got, "the other peer's message")
            assert server.waiting > 100
            before = server.counters.turns
            await asyncio.sleep(0.1)
            assert server.counters.turns - before < 40
            late = []
            reader = ZmqPump(stuck, late.append, name="stuck")
            reader.start()
            await wait_until(lambda: len(late) == 200, "all messages of the peer that reads again")
            for pump in (server, client, reader):
                pump.close()

    run(scenario())


@LOOPS
def test_watch_connections_reports_both_ends(run):
    """Connect and disconnect are reported on the side that stays."""

    async def scenario():
        async with zmq_context() as context:
            router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
            events = []
            server = ZmqPump(router, nothing, name="server")
            server.watch_connections(lambda e: events.append("up"), lambda e: events.append("down"))
            server.start()
            dealer.connect(bind(router))
            await wait_until(lambda: events == ["up"], "connected")
            dealer.close(linger=0)
            await wait_until(lambda: events == ["up", "down"], "disconnected")
            server.close()

    run(scenario())


def test_watch_connections_reports_a_refused_handshake(run):
    """A plain client of a CURVE server learns why it gets no answer."""

    async def scenario():
        async with zmq_context() as context:
            router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
            _, secret = zmq.curve_keypair()
            router.curve_server, router.curve_secretkey = True, secret
            endpoint = bind(router)
            refused = []
            server = ZmqPump(router, nothing, name="server")
            server.watch_connections(nothing, nothing, lambda e, why: refused.append(why))
            server.start()
            dealer.connect(endpoint)
            await wait_until(lambda: refused, "a refusal")
            assert "CURVE" in refused[0]
            server.close()

    run(scenario())


def test_outbox_lane_bounds_and_order():
    """A peer's lane is bounded by itself; a blocked lane keeps its order; a gone one is emptied."""
    outbox = Outbox("box", by_peer=True, max_messages=10, max_per_lane=2, max_bytes=1000)
    for body in (b"1", b"2"):
        outbox.push([b"a", body])
    with pytest.raises(WireError, match="peer 61 does not read"):
        outbox.push([b"a", b"3"])
    outbox.push([b"b", b"4"])
    outbox.push([b"c", b"5"])
    sent = []

    def offer(frames):
        if frames[0] == b"a":
            return Offer.BLOCKED
        if frames[0] == b"c":
            return Offer.GONE
        sent.append(frames[1])
        return Offer.SENT

    assert outbox.drain(offer, 100) == (1, 1)
    assert (sent, outbox.messages, outbox.bytes, outbox.has_blocked) == ([b"4"], 2, 4, True)
    outbox.retry_blocked()
    assert outbox.drain(lambda frames: sent.append(frames[1]) or Offer.SENT, 1) == (1, 0)
    assert outbox.has_ready
    assert outbox.drain(lambda frames: sent.append(frames[1]) or Offer.SENT, 1) == (1, 0)
    assert sent == [b"4", b"1", b"2"]
    assert (outbox.messages, outbox.bytes, outbox.has_ready, outbox.has_blocked) == (0, 0, False, False)


def test_outbox_is_bounded_in_bytes():
    """Large messages cannot fill the memory although there are few of them."""
    outbox = Outbox("box", by_peer=False, max_messages=10, max_per_lane=10, max_bytes=100)
    outbox.push([b"x" * 60])
    with pytest.raises(WireError, match="60 bytes"):
        outbox.push([b"x" * 41])
    outbox.push([b"x" * 40])
    assert outbox.drop(b"") == 2
    assert (outbox.messages, outbox.bytes, outbox.has_ready) == (0, 0, False)
