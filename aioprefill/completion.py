"""How the loop learns that the device is done with a forward.

A completion answers `query()` and can be waited on, in the loop (`wait`) or blocking (`synchronize`, for
the blocking mode only). CPU forwards run on a stream thread whose future wakes the loop; CUDA forwards
are polled by `cudaEventQuery`; the fake lives in `aioprefill.testing`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from aioprefill.errors import ConfigError, DeviceError, HostError

# Errors after which a CUDA context cannot be used any more: only a new process helps.
STICKY_CUDA_ERRORS = frozenset(
    {
        "cudaErrorAssert",
        "cudaErrorContained",
        "cudaErrorECCUncorrectable",
        "cudaErrorExternalDevice",
        "cudaErrorHardwareStackError",
        "cudaErrorIllegalAddress",
        "cudaErrorIllegalInstruction",
        "cudaErrorInvalidAddressSpace",
        "cudaErrorInvalidPc",
        "cudaErrorLaunchFailure",
        "cudaErrorLaunchTimeout",
        "cudaErrorMisalignedAddress",
        "cudaErrorMpsClientTerminated",
        "cudaErrorNvlinkUncorrectable",
        "cudaErrorTensorMemoryLeak",
        "cudaErrorUnknown",
    }
)


class Completion(Protocol):
    """The device's "done" for one forward: its sampled tokens are on the host side.

    Where sampling is delayed until the predecessor's result, polling before it was submitted is an error
    (`HostError`), not a wait for ever.
    """

    @property
    def submitted(self) -> bool:
        """Its sample is on its way to the device; only then may it be polled."""

    def query(self) -> bool:
        """True when done. Never blocks. Raises `DeviceError` when the forward failed."""

    async def wait(self) -> None:
        """Return when done. Raises `DeviceError` as `query` does. Cancelling it leaves the forward be."""

    def synchronize(self) -> None:
        """Block the calling thread until done. Raises `DeviceError` as `query` does."""


async def end_of(completion: Completion) -> DeviceError | HostError | None:
    """Wait until the forward is done; how it failed, or None. Cancelling it leaves the forward be."""
    try:
        await completion.wait()
    except (DeviceError, HostError) as error:
        return error
    return None


class FutureCompletion:
    """Done when a future of the engine's stream thread is; the future wakes the loop by itself.

    The future's exception, if any, is raised: engines put a `DeviceError` there.
    """

    submitted = True

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future

    def query(self) -> bool:
        """See `Completion.query`."""
        if not self._future.done():
            return False
        self._future.result()
        return True

    async def wait(self) -> None:
        """See `Completion.wait`."""
        if not self._future.done():
            # shield: cancelling the wait must not cancel work that is queued on the stream
            await asyncio.shield(asyncio.wrap_future(self._future))
        self._future.result()

    def synchronize(self) -> None:
        """See `Completion.synchronize`."""
        self._future.result()


def cuda_runtime() -> ModuleType:
    """The CUDA runtime binding (`cuda.bindings.runtime`). Raises `ConfigError` where it is missing."""
    try:
        from cuda.bindings import runtime
    except ImportError as err:
        raise ConfigError("device cuda needs the package cuda-bindings: pip install cuda-bindings") from err
    module: ModuleType = runtime
    return module


class CudaEventCompletion:
    """Polls one CUDA event with `cudaEventQuery`.

    `launched` is the stream thread's future: it resolves to the event's handle (an int, as torch gives
    by `Event.cuda_event`) once the kernels are queued and the event is recorded. `runtime` is the
    binding, so that tests can stand in for it. `on_success` is called once, by the call that first finds
    the event done; it may raise `DeviceError` (and keeps alive whoever owns the event). The outcome,
    success or error, never changes once it was reported.

    Pacing of `wait`: poll every `poll_s`, at least 1 ms because uvloop's timers have whole milliseconds
    and a shorter sleep there is a busy spin.
    """

    submitted = True

    def __init__(
        self,
        launched: concurrent.futures.Future[int],
        runtime: Any,
        *,
        on_success: Callable[[], None] = lambda: None,
        poll_s: float = 0.001,
    ) -> None:
        self._launched = FutureCompletion(launched)
        self._handle = launched
        self._runtime = runtime
        self._on_success = on_success
        self._poll_s = max(poll_s, 0.001)
        self._done = False
        self._error: DeviceError | None = None

    def query(self) -> bool:
        """See `Completion.query`. Every status but success and not-ready is a `DeviceError`."""
        if not self._done and self._launched.query():
            (status,) = self._runtime.cudaEventQuery(self._handle.result())
            if status != self._runtime.cudaError_t.cudaErrorNotReady:
                self._settle(status)
        if self._error is not None:
            raise self._error
        return self._done

    def _settle(self, status: Any) -> None:
        self._done = True
        try:
            if status != self._runtime.cudaError_t.cudaSuccess:
                name = str(getattr(status, "name", f"cudaError{status}"))
                raise DeviceError(name, self._describe(status), sticky=name in STICKY_CUDA_ERRORS)
            self._on_success()
        except DeviceError as err:
            self._error = err

    def _describe(self, status: Any) -> str:
        code, text = self._runtime.cudaGetErrorString(status)
        known = code == self._runtime.cudaError_t.cudaSuccess
        return text.decode(errors="replace") if known and isinstance(text, bytes) else "the forward failed"

    async def wait(self) -> None:
        """See `Completion.wait`."""
        await self._launched.wait()
        while not self.query():  # noqa: ASYNC110  a CUDA event cannot wake a loop: it is polled
            await asyncio.sleep(self._poll_s)

    def synchronize(self) -> None:
        """See `Completion.synchronize`. Waits in `cudaEventSynchronize`."""
        self._launched.synchronize()
        if not self._done:
            (status,) = self._runtime.cudaEventSynchronize(self._handle.result())
            self._settle(status)
        self.query()
