"""Requests with a grammar on the native host: fake device, fake compiler, virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from aioprefill.config import NativeConfig, SchedulerConfig
from aioprefill.engine.grammar_book import GrammarLimits
from aioprefill.errors import InvalidRequest, RequestAborted, RequestTimeout
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.native.host import NativeHost
from aioprefill.request import PrefillHandle, PrefillRequest
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import settle, virtual_time
from aioprefill.testing.engine import FakeEngine
from aioprefill.testing.grammars import FakeGrammars
from aioprefill.testing.transfer import FakeTransfer

PEER = "tcp://127.0.0.1:7420"


@dataclass
class World:
    """A scheduler on a native host whose compiler is told when to end."""

    scheduler: PrefillScheduler
    host: NativeHost
    engine: FakeEngine
    transfer: FakeTransfer
    grammars: FakeGrammars

    def submit(
        self, name: str, grammar: str | None = None, *, length: int = 20, **options: Any
    ) -> PrefillHandle:
        """A request of its own prefix; `grammar` is a regular expression."""
        tokens = (np.arange(length) * 7 + sum(map(ord, name)) * 131) % 1000
        spec = None if grammar is None else GrammarSpec("regex", grammar)
        return self.scheduler.submit(PrefillRequest(tokens, request_id=name, grammar=spec, **options))

    def launched(self) -> list[list[int]]:
        """Numbers of tokens of each forward's spans."""
        return [[len(span.token_ids) for span in forward.spans] for forward in self.engine.forwards]


@asynccontextmanager
async def world(
    *, duration_s: float | None = 1.0, timeout_s: float = 10.0, limits: GrammarLimits | None = None
) -> AsyncIterator[World]:
    """At the end nothing is in use, whatever is still being compiled."""
    engine = FakeEngine(num_pages=64, duration_s=duration_s)
    transfer, grammars = FakeTransfer(), FakeGrammars(timeout_s=timeout_s, limits=limits)
    host = NativeHost(engine, transfer, NativeConfig(chunk_tokens=64), grammars=grammars)
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=5.0)) as scheduler:
        await settle()
        yield World(scheduler, host, engine, transfer, grammars)
        for forward in engine.forwards:
            forward.completion.complete()
        await settle()
        host.memory.check()
        assert host.memory.pool.held == 0 and host.ledger.requests == {}
        assert host.frontend.queued_requests == 0 and transfer.open_rooms == []
    transfer.check()


@virtual_time
async def test_a_request_whose_grammar_is_not_ready_holds_up_nobody() -> None:
    """Later ones pass it, for as long as it takes; its first token comes under its mask when it is ready."""
    async with world() as w:
        held = w.submit("held", "[a-z]")
        others = [w.submit(f"other{number}") for number in range(3)]
        await asyncio.gather(*others)
        await asyncio.sleep(5)
        assert not held.done and all(span.mask is None for span in w.engine.forwards[0].spans)
        w.grammars.finish()
        await held
        (span,) = w.engine.forwards[-1].spans
        assert span.mask is not None and np.flatnonzero(span.mask()).tolist() == [0]
        assert w.grammars.compiler.compiled == ["[a-z]"]


@virtual_time
async def test_L4_a_grammar_that_became_ready_retries_the_preparation_at_once() -> None:
    """While a forward of 60 s runs, with the marker set: launched in the same instant, not at its end."""
    async with world(duration_s=60.0) as w:
        w.submit("long")
        await settle()
        held = w.submit("held", "[a-z]", length=33)
        await asyncio.sleep(5)
        assert w.scheduler._pipeline.marker and w.launched() == [[20]]
        w.grammars.finish()
        await settle()
        assert w.launched() == [[20], [33]] and asyncio.get_running_loop().time() == 5
        assert (await held).launched_s == 5


@virtual_time
async def test_a_known_grammar_costs_no_wait() -> None:
    """The second request with it is launched on arrival; two at once share a compilation."""
    async with world() as w:
        first, second = w.submit("a", "x+"), w.submit("b", "x+")
        await settle()
        w.grammars.finish()
        await asyncio.gather(first, second)
        now = asyncio.get_running_loop().time()
        assert (await w.submit("c", "x+")).launched_s == now
        assert w.grammars.compiler.compiled == ["x+"] and not w.grammars.running


@virtual_time
async def test_one_that_does_not_compile_is_refused_alone() -> None:
    """By the field's name and the compiler's words; those in its batch are served; a broken compiler too."""
    async with world() as w:
        bad, good, broken = w.submit("bad", "bad("), w.submit("good", "g"), w.submit("broken", "boom")
        plain = w.submit("plain")
        await settle()
        w.grammars.finish(2)
        await settle()
        w.grammars.finish()
        with pytest.raises(InvalidRequest, match="regex: does not compile: it is bad"):
            await bad
        with pytest.raises(InvalidRequest, match="regex: could not be compiled: ZeroDivisionError"):
            await broken
        assert (await good).token_id >= 0 and (await plain).token_id >= 0


@virtual_time
async def test_what_is_wrong_at_a_glance_is_refused_by_submit() -> None:
    """Nothing is queued for it."""
    async with world() as w:
        with pytest.raises(InvalidRequest, match="regex: is empty"):
            w.submit("x", " ")
        assert w.host.frontend.queued_requests == 0


@virtual_time
async def test_a_compilation_that_takes_too_long_fails_its_requests_and_serving_goes_on() -> None:
    """At the limit, not before; others compile meanwhile; when it ends after all it is kept."""
    async with world(timeout_s=3.0, limits=GrammarLimits(running=1)) as w:
        slow = w.submit("slow", "slow")
        await asyncio.sleep(1)
        other = w.submit("other", "o")
        await asyncio.sleep(1.9)
        assert not slow.done and len(w.grammars.running) == 1
        with pytest.raises(RequestTimeout, match=r"regex: not compiled within 3 s"):
            await slow
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)
        assert len(w.grammars.running) == 2, "the next one began"
        again = w.submit("again", "slow")
        with pytest.raises(RequestTimeout, match="still compiling"):
            await again
        await settle()
        stuck = w.grammars.running.popleft()
        w.grammars.finish()
        assert (await other).token_id >= 0
        w.grammars.running.append(stuck)
        w.grammars.finish()
        assert (await w.submit("third", "slow")).token_id >= 0


@virtual_time
async def test_an_abort_while_compiling_leaks_nothing() -> None:
    """Its room and its place go at once; an id used again is not given the old one's grammar."""
    async with world() as w:
        first, bad = w.submit("x", "old", peer=PEER), w.submit("bad", "bad", peer=PEER)
        await settle()
        first.abort("enough")
        bad.abort("enough")
        with pytest.raises(RequestAborted, match="enough"):
            await first
        await settle()
        assert w.host.ledger.requests == {} and w.transfer.open_rooms == []
        second = w.submit("x", "new", peer=PEER)
        await settle()
        w.grammars.finish(2)  # the old ones
        await settle()
        assert w.launched() == [] and not second.done
        w.grammars.finish()
        await second.wait_transferred()


@virtual_time
async def test_the_peer_hears_of_a_grammar_that_compiles_and_of_no_other() -> None:
    """It would find fault with it too, and its answer could reach the client first."""
    async with world() as w:
        handle, bad = w.submit("x", "[0-9]", peer=PEER), w.submit("y", "bad", peer=PEER)
        await asyncio.sleep(1)
        assert w.transfer.opened == []
        w.grammars.finish(2)
        await handle.wait_transferred()
        with pytest.raises(InvalidRequest):
            await bad.wait_transferred()
        assert [handoff.room for handoff in w.transfer.opened] == ["x"]
        later = w.submit("z", "[0-9]", peer=PEER)
        await settle()
        assert len(w.transfer.opened) == 2, "known: at once"
        await later.wait_transferred()
        assert w.transfer.opened[0].grammar == GrammarSpec("regex", "[0-9]")


@virtual_time
async def test_a_retracted_request_keeps_its_grammar() -> None:
    """Paused between two chunks and requeued: after resume its final chunk has the mask."""
    async with world(duration_s=None) as w:
        handle = w.submit("x", "[a-z]", length=150)
        await settle()
        w.grammars.finish()
        await settle()
        paused = asyncio.ensure_future(w.scheduler.pause("retract"))
        await settle()
        for number in (0, 1):
            w.engine.forwards[number].complete()
            await settle()
        assert (await paused)["requeued"] == 1
        await w.scheduler.resume()
        while not handle.done:
            await settle()
            for forward in w.engine.forwards:
                forward.completion.complete()
        masks = [span.mask is not None for forward in w.engine.forwards for span in forward.spans]
        finals = [span.sample is not None for forward in w.engine.forwards for span in forward.spans]
        assert masks[-1] and finals[-1]


@virtual_time
async def test_a_drain_does_not_wait_for_compilations() -> None:
    """The request is dropped as one that was never launched; what comes out later is not listened to."""
    async with world() as w:
        handle = w.submit("x", "slow")
        await settle()
        report = await w.scheduler.drain(5.0)
        assert report.dropped == ("x",) and asyncio.get_running_loop().time() == 0
        with pytest.raises(RequestAborted):
            await handle
        w.grammars.finish()


@virtual_time
async def test_without_structured_output_a_constrained_request_is_refused_alone() -> None:
    """A host that was given no grammars says so."""
    host = NativeHost(FakeEngine(duration_s=1.0))
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=1.0)) as scheduler:
        plain = scheduler.submit(PrefillRequest([1, 2]))
        with pytest.raises(InvalidRequest, match="grammar: this host has no structured output"):
            await scheduler.submit(PrefillRequest([1], grammar=GrammarSpec("grammar", 'root ::= "a"')))
        assert (await plain).token_id >= 0
