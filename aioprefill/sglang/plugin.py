"""The entry point that SGLang loads. Without AIOPREFILL in the environment it does nothing at all.

AIOPREFILL=1 puts aioprefill's loop in the place of SGLang's prefill loop, and leaves SGLang's own where it
cannot run, with a warning. AIOPREFILL=require ends the process instead. SGLang only logs what a plugin
raises, so a refusal is a `SystemExit` here, and an error of the loop later.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from aioprefill.config import SglangConfig
from aioprefill.config_sources import resolve_settings
from aioprefill.errors import AioprefillError, ConfigError
from aioprefill.sglang.contract import instance_faults, release_fault

logger = logging.getLogger(__name__)

VARIABLE = "AIOPREFILL"
ENTRY_POINT = "aioprefill"
"""Its name in the group `sglang.srt.plugins`."""
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
OVERLAP_LOOP = "event_loop_overlap_disagg_prefill"
OTHER_LOOPS = ("event_loop_normal_disagg_prefill", "event_loop_pp_disagg_prefill")
"""SGLang's loops of prefill shapes that are not served."""


class Mode(enum.Enum):
    """What AIOPREFILL asks for."""

    OFF = "off"
    ON = "1"
    REQUIRE = "require"


def mode_of(environment: Mapping[str, str]) -> Mode:
    """Raises `ConfigError` for a value that means nothing."""
    value = environment.get(VARIABLE, "").strip().lower()
    if value in ("", "0"):
        return Mode.OFF
    if value in ("1", "require"):
        return Mode(value)
    raise ConfigError(
        f"{VARIABLE}={value!r} means nothing: unset or 0 leaves SGLang's own loop, 1 runs aioprefill's where "
        "it can, require refuses to start where it cannot"
    )


def register() -> None:
    """Called by SGLang in each of its processes, before its classes are used."""
    try:
        mode = mode_of(os.environ)
        if mode is Mode.OFF:
            return
        config = resolve_settings("sglang").build(SglangConfig)
    except ConfigError as error:
        raise SystemExit(f"aioprefill: {error}") from error
    try:
        release = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        _fall_back(mode, "SGLang's release is not known: it is imported from where it is not installed")
        return
    fault = release_fault(release) or missing_package()
    if fault is not None:
        _fall_back(mode, fault)
        return
    _hook(mode, config, release)


def missing_package() -> str | None:
    """What the loop needs and is not installed, with how to install it, or None."""
    if importlib.util.find_spec("uvloop") is None:
        return "uvloop is not installed: pip install uvloop"
    return None


def _fall_back(mode: Mode, fault: str) -> None:
    """Refuse to start, or warn that SGLang's own loop runs."""
    if mode is Mode.REQUIRE:
        raise SystemExit(f"aioprefill: {fault}; {VARIABLE}=require refuses to run SGLang's own loop")
    logger.warning("aioprefill: %s; SGLang's own prefill loop runs", fault)


def _hook(mode: Mode, config: SglangConfig, release: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    warned: set[str] = set()

    def prefill_loop(own_loop: Callable[[Any], None], scheduler: Any) -> None:
        fault = fault_of(scheduler)
        if fault is None:
            from aioprefill.sglang.loop import run_loop

            run_loop(scheduler, config, release=release)
            return
        if mode is Mode.REQUIRE:
            raise ConfigError(f"{fault}; {VARIABLE}=require refuses to run SGLang's own loop")
        if fault not in warned:
            warned.add(fault)
            logger.warning("aioprefill: %s; SGLang's own prefill loop runs", fault)
        own_loop(scheduler)

    for name in (OVERLAP_LOOP, *OTHER_LOOPS):
        HookRegistry.register(f"{SCHEDULER}.{name}", prefill_loop, HookType.AROUND)


def fault_of(scheduler: Any) -> str | None:
    """Why the loop cannot run on this scheduler, or None."""
    from aioprefill.sglang.completion import cuda_for
    from aioprefill.sglang.shape import shape_of

    shape = shape_of(scheduler).unsupported
    if shape is not None:
        return f"{shape} is not supported"
    missing = list(instance_faults(scheduler))
    if missing:
        return f"this SGLang's scheduler is not the one that is supported: {'; '.join(missing)}"
    try:
        cuda_for(scheduler.device)
    except AioprefillError as error:
        return str(error)
    return None
