"""The loop's pure state, as a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from aioprefill.errors import DeviceError
from aioprefill.host import Hold, Ingested, Progress
from aioprefill.pipeline import Attempt, Pipeline


@dataclass
class Launched:
    """A forward with nothing but a number."""

    number: int
    completion: Any = None


def launch(pipeline: Pipeline) -> int:
    """Prepare and launch one forward; its number."""
    attempt = pipeline.next_attempt()
    assert attempt is not None and attempt.admit
    pipeline.prepared(attempt, found=True)
    number = pipeline.next_number
    pipeline.launched(cast(Any, Launched(number)), now=1.5)
    return number


def process(pipeline: Pipeline, number: int) -> None:
    """The vote of a forward is over, and its result processed."""
    if (flight := pipeline.next_vote) is not None and flight.number == number:
        pipeline.voted(number, None)
    pipeline.processed(number)


def find_nothing(pipeline: Pipeline) -> Attempt:
    """Make the preparation that is due; it finds no batch."""
    attempt = pipeline.next_attempt()
    assert attempt is not None
    pipeline.prepared(attempt, found=False)
    return attempt


@pytest.fixture
def pipeline() -> Pipeline:
    """A fresh pipeline."""
    return Pipeline()


def test_an_idle_pipeline_prepares_without_a_last_batch(pipeline: Pipeline) -> None:
    """Nothing in flight: any number of empty preparations, no marker."""
    for _ in range(3):
        assert find_nothing(pipeline) == Attempt(last=None, admit=True)
        assert not pipeline.marker
    assert pipeline.counters.empty_preparations == 3


def test_two_slots_and_no_third(pipeline: Pipeline) -> None:
    """With both slots full only the bookkeeping of the oldest is due, then nothing."""
    assert launch(pipeline) == 0
    assert pipeline.next_attempt() == Attempt(last=0, admit=True)
    assert launch(pipeline) == 1
    assert pipeline.next_attempt() is None
    with pytest.raises(AssertionError, match="third"):
        pipeline._preparing = True
        pipeline.launched(cast(Any, Launched(2)), now=0.0)


def test_an_empty_preparation_marks_while_a_result_is_pending(pipeline: Pipeline) -> None:
    """The marker ends attempts until something changes."""
    launch(pipeline)
    find_nothing(pipeline)
    assert pipeline.marker and pipeline.next_attempt() is None
    pipeline.ingested(Ingested(requests=1, admission_changed=True))
    assert pipeline.next_attempt() == Attempt(last=0, admit=True)
    assert pipeline.counters.arrivals_during_forward == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.collected(1),
        lambda p: p.transfers_progressed(Progress(retired=1)),
        lambda p: p.transfers_progressed(Progress(failed=1)),
        lambda p: p.transfers_progressed(Progress(freed=True)),
        lambda p: p.admission_changed(),
    ],
)
def test_what_clears_the_marker(pipeline: Pipeline, change: Any) -> None:
    """Bootstraps, retired or failed transfers, freed pages, and a host's own word."""
    launch(pipeline)
    find_nothing(pipeline)
    change(pipeline)
    assert not pipeline.marker


def test_what_does_not_clear_the_marker(pipeline: Pipeline) -> None:
    """Polls that bring nothing."""
    launch(pipeline)
    find_nothing(pipeline)
    pipeline.ingested(Ingested())
    pipeline.collected(0)
    assert not pipeline.transfers_progressed(Progress())
    assert pipeline.marker


def test_a_result_needs_a_preparation_that_saw_its_forward(pipeline: Pipeline) -> None:
    """Two ready results back to back, without the step between them, are refused."""
    launch(pipeline)
    launch(pipeline)
    process(pipeline, 0)
    with pytest.raises(AssertionError, match="chunk bookkeeping"):
        process(pipeline, 1)
    assert find_nothing(pipeline).last == 1
    process(pipeline, 1)


def test_results_in_order_only(pipeline: Pipeline) -> None:
    """A result of the younger forward, or of none, is refused."""
    with pytest.raises(AssertionError, match="out of order"):
        process(pipeline, 0)
    launch(pipeline)
    launch(pipeline)
    with pytest.raises(AssertionError, match="out of order"):
        process(pipeline, 1)


@pytest.mark.parametrize(
    "block",
    [
        lambda p: p.ingested(Ingested(held=2)),
        lambda p: p.ingested(Ingested(paused=True)),
        lambda p: p.ingested(Ingested(exiting=True)),
        lambda p: p.drain(),
    ],
)
def test_bookkeeping_goes_on_while_admission_is_blocked(pipeline: Pipeline, block: Any) -> None:
    """Held, paused, exiting or draining: bookkeeping only; the last batch is forgotten at the end."""
    launch(pipeline)
    launch(pipeline)
    block(pipeline)
    assert pipeline.next_attempt() is None
    process(pipeline, 0)
    assert find_nothing(pipeline) == Attempt(last=1, admit=False)
    assert pipeline.next_attempt() is None
    process(pipeline, 1)
    assert find_nothing(pipeline) == Attempt(last=None, admit=False)
    assert pipeline.next_attempt() is None
    assert pipeline.take_idle_step() and not pipeline.take_idle_step()


def test_the_idle_step_is_taken_once_and_not_before_the_last_result(pipeline: Pipeline) -> None:
    """A launch in the step cancels it."""
    assert not pipeline.take_idle_step()
    launch(pipeline)
    assert not pipeline.take_idle_step()
    find_nothing(pipeline)
    process(pipeline, 0)
    launch(pipeline)
    assert not pipeline.take_idle_step()
    find_nothing(pipeline)
    process(pipeline, 1)
    find_nothing(pipeline)
    assert pipeline.take_idle_step()
    assert pipeline.counters.idle_steps == 1


def test_impossible_calls_are_refused(pipeline: Pipeline) -> None:
    """Launching the unprepared, preparing twice, admitting where it is not allowed, wrong numbers."""
    with pytest.raises(AssertionError, match="without a preparation"):
        pipeline.launched(cast(Any, Launched(0)), now=0.0)
    with pytest.raises(AssertionError, match="may not admit"):
        pipeline.prepared(Attempt(last=None, admit=False), found=True)
    pipeline.prepared(Attempt(last=None, admit=True), found=True)
    with pytest.raises(AssertionError, match="not launched"):
        pipeline.prepared(Attempt(last=None, admit=True), found=True)
    with pytest.raises(AssertionError, match="is not 0"):
        pipeline.launched(cast(Any, Launched(7)), now=0.0)


def test_it_can_be_printed(pipeline: Pipeline) -> None:
    """One line that says it all."""
    launch(pipeline)
    assert "in_flight=[0]" in repr(pipeline)
    assert pipeline.oldest is not None and pipeline.oldest.launched_at == 1.5


def test_votes_come_in_launch_order_and_before_results(pipeline: Pipeline) -> None:
    """Each forward has one; a result without it is refused."""
    launch(pipeline)
    launch(pipeline)
    assert not pipeline.may_process and not pipeline.still
    with pytest.raises(AssertionError, match="out of order"):
        pipeline.voted(1, None)
    with pytest.raises(AssertionError, match="vote was over"):
        pipeline.processed(0)
    pipeline.voted(0, None)
    assert pipeline.may_process and pipeline.agreed_before(1) and not pipeline.agreed_before(2)
    assert pipeline.next_vote is not None and pipeline.next_vote.number == 1
    pipeline.voted(1, None)
    assert pipeline.still and pipeline.next_vote is None
    with pytest.raises(AssertionError, match="out of order"):
        pipeline.voted(2, None)


def test_a_pause_keeps_results_and_a_drain_does_not(pipeline: Pipeline) -> None:
    """In place: the result of a complete forward waits for the resume, or for the end."""
    launch(pipeline)
    pipeline.voted(0, None)
    pipeline.ingested(Ingested(paused=True))
    assert not pipeline.may_process
    pipeline.drain()
    assert pipeline.may_process


def test_what_input_must_be_held(pipeline: Pipeline) -> None:
    """Pauses until a step; retracts until one agreed forward is left; weights until the device is still."""
    assert pipeline.hold(scheduling_step=False) == Hold()
    launch(pipeline)
    launch(pipeline)
    assert pipeline.hold(scheduling_step=False) == Hold(pauses=True, retract=True, weights=True)
    assert pipeline.hold(scheduling_step=True) == Hold(pauses=False, retract=True, weights=True)
    process(pipeline, 0)
    pipeline.voted(1, None)
    assert pipeline.hold(scheduling_step=True) == Hold()


def test_a_pause_while_paused_is_not_held_for_a_step_that_never_comes(pipeline: Pipeline) -> None:
    """A kept result is pending: only a retract waits, for the vote on its forward."""
    launch(pipeline)
    find_nothing(pipeline)
    pipeline.ingested(Ingested(paused=True))
    assert pipeline.hold(scheduling_step=False) == Hold(pauses=False, retract=True, weights=True)
    pipeline.voted(0, None)
    assert pipeline.hold(scheduling_step=False) == Hold()


def test_a_retract_takes_the_last_result_itself_unless_it_failed(pipeline: Pipeline) -> None:
    """It says that it consumed it; consuming what is not there is refused."""
    launch(pipeline)
    find_nothing(pipeline)
    pipeline.voted(0, None)
    assert not pipeline.retract_takes_result
    pipeline.ingested(Ingested(held=1, held_retract=True))
    assert pipeline.retract_takes_result
    pipeline.ingested(Ingested(consumed=1, paused=True))
    assert not pipeline.result_pending and pipeline.counters.processed == 1
    with pytest.raises(AssertionError, match="not there"):
        pipeline.ingested(Ingested(consumed=1))


def test_a_failed_forward_is_not_left_to_a_retract(pipeline: Pipeline) -> None:
    """Its error is reported first."""
    launch(pipeline)
    pipeline.voted(0, DeviceError("cudaErrorX", "x", sticky=False))
    pipeline.ingested(Ingested(held=1, held_retract=True))
    assert not pipeline.retract_takes_result
