"""Joins the ranks of one model into a torch.distributed group, before any of them runs its loop.

Everything that needs the group's store happens here, blocking: afterwards no rank waits for it. Each rank
first says that it has come, so that all can name the ones that have not.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not said to be
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from aioprefill.errors import ConfigError, RankError
from aioprefill.ranks.place import MASTER_ADDR, MASTER_PORT, RANK_STORE, RankPlace, on_one_machine
from aioprefill.ranks.wires import LOOPBACK, Wires

JOIN_TIMEOUT_S = 600.0
VOTE_TIMEOUT_S = 60.0
POLL_S = 0.02
"""Between looks at who has come. Stores have no event for it, or log a warning when it does not come."""
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


class RankGroup:
    """What the ranks of one model share. Made by `join`; `close` when nothing uses it any more."""

    def __init__(self, place: RankPlace, store: Store, timeout_s: float, vote_timeout_s: float) -> None:
        """See `join`."""
        self.place = place
        self.store = store
        """The group's own part of the store."""
        self.timeout_s = timeout_s
        self.vote_timeout_s = vote_timeout_s
        self.vote_group: dist.ProcessGroup
        """A Gloo group of its own for the completion vote; its collectives end after `vote_timeout_s`."""
        self.wires: Wires
        self.shared_id = ""
        """Random, made by rank 0, the same on all ranks."""
        self._closed = False

    def __repr__(self) -> str:
        return f"<RankGroup rank {self.place.rank} of {self.place.size} {self.shared_id}>"

    @classmethod
    def join(
        cls,
        place: RankPlace,
        *,
        device: str,
        timeout_s: float = JOIN_TIMEOUT_S,
        vote_timeout_s: float = VOTE_TIMEOUT_S,
    ) -> RankGroup:
        """Blocking: find the other ranks, initialise torch.distributed, exchange addresses and keys.

        `device` is "cpu", "cuda" (this rank's own, by its local rank) or "cuda:N". On one machine nothing
        leaves loopback. Raises `ConfigError` for settings that cannot work, and `RankError` that names the
        ranks that did not come within `timeout_s`. The default group, over which models run and are loaded,
        has that limit too: ranks may need very different times to load. A vote has its own.
        """
        local = on_one_machine(os.environ)
        if local:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, LOOPBACK_INTERFACE)
        backend = _prepare_device(place, device)
        host = LOOPBACK if local or not place.leads else _address_of(os.environ.get(MASTER_ADDR, ""))
        store = _open_store(place, os.environ, timeout_s)
        group = cls(place, PrefixStore("aioprefill", store), timeout_s, vote_timeout_s)
        group.meet("joined")
        group.wires = Wires.exchange(place, group, host)
        try:
            group._share_id()
            group._initialise(backend, store)
        except BaseException:
            group.wires.close()
            raise
        return group

    def publish(self, key: str, value: bytes) -> None:
        """Make a value known to all ranks. Raises `RankError` when the store is gone."""
        try:
            self.store.set(key, value)  # type: ignore[arg-type]  # it takes bytes
        except RuntimeError as err:
            raise self._store_lost(err) from err

    def lookup(self, key: str, rank: int = 0) -> bytes:
        """Wait for a value that `rank` publishes. Blocking, at most `timeout_s`.

        Raises `RankError` that names this rank when the value does not come in time.
        """
        try:
            self.store.wait([key], timedelta(seconds=self.timeout_s))
            return bytes(self.store.get(key))
        except RuntimeError as err:
            cause = f"did not publish {key} within {self.timeout_s:g} s ({_first_line(err)})"
            raise RankError(rank, cause) from err

    def meet(self, at: str) -> None:
        """Say that this rank has come to a point, and wait for the others. Blocking, at most `timeout_s`.

        Raises `RankError` that names the ranks that did not come.
        """
        self.publish(f"{at}/{self.place.rank}", b"1")
        missing = list(range(self.place.size))
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                missing = [rank for rank in missing if not self.store.check([f"{at}/{rank}"])]
            except RuntimeError as err:  # rank 0 was the first to give up, and took its store along
                raise self._missing(at, missing) if 0 not in missing else self._store_lost(err) from err
            if not missing:
                return
            if time.monotonic() >= deadline:
                raise self._missing(at, missing)
            time.sleep(POLL_S)

    def _missing(self, at: str, ranks: list[int]) -> RankError:
        more = ", ".join(map(str, ranks[1:]))
        cause = (
            f"has not {at} within {self.timeout_s:g} s"
            + (f", nor did {more}" if more else "")
            + ": look for its messages; all ranks must be started with the same store or MASTER_ADDR"
        )
        return RankError(ranks[0], cause)

    def _store_lost(self, err: Exception) -> RankError:
        return RankError(0, f"ended while the group joined: its store is gone ({_first_line(err)})")

    def _share_id(self) -> None:
        if self.place.leads:
            self.publish("shared_id", secrets.token_hex(8).encode())
        self.shared_id = self.lookup("shared_id").decode()

    def _initialise(self, backend: str, store: Store) -> None:
        timeout = timedelta(seconds=self.timeout_s)
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore("torch", store),
                rank=self.place.rank,
                world_size=self.place.size,
                timeout=timeout,
            )
            vote_timeout = timedelta(seconds=self.vote_timeout_s)
            self.vote_group = dist.new_group(backend="gloo", timeout=vote_timeout)
        except (RuntimeError, ValueError) as err:
            if dist.is_initialized():
                dist.destroy_process_group()
            cause = f"could not connect with the other ranks through torch.distributed: {_first_line(err)}"
            raise RankError(self.place.rank, cause) from err

    def close(self) -> None:
        """Leave the group. Idempotent. Not to be called while a thread sits in one of its collectives."""
        if self._closed:
            return
        self._closed = True
        self.wires.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _open_store(place: RankPlace, environ: Mapping[str, str], timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    path = environ.get(RANK_STORE)
    if path:
        if not os.access(Path(path).parent, os.W_OK | os.X_OK):  # the store itself would try for minutes
            raise ConfigError(f"{RANK_STORE} is {path}: its folder does not exist or cannot be written")
        store: Store = FileStore(path, place.size)
        store.set_timeout(timeout)
        return store
    host, port = environ.get(MASTER_ADDR, ""), environ.get(MASTER_PORT, "")
    if not host:
        raise ConfigError(f"{MASTER_ADDR} is not set: it names the machine of rank 0")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{MASTER_PORT} is {port!r}: expected a port of the machine of rank 0")
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process serves it
    try:
        served: Any = TCPStore(
            host, int(port), place.size, place.leads and not agent, timeout, wait_for_workers=False
        )
    except RuntimeError as err:
        cause = (
            f"cannot be reached: no store at {MASTER_ADDR}:{MASTER_PORT} {host}:{port} ({_first_line(err)})"
        )
        if place.leads and not agent:
            raise ConfigError(f"{MASTER_PORT} {port} cannot be listened on: {_first_line(err)}") from err
        raise RankError(0, cause) from err
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # an agent's store outlives its workers
    return PrefixStore(f"attempt-{attempt}", served)


def _prepare_device(place: RankPlace, device: str) -> str:
    """Choose this rank's device; the backends that the group needs."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return "gloo"
    index, count = int(number) if number else place.local_rank, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"--device {device}: rank {place.rank}, number {place.local_rank} on its machine, wants device "
            f"{index}, but there are {count} CUDA devices"
        )
    torch.cuda.set_device(index)
    return "cpu:gloo,cuda:nccl"


def _address_of(name: str) -> str:
    """The address of this machine that the other ranks' machines know it by."""
    if not name:
        raise ConfigError(f"{MASTER_ADDR} is not set: it names the machine of rank 0")
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as err:
        raise ConfigError(f"{MASTER_ADDR} {name}: {err}") from err
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"{MASTER_ADDR} {name} is {address} here, which other machines cannot reach: "
            "set it to an address of this machine, or LOCAL_WORLD_SIZE if all ranks are on this machine"
        )
    return address


def _first_line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0][:300]
