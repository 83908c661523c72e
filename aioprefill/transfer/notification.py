"""What a NIXL notification says: which write of which hand-off is complete."""

from __future__ import annotations

import msgspec

from aioprefill.errors import WireError

Notification = tuple[str, int, int]
"""Epoch of the sender's connection, ticket, number of the write."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Notification)


def encode_notification(epoch: str, ticket: int, number: int) -> bytes:
    """The payload of one write."""
    return _encoder.encode((epoch, ticket, number))


def decode_notification(payload: bytes) -> Notification:
    """Raises `WireError` for a payload that is not one of ours."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as err:
        raise WireError(f"malformed NIXL notification: {err}") from err
