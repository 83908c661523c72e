"""Every error that aioprefill raises on purpose. One class per thing a caller can do about it.

Each carries a stable `code`, which is what travels over the wire, and a message that says what
happened, where, and what to do. Errors of libraries are translated into these at the edge.
"""

from __future__ import annotations


class AioprefillError(Exception):
    """Base of all errors raised on purpose."""

    code = "error"


class ConfigError(AioprefillError):
    """A setting is wrong or does not fit another one. The message names the setting and its source."""

    code = "config"


class InvalidRequest(AioprefillError):
    """A request that can never be served as it stands. `field` names the offending field."""

    code = "invalid_request"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class QueueFull(AioprefillError):
    """The queue limit is reached; the request was not taken. Try again after `retry_after_s` seconds."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestAborted(AioprefillError):
    """The request was aborted by its caller, or dropped because the scheduler stops."""

    code = "aborted"


class RequestTimeout(AioprefillError):
    """The request took too long; the message says in which stage and what its limit was."""

    code = "timeout"


class ControlError(AioprefillError):
    """A control command that does not fit the state, such as a resume while running."""

    code = "control"


class PeerError(AioprefillError):
    """A decode peer refused, died or fell silent. `peer` names it (its endpoint)."""

    code = "peer"

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"decode peer {peer}: {message}")
        self.peer = peer
        self.message = message


class DeviceError(AioprefillError):
    """The device reported an error for a forward. `name` is the device's own name for it.

    `sticky` errors leave the device unusable: the process must stop.
    """

    code = "device"

    def __init__(self, name: str, message: str, *, sticky: bool) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.sticky = sticky


class HostError(AioprefillError):
    """A host call failed, or the scheduler stopped because one did; open requests get this answer."""

    code = "host"


class HostLeft(AioprefillError):
    """The host has left the loop by itself and without a fault; `__cause__` is what it left by."""

    code = "left"


class RankError(HostError):
    """A tensor-parallel rank died, hangs, fell silent, decided differently or never came: none can go on.

    `rank` is the one at fault, `forward` the forward that it happened at, if any. `cause` continues a
    sentence that begins with "rank N"; the message is that sentence, and names the forward.
    """

    code = "rank"

    def __init__(self, rank: int, cause: str, *, forward: int | None = None) -> None:
        told = forward is None or f"forward {forward}" in cause
        super().__init__(f"rank {rank} {cause}" + ("" if told else f" (forward {forward})"))
        self.rank = rank
        self.forward = forward
        self.cause = cause

    @classmethod
    def retold(cls, rank: int, message: str) -> RankError:
        """From the message of such an error about `rank`, as another rank has sent it."""
        return cls(rank, message.removeprefix(f"rank {rank} "))


class ModelError(AioprefillError):
    """A model cannot be found, fetched, verified, converted or loaded."""

    code = "model"


class RecordingError(AioprefillError):
    """A recording cannot be read or replayed: damaged, foreign, of another format. The message names it."""

    code = "recording"


class WireError(AioprefillError):
    """A message or a connection is unusable: malformed, too large, wrong version, server gone."""

    code = "wire"


class InvalidMove(AssertionError):
    """A bug of ours: a request was asked to make a move that its state does not allow."""
