"""Enters the plugin's loop as SGLang would, through the scheduler's own dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aioprefill.config import SchedulerConfig, SglangConfig
from aioprefill.sglang.loop import run_loop
from aioprefill.sglang.plugin import OVERLAP_LOOP

CONFIG = SglangConfig(input_poll_s=0.002, loop=SchedulerConfig(drain_timeout_s=5))
_chosen = [CONFIG]


@contextmanager
def with_config(config: SglangConfig) -> Iterator[None]:
    """Run the plugin's loop with other settings."""
    _chosen.append(config)
    try:
        yield
    finally:
        _chosen.pop()


def enter_plugin_loop(scheduler: Any, run: Any) -> None:
    """Run the scheduler's event loop with its prefill loop replaced."""
    runs: list[Any] = []

    def loop() -> None:
        run_loop(scheduler, _chosen[-1], release="0.5.23", on_entered=runs.append)

    setattr(scheduler, OVERLAP_LOOP, loop)
    try:
        scheduler.run_event_loop()
    finally:
        delattr(scheduler, OVERLAP_LOOP)
        if runs:
            run.stats = runs[0].stats()
