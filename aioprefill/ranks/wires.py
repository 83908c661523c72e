"""Addresses and keys of the sockets between ranks, exchanged once while the group joins.

All sockets use CURVE, on loopback too: each rank makes a key pair for this run and publishes the public
half in the group's store, and rank 0, which binds, admits exactly the other ranks. So nobody else who can
reach a port, on this machine or another, can take a rank's messages away or send one.

Rule: sockets that are bound wait here until `take_order` or `take_watch` gives them to their one owner;
`close` closes what nobody took.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq
from zmq.utils import z85

from aioprefill.errors import ConfigError
from aioprefill.ranks.place import RankPlace
from aioprefill.wire.security import ZAP_DOMAIN, ZAP_ENDPOINT

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

LOOPBACK = "127.0.0.1"
RECONNECT_MS = 10_000


class Board(Protocol):
    """Where ranks tell each other things while they join."""

    def publish(self, key: str, value: bytes) -> None:
        """Make a value known to all ranks."""

    def lookup(self, key: str, rank: int = 0) -> bytes:
        """Wait for a value that `rank` publishes. Raises its `RankError` when it does not come in time."""


@dataclass(frozen=True, slots=True, repr=False)
class RankKeys:
    """A CURVE key pair of one rank, for one run; Z85 text."""

    public: bytes
    secret: bytes

    @classmethod
    def make(cls) -> RankKeys:
        """A fresh pair."""
        return cls(*zmq.curve_keypair())

    def __repr__(self) -> str:
        return f"<RankKeys public={self.public.decode()}>"


class Gate:
    """Answers libzmq's question "may this peer connect?" (ZAP) for the sockets of one context.

    `socket` is to be read by the owner of the context, which sends `answer(frames)` back on it.
    """

    def __init__(self, context: Context, admitted: dict[bytes, int]) -> None:
        """`admitted`: ranks by their public keys."""
        self._ranks = {z85.decode(key): rank for key, rank in admitted.items()}
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)
        self.refused = 0

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """The reply to one question; the peer's user id is its rank."""
        version, question, mechanism, credentials = frames[0], frames[1], frames[5], frames[6:]
        rank = self._ranks.get(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else None
        if rank is None:
            self.refused += 1
            return [version, question, b"400", b"not a rank of this group", b"", b""]
        return [version, question, b"200", b"OK", str(rank).encode(), b""]


@dataclass(slots=True)
class Bound:
    """Sockets that rank 0 has bound, in a context of their own. Whoever takes it closes all of it."""

    context: Context
    gate: Gate
    sockets: list[Socket] = field(default_factory=list)
    endpoints: list[str] = field(default_factory=list)

    def close(self) -> None:
        """At once; nothing is delivered any more."""
        self.context.destroy(linger=0)


def bind(kind: int, count: int, host: str, keys: RankKeys, admitted: dict[bytes, int]) -> Bound:
    """Bind `count` sockets of type `kind` on free ports of `host`. Raises `ConfigError` when it cannot be."""
    context: Context = zmq.Context()
    bound = Bound(context, Gate(context, admitted))
    try:
        for _ in range(count):
            socket = context.socket(kind)
            bound.sockets.append(socket)
            _prepare(socket, host)
            socket.curve_server = True
            socket.curve_secretkey = keys.secret
            socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no gate: refuse, do not admit
            socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
            bound.endpoints.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    except zmq.ZMQError as err:
        bound.close()
        raise ConfigError(
            f"rank 0 cannot listen for the other ranks on {host}: {err}; MASTER_ADDR must be an address of "
            "the machine of rank 0"
        ) from err
    return bound


def dial(context: Context, endpoint: str, server: bytes, keys: RankKeys, identity: bytes) -> Socket:
    """A DEALER that is to be connected to a bound socket of rank 0; `connect(endpoint)` is the caller's."""
    socket = context.socket(zmq.DEALER)
    _prepare(socket, endpoint)
    socket.identity = identity
    socket.curve_serverkey = server
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    return socket


def _prepare(socket: Socket, address: str) -> None:
    socket.linger = 0
    socket.setsockopt(zmq.IPV6, int(address.count(":") > 2))
    # What breaks a connection ends the group, so there is no hurry to make it again. Never (-1) would
    # also throw away what had come and is not read yet, such as a farewell.
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    # the gate is answered once its owner runs, which may be long after the bind
    socket.setsockopt(zmq.HANDSHAKE_IVL, 0)


class Addresses(msgspec.Struct, frozen=True):
    """What rank 0 publishes: order sockets of ranks 1, 2, ..., and the socket of the watch."""

    order: list[str]
    watch: str


class Wires:
    """This rank's keys, the others' public ones, and where rank 0 listens."""

    def __init__(
        self, place: RankPlace, keys: RankKeys, publics: list[bytes], host: str, board: Board
    ) -> None:
        """See `exchange`."""
        self.place = place
        self.keys = keys
        self.publics = publics
        self._order: Bound | None = None
        self._watch: Bound | None = None
        if place.leads:
            admitted = {publics[rank]: rank for rank in range(1, place.size)}
            self._order = bind(zmq.DEALER, place.size - 1, host, keys, admitted)
            try:
                self._watch = bind(zmq.ROUTER, 1, host, keys, admitted)
            except ConfigError:
                self._order.close()
                raise
            self.addresses = Addresses(self._order.endpoints, self._watch.endpoints[0])
            board.publish("wires/addresses", msgspec.msgpack.encode(self.addresses))
        else:
            self.addresses = msgspec.msgpack.decode(board.lookup("wires/addresses"), type=Addresses)

    @classmethod
    def exchange(cls, place: RankPlace, board: Board, host: str = LOOPBACK) -> Wires:
        """Blocking: every rank calls it; rank 0 binds on its address `host`.

        Raises `RankError` when a rank does not take part in time, `ConfigError` when `host` cannot be bound.
        """
        keys = RankKeys.make()
        board.publish(f"wires/key/{place.rank}", keys.public)
        publics = [board.lookup(f"wires/key/{rank}", rank) for rank in range(place.size)]
        return cls(place, keys, publics, host, board)

    @property
    def server(self) -> bytes:
        """Public key of rank 0."""
        return self.publics[0]

    def take_order(self) -> Bound:
        """Rank 0's sockets of the call order, once."""
        bound, self._order = self._order, None
        assert bound is not None, "the order's sockets were taken before, or this is not rank 0"
        return bound

    def take_watch(self) -> Bound:
        """Rank 0's socket of the watch, once."""
        bound, self._watch = self._watch, None
        assert bound is not None, "the watch's socket was taken before, or this is not rank 0"
        return bound

    def close(self) -> None:
        """Close what nobody took. Idempotent."""
        for bound in (self._order, self._watch):
            if bound is not None:
                bound.close()
        self._order = self._watch = None


class Wired(Protocol):
    """A group as links and watch see it."""

    @property
    def place(self) -> RankPlace:
        """Which rank this is."""

    @property
    def wires(self) -> Wires:
        """Its sockets' addresses and keys."""
