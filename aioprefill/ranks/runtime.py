"""One rank's way to the others in a real group: sockets for the order, Gloo for the vote, and a watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aioprefill.errors import RankError
from aioprefill.ranks.collectives import GroupCollectives
from aioprefill.ranks.group import RankGroup
from aioprefill.ranks.order_link import FollowerLink, LeaderLinks
from aioprefill.ranks.progress import RankProgress
from aioprefill.ranks.watch import BEAT_S, Watch
from aioprefill.tp_agree import GroupAgreement

logger = logging.getLogger(__name__)

BLAME_S = 3.0
"""How long a vote that broke waits for the watch to name the rank; then the vote's own error is told."""


class GroupLink:
    """Implements `RankLink` over a group that this process has joined, and closes that group in the end.

    `timeout_s` is the longest time between the first and the last rank's vote, the longest silence and the
    longest host call. `on_stuck(error)` is called in another thread when this rank's loop does not take the
    news of a lost rank: the process should report and leave by `os._exit`.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        timeout_s: float,
        on_stuck: Callable[[RankError], None],
        beat_s: float = BEAT_S,
    ) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._beat_s = beat_s
        self._on_stuck = on_stuck
        self.progress = RankProgress()
        self.agreement = GroupAgreement(
            self.rank,
            GroupCollectives(group.vote_group),
            on_joining=self.progress.join_vote,
            culprit=self._culprit,
        )
        self._links: LeaderLinks | FollowerLink | None = None
        self._watch: Watch | None = None
        self._on_lost: Callable[[RankError], None] = lambda _: None
        self._lost: asyncio.Future[RankError] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<GroupLink rank={self.rank} of {self.size} {self.progress!r}>"

    @property
    def rank(self) -> int:
        """See `RankLink.rank`."""
        return self._group.place.rank

    @property
    def size(self) -> int:
        """See `RankLink.size`."""
        return self._group.place.size

    def start(self, on_message: Callable[[int, bytes], None], on_lost: Callable[[RankError], None]) -> None:
        """See `RankLink.start`."""
        self._lost = asyncio.get_running_loop().create_future()
        self._on_lost = on_lost
        if self._group.place.leads:
            self._links = LeaderLinks(self._group, on_message, self._lose)
        else:
            self._links = FollowerLink(self._group, lambda token: on_message(0, token), self._lose)
        self._watch = Watch(
            self._group,
            self.progress,
            timeout_s=self._timeout_s,
            beat_s=self._beat_s,
            on_lost=self._lose,
            on_stuck=self._on_stuck,
        )
        self._watch.start()

    async def wait_connected(self) -> None:
        """See `RankLink.wait_connected`."""
        if isinstance(self._links, LeaderLinks):
            await self._links.wait_connected()

    def _lose(self, error: RankError) -> None:
        assert self._lost is not None
        if not self._lost.done():
            self._lost.set_result(error)
            if isinstance(self._links, LeaderLinks):
                self._links.forget(error.rank)
            self._on_lost(error)

    async def _culprit(self, number: int, error: Exception) -> RankError:
        """The rank that broke the vote on a forward: the watch sees it too, and knows its name."""
        assert self._lost is not None
        try:
            async with asyncio.timeout(BLAME_S):
                return await asyncio.shield(self._lost)
        except TimeoutError:
            cause = f"lost the vote on forward {number}, and no rank is known to be at fault: {error}"
            return RankError(self.rank, cause, forward=number)

    def send(self, data: bytes) -> None:
        """See `RankLink.send`. Nothing is sent once the link is closed."""
        if self._closed:
            return
        if isinstance(self._links, LeaderLinks):
            self._links.send(data)
        elif self._links is not None:
            self._links.report(data)

    def failed(self, error: BaseException) -> None:
        """See `RankLink.failed`."""
        self.progress.blames = error.rank if isinstance(error, RankError) else self.rank
        self.progress.error = str(error) or type(error).__name__
        if self._watch is not None:
            self._watch.tell_now()

    @property
    def voting(self) -> bool:
        """A thread sits in the vote's collective and cannot be stopped: the process must not wait for it."""
        return self.agreement.voting

    async def aclose(self) -> None:
        """See `RankLink.aclose`."""
        if self._closed:
            return
        self._closed = True
        self.agreement.close()
        if self._links is not None:
            await self._links.aclose()
        if self._watch is not None:
            await self._watch.aclose()
