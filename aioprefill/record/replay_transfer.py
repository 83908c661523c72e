"""A KV transfer that does nothing: what rooms come to are facts of the recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aioprefill.engine.port import SampledToken
from aioprefill.transfer.port import Handoff, TransferEvent


class ReplayTransfer:
    """Implements `KVTransfer`."""

    def start(self, wake: Callable[[], None]) -> None:
        """See `KVTransfer.start`."""

    def open(self, handoff: Handoff) -> None:
        """See `KVTransfer.open`."""

    def send(self, room: str, pages: Sequence[int], first_page: int, final: SampledToken | None) -> None:
        """See `KVTransfer.send`."""

    def abandon(self, room: str, reason: str) -> None:
        """See `KVTransfer.abandon`."""

    def poll(self) -> Sequence[TransferEvent]:
        """See `KVTransfer.poll`. Never any."""
        return ()

    async def aclose(self) -> None:
        """See `KVTransfer.aclose`."""
