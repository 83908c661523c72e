"""What a run of many seeds has to have reached. One that misses something has shown less than it seems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

ENOUGH = 500
"""From so many seeds on everything must have been reached."""

STATES = ("bootstrapping", "waiting", "running", "parked", "transferring")
NATIVE_PAUSES = ("in_place", "retract", "wait", "abort")
DEPTHS = (0, 1, 2)
FAILURES = (
    "device error",
    "handshake timeout",
    "queue timeout",
    "running timeout",
    "transfer timeout",
    "host error",
    "grammar timeout",
    "grammar",
    "deadline",
    "peer refused",
    "peer died",
    "peer silent",
    "peer gave up",
    "peer write",
    "aborted",
    "dropped",
    "scripted aborted",
    "scripted dropped",
    "scripted cudaErrorSimulated",
    "scripted host",
)
COMMANDS = (
    "done: pause in_place barrier",
    "done: pause retract barrier",
    "done: pause wait",
    "done: pause abort",
    "done: resume",
    "done: flush",
    "done: abort prefix",
    "done: abort all",
    "done: update (good)",
    "refused: pause in_place",
    "refused: resume",
    "refused: update (unreadable)",
    "refused: update (read in part)",
    "refused: update (not swapped)",
    "refused: queue_full",
)
ABORTS = (*STATES[:3], *STATES[4:])


def required(sizes: Sequence[int]) -> Iterable[str]:
    """Names of counters that must not be zero."""
    for size in sizes:
        yield f"world native on {size}"
        yield f"world scripted on {size}"
    yield from (f"state {state}" for state in STATES)
    yield from ("outcome: finished", "outcome: scripted done")
    yield from (f"outcome: {failure}" for failure in FAILURES)
    yield from (f"pause {mode} at {depth}" for mode in NATIVE_PAUSES for depth in DEPTHS)
    yield from (f"scripted pause {mode} at {depth}" for mode in NATIVE_PAUSES[:2] for depth in DEPTHS)
    yield from (f"abort while {state}" for state in ABORTS)
    yield from ("abort while queued", "abort in the final forward", "caller stops waiting")
    yield from COMMANDS
    yield from ("ending: healed", "ending: drained in the middle", "ending: device lost")
    if max(sizes) > 1:
        yield "ending: rank lost"
        yield from (
            "device error on some ranks only",
            "vote that waits for a rank",
            "call that waits for a rank",
        )


def missing(counters: Mapping[str, int], seeds: int, sizes: Sequence[int]) -> list[str]:
    """What a run of so many seeds should have reached and has not."""
    if seeds < ENOUGH:
        return []
    return [name for name in required(sizes) if not counters.get(name)]
