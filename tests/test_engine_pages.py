"""Pages of a real engine on their way out and in, in the order of launches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_support import load, run

from aioprefill.engine.port import Span
from aioprefill.errors import DeviceError, HostError
from aioprefill.sampling_params import SamplingParams

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ),
]
GREEDY = SamplingParams(logprobs=3)
TOKENS = np.random.default_rng(3).integers(0, 500, 40).astype(np.uint32)


def pages(*numbers: int) -> np.ndarray:
    """A page table."""
    return np.array(numbers, dtype=np.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_copied_out_and_in_elsewhere_serve_as_well(tiny_llama: Path, device: str, dtype: str) -> None:
    """Everything is queued at once: forward, copy, a forward that overwrites, filling, the forward on top."""
    engine = load(tiny_llama, dtype=dtype, device=device)
    first = engine.launch([Span(TOKENS, 0, pages(3, 1, 2), GREEDY)])
    copied = engine.read_pages(pages(3, 1))
    over = engine.launch([Span(TOKENS[::-1].copy(), 0, pages(1, 2, 3), GREEDY)])
    blocks = copied.result(10).blocks()
    assert blocks.shape == (2, engine.spec.layout.page_bytes) and copied.result().ready()
    engine.write_pages(pages(5, 4), blocks)
    again = engine.launch([Span(TOKENS[32:], 32, pages(5, 4, 0), GREEDY)])
    for forward in (first, over, again):
        forward.completion.synchronize()
    (one,), (two,) = first.outputs(), again.outputs()
    assert one is not None and two is not None and one.token_id == two.token_id
    tolerance = 1e-4 if dtype == "float32" else 0.1
    assert [p for _, p in one.top_logprobs] == pytest.approx([p for _, p in two.top_logprobs], abs=tolerance)
    assert over.outputs()[0] != one
    engine.close()
    with pytest.raises(HostError):
        engine.read_pages(pages(1))


def test_forwards_fail_after_pages_that_could_not_be_filled(tiny_llama: Path) -> None:
    """For they count on these pages: a sticky error, which stops the process, not a wrong token."""
    engine = load(tiny_llama)
    assert run(engine, [Span(TOKENS, 0, pages(0, 1, 2), GREEDY)])
    filled = engine.write_pages(pages(1), np.zeros((1, 8), dtype=np.uint8))
    forward = engine.launch([Span(TOKENS, 0, pages(0, 1, 2), GREEDY)])
    with pytest.raises(DeviceError, match=r"kvWriteFailed.*could not be filled"):
        filled.result(10)
    with pytest.raises(DeviceError) as caught:
        forward.completion.synchronize()
    assert caught.value.sticky
    engine.close()
