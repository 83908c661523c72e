"""The one way from the outside into the native host: what came is seen at the beginning of a host call.

Rule: a host call acts on what `see` has put in place, and on nothing that came later. So the leader can tell
the other ranks, before each call, exactly what the call will see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aioprefill.native.fact_codec import fact_of, input_of
from aioprefill.native.facts import (
    LocalFact,
    OutputsFact,
    StagedFact,
    StageFact,
    SwappedFact,
    TransferFact,
    UnstageFact,
    decode_facts,
    decode_local,
    encode_facts,
    encode_local,
)
from aioprefill.native.frontend import Frontend, Input
from aioprefill.native.rank_facts import RankFacts
from aioprefill.native.staging import Staging
from aioprefill.transfer.port import KVTransfer, TransferEvent


class Outside:
    """Gathers facts on the leader (or the only rank), and takes them on followers and in replays."""

    def __init__(self, frontend: Frontend, transfer: KVTransfer | None, staging: Staging) -> None:
        self._frontend = frontend
        self._transfer = transfer
        self._staging = staging
        staging.on_read = self.know
        self._wake: Callable[[], None] = lambda: None
        self._events: list[TransferEvent] = []
        self._swapped: SwappedFact | None = None
        self._ranks: RankFacts | None = None
        """Leader of several ranks."""
        self._report: Callable[[bytes], None] | None = None
        """Follower."""
        self.results: Callable[[], list[OutputsFact]] = list
        """Where the host is recorded: what forwards have sampled, each once."""
        self.on_results: Callable[[OutputsFact], None] = lambda _: None
        """Replays: what a forward has sampled."""

    def lead(self, size: int) -> None:
        """Put together what `size` ranks know."""
        self._ranks = RankFacts(size) if size > 1 else None

    def follow(self, report: Callable[[bytes], None]) -> None:
        """Tell `report` what this rank knows; see what `give` brings."""
        self._report = report

    def alone(self) -> None:
        """The group is over: from now on what this rank sees itself is all there is."""
        self._ranks = self._report = None

    def start(self, wake: Callable[[], None]) -> None:
        """Begin, on the running loop; `wake` tells of transfers."""
        self._wake = wake
        if self._transfer is not None:
            alone = self._report is None and self._ranks is None
            self._transfer.start(wake if alone else self._tell_of_transfers)

    # What ranks know

    def _tell_of_transfers(self) -> None:
        for fact in self._transfer_facts():
            self.know(fact)

    def _transfer_facts(self) -> list[TransferFact]:
        events = self._transfer.poll() if self._transfer is not None else ()
        return [TransferFact(event.room, event.state, event.reason, event.released) for event in events]

    def know(self, fact: LocalFact) -> None:
        """This rank knows something that the others cannot."""
        if self._report is not None:
            self._report(encode_local(fact))
        else:
            self._heard(0, fact)

    def take_report(self, rank: int, report: bytes) -> None:
        """Another rank knows something. Raises `RankError` when the ranks cannot go on."""
        self._heard(rank, decode_local(report))

    def _heard(self, rank: int, fact: LocalFact) -> None:
        known = fact if self._ranks is None else self._ranks.take(rank, fact)
        match known:
            case StagedFact():
                self._staging.read_everywhere(known)
            case TransferFact():
                self._frontend.coming.append(known)
                self._wake()
            case SwappedFact():
                self._frontend.post(known)

    # What a host call sees

    def see(self) -> list[Input]:
        """Put in place what has come; what that was. Nothing on followers."""
        if self._report is not None:
            return []
        coming = self._frontend.coming
        if self._ranks is None:
            coming.extend(self._transfer_facts())
        seen: list[Input] = []
        while coming:
            item = coming.popleft()
            if self._place(item):
                seen.append(item)
        return seen

    def take(self) -> bytes:
        """See, and say it in a form for other ranks."""
        return encode_facts([*map(fact_of, self.see()), *self.results()])

    def give(self, data: bytes) -> None:
        """Put in place what the leader has seen."""
        for fact in decode_facts(data):
            if isinstance(fact, OutputsFact):
                self.on_results(fact)
            else:
                self._place(input_of(fact))

    def _place(self, item: Input) -> bool:
        """False: it concerns nobody any more."""
        match item:
            case TransferFact():
                self._events.append(TransferEvent(item.room, item.state, item.reason, item.released))
            case SwappedFact():
                self._swapped = item
            case StageFact():
                self._staging.read(item)
            case UnstageFact():
                self._staging.drop(item.number)
            case _:
                return self._frontend.place(item)
        return True

    def events(self) -> Sequence[TransferEvent]:
        """Transfer events that were seen and not taken, in order."""
        events, self._events = self._events, []
        return events

    def swapped(self) -> SwappedFact | None:
        """The device's answer to the swap under way, once it was seen; takes it."""
        swapped, self._swapped = self._swapped, None
        return swapped
