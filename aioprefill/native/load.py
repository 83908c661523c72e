"""From settings to a loaded engine and the view of its pool that transfers need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from aioprefill.config import EngineConfig, NativeConfig
from aioprefill.engine.grammar import Grammars
from aioprefill.engine.kv_pool import KVPool
from aioprefill.engine.model_files import resolve_model
from aioprefill.engine.shard import EngineShard
from aioprefill.engine.transformers_engine import TransformersEngine
from aioprefill.errors import ModelError
from aioprefill.kv_layout import DTYPE_BYTES
from aioprefill.native.host import NativeHost
from aioprefill.transfer.pool_view import PoolView
from aioprefill.transfer.port import KVTransfer


def load_engine(config: EngineConfig, shard: EngineShard | None = None) -> TransformersEngine:
    """Resolve and load the model. Blocks for seconds, or minutes when it is fetched.

    `shard`: this process's part of it, None for all of it; see `EngineShard`.

    Raises what `TransformersEngine.load` does.
    """
    model = resolve_model(config.model, cache_dir=config.cache_dir)
    return TransformersEngine.load(
        model.path,
        name=model.name,
        fingerprint=model.fingerprint,
        dtype=own_dtype(model.path) if config.dtype == "auto" else config.dtype,
        device=config.device,
        page_size=config.page_size,
        kv_memory_bytes=config.kv_memory,
        threads=config.threads,
        shard=shard,
    )


def load_host(
    engine: EngineConfig | None = None,
    native: NativeConfig | None = None,
    *,
    transfer: Callable[[TransformersEngine], KVTransfer] | None = None,
) -> NativeHost:
    """A native host for `PrefillScheduler`, with the model loaded: the shortest way to embed one.

    `transfer` makes the KV transfer for the loaded engine; without one requests get their first token and
    nothing is handed off. Blocks and raises as `load_engine` does.
    """
    config = engine or EngineConfig()
    loaded = load_engine(config)
    grammars = load_grammars(loaded, config)
    return NativeHost(loaded, transfer(loaded) if transfer is not None else None, native, grammars=grammars)


def load_grammars(engine: TransformersEngine, config: EngineConfig) -> Grammars | None:
    """Structured output for a loaded engine; None where it has no model folder. Loads nothing yet."""
    if engine.folder is None:
        return None
    return Grammars.for_model(
        engine.folder,
        vocab_size=engine.spec.vocab_size,
        eos_token_ids=engine.spec.eos_token_ids,
        timeout_s=config.grammar_timeout_s,
    )


def own_dtype(folder: Path) -> str:
    """The number format that a checkpoint says it has; float32 when it does not say."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError) as err:
        raise ModelError(f"model file {folder / 'config.json'} cannot be read: {err}") from err
    dtype = config.get("dtype", config.get("torch_dtype", "float32"))
    return dtype if isinstance(dtype, str) and dtype in DTYPE_BYTES else "float32"


def pool_view(pool: KVPool) -> PoolView:
    """Where the pool lies."""
    cuda = pool.device.type == "cuda"
    return PoolView(
        base_address=pool.base_address,
        num_pages=pool.num_pages,
        page_bytes=pool.page_bytes,
        memory="VRAM" if cuda else "DRAM",
        device_id=pool.device.index or 0 if cuda else 0,
    )
