"""The control commands that travel in `Control`, with their arguments. Pure.

The words of operators: `aioprefill ctl` and `PairClient` make them, `ControlDesk` carries them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from aioprefill.control import PauseMode
from aioprefill.errors import ControlError
from aioprefill.wire.messages import Control

MAX_DRAIN_S = 86_400.0


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class PauseCommand(_Command, frozen=True, tag="pause"):
    """See `PrefillScheduler.pause`."""

    mode: str = PauseMode.IN_PLACE.value
    barrier: bool = False


class ResumeCommand(_Command, frozen=True, tag="resume"):
    """See `PrefillScheduler.resume`."""


class UpdateWeightsCommand(_Command, frozen=True, tag="update_weights"):
    """See `PrefillScheduler.update_weights`; the folder is the server's."""

    path: str


class AbortCommand(_Command, frozen=True, tag="abort"):
    """Abort the request `request_id`, or all whose id begins with `prefix` ("" is every request)."""

    request_id: str | None = None
    prefix: str | None = None

    def __post_init__(self) -> None:
        if (self.request_id is None) == (self.prefix is None):
            raise ValueError('give either request_id or prefix ("" is every request)')


class FlushCacheCommand(_Command, frozen=True, tag="flush_cache"):
    """See `PrefillScheduler.flush_cache`."""


class DrainCommand(_Command, frozen=True, tag="drain"):
    """See `PrefillScheduler.drain`; None: the server's own timeout."""

    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DRAIN_S)] | None = None


class StatsCommand(_Command, frozen=True, tag="stats"):
    """See `PrefillScheduler.stats`."""


class HealthCommand(_Command, frozen=True, tag="health"):
    """See `PrefillScheduler.health`."""


ControlCommand = (
    PauseCommand | ResumeCommand | UpdateWeightsCommand | AbortCommand | FlushCacheCommand
    | DrainCommand | StatsCommand | HealthCommand
)  # fmt: skip

_KINDS: dict[str, type[ControlCommand]] = {
    str(kind.__struct_config__.tag): kind for kind in ControlCommand.__args__
}


def control_message(op_id: str, command: ControlCommand) -> Control:
    """The message that carries a command."""
    arguments = msgspec.to_builtins(command)
    return Control(op_id, arguments.pop("type"), arguments)


def command_of(message: Control) -> ControlCommand:
    """The command in a message. Raises `ControlError` when there is no such one, or it does not fit."""
    return _parse(message.command, message.arguments)


def _parse(name: str, arguments: Mapping[str, object]) -> ControlCommand:
    kind = _KINDS.get(name)
    if kind is None:
        raise ControlError(f"there is no control command {name[:64]!r}: say one of {', '.join(_KINDS)}")
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as err:
        raise ControlError(f"{name}: {err}") from err
