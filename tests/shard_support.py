"""A book of a decode process and the ranks of prefill servers that send it rooms in shards."""

from __future__ import annotations

from aioprefill.engine.port import SampledToken
from aioprefill.errors import InvalidRequest
from aioprefill.kv_layout import KVLayout
from aioprefill.sampling_params import SamplingParams
from aioprefill.transfer.port import Handoff
from aioprefill.transfer.receiver_book import ReceiverBook
from aioprefill.wire.messages import Arrived, Bootstrap, Cancel, Commit, Refused, Reserved, unpack_ids

WHOLE = KVLayout("w", layers=1, kv_heads=4, head_dim=1, page_size=16, dtype="float32")
PAGES = 8


class Worker:
    """A handler that checks what it hears: pages go out and come back once, one room of a name at a time."""

    def __init__(self) -> None:
        self.free = list(range(PAGES))
        self.out: dict[str, list[int]] = {}
        self.open: set[str] = set()
        """Rooms that were reserved, and neither arrived nor lost."""
        self.heard: list[tuple[object, ...]] = []
        self.asked: list[str] = []
        self.refusing: str | None = None
        self.book: ReceiverBook | None = None

    def reserve(self, handoff: Handoff) -> list[int] | None:
        self.asked.append(handoff.room)
        assert handoff.room not in self.out, "its name's predecessor still has pages"
        if self.refusing is not None:
            raise InvalidRequest("prompt_tokens", self.refusing)
        if len(self.free) < handoff.pages:
            return None
        self.out[handoff.room] = pages = [self.free.pop(0) for _ in range(handoff.pages)]
        self.open.add(handoff.room)
        return list(pages)

    def arrived(
        self, room: str, pages: list[int], first: SampledToken, handoff: Handoff, shards: int = 1
    ) -> None:
        assert room in self.open
        self.open.discard(room)
        self.heard.append(("arrived", room, pages, first.token_id, shards))
        self._take_back(room, pages)

    def lost(self, room: str, reason: str) -> None:
        self.open.discard(room)
        self.heard.append(("lost", room, reason))

    def release_pages(self, room: str, pages: list[int]) -> None:
        assert room not in self.open, "released before it was lost"
        self.heard.append(("released", room))
        self._take_back(room, pages)

    def _take_back(self, room: str, pages: list[int]) -> None:
        assert self.out.pop(room) == pages
        self.free += pages
        assert self.book is not None
        self.book.retry_reservations(0.0)  # from inside a callback, as the real worker does

    def kinds(self, room: str) -> list[object]:
        return [entry[0] for entry in self.heard if entry[1] == room]


class Bench:
    """A book, its worker, the replies by sender, and the settlements that it asked for."""

    def __init__(self) -> None:
        self.worker = Worker()
        self.replies: list[tuple[str, Reserved | Refused | Arrived]] = []
        self.settling: list[tuple[str, int]] = []
        self.now = 0.0
        self.book = ReceiverBook(
            WHOLE,
            PAGES,
            self.worker,
            lambda sender, message: self.replies.append((sender, message)),
            lambda sender, ticket: self.settling.append((sender, ticket)),
            room_timeout_s=10.0,
        )
        self.worker.book = self.book

    def announce(
        self,
        rank: int,
        room: str = "r",
        ticket: int = 1,
        *,
        group: str = "g",
        pages: int = 2,
        **other: object,
    ) -> Bootstrap:
        """Rank `rank` of a server announces its shard, by default of two."""
        shards = other.get("shards", 2)
        fields: dict[str, object] = {
            "room": room, "prompt_tokens": pages * 16, "pages": pages, "sampling": SamplingParams(),
            "max_new_tokens": 8, "ignore_eos": False, "fingerprint": "w",
            "page_bytes": WHOLE.page_bytes // shards, "ticket": ticket, "shards": shards, "shard": rank,
            "group": group,
        }  # fmt: skip
        message = Bootstrap(**{**fields, **other})
        self.book.bootstrap(f"{group}{rank}", message, self.now)
        return message

    def finish(
        self, rank: int, room: str = "r", ticket: int = 1, *, group: str = "g", token: int = 7
    ) -> None:
        """One write of a shard, and its Commit."""
        self.book.commit(f"{group}{rank}", Commit(room, 1, token, -0.5, ticket=ticket), self.now)
        self.book.written(f"{group}{rank}", ticket, 0, self.now)

    def cancel(
        self, rank: int, room: str = "r", ticket: int = 1, *, group: str = "g", quiet: bool = True
    ) -> None:
        """A shard is given up by its sender."""
        self.book.cancel(f"{group}{rank}", Cancel(room, "no more", quiet, ticket), self.now)

    def settle(self) -> None:
        """What was sent before has come in."""
        settling, self.settling = self.settling, []
        for sender, ticket in settling:
            self.book.settled(sender, ticket, self.now)

    def said(self, sender: str) -> list[str]:
        """Kinds of the answers to a sender."""
        return [type(message).__name__ for to, message in self.replies if to == sender]

    def refusal(self, sender: str) -> str:
        """Why a sender's last room was refused."""
        message = [message for to, message in self.replies if to == sender][-1]
        assert isinstance(message, Refused)
        return message.message

    def pages_of(self, sender: str) -> list[int]:
        """Pages that a sender was given last."""
        given = [m for to, m in self.replies if to == sender and isinstance(m, Reserved)]
        pages: list[int] = unpack_ids(given[-1].pages).tolist()
        return pages

    def end(self) -> None:
        """Everything ends: nothing may be left anywhere."""
        self.book.close("the end", self.now)
        assert sorted(self.worker.free) == list(range(PAGES)) and not self.worker.out and not self.worker.open
        assert not self.book.expecting and len(self.book) == 0 and len(self.book._shards) == 0
