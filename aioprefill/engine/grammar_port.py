"""What hosts and decode workers need of structured output. Imports neither torch nor xgrammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from aioprefill.errors import AioprefillError
from aioprefill.grammar_spec import GrammarSpec

MaskWords: TypeAlias = npt.NDArray[np.int32]
"""Shape (ceil(vocabulary / 32),): see `engine.port.TokenMask`."""


class Matcher(Protocol):
    """Follows one output through its grammar."""

    @property
    def over(self) -> bool:
        """The output is complete: nothing may follow, and `mask` and `accept` must not be called."""

    def accept(self, token_id: int) -> bool:
        """Append a token; False, and nothing is changed, when it does not fit."""

    def mask(self) -> MaskWords:
        """The tokens that fit next, a fresh array. Any thread, but not while `accept` runs. Never raises."""


class CompiledGrammar(Protocol):
    """A grammar for one model's tokens. Immutable, shared by all requests that ask for it."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def first_mask(self) -> MaskWords:
        """The tokens that an output may begin with; at least one. Not to be changed."""

    def matcher(self) -> Matcher:
        """At the beginning of an output."""


Outcome: TypeAlias = CompiledGrammar | AioprefillError


class GrammarSource(Protocol):
    """Compiles grammars off the loop. Everything is called on the loop's thread."""

    def ask(self, spec: GrammarSpec, done: Callable[[Outcome], None]) -> Outcome | None:
        """The compiled grammar, or why there is none, if that is known; else `done` is called later, once.

        An error is an `InvalidRequest` that names the field, or a `RequestTimeout`. Never blocks.
        """

    async def aclose(self) -> None:
        """Call no `done` any more, and wait a moment for compilations under way. Idempotent."""
