"""What a host needs of an engine. Imports neither torch nor transformers.

An engine owns the weights, the KV pool and one stream: forwards are executed in launch order, one after
the other, and a launch never waits for the device.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from aioprefill.completion import Completion
from aioprefill.kv_layout import KVLayout
from aioprefill.sampling_params import SamplingParams

TokenIds = npt.NDArray[np.uint32]
PageIds = npt.NDArray[np.int32]

TokenMask: TypeAlias = Callable[[], npt.NDArray[np.int32]]
"""Which tokens may be sampled: shape (ceil(vocabulary / 32),), bit i of word w for token 32 w + i.

Called once per span, after the launch, on the engine's stream thread; must not raise.
"""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a request is validated against."""

    name: str
    vocab_size: int
    context_length: int
    """Longest sequence (prompt and generated tokens) in tokens."""
    eos_token_ids: tuple[int, ...]
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a packed batch: the tokens at positions [start, start + len(token_ids))."""

    token_ids: TokenIds
    """Shape (n,), n >= 1."""
    start: int
    """Position of the first token; the KV of [0, start) is already in `pages`."""
    pages: PageIds
    """Page table of the sequence, covering at least [0, start + n)."""
    sample: SamplingParams | None
    """How to sample the token after the last one; None when no token is wanted (a middle chunk)."""
    mask: TokenMask | None = None
    """Which tokens may be sampled; None: all. A mask that allows none is as good as None."""

    @property
    def end(self) -> int:
        """One past the position of the last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token chosen from the logits at the last position of a span."""

    token_id: int
    logprob: float
    """Log-probability under the unmodified (temperature 1, untruncated) distribution."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first; as many as asked for."""


class EngineForward(Protocol):
    """A launched batch."""

    @property
    def completion(self) -> Completion:
        """Ready when the sampled tokens are on the host side."""

    def outputs(self) -> Sequence[SampledToken | None]:
        """One entry per span, in order; only after the completion is ready. Never blocks."""


class PageCopy(Protocol):
    """Pages of the pool on their way to the host."""

    def ready(self) -> bool:
        """`blocks` will not block. Never blocks itself."""

    def blocks(self) -> npt.NDArray[np.uint8]:
        """The pages, shape (pages, page_bytes), in host memory. Waits for the device."""


class Engine(Protocol):
    """Runs packed batches in launch order."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def num_pages(self) -> int:
        """Pages in the KV pool."""

    def launch(self, spans: Sequence[Span]) -> EngineForward:
        """Queue one forward behind those already launched and return at once.

        Errors of the device surface through the forward's completion as `DeviceError`.
        """

    async def stage_weights(self, folder: Path) -> Any:
        """Read and examine a folder of safetensors, off the loop; for `swap_weights`.

        Raises `ModelError` when it does not fit the model. Cancelling it changes nothing.
        """

    def swap_weights(self, staged: Any) -> concurrent.futures.Future[None]:
        """Queue the swap behind launched forwards; the future ends when it is done. Never blocks."""

    def weights_fingerprint(self, staged: Any) -> str:
        """Names staged weights, as `KVLayout.fingerprint` names those that the engine began with."""

    def read_pages(self, pages: PageIds) -> concurrent.futures.Future[PageCopy]:
        """Queue a copy of pages, behind what is launched and ahead of what will be. Never blocks.

        The pages may be reused at once. The future ends when the copy is queued on the device.
        """

    def write_pages(self, pages: PageIds, blocks: npt.NDArray[np.uint8]) -> concurrent.futures.Future[None]:
        """Queue the filling of pages with `blocks`, shape (pages, page_bytes). Never blocks.

        What is launched afterwards finds them filled. When it fails, so do all later forwards.
        """

    def assemble_pages(self, pages: PageIds, shards: int) -> concurrent.futures.Future[None]:
        """Queue the ordering of pages that hold `shards` shards one after the other. Never blocks.

        A shard is shape (layers, 2, page_size, kv_heads / shards, head_dim), as a rank wrote it (see
        `KVLayout.shard`). What is launched afterwards finds whole pages. The future ends when the device has
        done it: nothing else may write to the pages before. When it fails, so do all later forwards. Raises
        `ValueError` when `shards` does not divide the KV heads.
        """

    def close(self) -> None:
        """Wait for launched forwards, then free the device and end the stream thread. Idempotent."""

    async def aclose(self) -> None:
        """The same without blocking the loop. Cancelling it leaves the closing to go on in its thread."""
