"""The life of a request in the native host: one record, and one table of legal moves. Pure.

    bootstrapping -> waiting -> running -> transferring -> done
          |                        |  \\-> parked -> transferring
          \\---- (optimistic) ----->/   \\-> done (nobody to hand the KV to)
    running -> waiting (retracted)         every state but the last two -> failed

A request's pages, and its room, are released in one place (`NativeHost`), once it is over and nothing
touches them any more: no forward in flight, no transfer.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from aioprefill.engine.grammar_port import MaskWords
from aioprefill.engine.port import PageIds, SampledToken, TokenIds
from aioprefill.errors import InvalidMove
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.request import PrefillHandle, Timeouts
from aioprefill.sampling_params import SamplingParams


class State(enum.Enum):
    """Where a request is."""

    BOOTSTRAPPING = "bootstrapping"
    """Its handshake with the decode peer is under way; not admitted."""
    WAITING = "waiting"
    """May be admitted."""
    RUNNING = "running"
    """Has pages; a chunk is launched, or the next one waits for its turn."""
    PARKED = "parked"
    """Prefilled before its handshake ended."""
    TRANSFERRING = "transferring"
    """Prefilled; the last KV is on its way."""
    DONE = "done"
    FAILED = "failed"


class Move(enum.Enum):
    """What happens to a request."""

    BOOTSTRAPPED = "bootstrapped"
    ADMITTED = "admitted"
    PREFILLED = "prefilled"
    """Prefilled, and the peer is ready for the last KV."""
    PREFILLED_EARLY = "prefilled_early"
    """Prefilled, and the peer is not ready."""
    PREFILLED_LOCAL = "prefilled_local"
    """Prefilled, and there is no peer."""
    TRANSFERRED = "transferred"
    RETRACTED = "retracted"
    """Gives its pages back and waits again."""
    RETRACTED_EARLY = "retracted_early"
    """The same for one whose handshake has not ended."""
    FAILED = "failed"


MOVES: dict[tuple[State, Move], State] = {
    (State.BOOTSTRAPPING, Move.BOOTSTRAPPED): State.WAITING,
    (State.BOOTSTRAPPING, Move.ADMITTED): State.RUNNING,
    (State.BOOTSTRAPPING, Move.FAILED): State.FAILED,
    (State.WAITING, Move.ADMITTED): State.RUNNING,
    (State.WAITING, Move.FAILED): State.FAILED,
    (State.RUNNING, Move.BOOTSTRAPPED): State.RUNNING,
    (State.RUNNING, Move.PREFILLED): State.TRANSFERRING,
    (State.RUNNING, Move.PREFILLED_EARLY): State.PARKED,
    (State.RUNNING, Move.PREFILLED_LOCAL): State.DONE,
    (State.RUNNING, Move.RETRACTED): State.WAITING,
    (State.RUNNING, Move.RETRACTED_EARLY): State.BOOTSTRAPPING,
    (State.RUNNING, Move.FAILED): State.FAILED,
    (State.PARKED, Move.BOOTSTRAPPED): State.TRANSFERRING,
    (State.PARKED, Move.FAILED): State.FAILED,
    (State.TRANSFERRING, Move.TRANSFERRED): State.DONE,
    (State.TRANSFERRING, Move.FAILED): State.FAILED,
}

OVER = frozenset({State.DONE, State.FAILED})
NO_PAGES: PageIds = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Request:
    """One live request. Positions and lengths are in tokens; page lists are in pages of the pool."""

    request_id: str
    tokens: TokenIds
    """The prompt, shape (n,), uint32."""
    sampling: SamplingParams
    peer: str | None
    max_new_tokens: int
    ignore_eos: bool
    handle: PrefillHandle
    arrival: int
    """Place in the order of arrival."""
    arrival_s: float = 0.0
    priority: int = 0
    due_s: float | None = None
    """When the first token is wanted at the latest, on the clock of `arrival_s`."""
    expected_cached: int = 0
    """Prompt tokens that the prefix cache held at the last look, for policies."""
    looked_up: bool = False
    """It is in the round of such looks."""

    timeouts: Timeouts = Timeouts()
    state: State = State.WAITING
    history: deque[Move] = field(default_factory=lambda: deque(maxlen=16))
    pages: PageIds = field(default_factory=lambda: NO_PAGES)
    """Page table for the whole prompt; empty before admission and after release."""
    tree_pages: PageIds = field(default_factory=lambda: NO_PAGES)
    """Pages of other requests that stand for this prompt in the prefix cache; held as long as `pages`."""
    inserted: int = 0
    """Pages of the prompt that the prefix cache has seen."""
    cached: int = 0
    """Tokens whose KV came from the prefix cache."""
    planned: int = 0
    """Tokens launched, or cached: the next chunk begins here."""
    computed: int = 0
    """Tokens whose KV is in the pages for sure: their forward's result was processed."""
    in_flight: int = 0
    """Forwards launched that touch the pages and whose result is not processed."""
    room_open: bool = False
    """The transfer may touch the pages."""
    bootstrapped: bool = False
    early_launches: int = 0
    """Times that it was admitted before its handshake had ended."""
    sent_pages: int = 0
    """Pages given to the transfer."""
    grammar: GrammarSpec | None = None
    first_mask: MaskWords | None = None
    """Tokens that the grammar allows first; None: it is not compiled, or there is none."""
    first: SampledToken | None = None
    launched_s: float | None = None
    weight_versions: tuple[int, ...] = ()
    """Versions of the weights that its forwards were launched with."""
    cacheable: bool = True
    """Its KV may go into the prefix cache: it comes from one version of the weights, the present one."""

    @property
    def over(self) -> bool:
        """The outcome is decided."""
        return self.state in OVER

    @property
    def waits(self) -> bool:
        """Not admitted."""
        return self.state in (State.WAITING, State.BOOTSTRAPPING)

    @property
    def grammar_ready(self) -> bool:
        """It need not wait for its grammar."""
        return self.grammar is None or self.first_mask is not None

    @property
    def quiet(self) -> bool:
        """Over, and nothing touches its pages any more."""
        return self.over and self.in_flight == 0 and not self.room_open

    @property
    def all_launched(self) -> bool:
        """No forward is left to launch for it."""
        return self.state is not State.BOOTSTRAPPING and self.planned == self.length

    @property
    def length(self) -> int:
        """Prompt length in tokens."""
        return len(self.tokens)

    def move(self, move: Move) -> None:
        """Make a legal move. Raises `InvalidMove`, telling the request's story."""
        try:
            self.state = MOVES[self.state, move]
        except KeyError:
            story = " -> ".join(past.value for past in self.history) or "nothing yet"
            raise InvalidMove(
                f"request {self.request_id} is {self.state.value} and cannot be {move.value}; before: {story}"
            ) from None
        self.history.append(move)
