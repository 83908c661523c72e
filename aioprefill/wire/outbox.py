"""What waits to be sent on one socket: bounded, and one slow peer never holds up another. Pure.

A ROUTER refuses a message only because of the peer it is for, so each peer has its own lane. Every other
socket type has a single lane, because there a refusal concerns the socket as a whole.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

from aioprefill.errors import WireError


class Offer(enum.Enum):
    """What the socket said to a message."""

    SENT = "sent"
    BLOCKED = "blocked"
    """Not now: the high-water mark is reached, or nobody is connected."""
    GONE = "gone"
    """Never: the peer that it is for has left."""


class Outbox:
    """Messages in the order of `push`, per lane.

    Bounds: `max_messages` and `max_bytes` in all, `max_per_lane` messages for one peer. `by_peer` takes
    a message's first frame as the name of its lane (ROUTER).
    """

    def __init__(
        self, name: str, *, by_peer: bool, max_messages: int, max_per_lane: int, max_bytes: int
    ) -> None:
        self._name = name
        self._by_peer = by_peer
        self._max_messages = max_messages
        self._max_per_lane = max_per_lane
        self._max_bytes = max_bytes
        self._lanes: dict[bytes, deque[list[bytes]]] = {}
        self._ready: deque[bytes] = deque()
        self._blocked: deque[bytes] = deque()
        self.messages = 0
        self.bytes = 0

    def __len__(self) -> int:
        return self.messages

    @property
    def has_ready(self) -> bool:
        """True when something may be offered at once."""
        return bool(self._ready)

    @property
    def has_blocked(self) -> bool:
        """True when the socket refused something that is still here."""
        return bool(self._blocked)

    def push(self, frames: list[bytes]) -> None:
        """Append a message. Raises `WireError` when a bound is reached; nothing is appended then."""
        size = sum(map(len, frames))
        if self.messages >= self._max_messages or self.bytes + size > self._max_bytes:
            raise WireError(
                f"{self._name}: outbox full ({self.messages:,} messages, {self.bytes:,} bytes): "
                "the other side does not read, or is not there"
            )
        key = frames[0] if self._by_peer else b""
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = deque()
            self._ready.append(key)
        elif len(lane) >= self._max_per_lane:
            raise WireError(
                f"{self._name}: peer {key.hex()} does not read: {len(lane):,} messages wait for it"
            )
        lane.append(frames)
        self.messages += 1
        self.bytes += size

    def retry_blocked(self) -> None:
        """Offer refused messages again at the next `drain`."""
        self._ready.extend(self._blocked)
        self._blocked.clear()

    def drain(self, offer: Callable[[list[bytes]], Offer], limit: int) -> tuple[int, int]:
        """Offer up to `limit` messages, lane by lane; (sent, dropped because their peer is gone)."""
        sent = dropped = 0
        while self._ready and sent < limit:
            key = self._ready.popleft()
            lane = self._lanes[key]
            outcome = Offer.SENT
            while lane and sent < limit:
                outcome = offer(lane[0])
                if outcome is not Offer.SENT:
                    break
                self._forget(lane.popleft())
                sent += 1
            if outcome is Offer.GONE:
                dropped += self.drop(key)
            elif not lane:
                del self._lanes[key]
            else:
                (self._blocked if outcome is Offer.BLOCKED else self._ready).append(key)
        return sent, dropped

    def drop(self, key: bytes) -> int:
        """Forget all that waits for one peer; how many messages that were."""
        lane = self._lanes.pop(key, None)
        if lane is None:
            return 0
        for queue in (self._ready, self._blocked):
            if key in queue:
                queue.remove(key)
        for frames in lane:
            self._forget(frames)
        return len(lane)

    def fullest(self) -> bytes | None:
        """The peer for whom most messages wait."""
        return max(self._lanes, key=lambda key: len(self._lanes[key]), default=None)

    def _forget(self, frames: list[bytes]) -> None:
        self.messages -= 1
        self.bytes -= sum(map(len, frames))
