"""Whether a scheduler is well: one verdict from what the loop knows. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from aioprefill.stats import Health


@dataclass(frozen=True, slots=True)
class Facts:
    """What the verdict is made of. Times are seconds."""

    running: bool
    """The loop turns."""
    failure: str = ""
    """Why it does not, when it broke."""
    forward: int | None = None
    """The forward that the device is busy with: the oldest one that is not agreed complete."""
    forward_age_s: float = 0.0
    """How long the device has been busy with it."""
    stall_limit_s: float = 120.0
    draining: bool = False
    paused: bool = False
    pausing: bool = False
    """A pause was asked for and has not taken effect."""
    mode: str = ""
    """Mode of the pause, where it is known."""


def verdict(facts: Facts) -> Health:
    """Live while the loop turns; ready while new requests are taken and launched.

    What comes first is what an operator has to know first: a dead loop, then a stalled device, then what
    was asked for (drain, pause).
    """
    if not facts.running:
        why = f": {facts.failure}" if facts.failure else ""
        return Health(live=False, ready=False, reason=f"the loop is not running{why}")
    if facts.forward is not None and facts.forward_age_s > facts.stall_limit_s:
        age, limit = facts.forward_age_s, facts.stall_limit_s
        reason = f"forward {facts.forward} runs for {age:.1f} s, the stall limit is {limit:g} s"
        return Health(live=True, ready=False, reason=reason)
    if facts.draining:
        return Health(live=True, ready=False, reason="draining")
    if facts.paused or facts.pausing:
        paused = f"paused ({facts.mode})" if facts.mode else "paused"
        return Health(live=True, ready=False, reason=paused if facts.paused else "pausing")
    return Health(live=True, ready=True)
