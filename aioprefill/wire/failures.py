"""Errors as messages and back. Pure."""

from __future__ import annotations

from aioprefill.errors import AioprefillError, DeviceError, InvalidRequest, PeerError, QueueFull
from aioprefill.wire.messages import Failed

# classes that are a message and nothing else
_PLAIN = {
    kind.code: kind for kind in AioprefillError.__subclasses__() if kind.__init__ is AioprefillError.__init__
}


def failed_from(error: AioprefillError, request_id: str | None = None) -> Failed:
    """The message that carries an error."""
    if isinstance(error, InvalidRequest):
        return Failed(error.code, error.message, request_id, field=error.field)
    if isinstance(error, PeerError):
        return Failed(error.code, error.message, request_id, field=error.peer)
    if isinstance(error, DeviceError):
        return Failed(error.code, str(error).removeprefix(f"{error.name}: "), request_id, field=error.name)
    retry_after_s = error.retry_after_s if isinstance(error, QueueFull) else None
    return Failed(error.code, str(error), request_id, retry_after_s=retry_after_s)


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
