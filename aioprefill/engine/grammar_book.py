"""Which grammars are compiled, being compiled, or wait for it. Pure.

Rules:
- A grammar is compiled once, however many ask for it meanwhile; errors are not kept.
- At most `max_running` compilations at a time. One that is past its time cannot be stopped: it becomes
  *late*, which makes room for another; with `max_late` of those nothing new is begun.
- What is kept is bounded by number and bytes; the longest unused goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from aioprefill.engine.grammar_port import CompiledGrammar, Outcome
from aioprefill.errors import AioprefillError, RequestTimeout
from aioprefill.grammar_spec import GrammarSpec

Waiter: TypeAlias = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of a book."""

    entries: int = 128
    size: int = 256 << 20
    """Bytes of the grammars that are kept."""
    running: int = 2
    late: int = 4


@dataclass(slots=True)
class Job:
    """A grammar that is wanted."""

    spec: GrammarSpec
    waiters: list[Waiter] = field(default_factory=list)


class GrammarBook:
    """See the rules above. The caller does what `next_job` says and reports `compiled` and `expired`."""

    def __init__(self, limits: GrammarLimits | None = None) -> None:
        self._limits = limits or GrammarLimits()
        self._kept: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._queued: OrderedDict[GrammarSpec, Job] = OrderedDict()
        self._running: dict[GrammarSpec, Job] = {}
        self._late: set[GrammarSpec] = set()
        self.size = 0

    def __repr__(self) -> str:
        return (
            f"<GrammarBook kept={len(self._kept)} ({self.size:,} B) queued={len(self._queued)}"
            f" running={len(self._running)} late={len(self._late)}>"
        )

    @property
    def kept(self) -> int:
        """Compiled grammars."""
        return len(self._kept)

    @property
    def idle(self) -> bool:
        """Nothing is compiled or waits for it; late ones do not count."""
        return not self._running and not self._queued

    def ask(self, spec: GrammarSpec, waiter: Waiter) -> Outcome | None:
        """The grammar, or why it will not be compiled; None: the waiter is to be told."""
        found = self._kept.get(spec)
        if found is not None:
            self._kept.move_to_end(spec)
            return found
        if spec in self._late:
            return RequestTimeout(f"{spec.kind}: still compiling, past its limit: make it simpler")
        job = self._running.get(spec) or self._queued.get(spec)
        if job is None:
            if len(self._late) >= self._limits.late:
                return RequestTimeout(
                    f"{spec.kind}: not compiled, for {len(self._late)} other grammars are past their limit"
                )
            job = self._queued[spec] = Job(spec)
        job.waiters.append(waiter)
        return None

    def next_job(self) -> GrammarSpec | None:
        """A grammar to compile now."""
        if not self._queued or len(self._running) >= self._limits.running:
            return None
        spec, job = self._queued.popitem(last=False)
        self._running[spec] = job
        return spec

    def compiled(self, spec: GrammarSpec, outcome: Outcome) -> list[Waiter]:
        """A compilation ended, in time or late; who is to be told."""
        self._late.discard(spec)
        job = self._running.pop(spec, None)
        if not isinstance(outcome, AioprefillError):
            self._keep(spec, outcome)
        return [] if job is None else job.waiters

    def expired(self, spec: GrammarSpec) -> list[Waiter]:
        """The time of a grammar is up; who is to be told. Nobody when it is compiled."""
        job = self._queued.pop(spec, None)
        if job is None:
            job = self._running.pop(spec, None)
            if job is not None:
                self._late.add(spec)
        return [] if job is None else job.waiters

    def drop_queued(self) -> None:
        """Begin nothing more."""
        self._queued.clear()

    def _keep(self, spec: GrammarSpec, grammar: CompiledGrammar) -> None:
        before = self._kept.pop(spec, None)
        self._kept[spec] = grammar
        self.size += grammar.size - (0 if before is None else before.size)
        while self._kept and (self.size > self._limits.size or len(self._kept) > self._limits.entries):
            _, gone = self._kept.popitem(last=False)
            self.size -= gone.size
