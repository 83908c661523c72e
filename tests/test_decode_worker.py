"""The decode worker and its streams on a fake device and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from aioprefill.decode.sequence import pages_needed
from aioprefill.decode.streams import Streams
from aioprefill.decode.worker import DecodeWorker
from aioprefill.engine.port import SampledToken
from aioprefill.errors import DeviceError, InvalidRequest, QueueFull, RequestAborted
from aioprefill.sampling_params import SamplingParams
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine, fake_spec
from aioprefill.transfer.port import Handoff
from aioprefill.wire.messages import Failed, Finished, Message, Token

READER = b"reader"


def handoff(room: str, *, prompt: int = 20, new: int = 4, **fields: Any) -> Handoff:
    """A hand-off of a prompt of `prompt` tokens."""
    values = {"sampling": SamplingParams(), "max_new_tokens": new, "pages": -(-prompt // 16), **fields}
    return Handoff(room=room, peer="prefill", prompt_tokens=prompt, **values)


@dataclass
class World:
    """A worker, its streams, and what its readers got."""

    worker: DecodeWorker
    streams: Streams
    engine: FakeEngine
    sent: list[tuple[bytes, Message]] = field(default_factory=list)

    def arrive(self, asked: Handoff, token: int = 7) -> None:
        """Reserve a room and have it arrive."""
        pages = self.worker.reserve(asked)
        assert pages is not None
        self.worker.arrived(asked.room, pages, SampledToken(token, -0.1), asked)

    def messages(self, kind: type) -> list[Any]:
        """Messages of one type, in order."""
        return [message for _, message in self.sent if isinstance(message, kind)]


@asynccontextmanager
async def world(
    *, num_pages: int = 16, max_batch: int = 8, eos: tuple[int, ...] = ()
) -> AsyncIterator[World]:
    """A running worker; at the end every page is back."""
    engine = FakeEngine(num_pages=num_pages, duration_s=1.0, spec=fake_spec(eos=eos, context_length=512))
    sent: list[tuple[bytes, Message]] = []
    streams = Streams(lambda reader, message: sent.append((reader, message)), lambda room: worker.drop(room))
    worker = DecodeWorker(engine, streams, max_batch_requests=max_batch)
    running = asyncio.ensure_future(worker.run())
    yield World(worker, streams, engine, sent)
    await settle()
    running.cancel()
    await asyncio.wait([running])
    worker.close(RequestAborted("the test ends"))
    streams.close()
    worker.pool.check()
    assert worker.pool.free == num_pages and worker._dropped == set()


@virtual_time
async def test_a_room_is_decoded_to_its_length_and_its_pages_come_back() -> None:
    """The first token from prefill, then one a step, at the right positions."""
    async with world() as w:
        w.streams.attach(READER, "a")
        w.arrive(handoff("a"))
        await asyncio.wait_for(w.worker.wait_idle(), 10)
        assert [token.index for token in w.messages(Token)] == [0, 1, 2, 3]
        assert w.messages(Token)[0].token_id == 7
        assert w.messages(Finished) == [Finished("a", "length", 4)]
        assert [forward.spans[0].start for forward in w.engine.forwards] == [20, 21, 22]
        assert len(w.streams) == 0


@virtual_time
async def test_eos_ends_a_room_also_as_the_first_token_unless_ignored() -> None:
    """The end-of-sequence token is the last one that is sent."""
    async with world(eos=(7,)) as w:
        for room in ("a", "b"):
            w.streams.attach(READER, room)
        w.arrive(handoff("a"))
        w.arrive(handoff("b", ignore_eos=True))
        await asyncio.wait_for(w.worker.wait_idle(), 10)
        assert sorted((m.request_id, m.reason, m.tokens) for m in w.messages(Finished)) == [
            ("a", "eos", 1),
            ("b", "length", 4),
        ]


@virtual_time
async def test_rooms_join_between_steps_and_the_batch_is_bounded() -> None:
    """Two at a time; the third joins when one has ended."""
    async with world(max_batch=2) as w:
        for room, new in (("a", 3), ("b", 5), ("c", 2)):
            w.streams.attach(READER, room)
            w.arrive(handoff(room, new=new))
        await asyncio.wait_for(w.worker.wait_idle(), 20)
        assert [len(forward.spans) for forward in w.engine.forwards] == [2, 2, 2, 1]
        assert len(w.messages(Finished)) == 3


@virtual_time
async def test_a_room_reserves_memory_for_all_that_it_may_generate() -> None:
    """Or waits for it; one that can never fit is refused by the field's name."""
    async with world(num_pages=4) as w:
        freed: list[int] = []
        w.worker.on_pages_free = lambda: freed.append(w.worker.pool.free)
        big = handoff("big", prompt=16, new=17)
        assert pages_needed(big, 16) == 2
        assert pages_needed(handoff("x", prompt=16, new=1), 16) == 1
        first, second = w.worker.reserve(big), w.worker.reserve(handoff("two", prompt=16, new=17))
        assert first is not None and second is not None and len(first) == 1
        assert w.worker.reserve(handoff("none", prompt=1, new=1)) is None
        for bad, name in (
            (handoff("y", prompt=60, new=10), "max_new_tokens"),
            (handoff("y", new=0), "max_new_tokens"),
            (handoff("y", prompt=500, new=100), "max_new_tokens"),
            (handoff("y", sampling=SamplingParams(temperature=-1.0)), "sampling.temperature"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                w.worker.reserve(bad)
            assert caught.value.field == name
        w.worker.lost("big", "the prefill side died")
        w.worker.release_pages("big", first)
        w.worker.lost("two", "cancelled")
        w.worker.release_pages("two", second)
        assert freed == [2, 4]
        w.streams.attach(READER, "big")
        await settle()
        assert [(m.code, m.request_id) for m in w.messages(Failed)] == [("peer", "big")]


@virtual_time
async def test_a_reader_that_leaves_stops_its_rooms() -> None:
    """Queued, running, and reserved ones; those of others go on."""
    async with world(max_batch=2, num_pages=40) as w:
        for room in ("run", "queued", "reserved"):
            w.streams.attach(READER, room)
        w.streams.attach(b"other", "kept")
        w.arrive(handoff("run", new=100))
        w.arrive(handoff("kept", new=5))
        await asyncio.sleep(1.5)
        w.arrive(handoff("queued", new=100))
        reserved = handoff("reserved", new=100)
        pages = w.worker.reserve(reserved)
        assert pages is not None
        w.streams.gone(READER)
        w.worker.arrived("reserved", pages, SampledToken(1, 0.0), reserved)
        await asyncio.wait_for(w.worker.wait_idle(), 10)
        assert [m.request_id for m in w.messages(Finished)] == ["kept"]
        assert len(w.streams) == 0


@virtual_time
async def test_an_abort_of_a_client_stops_its_room_and_nobody_elses() -> None:
    """Room ids of others are left alone."""
    async with world() as w:
        w.streams.attach(READER, "a")
        w.arrive(handoff("a", new=6))
        w.streams.abandon(b"stranger", "a")
        await asyncio.sleep(1.5)
        w.streams.abandon(READER, "a")
        await asyncio.wait_for(w.worker.wait_idle(), 10)
        assert w.messages(Finished) == []


@virtual_time
async def test_tokens_wait_for_a_reader_and_readers_for_a_room_but_not_for_ever() -> None:
    """Both orders work; both have an end."""
    async with world() as w:
        w.arrive(handoff("late reader"))
        await asyncio.wait_for(w.worker.wait_idle(), 10)
        assert w.sent == []
        w.streams.attach(READER, "late reader")
        assert len(w.messages(Token)) == 4 and len(w.messages(Finished)) == 1
        w.arrive(handoff("no reader"))
        w.streams.attach(READER, "no room")
        await asyncio.sleep(100)
        assert len(w.streams) == 0
        assert [(m.code, m.request_id) for m in w.messages(Failed)] == [("peer", "no room")]


@virtual_time
async def test_a_room_has_one_reader_and_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second client is refused; so is one stream too many."""
    monkeypatch.setattr("aioprefill.decode.streams.MAX_STREAMS", 2)
    async with world() as w:
        w.streams.attach(READER, "a")
        with pytest.raises(InvalidRequest, match="another client"):
            w.streams.attach(b"other", "a")
        w.streams.attach(READER, "b")
        with pytest.raises(QueueFull):
            w.streams.attach(READER, "c")


@virtual_time
async def test_a_device_error_fails_the_rooms_of_its_step_alone() -> None:
    """The worker decodes on."""
    async with world() as w:
        for room in ("a", "b"):
            w.streams.attach(READER, room)
        w.arrive(handoff("a"))
        await settle()
        w.engine.forwards[0].fail(DeviceError("cudaErrorInvalidValue", "x", sticky=False))
        await settle()
        w.arrive(handoff("b"))
        await asyncio.wait_for(w.worker.wait_idle(), 10)
        assert [(m.code, m.request_id) for m in w.messages(Failed)] == [("device", "a")]
        assert [m.request_id for m in w.messages(Finished)] == ["b"]
        assert w.worker.stats()["pages_free"] == 16


@virtual_time
async def test_a_step_that_ends_after_the_close_is_nobodys() -> None:
    """A drain that ran out of time: the forward that is in flight ends after `close`."""
    async with world() as w:
        w.streams.attach(READER, "a")
        w.arrive(handoff("a", new=100))
        await asyncio.sleep(1.5)
        w.worker.close(RequestAborted("the decode worker stops"))
        told = len(w.sent)
        await asyncio.sleep(2)
        assert len(w.sent) == told and isinstance(w.sent[-1][1], Failed)


@virtual_time
async def test_a_drain_waits_for_rooms_on_their_way() -> None:
    """Reserved rooms count until they have arrived and been decoded, or are lost."""
    async with world() as w:
        w.streams.attach(READER, "a")
        asked = handoff("a", new=2)
        pages, lost = w.worker.reserve(asked), w.worker.reserve(handoff("b"))
        assert pages is not None and lost is not None
        idle = asyncio.ensure_future(w.worker.wait_idle())
        await asyncio.sleep(3)
        assert not idle.done()
        w.worker.lost("b", "gone")
        w.worker.arrived("a", pages, SampledToken(7, -0.1), asked)
        await asyncio.sleep(3)
        assert idle.done() and len(w.messages(Finished)) == 1
        w.worker.release_pages("b", lost)


@pytest.mark.parametrize("how", ["finished", "failed", "attach", "expire"])
def test_a_reader_that_is_dropped_while_it_is_sent_to_hurts_nobody(how: str) -> None:
    """`send` may find that the reader does not read: the reader is gone when it returns."""

    async def main() -> None:
        streams = Streams(lambda reader, message: streams.gone(reader), lambda room: None)
        if how == "attach":
            streams.opened("a")
            streams.token("a", 0, 1)
            streams.finished("a", "length", 1)
            streams.attach(READER, "a")
        elif how == "expire":
            streams.attach(READER, "a")
            await asyncio.sleep(61)
        else:
            streams.attach(READER, "a")
            streams.opened("a")
            if how == "finished":
                streams.finished("a", "length", 0)
            else:
                streams.failed("a", RequestAborted("x"))
        assert len(streams) == 0 and not streams._rooms_of

    virtual_time(main)()


@virtual_time
async def test_a_refused_stream_takes_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many streams: the room is refused before it has anything."""
    monkeypatch.setattr("aioprefill.decode.streams.MAX_STREAMS", 1)
    async with world() as w:
        w.streams.attach(READER, "other")
        with pytest.raises(QueueFull):
            w.worker.reserve(handoff("a"))
        assert w.worker.pool.free == 16
