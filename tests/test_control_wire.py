"""Control over the wire: a real scheduler without a model, real sockets, several clients."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import zmq
from operations_wire import Served, served
from wire_fakes import FakeDecode, FakeScheduler, RawClient, welcome
from wire_support import LOOPS, run, wait_until, zmq_context

from aioprefill.errors import (
    ControlError,
    HostError,
    InvalidRequest,
    ModelError,
    QueueFull,
    RequestAborted,
    RequestTimeout,
    WireError,
)
from aioprefill.request import Timeouts
from aioprefill.wire.client import PairClient
from aioprefill.wire.control_desk import MAX_PER_CLIENT, MAX_UNDER_WAY, ControlDesk
from aioprefill.wire.messages import Control, ControlDone, Failed, Hello, Ping, Pong, decode, encode
from aioprefill.wire.pump import ZmqPump

__all__ = ["run"]
SOON_S = 0.1
"""What a control call may take, unless waiting is its meaning."""


def operated(run, body, engine=None, **options):
    """Run `body(served, client)` with a client of a served scheduler."""

    async def scenario():
        async with served(engine, **options) as it, PairClient(it.endpoint, timeout_s=10) as client:
            await body(it, client)

    run(scenario())


async def launched(it: Served, client: PairClient, count: int = 1):
    """Requests that are with the device, one forward each."""
    streams = []
    for number in range(count):
        stream = client.submit([number] * 64, request_id=f"r{number}", handoff=False)
        await wait_until(lambda n=number: len(it.engine.forwards) > n, "a launch")
        streams.append(stream)
    return streams


@LOOPS
def test_every_command_answers_when_it_has_taken_effect(run):
    """In turn, on an idle scheduler and within 100 ms each; the library's own answers come through."""

    async def body(it, client):
        calls = [
            (client.pause, {}),
            (client.resume, {}),
            (lambda: client.pause("retract", barrier=True), {"requeued": 0}),
            (client.resume, {}),
            (lambda: client.pause("wait"), {}),
            (client.resume, {}),
            (lambda: client.pause("abort"), {"aborted": 0}),
            (lambda: client.update_weights("/models/7"), {"weight_version": 1}),
            (client.resume, {}),
            (client.flush_cache, {"pages_freed": 0}),
            (lambda: client.abort_request("x"), {"aborted": 0}),
            (lambda: client.abort_matching(""), {"aborted": 0}),
        ]
        for call, expected in calls:
            began = time.perf_counter()
            assert await call() == expected
            assert time.perf_counter() - began < SOON_S
        assert (await client.health()).ready
        assert (await client.stats())["weight_version"] == 1
        assert await client.drain() == {"finished": 0, "dropped": 0, "dropped_ids": []}
        assert len(it.drained) == 1, "who serves is told behind the answer"
        assert (await client.health()).reason == "draining"
        with pytest.raises(ControlError, match="drains"):
            await client.pause()

    operated(run, body)


def test_bad_control_is_a_clear_error_and_serving_goes_on(run):
    """Unknown mode and command, pause while paused, resume while running, weights that do not fit."""

    async def body(it, client):
        with pytest.raises(ControlError, match="no pause mode 'sideways': say one of in_place"):
            await client.pause("sideways")
        with pytest.raises(ControlError, match="not paused"):
            await client.resume()
        await client.pause()
        with pytest.raises(ControlError, match="paused already"):
            await client.pause("retract")
        await client.resume()
        with pytest.raises(ModelError, match="holds no weights"):
            await client.update_weights("/models/other-architecture")
        with pytest.raises(ControlError, match="absolute path"):
            await client.update_weights("models/7")
        stream = client.submit([1, 2, 3], handoff=False)
        await wait_until(lambda: it.engine.forwards, "a launch")
        it.complete()
        assert (await stream.first_token()).weight_versions == (0,)

    operated(run, body)


def test_unknown_commands_of_a_raw_client_are_answered_with_their_id(run):
    """Also a wrong argument, and an id that is too long."""

    async def scenario():
        async with served() as it, zmq_context() as context:
            client = RawClient(context, it.endpoint)
            client.send(Hello("client", "c1"), Control("1", "reboot"), Control("2", "pause", {"modus": 1}))
            client.send(Control("3" * 200, "health"), Control("4", "health"))
            await wait_until(lambda: client.of(ControlDone), "the good one")
            failed = client.of(Failed)
            assert [(f.code, f.op_id) for f in failed] == [
                ("control", "1"),
                ("control", "2"),
                ("control", "3" * 128),
            ]
            assert client.of(ControlDone)[0].values == {"live": True, "ready": True, "reason": ""}
            client.pump.close()

    run(scenario())


def test_each_caller_gets_its_own_answer(run):
    """Two clients pause at once: one succeeds, the other is refused; so for the resumes."""

    async def body(it, client):
        async with PairClient(it.endpoint, timeout_s=10) as other:
            for call, text in ((PairClient.pause, "paused already"), (PairClient.resume, "not paused")):
                answers = await asyncio.gather(call(client), call(other), return_exceptions=True)
                errors = [answer for answer in answers if isinstance(answer, ControlError)]
                assert len(errors) == 1 and text in str(errors[0])
                assert {} in answers

    operated(run, body)


def test_commands_of_one_client_are_served_in_order(run):
    """Sent without waiting for answers: update, pause, resume, pause, each meets what the last one left."""

    async def body(it, client):
        calls = [client.update_weights("/models/3"), client.pause(), client.resume(), client.pause("retract")]
        assert await asyncio.gather(*calls) == [{"weight_version": 1}, {}, {}, {"requeued": 0}]
        assert (await client.health()).reason == "paused (retract)"

    operated(run, body)


def test_P6_a_barrier_waits_for_the_forward_and_holds_up_nobody(run):
    """Meanwhile stats, health, aborts and requests are answered within 100 ms; others' barriers wait too."""

    async def body(it, client):
        streams = await launched(it, client, 2)
        barrier = asyncio.create_task(client.pause(barrier=True))
        await wait_until(lambda: it.scheduler.health().reason == "pausing", "the pause's coming")
        for call in (client.health, client.stats, client.ping):
            began = time.perf_counter()
            await call()
            assert time.perf_counter() - began < SOON_S
        assert not barrier.done() and it.service.commands == 1
        it.engine.forwards[0].complete()
        await wait_until(lambda: it.scheduler.stats().paused, "the pause, at the next scheduling step")
        began = time.perf_counter()
        assert await client.abort_request("r1") == {"aborted": 1}
        assert time.perf_counter() - began < SOON_S
        assert not barrier.done(), "a forward still runs"
        it.engine.forwards[1].complete()
        await barrier
        await client.resume()
        assert (await streams[0].first_token()).token_id >= 0
        with pytest.raises(RequestAborted, match="operator"):
            await streams[1].first_token()

    operated(run, body)


def test_a_client_that_leaves_does_not_undo_its_command(run):
    """A pause of mode wait takes effect after its caller has gone; its answer goes nowhere."""

    async def body(it, client):
        await launched(it, client)
        async with PairClient(it.endpoint, timeout_s=10) as leaver:
            call = asyncio.create_task(leaver.pause("wait"))
            await wait_until(lambda: it.service.commands == 1, "the command")
        with pytest.raises(WireError, match="closed"):
            await call
        await wait_until(lambda: it.service.server.clients == 1, "the leaving")
        it.complete()
        await wait_until(lambda: it.scheduler.stats().paused, "the pause")
        await wait_until(lambda: it.service.commands == 0, "the end of its task")
        await client.resume()

    operated(run, body)


def test_giving_up_the_wait_does_not_undo_a_command_either(run):
    """A cancelled call's answer is dropped, later ones are unharmed."""

    async def body(it, client):
        await launched(it, client)
        call = asyncio.create_task(client.pause("wait"))
        await wait_until(lambda: it.service.commands == 1, "the command")
        call.cancel()
        await asyncio.wait([call])
        it.complete()
        await wait_until(lambda: it.scheduler.stats().paused, "the pause")
        await client.resume()

    operated(run, body)


def test_H4_commands_that_wait_are_bounded(run):
    """One client may have 16 under way; the next is refused with a retry hint, stats and health are not."""

    async def body(it, client):
        await launched(it, client)
        calls = [asyncio.create_task(client.drain(5.0)) for _ in range(MAX_PER_CLIENT)]
        await wait_until(lambda: it.service.commands == MAX_PER_CLIENT, "the drains")
        with pytest.raises(QueueFull) as caught:
            await client.drain()
        assert caught.value.retry_after_s > 0
        assert (await client.health()).reason == "draining"
        assert (await client.stats())["draining"]
        it.complete()
        answers = await asyncio.gather(*calls)
        assert sum(answer["finished"] for answer in answers) >= 1 and len(it.drained) == MAX_PER_CLIENT

    operated(run, body)


def test_closing_the_service_answers_commands_that_wait(run):
    """By the reason, before the connection goes."""

    async def body(it, client):
        await launched(it, client)
        call = asyncio.create_task(client.pause("wait"))
        await wait_until(lambda: it.service.commands == 1, "the command")
        await it.service.aclose()
        with pytest.raises(HostError, match="shutting down"):
            await call

    operated(run, body)


def test_a_bug_in_a_command_is_an_answer_too(run):
    """What is no error of ours becomes a `HostError` that names it, and is logged."""

    async def body(it, client):
        async def broken():
            raise ZeroDivisionError("a bug")

        it.scheduler.flush_cache = broken
        with pytest.raises(HostError, match="flush_cache: ZeroDivisionError: a bug"):
            await client.flush_cache()

    operated(run, body)


def test_servers_that_take_no_control_say_so(run):
    """A decode worker, and a service without a scheduler to operate."""

    async def scenario():
        decode = FakeDecode()
        async with decode.server, FakeScheduler().service() as service:
            for endpoint, text in (
                (decode.server.endpoint, "a decode server takes no Control"),
                (service.endpoint, "a prefill server takes no Control"),
            ):
                async with PairClient(endpoint, timeout_s=10) as client:
                    with pytest.raises(WireError, match=text):
                        await client.pause()

    run(scenario())


class Mute:
    """A server that greets, answers pings while `answers_pings`, and never answers a command."""

    def __init__(self, context):
        self.answers_pings = True
        self.pings = 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.pump = ZmqPump(self.socket, self._on_frames, name="mute")
        self.pump.start()

    def _on_frames(self, frames):
        message = decode(frames[1])
        if isinstance(message, Hello):
            self.pump.send([frames[0], encode(welcome())])
        elif isinstance(message, Ping) and self.answers_pings:
            self.pings += 1
            self.pump.send([frames[0], encode(Pong("e1"))])


def test_a_call_waits_as_long_as_the_server_gives_signs_of_life(run):
    """Many times its timeout; when the pings stay unanswered too, the call fails, naming the server."""

    async def scenario():
        async with zmq_context() as context:
            server = Mute(context)
            async with PairClient(server.endpoint, timeout_s=0.05) as client:
                call = asyncio.create_task(client.pause("wait"))
                await wait_until(lambda: server.pings >= 5 or call.done(), "signs of life")
                assert not call.done()
                server.answers_pings = False
                with pytest.raises(WireError, match=f"{server.endpoint} .*busy or stuck"):
                    await call
            server.pump.close()

    run(scenario())


def test_a_server_that_dies_fails_the_call(run):
    """With the connection; and one that was never there within the timeout."""

    async def scenario():
        async with zmq_context() as context:
            server = Mute(context)
            async with PairClient(server.endpoint, timeout_s=10) as client:
                call = asyncio.create_task(client.drain())
                await client.ping()
                server.pump.close()
                with pytest.raises(WireError, match="went away"):
                    await call

    run(scenario())


def test_P7_tokens_carry_the_versions_of_the_weights(run):
    """A request that was half computed before an update reports both; one after it the new one."""

    async def body(it, client):
        long = client.submit([1] * 300, handoff=False)
        await wait_until(lambda: len(it.engine.forwards) == 2, "the first two of five chunks")
        paused = asyncio.create_task(client.pause(barrier=True))
        await wait_until(lambda: it.scheduler.health().reason == "pausing", "the pause's coming")
        it.complete()
        await paused
        await client.update_weights("/models/9")
        await client.resume()
        fresh = client.submit([2] * 10, handoff=False)
        async with asyncio.timeout(10):
            while not (long.prefill_done and fresh.prefill_done):
                it.complete()
                await asyncio.sleep(0.002)
        assert (await long.first_token()).weight_versions == (0, 1)
        assert (await fresh.first_token()).weight_versions == (1,)

    operated(run, body)


def test_A5_a_requests_own_timeouts_travel_with_it(run):
    """It ends by its own limit, over a forward that never ends; a senseless limit is refused by name."""

    async def body(it, client):
        await launched(it, client, 2)
        impatient = client.submit([7] * 10, handoff=False, timeouts=Timeouts(queue_s=0.05))
        patient = client.submit([8] * 10, handoff=False)
        with pytest.raises(RequestTimeout, match=r"its queue timeout of 0\.05 s"):
            await impatient.first_token()
        with pytest.raises(InvalidRequest) as caught:
            await client.submit([9], handoff=False, timeouts=Timeouts(transfer_s=-1.0)).first_token()
        assert caught.value.field == "timeouts.transfer_s"
        assert not patient.prefill_done
        patient.abort()

    operated(run, body)


class Patient:
    """What the desk operates in the next tests: a pause never ends, other commands end when told."""

    def __init__(self):
        self.may_end = asyncio.Event()

    async def flush_cache(self):
        await self.may_end.wait()
        return {"pages_freed": 3, "folder": Path("/x")}


@pytest.mark.asyncio
async def test_a_command_that_had_no_time_to_begin_is_answered_too():
    """The desk closes in the turn in which the command came; what comes later is refused likewise."""
    sent = []
    desk = ControlDesk(Patient(), lambda *answer: sent.append(answer))
    desk.on_control(b"a", Control("1", "flush_cache"))
    await desk.aclose("it is over")
    desk.on_control(b"a", Control("2", "flush_cache"))
    await desk.aclose("again")
    assert sent == [(b"a", Failed("host", "it is over", op_id=name)) for name in ("1", "2")]
    assert desk.under_way == 0


@pytest.mark.asyncio
async def test_H4_commands_of_all_clients_together_are_bounded():
    """64; there is room again when they have ended, and each answer went to its caller."""
    sent = []
    patient = Patient()
    desk = ControlDesk(patient, lambda *answer: sent.append(answer))
    for number in range(MAX_UNDER_WAY + 1):
        desk.on_control(b"client %d" % (number % 6), Control(str(number), "flush_cache"))
    assert [(who, answer.code, answer.op_id) for who, answer in sent] == [(b"client 4", "queue_full", "64")]
    sent.clear()
    patient.may_end.set()
    await wait_until(lambda: desk.under_way == 0, "the end of all")
    values = {"pages_freed": 3, "folder": "/x"}
    assert sent == [(b"client %d" % (n % 6), ControlDone(str(n), values)) for n in range(MAX_UNDER_WAY)]
    desk.on_control(b"client 1", Control("more", "flush_cache"))
    await wait_until(lambda: len(sent) == MAX_UNDER_WAY + 1, "one more")
