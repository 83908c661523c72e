"""What happens to a room on the prefill side, and what is to be done about it. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioprefill.engine.port import SampledToken
from aioprefill.transfer.port import TransferEvent
from aioprefill.wire.messages import Bootstrap, Cancel, Commit

PageArray = npt.NDArray[np.int32]

# --- what happens to a room ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The peer's handshake is done: rooms may be announced to it."""


@dataclass(frozen=True, slots=True, eq=False)
class PagesReserved:
    """The peer reserved these pages of its pool, which has `num_pages`."""

    pages: npt.NDArray[np.uint32]
    num_pages: int


@dataclass(frozen=True, slots=True)
class RefusedByPeer:
    """The peer refuses the room, or gave it up."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer died, fell silent or turned out unusable."""

    reason: str


@dataclass(frozen=True, slots=True)
class Send:
    """Our host has computed more pages."""

    pages: Sequence[int]
    first_page: int
    final: SampledToken | None


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """A write is terminal: nothing reads its local pages any more. `error` None means success."""

    number: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The peer has every page and the first token."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Our host gives the room up."""

    reason: str


Input = (
    PeerReady | PagesReserved | RefusedByPeer | PeerLost | Send | WriteEnded | Acknowledged | Abandoned
)  # fmt: skip


# --- what is to be done about it ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Emit:
    """Report to the host."""

    event: TransferEvent


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to the peer."""

    message: Bootstrap | Commit | Cancel


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Write local page `local[i]` to the peer's page `remote[i]`; answered by `WriteEnded(number)`."""

    ticket: int
    number: int
    local: PageArray
    remote: PageArray


@dataclass(frozen=True, slots=True)
class DropUnposted:
    """Do not start writes of the room that have not been started; each is answered by `WriteEnded`."""

    ticket: int


Command = Emit | Tell | Write | DropUnposted
