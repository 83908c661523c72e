"""Links that carry the call order from rank 0 to its followers, and reports back.

One connection per follower, so that each has its own backlog. What is sent leaves within `send`. Both
directions number their messages; a gap means that one was lost, and with it the order.

Followers say how much they have taken, as soon as they are connected, after each `ACK_MESSAGES` or
`ACK_BYTES`, with each report, and when asked. What was sent and is not taken is the backlog: it is bounded,
because a follower that does not take tokens holds memory here and falls behind for good.

Frames to a follower: [number], which asks to say what is taken, or [number, token]. Back: [number, messages
taken, bytes taken] packed in one, and the report if there is one. Numbers count tokens, or reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable

import zmq

from aioprefill.errors import RankError, WireError
from aioprefill.ranks.wires import Bound, Wired, dial
from aioprefill.wire.pump import ZmqPump
from aioprefill.wire.sockets import end_context

MAX_MESSAGES = 8192
MAX_BYTES = 128 << 20
"""Bounds of a backlog."""
ACK_MESSAGES = 64
ACK_BYTES = 1 << 20
LINGER_S = 2.0
"""How long a link that closes waits for what was sent to be taken."""

_TOKEN = struct.Struct("<Q")
_REPORT = struct.Struct("<QQQ")

OnLost = Callable[[RankError], None]


class _Follower:
    """Rank 0's side of one link."""

    __slots__ = ("bytes_sent", "bytes_taken", "heard", "lost", "pump", "rank", "reports", "sent", "taken")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pump: ZmqPump
        self.sent = self.bytes_sent = 0
        self.taken = self.bytes_taken = 0
        self.reports = 0
        self.heard = self.lost = False

    def __repr__(self) -> str:
        return f"<rank {self.rank} sent={self.sent} taken={self.taken}{' lost' if self.lost else ''}>"


class LeaderLinks:
    """Rank 0's links to all followers. To be made on the running loop; not thread-safe.

    `on_report(rank, data)` is called for each report, in its rank's order. `on_lost(error)` is called once,
    in a turn of its own, when a link is unusable; that rank is sent nothing more.
    """

    def __init__(
        self,
        group: Wired,
        on_report: Callable[[int, bytes], None],
        on_lost: OnLost,
        *,
        max_messages: int = MAX_MESSAGES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_report = on_report
        self._on_lost = on_lost
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._taken = asyncio.Event()
        self._closed = False
        self.error: RankError | None = None
        bound: Bound = group.wires.take_order()
        self._context = bound.context
        # batch 1: a REP socket wants its answer sent before the next question is read
        self._gate = ZmqPump(
            bound.gate.socket,
            lambda frames: self._gate.send(bound.gate.answer(frames)),
            name="gate of the call order",
            batch=1,
        )
        self._followers = [_Follower(rank) for rank in range(1, group.place.size)]
        for follower, socket in zip(self._followers, bound.sockets, strict=True):
            socket.sndhwm = 0  # the backlog is bounded here
            follower.pump = ZmqPump(
                socket,
                lambda frames, follower=follower: self._on_message(follower, frames),  # type: ignore[misc]
                name=f"call order to rank {follower.rank}",
                max_outbox=max_messages + 16,
                eager=True,
            )
            follower.pump.start()
        self._gate.start()

    def __repr__(self) -> str:
        return f"<LeaderLinks {self._followers}>"

    @property
    def backlog(self) -> int:
        """Messages that the slowest follower has not taken."""
        return max((follower.sent - follower.taken for follower in self._followers), default=0)

    async def wait_connected(self) -> None:
        """Return when every follower that is not lost was heard.

        Until then a connection needs turns of this loop, and what is sent waits for it. Cancelling it does
        nothing else.
        """
        while not all(follower.heard or follower.lost for follower in self._followers):
            self._taken.clear()
            await self._taken.wait()

    def send(self, token: bytes) -> None:
        """To every follower, in order; never blocks. A follower whose backlog is full is lost.

        Raises `WireError` after `aclose`.
        """
        if self._closed:
            raise WireError("the call order is closed")
        for follower in self._followers:
            if follower.lost:
                continue
            waiting = follower.sent - follower.taken
            waiting_bytes = follower.bytes_sent - follower.bytes_taken
            if waiting >= self._max_messages or waiting_bytes + len(token) > self._max_bytes:
                cause = (
                    f"does not take the call order: {waiting:,} messages, {waiting_bytes:,} bytes wait for "
                    "it, so its process hangs, is stopped or unreachable"
                )
                self._lose(follower, cause)
                continue
            follower.pump.send([_TOKEN.pack(follower.sent), token])
            follower.sent += 1
            follower.bytes_sent += len(token)

    def forget(self, rank: int) -> None:
        """A rank is lost: it is sent nothing more, and `aclose` does not wait for it."""
        for follower in self._followers:
            if follower.rank == rank:
                follower.lost = True
                self._taken.set()

    def _on_message(self, follower: _Follower, frames: list[bytes]) -> None:
        if follower.lost:
            return
        if len(frames) not in (1, 2) or len(frames[0]) != _REPORT.size:
            self._lose(follower, "sent something that is no report: it runs another version")
            return
        number, follower.taken, follower.bytes_taken = _REPORT.unpack(frames[0])
        if number != follower.reports:
            self._lose(follower, f"lost reports: number {number} came, {follower.reports} was due")
            return
        follower.heard = True
        self._taken.set()
        if len(frames) == 2:
            follower.reports += 1
            self._on_report(follower.rank, frames[1])

    def _lose(self, follower: _Follower, cause: str) -> None:
        follower.lost = True
        self._taken.set()
        if self.error is None:
            self.error = RankError(follower.rank, cause)
            self._loop.call_soon(self._on_lost, self.error)

    async def aclose(self, timeout_s: float = LINGER_S) -> None:
        """Wait until what was sent is taken, at most `timeout_s`, and close. Idempotent.

        Cancelling it closes at once.
        """
        if self._closed:
            return
        self._closed = True
        try:
            for follower in self._followers:
                if not follower.lost and follower.taken < follower.sent:
                    follower.pump.send([_TOKEN.pack(follower.sent)])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while any(f.taken < f.sent and not f.lost for f in self._followers):
                        self._taken.clear()
                        await self._taken.wait()
        finally:
            for follower in self._followers:
                follower.pump.close()
            self._gate.close()
            await end_context(self._context)


class FollowerLink:
    """A follower's link to rank 0. To be made on the running loop; not thread-safe.

    `on_token(token)` is called for each token in the order's order. `on_lost(error)` is called once, in a
    turn of its own, when the link is unusable; no token is handed on after that.
    """

    def __init__(self, group: Wired, on_token: Callable[[bytes], None], on_lost: OnLost) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_token = on_token
        self._on_lost = on_lost
        self._taken = self._bytes_taken = 0
        self._told = self._bytes_told = 0
        self._reports = 0
        self._closed = False
        self.error: RankError | None = None
        rank, wires = group.place.rank, group.wires
        endpoint = wires.addresses.order[rank - 1]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = dial(self._context, endpoint, wires.server, wires.keys, b"rank-%d" % rank)
        self._pump = ZmqPump(socket, self._on_message, name="call order from rank 0", eager=True)
        socket.connect(endpoint)
        self._pump.start()
        self._say()

    def __repr__(self) -> str:
        return f"<FollowerLink taken={self._taken} reports={self._reports} {self._pump!r}>"

    @property
    def taken(self) -> int:
        """Tokens handed on so far."""
        return self._taken

    def report(self, data: bytes) -> None:
        """To rank 0, in order; never blocks. Raises `WireError` after `aclose`."""
        if self.error is None:
            self._say(data)
            self._reports += 1

    def _say(self, *data: bytes) -> None:
        try:
            self._pump.send([_REPORT.pack(self._reports, self._taken, self._bytes_taken), *data])
        except WireError:
            if self._closed:
                raise
            self._lose("does not take reports, so its process hangs, is stopped or unreachable")
        self._told, self._bytes_told = self._taken, self._bytes_taken

    def _on_message(self, frames: list[bytes]) -> None:
        if self.error is not None:
            return
        if len(frames) not in (1, 2) or len(frames[0]) != _TOKEN.size:
            self._lose("sent something that is no token of the call order: it runs another version")
            return
        (number,) = _TOKEN.unpack(frames[0])
        if number != self._taken:
            self._lose(f"sent a call order with a gap: number {number} came, {self._taken} was due")
            return
        if len(frames) == 1:
            self._say()
            return
        self._taken += 1
        self._bytes_taken += len(frames[1])
        try:
            self._on_token(frames[1])
        finally:
            waiting = self._taken - self._told >= ACK_MESSAGES
            if (waiting or self._bytes_taken - self._bytes_told >= ACK_BYTES) and not self._closed:
                self._say()

    def _lose(self, cause: str) -> None:
        if self.error is None:
            self.error = RankError(0, cause)
            self._loop.call_soon(self._on_lost, self.error)

    async def aclose(self, timeout_s: float = LINGER_S) -> None:
        """Close; reports that were made are delivered within `timeout_s`. Idempotent.

        Cancelling the wait leaves the delivery to a thread that ends within `timeout_s`.
        """
        if self._closed:
            return
        if self.error is None and self._taken > self._told:
            self._say()  # rank 0 waits for it, and its question may come too late
        self._closed = True
        self._pump.close(linger_ms=int(timeout_s * 1000))
        await end_context(self._context)
