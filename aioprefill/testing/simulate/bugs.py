"""Mistakes that the simulation has to find: each breaks one rule of the loop, in this process, for a while.

They are planted from outside. Where an assertion of the product would see a mistake first, its state is made
to look right, so that a rule of the simulation has to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

from aioprefill import scheduler
from aioprefill.completion import end_of
from aioprefill.control import Command, Pause, PauseMode
from aioprefill.follower import Follower
from aioprefill.host import Hold, Progress
from aioprefill.loop_core import LoopCore
from aioprefill.native.forwards import Forwards, NativeForward
from aioprefill.native.host import NativeHost
from aioprefill.native.pause_state import PauseState, Phase
from aioprefill.native.request_state import Request
from aioprefill.pipeline import Flight, Pipeline
from aioprefill.result_task import result_task
from aioprefill.testing.host import FakeForward, FakeHost

Patch = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug of `BUGS` in this process; none for ""."""
    with contextlib.ExitStack() as stack:
        for patch in BUGS[name]() if name else ():
            stack.enter_context(patch)
        yield


def _skip_the_hold_of_a_pause() -> list[Patch]:
    def hold(self: Pipeline, *, scheduling_step: bool) -> Hold:
        return Hold(weights=not self.still)

    return [mock.patch.object(Pipeline, "hold", hold)]


def _results_out_of_order() -> list[Patch]:
    """When both are there, the second is taken for the first."""

    def finish(core: LoopCore) -> None:
        if len(core.pipeline.flights) == 2 and core.pipeline.still:
            core.pipeline.flights.reverse()
            core.pipeline._last_named = core.pipeline.flights[0].number
        core.finish_oldest()

    return [_result_task(finish)]


def _second_result_before_the_step() -> list[Patch]:
    """When both are there, one step serves both."""

    def finish(core: LoopCore) -> None:
        pipeline = core.pipeline
        if len(pipeline.flights) == 2 and pipeline.still and not any(f.error for f in pipeline.flights):
            first = pipeline.flights[0]
            core.calls.process_result(first.forward)
            pipeline.processed(first.number)
            pipeline._last_named = first.number + 1
        core.finish_oldest()

    return [_result_task(finish)]


def _result_task(finish: Callable[[LoopCore], None]) -> Patch:
    """A result task that votes on all that is complete before it looks at results."""

    async def eager_result_task(core: LoopCore) -> NoReturn:
        while True:
            flight = core.pipeline.next_vote
            if flight is not None:
                await _vote(core, flight, flight.digest)
                second = core.pipeline.next_vote
                while second is not None and second.forward.completion.submitted and _done(second):
                    await _vote(core, second, second.digest)
                    second = core.pipeline.next_vote
            elif not core.pipeline.may_process:
                await core.signals.results.wait()
            while core.pipeline.may_process:
                finish(core)
                await asyncio.sleep(0)

    return _tasks_with(eager_result_task)


def _tasks_with(task: Callable[[LoopCore], Any]) -> Patch:
    tasks = tuple(task if other is result_task else other for other in scheduler.TASKS)
    task.__name__ = result_task.__name__
    return mock.patch.object(scheduler, "TASKS", tasks)


async def _vote(core: LoopCore, flight: Flight, digest: int) -> None:
    seen = await end_of(flight.forward.completion)
    core.voted(flight.number, await core.agreement.vote(flight.number, digest, seen))


def _done(flight: Flight) -> bool:
    return bool(getattr(flight.forward.completion, "done", False))


def _launch_before_the_delayed_sample() -> list[Patch]:
    """The sample is submitted when the next preparation is over."""
    process, prepare, launch = FakeHost.process_result, FakeHost.prepare, FakeHost.launch
    sample = FakeHost.sample_delayed

    def processed(self: FakeHost, now: float, forward: FakeForward) -> None:
        with mock.patch.object(FakeHost, "sample_delayed", lambda self: None):
            process(self, now, forward)

    def prepared(self: FakeHost, now: float, **options: Any) -> Any:
        batch = prepare(self, now, **options)
        if batch is None:
            sample(self)
        return batch

    def launched(self: FakeHost, now: float, batch: Any, number: int) -> FakeForward:
        forward = launch(self, now, batch, number)
        sample(self)
        return forward

    return [
        mock.patch.object(FakeHost, "process_result", processed),
        mock.patch.object(FakeHost, "prepare", prepared),
        mock.patch.object(FakeHost, "launch", launched),
    ]


def _pages_freed_before_the_last_forward() -> list[Patch]:
    return [mock.patch.object(Request, "quiet", property(lambda self: self.over and not self.room_open))]


def _digest_at_vote_time() -> list[Patch]:
    async def late_result_task(core: LoopCore) -> NoReturn:
        while True:
            flight = core.pipeline.next_vote
            if flight is not None:
                seen = await end_of(flight.forward.completion)
                digest = core.digest.value if core.digest is not None else 0
                core.voted(flight.number, await core.agreement.vote(flight.number, digest, seen))
            elif not core.pipeline.may_process:
                await core.signals.results.wait()
            while core.pipeline.may_process:
                core.finish_oldest()
                await asyncio.sleep(0)

    async def vote(self: Follower) -> NoReturn:
        while True:
            number = self.agreed
            if not self._may_vote(number):
                await self._launched.wait()
                continue
            forward, _ = self._forwards.pop(number)
            seen = await end_of(forward.completion)
            await self._link.agreement.vote(number, self.digest, seen)
            self.agreed = number + 1
            self._agreed_more.set()

    return [_tasks_with(late_result_task), mock.patch.object(Follower, "_vote", vote)]


def _retract_while_a_vote_is_pending() -> list[Patch]:
    """One forward in flight is enough for it, whatever the other ranks have seen of that."""
    keeps = PauseState.keeps_back

    def hold(self: Pipeline, *, scheduling_step: bool) -> Hold:
        pauses = self.result_pending and not scheduling_step
        return Hold(pauses=pauses, retract=len(self.flights) > 1, weights=not self.still)

    def keeps_back(self: PauseState, command: Command, hold: Hold) -> bool:
        retract = isinstance(command, Pause) and command.mode is PauseMode.RETRACT
        if retract and self.phase is Phase.RUNNING and not self.swapping:
            return hold.retract
        return keeps(self, command, hold)

    return [
        mock.patch.object(Pipeline, "hold", hold),
        mock.patch.object(PauseState, "keeps_back", keeps_back),
    ]


def _timeouts_by_own_clock() -> list[Patch]:
    progress = NativeHost.progress_transfers

    def progressed(self: NativeHost, now: float) -> Progress:
        return progress(self, asyncio.get_running_loop().time())

    return [mock.patch.object(NativeHost, "progress_transfers", progressed)]


def _abort_dropped_in_the_final_forward() -> list[Patch]:
    process = Forwards.process

    def processed(self: Forwards, now: float, forward: NativeForward, abort: Callable[..., None]) -> None:
        aborting = self._frontend.aborting
        final = [piece.request.request_id for piece in forward.pieces if piece.final]
        hidden = {name: aborting.pop(name) for name in final if name in aborting}
        process(self, now, forward, abort)
        aborting.update((name, why) for name, why in hidden.items() if name in self._frontend._live)

    return [mock.patch.object(Forwards, "process", processed)]


BUGS: dict[str, Callable[[], list[Patch]]] = {
    "skip-hold": _skip_the_hold_of_a_pause,
    "out-of-order": _results_out_of_order,
    "second-before-step": _second_result_before_the_step,
    "launch-before-sample": _launch_before_the_delayed_sample,
    "free-early": _pages_freed_before_the_last_forward,
    "digest-at-vote": _digest_at_vote_time,
    "retract-in-vote": _retract_while_a_vote_is_pending,
    "own-clock": _timeouts_by_own_clock,
    "abort-dropped": _abort_dropped_in_the_final_forward,
}
"""By name."""
