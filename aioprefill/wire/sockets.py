"""Socket options that servers and clients share, and the end of a ZMQ context off the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass

import zmq

from aioprefill.wire.messages import MAX_MESSAGE_BYTES

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Bounds of one socket. A peer that answers no heartbeat for `heartbeat_timeout_ms` is disconnected.

    Heartbeats are libzmq's own, answered by its I/O thread: a peer whose loop is busy stays connected,
    one that is stopped, unplugged or dead does not.
    """

    heartbeat_ms: int = 1000
    heartbeat_timeout_ms: int = 4000
    send_queue: int = 10_000
    """Messages per peer inside libzmq (ZMQ_SNDHWM)."""
    receive_queue: int = 1_000
    """Messages per peer inside libzmq (ZMQ_RCVHWM); behind it TCP holds the sender back."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """A peer that sends a larger one is disconnected (ZMQ_MAXMSGSIZE)."""

    def apply(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Set the options; before the socket is bound or connected to `endpoint`."""
        for option, value in (
            (zmq.HEARTBEAT_IVL, self.heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, self.heartbeat_timeout_ms),
            (zmq.SNDHWM, self.send_queue),
            (zmq.RCVHWM, self.receive_queue),
            (zmq.MAXMSGSIZE, self.max_message_bytes),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.LINGER, 0),
            (zmq.IPV6, "[" in endpoint),
        ):
            socket.setsockopt(option, int(value))


async def end_context(context: Context) -> None:
    """Wait until the context's sockets, which must be closed, have lingered, and end its threads.

    When the wait is cancelled, a helper thread finishes the job.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def end() -> None:
        context.term()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=end, name="aioprefill-zmq-end", daemon=True).start()
    await ended.wait()
