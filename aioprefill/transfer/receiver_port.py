"""What a receiver of KV needs of a decode worker. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aioprefill.engine.port import SampledToken
from aioprefill.transfer.port import Handoff


class ReceiverHandler(Protocol):
    """Called on the loop. `Handoff.peer` names the prefill side here.

    Pages that `reserve` gave out come back once: by `arrived` (they are the worker's then) or by
    `release_pages`. In between a `lost` says that the room will not arrive, which may be long before its
    pages are safe to use again.
    """

    def reserve(self, handoff: Handoff) -> Sequence[int] | None:
        """`handoff.pages` page ids; None: none are free now, ask again after `retry_reservations`.

        Raises `InvalidRequest` or `PeerError` to refuse the room.
        """

    def arrived(
        self, room: str, pages: list[int], first: SampledToken, handoff: Handoff, shards: int = 1
    ) -> None:
        """All pages are written and the first token is here.

        `shards` above 1: a page holds so many shards, one after the other, and is yet to be assembled (see
        `Engine.assemble_pages`). It is only given then.
        """

    def lost(self, room: str, reason: str) -> None:
        """The room will not arrive. Once, for each room that `reserve` was asked about and did not refuse."""

    def release_pages(self, room: str, pages: list[int]) -> None:
        """Nothing writes to the pages of a lost room any more."""
