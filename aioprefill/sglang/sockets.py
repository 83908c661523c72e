"""Wakes intake when SGLang's own sockets have something, without polling them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq


class InputSockets:
    """Watches the descriptors of ZMQ sockets that somebody else reads.

    Such a descriptor is edge-triggered, and its edge is used up by whoever looks at the socket's events. So
    `look` must be called after everything that may have read from the sockets or written to them; what is
    left there wakes intake again.
    """

    def __init__(self, sockets: Sequence[Any], wake: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = wake
        self._sockets = [socket for socket in sockets if isinstance(socket, zmq.Socket)]
        self._descriptors = [int(socket.getsockopt(zmq.FD)) for socket in self._sockets]
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self.look)

    def __len__(self) -> int:
        return len(self._sockets)

    def look(self) -> None:
        """Wake intake if there is something to read."""
        for socket in self._sockets:
            if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._wake()
                return

    def close(self) -> None:
        """Watch no more; the sockets stay open. Idempotent."""
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._descriptors.clear()


def sockets_of(receiver: Any) -> list[Any]:
    """The sockets that SGLang's receiver reads on this rank; none where it has no descriptors."""
    found = (getattr(receiver, name, None) for name in ("recv_from_tokenizer", "recv_from_rpc"))
    return [socket for socket in found if isinstance(socket, zmq.Socket)]
