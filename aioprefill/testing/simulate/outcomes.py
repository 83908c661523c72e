"""Every request has exactly one outcome, and none that was aborted before its result is published after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aioprefill.control import AbortMatching
from aioprefill.errors import (
    AioprefillError,
    DeviceError,
    HostError,
    InvalidRequest,
    PeerError,
    RequestAborted,
    RequestTimeout,
)
from aioprefill.request import HandoffResult, PrefillHandle, PrefillResult
from aioprefill.testing.simulate.story import Story


@dataclass(slots=True)
class Entry:
    """One submission; ids come back, entries do not."""

    name: str
    handle: PrefillHandle
    aborted: bool = False
    """An abort of it was asked for before it had its outcome."""
    published: int = 0
    ended: int = 0


class Outcomes:
    """Listens to the handles that the scheduler gives out."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self.entries: list[Entry] = []
        self.live: dict[str, Entry] = {}
        """Without an outcome, by id, in order of submission."""

    def submitted(self, handle: PrefillHandle) -> None:
        """A request was taken."""
        entry = Entry(handle.request_id, handle)
        self.entries.append(entry)
        self.live[entry.name] = entry
        publish, finish, fail = handle.publish, handle.finish, handle.fail

        def published(result: PrefillResult) -> None:
            entry.published += 1
            if entry.aborted or entry.published > 1 or entry.ended:
                after = "its abort" if entry.aborted else "its first one, or its end"
                raise self._story.violate(f"request {entry.name}: a result was published after {after}")
            publish(result)

        def finished(handoff: HandoffResult) -> None:
            self._ended(entry, "finished")
            finish(handoff)

        def failed(error: AioprefillError) -> None:
            self._ended(entry, cause(error))
            fail(error)

        _replace(handle, published, finished, failed)

    def _ended(self, entry: Entry, how: str) -> None:
        entry.ended += 1
        self._story.event("request ended", f"{entry.name}: {how}")
        self._story.count(f"outcome: {how.partition(':')[0]}")
        if how.startswith(HOST_ERROR) and not self._story.breaking:
            raise self._story.violate(f"request {entry.name} ended with a {how}")
        if entry.ended > 1:
            raise self._story.violate(f"request {entry.name} has a second outcome: {how}")
        if self.live.get(entry.name) is entry:
            del self.live[entry.name]

    def abort(self, request_id: str) -> None:
        """An abort of one request is asked for."""
        if request_id in self.live:
            self.live[request_id].aborted = True

    def abort_matching(self, command: AbortMatching) -> None:
        """An abort of many is asked for."""
        for name, entry in self.live.items():
            entry.aborted = entry.aborted or command.names(name)

    def check_end(self) -> None:
        """Every request has its one outcome."""
        for entry in self.entries:
            handle = entry.handle
            assert entry.ended == 1, f"request {entry.name} has {entry.ended} outcomes"
            assert handle.result.done() and handle.transferred.done(), f"request {entry.name} is left waiting"


def _replace(
    handle: PrefillHandle,
    published: Callable[[PrefillResult], None],
    finished: Callable[[HandoffResult], None],
    failed: Callable[[AioprefillError], None],
) -> None:
    """On this handle only."""
    handle.publish = published  # type: ignore[assignment, method-assign]
    handle.finish = finished  # type: ignore[assignment, method-assign]
    handle.fail = failed  # type: ignore[assignment, method-assign]


HOST_ERROR = "host error"
STAGES = ("handshake", "queue", "running", "transfer")
PEERS = {
    "refused": "refused",
    "died": "connection was closed",
    "silent": "silent for",
    "write": "write failed",
    "gave up": "has given up",
}


def cause(error: AioprefillError) -> str:
    """What ended a request, in a word or two."""
    text = str(error)
    match error:
        case RequestTimeout():
            found = (f"{stage} timeout" for stage in STAGES if f"its {stage} timeout" in text)
            return next(found, "grammar timeout" if "not compiled" in text else "deadline")
        case PeerError():
            return "peer " + next((word for word, part in PEERS.items() if part in text), "failed")
        case DeviceError():
            return "device error"
        case RequestAborted():
            return "dropped" if "drain" in text or "stopped" in text else "aborted"
        case InvalidRequest():
            return "grammar"
        case HostError():
            return f"{HOST_ERROR}: {text}"
    return f"{error.code}: {text}"
