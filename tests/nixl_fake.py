"""A stand-in for the nixl module."""

from __future__ import annotations

import threading

import numpy as np


class Handle:
    """A transfer or list handle that knows whether it was released."""

    def __init__(self, *facts: object) -> None:
        self.facts = facts
        self.state: str | Exception = "PROC"
        self.released = 0

    def release(self) -> None:
        self.released += 1


class FakeNixl:
    """The part of the nixl module that is used; each agent checks that one thread does everything."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.calls: list[tuple[object, ...]] = []
        self.transfers: list[Handle] = []
        self.notifications: dict[str, list[bytes]] = {}
        self.raising: dict[str, Exception] = {}
        self.post_state = "PROC"

    def nixl_agent_config(self, **options: object) -> object:
        assert options == {"enable_prog_thread": False}
        return options

    def nixl_agent(self, name: str, config: object) -> FakeNixl:
        self._note("create", name)
        return self

    def _note(self, call: str, *facts: object) -> None:
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident(), f"{call} on another thread"
        self.calls.append((call, *facts))
        if call in self.raising:
            raise self.raising[call]

    def register_memory(self, region: list, memory: str) -> str:
        self._note("register", *region, memory)
        return "registration"

    def deregister_memory(self, registration: str) -> None:
        self._note("deregister")

    def get_agent_metadata(self) -> bytes:
        return b"md"

    def prep_xfer_dlist(self, agent: str, descriptors: np.ndarray, memory: str) -> Handle:
        self._note("prepare", agent)
        return Handle(agent, descriptors.tolist(), memory)

    def add_remote_agent(self, metadata: bytes) -> None:
        self._note("add", metadata)

    def remove_remote_agent(self, name: str) -> None:
        self._note("remove", name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident()
        if "notifs" in self.raising:
            raise self.raising["notifs"]
        found, self.notifications = self.notifications, {}
        return found

    def send_notif(self, name: str, payload: bytes) -> None:
        self._note("notify", name, payload)

    def make_prepped_xfer(
        self, kind: str, local: Handle, ours: object, remote: Handle, theirs: object, note: bytes
    ) -> Handle:
        assert kind == "WRITE" and remote.released == 0
        self._note("make", note)
        handle = Handle(note)
        self.transfers.append(handle)
        return handle

    def transfer(self, handle: Handle) -> str:
        self._note("post", *handle.facts)
        return self.post_state

    def check_xfer_state(self, handle: Handle) -> str:
        if isinstance(handle.state, Exception):
            raise handle.state
        return handle.state

    @property
    def names(self) -> list[object]:
        return [call[0] for call in self.calls]
