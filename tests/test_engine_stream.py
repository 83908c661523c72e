"""The stream: launch order, errors that stay with their forward, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_support import GREEDY, load, run

from aioprefill.completion import STICKY_CUDA_ERRORS
from aioprefill.engine.device_errors import device_error
from aioprefill.engine.port import Span
from aioprefill.engine.sampling import Sampled, ToDevice
from aioprefill.engine.streams import CpuStream
from aioprefill.engine.transformers_engine import TransformersEngine
from aioprefill.errors import DeviceError, HostError

RESULT = Sampled(torch.tensor([1]), torch.tensor([0.0]))


def accept(sampled: Sampled) -> None:
    """A check that finds nothing."""


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    """A stream that is closed in the end."""
    stream = CpuStream()
    yield stream
    stream.close()


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[TransformersEngine]:
    """A tiny model."""
    engine = load(tiny_llama)
    yield engine
    engine.close()


def prompt(*tokens: int, page: int = 0) -> Span:
    """A prompt of fewer tokens than a page."""
    return Span(np.array(tokens, dtype=np.uint32), 0, np.array([page], dtype=np.int32), GREEDY)


def blocked(gate: threading.Event, log: list[str], name: str) -> Callable[[ToDevice], Sampled]:
    """Work that waits for the gate."""

    def work(to_device: ToDevice) -> Sampled:
        assert gate.wait(30)
        log.append(name)
        return RESULT

    return work


def test_forwards_run_one_after_the_other_in_launch_order(stream: CpuStream) -> None:
    """A launch returns while the first still runs, and the second waits for it."""
    gate, log = threading.Event(), list[str]()
    running = [stream.launch(blocked(gate, log, name), accept) for name in "abc"]
    assert not any(r.completion.query() for r in running)
    gate.set()
    running[2].completion.synchronize()
    assert log == ["a", "b", "c"]
    assert all(r.completion.query() for r in running)


def test_a_failed_forward_does_not_touch_the_next(stream: CpuStream) -> None:
    """The error is the first one's own, with the exception's name, and not sticky."""

    def broken(to_device: ToDevice) -> Sampled:
        raise IndexError("index out of range in self")

    failed, good = stream.launch(broken, accept), stream.launch(lambda _: RESULT, accept)
    good.completion.synchronize()
    with pytest.raises(DeviceError, match="IndexError: index out of range") as caught:
        failed.completion.query()
    assert not caught.value.sticky
    assert good.sampled() is RESULT


def no_memory() -> None:
    """As Python says it."""
    raise MemoryError


@pytest.mark.parametrize("allocate", [lambda: torch.empty(1 << 60), no_memory])
def test_running_out_of_memory_has_a_name(stream: CpuStream, allocate: Callable[[], object]) -> None:
    """Torch's allocator and Python's error alike: outOfMemory, and what to do."""

    def hungry(to_device: ToDevice) -> Sampled:
        allocate()
        return RESULT

    running = stream.launch(hungry, accept)
    with pytest.raises(DeviceError, match="give less KV memory") as caught:
        running.completion.synchronize()
    assert (caught.value.name, caught.value.sticky) == ("outOfMemory", False)


class Accelerator(torch.AcceleratorError):
    """As torch raises for CUDA."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.error_code = code


def test_cuda_errors_keep_their_name_and_stickiness() -> None:
    """The first line is kept, torch's advice is not."""
    error = device_error(Accelerator(700, "CUDA error: an illegal memory access\nCompile with `TORCH_USE_…`"))
    assert (error.name, error.sticky) == ("cudaErrorIllegalAddress", True)
    assert str(error) == "cudaErrorIllegalAddress: CUDA error: an illegal memory access"
    error = device_error(Accelerator(1, "CUDA error: invalid argument"))
    assert (error.name, error.sticky) == ("cudaErrorInvalidValue", False)
    assert device_error(Accelerator(98765, "CUDA error: new")).name == "cudaError98765"
    assert device_error(torch.OutOfMemoryError("CUDA out of memory.")).name == "outOfMemory"


def test_every_sticky_error_is_one_that_the_binding_knows() -> None:
    """A misspelt name would make a lost context look usable."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    assert {name for name in STICKY_CUDA_ERRORS if not hasattr(runtime.cudaError_t, name)} == set()


def test_logits_that_are_not_finite_fail_their_forward_only(engine: TransformersEngine) -> None:
    """Damaged weights for one token: the forward that meets it names the span; the next is well."""
    model = engine._model
    assert model is not None
    before = run(engine, [prompt(1, 2, 3)])
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    forward = engine.launch([prompt(1, 2, 3), prompt(5, 7, page=1)])
    after = engine.launch([prompt(1, 2, 3)])
    with pytest.raises(DeviceError, match="notFinite: the logits of span 1 "):
        forward.completion.synchronize()
    after.completion.synchronize()
    assert list(after.outputs()) == before


def test_a_launch_that_breaks_its_contract_raises_at_once(engine: TransformersEngine) -> None:
    """Nothing is queued, and the engine goes on."""
    with pytest.raises(ValueError, match="token id"):
        engine.launch([prompt(512)])
    assert run(engine, [prompt(511)])[0] is not None


def test_close_waits_for_launched_forwards_ends_the_thread_and_may_be_repeated(tiny_llama: Path) -> None:
    """A forward launched before close completes; after it nothing can be launched."""
    before = set(threading.enumerate())
    engine = load(tiny_llama)
    forward = engine.launch([prompt(1, 2, 3)])
    engine.close()
    engine.close()
    assert forward.completion.query()
    assert forward.outputs()[0] is not None
    assert set(threading.enumerate()) <= before
    with pytest.raises(HostError, match="closed"):
        engine.launch([prompt(1)])
    with pytest.raises(HostError, match="closed"):
        _ = engine.pool
    assert "closed" in repr(engine)


def test_a_pool_that_somebody_holds_outlives_the_engine(tiny_llama: Path) -> None:
    """A transfer may still write to it: memory must not go away under it."""
    engine = load(tiny_llama)
    pool = engine.pool
    engine.close()
    pool.storage.fill_(1.0)
    assert pool.base_address == pool.storage.data_ptr()


@pytest.mark.asyncio
async def test_aclose_leaves_the_loop_free_and_survives_its_cancellation(tiny_llama: Path) -> None:
    """While a forward hangs the loop turns; a cancelled aclose goes on in its thread."""
    engine = load(tiny_llama)
    gate, log = threading.Event(), list[str]()
    running = engine._stream.launch(blocked(gate, log, "a"), accept)
    closing = asyncio.create_task(engine.aclose())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    gate.set()
    await asyncio.wait_for(running.completion.wait(), 30)
    await asyncio.wait_for(engine.aclose(), 30)
    assert log == ["a"]


@pytest.mark.asyncio
async def test_a_completion_wakes_the_loop(engine: TransformersEngine) -> None:
    """Two forwards launched back to back are awaited, in either order."""
    first, second = engine.launch([prompt(1, 2, 3)]), engine.launch([prompt(4, 5, page=1)])
    await asyncio.wait_for(second.completion.wait(), 30)
    assert first.completion.query()
    assert first.outputs()[0] is not None


def test_operators_of_the_stream_use_as_many_threads_as_asked_for() -> None:
    """The setting is made on the stream's own thread."""
    stream = CpuStream(threads=1)
    try:
        assert stream.compute(lambda _: torch.tensor(torch.get_num_threads())).item() == 1
    finally:
        stream.close()
