"""A reader whose room waits for memory at the decode worker is not sent away."""

from __future__ import annotations

import asyncio

from aioprefill.decode.streams import Streams
from aioprefill.sampling_params import SamplingParams
from aioprefill.testing.clock import virtual_time
from aioprefill.testing.engine import fake_spec
from aioprefill.transfer.port import Handoff
from aioprefill.transfer.receiver_book import ReceiverBook
from aioprefill.wire.messages import Bootstrap, Cancel, Failed, Message


class NoMemory:
    """A receiver's handler that has no pages to give."""

    def reserve(self, handoff: Handoff) -> list[int] | None:
        return None

    def lost(self, room: str, reason: str) -> None:
        pass


@virtual_time
async def test_a_room_that_waits_for_pages_keeps_its_reader_beyond_the_patience() -> None:
    """Over 200 s, also behind another room; when its room is cancelled, the reader is told in the end."""
    heard: list[Message] = []
    streams = Streams(lambda reader, message: heard.append(message), lambda room: None, patience_s=60.0)
    layout = fake_spec().layout
    book = ReceiverBook(
        layout,
        64,
        NoMemory(),  # type: ignore[arg-type]
        lambda sender, message: None,
        lambda sender, ticket: None,
        room_timeout_s=60.0,
    )
    streams.is_coming = book.is_queued
    for ticket, room in enumerate(("first", "second")):
        streams.attach(b"reader", room)
        book.bootstrap(
            "prefill",
            Bootstrap(room, 16, 1, SamplingParams(), 4, True, layout.fingerprint, layout.page_bytes, ticket),
            0.0,
        )
    streams.attach(b"reader", "never announced")
    await asyncio.sleep(200.0)
    assert [message.request_id for message in heard if isinstance(message, Failed)] == ["never announced"]
    book.cancel("prefill", Cancel("second", "given up", True, 1), 200.0)
    assert not book.is_queued("second") and book.is_queued("first")
    await asyncio.sleep(60.0)
    assert [message.request_id for message in heard] == ["never announced", "second"]
    streams.close()
