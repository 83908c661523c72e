"""What ranks' pages are, where they land in whole pages, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from nixl_fake import FakeNixl

from aioprefill.errors import ConfigError
from aioprefill.kv_layout import KVLayout
from aioprefill.sampling_params import SamplingParams
from aioprefill.transfer.in_process import InProcessTransfer
from aioprefill.transfer.nixl_agent import NixlAgent
from aioprefill.transfer.nixl_receiver import NixlReceiver
from aioprefill.transfer.nixl_sender import NixlTransfer
from aioprefill.transfer.pool_info import misfit, pool_info, remote_pool
from aioprefill.transfer.pool_view import PoolView
from aioprefill.transfer.port import Handoff
from aioprefill.transfer.room_book import RoomBook
from aioprefill.transfer.room_events import PeerReady
from aioprefill.wire.messages import Bootstrap, Hello, PoolInfo, decode, encode

WHOLE = KVLayout("w", layers=2, kv_heads=4, head_dim=8, page_size=16, dtype="float32")
POOL = PoolView(1 << 20, 3, WHOLE.page_bytes)


def test_a_layout_is_divided_over_ranks_and_made_whole_again() -> None:
    """The bytes of a page are divided; a layout without shards is itself; what differs is named."""
    shards = [WHOLE.shard_of(shard, 2) for shard in range(2)]
    assert [(part.kv_heads, part.shards, part.shard) for part in shards] == [(2, 2, 0), (2, 2, 1)]
    assert all(part.whole() == WHOLE and 2 * part.page_bytes == WHOLE.page_bytes for part in shards)
    assert WHOLE.whole() is WHOLE and WHOLE.shard_of(0, 1) == WHOLE
    assert shards[0].difference(shards[0]) is None and shards[0].pages_for(17) == 2
    assert shards[0].difference(shards[1]) == "shard is 1, expected 0"
    assert WHOLE.difference(shards[0]) == "kv_heads is 2, expected 4"


@pytest.mark.parametrize("shards", [0, -1, 3, 8])
def test_heads_that_cannot_be_divided_are_refused(shards: int) -> None:
    """With both numbers."""
    with pytest.raises(ConfigError, match=f"tp {shards}: 4 KV heads cannot be divided over {shards} ranks"):
        WHOLE.shard_of(0, shards)


def test_shards_fill_whole_pages_without_gaps_or_overlaps() -> None:
    """The parts that four ranks write to are the pool, each byte once."""
    info = pool_info("d", b"md", POOL, WHOLE)
    seen = np.zeros(POOL.total_bytes, dtype=np.int64)
    for shard in range(4):
        pool = remote_pool(WHOLE.shard_of(shard, 4), info).pool
        assert pool.num_pages == 3 and pool.step == WHOLE.page_bytes
        for page, (address, length, device) in enumerate(pool.descriptors().tolist()):
            assert address == POOL.base_address + page * WHOLE.page_bytes + shard * length and device == 0
            seen[address - POOL.base_address :][:length] += 1
    assert (seen == 1).all()
    assert remote_pool(WHOLE, info).pool == POOL and POOL.step == POOL.page_bytes


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("kv_heads", 2, "kv_heads is 2, expected 4"),
        ("page_size", 32, "page_size is 32, expected 16"),
        ("dtype", "float16", "dtype is 'float16', expected 'float32'"),
        ("shards", 2, "shards is 2, expected 1: shards can be assembled in whole pages only"),
        ("page_bytes", 9, f"page_bytes is 9, expected {WHOLE.page_bytes}"),
    ],
)
def test_a_pool_that_shards_do_not_fit_is_refused_by_the_name_of_the_field(
    field: str, value: object, why: str
) -> None:
    """Compared with the whole page, whatever part of it is ours."""
    info = pool_info("d", b"md", POOL, WHOLE)
    ours = WHOLE.shard_of(1, 2)
    assert misfit(ours, info) is None and misfit(WHOLE, info) is None
    assert misfit(ours, msgspec.structs.replace(info, **{field: value})) == why


def test_whole_rooms_say_nothing_of_shards_and_both_ways_of_saying_so_are_understood() -> None:
    """So that software that knows no shards is spoken to as before."""
    info = pool_info("d", b"md", POOL, WHOLE)
    bootstrap = Bootstrap("r", 16, 1, SamplingParams(), 8, False, "w", WHOLE.page_bytes, 5)
    for message in (info, bootstrap):
        said = msgspec.msgpack.decode(encode(message))
        assert not {"shard", "shards", "group"} & set(said)
        assert decode(msgspec.msgpack.encode({**said, "shards": 1, "shard": 0})) == message
    part = pool_info("p", b"md", POOL, WHOLE.shard_of(1, 2))
    back = decode(encode(part))
    assert isinstance(back, PoolInfo) and (back.shards, back.shard, back.kv_heads) == (2, 1, 2)


class Heard:
    """A carrier that writes down what is told."""

    def __init__(self) -> None:
        self.told: list[Bootstrap] = []

    def tell(self, peer: str, message: Bootstrap) -> None:
        self.told.append(message)


def test_the_ranks_of_a_server_announce_the_same_hand_offs_under_the_same_tickets() -> None:
    """Another server's are others; without shards they are random, and no group is named."""
    handoff = Handoff("r", "peer", 16, 1, SamplingParams(), 8)
    said: list[Bootstrap] = []
    for layout, group in [
        (WHOLE.shard_of(0, 2), "g"),
        (WHOLE.shard_of(1, 2), "g"),
        (WHOLE.shard_of(0, 2), "h"),
        (WHOLE, "g"),
    ]:
        heard = Heard()
        book = RoomBook(heard, layout, lambda: None, group=group)
        for room in ("r", "s"):
            book.handle(book.open(replace(handoff, room=room)), PeerReady())
        assert heard.told[1].ticket == heard.told[0].ticket + 1
        said.append(heard.told[0])
    assert said[0].ticket == said[1].ticket != said[2].ticket
    assert [(m.shards, m.shard, m.group) for m in said] == [(2, 0, "g"), (2, 1, "g"), (2, 0, "h"), (1, 0, "")]
    assert [m.page_bytes for m in said] == [WHOLE.page_bytes // 2] * 3 + [WHOLE.page_bytes]


@pytest.mark.asyncio
async def test_transfers_refuse_settings_that_shards_cannot_have() -> None:
    """A shard without a group, a decode worker with shards, shards within one process."""
    part = WHOLE.shard_of(0, 2)
    pool = PoolView(1 << 20, 3, part.page_bytes)
    agent = NixlAgent("a", pool, library=FakeNixl())
    with pytest.raises(ConfigError, match="of 2 ranks needs a group"):
        NixlTransfer(pool, part, agent=agent)
    with pytest.raises(ConfigError, match="whole pages, not those of 2 shards"):
        NixlReceiver(pool, part, None, lambda identity, message: None, agent=agent)
    with pytest.raises(ConfigError, match="cannot carry shards"):
        InProcessTransfer(part)


class Handler:
    """A decode worker with four pages."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def reserve(self, handoff: Handoff) -> list[int] | None:
        return [0, 1]

    def lost(self, room: str, reason: str) -> None:
        self.heard.append(f"{room} lost: {reason}")

    def release_pages(self, room: str, pages: list[int]) -> None:
        self.heard.append(f"{room} released")


@pytest.mark.asyncio
async def test_S1_a_decode_worker_that_stops_takes_the_last_shards_of_rooms_that_have_pages() -> None:
    """A shard of a room that began is reserved, one of a new room is refused with the reason."""
    sent: list[tuple[bytes, object]] = []
    agent = NixlAgent("d", POOL, library=FakeNixl())
    handler = Handler()
    receiver = NixlReceiver(POOL, WHOLE, handler, lambda i, m: sent.append((i, m)), agent=agent)
    receiver.start()

    def announce(shard: int, room: str, ticket: int) -> str:
        part = WHOLE.shard_of(shard, 2)
        message = Bootstrap(
            room, 32, 2, SamplingParams(), 8, False, "w", part.page_bytes, ticket, None, 2, shard, "g"
        )
        receiver.on_message(b"%d" % shard, message)
        return type(sent[-1][1]).__name__

    for shard in range(2):
        receiver.on_message(b"%d" % shard, Hello("prefill", f"epoch {shard}"))
    assert announce(0, "old", 1) == "Reserved"
    receiver.refuse_new("the decode worker stops")
    assert announce(1, "old", 1) == "Reserved"
    assert announce(1, "new", 2) == "Refused"
    await receiver.aclose()
    assert handler.heard == ["old lost: shard 0 of 2: the decode worker shuts down", "old released"]
