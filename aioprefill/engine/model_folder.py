"""A model folder that somebody else made: is it complete, and what is its fingerprint?

Its files are not ours to write to, so what is known of them is kept in the cache.
"""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

import msgspec

from aioprefill.engine.model_manifest import (
    Manifest,
    Report,
    find_difference,
    read_manifest,
    record_files,
    write_manifest,
)
from aioprefill.errors import ModelError

_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that transformers loads from a folder.

    Raises `ModelError` when there are none, or one of them is missing, cut short or damaged in its header.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder {folder}: there is no config.json in it")
    names = _named_weights(folder)
    for name in names:
        check_safetensors(folder / name)
    return names


def _named_weights(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except msgspec.MsgspecError as err:
            raise ModelError(f"model folder {folder}: {index.name} is damaged: {err}") from err
        if outside := [name for name in names if Path(name).name != name]:
            raise ModelError(f"model folder {folder}: {index.name} names files elsewhere: {outside[0]!r}")
        return sorted(names)
    pickles = any(folder.glob("*.bin"))
    hint = " (pickled .bin weights are not loaded: convert them to safetensors)" if pickles else ""
    raise ModelError(f"model folder {folder}: there is no model.safetensors in it{hint}")


def check_safetensors(path: Path) -> None:
    """Raise `ModelError` when a safetensors file is missing, or its length is not what its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
            header = file.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    except OSError as err:
        raise ModelError(f"model file {path}: {err.strerror}") from err
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        ends = (msgspec.json.decode(entry, type=_Tensor).data_offsets[1] for entry in entries.values())
        expected = 8 + len(header) + max(ends, default=0)
    except msgspec.MsgspecError as err:
        message = f"model file {path}: not a safetensors file, or cut short: fetch it again"
        raise ModelError(message) from err
    if size != expected:
        raise ModelError(
            f"model file {path} has {size:,} bytes but its header says {expected:,}: fetch it again"
        )


def record_folder(folder: Path, cache: Path, report: Report, *, verify: bool = False) -> Manifest:
    """The hashes of a folder's weights: from `cache` while sizes and times are the same, else read anew.

    Raises `ModelError` for a folder that is not complete; with `verify` also when contents changed
    although sizes and times did not.
    """
    folder = folder.resolve()
    names = weight_files(folder)
    key = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    label = re.sub(r"[^\w.-]", "_", folder.name)[:64]
    path = cache / "manifests" / f"{label}-{key}.json"
    known = read_manifest(path)
    if known is not None and {record.name for record in known.files} != set(names):
        known = None
    unchanged = known is not None and find_difference(folder, known) is None
    if known is not None and unchanged and not verify:
        return known
    fresh = read_hashes(folder, names, report)
    if known is not None and unchanged and fresh.files != known.files:
        message = f"model folder {folder} is damaged: contents changed, sizes and times did not"
        raise ModelError(f"{message}: fetch it again")
    keep_manifest(path, fresh)
    return fresh


def read_hashes(folder: Path, names: list[str], report: Report) -> Manifest:
    """`record_files` for files that are not ours. Raises `ModelError` when one cannot be read."""
    try:
        return record_files(folder, names, str(folder), report)
    except OSError as err:
        raise ModelError(f"model file {err.filename or folder} cannot be read: {err.strerror}") from err


def keep_manifest(path: Path, manifest: Manifest) -> None:
    """Remember where that is possible: a read-only or full cache only makes the next start slower."""
    try:
        write_manifest(path, manifest)
    except OSError:
        return
