"""Whether the native host may launch, and what a pause or resume does to that. Pure."""

from __future__ import annotations

import enum

from aioprefill.control import Command, Pause, PauseMode, Resume, UpdateWeights
from aioprefill.errors import ControlError
from aioprefill.host import Hold


class Phase(enum.Enum):
    """What the host is doing about launches."""

    RUNNING = "running"
    FINISHING = "finishing"
    """A pause of mode `wait`: nothing is admitted, what was admitted goes on."""
    PAUSED = "paused"


class PauseState:
    """Phase, and whether the weights are being swapped."""

    def __init__(self) -> None:
        self.phase = Phase.RUNNING
        self.swapping = False

    def __repr__(self) -> str:
        return f"<PauseState {self.phase.value}{' swapping' * self.swapping}>"

    @property
    def paused(self) -> bool:
        """Nothing may be launched, and no result processed."""
        return self.phase is Phase.PAUSED or self.swapping

    @property
    def admits(self) -> bool:
        """New requests may be admitted."""
        return self.phase is Phase.RUNNING and not self.swapping

    def keeps_back(self, command: Command, hold: Hold) -> bool:
        """The command, and everything behind it, must wait for now."""
        if isinstance(command, Pause | Resume | UpdateWeights) and self.swapping:
            return True
        if isinstance(command, UpdateWeights):
            return hold.weights
        if not isinstance(command, Pause) or self.phase is not Phase.RUNNING:
            return False  # a pause while paused is refused at once, or its resume could never come
        return hold.pauses or (command.mode is PauseMode.RETRACT and hold.retract)

    def pause(self, mode: PauseMode) -> None:
        """Begin a pause. Raises `ControlError` when there is one already."""
        if self.phase is not Phase.RUNNING:
            raise ControlError(f"the scheduler is {self.phase.value} already: resume it first")
        self.phase = Phase.FINISHING if mode is PauseMode.WAIT else Phase.PAUSED

    def finished(self) -> None:
        """What was admitted before a `wait` pause is done."""
        assert self.phase is Phase.FINISHING
        self.phase = Phase.PAUSED

    def resume(self) -> None:
        """End a pause. Raises `ControlError` when there is none."""
        if self.phase is Phase.RUNNING:
            raise ControlError("the scheduler is not paused")
        self.phase = Phase.RUNNING
