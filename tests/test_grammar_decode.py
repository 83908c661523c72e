"""Rooms with a grammar on the decode worker: fake device, fake compiler, virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from aioprefill.decode.streams import Streams
from aioprefill.decode.worker import DecodeWorker
from aioprefill.engine.port import SampledToken
from aioprefill.errors import InvalidRequest, RequestAborted
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.sampling_params import SamplingParams
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine, fake_spec
from aioprefill.testing.grammars import MISFIT, FakeGrammars
from aioprefill.transfer.port import Handoff
from aioprefill.wire.messages import Failed, Finished, Message, Token

READER = b"reader"


def handoff(room: str, grammar: str | None = "[a-z]", *, new: int = 8) -> Handoff:
    """A hand-off of a prompt of 20 tokens; `grammar` is a regular expression."""
    spec = None if grammar is None else GrammarSpec("regex", grammar)
    return Handoff(room, "prefill", 20, 2, SamplingParams(), new, ignore_eos=True, grammar=spec)


@dataclass
class World:
    """A worker, and what its readers got."""

    worker: DecodeWorker
    streams: Streams
    engine: FakeEngine
    grammars: FakeGrammars
    sent: list[Message] = field(default_factory=list)

    def reserve(self, asked: Handoff) -> list[int]:
        """Reserve a room that somebody reads."""
        self.streams.attach(READER, asked.room)
        pages = self.worker.reserve(asked)
        assert pages is not None
        return pages

    def arrive(self, asked: Handoff, pages: list[int], token: int = 7) -> None:
        """Its KV and first token are there."""
        self.worker.arrived(asked.room, pages, SampledToken(token, -0.1), asked)

    def messages(self, kind: type) -> list[Any]:
        """Messages of one type, in order."""
        return [message for message in self.sent if isinstance(message, kind)]

    def finished(self) -> dict[str, tuple[str, int]]:
        """Reason and number of tokens of rooms that ended well."""
        return {m.request_id: (m.reason, m.tokens) for m in self.messages(Finished)}


@asynccontextmanager
async def world(*, eos: tuple[int, ...] = ()) -> AsyncIterator[World]:
    """A running worker; at the end every page is back and no room is remembered."""
    engine = FakeEngine(num_pages=32, duration_s=1.0, spec=fake_spec(eos=eos, context_length=512))
    sent: list[Message] = []
    streams = Streams(lambda _, message: sent.append(message), lambda room: worker.drop(room))
    grammars = FakeGrammars()
    worker = DecodeWorker(engine, streams, max_batch_requests=8, grammars=grammars)
    running = asyncio.ensure_future(worker.run())
    yield World(worker, streams, engine, grammars, sent)
    await settle()
    running.cancel()
    await asyncio.wait([running])
    worker.close(RequestAborted("the test ends"))
    streams.close()
    worker.pool.check()
    assert worker.pool.free == 32 and worker._dropped == set()
    assert len(worker._constraints) == 0 and worker._held == {} and not worker.busy


@virtual_time
async def test_a_room_that_arrives_before_its_grammar_waits_and_holds_up_nobody() -> None:
    """It compiles from the reservation on; the other room decodes on; then it runs under its masks."""
    async with world() as w:
        slow, plain = handoff("slow"), handoff("plain", None, new=3)
        pages = w.reserve(slow)
        assert len(w.grammars.running) == 1, "asked for when the room was reserved"
        w.arrive(slow, pages)
        w.arrive(plain, w.reserve(plain))
        await asyncio.sleep(5)
        assert w.finished() == {"plain": ("length", 3)} and w.worker.busy
        assert w.worker.stats()["rooms_compiling"] == 1
        w.grammars.finish()
        await asyncio.wait_for(w.worker.wait_idle(), 10)
        assert w.finished()["slow"] == ("grammar", 3)
        masks = [span.mask for forward in w.engine.forwards for span in forward.spans]
        assert [mask is None for mask in masks] == [True, True, False, False]


@virtual_time
async def test_the_grammar_ends_the_room_also_with_its_first_token() -> None:
    """Whatever ignore_eos says; with an end token of the model the reason is eos."""
    async with world(eos=(7,)) as w:
        w.grammars.compiler.tokens = 1
        one = handoff("one")
        pages = w.reserve(one)
        w.arrive(one, pages)
        waiting = asyncio.ensure_future(w.worker.wait_idle())
        await settle()
        assert not waiting.done()
        w.grammars.finish()
        await asyncio.wait_for(waiting, 1)
        assert w.finished() == {"one": ("eos", 1)}


@virtual_time
async def test_the_length_ends_a_room_in_the_middle_of_its_grammar() -> None:
    """As without one."""
    async with world() as w:
        w.grammars.compiler.tokens = 100
        room = handoff("a", new=4)
        pages = w.reserve(room)
        w.grammars.finish()
        w.arrive(room, pages)
        await asyncio.wait_for(w.worker.wait_idle(), 10)
        assert w.finished() == {"a": ("length", 4)} and len(w.messages(Token)) == 4


@virtual_time
async def test_a_first_token_that_does_not_fit_fails_its_room_alone() -> None:
    """Two sides that understand the grammar differently are an error, not nonsense."""
    async with world() as w:
        odd, good = handoff("odd"), handoff("good")
        odd_pages, good_pages = w.reserve(odd), w.reserve(good)
        w.grammars.finish()
        w.arrive(odd, odd_pages, MISFIT)
        w.arrive(good, good_pages)
        await asyncio.wait_for(w.worker.wait_idle(), 10)
        (failed,) = w.messages(Failed)
        assert failed.request_id == "odd" and f"token {MISFIT} does not fit" in failed.message
        assert w.finished() == {"good": ("grammar", 3)}


@virtual_time
async def test_a_grammar_that_does_not_compile_here_fails_its_room_alone() -> None:
    """Whether it is known before the room arrives, or after."""
    async with world() as w:
        for room, first in (("before", True), ("after", False)):
            asked = handoff(room, "bad" + room)
            pages = w.reserve(asked)
            if first:
                w.grammars.finish()
            w.arrive(asked, pages)
            if not first:
                w.grammars.finish()
        await asyncio.wait_for(w.worker.wait_idle(), 10)
        assert [(m.request_id, m.field) for m in w.messages(Failed)] == [
            ("before", "regex"),
            ("after", "regex"),
        ]


@virtual_time
async def test_a_reader_that_leaves_while_the_grammar_compiles_leaves_nothing() -> None:
    """Before the room arrives, and after; a room of the same name is another one."""
    async with world() as w:
        early, late = handoff("early", "e"), handoff("late", "l")
        early_pages, late_pages = w.reserve(early), w.reserve(late)
        w.arrive(late, late_pages)
        waiting = asyncio.ensure_future(w.worker.wait_idle())
        await settle()
        w.streams.gone(READER)
        await asyncio.wait_for(waiting, 1)
        w.arrive(early, early_pages)
        again = handoff("late", "other")
        pages = w.reserve(again)
        w.arrive(again, pages)
        w.grammars.finish(2)
        await settle()
        assert w.worker.stats()["rooms_compiling"] == 1 and w.messages(Token) == []
        w.grammars.finish()
        await asyncio.wait_for(w.worker.wait_idle(), 10)
        assert w.finished() == {"late": ("grammar", 3)}


@virtual_time
async def test_a_lost_room_is_forgotten() -> None:
    """Its grammar comes too late for it."""
    async with world() as w:
        room = handoff("x")
        pages = w.reserve(room)
        w.worker.lost("x", "the prefill side died")
        w.worker.release_pages("x", pages)
        w.grammars.finish()


@virtual_time
async def test_closing_fails_rooms_that_wait_for_their_grammar() -> None:
    """Each reader gets the reason."""
    async with world() as w:
        room = handoff("x")
        w.arrive(room, w.reserve(room))
        w.worker.close(RequestAborted("stops"))
        assert [m.code for m in w.messages(Failed)] == ["aborted"]


@virtual_time
async def test_bad_grammars_are_refused_before_pages_are_taken() -> None:
    """From a peer that does not check them; and all of them where there is no structured output."""
    async with world() as w:
        for spec in (GrammarSpec("json_schema", "{"), GrammarSpec("regex", "")):
            with pytest.raises(InvalidRequest) as caught:
                w.worker.reserve(Handoff("x", "p", 20, 2, SamplingParams(), 4, grammar=spec))
            assert caught.value.field == spec.kind
        bare = DecodeWorker(w.engine, w.streams, max_batch_requests=1)
        with pytest.raises(InvalidRequest, match="this decode worker has no structured output"):
            bare.reserve(handoff("x"))
        assert bare.pool.free == 32
