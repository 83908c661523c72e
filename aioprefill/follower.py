"""A rank other than 0: makes the host calls that the leader has decided, in its order.

Rules:
- It decides nothing and reads no clock: arguments, clock readings and facts come with the tokens.
- It votes on its own forwards as they end, whatever the order says meanwhile; before a token it waits for the
  ends of the votes that the leader had seen when it wrote the token.
- It never blocks its loop, but inside a host's own collectives, and never spins.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import NoReturn

import msgspec

from aioprefill.completion import end_of
from aioprefill.errors import AioprefillError, HostError, HostLeft, RankError, RequestAborted
from aioprefill.host import Forward, ReplicatedHost, Wake
from aioprefill.host_calls import CallMeter, CallRunner
from aioprefill.ranks.lost import LostRank
from aioprefill.ranks.port import RankLink
from aioprefill.signals import Signal
from aioprefill.tp_agree import CallToken, Digest, decode_token

logger = logging.getLogger(__name__)

STOP = "stop"
"""Kind of the last token: the leader's loop is over. If it broke, its error says why, and its detail is the
rank whose fault that is."""
STOP_WANTED = b""
"""A report that says: this rank was told to stop, so the leader should drain."""
TOKENS_PER_TURN = 16


class Follower:
    """Runs a host as a follower on the current loop: `await Follower(host, link).run()`."""

    def __init__(self, host: ReplicatedHost, link: RankLink, *, slow_call_s: float = 0.005) -> None:
        self._host = host
        self._link = link
        self.meter = CallMeter(slow_s=slow_call_s)
        self._runner = CallRunner(host, self.meter, link.progress)
        self._digest = Digest()
        self._runner.observers.append(lambda _, description: self._digest.add(description))
        self._tokens: deque[CallToken] = deque()
        self._come = Signal()
        self._launched = Signal()
        self._agreed_more = Signal()
        self._lost: LostRank | None = None
        self._forwards: dict[int, tuple[Forward, int]] = {}
        """Launched and not agreed: number -> forward and the digest at its launch."""
        self._told_to_stop = False
        self._left: HostLeft | None = None
        """The host has left; the leader's has too, at the same call, so only its last token is to come."""
        self.next_token = 0
        self.agreed = 0
        """Forwards whose votes are over here."""

    def __repr__(self) -> str:
        return f"<Follower rank={self._link.rank} next_token={self.next_token} agreed={self.agreed}>"

    @property
    def digest(self) -> int:
        """Over everything that was called so far."""
        return self._digest.value

    async def run(self) -> None:
        """Follow until the leader stops. Raises `RankError` when a rank is lost, the ranks diverge or the
        leader's loop broke, and what the host raises; `HostLeft` when all hosts have left at one call.

        Whatever happens, the others are told, and the host is closed. Cancelling it does the same.
        """
        answer: AioprefillError = RequestAborted("the scheduler stopped")
        self._lost = LostRank()
        self._host.follow(self._link.send)
        self._host.bind(Wake(input=_nothing, transfers=_nothing, admission=_nothing))
        self._link.start(self._on_message, self._on_lost)
        try:
            async with asyncio.TaskGroup() as group:
                voting = group.create_task(self._vote(), name="aioprefill.vote_task")
                watching = group.create_task(self._lost.wait(), name="aioprefill.rank_task")
                await group.create_task(self._follow(), name="aioprefill.follow_task")
                voting.cancel()
                watching.cancel()
        except BaseExceptionGroup as group_error:
            cause = first_cause(group_error)
            if isinstance(cause, HostLeft):
                logger.info("rank %d ends: %s", self._link.rank, cause)
                raise cause from cause.__cause__
            answer = HostError(f"the scheduler stopped: {cause}")
            answer.__cause__ = cause
            logger.error(
                "rank %d stopped: %s",
                self._link.rank,
                cause,
                exc_info=None if isinstance(cause, RankError) else cause,
            )
            if not self._told_to_stop:  # else all know already
                self._link.failed(cause)
            raise cause from None
        finally:
            await self._host.aclose(answer)
            await self._link.aclose()

    def ask_to_stop(self) -> None:
        """This process was told to stop: the leader should drain and stop all ranks."""
        self._link.send(STOP_WANTED)

    # What comes from the link

    def _on_message(self, rank: int, data: bytes) -> None:
        try:
            self._tokens.append(decode_token(data))
        except msgspec.MsgspecError as err:
            self._on_lost(RankError(rank, f"sent what is no token: {err}"))
        self._come.set()

    def _on_lost(self, error: RankError) -> None:
        if self._lost is not None:
            self._lost.set(error)

    # The two tasks

    async def _follow(self) -> None:
        while True:
            while not self._tokens:
                await self._come.wait()
            for _ in range(min(len(self._tokens), TOKENS_PER_TURN)):
                token = self._tokens.popleft()
                if await self._execute(token):
                    return
            await asyncio.sleep(0)

    async def _execute(self, token: CallToken) -> bool:
        """Make one call; True for the last one."""
        if token.number != self.next_token:
            raise RankError(0, f"sent host call {token.number} where {self.next_token} was due")
        while self.agreed < token.agreed:
            await self._agreed_more.wait()
        if token.kind == STOP:
            self._told_to_stop = True
            if token.error is not None:
                raise _leaders_error(token.detail, token.error[1])
            if self._left is not None:
                raise self._left
            return True
        if self._left is not None:
            cause = f"left the loop ({self._left}) at host call {token.number - 1}, where rank 0 went on"
            raise RankError(self._link.rank, cause)
        if token.facts:
            self._host.give_facts(token.facts)
        self.next_token += 1
        try:
            result = self._runner.run(token)
        except HostLeft as left:
            self._left = left
            return False
        if token.kind == "launch":
            self._forwards[token.detail] = result, self._digest.value
        self._launched.set()
        return False

    async def _vote(self) -> NoReturn:
        while True:
            number = self.agreed
            if not self._may_vote(number):
                await self._launched.wait()
                continue
            forward, digest = self._forwards.pop(number)
            error = await self._link.agreement.vote(number, digest, await end_of(forward.completion))
            self.agreed = number + 1
            self._agreed_more.set()
            if error is not None:
                logger.warning("forward %d failed: %s", number, error)

    def _may_vote(self, number: int) -> bool:
        """The forward is launched here; its sample is submitted, or will never be."""
        if number not in self._forwards:
            return False
        oldest = next(iter(self._runner.forwards))
        return number == oldest or self._forwards[number][0].completion.submitted


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of an exception group: what broke the loop. A lost rank comes first: others follow."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, RankError)), leaves[0])


def _leaders_error(culprit: int, message: str) -> RankError:
    """Why the leader's loop broke, as its last token says."""
    if message.startswith(f"rank {culprit} "):
        return RankError.retold(culprit, message)
    return RankError(0, f"stopped: {message}")


def _nothing() -> None:
    """Nothing wakes a follower but tokens."""
