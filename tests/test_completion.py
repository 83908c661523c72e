"""Completions: a future of the stream thread, and a CUDA event behind a stand-in for the binding."""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
from typing import Any

import pytest

from aioprefill.completion import Completion, CudaEventCompletion, FutureCompletion
from aioprefill.errors import DeviceError

HANDLE = 0x5EED


class Status(enum.IntEnum):
    """A few of the runtime's codes, with its own numbers."""

    cudaSuccess = 0
    cudaErrorInvalidResourceHandle = 400
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700


class FakeRuntime:
    """The binding, with an event whose status a test sets."""

    cudaError_t = Status

    def __init__(self) -> None:
        self.status = Status.cudaErrorNotReady
        self.queries = 0
        self.synchronized = 0

    def cudaEventQuery(self, event: int) -> tuple[Status]:
        assert event == HANDLE
        self.queries += 1
        return (self.status,)

    def cudaEventSynchronize(self, event: int) -> tuple[Status]:
        assert event == HANDLE
        self.synchronized += 1
        if self.status is Status.cudaErrorNotReady:
            self.status = Status.cudaSuccess
        return (self.status,)

    def cudaGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return Status.cudaSuccess, b"words for " + status.name.encode()


def recorded() -> concurrent.futures.Future[int]:
    """A stream thread that has queued its work."""
    launched: concurrent.futures.Future[int] = concurrent.futures.Future()
    launched.set_result(HANDLE)
    return launched


def on_event(runtime: FakeRuntime, **options: Any) -> CudaEventCompletion:
    """A completion whose event is recorded."""
    return CudaEventCompletion(recorded(), runtime, **options)


def test_an_event_that_is_not_ready_is_no_error() -> None:
    """Not-ready is False, and asked again each time; success is True."""
    runtime = FakeRuntime()
    completion = on_event(runtime)
    assert [completion.query(), completion.query()] == [False, False]
    assert runtime.queries == 2
    runtime.status = Status.cudaSuccess
    assert completion.query()


def test_a_launch_still_queued_on_the_stream_thread_is_not_ready() -> None:
    """Before the event is recorded there is no handle, so CUDA is not asked."""
    runtime = FakeRuntime()
    launched: concurrent.futures.Future[int] = concurrent.futures.Future()
    completion = CudaEventCompletion(launched, runtime)
    assert not completion.query()
    assert runtime.queries == 0
    launched.set_result(HANDLE)
    runtime.status = Status.cudaSuccess
    assert completion.query()


def test_a_launch_that_failed_on_the_stream_thread_is_its_error() -> None:
    """The error of queueing comes out of query, wait and synchronize alike."""
    launched: concurrent.futures.Future[int] = concurrent.futures.Future()
    launched.set_exception(DeviceError("outOfMemory", "too big", sticky=False))
    completion = CudaEventCompletion(launched, FakeRuntime())
    for ask in (completion.query, completion.synchronize, lambda: asyncio.run(completion.wait())):
        with pytest.raises(DeviceError, match="outOfMemory: too big"):
            ask()


@pytest.mark.parametrize(
    ("status", "sticky"),
    [(Status.cudaErrorIllegalAddress, True), (Status.cudaErrorInvalidResourceHandle, False)],
)
def test_every_other_status_is_an_error_named_as_cuda_names_it(status: Status, sticky: bool) -> None:
    """The error carries CUDA's name and words, and whether the context is lost."""
    runtime = FakeRuntime()
    runtime.status = status
    with pytest.raises(DeviceError, match=f"{status.name}: words for {status.name}") as caught:
        on_event(runtime).query()
    assert (caught.value.name, caught.value.sticky) == (status.name, sticky)


def test_a_status_unknown_to_the_binding_is_still_an_error() -> None:
    """A number without a name, from a newer driver, is not taken for success."""
    runtime = FakeRuntime()
    runtime.status = 9999  # type: ignore[assignment]
    runtime.cudaGetErrorString = lambda status: (Status.cudaErrorInvalidResourceHandle, None)  # type: ignore
    with pytest.raises(DeviceError, match="cudaError9999: the forward failed"):
        on_event(runtime).query()


@pytest.mark.parametrize("first", [Status.cudaSuccess, Status.cudaErrorIllegalAddress])
def test_the_outcome_never_changes_once_reported(first: Status) -> None:
    """Later errors of other work do not touch a success, and an error is not cleared by asking again."""
    runtime = FakeRuntime()
    completion = on_event(runtime)
    runtime.status = first

    def outcome() -> str:
        try:
            return str(completion.query())
        except DeviceError as err:
            return err.name

    before = outcome()
    runtime.status = Status.cudaErrorInvalidResourceHandle if before == "True" else Status.cudaSuccess
    assert outcome() == before
    assert runtime.queries == 1


def test_success_is_checked_once_and_a_failed_check_is_the_outcome() -> None:
    """What `on_success` raises (results that are not finite) is raised by every later call."""
    calls = []

    def check() -> None:
        calls.append(1)
        raise DeviceError("notFinite", "bad", sticky=False)

    runtime = FakeRuntime()
    completion = on_event(runtime, on_success=check)
    assert not completion.query()
    assert calls == []
    runtime.status = Status.cudaSuccess
    for _ in range(2):
        with pytest.raises(DeviceError, match="notFinite"):
            completion.query()
    with pytest.raises(DeviceError, match="notFinite"):
        completion.synchronize()
    assert calls == [1]


def test_synchronize_waits_in_cuda_and_does_not_poll() -> None:
    """The blocking mode parks in cudaEventSynchronize, once."""
    runtime = FakeRuntime()
    completion = on_event(runtime)
    completion.synchronize()
    completion.synchronize()
    assert (runtime.synchronized, runtime.queries) == (1, 0)
    assert completion.query()


@pytest.mark.asyncio
async def test_wait_polls_no_faster_than_a_millisecond() -> None:
    """A shorter pause would be a busy spin on uvloop."""
    runtime = FakeRuntime()
    completion = on_event(runtime, poll_s=0.0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    waiting = asyncio.create_task(completion.wait())
    while runtime.queries < 5:  # noqa: ASYNC110  the stand-in has no event
        await asyncio.sleep(0)
    assert loop.time() - began >= 0.004
    runtime.status = Status.cudaSuccess
    await asyncio.wait_for(waiting, 5)


@pytest.mark.asyncio
async def test_a_future_wakes_the_loop_with_success_or_error() -> None:
    """No polling: the stream thread's result ends the wait."""
    for error in (None, DeviceError("broken", "no", sticky=False)):
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        completion: Completion = FutureCompletion(future)
        waiting = asyncio.create_task(completion.wait())
        await asyncio.sleep(0)
        assert not completion.query()
        assert not waiting.done()
        asyncio.get_running_loop().run_in_executor(None, settle, future, error)
        if error is None:
            await asyncio.wait_for(waiting, 5)
            assert completion.query()
            completion.synchronize()
        else:
            with pytest.raises(DeviceError, match="broken"):
                await asyncio.wait_for(waiting, 5)
            with pytest.raises(DeviceError, match="broken"):
                completion.query()


def settle(future: concurrent.futures.Future[int], error: Exception | None) -> None:
    """What a stream thread does."""
    if error is None:
        future.set_result(1)
    else:
        future.set_exception(error)


@pytest.mark.asyncio
async def test_cancelling_a_wait_leaves_queued_work_be() -> None:
    """The future of a forward that has not begun is not cancelled with its waiter."""
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    waiting = asyncio.create_task(FutureCompletion(future).wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not future.cancelled()
    future.set_exception(DeviceError("late", "nobody waits", sticky=False))
    await asyncio.sleep(0)
