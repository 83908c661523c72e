"""SGLang's transfer interface with scripted peers: a room finishes, fails, hangs or waits as told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVManager, BaseKVSender, KVPoll, KVTransferMetric

Due = Callable[[], bool]


def at_once() -> bool:
    """Due from the start."""
    return True


def never() -> bool:
    """A peer that hangs."""
    return False


class After:
    """Due some seconds after it was first asked."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def __call__(self) -> bool:
        if self._since is None:
            self._since = time.monotonic()
        return time.monotonic() - self._since >= self._seconds


class Gate:
    """Due once the test has opened it."""

    def __init__(self) -> None:
        self._open = False

    def open(self) -> None:
        """From now on."""
        self._open = True

    def __call__(self) -> bool:
        return self._open


@dataclass
class Peer:
    """What the decode side of one room does."""

    bootstrapped: Due = at_once
    transferred: Due = at_once
    """Asked once the last chunk was sent."""
    bootstrap_fails: bool = False
    transfer_fails: bool = False
    dies: Due = never
    """The peer is gone, whatever the state."""
    prefix: int = 0
    """Tokens that the decode side has cached, a multiple of the page size."""


@dataclass(frozen=True)
class Send:
    """One KV chunk: tokens `[start, end)`, in pages, and whether it is the last one."""

    start: int
    end: int
    pages: int
    last: bool


@dataclass
class TransferBook:
    """Peers by room, and what was sent."""

    peers: dict[int, Peer] = field(default_factory=dict)
    sends: dict[int, list[Send]] = field(default_factory=dict)
    sent_at: dict[int, float] = field(default_factory=dict)
    """When the last chunk of a room was sent."""
    polls: int = 0
    order: list[int] = field(default_factory=list)
    """Rooms in the order of their sends."""

    def clear(self) -> None:
        """Forget everything."""
        self.peers.clear()
        self.sends.clear()
        self.sent_at.clear()
        self.order.clear()
        self.polls = 0


BOOK = TransferBook()
"""SGLang makes the senders itself, so they find their script here."""


class ScriptedManager(BaseKVManager):
    """Stands for a transfer engine; there is none."""

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool | None = False) -> None:
        super().__init__(args, mode, server_args, is_mla_backend)
        self.kv_args = args
        self.req_to_decode_prefix_len: dict[int, int] = {}

    def register_to_bootstrap(self) -> None:
        """There is no bootstrap server."""


class ScriptedSender(BaseKVSender):
    """One room's sender: does what its `Peer` says, and writes down what is sent."""

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        self.kv_mgr = mgr
        self.room = bootstrap_room
        self.peer = BOOK.peers.setdefault(bootstrap_room, Peer())
        self.sent = self.peer.prefix
        self.last_sent = False
        self.concluded: int | None = None
        self.cleared = False

    def poll(self) -> int:
        """See SGLang's senders: terminal states stay."""
        BOOK.polls += 1
        if self.concluded is None:
            self.concluded = self._conclusion()
        if self.concluded is not None:
            return self.concluded
        if self.last_sent:
            return KVPoll.Transferring
        return KVPoll.WaitingForInput if self.peer.bootstrapped() else KVPoll.Bootstrapping

    def _conclusion(self) -> int | None:
        if self.peer.dies():
            return KVPoll.Failed
        if self.peer.bootstrap_fails and self.peer.bootstrapped():
            return KVPoll.Failed
        if self.last_sent and self.peer.transferred():
            return KVPoll.Failed if self.peer.transfer_fails else KVPoll.Success
        return None

    def poll_pp_consensus(self) -> int:
        """One stage only."""
        return self.poll()

    def get_transfer_metric(self) -> KVTransferMetric:
        """Nothing is measured."""
        return KVTransferMetric()

    def pop_decode_prefix_len(self) -> int:
        """What the decode side has cached."""
        return self.peer.prefix

    def mark_prefill_complete(self) -> None:
        """Nobody is told."""

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """The handshake is over."""
        assert aux_index is not None and aux_index >= 0

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """As SGLang's fake: an empty last chunk still ends the transfer."""
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: list[Any] | None = None, num_kv_tokens: int | None = None
    ) -> None:
        """Write the chunk down; SGLang gives state indices with the last one only."""
        assert num_kv_tokens is not None
        assert not self.last_sent, f"room {self.room}: a chunk behind the last one"
        self.last_sent = state_indices is not None
        chunk = Send(self.sent, self.sent + num_kv_tokens, len(kv_indices), self.last_sent)
        self.sent = chunk.end
        BOOK.sent_at[self.room] = time.monotonic()
        BOOK.sends.setdefault(self.room, []).append(chunk)
        BOOK.order.append(self.room)

    def failure_exception(self) -> None:
        """What SGLang asks of a failed sender."""
        raise RuntimeError(f"the peer of room {self.room} failed")

    def abort(self) -> None:
        """The request is given up."""
        if self.concluded is None:
            self.concluded = KVPoll.Failed

    def clear(self) -> None:
        """The request is done with."""
        self.cleared = True


def scripted_kv_class(_backend: Any, kind: Any) -> Any:
    """Stands for `get_kv_class` of SGLang."""
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import KVClassType

    return {
        KVClassType.KVARGS: KVArgs,
        KVClassType.MANAGER: ScriptedManager,
        KVClassType.SENDER: ScriptedSender,
    }[kind]
