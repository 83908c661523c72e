"""The cache of models that aioprefill made itself: one folder each, complete or absent.

Rules:
- A folder is built beside its place, hashed, written through to the disk, and renamed into it. Its manifest
  is written last, so what a killed process leaves is never taken for a model.
- Whoever builds holds the lock of that folder; the lock goes with the process, also when it is killed.
- A folder that differs from its manifest is built again.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aioprefill.engine.model_folder import keep_manifest
from aioprefill.engine.model_manifest import (
    MANIFEST,
    Manifest,
    Report,
    find_damage,
    find_difference,
    read_manifest,
    record_files,
    write_manifest,
)
from aioprefill.errors import ModelError

LOCK_WAIT_S = 1800.0
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def cache_root(cache_dir: Path | None) -> Path:
    """The cache folder: as given, else $XDG_CACHE_HOME/aioprefill, else ~/.cache/aioprefill."""
    if cache_dir is not None:
        return cache_dir.expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "aioprefill"


def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder that need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a folder of the cache is made."""

    build: Callable[[Path], Path]
    """Given an empty folder to work in, makes the model's folder below it and returns that."""
    source: str
    """Where the model comes from, in words."""
    need_bytes: int
    """Disk space that building takes at most."""
    free_bytes: Callable[[Path], int] = free_bytes


class CachedModel:
    """One folder of the cache, there or not yet there."""

    def __init__(self, root: Path, key: str) -> None:
        self.key = key
        self.path = root / "models" / key
        self._manifest_path = self.path / MANIFEST
        self._lock_path = self.path.with_name(f"{key}.lock")

    def look(self, report: Report, *, verify: bool = False) -> Manifest | None:
        """The manifest if the folder is there and sound, else None.

        Contents are hashed only when a size or time changed, or on `verify`.
        """
        manifest = read_manifest(self._manifest_path)
        if manifest is None:
            return None
        if not verify and find_difference(self.path, manifest) is None:
            return manifest
        try:
            fresh = record_files(self.path, [r.name for r in manifest.files], manifest.source, report)
        except OSError:
            return None
        if find_damage(fresh, manifest) is not None:
            return None
        keep_manifest(self._manifest_path, fresh)
        return fresh

    def ensure(self, recipe: Recipe, report: Report, *, verify: bool = False) -> Manifest:
        """The manifest of a sound folder, which is built if there is none.

        Blocks for as long as another process builds the same. Raises `ModelError`.
        """
        manifest = self.look(report, verify=verify)
        if manifest is not None:
            return manifest
        with self._locked(report, self._too_full(recipe.need_bytes)):
            # somebody else may have built it while this process waited
            return self.look(report, verify=verify) or self._build(recipe, report)

    def remove(self, report: Report) -> None:
        """Delete the folder. Raises `ModelError`."""
        with self._locked(report, "no disk space"):
            self._clear()

    def _build(self, recipe: Recipe, report: Report) -> Manifest:
        self._clear()
        free = recipe.free_bytes(self.path.parent)
        if free < recipe.need_bytes:
            raise ModelError(f"{self._too_full(recipe.need_bytes)} ({free / 1e6:,.0f} MB are free)")
        work = Path(tempfile.mkdtemp(dir=self.path.parent, prefix=f"{self.key}.tmp-"))
        try:
            made = recipe.build(work)
            names = [path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()]
            manifest = record_files(made, names, recipe.source, report)
            for path in (*made.rglob("*"), made):
                _sync(path)
            write_manifest(made / MANIFEST, manifest)
            made.rename(self.path)
            _sync(self.path.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return manifest

    def _clear(self) -> None:
        """Delete an unsound folder and what killed builds left. Only with the lock held."""
        if self.path.exists():
            # renamed first, so that no half-deleted folder stands in its place
            self.path.rename(self.path.with_name(f"{self.key}.tmp-old-{os.getpid()}"))
        for stale in self.path.parent.glob(f"{self.key}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)

    @contextmanager
    def _locked(self, report: Report, too_full: str) -> Iterator[None]:
        """Hold the folder's lock; errors of the file system become `ModelError`."""
        from filelock import FileLock, Timeout

        lock = FileLock(self._lock_path)
        try:
            self._lock_path.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                report("waiting for another process that prepares the same model", None)
                lock.acquire(timeout=LOCK_WAIT_S)
            try:
                yield
            finally:
                lock.release()
        except Timeout as err:
            message = f"model cache: {self._lock_path} is held by another process for {LOCK_WAIT_S:.0f} s"
            raise ModelError(message) from err
        except OSError as err:
            if err.errno in _DISK_FULL:
                raise ModelError(too_full) from err
            raise ModelError(f"model cache {self.path.parent}: {err}") from err

    def _too_full(self, need_bytes: int) -> str:
        return (
            f"no disk space for model {self.key}: about {need_bytes / 1e6:,.0f} MB are needed in "
            f"{self.path.parent}; free some, or choose another folder with --cache-dir"
        )


def _sync(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
