"""A .gguf file of the user's: is it one, and what is its hash?"""

from __future__ import annotations

import hashlib
from pathlib import Path

from aioprefill.engine.model_folder import keep_manifest, read_hashes
from aioprefill.engine.model_manifest import Report, find_difference, read_manifest
from aioprefill.errors import ModelError


def gguf_hash(path: Path, cache: Path, report: Report, *, verify: bool = False) -> str:
    """SHA-256 of a GGUF file, remembered in `cache` while its size and time are the same.

    Raises `ModelError` for a file of another format.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as err:
        raise ModelError(f"model file {path}: {err.strerror}") from err
    if magic != b"GGUF":
        raise ModelError(f"model file {path}: not a GGUF file (give a folder for safetensors)")
    key = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    remembered = cache / "manifests" / f"{path.name[:64]}-{key}.json"
    known = read_manifest(remembered)
    if known is None or verify or find_difference(path.parent, known) is not None:
        known = read_hashes(path.parent, [path.name], report)
        keep_manifest(remembered, known)
    return known.files[0].sha256
