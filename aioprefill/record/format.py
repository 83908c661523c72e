"""How a recording lies in its file. Pure.

A file is the magic line, then frames: a header, one entry per host call, and an end where the recording was
ended in order. A frame is its length, a check of that, a check of the content (little-endian uint32, CRC-32),
and the content, MessagePack. Tokens are as in `tp_agree`, facts within them as in `native.facts`.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

import msgspec

from aioprefill.engine.port import ModelSpec
from aioprefill.tp_agree import CallToken

MAGIC = b"aioprefill recording\n"
FORMAT = 1
"""Raised by a change after which older software would read a recording wrongly."""
FRAME_HEAD = struct.Struct("<III")
MAX_CONTENT = 1 << 30

CLOSED = "closed"
CONTINUED = "continued"
"""The next segment goes on."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment begins with: all that a replay needs beside the calls."""

    format: int = FORMAT
    software: str
    """Version of aioprefill."""
    segment: int
    """0 for the first one of a process."""
    first_call: int
    amid_work: bool
    """Something was live at its beginning, so that it cannot be replayed."""
    origin_s: float
    """Reading of the leader's clock when the recording began, seconds; the same in all segments."""
    origin_unix_s: float
    """Unix time at that moment."""
    tp: int
    """Ranks. The recording is of what all of them decided."""
    spec: ModelSpec
    num_pages: int
    transfer: bool
    """The host had a KV transfer."""
    native: dict[str, Any]
    """`NativeConfig`."""
    scheduler: dict[str, Any]
    """`SchedulerConfig`; for readers, a replay needs none of it."""
    arrivals: int
    """Requests dispatched before."""
    weight_version: int


class Entry(NamedTuple):
    """One host call and what it came to; or the end, which has no token and says how in `description`."""

    token: CallToken | None
    description: bytes


class FormatOnly(msgspec.Struct, frozen=True):
    """What every header has, of whatever format."""

    format: int
    software: str = "?"


_encoder = msgspec.msgpack.Encoder()
_entries = msgspec.msgpack.Decoder(Entry)
_headers = msgspec.msgpack.Decoder(Header)
_formats = msgspec.msgpack.Decoder(FormatOnly)


def framed(content: bytes) -> bytes:
    """A frame with this content."""
    length = len(content)
    return FRAME_HEAD.pack(length, _check_of(length), zlib.crc32(content)) + content


def encode_entry(entry: Entry) -> bytes:
    """The entry's frame."""
    return framed(_encoder.encode(entry))


def encode_header(header: Header) -> bytes:
    """The beginning of a file."""
    return MAGIC + framed(_encoder.encode(header))


def frame_length(head: bytes) -> tuple[int, int]:
    """Length and check of the content behind a frame's head. Raises `ValueError` when the head is damaged."""
    length, check, content_check = FRAME_HEAD.unpack(head)
    if check != _check_of(length) or length > MAX_CONTENT:
        raise ValueError("the length of a frame is damaged")
    return length, content_check


def checked(content: bytes, check: int) -> bytes:
    """The content. Raises `ValueError` when it is damaged."""
    if zlib.crc32(content) != check:
        raise ValueError("the content of a frame is damaged")
    return content


def decode_entry(content: bytes) -> Entry:
    """Raises `msgspec.MsgspecError` for what is no entry."""
    return _entries.decode(content)


def decode_format(content: bytes) -> FormatOnly:
    """Raises `msgspec.MsgspecError` for what is no header."""
    return _formats.decode(content)


def decode_header(content: bytes) -> Header:
    """Raises `msgspec.MsgspecError` for what is no header of this format."""
    return _headers.decode(content)


def _check_of(length: int) -> int:
    return zlib.crc32(length.to_bytes(4, "little"))
