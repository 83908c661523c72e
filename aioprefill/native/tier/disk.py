"""The tier's directory: one safetensors file per page, named by the page's digest. All I/O on one thread.

Rules:
- A file appears under its name complete, by a rename. It is not synced: after a power cut it may be
  damaged, and then its checksum says so.
- The checksum covers the name too, so a file under another page's name is damaged.
- One process owns the directory, by a lock. Files that are not named like pages are left alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import filelock
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from aioprefill.engine.port import PageCopy
from aioprefill.native.tier.keys import DIGEST_BYTES
from aioprefill.native.tier.store import Blocks, ReadOutcome, WriteOutcome

logger = logging.getLogger(__name__)

T = TypeVar("T")
CLOSE_TIMEOUT_S = 5.0
_SUFFIX = ".safetensors"
_PAGE_FILE = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}{re.escape(_SUFFIX)}")
_LOCK = ".aioprefill-tier.lock"
_TEMPORARY = ".aioprefill-tier.tmp"


def encode(name: str, block: Blocks) -> bytes:
    """The file of a page."""
    data: bytes = save({"kv": block, "checksum": _checksum(name, block)})
    return data


def decode(name: str, data: bytes, page_bytes: int) -> Blocks:
    """The page of a file, shape (page_bytes,). Raises `ValueError` when it is damaged."""
    try:
        tensors = load(data)
        block: Blocks = tensors["kv"]
        checksum = tensors["checksum"]
    except (SafetensorError, KeyError) as err:
        raise ValueError(f"it is no page file: {err!r}") from err
    if block.dtype != np.uint8 or block.shape != (page_bytes,):
        raise ValueError(f"it holds {block.dtype}{list(block.shape)} instead of {page_bytes:,} bytes")
    if not np.array_equal(checksum, _checksum(name, block)):
        raise ValueError("its checksum is wrong")
    return block


def _checksum(name: str, block: Blocks) -> Blocks:
    digest = hashlib.sha256(name.encode())  # processors have instructions for this one
    digest.update(np.ascontiguousarray(block).data)
    return np.frombuffer(digest.digest(), dtype=np.uint8)


class IoThread:
    """Runs jobs in order on one daemon thread: a disk that hangs keeps no process from ending."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Queue `work`; never blocks."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        if self._closed:
            future.set_exception(OSError("the storage tier is closed"))
        else:
            self._jobs.put(partial(self._do, work, future))
        return future

    @staticmethod
    def _do(work: Callable[[], T], future: concurrent.futures.Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as err:
            future.set_exception(err)
        else:
            future.set_result(result)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds pages
        self.ended.set_result(None)

    def close(self) -> None:
        """End behind what is queued; does not wait."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)

    def join(self) -> None:
        """Wait for the end, once `ended` is done: a moment."""
        self._thread.join(1.0)


class DiskStore:
    """Implements `TierStore` in a directory, which is made when it is missing."""

    def __init__(self, folder: Path, page_bytes: int) -> None:
        self.folder = folder
        self._page_bytes = page_bytes
        self._stored_bytes = len(encode("0" * 2 * DIGEST_BYTES, np.zeros(page_bytes, dtype=np.uint8)))
        # made and let go on the I/O thread
        self._lock = filelock.FileLock(folder / _LOCK, blocking=False, thread_local=False)
        self._thread = IoThread("aioprefill-tier")

    def __repr__(self) -> str:
        return f"<DiskStore {self.folder}>"

    @property
    def stored_bytes(self) -> int:
        """See `TierStore.stored_bytes`."""
        return self._stored_bytes

    def open(self) -> concurrent.futures.Future[list[tuple[str, int]]]:
        """See `TierStore.open`. Only names, sizes and times are looked at."""
        return self._thread.submit(self._open)

    def write(
        self, remove: Sequence[str], names: Sequence[str], copy: PageCopy | None
    ) -> concurrent.futures.Future[WriteOutcome]:
        """See `TierStore.write`."""
        return self._thread.submit(partial(self._write, tuple(remove), tuple(names), copy))

    def read(self, names: Sequence[str]) -> concurrent.futures.Future[ReadOutcome]:
        """See `TierStore.read`."""
        return self._thread.submit(partial(self._read, tuple(names)))

    async def aclose(self) -> None:
        """See `TierStore.aclose`."""
        self._thread.submit(partial(self._lock.release, force=True))
        self._thread.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.shield(asyncio.wrap_future(self._thread.ended))
        except TimeoutError:
            logger.error("%s did not answer within %.0f s: what was queued is lost", self, CLOSE_TIMEOUT_S)
        else:
            self._thread.join()

    def _path(self, name: str) -> Path:
        return self.folder / (name + _SUFFIX)

    def _open(self) -> list[tuple[str, int]]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise OSError(f"{self.folder} belongs to another running process") from None
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if _PAGE_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime_ns, entry.name.removesuffix(_SUFFIX), stat.st_size))
        found.sort()
        return [(name, size) for _, name, size in found]

    def _write(self, remove: Sequence[str], names: Sequence[str], copy: PageCopy | None) -> WriteOutcome:
        written = 0
        try:
            for name in remove:
                self._path(name).unlink(missing_ok=True)
            blocks = copy.blocks() if copy is not None else ()
            for name, block in zip(names, blocks, strict=True):
                self._write_page(name, block)
                written += 1
        except OSError as err:
            return WriteOutcome(written, err.strerror or str(err))
        return WriteOutcome(written)

    def _write_page(self, name: str, block: Blocks) -> None:
        temporary = self.folder / _TEMPORARY
        try:
            temporary.write_bytes(encode(name, block))
            temporary.replace(self._path(name))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _read(self, names: Sequence[str]) -> ReadOutcome:
        blocks = np.empty((len(names), self._page_bytes), dtype=np.uint8)
        for number, name in enumerate(names):
            try:
                blocks[number] = self._read_page(name)
            except OSError as err:
                return ReadOutcome(blocks[:number], f"{name[:12]}…: {err.strerror or err}")
            except ValueError as err:
                with contextlib.suppress(OSError):
                    self._path(name).unlink()
                reason = f"{name[:12]}… is damaged and was removed: {err}"
                return ReadOutcome(blocks[:number], reason, damaged=True)
        for name in reversed(names):  # a prefix is worth more than what follows it: it stays longer
            with contextlib.suppress(OSError):
                os.utime(self._path(name))
        return ReadOutcome(blocks)

    def _read_page(self, name: str) -> Blocks:
        path = self._path(name)
        size = path.stat().st_size
        if size != self._stored_bytes:
            raise ValueError(f"it has {size:,} bytes instead of {self._stored_bytes:,}")
        return decode(name, path.read_bytes(), self._page_bytes)
