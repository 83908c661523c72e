"""Structured output without a model and without threads: compilations end when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aioprefill.engine.grammar import Grammars
from aioprefill.engine.grammar_book import GrammarLimits
from aioprefill.engine.grammar_port import MaskWords, Outcome
from aioprefill.errors import InvalidRequest
from aioprefill.grammar_spec import GrammarSpec

MISFIT = 13
"""The token that no fake grammar takes."""


@dataclass(slots=True)
class FakeMatcher:
    """Over after so many tokens."""

    left: int
    first_mask: MaskWords

    @property
    def over(self) -> bool:
        """See `Matcher.over`."""
        return self.left == 0

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        assert not self.over, "a token came after the end"
        if token_id == MISFIT:
            return False
        self.left -= 1
        return True

    def mask(self) -> MaskWords:
        """See `Matcher.mask`."""
        assert not self.over, "a mask was wanted after the end"
        return self.first_mask.copy()


@dataclass(frozen=True, slots=True)
class FakeGrammar:
    """Implements `CompiledGrammar`: allows the tokens 0 to 31."""

    spec: GrammarSpec
    size: int = 100
    tokens: int = 3
    """Length of every output."""

    @property
    def first_mask(self) -> MaskWords:
        """See `CompiledGrammar.first_mask`."""
        mask: MaskWords = np.zeros(32, dtype=np.int32)
        mask[0] = -1
        return mask

    def matcher(self) -> FakeMatcher:
        """See `CompiledGrammar.matcher`."""
        return FakeMatcher(self.tokens, self.first_mask)


class FakeCompiler:
    """Implements `Compiler`. Texts that begin with "bad" do not compile, "boom" breaks it."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.tokens = 3
        """Length of every output."""

    def compile(self, spec: GrammarSpec) -> FakeGrammar:
        """See `Compiler.compile`."""
        self.compiled.append(spec.text)
        if spec.text.startswith("bad"):
            raise InvalidRequest(spec.kind, "does not compile: it is bad")
        if spec.text.startswith("boom"):
            raise ZeroDivisionError(spec.text)
        return FakeGrammar(spec, tokens=self.tokens)


class FakeGrammars(Grammars):
    """The real cache, limits and timers over `FakeCompiler`; `finish` ends compilations, oldest first."""

    def __init__(self, *, timeout_s: float = 10.0, limits: GrammarLimits | None = None) -> None:
        self.compiler = FakeCompiler()
        self.running: deque[tuple[Callable[[], Outcome], Callable[[Outcome], None]]] = deque()
        super().__init__(lambda: self.compiler, timeout_s=timeout_s, limits=limits, run=self._begin)

    def _begin(self, work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        self.running.append((work, done))

    def finish(self, count: int = 1) -> None:
        """Compilations end."""
        for _ in range(count):
            work, done = self.running.popleft()
            done(work())
