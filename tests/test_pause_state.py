"""The native host's pause state, as a conversation."""

from __future__ import annotations

import pytest

from aioprefill.control import FlushCache, Pause, PauseMode, Resume, UpdateWeights
from aioprefill.errors import ControlError
from aioprefill.host import Hold
from aioprefill.native.pause_state import PauseState, Phase

BUSY = Hold(pauses=True, retract=True, weights=True)


def test_pauses_wait_for_a_step_and_a_retract_for_one_agreed_forward() -> None:
    """What is kept back, by command and hold."""
    state = PauseState()
    in_place, retract = Pause(PauseMode.IN_PLACE), Pause(PauseMode.RETRACT)
    assert state.keeps_back(in_place, BUSY) and state.keeps_back(retract, BUSY)
    step = Hold(retract=True, weights=True)
    assert not state.keeps_back(in_place, step) and state.keeps_back(retract, step)
    assert state.keeps_back(UpdateWeights(None), step)
    assert not state.keeps_back(UpdateWeights(None), Hold()) and not state.keeps_back(retract, Hold())
    assert not state.keeps_back(Resume(), BUSY) and not state.keeps_back(FlushCache(), BUSY)


def test_a_pause_while_paused_is_not_kept_back_but_refused() -> None:
    """Kept back it would also keep back the resume that it waits for."""
    state = PauseState()
    state.pause(PauseMode.IN_PLACE)
    assert state.paused and not state.admits
    assert not state.keeps_back(Pause(PauseMode.RETRACT), BUSY)
    with pytest.raises(ControlError, match="paused already"):
        state.pause(PauseMode.RETRACT)
    state.resume()
    assert state.admits
    with pytest.raises(ControlError, match="not paused"):
        state.resume()


def test_a_wait_pause_finishes_first() -> None:
    """It is no pause before it is complete, but admits nothing."""
    state = PauseState()
    state.pause(PauseMode.WAIT)
    assert state.phase is Phase.FINISHING and not state.paused and not state.admits
    state.finished()
    assert state.paused
    with pytest.raises(AssertionError):
        state.finished()


def test_a_swap_of_weights_keeps_back_what_would_change_the_phase() -> None:
    """Everything else goes on."""
    state = PauseState()
    state.swapping = True
    assert state.paused and "swapping" in repr(state)
    for command in (Pause(PauseMode.WAIT), Resume(), UpdateWeights(None)):
        assert state.keeps_back(command, Hold())
    assert not state.keeps_back(FlushCache(), Hold())
