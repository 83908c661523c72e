"""Control commands: what may be asked of a scheduler besides serving requests. Pure data.

Commands keep their place in the order of input, so each takes effect after what came before it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class PauseMode(enum.StrEnum):
    """What a pause does with the work there is. Nothing is launched between its answer and the resume."""

    IN_PLACE = "in_place"
    """Everything stays as it is; results of launched forwards are processed after the resume."""
    RETRACT = "retract"
    """Pending results are processed; what was running is requeued, unless its KV is on its way already."""
    WAIT = "wait"
    """Admits nothing new; pauses when the prompts that were admitted are prefilled."""
    ABORT = "abort"
    """Aborts every request."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop launching."""

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on after a pause."""


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Swap the model's weights when the device is still. `staged` is what the host's engine staged."""

    staged: Any


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Forget cached prefixes."""


@dataclass(frozen=True, slots=True)
class AbortMatching:
    """Abort every request whose id begins with `prefix`; "" is all of them."""

    prefix: str
    reason: str
    exact: bool = False
    """`prefix` is the whole id of one request."""
    matched: int = 0
    """How many requests it named when it came; the frontend counts them."""

    def names(self, request_id: str) -> bool:
        """The request is one of those."""
        return request_id == self.prefix if self.exact else request_id.startswith(self.prefix)


Command = Pause | Resume | UpdateWeights | FlushCache | AbortMatching
