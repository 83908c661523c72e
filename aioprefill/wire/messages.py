"""Every message that travels between processes, and the codec: msgpack of tagged, typed structs.

Token and page ids travel as packed little-endian uint32 bytes (`pack_ids`): 1 µs for 10,000 instead of 170.
The first message on a connection is `Hello`; a receiver that has not seen it answers `Failed` with code
"hello_required", which is how a client notices that its server was restarted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from aioprefill.errors import WireError
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.request import Timeouts
from aioprefill.sampling_params import SamplingParams

VERSION = 1
MAX_MESSAGE_BYTES = 16 << 20
"""Largest message; enough for a prompt of four million tokens. Sockets drop longer ones (ZMQ_MAXMSGSIZE)."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First message of every connection."""

    role: str
    """"client" or "prefill"."""
    epoch: str
    """Random per process: a new one means that the sender was restarted."""
    version: int = VERSION
    software: str = ""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Answer to `Hello`."""

    role: str
    """"prefill" or "decode"."""
    epoch: str
    model: str
    """Name of the model as the server was given it."""
    fingerprint: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    version: int = VERSION
    software: str = ""


class Submit(msgspec.Struct, tag="submit", frozen=True, omit_defaults=True):
    """Client -> prefill: one request. Answers: `Accepted`, `FirstToken`, `Transferred`; or `Failed`."""

    request_id: str
    prompt: bytes
    """Token ids, packed."""
    peer: str | None = None
    """Endpoint of the decode worker that continues; None: no hand-off, the first token only."""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int = 128
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None
    """What the output must match."""
    timeouts: Timeouts = Timeouts()
    priority: int = 0
    deadline_s: float | None = None
    """Seconds after its arrival within which the first token is wanted."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Client -> prefill: give the request up."""

    request_id: str


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """Prefill -> client: the request is queued."""

    request_id: str


class FirstToken(msgspec.Struct, tag="first_token", frozen=True):
    """Prefill -> client: the first token, with times in ms since the request's arrival at the server."""

    request_id: str
    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    prompt_tokens: int
    cached_tokens: int
    launched_ms: float
    first_token_ms: float
    weight_versions: tuple[int, ...] = (0,)


class Transferred(msgspec.Struct, tag="transferred", frozen=True):
    """Prefill -> client: all KV is with the decode worker, `transferred_ms` after arrival."""

    request_id: str
    transferred_ms: float
    kv_bytes: int


class Failed(msgspec.Struct, tag="failed", frozen=True, omit_defaults=True):
    """The request or the control command (or, without an id, the connection's last message) failed."""

    code: str
    message: str
    request_id: str | None = None
    field: str | None = None
    retry_after_s: float | None = None
    op_id: str | None = None


class StatsQuery(msgspec.Struct, tag="stats?", frozen=True):
    """Client -> server: ask for `Stats`."""


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """Answer to `StatsQuery`: a flat table of numbers and short texts."""

    values: dict[str, bool | int | float | str]


class Control(msgspec.Struct, tag="control", frozen=True, omit_defaults=True):
    """Client -> prefill: a command (see `control_commands`). Answer: `ControlDone`, or `Failed` with the id.

    The command is not undone when the client leaves before its answer.
    """

    op_id: str
    """The client's own name for this call, at most 128 characters."""
    command: str
    arguments: dict[str, bool | int | float | str | None] = {}


class ControlDone(msgspec.Struct, tag="control_done", frozen=True):
    """Prefill -> client: the command has taken effect."""

    op_id: str
    values: dict[str, bool | int | float | str | list[str] | None]


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """Client -> decode: stream the tokens of this room to me (also before the room exists)."""

    request_id: str


class Token(msgspec.Struct, tag="token", frozen=True):
    """Decode -> client: generated token number `index` (0 is the one sampled by prefill)."""

    request_id: str
    index: int
    token_id: int


class Finished(msgspec.Struct, tag="finished", frozen=True):
    """Decode -> client: the stream is complete. `reason` is "eos", "grammar" or "length"."""

    request_id: str
    reason: str
    tokens: int


class PoolInfo(msgspec.Struct, tag="pool", frozen=True, omit_defaults=True):
    """Where a process's KV pool is, and in what layout.

    Decode -> prefill right after `Welcome`; prefill -> decode before its first room.
    """

    agent: str
    """NIXL agent name."""
    metadata: bytes
    """NIXL agent metadata."""
    base_address: int
    device_id: int
    memory: str
    """"DRAM" or "VRAM"."""
    num_pages: int
    page_bytes: int
    fingerprint: str
    layers: int
    kv_heads: int
    """In a page of this pool: with shards, one rank's."""
    head_dim: int
    page_size: int
    dtype: str
    shards: int = 1
    """Ranks that a page's heads are divided over."""
    shard: int = 0
    """Which of them this process is."""


class Bootstrap(msgspec.Struct, tag="bootstrap", frozen=True, omit_defaults=True):
    """Prefill -> decode: a room is coming; reserve its pages. Answer: `Reserved` or `Refused`.

    Of a prefill server with several ranks each rank announces its own shard of the room, over its own
    connection; group and ticket say which shards belong together. Older software, which knows no shards,
    refuses them by their page_bytes.
    """

    room: str
    prompt_tokens: int
    pages: int
    sampling: SamplingParams
    max_new_tokens: int
    ignore_eos: bool
    fingerprint: str
    page_bytes: int
    """Of a page at the sender: with shards, of its part."""
    ticket: int = 0
    """Number of this hand-off at its sender, repeated in all that concerns it: room names may come back.

    The same at all ranks of a server."""
    grammar: GrammarSpec | None = None
    shards: int = 1
    shard: int = 0
    group: str = ""
    """Names the server whose ranks send the shards; only with several."""


class Reserved(msgspec.Struct, tag="reserved", frozen=True):
    """Decode -> prefill: write page i of the room to the pool's page `pages[i]`."""

    room: str
    pages: bytes
    """Page ids, packed."""
    ticket: int = 0


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Decode -> prefill: the room is refused, or given up by the decode side later on."""

    room: str
    message: str
    ticket: int = 0


class Commit(msgspec.Struct, tag="commit", frozen=True):
    """Prefill -> decode: the room's last write was posted; decoding may start once all have arrived."""

    room: str
    writes: int
    """Number of writes of the room; each carries a NIXL notification."""
    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    ticket: int = 0


class Arrived(msgspec.Struct, tag="arrived", frozen=True):
    """Decode -> prefill: every page of the room and its first token are here."""

    room: str
    ticket: int = 0


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Prefill -> decode: the room is given up. `quiet`: no write to its pages is under way any more.

    Sent once with quiet true, or first with false (pages go to quarantine) and later with true.
    """

    room: str
    message: str
    quiet: bool
    ticket: int = 0


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Either side's heartbeat; answered by `Pong`."""

    epoch: str


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """Answer to `Ping`."""

    epoch: str


Message = (
    Hello | Welcome | Ping | Pong | Failed | StatsQuery | Stats
    | Submit | Abort | Accepted | FirstToken | Transferred | Control | ControlDone
    | Attach | Token | Finished
    | PoolInfo | Bootstrap | Reserved | Refused | Commit | Arrived | Cancel
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame. Raises `WireError` for a message above `MAX_MESSAGE_BYTES`."""
    try:
        frame = _encoder.encode(message)
    except (TypeError, OverflowError, ValueError) as err:
        raise WireError(f"{type(message).__name__} cannot be sent: {err}") from err
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(message).__name__} of {len(frame):,} bytes exceeds {MAX_MESSAGE_BYTES:,}")
    return frame


def decode(frame: bytes | memoryview) -> Message:
    """The message in a frame. Raises `WireError` when it is malformed, unknown or too large."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(frame):,} bytes exceeds {MAX_MESSAGE_BYTES:,}")
    try:
        return _decoder.decode(frame)
    except msgspec.MsgspecError as err:
        raise WireError(f"malformed message: {err}") from err


class _Ids(msgspec.Struct):
    request_id: str | None = None
    op_id: str | None = None


_ids_decoder = msgspec.msgpack.Decoder(_Ids)


def ids_of(frame: bytes) -> tuple[str | None, str | None]:
    """Request id and op id of a message that `decode` refuses, as far as they can be found."""
    try:
        found = _ids_decoder.decode(frame)
    except msgspec.MsgspecError:
        return None, None
    return found.request_id, found.op_id


_UINT32 = np.dtype("<u4")


def pack_ids(ids: Sequence[int] | npt.NDArray[np.generic]) -> bytes:
    """Ids, shape (n,), as packed little-endian uint32.

    Raises `OverflowError` for one that is negative or too large, `TypeError` for what is no integer, and
    `ValueError` for more than one dimension.
    """
    if isinstance(ids, np.ndarray) and ids.dtype == _UINT32 and ids.ndim == 1:
        return ids.tobytes()
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"ids must have one dimension, got {array.ndim}")
    if array.size and array.dtype != np.dtype("<u4"):
        if array.dtype.kind not in "iu":
            raise TypeError(f"ids must be integers, got {array.dtype}")
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= 1 << 32:  # asarray(dtype=...) would wrap them silently
            raise OverflowError(f"ids must be within 0..2**32-1, got {low}..{high}")
    return array.astype("<u4", copy=False).tobytes()


def unpack_ids(packed: bytes) -> npt.NDArray[np.uint32]:
    """A read-only view, shape (n,), uint32. Raises `WireError` when the length is no multiple of 4."""
    if len(packed) % 4:
        raise WireError(f"packed ids have {len(packed)} bytes, which is no multiple of 4")
    return np.frombuffer(packed, dtype=_UINT32)
