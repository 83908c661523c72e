"""Everything that touches a NIXL agent, for the one thread that owns it. Nothing here is thread-safe.

Rules (each was measured; see docs/design.md)
- An exception of NIXL is terminal for its write; the handle is still released.
- A live write cannot be cancelled: releasing its handle lets the bytes go on. So handles are released only
  when terminal, or when the peer's process is known dead.
- Few writes are posted at a time; the rest wait here, where they can still be dropped.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from aioprefill.transfer.agent_events import (
    AgentEvent,
    Notified,
    ProbeFailed,
    RemoteAdded,
    RemoteFailed,
    RemotePool,
    WriteFinished,
    WriteOrder,
)
from aioprefill.transfer.pool_view import PoolView

WINDOW = 8
"""Writes posted at the same time to one peer."""
PROBE = b"probe"
"""A notification that means nothing; see `NixlOwner.probe`."""


@dataclass(slots=True)
class _Remote:
    spec: RemotePool
    users: int = 1
    pages: Any = None
    """Prepared descriptors of its pages; None while it is not loaded."""
    queue: deque[WriteOrder] = field(default_factory=deque)
    live: dict[tuple[int, int], Any] = field(default_factory=dict)
    broken: bool = False
    """A write failed: load it anew, for a fresh connection, when nothing is live."""
    remove_at: float | None = None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class NixlOwner:
    """One agent with one registered pool. `library` is the nixl module (or a stand-in)."""

    def __init__(self, library: ModuleType | Any, name: str, pool: PoolView, *, window: int = WINDOW) -> None:
        self._agent = library.nixl_agent(name, library.nixl_agent_config(enable_prog_thread=False))
        region = [(pool.base_address, pool.total_bytes, pool.device_id, "")]
        self._registration = self._agent.register_memory(region, pool.memory)
        self._pages = self._prepare("NIXL_INIT_AGENT", pool)
        self._window = window
        self._remotes: dict[str, _Remote] = {}
        self._probed: set[str] = set()
        self._events: list[AgentEvent] = []
        self.metadata: bytes = self._agent.get_agent_metadata()

    def _prepare(self, agent: str, pool: PoolView) -> Any:
        return self._agent.prep_xfer_dlist(agent, pool.descriptors(), pool.memory)

    @property
    def busy(self) -> bool:
        """True while a write is live or waits, or a removal does."""
        return any(
            remote.live or remote.queue or remote.remove_at is not None for remote in self._remotes.values()
        )

    def add_remote(self, spec: RemotePool) -> None:
        """Make another agent known. Answered by `RemoteAdded` or `RemoteFailed`."""
        remote = self._remotes.get(spec.name)
        if remote is None:
            remote = self._remotes[spec.name] = _Remote(spec)
            self._load(remote)
            return
        remote.users = 1 if remote.remove_at is not None else remote.users + 1
        if remote.remove_at is not None:  # it comes back while its last writes are ending
            remote.spec, remote.remove_at, remote.broken = spec, None, True
        self._events.append(RemoteAdded(spec.name))

    def _load(self, remote: _Remote) -> None:
        name = remote.spec.name
        try:
            self._agent.add_remote_agent(remote.spec.metadata)
            remote.pages = self._prepare(name, remote.spec.pool)
        except Exception as err:
            self._discard(remote, f"the NIXL agent {name} cannot be used: {_text(err)}")
            self._events.append(RemoteFailed(name, _text(err)))
        else:
            remote.broken = False
            self._events.append(RemoteAdded(name))

    def remove_remote(self, name: str, remove_at: float) -> None:
        """Forget a remote when its live writes are terminal; at `remove_at` (monotonic s) in any case.

        Only give a time after which its process is known dead.
        """
        remote = self._remotes.get(name)
        if remote is None:
            return
        remote.users -= 1
        if remote.users == 0:
            remote.remove_at = remove_at
            self._fail_queue(remote, "the peer is gone")

    def write(self, name: str, order: WriteOrder) -> None:
        """Queue a write. Answered by `WriteFinished`, whatever happens."""
        remote = self._remotes.get(name)
        if remote is None or remote.remove_at is not None:
            self._finish(order.ticket, order.number, "the peer is gone")
        else:
            remote.queue.append(order)

    def drop_unposted(self, name: str, ticket: int) -> None:
        """Do not start the waiting writes of a ticket; each is answered by `WriteFinished`."""
        remote = self._remotes.get(name)
        if remote is None:
            return
        kept = deque(order for order in remote.queue if order.ticket != ticket)
        dropped = [order for order in remote.queue if order.ticket == ticket]
        remote.queue = kept
        for order in dropped:
            self._finish(order.ticket, order.number, "dropped before it was started")

    def probe(self, name: str, metadata: bytes) -> None:
        """Ask whether the process of an agent that writes to us still exists: `ProbeFailed` if not.

        A stopped process, and one that does not answer, still exists: no event then.
        """
        try:
            if name not in self._probed:
                self._agent.add_remote_agent(metadata)
                self._probed.add(name)
            self._agent.send_notif(name, PROBE)
        except Exception as err:
            self.end_probe(name)
            self._events.append(ProbeFailed(name, _text(err)))

    def end_probe(self, name: str) -> None:
        """Forget an agent that was probed."""
        if name in self._probed:
            self._probed.discard(name)
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)

    def progress(self, now: float) -> None:
        """Drive the agent: collect notifications and terminal writes, post waiting ones, remove remotes."""
        for agent, payloads in self._agent.get_new_notifs().items():
            self._events.extend(Notified(agent, payload) for payload in payloads if payload != PROBE)
        for remote in list(self._remotes.values()):
            self._check(remote)
            if remote.remove_at is not None:
                if not remote.live or now >= remote.remove_at:
                    self._discard(remote, "the peer is gone")
            elif remote.broken and not remote.live:
                self._unload(remote)
                self._load(remote)
            if not remote.broken:
                self._post(remote)

    def take_events(self) -> list[AgentEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Destroy the agent. Live writes end here: nothing reads local pages or writes remote ones after."""
        for remote in list(self._remotes.values()):
            self._discard(remote, "the agent was closed")
        for name in list(self._probed):
            self.end_probe(name)
        for release in (self._pages.release, lambda: self._agent.deregister_memory(self._registration)):
            with contextlib.suppress(Exception):
                release()
        # the references keep the agent alive, and it must go here, on its own thread
        self._pages = self._registration = self._agent = None

    def _check(self, remote: _Remote) -> None:
        for key, handle in list(remote.live.items()):
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as err:
                self._end(remote, key, _text(err))
            else:
                if state != "PROC":
                    self._end(remote, key, None if state == "DONE" else f"NIXL reported {state}")

    def _post(self, remote: _Remote) -> None:
        while remote.queue and len(remote.live) < self._window and not remote.broken:
            order = remote.queue.popleft()
            key = (order.ticket, order.number)
            try:
                handle = self._agent.make_prepped_xfer(
                    "WRITE", self._pages, order.local, remote.pages, order.remote, order.notification
                )
            except Exception as err:
                self._finish(*key, _text(err))
                continue
            remote.live[key] = handle
            try:
                state = self._agent.transfer(handle)
            except Exception as err:
                self._end(remote, key, _text(err))
                continue
            if state != "PROC":
                self._end(remote, key, None if state == "DONE" else f"NIXL reported {state}")

    def _end(self, remote: _Remote, key: tuple[int, int], error: str | None) -> None:
        handle = remote.live.pop(key)
        with contextlib.suppress(Exception):
            handle.release()
        remote.broken |= error is not None
        self._finish(*key, error)

    def _finish(self, ticket: int, number: int, error: str | None) -> None:
        self._events.append(WriteFinished(ticket, number, error))

    def _fail_queue(self, remote: _Remote, reason: str) -> None:
        for order in remote.queue:
            self._finish(order.ticket, order.number, reason)
        remote.queue.clear()

    def _discard(self, remote: _Remote, reason: str) -> None:
        for key in list(remote.live):
            self._end(remote, key, reason)
        self._fail_queue(remote, reason)
        self._unload(remote)
        del self._remotes[remote.spec.name]

    def _unload(self, remote: _Remote) -> None:
        if remote.pages is not None:
            with contextlib.suppress(Exception):
                remote.pages.release()
        remote.pages = None
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(remote.spec.name)
