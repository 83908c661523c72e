"""Takes down what a scheduler decides: the call order with its facts, and what every call came to.

A segment that has grown to half of its bound is continued in a new file as soon as the host is at rest; the
host forgets then what a fresh one would not know, so that every such file can be replayed by itself. When
rest does not come before the bound, the new file begins amid work, and can only be read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioprefill.config import ServeConfig
from aioprefill.config_option import Checked, own_options
from aioprefill.native.host import NativeHost
from aioprefill.record.format import CLOSED, CONTINUED, Entry, Header, encode_entry, encode_header
from aioprefill.record.segment_writer import SegmentWriter
from aioprefill.tp_agree import CallToken
from aioprefill.version import __version__

BLOCK_BYTES = 1 << 16
FLUSH_S = 0.2
"""Seconds that a call may wait to be given to the file: what a killed process loses."""

END_BYTES = 64
"""Room for the end of a segment."""

HeaderOf = Callable[[int, int, bool], Header]
"""(segment, first call, amid work) -> the header of a segment that begins now."""


class Recorder:
    """Implements `Recording` over FILE and FILE.1, which have at most `limit_bytes` together.

    Used on the loop's thread. Raises what `SegmentWriter` does. A single call that is larger than half of the
    limit exceeds it.
    """

    def __init__(self, path: Path, limit_bytes: int, header: HeaderOf) -> None:
        self._bound = limit_bytes // 2
        self._header = header
        self._writer = SegmentWriter(path)
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._segment = -1
        self._bytes = self._calls = 0
        """Of the present segment."""
        self._closed = False
        self._begin(0, amid_work=False)

    def __repr__(self) -> str:
        return f"<Recorder segment={self._segment} calls={self._calls} bytes={self._bytes} {self._writer!r}>"

    @property
    def wants_restart(self) -> bool:
        """See `Recording.wants_restart`."""
        return self._bytes > self._bound // 2 and not self._writer.failed

    def called(self, token: CallToken, description: bytes) -> None:
        """See `Recording.called`."""
        if self._writer.failed or self._closed:
            return
        entry = encode_entry(Entry(token, description))
        if self._bytes + len(entry) + END_BYTES > self._bound and self._calls:
            self._continue(token.number, amid_work=True)
        self._add(entry)
        self._calls += 1
        if token.kind == "restart" and not description:
            self._continue(token.number + 1, amid_work=False)
        elif len(self._buffer) >= BLOCK_BYTES:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def close(self) -> None:
        """See `Recording.close`. Waits at most a few seconds for the disk."""
        if self._closed:
            return
        self._closed = True
        self._add(encode_entry(Entry(None, CLOSED.encode())))
        self._flush()
        self._writer.close()

    def _continue(self, first_call: int, *, amid_work: bool) -> None:
        self._add(encode_entry(Entry(None, CONTINUED.encode())))
        self._flush()
        self._writer.begin_segment()
        self._begin(first_call, amid_work=amid_work)

    def _begin(self, first_call: int, *, amid_work: bool) -> None:
        self._segment += 1
        self._bytes = self._calls = 0
        self._add(encode_header(self._header(self._segment, first_call, amid_work)))
        self._flush()  # the next call may be long in coming, and a file without a header says nothing

    def _add(self, data: bytes) -> None:
        self._buffer += data
        self._bytes += len(data)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._buffer:
            data, self._buffer = bytes(self._buffer), bytearray()
            self._writer.write(data)


def make_recording(config: ServeConfig, host: NativeHost, *, tp: int = 1) -> Recorder | None:
    """The recording that the settings ask for, of a host that has not run yet, on the leader of `tp` ranks.

    On the running loop, whose clock the calls have. Give it to `PrefillScheduler`, which closes it. Raises
    `ConfigError` when its file cannot be made.
    """
    path = config.recording.record
    if path is None:
        return None
    return Recorder(path, config.recording.record_size, header_of(host, config.scheduler, tp=tp))


def header_of(host: NativeHost, scheduler: Checked, *, tp: int = 1) -> HeaderOf:
    """Makes the headers of a recording of `host` that begins now. On the running loop."""
    origin_s, origin_unix_s = asyncio.get_running_loop().time(), time.time()

    def header(segment: int, first_call: int, amid_work: bool) -> Header:
        return Header(
            software=__version__,
            segment=segment,
            first_call=first_call,
            amid_work=amid_work,
            origin_s=origin_s,
            origin_unix_s=origin_unix_s,
            tp=tp,
            spec=host.engine.spec,
            num_pages=host.engine.num_pages,
            transfer=host.transfer is not None,
            native=_settings(host.config),
            scheduler=_settings(scheduler),
            arrivals=host.intake.arrivals,
            weight_version=host.intake.weight_version,
        )

    return header


def _settings(config: Checked) -> dict[str, Any]:
    """Settings by field name, as plain values."""
    values = {name: getattr(config, name) for name, _ in own_options(config)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
