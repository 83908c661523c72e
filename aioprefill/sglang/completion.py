"""The end of one of SGLang's forwards: its `copy_done`, looked at when the pacer says so."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from aioprefill.completion import STICKY_CUDA_ERRORS, cuda_runtime
from aioprefill.errors import DeviceError, HostError
from aioprefill.pacer import Pacer
from aioprefill.timerfd import FineTimer


@dataclass(slots=True)
class Pacing:
    """What the completions of one loop share."""

    timer: FineTimer
    cuda: Any = None
    """`cuda.bindings.runtime` on a GPU, else None."""
    pacer: Pacer = field(default_factory=Pacer)
    free_at: float = 0.0
    """When the last forward was found done: the device went on with the next one, on the loop's clock."""
    looks: int = 0
    _unlearned: tuple[int, float, int] | None = None
    """Arguments of `Pacer.observe` for the last forward."""

    def found(self, tokens: int, started: float, now: float, looks: int) -> None:
        """A forward was found done. What it teaches has to wait, for its result is in a hurry."""
        self.free_at = now
        self.looks += looks
        self._unlearned = tokens, now - started, looks

    def learn(self) -> None:
        """Learn from the last forward."""
        if self._unlearned is not None:
            self.pacer.observe(*self._unlearned)
            self._unlearned = None


class SglangCompletion:
    """Implements `Completion` over one result of SGLang's `run_batch`.

    `copy_done` is read at each look, for delayed sampling and SGLang's copy worker replace it. `tokens` is
    what the forward computes.
    """

    def __init__(self, result: Any, tokens: int, launched_at: float, pacing: Pacing) -> None:
        self._result = result
        self._tokens = tokens
        self.launched_at = launched_at
        self._pacing = pacing
        self._done = False

    @property
    def ended(self) -> bool:
        """It was seen done, or failed, by an earlier look."""
        return self._done

    @property
    def submitted(self) -> bool:
        """See `Completion.submitted`."""
        return self._result.copy_done is not None and self._result.delay_sample_func is None

    def query(self) -> bool:
        """See `Completion.query`."""
        if not self._done:
            self._require_submitted()
            self._done = ask(self._result.copy_done, self._pacing.cuda)
        return self._done

    async def wait(self) -> None:
        """See `Completion.wait`."""
        self._require_submitted()
        pacing, clock, looks = self._pacing, time.monotonic, 0
        pacing.learn()
        started = max(self.launched_at, pacing.free_at)

        def look() -> float | None:
            nonlocal looks
            looks += 1
            return None if self.query() else pacing.pacer.next_look(self._tokens, clock() - started)

        await pacing.timer.sleep(started + pacing.pacer.begin(self._tokens) - clock())
        await pacing.timer.repeat(look)
        pacing.found(self._tokens, started, clock(), looks)

    def synchronize(self) -> None:
        """See `Completion.synchronize`."""
        self._require_submitted()
        try:
            self._result.copy_done.synchronize()
        except RuntimeError as error:
            raise DeviceError(type(error).__name__, str(error), sticky=True) from error
        self.query()

    def _require_submitted(self) -> None:
        if not self.submitted:
            raise HostError("the sample of a forward was never submitted, so its result would never come")


def ask(copy_done: Any, cuda: Any) -> bool:
    """Is `copy_done` done? Raises `DeviceError` for what went wrong on the device.

    A CUDA event is asked by its handle: torch's own query turns some errors into "not ready".
    """
    handle = getattr(copy_done, "cuda_event", None)
    if cuda is None or not handle:
        done = bool(copy_done.query())
        error = getattr(copy_done, "error", None)
        if done and error is not None:
            raise DeviceError(type(error).__name__, f"the copy to the host failed: {error}", sticky=True)
        return done
    (status,) = cuda.cudaEventQuery(handle)
    if status == cuda.cudaError_t.cudaSuccess:
        return True
    if status == cuda.cudaError_t.cudaErrorNotReady:
        return False
    name = str(getattr(status, "name", f"cudaError{status}"))
    raise DeviceError(name, "the forward failed", sticky=name in STICKY_CUDA_ERRORS)


def cuda_for(device: str) -> Any:
    """The CUDA runtime for a scheduler on `device`, None for other devices.

    Raises `ConfigError` where the binding is missing, `DeviceError` where it finds no usable driver.
    """
    if device != "cuda":
        return None
    runtime = cuda_runtime()
    status, *_ = runtime.cudaGetDeviceCount()
    if status != runtime.cudaError_t.cudaSuccess:
        name = str(getattr(status, "name", f"cudaError{status}"))
        raise DeviceError(name, "no GPU can be used: is its driver installed, and new enough?", sticky=True)
    return runtime
