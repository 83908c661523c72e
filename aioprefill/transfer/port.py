"""What a host needs of a KV transfer, prefill side. Pure.

A *room* is one hand-off, named by its request id. Its states:

    bootstrapping -> waiting for input -> transferring -> success | failed

Rules that every transfer keeps:
- `open`, `send` and `abandon` return at once; what happens comes back as events from `poll`, and the
  transfer calls `wake` (on the loop's thread) whenever there is something to poll.
- Every opened room ends with exactly one event whose `released` is true, and that is its last. Until then
  the pages given to `send` may still be read by the device: they must not be reused.
- A room that fails while a write is under way first reports FAILED with `released` false, and the
  release when the write is terminal or the peer is known dead.
- After `abandon` no outcome is reported any more, only the release (state FAILED, `released` true).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aioprefill.engine.port import SampledToken
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the decode peer needs to know before the KV comes."""

    room: str
    peer: str
    """The decode peer's endpoint (NIXL) or name (in-process)."""
    prompt_tokens: int
    pages: int
    """Pages that the whole prompt fills; the peer reserves as many."""
    sampling: SamplingParams
    max_new_tokens: int
    """Tokens to generate in all, the first one (sampled by prefill) included."""
    ignore_eos: bool = False
    """Go on past end-of-sequence tokens (benchmarks)."""
    grammar: GrammarSpec | None = None
    """What the whole output, the first token included, must match."""


class TransferState(enum.Enum):
    """State of a room as seen by the prefill side."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting_for_input"
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """Something that happened to a room.

    WAITING_FOR_INPUT: the handshake is done, `send` will write at once (before it, sends are refused).
    SUCCESS: every page and the first token have reached the peer.
    FAILED: `reason` says why.
    """

    room: str
    state: TransferState
    reason: str | None = None
    released: bool = False


class KVTransfer(Protocol):
    """Sends KV pages of many rooms to many peers."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begin, on the running loop. Raises `ConfigError` when the backend cannot run here."""

    def open(self, handoff: Handoff) -> None:
        """Start the handshake of a room. An unreachable peer is an event, not an exception."""

    def send(self, room: str, pages: Sequence[int], first_page: int, final: SampledToken | None) -> None:
        """Write local `pages` to the peer's pages first_page, first_page + 1, … of the room.

        Calls of one room come in order, without gaps. `final` is given with the last one (which may
        have no pages): the first token. Only after the room is WAITING_FOR_INPUT.
        """

    def abandon(self, room: str, reason: str) -> None:
        """Give a room up, in any state, also before its handshake ended; the peer is told `reason`.

        Does nothing for a room that is unknown or released.
        """

    def poll(self) -> Sequence[TransferEvent]:
        """Take the events since the last poll, in order. Never blocks."""

    async def aclose(self) -> None:
        """Stop threads and sockets. Rooms still open are abandoned. Idempotent."""
