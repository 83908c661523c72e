"""Rows A3, H3, H4 and S5 over real sockets: the native host without a model, its service, real clients."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
import zmq
from operations_wire import Served, served
from wire_fakes import RawClient
from wire_support import LOOPS, run, wait_until, zmq_context

from aioprefill.config import NativeConfig
from aioprefill.errors import AioprefillError, QueueFull, RequestAborted
from aioprefill.sampling_params import SamplingParams
from aioprefill.wire.client import PairClient
from aioprefill.wire.messages import (
    VERSION,
    Accepted,
    Failed,
    FirstToken,
    Hello,
    Stats,
    StatsQuery,
    Submit,
    Token,
    Welcome,
    pack_ids,
)

__all__ = ["run"]
HELLO = Hello("client", "c1")


@LOOPS
def test_A3_a_client_that_disconnects_frees_its_prefill_at_the_next_chunk_boundary(run):
    """A prompt of 157 chunks is given up with two in flight; the short one behind it is in the next
    forward but those two, and has its first token when that one is done."""

    async def scenario():
        async with served() as it, PairClient(it.endpoint, timeout_s=10) as client:
            async with PairClient(it.endpoint, timeout_s=10) as leaver:
                leaver.submit([1] * 10_000, request_id="long", handoff=False)
                await wait_until(lambda: len(it.engine.forwards) == 2, "two chunks")
                short = client.submit([2] * 10, request_id="short", handoff=False)
                await client.ping()
            await wait_until(lambda: "long" not in it.host.open_requests(), "the abort")
            assert len(it.engine.forwards) == 2
            assert it.host.memory.pool.held > 0, "two forwards still write to its pages"
            it.engine.forwards[0].complete()
            await wait_until(lambda: len(it.engine.forwards) == 3, "the next forward")
            assert [span.end for span in it.engine.forwards[2].spans] == [10], "the short one alone"
            it.complete()
            assert (await short.first_token()).token_id >= 0
            await client.stats()
            assert len(it.engine.forwards) == 3, "nothing of the long prompt was launched any more"
            assert it.host.memory.pool.held == 0

    run(scenario())


def test_H3_health_and_stats_answer_within_100_ms_while_a_forward_never_ends(run):
    """Over the wire, with both slots taken, while requests come in; past its stall limit it is named."""

    async def scenario():
        async with served(stall_limit_s=0.3) as it, PairClient(it.endpoint, timeout_s=10) as client:
            for number in range(4):
                client.submit([number] * 64, handoff=False)
            await wait_until(lambda: len(it.engine.forwards) == 2, "both slots taken")
            slowest = 0.0
            async with asyncio.timeout(10):
                while True:
                    began = time.perf_counter()
                    health, stats = await client.health(), await client.stats()
                    slowest = max(slowest, time.perf_counter() - began)
                    assert health.live and stats["in_flight"] == 2
                    if not health.ready:
                        break
                    client.submit([5] * 64, handoff=False)
                    await client.ping()
            assert health.reason.startswith("forward 0 runs for") and "limit is 0.3 s" in health.reason
            assert slowest < 0.1
            it.engine.forwards[0].complete()
            await wait_until(lambda: it.scheduler.health().ready, "the next forward's turn")
            async with asyncio.timeout(10):
                while it.host.ledger.requests:
                    it.complete()
                    await client.ping()

    run(scenario())


def test_H4_beyond_the_queue_limit_a_request_is_refused_at_once_with_a_retry_hint(run):
    """By requests and by tokens; 500 refusals leave nothing behind, and there is room again afterwards."""

    async def scenario():
        config = NativeConfig(chunk_tokens=64, max_queue_requests=3, max_queue_tokens=1000)
        async with served(config=config) as it, PairClient(it.endpoint, timeout_s=10) as client:
            running = [client.submit([n] * 64, handoff=False) for n in range(2)]
            await wait_until(lambda: len(it.engine.forwards) == 2, "both slots taken")
            queued = [client.submit([n] * 300, handoff=False) for n in range(3)]
            began = time.perf_counter()
            with pytest.raises(QueueFull, match="3 requests are queued, the limit is 3") as caught:
                await client.submit([9], handoff=False).first_token()
            assert time.perf_counter() - began < 0.1
            assert 0.1 <= caught.value.retry_after_s <= 60.0
            queued[2].abort()
            await wait_until(lambda: it.host.frontend.queued_requests == 2, "room")
            with pytest.raises(QueueFull, match="tokens are queued, the limit is 1000"):
                await client.submit([9] * 500, handoff=False).first_token()
            last = client.submit([8] * 10, handoff=False)
            refused = [client.submit([9], handoff=False) for _ in range(500)]
            outcomes = await asyncio.gather(*(s.first_token() for s in refused), return_exceptions=True)
            assert all(isinstance(outcome, QueueFull) for outcome in outcomes)
            assert it.service.live == 5 and client.live == 5 and len(it.host.open_requests()) == 5
            await _finish(it, [*running, *queued[:2], last])
            await _finish(it, [client.submit([9], handoff=False)])
            with pytest.raises(RequestAborted):
                await queued[2].first_token()

    run(scenario())


async def _finish(it: Served, streams):
    async with asyncio.timeout(10):
        while not all(stream.prefill_done for stream in streams):
            it.complete()
            await asyncio.sleep(0.001)
    for stream in streams:
        assert (await stream.first_token()).token_id >= 0


def test_S5_malformed_oversized_and_wrong_version_messages_hurt_nobody(run):
    """Each is answered or dropped, and counted; a request beside them is served, and the loop goes on."""
    unknown_tag = msgspec.msgpack.encode({"type": "reboot"})
    mistyped = msgspec.msgpack.encode({"type": "submit", "request_id": 3, "prompt": b""})

    async def scenario():
        async with served() as it, zmq_context() as context:
            good = RawClient(context, it.endpoint)
            good.send(HELLO, Submit("good", pack_ids([1, 2, 3])))
            await wait_until(lambda: good.of(Accepted), "the good request")

            garbage = RawClient(context, it.endpoint)
            garbage.send(HELLO, b"", b"\xff" * 50, unknown_tag, mistyped)
            await wait_until(lambda: len(garbage.of(Failed)) == 4, "four answers")
            assert {failed.code for failed in garbage.of(Failed)} == {"wire"}
            garbage.pump.send([b"one frame", b"too many"])
            await wait_until(lambda: len(garbage.of(Failed)) == 5, "the answer to two frames")

            strange = RawClient(context, it.endpoint)
            strange.send(Hello("client", "c2", version=VERSION + 1), Submit("no", pack_ids([1])))
            await wait_until(lambda: len(strange.of(Failed)) == 2, "the refusals")
            assert f"version {VERSION} of the protocol" in strange.of(Failed)[0].message
            assert strange.of(Failed)[1].code == "hello_required" and strange.of(Welcome) == []

            wrong = RawClient(context, it.endpoint)
            wrong.send(HELLO, Token("t", 0, 1), Submit("cut", b"12345"), Submit("none", b""))
            await wait_until(lambda: len(wrong.of(Failed)) == 3, "the refusals")
            assert [failed.request_id for failed in wrong.of(Failed)] == ["t", "cut", "none"]

            oversized = RawClient(context, it.endpoint)
            oversized.send(HELLO)
            await wait_until(lambda: oversized.of(Welcome), "the greeting")
            oversized.socket.setsockopt(zmq.LINGER, 0)
            oversized.send(bytes((16 << 20) + 1))
            await wait_until(lambda: it.service.server.counters.gone == 1, "the end of its connection")

            counters = it.service.server.counters
            assert (counters.malformed, counters.wrong_version) == (5, 1)
            assert (counters.unexpected, counters.without_hello) == (1, 1)
            it.complete()
            await wait_until(lambda: good.of(FirstToken), "the good request's token")
            good.send(StatsQuery())
            await wait_until(lambda: good.of(Stats), "stats")
            assert it.scheduler.health().ready
            for client in (good, garbage, strange, wrong, oversized):
                client.pump.close()

    run(scenario())


@LOOPS
def test_S5_a_field_of_the_wrong_type_ends_its_request_and_not_by_a_hang(run):
    """Also what cannot be sent at all; the next request is served."""

    async def scenario():
        async with served() as it, PairClient(it.endpoint, timeout_s=10) as client:
            for field, value in (("max_new_tokens", 4.0), ("priority", 1.5), ("deadline_s", "5")):
                with pytest.raises(AioprefillError, match="malformed message"):
                    await asyncio.wait_for(
                        client.submit([1, 2], handoff=False, **{field: value}).first_token(), 5
                    )
            with pytest.raises(AioprefillError):
                client.submit([1, 2], handoff=False, sampling=SamplingParams(seed=2**64))
            assert client.live == 0
            good = client.submit([1, 2], handoff=False)
            await wait_until(lambda: it.engine.forwards, "the good request")
            it.complete()
            assert (await good.first_token()).prompt_tokens == 2

    run(scenario())
