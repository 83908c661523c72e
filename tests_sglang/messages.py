"""What a script is made of: messages as SGLang's receiver gives them, and things that a test does."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_rooms = itertools.count(1)


@dataclass
class Act:
    """Stands for a message: something that the test does at that moment, on the scheduler's thread."""

    do: Callable[[], None]
    rid: None = None


def request(rid: str, tokens: Sequence[int], *, room: int | None = None, **sampling: Any) -> Any:
    """A request with a room of its own; greedy unless `sampling` says otherwise."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    parameters = SamplingParams(**{"max_new_tokens": 4, "temperature": 0.0, **sampling})
    parameters.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", tokens),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=parameters,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        bootstrap_host=FAKE_BOOTSTRAP_HOST,
        bootstrap_port=8998,
        bootstrap_room=next(_rooms) if room is None else room,
    )


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that depend on the seed from the first one on."""
    state, ids = seed * 7919 + 12345, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % (1 << 31)
        ids.append(2 + (state >> 8) % 250)
    return ids


def pause(mode: str) -> Any:
    """A pause command: "in_place" or "retract"."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    return PauseGenerationReqInput(mode=mode)


def resume() -> Any:
    """Go on after a pause."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    return ContinueGenerationReqInput()


def abort(rid: str = "", *, everything: bool = False) -> Any:
    """Abort requests whose id begins with `rid`."""
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid=rid, abort_all=everything)


def finish(bench: Any, *numbers: int) -> Act:
    """End the copies of forwards that have no delay, as a device would."""

    def do() -> None:
        assert bench.copies is not None
        bench.copies.finish(*numbers)

    return Act(do)


def shutdown() -> Any:
    """End the loop."""
    from sglang.srt.managers.io_struct import ShutdownReq

    return ShutdownReq()
