"""An engine without a model: what its forwards sampled comes from the recording."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from aioprefill.engine.port import ModelSpec, PageCopy, PageIds, SampledToken, Span
from aioprefill.errors import HostError
from aioprefill.native.facts import OutputsFact


class ReplayForward:
    """A launched batch; done when the recording says what it sampled. Its own completion."""

    submitted = True

    def __init__(self, number: int) -> None:
        self.number = number
        self.sampled: list[SampledToken | None] | None = None

    @property
    def completion(self) -> ReplayForward:
        """See `EngineForward.completion`."""
        return self

    def outputs(self) -> Sequence[SampledToken | None]:
        """See `EngineForward.outputs`. Raises `HostError` when the recording has none."""
        if self.sampled is None:
            raise HostError(f"the recording does not say what forward {self.number} sampled")
        return self.sampled

    def query(self) -> bool:
        """See `Completion.query`."""
        return self.sampled is not None

    async def wait(self) -> NoReturn:
        """Nobody waits in a replay: the calls come in their order."""
        raise AssertionError("a replay waits for no forward")

    def synchronize(self) -> NoReturn:
        """See `wait`."""
        raise AssertionError("a replay waits for no forward")


class ReplayEngine:
    """Implements `Engine`. `expect` names the next forward, `take` gives what one sampled.

    Weights are staged and swapped at once and do nothing: whether the device took them is a fact.
    """

    def __init__(self, spec: ModelSpec, num_pages: int) -> None:
        self.spec = spec
        self.num_pages = num_pages
        self._next = 0
        self._forwards: dict[int, ReplayForward] = {}

    def expect(self, number: int) -> None:
        """The next launch is that of forward `number`."""
        self._next = number

    def take(self, fact: OutputsFact) -> None:
        """What a launched forward has sampled. Raises `HostError` when none is called so."""
        forward = self._forwards.pop(fact.number, None)
        if forward is None:
            raise HostError(
                f"the recording tells the outputs of forward {fact.number}, which is not launched"
            )
        forward.sampled = fact.tokens

    def launch(self, spans: Sequence[Span]) -> ReplayForward:
        """See `Engine.launch`."""
        self._forwards = {n: f for n, f in self._forwards.items() if n >= self._next - 2}  # failed ones
        forward = self._forwards[self._next] = ReplayForward(self._next)
        return forward

    async def stage_weights(self, folder: Path) -> Path:
        """See `Engine.stage_weights`: reads nothing."""
        return folder

    def swap_weights(self, staged: Any) -> concurrent.futures.Future[None]:
        """See `Engine.swap_weights`."""
        return _done()

    def weights_fingerprint(self, staged: Any) -> str:
        """See `Engine.weights_fingerprint`."""
        return str(staged)

    def read_pages(self, pages: PageIds) -> concurrent.futures.Future[PageCopy]:
        """A replay has no storage tier."""
        raise AssertionError("a replay has no pages")

    def write_pages(self, pages: PageIds, blocks: npt.NDArray[np.uint8]) -> concurrent.futures.Future[None]:
        """A replay has no storage tier."""
        raise AssertionError("a replay has no pages")

    def assemble_pages(self, pages: PageIds, shards: int) -> concurrent.futures.Future[None]:
        """A replay receives no KV."""
        raise AssertionError("a replay has no pages")

    def close(self) -> None:
        """See `Engine.close`."""

    async def aclose(self) -> None:
        """See `Engine.aclose`."""


def _done() -> concurrent.futures.Future[None]:
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    done.set_result(None)
    return done
