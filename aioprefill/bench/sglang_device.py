"""What stands for the device and the peers in the benchmark `sglang`: both go by the clock alone.

No thread sets anything, as none does for CUDA events and network cards: a thread of Python would have to
wait for the interpreter lock, and what is measured would depend on who holds it.
"""

from __future__ import annotations

import random
import time
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVManager, BaseKVSender, KVPoll, KVTransferMetric

TRANSFER_S = (0.006, 0.054)
"""Shortest and longest transfer, from the send of its last chunk on."""
SKEW_S = 0.002
"""Most that a forward or a transfer takes longer on one rank than on another."""


def skew_ns(what: str, rank: int, ranks: int) -> int:
    """What this takes longer on this rank: the same in each run, nothing where there is one rank."""
    return int(random.Random(f"{what}, rank {rank}").uniform(0, SKEW_S) * 1e9) if ranks > 1 else 0


class DelayedCopy:
    """A `copy_done` that is set at `due_ns` of the monotonic clock."""

    __slots__ = ("detected_ns", "due_ns", "entered_ns")

    def __init__(self, due_ns: int) -> None:
        self.due_ns = due_ns
        self.entered_ns = 0
        """When its result began to be processed: set by whoever watches."""
        self.detected_ns = 0
        """The first moment, `due_ns` or later, at which the loop was at this result."""

    def record(self, *_: Any) -> None:
        """Nothing to do, as for SGLang's `HostCopyDone`."""

    def query(self) -> bool:
        """Is it set?"""
        return time.monotonic_ns() >= self.due_ns

    def synchronize(self) -> None:
        """Wait until it is set, without the interpreter lock. SGLang does it in every result's processing."""
        while (left_ns := self.due_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)
        if not self.detected_ns:
            entered = self.entered_ns
            self.detected_ns = entered if entered >= self.due_ns else time.monotonic_ns()


class Device:
    """Forwards that take `forward_ms` ± `jitter`, one after the other; the same times in each run.

    Ranks draw the same times. The skew of a rank only puts off the end that it sees, so that they do not
    drift apart: real ranks meet in every layer.
    """

    def __init__(self, forward_ms: float, jitter: float, *, rank: int = 0, ranks: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        self._launched = 0
        self._random = random.Random(1)
        self._forward_ns = forward_ms * 1e6
        self._jitter = jitter
        self._free_ns = 0

    def launch(self) -> DelayedCopy:
        """A forward is queued; its `copy_done`."""
        took_ns = self._forward_ns * self._random.uniform(1 - self._jitter, 1 + self._jitter)
        self._free_ns = max(self._free_ns, time.monotonic_ns()) + int(took_ns)
        self._launched += 1
        return DelayedCopy(self._free_ns + skew_ns(f"forward {self._launched}", self._rank, self._ranks))


class Retirements:
    """When transfers ended and were retired; SGLang makes the senders itself, so they report here."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int, int]] = []
        """(room, success, retired), the latter two in nanoseconds of the monotonic clock."""


RETIREMENTS = Retirements()


class TimedManager(BaseKVManager):  # type: ignore[misc]
    """Stands for a transfer engine; there is none."""

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool | None = False) -> None:
        super().__init__(args, mode, server_args, is_mla_backend)
        self.kv_args = args
        self.ranks = int(server_args.tp_size)
        self.req_to_decode_prefix_len: dict[int, int] = {}

    def register_to_bootstrap(self) -> None:
        """There is no bootstrap server."""


class TimedSender(BaseKVSender):  # type: ignore[misc]
    """One room's sender: its peer is there at once, and has everything some time after the last chunk."""

    def __init__(
        self,
        mgr: TimedManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self._room = bootstrap_room
        self._takes_ns = int(random.Random(bootstrap_room).uniform(*TRANSFER_S) * 1e9)
        self._takes_ns += skew_ns(f"room {bootstrap_room}", mgr.kv_args.engine_rank, mgr.ranks)
        self._success_ns: int | None = None

    def poll(self) -> int:
        """See SGLang's senders."""
        if self._success_ns is None:
            return int(KVPoll.WaitingForInput)
        return int(KVPoll.Success if time.monotonic_ns() >= self._success_ns else KVPoll.Transferring)

    def poll_pp_consensus(self) -> int:
        """One stage only."""
        return self.poll()

    def pop_decode_prefix_len(self) -> int:
        """The decode side has nothing cached."""
        return 0

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """The handshake is over."""

    def mark_prefill_complete(self) -> None:
        """Nobody is told."""

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """As SGLang's fake: an empty last chunk still ends the transfer."""
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: list[Any] | None = None, num_kv_tokens: int | None = None
    ) -> None:
        """SGLang gives state indices with the last chunk only."""
        if state_indices is not None:
            self._success_ns = time.monotonic_ns() + self._takes_ns

    def clear(self) -> None:
        """The request is retired."""
        if self._success_ns is not None:
            RETIREMENTS.done.append((self._room, self._success_ns, time.monotonic_ns()))

    def abort(self) -> None:
        """Nothing is given up here."""

    def failure_exception(self) -> None:
        """What SGLang asks of a failed sender."""
        raise RuntimeError("a transfer failed")

    def get_transfer_metric(self) -> KVTransferMetric:
        """Nothing is measured."""
        return KVTransferMetric()


def timed_kv_class(_backend: Any, kind: Any) -> Any:
    """Stands for `get_kv_class` of SGLang."""
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import KVClassType

    return {
        KVClassType.KVARGS: KVArgs,
        KVClassType.MANAGER: TimedManager,
        KVClassType.SENDER: TimedSender,
    }[kind]
