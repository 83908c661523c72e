"""Turns what torch raises into `DeviceError`, with the device's own name for it."""

from __future__ import annotations

import re

import torch

from aioprefill.completion import STICKY_CUDA_ERRORS, cuda_runtime
from aioprefill.errors import ConfigError, DeviceError

OUT_OF_MEMORY = "outOfMemory"
NOT_FINITE = "notFinite"
_CPU_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory", re.IGNORECASE)


def device_error(err: Exception) -> DeviceError:
    """The `DeviceError` for an exception of a forward. Only CUDA errors can be sticky."""
    if isinstance(err, DeviceError):
        return err
    text = str(err) or repr(err)
    out_of_memory = isinstance(err, MemoryError | torch.OutOfMemoryError)
    if out_of_memory or (isinstance(err, RuntimeError) and _CPU_OUT_OF_MEMORY.search(text)):
        hint = "give less KV memory, or smaller batches"
        return DeviceError(OUT_OF_MEMORY, f"{_first_line(text)} ({hint})", sticky=False)
    code = getattr(err, "error_code", None)
    if isinstance(err, torch.AcceleratorError) and isinstance(code, int):
        name = _cuda_name(code)
        return DeviceError(name, _first_line(text), sticky=name in STICKY_CUDA_ERRORS)
    return DeviceError(type(err).__name__, text, sticky=False)


def _first_line(text: str) -> str:
    """torch appends general advice, which is noise in a log."""
    return text.strip().partition("\n")[0]


def _cuda_name(code: int) -> str:
    try:
        return str(cuda_runtime().cudaError_t(code).name)
    except (ConfigError, ValueError):
        return f"cudaError{code}"


def not_finite(span: int) -> DeviceError:
    """The model gave logits that are not numbers."""
    return DeviceError(
        NOT_FINITE,
        f"the logits of span {span} are not finite: the weights are damaged, or the number format "
        "overflows (try dtype float32)",
        sticky=False,
    )
