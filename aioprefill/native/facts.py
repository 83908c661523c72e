"""What comes to the native host from outside, in the form in which it travels to other ranks. Pure data.

Facts take effect at the beginning of a host call, the same call on every rank. What only one rank can know
(`LocalFact`) becomes a fact when the leader has heard it of all ranks; see `rank_facts`.
"""

from __future__ import annotations

import msgspec

from aioprefill.engine.port import SampledToken
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.request import Timeouts
from aioprefill.sampling_params import SamplingParams
from aioprefill.transfer.port import TransferState


class ErrorFact(msgspec.Struct, frozen=True, array_like=True):
    """An `AioprefillError`, as far as it decides anything."""

    code: str
    message: str
    field: str | None = None


class ArrivalFact(msgspec.Struct, tag="arrival", frozen=True, array_like=True):
    """A checked request."""

    request_id: str
    tokens: bytes
    """Little-endian uint32."""
    arrival_s: float
    peer: str | None
    sampling: SamplingParams
    max_new_tokens: int
    ignore_eos: bool
    grammar: GrammarSpec | None
    timeouts: Timeouts
    priority: int
    deadline_s: float | None


class AbortFact(msgspec.Struct, tag="abort", frozen=True, array_like=True):
    """Somebody wants a request to be given up."""

    request_id: str
    reason: str


class CommandFact(msgspec.Struct, tag="command", frozen=True, array_like=True):
    """A control command."""

    number: int
    """In the order of commands, from 0."""
    name: str
    """Of the command's class."""
    mode: str = ""
    prefix: str = ""
    reason: str = ""
    exact: bool = False
    staged: int = -1
    """`UpdateWeights`: number of the staging."""


class WithdrawnFact(msgspec.Struct, tag="withdrawn", frozen=True, array_like=True):
    """Nobody waits any more for the effect of a command."""

    number: int


class GrammarFact(msgspec.Struct, tag="grammar", frozen=True, array_like=True):
    """What compiling a request's grammar came to: a first mask, or an error."""

    request_id: str
    arrival: int
    mask: bytes | None
    """Little-endian int32 words."""
    error: ErrorFact | None


class StageFact(msgspec.Struct, tag="stage", frozen=True, array_like=True):
    """New weights are to be read."""

    number: int
    folder: str


class UnstageFact(msgspec.Struct, tag="unstage", frozen=True, array_like=True):
    """Staged weights will not be used."""

    number: int


class SwappedFact(msgspec.Struct, tag="swapped", frozen=True, array_like=True):
    """The device has the new weights, or could not take them."""

    error: str | None = None


class TransferFact(msgspec.Struct, tag="transfer", frozen=True, array_like=True):
    """A `TransferEvent`."""

    room: str
    state: TransferState
    reason: str | None = None
    released: bool = False


class StagedFact(msgspec.Struct, tag="staged", frozen=True, array_like=True):
    """A rank has read new weights, or could not; only ever told to the leader."""

    number: int
    error: ErrorFact | None = None


class OutputsFact(msgspec.Struct, tag="outputs", frozen=True, array_like=True):
    """What a forward has sampled; only in recordings."""

    number: int
    tokens: list[SampledToken | None]


Fact = (
    ArrivalFact
    | AbortFact
    | CommandFact
    | WithdrawnFact
    | GrammarFact
    | StageFact
    | UnstageFact
    | SwappedFact
    | TransferFact
    | OutputsFact
)
LocalFact = TransferFact | SwappedFact | StagedFact
"""What one rank knows."""

_encoder = msgspec.msgpack.Encoder()
_facts = msgspec.msgpack.Decoder(list[Fact])
_local = msgspec.msgpack.Decoder(LocalFact)


def encode_facts(facts: list[Fact]) -> bytes:
    """For a token; b"" for none."""
    return _encoder.encode(facts) if facts else b""


def decode_facts(data: bytes) -> list[Fact]:
    """Raises `msgspec.MsgspecError` for what is no list of facts."""
    return _facts.decode(data)


def encode_local(fact: LocalFact) -> bytes:
    """For a report to the leader."""
    return _encoder.encode(fact)


def decode_local(data: bytes) -> LocalFact:
    """Raises `msgspec.MsgspecError` for what is no such fact."""
    return _local.decode(data)
