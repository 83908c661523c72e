"""Control commands as messages and back."""

from __future__ import annotations

import math

import pytest

from aioprefill.errors import ControlError
from aioprefill.wire.control_commands import (
    AbortCommand,
    ControlCommand,
    DrainCommand,
    FlushCacheCommand,
    HealthCommand,
    PauseCommand,
    ResumeCommand,
    StatsCommand,
    UpdateWeightsCommand,
    command_of,
    control_message,
)
from aioprefill.wire.messages import Control, decode, encode


@pytest.mark.parametrize(
    "command",
    [
        PauseCommand(),
        PauseCommand("retract", True),
        ResumeCommand(),
        UpdateWeightsCommand("/models/new"),
        AbortCommand(request_id="a"),
        AbortCommand(prefix=""),
        FlushCacheCommand(),
        DrainCommand(),
        DrainCommand(1.5),
        StatsCommand(),
        HealthCommand(),
    ],
)
def test_every_command_survives_the_trip(command: ControlCommand) -> None:
    """Through its message and the codec, with the call's id."""
    message = decode(encode(control_message("op", command)))
    assert isinstance(message, Control) and message.op_id == "op"
    assert command_of(message) == command


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("reboot", {}, "no control command 'reboot': say one of pause, resume"),
        ("x" * 1000, {}, "'" + "x" * 64 + "'"),
        ("pause", {"modus": "wait"}, "pause: .*modus"),
        ("pause", {"barrier": "yes"}, "pause: .*barrier"),
        ("pause", {"type": "resume"}, "pause: .*resume"),
        ("update_weights", {}, "update_weights: .*path"),
        ("abort", {}, "give either request_id or prefix"),
        ("abort", {"request_id": "a", "prefix": ""}, "give either request_id or prefix"),
        ("drain", {"timeout_s": -1}, "drain: .*timeout_s"),
        ("drain", {"timeout_s": math.nan}, "drain: .*timeout_s"),
        ("drain", {"timeout_s": math.inf}, "drain: .*timeout_s"),
    ],
)
def test_what_is_no_command_says_why(name: str, arguments: dict, says: str) -> None:
    """Unknown ones name the known ones; wrong arguments are named."""
    with pytest.raises(ControlError, match=says):
        command_of(Control("op", name, arguments))
