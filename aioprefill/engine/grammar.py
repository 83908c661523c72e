"""Compiles grammars in threads, with a time limit, and keeps them (`GrammarSource`). Imports no xgrammar.

A thread that compiles cannot be stopped. It is a daemon, so that neither the loop nor the interpreter's
end waits for one that takes for ever; how many there can be is the book's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

from aioprefill.engine.grammar_book import GrammarBook, GrammarLimits
from aioprefill.engine.grammar_port import CompiledGrammar, Outcome
from aioprefill.errors import AioprefillError, ConfigError, InvalidRequest, RequestTimeout
from aioprefill.grammar_spec import GrammarSpec

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
ENDING_S = 0.05
"""For a thread that has told its outcome to end; those that are late are left behind."""


class Compiler(Protocol):
    """Turns texts into grammars for one model; any thread."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Blocks. Raises `InvalidRequest` naming the field for what is no grammar."""


Runner: TypeAlias = Callable[[Callable[[], Outcome], Callable[[Outcome], None]], threading.Thread | None]
"""Runs the first off the loop, and hands what it returns to the second on the loop; its thread, if any."""


def run_in_thread(work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> threading.Thread:
    """A thread of its own. `done` is not called when the loop is closed before."""
    loop = asyncio.get_running_loop()

    def run() -> None:
        outcome = work()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done, outcome)

    thread = threading.Thread(target=run, name="aioprefill-grammar", daemon=True)
    thread.start()
    return thread


class Grammars:
    """The grammars of one model.

    `make_compiler` is called once, in a thread, with the first grammar; it may raise `AioprefillError`,
    and is called again with the next one then. `timeout_s` counts from the first ask.
    """

    def __init__(
        self,
        make_compiler: Callable[[], Compiler],
        *,
        timeout_s: float = 10.0,
        limits: GrammarLimits | None = None,
        run: Runner = run_in_thread,
    ) -> None:
        self._make_compiler = make_compiler
        self._timeout_s = timeout_s
        self._run = run
        self._lock = threading.Lock()
        self._compiler: Compiler | None = None
        self._threads: list[threading.Thread] = []
        self._timers: dict[GrammarSpec, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        self._closed = False
        self.book = GrammarBook(limits)

    @classmethod
    def for_model(
        cls, folder: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...], timeout_s: float
    ) -> Grammars:
        """Grammars over the tokenizer of a model folder."""

        def make() -> Compiler:
            try:
                from aioprefill.engine.grammar_xgrammar import XGrammarCompiler
            except ImportError as err:
                raise ConfigError(
                    f"structured output needs xgrammar, but importing it failed: {err}; "
                    "install it with: pip install --no-deps 'xgrammar>=0.2.9,<0.3'"
                ) from err
            return XGrammarCompiler(folder, vocab_size=vocab_size, eos_token_ids=eos_token_ids)

        return cls(make, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"<Grammars {self.book!r}>"

    def ask(self, spec: GrammarSpec, done: Callable[[Outcome], None]) -> Outcome | None:
        """See `GrammarSource.ask`."""
        outcome = self.book.ask(spec, done)
        if outcome is None and spec not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[spec] = loop.call_later(self._timeout_s, self._expire, spec)
            self._start_next()
        return outcome

    async def aclose(self) -> None:
        """See `GrammarSource.aclose`. Waits at most 2 s."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.book.drop_queued()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while not self.book.idle:
                    self._changed.clear()
                    await self._changed.wait()
        for thread in self._threads:
            thread.join(ENDING_S)

    def _start_next(self) -> None:
        while not self._closed and (spec := self.book.next_job()) is not None:
            self._start(spec)

    def _start(self, spec: GrammarSpec) -> None:
        thread = self._run(lambda: self._compile(spec), lambda outcome: self._compiled(spec, outcome))
        if thread is not None:
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]

    def _compile(self, spec: GrammarSpec) -> Outcome:
        """In a thread. Whatever goes wrong is this grammar's outcome."""
        try:
            with self._lock:
                if self._compiler is None:
                    self._compiler = self._make_compiler()
            return self._compiler.compile(spec)
        except InvalidRequest as err:
            return err
        except AioprefillError as err:
            return InvalidRequest(spec.kind, str(err))
        except Exception as err:
            logger.exception("a grammar could not be compiled")
            return InvalidRequest(spec.kind, f"could not be compiled: {err!r}")

    def _compiled(self, spec: GrammarSpec, outcome: Outcome) -> None:
        timer = self._timers.pop(spec, None)
        if timer is not None:
            timer.cancel()
        self._tell(self.book.compiled(spec, outcome), outcome)
        self._start_next()

    def _expire(self, spec: GrammarSpec) -> None:
        del self._timers[spec]
        limit = f"{spec.kind}: not compiled within {self._timeout_s:g} s (option grammar-timeout-s)"
        self._tell(self.book.expired(spec), RequestTimeout(limit))
        self._start_next()

    def _tell(self, waiters: list[Callable[[Outcome], None]], outcome: Outcome) -> None:
        self._changed.set()
        for waiter in waiters if not self._closed else ():
            waiter(outcome)
