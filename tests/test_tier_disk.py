"""The tier's directory: files, damage, a full, read-only or deleted disk, a second process."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from safetensors.numpy import load

from aioprefill.native.tier.disk import DiskStore, IoThread, decode, encode
from aioprefill.testing.engine import FakePageCopy

PAGE_BYTES = 256
T = TypeVar("T")


def name(number: int) -> str:
    """The name of page `number`."""
    return f"{number:064x}"


def files(folder: Path) -> set[str]:
    """What lies in a folder, but for the lock."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def block(number: int) -> np.ndarray:
    """Its contents."""
    return np.full(PAGE_BYTES, number, dtype=np.uint8)


async def done(future: Any) -> Any:
    """What a store's future gives, within seconds."""
    async with asyncio.timeout(5):
        return await asyncio.wrap_future(future)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[DiskStore]:
    """A store that is open; its thread is gone afterwards."""
    store = DiskStore(folder, PAGE_BYTES)
    await done(store.open())
    yield store
    await store.aclose()
    await store.aclose()
    assert not any(thread.name == "aioprefill-tier" for thread in threading.enumerate())


async def write(store: DiskStore, *numbers: int, remove: tuple[int, ...] = ()) -> Any:
    """Store pages."""
    copy = FakePageCopy(np.stack([block(number) for number in numbers])) if numbers else None
    names = [name(number) for number in numbers]
    return await done(store.write([name(number) for number in remove], names, copy))


def test_a_page_file_is_safetensors_and_any_change_of_it_is_noticed() -> None:
    """Every byte of it is flipped in turn; and it does not pass under another name."""
    data = encode(name(1), block(7))
    assert load(data)["kv"].tolist() == block(7).tolist()
    assert decode(name(1), data, PAGE_BYTES).tolist() == block(7).tolist()
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 0x40
        try:
            found = decode(name(1), bytes(bad), PAGE_BYTES)
        except ValueError:
            continue
        # JSON has spaces and spellings that mean the same; what counts is that no page is wrong
        assert found.tolist() == block(7).tolist(), f"byte {at}"
    for wrong in (data[:-1], data + b"x", b"", encode(name(1), block(7)[:-1])):
        with pytest.raises(ValueError):
            decode(name(1), wrong, PAGE_BYTES)
    with pytest.raises(ValueError, match="checksum"):
        decode(name(2), data, PAGE_BYTES)


@pytest.mark.asyncio
async def test_pages_are_written_read_removed_and_found_again(tmp_path: Path) -> None:
    """A second store finds them, the one used last last; strangers' files stay as they are."""
    folder = tmp_path / "made" / "on the way"
    async with opened(folder) as store:
        (folder / "notes.txt").write_text("mine")
        (folder / (name(9) + ".safetensors")).mkdir()
        assert (await write(store, 1, 2, 3)).written == 3
        assert (await write(store, 4, remove=(2,))).written == 1
        assert (await write(store, remove=(77,))).error is None
        sizes = {path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file()}
        assert sizes == {store.stored_bytes}
        os.utime(folder / (name(1) + ".safetensors"), ns=(1, 1))
        os.utime(folder / (name(3) + ".safetensors"), ns=(2, 2))
        os.utime(folder / (name(4) + ".safetensors"), ns=(3, 3))
        outcome = await done(store.read([name(1)]))
        assert outcome.error is None and outcome.blocks.tolist() == [block(1).tolist()]
    async with opened(folder) as store:
        assert await done(store.open()) == [(name(n), store.stored_bytes) for n in (3, 4, 1)]
    assert (folder / "notes.txt").read_text() == "mine"
    assert not list(folder.glob("*.tmp"))


@pytest.mark.asyncio
async def test_damaged_files_are_removed_and_missing_ones_said(tmp_path: Path) -> None:
    """What was read before them is good."""
    async with opened(tmp_path) as store:
        await write(store, 1, 2, 3)
        path = tmp_path / (name(2) + ".safetensors")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        outcome = await done(store.read([name(1), name(2), name(3)]))
        assert len(outcome.blocks) == 1 and outcome.damaged and "checksum" in (outcome.error or "")
        assert not path.exists()
        outcome = await done(store.read([name(2), name(3)]))
        assert len(outcome.blocks) == 0 and not outcome.damaged and "No such file" in (outcome.error or "")
        (tmp_path / (name(3) + ".safetensors")).write_bytes(b"short")
        outcome = await done(store.read([name(3)]))
        assert outcome.damaged and "5 bytes" in (outcome.error or "")


@pytest.mark.asyncio
async def test_a_deleted_directory_gives_errors_until_it_is_back(tmp_path: Path) -> None:
    """Neither reads nor writes raise."""
    folder = tmp_path / "tier"
    async with opened(folder) as store:
        await write(store, 1)
        shutil.rmtree(folder)
        outcome = await write(store, 2, remove=(1,))
        assert outcome.written == 0 and "No such file" in (outcome.error or "")
        assert "No such file" in ((await done(store.read([name(1)]))).error or "")
        folder.mkdir()
        assert (await write(store, 2)).written == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
async def test_a_disk_that_refuses_leaves_no_half_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The pages before the failure are stored; nothing appears under the failed page's name."""
    async with opened(tmp_path) as store:
        real = Path.write_bytes

        def refuse(path: Path, data: bytes) -> int:
            if b"\x02\x02\x02" in data:
                real(path, data[:100])
                raise OSError(code, os.strerror(code))
            return real(path, data)

        monkeypatch.setattr(Path, "write_bytes", refuse)
        outcome = await write(store, 1, 2, 3)
        assert outcome.written == 1 and outcome.error == os.strerror(code)
        assert files(tmp_path) == {name(1) + ".safetensors"}


@pytest.mark.asyncio
async def test_a_directory_in_use_or_that_is_none_cannot_be_opened(tmp_path: Path) -> None:
    """The reason is said; the owner is not disturbed; it is free when the owner has closed it."""
    async with opened(tmp_path) as store:
        await write(store, 1)
        second = DiskStore(tmp_path, PAGE_BYTES)
        with pytest.raises(OSError, match="another running process"):
            await done(second.open())
        await second.aclose()
        assert len((await done(store.read([name(1)]))).blocks) == 1
    async with opened(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    wrong = DiskStore(tmp_path / "file", PAGE_BYTES)
    with pytest.raises(OSError):
        await done(wrong.open())
    await wrong.aclose()


@pytest.mark.asyncio
async def test_a_store_that_hangs_does_not_hold_up_its_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, and the thread is left behind as a daemon."""
    monkeypatch.setattr("aioprefill.native.tier.disk.CLOSE_TIMEOUT_S", 0.05)
    store = DiskStore(tmp_path, PAGE_BYTES)
    hangs = threading.Event()
    store._thread.submit(hangs.wait)
    await store.aclose()
    assert "did not answer" in caplog.text and store._thread._thread.daemon
    hangs.set()
    await done(store._thread.ended)
    store._thread.join()


@pytest.mark.asyncio
async def test_the_thread_survives_jobs_that_raise_and_refuses_work_once_closed() -> None:
    """Jobs run in order."""
    thread = IoThread("test-tier-io")
    seen: list[int] = []
    first = thread.submit(lambda: seen.append(1))
    with pytest.raises(ZeroDivisionError):
        await done(thread.submit(lambda: 1 / 0))
    assert first.done() and seen == [1]
    thread.close()
    thread.close()
    await done(thread.ended)
    with pytest.raises(OSError, match="closed"):
        await done(thread.submit(lambda: None))
    thread.join()
