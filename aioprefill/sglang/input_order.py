"""In which order SGLang's input is dispatched, and what is held back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aioprefill.host import Hold


@dataclass(frozen=True, slots=True)
class Taken:
    """What was dispatched."""

    requests: int
    others: int
    """Aborts, commands and what else is no request."""


class InputOrder:
    """Takes input by `ingest_requests`, which receives, broadcasts and dispatches up to a pause.

    A pause is kept back, with everything behind it, in SGLang's own `_deferred_input_requests`, where its
    other parts look. With `barrier` every pause waits until no forward runs.
    """

    def __init__(self, scheduler: Any, *, barrier: bool) -> None:
        self._scheduler = scheduler
        self._barrier = barrier

    @property
    def held(self) -> int:
        """Messages that are kept back."""
        return len(self._scheduler._deferred_input_requests)

    @property
    def held_retract(self) -> bool:
        """What is kept back begins with a retract pause."""
        deferred = self._scheduler._deferred_input_requests
        return bool(deferred) and _is_pause(deferred[0]) and deferred[0].mode == "retract"

    def take(self, hold: Hold) -> Taken:
        """Receive, and dispatch up to the first pause that `hold` keeps back.

        Behind a result that a retract pause has processed, transfers are retired as behind every other: a
        flush or a weight update that came with the pause finds them gone.
        """
        scheduler = self._scheduler
        dispatched = list(scheduler.ingest_requests(stop_at_pause=True))
        while count := self._free(hold):
            part = scheduler._deferred_input_requests[:count]
            del scheduler._deferred_input_requests[:count]
            results = len(scheduler.result_queue)
            scheduler.process_input_requests(part)
            if len(scheduler.result_queue) < results:
                scheduler.process_disagg_prefill_inflight_queue()
            dispatched += part
        requests = sum(_requests(message) for message in dispatched)
        return Taken(requests, sum(not _requests(message) for message in dispatched))

    def _free(self, hold: Hold) -> int:
        """Messages in front of the first pause that is kept back, up to a retract pause."""
        for index, message in enumerate(self._scheduler._deferred_input_requests):
            if _is_pause(message) and self._keeps(message, hold):
                return index
            if _is_pause(message) and message.mode == "retract":
                return index + 1
        return len(self._scheduler._deferred_input_requests)

    def _keeps(self, pause: Any, hold: Hold) -> bool:
        retract = pause.mode == "retract" and hold.retract
        return hold.pauses or retract or (self._barrier and hold.weights)


def _is_pause(message: Any) -> bool:
    return type(message).__name__ == "PauseGenerationReqInput"


def _requests(message: Any) -> int:
    """How many requests a message brings."""
    name = type(message).__name__
    if name in ("BatchTokenizedGenerateReqInput", "BatchTokenizedEmbeddingReqInput"):
        return len(message.batch)
    return int(name in ("TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput"))
