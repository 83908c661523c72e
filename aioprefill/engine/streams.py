"""The stream of an engine: the one thread on which its forwards run, in launch order.

On CPU the thread computes. On CUDA it queues kernels on a stream of its own, and copies of the sampled
tokens on a second one, so that a copy waits for nothing but its own forward.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from aioprefill.completion import Completion, CudaEventCompletion, FutureCompletion, cuda_runtime
from aioprefill.engine.device_errors import device_error
from aioprefill.engine.port import PageCopy
from aioprefill.engine.sampling import Sampled, ToDevice
from aioprefill.errors import HostError

T = TypeVar("T")

Work = Callable[[ToDevice], Sampled]
"""A forward: is given `to_device`, returns what it sampled (on the device)."""


class Running(Protocol):
    """A forward on a stream."""

    completion: Completion

    def sampled(self) -> Sampled:
        """The samples on the host; only once complete."""


class HostCopy:
    """Implements `PageCopy`. `tensor` has the pages' shape, in host memory; `event`: when it is filled."""

    def __init__(self, tensor: torch.Tensor, event: torch.cuda.Event | None = None) -> None:
        self._tensor = tensor
        self._event = event

    def ready(self) -> bool:
        """See `PageCopy.ready`."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def blocks(self) -> npt.NDArray[np.uint8]:
        """See `PageCopy.blocks`."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[np.uint8] = self._tensor.flatten(1).view(torch.uint8).numpy()
        return array


class CpuRunning:
    """Computes on the stream thread; its future is the completion."""

    def __init__(self, future: concurrent.futures.Future[Sampled]) -> None:
        self._future = future
        self.completion: Completion = FutureCompletion(future)

    def sampled(self) -> Sampled:
        """See `Running.sampled`."""
        return self._future.result()


class StreamThread:
    """One thread, started at once. `threads` is the number of CPU threads that one operator uses."""

    def __init__(self, *, threads: int | None = None) -> None:
        def initialize() -> None:
            if threads is not None:
                torch.set_num_threads(threads)

        self._executor = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="aioprefill-stream", initializer=initialize
        )

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Queue `work`; what it raises becomes a `DeviceError`. Raises `HostError` once closed."""

        def run() -> T:
            try:
                with torch.inference_mode():
                    return work()
            except Exception as err:
                raise device_error(err) from err

        try:
            return self._executor.submit(run)
        except RuntimeError as err:
            raise HostError("the engine is closed: nothing can be launched") from err

    def close(self) -> None:
        """Wait for what is queued and end the thread. Idempotent."""
        self._executor.shutdown(wait=True)


class CpuStream:
    """Forwards on the CPU."""

    def __init__(self, *, threads: int | None = None) -> None:
        self._thread = StreamThread(threads=threads)

    def launch(self, work: Work, check: Callable[[Sampled], None]) -> Running:
        """Queue a forward; `check` sees its samples on the host and may raise."""

        def run() -> Sampled:
            sampled = work(torch.from_numpy)
            check(sampled)
            return sampled

        return CpuRunning(self._thread.submit(run))

    def compute(self, work: Callable[[ToDevice], torch.Tensor]) -> torch.Tensor:
        """Run `work` behind what is queued and wait for it. Raises `DeviceError`."""
        return self._thread.submit(lambda: work(torch.from_numpy)).result()

    def run(self, work: Callable[[], None]) -> concurrent.futures.Future[None]:
        """Queue something other than a forward; its future ends when the device has done it."""
        return self._thread.submit(work)

    def fetch(self, work: Callable[[ToDevice], torch.Tensor]) -> concurrent.futures.Future[PageCopy]:
        """Queue `work`, whose fresh tensor is wanted on the host."""
        return self._thread.submit(lambda: HostCopy(work(torch.from_numpy)))

    def queue(self, work: Callable[[ToDevice], None]) -> concurrent.futures.Future[None]:
        """Queue something other than a forward; its future ends when it is on the device's stream."""
        return self._thread.submit(lambda: work(torch.from_numpy))

    def close(self) -> None:
        """See `StreamThread.close`."""
        self._thread.close()


class CudaRunning:
    """Queued by the stream thread; complete when the event behind the copies has passed."""

    def __init__(self, check: Callable[[Sampled], None]) -> None:
        self.check = check
        self.host: Sampled | None = None
        self.event: torch.cuda.Event | None = None
        self.completion: Completion

    def sampled(self) -> Sampled:
        """See `Running.sampled`."""
        assert self.host is not None
        return self.host

    def verify(self) -> None:
        """Look at the samples, which have just arrived."""
        self.check(self.sampled())


class CudaStream:
    """Forwards on one CUDA device."""

    def __init__(self, device: torch.device, *, threads: int | None = None) -> None:
        self._runtime = cuda_runtime()
        self._device = device
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # the weights and the pool were made on the default stream
        self._compute.wait_stream(torch.cuda.default_stream(device))
        self._thread = StreamThread(threads=threads)

    def launch(self, work: Work, check: Callable[[Sampled], None]) -> Running:
        """Queue a forward; `check` sees its samples on the host and may raise."""
        running = CudaRunning(check)
        launched = self._thread.submit(lambda: self._queue(work, running))
        running.completion = CudaEventCompletion(launched, self._runtime, on_success=running.verify)
        return running

    def compute(self, work: Callable[[ToDevice], torch.Tensor]) -> torch.Tensor:
        """Run `work` behind what is queued and wait for it; its result on the host. Raises `DeviceError`."""

        def run() -> torch.Tensor:
            with torch.cuda.device(self._device), torch.cuda.stream(self._compute):
                return work(self._to_device).cpu()

        return self._thread.submit(run).result()

    def run(self, work: Callable[[], None]) -> concurrent.futures.Future[None]:
        """Queue something other than a forward; its future ends when the device has done it."""

        def run() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(self._compute):
                work()
                self._compute.synchronize()

        return self._thread.submit(run)

    def fetch(self, work: Callable[[ToDevice], torch.Tensor]) -> concurrent.futures.Future[PageCopy]:
        """Queue `work`, whose fresh tensor is wanted on the host; nothing waits for the copy."""

        def run() -> PageCopy:
            with torch.cuda.device(self._device), torch.cuda.stream(self._compute):
                fetched = work(self._to_device)
                self._copies.wait_stream(self._compute)
                with torch.cuda.stream(self._copies):
                    copy = self._to_host(fetched)
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record(self._copies)
            return HostCopy(copy, event)

        return self._thread.submit(run)

    def queue(self, work: Callable[[ToDevice], None]) -> concurrent.futures.Future[None]:
        """Queue something other than a forward; its future ends when it is on the device's stream."""

        def run() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(self._compute):
                work(self._to_device)

        return self._thread.submit(run)

    def _queue(self, work: Work, running: CudaRunning) -> int:
        """On the stream thread: queue kernels and copies; the handle of the last event."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._compute):
            sampled = work(self._to_device)
            self._copies.wait_stream(self._compute)
            with torch.cuda.stream(self._copies):
                running.host = sampled.move(self._to_host)
                running.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                running.event.record(self._copies)
        return int(running.event.cuda_event)

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        # its memory must not be reused by the next forward before the copy is done
        tensor.record_stream(self._copies)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Wait for what is queued, on the device too, and end the thread. Idempotent."""
        self._thread.close()
        # a sticky error is raised here too; each forward has reported it
        with contextlib.suppress(RuntimeError):
            self._copies.synchronize()
            self._compute.synchronize()
