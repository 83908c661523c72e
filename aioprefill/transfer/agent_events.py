"""What the loop and the thread that owns a NIXL agent tell each other. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from aioprefill.transfer.pool_view import PoolView
from aioprefill.transfer.room_events import PageArray


@dataclass(frozen=True, slots=True)
class RemotePool:
    """Another process's agent and the pool that it registered."""

    name: str
    metadata: bytes
    pool: PoolView


@dataclass(frozen=True, slots=True, eq=False)
class WriteOrder:
    """Write local page `local[i]` to page `remote[i]` of the remote pool; then notify its agent."""

    ticket: int
    number: int
    local: PageArray
    remote: PageArray
    notification: bytes


@dataclass(frozen=True, slots=True)
class RemoteAdded:
    """Writes to this remote may be ordered."""

    name: str


@dataclass(frozen=True, slots=True)
class RemoteFailed:
    """The remote cannot be used; writes to it have failed."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class WriteFinished:
    """The write is terminal. `error` None: the data has arrived."""

    ticket: int
    number: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Notified:
    """A write of another agent into our pool is complete."""

    agent: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """No process has this agent any more."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class AgentStopped:
    """The owner thread ended on an error: nothing will come from this agent any more."""

    reason: str


AgentEvent = RemoteAdded | RemoteFailed | WriteFinished | Notified | ProbeFailed | AgentStopped
