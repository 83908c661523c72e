"""Errors as messages and back. Pure."""

from __future__ import annotations

from aioprefill.errors import AioprefillError, DeviceError, InvalidRequest, PeerError, QueueFull
from aioprefill.wire.messages import Failed

# classes that are a message and nothing else
_PLAIN = {
    kind.code: kind for kind in AioprefillError.__subclasses__() if kind.__init__ is AioprefillError.__init__
}


def failed_from(error: AioprefillError, request_id: str | None = None, *, op_id: str | None = None) -> Failed:
    """The message that carries an error, about a request or a control command."""
    subject, message = None, str(error)
    if isinstance(error, InvalidRequest):
        subject, message = error.field, error.message
    elif isinstance(error, PeerError):
        subject, message = error.peer, error.message
    elif isinstance(error, DeviceError):
        subject, message = error.name, message.removeprefix(f"{error.name}: ")
    retry_after_s = error.retry_after_s if isinstance(error, QueueFull) else None
    return Failed(error.code, message, request_id, field=subject, retry_after_s=retry_after_s, op_id=op_id)


def error_from(failed: Failed) -> AioprefillError:
    """The error that a message carries, as its class; an unknown code gives the base class."""
    subject = failed.field or "unknown"
    if failed.code == InvalidRequest.code:
        return InvalidRequest(subject, failed.message)
    if failed.code == QueueFull.code:
        return QueueFull(failed.message, retry_after_s=failed.retry_after_s or 1.0)
    if failed.code == PeerError.code:
        return PeerError(subject, failed.message)
    if failed.code == DeviceError.code:
        # whether the device is lost is the server's business; the caller can only submit elsewhere
        return DeviceError(subject, failed.message, sticky=False)
    plain = _PLAIN.get(failed.code)
    return plain(failed.message) if plain else AioprefillError(f"{failed.code}: {failed.message}")
