"""What is known of the files of a model: sizes, SHA-256, and when they were last seen so.

Rules:
- Sizes and modification times are compared at every start; contents are hashed again only when one of
  them changed, or on request.
- The fingerprint depends on contents only: equal files in two places have equal fingerprints.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from aioprefill.errors import ModelError

MANIFEST = "manifest.json"
_VERSION = 1

Report = Callable[[str, float | None], None]
"""Progress: (what is being done, fraction done; None where that is unknown)."""

# Keys of config.json that say who wrote it and in what number format, not what the model computes.
_IRRELEVANT = frozenset(
    {"_name_or_path", "_model_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)


def silent(what: str, done: float | None) -> None:
    """A `Report` that reports nothing."""


def last_words(log: Path, mark: str) -> str:
    """What a child process wrote last: the last line that begins with `mark`, or else the last line.

    Raises `OSError` when the words are that the disk is full.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = ([line for line in lines if line.startswith(mark)] or lines or ["it said nothing"])[-1]
    if "No space left on device" in said:
        raise OSError(errno.ENOSPC, said)
    return said


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a model."""

    name: str
    size: int
    """Bytes."""
    sha256: str
    mtime_ns: int
    """Modification time when the contents were last known to have this hash."""


class Manifest(msgspec.Struct, frozen=True):
    """The files of a model."""

    source: str
    """Where they came from, in words."""
    files: tuple[FileRecord, ...]
    version: int = _VERSION

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(record.size for record in self.files)


def hash_file(path: Path, advance: Callable[[int], None] = lambda n: None) -> str:
    """SHA-256 of a file, in hex. `advance` gets the number of bytes read at each step."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(4 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def record_files(folder: Path, names: Iterable[str], source: str, report: Report = silent) -> Manifest:
    """Hash the named files of a folder."""
    paths = [folder / name for name in sorted(names)]
    total = max(1, sum(path.stat().st_size for path in paths))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report("hashing model files", done / total)

    records = []
    for path in paths:
        stat = path.stat()
        sha256 = hash_file(path, advance)
        name = path.relative_to(folder).as_posix()
        records.append(FileRecord(name, stat.st_size, sha256, stat.st_mtime_ns))
    return Manifest(source, tuple(records))


def find_difference(folder: Path, manifest: Manifest) -> str | None:
    """What a look at sizes and times shows to differ from the manifest, in words; None: nothing."""
    for record in manifest.files:
        try:
            stat = (folder / record.name).stat()
        except OSError as err:
            return f"{record.name}: {err.strerror}"
        if stat.st_size != record.size:
            return f"{record.name} has {stat.st_size:,} bytes instead of {record.size:,}"
        if stat.st_mtime_ns != record.mtime_ns:
            return f"{record.name} was touched"
    return None


def find_damage(fresh: Manifest, expected: Manifest) -> str | None:
    """The first file whose contents differ, in words; None when all are as expected."""
    now = {record.name: record.sha256 for record in fresh.files}
    for record in expected.files:
        if now.get(record.name) != record.sha256:
            return f"{record.name} is damaged: its SHA-256 is not the recorded one"
    return None


def read_manifest(path: Path) -> Manifest | None:
    """The manifest in a file; None where there is none that can be read."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None
    return manifest if manifest.version == _VERSION and manifest.files else None


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write atomically: a reader, or a crash, sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def model_fingerprint(folder: Path, manifest: Manifest) -> str:
    """Names what the model computes: config.json, but for notes and number format, and all weights.

    Number format and page size are not part of it; the KV layout has them. Raises `ModelError`.
    """
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, object])
    except OSError as err:
        raise ModelError(f"model folder {folder}: config.json: {err.strerror}") from err
    except msgspec.MsgspecError as err:
        raise ModelError(f"model folder {folder}: config.json is not valid JSON: {err}") from err
    config = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    digest = hashlib.sha256(msgspec.json.encode(config, order="sorted"))
    for record in sorted(manifest.files, key=lambda record: record.name):
        if record.name.endswith(".safetensors"):
            digest.update(f"\n{record.name} {record.sha256}".encode())
    return digest.hexdigest()[:32]
