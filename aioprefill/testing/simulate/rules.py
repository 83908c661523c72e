"""The rules of the loop, read off the sequence of host calls alone. Pure.

It shares nothing with the pipeline: what that believes is not asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from aioprefill.host import Ingested
from aioprefill.testing.simulate.story import Violation
from aioprefill.tp_agree import CallToken

SLOTS = 2
ADMIT = 1
"""The switch of a `prepare` that may look for a batch."""
RESULTS = ("process_result", "fail_result")

_ingested = msgspec.msgpack.Decoder(Ingested)


class LoopRules:
    """Takes the leader's host calls in their order. `pausing` tells whether the host has begun a pause."""

    def __init__(self, violate: Callable[[str], Violation], pausing: Callable[[], bool]) -> None:
        self._violate = violate
        self._pausing = pausing
        self.flying: deque[int] = deque()
        """Forwards launched whose result is not processed."""
        self.launched = 0
        self.held = self._paused = self._exiting = self._was_pausing = False
        self._named = -1
        """The forward that the last preparation named."""
        self._prepared = False
        self._previous = ""
        self._idle_due = False

    def __repr__(self) -> str:
        return f"<LoopRules flying={list(self.flying)} launched={self.launched}>"

    def calling(self, token: CallToken) -> None:
        """A host call is about to be made. Raises `Violation`."""
        kind = token.kind
        if self._prepared and kind != "launch":
            raise self._violate(f"{kind} came between a batch and its launch")
        match kind:
            case "prepare":
                self._prepare(token)
            case "launch":
                self._launch(token)
            case "process_result" | "fail_result":
                self._result(token, token.detail)
            case "on_idle":
                self._idle()

    def called(self, token: CallToken, description: bytes) -> None:
        """It was made. Raises `Violation`."""
        match token.kind:
            case "prepare":
                self._prepared = bool(description)
            case "ingest":
                self._ingest(token, _ingested.decode(description))
            case "begin_drain":
                self._exiting = True
                self.held = False
        self._previous = token.kind

    def _prepare(self, token: CallToken) -> None:
        last = self.flying[0] if self.flying else -1
        if token.detail != last:
            raise self._violate(f"bookkeeping names forward {token.detail}, the last batch is {last}")
        self._named = token.detail
        if token.flags & ADMIT and (self._paused or self.held or self._exiting):
            raise self._violate("a batch was looked for while paused, held or draining")

    def _launch(self, token: CallToken) -> None:
        if not self._prepared:
            raise self._violate(f"forward {token.detail} was launched without a batch")
        if token.detail != self.launched:
            raise self._violate(f"forward {token.detail} was launched, {self.launched} was due")
        if len(self.flying) >= SLOTS:
            raise self._violate(f"forward {token.detail} is the third in flight")
        self._prepared = False
        self._idle_due = False
        self.launched += 1
        self.flying.append(token.detail)

    def _result(self, token: CallToken, number: int) -> None:
        if not self.flying or self.flying[0] != number:
            raise self._violate(f"result {number} is out of order: in flight are {list(self.flying)}")
        if token.agreed <= number:
            raise self._violate(f"result {number} was processed while its vote was pending")
        if self._named != number:
            raise self._violate(f"result {number} was processed before the step that does its bookkeeping")
        if self._paused and not self._exiting:
            raise self._violate(f"result {number} was processed in a pause")
        self.flying.popleft()
        self._idle_due = not self.flying

    def _ingest(self, token: CallToken, result: Ingested) -> None:
        pausing = self._pausing()
        if pausing and not self._was_pausing and self.flying:
            step = self._previous in RESULTS or result.consumed
            if not step:
                raise self._violate(f"a pause began outside a step, with {list(self.flying)} in flight")
        if result.consumed:
            if len(self.flying) != 1 or result.consumed != 1:
                raise self._violate(f"a pause consumed {result.consumed} of {list(self.flying)}")
            self._result(token, self.flying[0])
        self._was_pausing = pausing
        self._paused = result.paused
        self.held = result.held > 0
        self._exiting = self._exiting or result.exiting

    def _idle(self) -> None:
        if self.flying or not self._idle_due:
            raise self._violate(f"an idle step with {list(self.flying)} in flight, or a second one")
        self._idle_due = False

    @property
    def depth(self) -> int:
        """Forwards in flight."""
        return len(self.flying)
