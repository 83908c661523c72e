"""The prefill service: every answer of the scheduler reaches its client, and only that one."""

from __future__ import annotations

import asyncio
import time

import pytest
from wire_fakes import FakeScheduler, RawClient, welcome
from wire_support import LOOPS, run, wait_until, zmq_context

from aioprefill.errors import HostError, InvalidRequest, PeerError, QueueFull
from aioprefill.sampling_params import SamplingParams
from aioprefill.wire.messages import (
    Abort,
    Accepted,
    Failed,
    FirstToken,
    Hello,
    Stats,
    StatsQuery,
    Submit,
    Transferred,
    Welcome,
    pack_ids,
)

__all__ = ["run"]
HELLO = Hello("client", "c1")
PROMPT = pack_ids(range(10_000))


def served(run, body):
    """Run `body(scheduler, service, client, context)` with one greeted client."""

    async def scenario():
        scheduler = FakeScheduler()
        async with scheduler.service() as service, zmq_context() as context:
            client = RawClient(context, service.endpoint)
            client.send(HELLO)
            await wait_until(lambda: client.of(Welcome), "welcome")
            await body(scheduler, service, client, context)
            client.pump.close()

    run(scenario())


@LOOPS
def test_request_goes_from_accepted_to_transferred(run):
    """All fields arrive as they were sent, ids stay packed, times are ms since arrival."""

    async def body(scheduler, service, client, context):
        sampling = SamplingParams(temperature=0.5, seed=3)
        client.send(Submit("r", PROMPT, "tcp://127.0.0.1:9", sampling, 17, True))
        await wait_until(lambda: client.of(Accepted), "accepted")
        request = scheduler.requests["r"]
        assert request.token_ids.tolist() == list(range(10_000))
        assert request.token_ids.base is not None  # a view of the frame, not a copy
        assert (request.peer, request.sampling, request.max_new_tokens, request.ignore_eos) == (
            "tcp://127.0.0.1:9",
            sampling,
            17,
            True,
        )
        scheduler.publish("r")
        scheduler.finish("r")
        await wait_until(lambda: client.of(Transferred), "transferred")
        first = client.of(FirstToken)[0]
        assert (first.token_id, first.top_logprobs, first.prompt_tokens) == (
            7,
            ((7, -0.5), (8, -1.5)),
            10_000,
        )
        assert (first.launched_ms, first.first_token_ms) == pytest.approx((2, 5))
        assert client.of(Transferred)[0].transferred_ms == pytest.approx(9)
        assert client.of(Transferred)[0].kv_bytes == 4096
        assert service.live == 0

    served(run, body)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            InvalidRequest("sampling.top_p", "bad"),
            Failed("invalid_request", "bad", "r", field="sampling.top_p"),
        ),
        (QueueFull("full", retry_after_s=3.0), Failed("queue_full", "full", "r", retry_after_s=3.0)),
    ],
)
def test_refused_request_says_why(run, error, expected):
    """What submit raises comes back with its facts; nothing is kept."""

    async def body(scheduler, service, client, context):
        scheduler.error = error
        client.send(Submit("r", PROMPT))
        await wait_until(lambda: client.of(Failed), "the failure")
        assert client.of(Failed) == [expected]
        assert service.live == 0

    served(run, body)


def test_prompt_with_a_cut_id_is_an_invalid_request(run):
    """It names the field and never reaches the scheduler."""

    async def body(scheduler, service, client, context):
        client.send(Submit("r", b"12345"))
        await wait_until(lambda: client.of(Failed), "the failure")
        assert client.of(Failed)[0].field == "prompt"
        assert scheduler.requests == {}

    served(run, body)


@pytest.mark.parametrize("after_first_token", [False, True])
def test_failure_is_reported_exactly_once(run, after_first_token):
    """A failing handle fails both its futures; the client hears of it once."""

    async def body(scheduler, service, client, context):
        client.send(Submit("r", PROMPT))
        await wait_until(lambda: "r" in scheduler.handles, "the request")
        if after_first_token:
            scheduler.publish("r")
        scheduler.handles["r"].fail(PeerError("tcp://127.0.0.1:9", "died"))
        client.send(StatsQuery())
        await wait_until(lambda: client.of(Stats) and client.of(Failed), "the failure")
        assert client.of(Failed) == [Failed("peer", "died", "r", field="tcp://127.0.0.1:9")]
        assert len(client.of(FirstToken)) == after_first_token
        assert service.live == 0

    served(run, body)


def test_bug_in_a_host_and_cancelled_future_are_failures_too(run):
    """No way of settling a handle leaves its client waiting."""

    async def body(scheduler, service, client, context):
        client.send(Submit("bug", PROMPT), Submit("cancelled", PROMPT))
        await wait_until(lambda: len(scheduler.handles) == 2, "the requests")
        scheduler.handles["bug"].result.set_exception(KeyError("oops"))
        scheduler.handles["cancelled"].result.cancel()
        await wait_until(lambda: len(client.of(Failed)) == 2, "the failures")
        by_id = {failed.request_id: failed for failed in client.of(Failed)}
        assert (by_id["bug"].code, by_id["cancelled"].code) == (HostError.code, "aborted")
        assert "KeyError" in by_id["bug"].message
        assert service.live == 0

    served(run, body)


def test_abort_reaches_the_scheduler_and_only_from_the_owner(run):
    """Another client cannot abort a request by its id; an unknown id does nothing."""

    async def body(scheduler, service, client, context):
        client.send(Submit("r", PROMPT), Abort("unknown"))
        await wait_until(lambda: client.of(Accepted), "accepted")
        other = RawClient(context, service.endpoint)
        other.send(HELLO, Abort("r"), StatsQuery())
        await wait_until(lambda: other.of(Stats), "the other client's messages")
        assert scheduler.aborts == []
        client.send(Abort("r"))
        await wait_until(lambda: client.of(Failed), "the abort")
        assert client.of(Failed)[0].code == "aborted"
        assert [request_id for request_id, _ in scheduler.aborts] == ["r"]
        other.pump.close()

    served(run, body)


def test_duplicate_id_is_the_schedulers_refusal_and_leaves_the_first_alone(run):
    """Two clients with one id: the second is refused, the first gets its answer."""

    async def body(scheduler, service, client, context):
        client.send(Submit("r", PROMPT), Submit("r", PROMPT))
        other = RawClient(context, service.endpoint)
        await wait_until(lambda: client.of(Failed), "the refusal")
        other.send(HELLO, Submit("r", PROMPT))
        await wait_until(lambda: other.of(Failed), "the refusal of the other client")
        assert other.of(Failed)[0].field == "request_id"
        scheduler.publish("r")
        scheduler.finish("r")
        await wait_until(lambda: client.of(Transferred), "the first request's end")
        assert other.of(FirstToken) == []
        other.pump.close()

    served(run, body)


@LOOPS
def test_A3_client_that_disconnects_has_its_requests_aborted(run):
    """All live ones of that client, no finished one, and none of another client."""

    async def body(scheduler, service, client, context):
        leaver = RawClient(context, service.endpoint)
        leaver.send(HELLO, *(Submit(name, PROMPT) for name in ("done", "live1", "live2")))
        client.send(Submit("mine", PROMPT))
        await wait_until(lambda: len(scheduler.handles) == 4, "the requests")
        scheduler.publish("done")
        scheduler.finish("done")
        await wait_until(lambda: leaver.of(Transferred), "the finished one")
        leaver.pump.close()
        await wait_until(lambda: len(scheduler.aborts) == 2, "the aborts", timeout_s=2)
        assert dict(scheduler.aborts) == dict.fromkeys(("live1", "live2"), "the client disconnected")
        assert service.live == 1

    served(run, body)


def test_stats_are_numbers_and_texts(run):
    """Anything else is turned into text rather than failing the answer."""

    async def body(scheduler, service, client, context):
        client.send(StatsQuery())
        await wait_until(lambda: client.of(Stats), "stats")
        assert client.of(Stats)[0].values == {"live": 0, "ratio": 0.5, "nothing": "None"}

    served(run, body)


def test_service_that_ends_tells_its_clients(run):
    """Requests that still wait are aborted, and their clients hear of it before the connection closes."""

    async def scenario():
        scheduler = FakeScheduler()
        service = scheduler.service(welcome=welcome(epoch="e9"))
        service.start()
        async with zmq_context() as context:
            client = RawClient(context, service.endpoint)
            client.send(HELLO, Submit("a", PROMPT), Submit("b", PROMPT))
            await wait_until(lambda: len(scheduler.handles) == 2, "the requests")
            await service.aclose()
            await wait_until(lambda: len(client.of(Failed)) == 2, "the farewells")
            assert all("shutting down" in failed.message for failed in client.of(Failed))
            assert sorted(request_id for request_id, _ in scheduler.aborts) == ["a", "b"]
            await service.aclose()
            client.pump.close()

    run(scenario())


@LOOPS
def test_H5_burst_of_1000_requests_is_read_without_a_stall(run):
    """1,000 requests of 10,000 tokens at once on one socket, with a client that goes on to send: all are
    read in one go, other callbacks run meanwhile, and all answers come back."""

    async def body(scheduler, service, client, context):
        gaps, stop = [], asyncio.Event()

        async def heartbeat():
            last = time.perf_counter()
            while not stop.is_set():
                await asyncio.sleep(0.001)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        beat = asyncio.create_task(heartbeat())
        names = [f"r{i}" for i in range(1000)]
        for name in names:
            client.send(Submit(name, PROMPT))
        await wait_until(lambda: len(client.of(Accepted)) == 1000, "1,000 acceptances", timeout_s=10)
        for name in names:
            scheduler.publish(name)
            scheduler.finish(name)
            client.send(Abort(name))
        await wait_until(lambda: len(client.of(Transferred)) == 1000, "1,000 outcomes", timeout_s=10)
        stop.set()
        await beat
        assert [accepted.request_id for accepted in client.of(Accepted)] == names
        assert len(client.of(FirstToken)) == 1000
        assert client.of(Failed) == []
        assert service.live == 0
        assert len(gaps) > 10
        assert sorted(gaps)[len(gaps) // 2] < 0.05  # the loop was never held for long

    served(run, body)
