"""Which part of a room's KV one sender hands over. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """All of it, or one tensor-parallel rank's shard: its own heads of every page."""

    shards: int = 1
    """Ranks of the server that the room comes from; each sends one shard."""
    shard: int = 0
    group: str = ""
    """Names that server, all its ranks say the same; only with several shards."""

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.shards}"


WHOLE = Part()


def first_ticket(group: str) -> int:
    """Where the tickets of all ranks of a server begin, so that one hand-off has the same at each of them.

    Groups are random, so a peer does not take the tickets of a server for those of its predecessor.
    """
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=6).digest(), "little")
