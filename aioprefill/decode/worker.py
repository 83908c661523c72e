"""The decode worker: takes rooms from a KV receiver, decodes them in batches, streams the tokens.

Rules:
- A room gets all its pages when it is reserved, those for what it may generate too: a sequence that runs
  never waits for memory.
- Pages are owned by the receiver until a room has arrived, then by its sequence; `_release` and
  `release_pages` are where they come back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NoReturn

import numpy as np

from aioprefill.decode.constraints import Constraints
from aioprefill.decode.sequence import Sequence, pages_needed
from aioprefill.decode.streams import Streams
from aioprefill.engine.grammar_port import GrammarSource
from aioprefill.engine.port import Engine, PageIds, SampledToken
from aioprefill.errors import AioprefillError, DeviceError, HostError, InvalidRequest, PeerError
from aioprefill.native.pages import PagePool
from aioprefill.signals import Signal
from aioprefill.transfer.port import Handoff


class DecodeWorker:
    """Handler of a KV receiver, and the loop that decodes (`run`)."""

    def __init__(
        self,
        engine: Engine,
        streams: Streams,
        *,
        max_batch_requests: int,
        grammars: GrammarSource | None = None,
    ) -> None:
        self._engine = engine
        self._streams = streams
        self._max_batch = max_batch_requests
        self._eos = frozenset(engine.spec.eos_token_ids)
        self._page_size = engine.spec.layout.page_size
        self.pool = PagePool(engine.num_pages)
        self.on_pages_free: Callable[[], None] = lambda: None
        """Called when pages came back: the receiver may have rooms that wait for them."""
        self._spare: dict[str, PageIds] = {}
        """Pages for generation, of rooms that are reserved."""
        self._coming: set[str] = set()
        """Rooms that are reserved, and neither arrived nor lost."""
        self._queue: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._dropped: set[str] = set()
        self._constraints = Constraints(grammars, self._grammar_known)
        self._held: dict[str, tuple[Sequence, SampledToken]] = {}
        """Rooms that have arrived before their grammar was compiled, with their first token."""
        self._wake = Signal()
        self._idle = Signal()
        self.steps = 0
        self.tokens = 0

    def __repr__(self) -> str:
        return (
            f"<DecodeWorker reserved={len(self._spare)} queued={len(self._queue)}"
            f" running={len(self._running)} {self.pool!r}>"
        )

    @property
    def busy(self) -> bool:
        """Sequences are being decoded, wait for it, or are on their way from a prefill process."""
        return bool(self._running or self._queue or self._held or self._coming)

    # The receiver's handler

    def reserve(self, handoff: Handoff) -> list[int] | None:
        """Pages for the room's prompt; None: not enough now. Raises `InvalidRequest` when never."""
        spec = self._engine.spec
        total = pages_needed(handoff, self._page_size)
        if handoff.max_new_tokens < 1:
            raise InvalidRequest("max_new_tokens", f"must be at least 1, got {handoff.max_new_tokens}")
        handoff.sampling.validate()
        self._constraints.check(handoff.grammar)
        tokens = handoff.prompt_tokens + handoff.max_new_tokens
        if tokens > spec.context_length:
            raise InvalidRequest(
                "max_new_tokens", f"prompt and new tokens are {tokens}, the context is {spec.context_length}"
            )
        if total > self.pool.num_pages:
            raise InvalidRequest(
                "max_new_tokens", f"needs {total} KV pages, the decode worker has {self.pool.num_pages}"
            )
        if total > self.pool.free:
            return None
        self._streams.opened(handoff.room)  # first: it may refuse
        pages = self.pool.take(total)
        self._spare[handoff.room] = pages[handoff.pages :]
        self._coming.add(handoff.room)
        self._constraints.reserve(handoff.room, handoff.grammar)
        reserved: list[int] = pages[: handoff.pages].tolist()
        return reserved

    def arrived(
        self, room: str, pages: list[int], first: SampledToken, handoff: Handoff, shards: int = 1
    ) -> None:
        """All KV and the first token of a room are here; its pages are ours now.

        Pages that came in shards are assembled on the engine's stream, ahead of every step of the sequence.
        """
        self._coming.discard(room)
        prompt = np.array(pages, dtype=np.int32)
        table = np.concatenate([prompt, self._spare.pop(room)])
        sequence = Sequence(handoff, table, first.token_id)
        if shards > 1 and room not in self._dropped:
            sequence.assembled = self._engine.assemble_pages(prompt, shards)
        if room in self._dropped:
            self._dropped.discard(room)
            self._constraints.forget(room)
            self._release(sequence)
            self._wake.set()
        elif self._constraints.waits(room):
            self._held[room] = sequence, first
        else:
            self._start(sequence, first)

    def lost(self, room: str, reason: str) -> None:
        """The room will not arrive."""
        self._coming.discard(room)
        self._wake.set()
        self._constraints.forget(room)
        self._dropped.discard(room)
        self._streams.failed(room, PeerError("prefill", reason))

    def release_pages(self, room: str, pages: list[int]) -> None:
        """Nothing writes to the pages of a lost room any more."""
        spare = self._spare.pop(room)
        self.pool.drop(np.concatenate([np.array(pages, dtype=np.int32), spare]))
        self.on_pages_free()

    # Decoding

    def drop(self, room: str) -> None:
        """Nobody reads the room any more: stop decoding it at its next step, or when it arrives."""
        self._coming.discard(room)  # a drain need not wait for it
        self._wake.set()
        if room in self._held:
            sequence, _ = self._held.pop(room)
            self._constraints.forget(room)
            self._release(sequence)
            return
        for sequence in self._queue:
            if sequence.room == room:
                self._queue.remove(sequence)
                self._release(sequence)
                return
        if room in self._spare or any(sequence.room == room for sequence in self._running):
            self._dropped.add(room)

    async def run(self) -> NoReturn:
        """Decode until cancelled; sequences that run then are failed by `close`."""
        while True:
            self._admit()
            if not self._running:
                self._idle.set()
                await self._wake.wait()
                continue
            launched = self._running
            forward = self._engine.launch([sequence.span() for sequence in launched])
            try:
                await forward.completion.wait()
            except DeviceError as error:
                self._fail_running(error)
                if error.sticky:
                    raise
                continue
            self.steps += 1
            if self._running is launched:  # else `close` has failed them meanwhile
                self._take_step(forward.outputs())
            await asyncio.sleep(0)

    async def wait_idle(self) -> None:
        """Return when nothing is decoded or queued."""
        while self.busy:
            await self._idle.wait()

    def stats(self) -> dict[str, int | float | str]:
        """Counters and gauges."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "rooms_reserved": len(self._spare),
            "rooms_queued": len(self._queue),
            "rooms_running": len(self._running),
            "rooms_compiling": len(self._held),
            "streams": len(self._streams),
            "streams_expiring": self._streams.expiring,
            "pages": self.pool.num_pages,
            "pages_free": self.pool.free,
        }

    def close(self, error: AioprefillError) -> None:
        """Fail what is queued, what runs, and what waits for its grammar."""
        self._running += [sequence for sequence, _ in self._held.values()]
        for room in self._held:
            self._constraints.forget(room)
        self._held.clear()
        self._running += self._queue
        self._queue.clear()
        self._fail_running(error)

    def _admit(self) -> None:
        while self._queue and len(self._running) < self._max_batch:
            self._running.append(self._queue.popleft())

    def _take_step(self, outputs: SequenceOf[SampledToken | None]) -> None:
        running, self._running = self._running, []
        for sequence, token in zip(running, outputs, strict=True):
            assert token is not None, "every decode span asks for a token"
            if sequence.room in self._dropped:
                self._dropped.discard(sequence.room)
                self._release(sequence)
            else:
                self._take(sequence, token)

    def _take(self, sequence: Sequence, token: SampledToken) -> None:
        """One more token of a sequence, which then goes on or ends."""
        try:
            reason = sequence.take(token, self._eos)
        except HostError as error:
            self._fail(sequence, error)
            return
        self.tokens += 1
        self._streams.token(sequence.room, sequence.generated - 1, token.token_id)
        if reason is not None:
            self._streams.finished(sequence.room, reason, sequence.generated)
            self._release(sequence)
        elif sequence.generated == 1:
            self._queue.append(sequence)
            self._wake.set()
        else:
            self._running.append(sequence)

    def _grammar_known(self, room: str) -> None:
        if room in self._held:
            self._start(*self._held.pop(room))
            self._wake.set()

    def _start(self, sequence: Sequence, first: SampledToken) -> None:
        try:
            sequence.matcher = self._constraints.take(sequence.room)
        except AioprefillError as error:
            self._fail(sequence, error)
        else:
            self._take(sequence, first)

    def _fail(self, sequence: Sequence, error: AioprefillError) -> None:
        """End one room that does not run."""
        self._streams.failed(sequence.room, error)
        self._release(sequence)
        self._wake.set()

    def _fail_running(self, error: AioprefillError) -> None:
        running, self._running = self._running, []
        for sequence in running:
            self._streams.failed(sequence.room, error)
            self._dropped.discard(sequence.room)
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        assembled = sequence.assembled
        if assembled is None or assembled.done():
            self._free(sequence)
        else:  # it ends before its first step: the device still writes to the pages
            loop = asyncio.get_running_loop()
            assembled.add_done_callback(lambda done: loop.call_soon_threadsafe(self._free, sequence))

    def _free(self, sequence: Sequence) -> None:
        self.pool.drop(sequence.pages)
        self.on_pages_free()
