"""What a `Bootstrap` says, and whether a decode worker can take such a room at all. Pure."""

from __future__ import annotations

from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.part import WHOLE, Part
from aioprefill.transfer.port import Handoff
from aioprefill.wire.messages import Bootstrap


def handoff_of(sender: str, message: Bootstrap) -> Handoff:
    """The hand-off that a sender announces."""
    return Handoff(
        room=message.room,
        peer=sender,
        prompt_tokens=message.prompt_tokens,
        pages=message.pages,
        sampling=message.sampling,
        max_new_tokens=message.max_new_tokens,
        ignore_eos=message.ignore_eos,
        grammar=message.grammar,
    )


def part_of(message: Bootstrap) -> Part:
    """Which part of the room the sender hands over."""
    return WHOLE if message.shards == 1 else Part(message.shards, message.shard, message.group)


def misfit(layout: KVLayout, num_pages: int, message: Bootstrap) -> str | None:
    """Why such a room can never be received into `num_pages` whole pages of `layout`; None: it can."""
    if message.fingerprint != layout.fingerprint:
        return f"fingerprint is {message.fingerprint!r}, expected {layout.fingerprint!r}: other weights"
    if message.shards != 1 and (problem := _part_misfit(layout, message)) is not None:
        return problem
    expected = layout.page_bytes // message.shards
    if message.page_bytes != expected:
        return f"page_bytes is {message.page_bytes}, expected {expected}"
    if message.prompt_tokens < 1 or message.pages != layout.pages_for(message.prompt_tokens):
        return f"{message.prompt_tokens} tokens do not fill {message.pages} pages of {layout.page_size}"
    if message.pages > num_pages:
        return f"needs {message.pages} KV pages, the decode worker has {num_pages}"
    return None


def _part_misfit(layout: KVLayout, message: Bootstrap) -> str | None:
    if message.shards < 1 or layout.kv_heads % message.shards:
        return f"shards is {message.shards}, which does not divide kv_heads, {layout.kv_heads} here"
    if not 0 <= message.shard < message.shards:
        return f"shard is {message.shard}, expected one of {message.shards}"
    if not message.group:
        return "group is empty: shards of one room are known by it"
    return None
