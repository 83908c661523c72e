"""What the loop needs of the other ranks. Pure; imports neither torch nor zmq."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aioprefill.errors import RankError
from aioprefill.host_calls import CallProgress
from aioprefill.tp_agree import Agreement


class RankLink(Protocol):
    """One rank's way to the others: leader to followers, followers to the leader, and the vote of all.

    Implemented over sockets and Gloo by `ranks.runtime`, and in memory by the simulation.
    """

    @property
    def rank(self) -> int:
        """0 is the leader."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def agreement(self) -> Agreement: ...

    @property
    def progress(self) -> CallProgress:
        """Where this rank's calls are noted, for the messages that name a rank which hangs."""

    def start(self, on_message: Callable[[int, bytes], None], on_lost: Callable[[RankError], None]) -> None:
        """Begin, on the running loop.

        `on_message(rank, data)` gets what another rank has sent to this one, in order and without gaps.
        `on_lost(error)` is called at most once, with the first rank that is lost.
        """

    async def wait_connected(self) -> None:
        """Leader, after `start`: return when whatever is sent reaches every follower by itself.

        Before that it may need turns of this loop; a host call that makes collectives leaves it none.
        """

    def send(self, data: bytes) -> None:
        """Leader: to every follower. Follower: to the leader. Never blocks; a full link is a lost rank."""

    def failed(self, error: BaseException) -> None:
        """This rank cannot go on: the others are told why. They name it, or whom a `RankError` names."""

    async def aclose(self) -> None:
        """Leave the group. What was sent is delivered, within a second or so. Idempotent."""
