"""What operators ask of a scheduler: pauses, new weights, a flushed cache, aborts of many requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

from aioprefill.control import AbortMatching, Command, FlushCache, Pause, PauseMode, Resume, UpdateWeights
from aioprefill.errors import ControlError, HostError
from aioprefill.loop_core import LoopCore
from aioprefill.pipeline import Pipeline
from aioprefill.request import PrefillHandle, PrefillRequest

Answer = dict[str, Any]
"""What a control command reports: numbers and short texts by name."""


class Frontend(Protocol):
    """How requests get into a host that takes them by call (the native host has one)."""

    def submit(self, request: PrefillRequest) -> PrefillHandle:
        """Queue a request; see `PrefillScheduler.submit`."""

    def abort(self, request_id: str, reason: str) -> None:
        """Ask for a request to be given up; unknown ids are ignored."""

    def control(self, command: Command) -> asyncio.Future[Any]:
        """Queue a command; the future has its answer (a dict) when it has taken effect."""

    async def stage_weights(self, folder: Path) -> Any:
        """Read and examine weights, off the loop; for `UpdateWeights`. Raises `ModelError`."""


class Operations:
    """The part of `PrefillScheduler` that queues commands and waits for their effect."""

    _core: LoopCore | None
    _pipeline: Pipeline

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        """Pauses, resumes and weight updates are queued in the order of their calls."""
        self._mode: PauseMode | None = None
        self._pausing = 0

    @property
    def _frontend(self) -> Frontend:
        raise NotImplementedError

    @property
    def _running(self) -> bool:
        raise NotImplementedError

    @property
    def pausing(self) -> bool:
        """A pause was asked for and has not taken effect."""
        return self._pausing > 0

    @property
    def pause_mode(self) -> str:
        """Mode of the pause that holds; "" when there is none."""
        return "" if self._mode is None else self._mode.value

    async def pause(
        self, mode: PauseMode | str = PauseMode.IN_PLACE, *, barrier: bool | None = None
    ) -> Answer:
        """Stop launching, as `mode` says; returns when it has taken effect.

        With `barrier` it returns when every forward launched before is agreed complete on all ranks too, so
        that nothing touches the weights; its result may stay unprocessed. Modes `wait` and `abort` are
        always barriers. Raises `ControlError` when paused already, or the mode is unknown; `HostError` when
        the scheduler stops meanwhile. Cancelling the wait does not undo the pause.
        """
        try:
            mode = PauseMode(mode)
        except ValueError:
            known = ", ".join(PauseMode)
            raise ControlError(f"there is no pause mode {mode!r}: say one of {known}") from None
        self._pausing += 1
        try:
            answer = await self._control_in_turn(Pause(mode))
            self._mode = mode
            if barrier or mode in (PauseMode.WAIT, PauseMode.ABORT):
                await self._wait_agreed(self._pipeline.next_number)
        finally:
            self._pausing -= 1
        return answer

    async def resume(self) -> Answer:
        """Go on after a pause. Raises `ControlError` when there is none."""
        answer = await self._control_in_turn(Resume())
        self._mode = None
        return answer

    async def update_weights(self, folder: Path | str) -> Answer:
        """Serve with the weights of a folder of safetensors from now on; returns their version.

        They are read and compared with the model first, off the loop; then swapped between two forwards,
        with the prefix cache flushed. Requests may be queued and come in meanwhile. Pauses, resumes and
        updates that are called later take effect later. Raises `ModelError` when the weights do not fit,
        and the old ones go on serving. Cancelling it may leave either.
        """
        async with self._turn:
            self._check_running()  # the turn may come when the host is closed, and nobody would read them
            staged = await self._frontend.stage_weights(Path(folder))
            answer = self._control(UpdateWeights(staged))
        return await answer

    async def flush_cache(self) -> Answer:
        """Forget cached prefixes; how many pages came free."""
        return await self._control(FlushCache())

    async def abort_matching(
        self, prefix: str, reason: str = "aborted by an operator", *, exact: bool = False
    ) -> Answer:
        """Abort every request whose id begins with `prefix`, in any state; "" is all. How many.

        With `exact` the one whose id it is.
        """
        return await self._control(AbortMatching(prefix, reason, exact))

    def _control(self, command: Command) -> Awaitable[Answer]:
        """Queue a command; its answer is to come."""
        self._check_running()
        return self._frontend.control(command)

    def _check_running(self) -> None:
        if not self._running or self._pipeline.exiting:
            raise ControlError("the scheduler is not running, or it drains")

    async def _control_in_turn(self, command: Command) -> Answer:
        async with self._turn:
            answer = self._control(command)
        return await answer

    async def _wait_agreed(self, number: int) -> None:
        """Return when every forward launched before `number` is agreed complete.

        Raises `HostError` when the loop has ended before: nobody knows what its forwards touch.
        """
        core = self._core
        assert core is not None
        while not self._pipeline.agreed_before(number):
            if not self._running:
                raise HostError(
                    "the scheduler stopped before the forwards were done that the pause waited for"
                )
            await core.signals.progress.wait()
