"""Shows how the fetching and converting of a model goes, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aioprefill.config import ModelConfig
from aioprefill.engine.model_manifest import Report

if TYPE_CHECKING:
    from aioprefill.engine.model_files import ResolvedModel


def fetch_model(config: ModelConfig, **how: Any) -> ResolvedModel:
    """`resolve_model` with progress shown; `how` are further arguments of it. Raises `ModelError`."""
    from aioprefill.engine.model_files import resolve_model

    with shown_progress(f"model {config.model}") as report:
        return resolve_model(config.model, cache_dir=config.cache_dir, progress=report, **how)


@contextmanager
def shown_progress(subject: str) -> Iterator[Report]:
    """A report that draws a bar on a terminal, and elsewhere writes a line per step. Silent until called."""
    shown = _Bar(subject) if sys.stderr.isatty() else _Lines(subject)
    try:
        yield shown.report
    finally:
        shown.close()


class _Lines:
    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._step = ""

    def report(self, what: str, done: float | None) -> None:
        if what != self._step:
            self._step = what
            print(f"{self._subject}: {what} ...", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._progress: Any = None
        self._steps: dict[str, Any] = {}

    def report(self, what: str, done: float | None) -> None:
        if self._progress is None:
            self._progress = self._start()
        if what not in self._steps:
            for step in self._steps.values():
                self._progress.update(step, completed=1.0, total=1.0)
            self._steps[what] = self._progress.add_task(f"{self._subject}: {what}", total=None)
        if done is not None:
            self._progress.update(self._steps[what], completed=done, total=1.0)

    def _start(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        progress = Progress(*columns, console=Console(stderr=True))
        progress.start()
        return progress

    def close(self) -> None:
        if self._progress is not None:
            for step in self._steps.values():
                self._progress.update(step, completed=1.0, total=1.0)
            self._progress.stop()
