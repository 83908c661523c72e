"""The tensor-parallel ranks of an SGLang server as a group: its own torch.distributed, and a vote of ours.

SGLang has started one scheduler process per rank, and they have met. Addresses and keys go through the store
of that meeting, once for each time the loop is entered; afterwards nobody waits for the store.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not said to be
from torch.distributed.distributed_c10d import _get_default_store

from aioprefill.errors import ConfigError, RankError
from aioprefill.ranks.group import RankGroup
from aioprefill.ranks.place import RankPlace
from aioprefill.ranks.runtime import BLAME_S, GroupLink
from aioprefill.ranks.wires import LOOPBACK, Wires

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 300.0
"""Ranks enter the loop one right after the other: SGLang has them wait for each other before."""
TIMEOUT_S = 600.0
"""How long a rank may be silent, late for a vote or in one host call: new weights are loaded in such a call.
A death is noticed at once."""
EXIT_LOST = 5
"""Exit code where a rank was lost and the loop is stuck in a collective with it."""

_entries = itertools.count()
"""Entries into the loop by this process, so far; alike on all ranks, for they change their role together."""


class SglangGroup(RankGroup):
    """The ranks of one SGLang server. Made by `of`; `close` when the loop has ended."""

    @classmethod
    def of(cls, scheduler: Any, *, timeout_s: float = JOIN_TIMEOUT_S) -> SglangGroup:
        """Blocking: meet the other ranks, exchange addresses and keys, make the group of the vote.

        Every rank calls it where its scheduler enters the loop. Raises `RankError` that names the ranks that
        did not come within `timeout_s`, `ConfigError` when rank 0 cannot listen.
        """
        from sglang.srt.runtime_context import get_parallel

        tensor_group = get_parallel().tp_group
        rank, ranks = int(tensor_group.rank_in_group), [int(rank) for rank in tensor_group.ranks]
        place = RankPlace(rank, len(ranks), rank)
        host = LOOPBACK if not place.leads else address_for(scheduler.server_args)
        store = PrefixStore(f"aioprefill/{next(_entries)}", _get_default_store())
        group = cls(place, store, timeout_s, TIMEOUT_S)
        group.meet("joined")
        group.wires = Wires.exchange(place, group, host)
        try:
            group.vote_group = dist.new_group(
                ranks=ranks, backend="gloo", timeout=timedelta(seconds=group.vote_timeout_s)
            )
        except (RuntimeError, ValueError) as err:
            group.wires.close()
            cause = f"could not connect with the other ranks for the completion vote: {err}"
            raise RankError(rank, cause) from err
        return group

    def link(self) -> SglangLink:
        """This rank's way to the others, for one run of the loop."""
        return SglangLink(self, timeout_s=self.vote_timeout_s, on_stuck=_leave)

    def close(self) -> None:
        """Leave the vote's group; SGLang's own stay. Idempotent.

        Not to be called while a thread sits in one of its collectives.
        """
        if self._closed:
            return
        self._closed = True
        self.wires.close()
        dist.destroy_process_group(self.vote_group)


class SglangLink(GroupLink):
    """Names the rank that was lost where one of SGLang's own collectives was the first to notice.

    Such a collective raises a bare `RuntimeError` in a host call. So before one is told to the others, the
    watch has a moment to say who it is: `lost`, from `aclose` on.
    """

    lost: RankError | None = None
    _broke: RuntimeError | None = None

    def failed(self, error: BaseException) -> None:
        """See `RankLink.failed`; a `RuntimeError` is told in `aclose`."""
        if isinstance(error, RuntimeError):
            self._broke = error
        else:
            super().failed(error)

    async def aclose(self) -> None:
        """See `RankLink.aclose`. After a `RuntimeError` it takes up to `BLAME_S` longer."""
        error, self._broke = self._broke, None
        if error is not None:
            self.lost = await self._suspected()
            super().failed(self.lost or error)
        await super().aclose()

    async def _suspected(self) -> RankError | None:
        if self._lost is None:
            return None
        try:
            async with asyncio.timeout(BLAME_S):
                return await asyncio.shield(self._lost)
        except TimeoutError:
            return None


def address_for(arguments: Any) -> str:
    """The address on which rank 0 listens for the others: loopback where all are on one machine.

    Raises `ConfigError` when the server's `--dist-init-addr` names no address of this machine's network.
    """
    if int(arguments.nnodes) == 1:
        return LOOPBACK
    name = str(arguments.dist_init_addr or "").removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as err:
        raise ConfigError(f"--dist-init-addr {arguments.dist_init_addr}: {err}") from err


def _leave(error: RankError) -> None:
    """In the watch's thread: the loop's own is stuck in one of SGLang's collectives, and cannot raise."""
    logger.critical("%s; this rank waits for it in a collective, and leaves", error)
    logging.shutdown()
    os._exit(EXIT_LOST)
