"""Files of recordings: what is damaged, foreign or newer, who may read them, how large they grow."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from record_support import read, recorded, served

from aioprefill.config import NativeConfig, RecordConfig, ServeConfig
from aioprefill.config_option import SettingsConflict
from aioprefill.config_sources import resolve_settings
from aioprefill.errors import ConfigError, RecordingError
from aioprefill.native.host import NativeHost
from aioprefill.record.format import FORMAT, MAGIC, Entry, encode_entry, framed
from aioprefill.record.recorder import Recorder, make_recording
from aioprefill.record.segment_writer import SegmentWriter, older
from aioprefill.testing.clock import run_virtual
from aioprefill.testing.engine import FakeEngine
from aioprefill.tp_agree import CallToken


def record(path: Path, requests: int = 3, limit: int = 1 << 20, tokens: int = 20) -> None:
    """Record a few requests, one after the other."""

    async def main() -> None:
        async with recorded(path, FakeEngine(duration_s=1.0), limit=limit) as scheduler:
            for number in range(requests):
                await served(scheduler, (f"r{number}", [number] * tokens))

    run_virtual(main())


# reading


def test_a_file_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    """As a process leaves it that was killed: whole calls count, and the end is no error."""
    whole, cut = tmp_path / "whole.rec", tmp_path / "cut.rec"
    record(whole, requests=1)
    header, calls, end = read(whole)
    data = whole.read_bytes()
    assert end == "closed" and len(calls) > 5
    known = []
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        try:
            found_header, found, found_end = read(cut)
        except RecordingError as err:
            assert "nothing was recorded" in str(err) and not known
            continue
        assert found_header == header and found == calls[: len(found)] and found_end == "cut off"
        known.append(len(found))
    assert known == sorted(known) and set(known) == set(range(len(calls) + 1))


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """Nothing damaged passes for a recording, or for the end of one."""
    whole, bad = tmp_path / "whole.rec", tmp_path / "bad.rec"
    record(whole, requests=1)
    data = bytearray(whole.read_bytes())
    for at in range(len(data)):
        data[at] ^= 0x10
        bad.write_bytes(data)
        data[at] ^= 0x10
        with pytest.raises(RecordingError, match=r"bad\.rec (is damaged: .* at byte|is no recording)"):
            read(bad)


def test_files_that_are_no_recordings_are_refused_by_name(tmp_path: Path) -> None:
    """Empty, missing, a folder, foreign, of a newer format, without sense."""
    path = tmp_path / "a.rec"
    with pytest.raises(RecordingError, match=r"a\.rec: No such file"):
        read(path)
    with pytest.raises(RecordingError, match="Is a directory"):
        read(tmp_path)
    newer = msgspec.msgpack.encode({"format": FORMAT + 1, "software": "9.1", "new": [1]})
    for content, words in (
        (b"", "is empty: nothing was recorded"),
        (MAGIC[:5], "ends before its first call"),
        (b"PK\x03\x04 something else", "is no recording of aioprefill"),
        (MAGIC + framed(newer), f"has format {FORMAT + 1}, .* up to {FORMAT}: use the version .* 9.1"),
        (MAGIC + framed(b"\x81\xa1a\x01"), "is damaged: its header makes no sense"),
    ):
        path.write_bytes(content)
        with pytest.raises(RecordingError, match=f"a.rec {words}"):
            read(path)


def test_calls_that_are_missing_or_none_are_named(tmp_path: Path) -> None:
    """The number that is due, and how much before it can be read."""
    path = tmp_path / "a.rec"
    record(path, requests=1)
    data, (_, calls, _) = path.read_bytes(), read(path)
    end = encode_entry(Entry(None, b"closed"))
    assert data.endswith(end)
    due = len(calls)
    for extra, words in (
        (encode_entry(Entry(CallToken(due + 1, "ingest", 1.0), b"")), f"call {due} is missing, {due + 1}"),
        (framed(b"\x92\x01\x02"), f"what stands for call {due} is none"),
    ):
        path.write_bytes(data.removesuffix(end) + extra)
        with pytest.raises(RecordingError, match=f"{words}.*; the {due} calls before can be read"):
            read(path)


# writing


def test_only_its_owner_reads_a_recording(tmp_path: Path) -> None:
    """Prompts are in it; also in the next segment."""
    path = tmp_path / "a.rec"
    before = os.umask(0)
    try:
        record(path, requests=20, limit=20_000)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path, older(path))] == [0o600, 0o600]


def test_a_recording_is_bounded(tmp_path: Path) -> None:
    """FILE and FILE.1 together, however long it goes on; nothing else is left."""
    path = tmp_path / "a.rec"
    record(path, requests=100, limit=20_000)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.rec", "a.rec.1"]
    assert path.stat().st_size + older(path).stat().st_size <= 20_000
    assert read(path)[0].segment > 5


def test_a_call_larger_than_a_segment_is_recorded_whole(tmp_path: Path) -> None:
    """It alone exceeds the bound."""
    path = tmp_path / "a.rec"
    record(path, requests=2, limit=8_000, tokens=5_000)
    _, calls, end = read(path)
    assert calls and end == "closed" and older(path).exists()


def test_an_earlier_run_is_kept_once(tmp_path: Path) -> None:
    """A server that starts again must not lose what the one before has recorded."""
    path = tmp_path / "a.rec"
    record(path, requests=1)
    first = path.read_bytes()
    record(path, requests=2)
    assert older(path).read_bytes() == first
    record(path, requests=3)
    assert older(path).read_bytes() != first


@pytest.mark.parametrize("which", ["a.rec", "a.rec.1"])
def test_what_is_no_recording_is_not_replaced(tmp_path: Path, which: str) -> None:
    """A path by mistake costs nobody a file."""
    (tmp_path / which).write_text("the only copy")
    with pytest.raises(ConfigError, match=rf"record: .*{which} is there and is no recording"):
        SegmentWriter(tmp_path / "a.rec")
    assert (tmp_path / which).read_text() == "the only copy"


def test_a_file_that_cannot_be_made_is_an_error_at_start(tmp_path: Path) -> None:
    """With the path and the reason."""
    with pytest.raises(ConfigError, match=r"record: .*/missing/a\.rec cannot be written: No such file"):
        SegmentWriter(tmp_path / "missing" / "a.rec")
    with pytest.raises(ConfigError, match="is no recording"):
        SegmentWriter(tmp_path)


def test_two_processes_do_not_share_a_file(tmp_path: Path) -> None:
    """The second one is told; after the first one's end the file is free."""
    first = SegmentWriter(tmp_path / "a.rec")
    with pytest.raises(ConfigError, match="another process records to"):
        SegmentWriter(tmp_path / "a.rec")
    first.close()
    SegmentWriter(tmp_path / "a.rec").close()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """As on a full disk: this process may make no file larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def until_written(recorder: Recorder, *, flush: bool = True) -> None:
    """Wait for the writing thread."""
    if flush:
        recorder._flush()
    while recorder._writer.waiting and recorder._writer._thread.is_alive():
        os.sched_yield()


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning; requests are served as before; what was written can be read."""
    path = tmp_path / "a.rec"

    async def main() -> None:
        engine = FakeEngine(num_pages=1 << 16, duration_s=1.0)
        async with recorded(path, engine, NativeConfig(chunk_tokens=100_000), limit=1 << 30) as scheduler:
            recorder = scheduler._recording
            for number in range(8):
                await served(scheduler, (f"r{number}", [1] * 100_000))
            until_written(recorder)
            assert recorder._writer.failed
            await served(scheduler, ("after", [1] * 20))
            recorder._bytes = recorder._bound  # large enough to want one
            assert recorder._writer.waiting == 0 and not recorder.wants_restart

    with file_size_limit(1 << 20):
        run_virtual(main())
    assert warnings_of(caplog) == [f"the recording {path} has ended: File too large"]
    _, calls, end = read(path)
    assert calls and end == "cut off" and path.stat().st_size == 1 << 20


def test_a_folder_that_is_gone_ends_the_recording_at_the_next_segment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The present file is open still; a new one cannot be made."""
    folder = tmp_path / "folder"
    folder.mkdir()

    async def main() -> None:
        async with recorded(folder / "a.rec", FakeEngine(duration_s=1.0), limit=20_000) as scheduler:
            shutil.rmtree(folder)
            for number in range(30):
                await served(scheduler, (f"r{number}", [number] * 20))

    run_virtual(main())
    assert warnings_of(caplog) == [f"the recording {folder / 'a.rec'} has ended: No such file or directory"]


def test_a_file_that_was_moved_away_stays_and_the_next_one_is_made(tmp_path: Path) -> None:
    """So a recording can be kept while the server goes on."""
    path, kept = tmp_path / "a.rec", tmp_path / "kept.rec"

    async def main() -> None:
        async with recorded(path, FakeEngine(duration_s=1.0), limit=20_000) as scheduler:
            path.rename(kept)
            while scheduler._recording._segment == 0:
                await served(scheduler, ("r", [1] * 20))
            await served(scheduler, ("s", [1] * 20))

    run_virtual(main())
    assert read(kept)[2] == "continued" and read(path)[0].segment == 1 and not older(path).exists()


def test_a_new_part_can_be_read_before_its_first_call(tmp_path: Path) -> None:
    """It may be long until something comes to a host at rest."""
    path = tmp_path / "a.rec"

    async def main() -> None:
        async with recorded(path, FakeEngine(duration_s=1.0), limit=20_000) as scheduler:
            recorder = scheduler._recording
            until_written(recorder, flush=False)
            assert read(path)[0].segment == 0
            for length in range(20, 1000):  # of any length, for the new part begins behind any of the calls
                await served(scheduler, ("r", [1] * length))
                if recorder._segment > 0 and recorder._calls == 0:
                    break
            until_written(recorder, flush=False)
            header, calls, end = read(path)
            assert (header.segment, calls, end) == (recorder._segment, [], "cut off")

    run_virtual(main())


def test_a_disk_that_hangs_ends_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for it is bounded, and so is the wait at the end."""
    hangs = threading.Event()
    real = SegmentWriter._carry_out
    monkeypatch.setattr(SegmentWriter, "_carry_out", lambda *args: (hangs.wait(), real(*args)))
    monkeypatch.setattr("aioprefill.record.segment_writer.MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr("aioprefill.record.segment_writer.CLOSE_TIMEOUT_S", 0.01)
    writer = SegmentWriter(tmp_path / "a.rec")
    writer.write(b"x" * 1001)
    assert not writer.failed
    writer.write(b"x")
    assert writer.failed
    writer.close()
    assert [text.partition(": ")[2] for text in warnings_of(caplog)] == [
        "the disk does not keep up, 0 MiB wait for it"
    ]
    hangs.set()
    writer._thread.join(10)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of recordings."""
    return [entry.getMessage() for entry in caplog.records if "recording" in entry.getMessage()]


# settings


def test_the_settings_are_checked_together() -> None:
    """A tier and a recording exclude each other, with the names of both."""
    both = {"native": NativeConfig(tier_dir=Path("tier")), "recording": RecordConfig(record=Path("a.rec"))}
    with pytest.raises(
        SettingsConflict, match="record and tier-dir: a recording cannot be replayed"
    ) as caught:
        ServeConfig(**both)
    assert caught.value.names == ("record", "tier-dir")
    settings = resolve_settings(
        "serve", flags={"record": ("--record", "a.rec")}, env={"AIOPREFILL_TIER_DIR": "t"}
    )
    with pytest.raises(ConfigError, match="record from flag --record; tier-dir from env AIOPREFILL_TIER_DIR"):
        settings.build(ServeConfig)


def test_a_recording_is_off_by_default_and_made_as_set(tmp_path: Path) -> None:
    """The path and the size of the settings."""

    async def main() -> None:
        host = NativeHost(FakeEngine())
        assert make_recording(ServeConfig(), host) is None
        config = ServeConfig(recording=RecordConfig(record=tmp_path / "a.rec", record_size="2MiB"))
        recorder = make_recording(config, host, tp=2)
        assert recorder is not None and recorder._bound == 1 << 20
        recorder.close()
        recorder.close()

    run_virtual(main())
    header, calls, end = read(tmp_path / "a.rec")
    assert (header.tp, calls, end) == (2, [], "closed")
