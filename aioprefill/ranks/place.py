"""Which rank this process is, as whoever started it says in the environment. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aioprefill.errors import ConfigError

RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
RANK_STORE = "AIOPREFILL_RANK_STORE"
"""File through which the ranks that `aioprefill serve --tp N` starts find each other: no port to race for."""

_LOOPBACK = ("localhost", "127.", "::1", "[::1]")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank among `size`; `local_rank` numbers the ranks of its machine, and so its device."""

    rank: int
    size: int
    local_rank: int

    @property
    def leads(self) -> bool:
        """Rank 0 decides, the others follow."""
        return self.rank == 0


def place_from_environment(environ: Mapping[str, str], tp: int) -> RankPlace | None:
    """The place that torchrun, a cluster manager or our own supervisor gave to this process.

    None when nobody did, and for `tp` 1, which needs no group. Raises `ConfigError` that names the
    variable: it is missing while others are there, is no number, is out of range, or contradicts `tp`.
    """
    if environ.get(RANK, "") == "" and environ.get(WORLD_SIZE, "") == "":
        return None
    size = _number(environ, WORLD_SIZE)
    rank = _number(environ, RANK)
    if size != tp:
        raise ConfigError(
            f"{WORLD_SIZE} is {size}, but --tp is {tp}: start as many processes as --tp says, "
            f"or unset {RANK} and {WORLD_SIZE} to run on this machine alone"
        )
    if rank >= size:
        raise ConfigError(f"{RANK} is {rank}, but {WORLD_SIZE} is {size}: ranks are 0 to {size - 1}")
    if size == 1:
        return None
    local_rank = _number(environ, LOCAL_RANK)
    local_size = _number(environ, LOCAL_WORLD_SIZE) if environ.get(LOCAL_WORLD_SIZE) else size
    if local_rank >= local_size:
        limit = LOCAL_WORLD_SIZE if environ.get(LOCAL_WORLD_SIZE) else WORLD_SIZE
        raise ConfigError(f"{LOCAL_RANK} is {local_rank}, but {limit} is {local_size}")
    return RankPlace(rank, size, local_rank)


def on_one_machine(environ: Mapping[str, str]) -> bool:
    """True when all ranks are known to be on this machine, so that nothing has to leave loopback."""
    if environ.get(RANK_STORE):
        return True
    if environ.get(LOCAL_WORLD_SIZE) and environ.get(LOCAL_WORLD_SIZE) == environ.get(WORLD_SIZE):
        return True
    return environ.get(MASTER_ADDR, "").startswith(_LOOPBACK)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    if not text:
        raise ConfigError(
            f"{name} is not set, but other variables say that a launcher started this process: "
            f"it must set {RANK}, {WORLD_SIZE} and {LOCAL_RANK}"
        )
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}: expected a whole number from 0")
    return int(text)
