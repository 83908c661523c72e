"""A device without a model: runs forwards in order, each done when told or after a given time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aioprefill.engine.port import ModelSpec, PageCopy, PageIds, SampledToken, Span
from aioprefill.errors import DeviceError, ModelError
from aioprefill.kv_layout import KVLayout
from aioprefill.testing.completion import FakeCompletion


def fake_spec(
    *, vocab_size: int = 1000, context_length: int = 1 << 20, page_size: int = 16, eos: tuple[int, ...] = ()
) -> ModelSpec:
    """A model of next to no size."""
    layout = KVLayout("fake", layers=1, kv_heads=1, head_dim=1, page_size=page_size, dtype="float32")
    return ModelSpec("fake", vocab_size, context_length, eos, layout)


@dataclass(slots=True, eq=False)
class FakeEngineForward:
    """A launched batch; `complete` or `fail` it, unless the engine does so by time."""

    number: int
    spans: list[Span]
    vocab_size: int
    weights: int = 0
    completion: FakeCompletion = field(default_factory=FakeCompletion)

    def complete(self) -> None:
        """The device is done."""
        self.completion.complete()

    def fail(self, error: DeviceError) -> None:
        """The device failed."""
        self.completion.fail(error)

    def outputs(self) -> list[SampledToken | None]:
        """See `EngineForward.outputs`. A token is a function of its position and the token before it."""
        assert self.completion.done, f"forward {self.number} is not complete"
        return [None if span.sample is None else self._token(span) for span in self.spans]

    def _token(self, span: Span) -> SampledToken:
        seed = zlib.crc32(np.array([span.end, span.token_ids[-1], self.weights], dtype="<u4").tobytes())
        return SampledToken(seed % self.vocab_size, -0.5)


@dataclass(frozen=True, slots=True)
class FakePageCopy:
    """Pages that were copied."""

    copied: npt.NDArray[np.uint8]
    is_ready: bool = True

    def ready(self) -> bool:
        """See `PageCopy.ready`."""
        return self.is_ready

    def blocks(self) -> npt.NDArray[np.uint8]:
        """See `PageCopy.blocks`."""
        return self.copied


class FakeEngine:
    """Implements `Engine`. `forwards` has every launch, `tokens` the total computed.

    Without `duration_s` a forward is done when the test says so; with it (seconds, a number or a function
    of the spans) the device takes that long for each, one after the other, on the running loop's clock.
    """

    def __init__(
        self,
        *,
        num_pages: int = 1024,
        spec: ModelSpec | None = None,
        duration_s: float | Callable[[Sequence[Span]], float] | None = None,
    ) -> None:
        self.spec = spec or fake_spec()
        self.num_pages = num_pages
        self.forwards: list[FakeEngineForward] = []
        self.keep_forwards = True
        self.check_pages = True
        self.tokens = 0
        self.launched = 0
        self.weights = 0
        """Number of the weights that later forwards compute with; `swap_weights` sets it."""
        self.swaps: list[concurrent.futures.Future[None]] = []
        """Swaps that the test has to end, where `swaps_by_hand` is set."""
        self.swaps_by_hand = False
        self.keep_kv = False
        """Keep what stands for KV: `kv`, the tokens of each page. `page_tokens` shows them."""
        self.kv: npt.NDArray[np.uint8] | None = None
        self.assemblies: list[tuple[list[int], int, concurrent.futures.Future[None]]] = []
        """Pages that were assembled, of how many shards; and the futures, which the test may have to end."""
        self.assemblies_by_hand = False
        self.closed = False
        self._duration_s = duration_s
        self._free_at = 0.0

    def launch(self, spans: Sequence[Span]) -> FakeEngineForward:
        """See `Engine.launch`."""
        assert not self.closed, "launched on a closed engine"
        for span in spans if self.check_pages else ():
            pages = np.unique(span.pages)
            assert len(pages) == len(span.pages) >= self.spec.layout.pages_for(span.end)
            assert pages[0] >= 0 and pages[-1] < self.num_pages
        if self.keep_kv:
            self._compute_kv(spans)
        forward = FakeEngineForward(self.launched, list(spans), self.spec.vocab_size, self.weights)
        self.launched += 1
        self.tokens += sum(len(span.token_ids) for span in spans)
        if self.keep_forwards:
            self.forwards.append(forward)
        if self._duration_s is not None:
            took = self._duration_s(spans) if callable(self._duration_s) else self._duration_s
            self._free_at = max(self._free_at, asyncio.get_running_loop().time()) + took
            forward.completion.complete(at=self._free_at)
        return forward

    async def stage_weights(self, folder: Path) -> int:
        """See `Engine.stage_weights`: the folder's name must be a number."""
        if not folder.name.isdigit():
            raise ModelError(f"{folder} holds no weights")
        return int(folder.name)

    def swap_weights(self, staged: int) -> concurrent.futures.Future[None]:
        """See `Engine.swap_weights`."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        running = [forward for forward in self.forwards if not forward.completion.done]
        assert not running, f"weights are swapped under {running}"
        self.weights = staged
        if self.swaps_by_hand:
            self.swaps.append(done)
        else:
            done.set_result(None)
        return done

    def weights_fingerprint(self, staged: int) -> str:
        """See `Engine.weights_fingerprint`."""
        return f"fake {staged}"

    def read_pages(self, pages: PageIds) -> concurrent.futures.Future[PageCopy]:
        """See `Engine.read_pages`: at once, for launches have written already."""
        done: concurrent.futures.Future[PageCopy] = concurrent.futures.Future()
        done.set_result(FakePageCopy(self._pages()[pages]))
        return done

    def write_pages(self, pages: PageIds, blocks: npt.NDArray[np.uint8]) -> concurrent.futures.Future[None]:
        """See `Engine.write_pages`."""
        self._pages()[pages] = blocks
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.set_result(None)
        return done

    def assemble_pages(self, pages: PageIds, shards: int) -> concurrent.futures.Future[None]:
        """See `Engine.assemble_pages`: at once, or by the test, where `assemblies_by_hand` is set."""
        layout = self.spec.layout
        if layout.kv_heads % shards:
            raise ValueError(f"{layout.kv_heads} KV heads cannot come in {shards} shards")
        written = self._pages()[pages].reshape(len(pages), shards, 2 * layout.layers * layout.page_size, -1)
        self._pages()[pages] = written.transpose(0, 2, 1, 3).reshape(len(pages), -1)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.assemblies.append((pages.tolist(), shards, done))
        if not self.assemblies_by_hand:
            done.set_result(None)
        return done

    def page_tokens(self, page: int) -> list[int]:
        """The tokens whose KV is in a page, where `keep_kv` is set; 0 for an empty slot."""
        size = self.spec.layout.page_size
        tokens: list[int] = self._pages()[page, : 4 * size].view(np.uint32).tolist()
        return tokens

    def _pages(self) -> npt.NDArray[np.uint8]:
        if self.kv is None:
            self.kv = np.zeros((self.num_pages, self.spec.layout.page_bytes), dtype=np.uint8)
        return self.kv

    def _compute_kv(self, spans: Sequence[Span]) -> None:
        size = self.spec.layout.page_size
        for span in spans:
            slots = self._pages()[:, : 4 * size].view(np.uint32)
            at = np.arange(span.start, span.end)
            slots[span.pages[at // size], at % size] = span.token_ids

    def close(self) -> None:
        """See `Engine.close`."""
        self.closed = True

    async def aclose(self) -> None:
        """See `Engine.aclose`."""
        self.close()
