"""`PoolInfo` on the wire from and to what it describes: an agent's pool and the layout of its pages."""

from __future__ import annotations

from aioprefill.errors import ConfigError
from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.agent_events import RemotePool
from aioprefill.transfer.pool_view import PoolView
from aioprefill.wire.messages import PoolInfo


def check_fits(pool: PoolView, layout: KVLayout) -> None:
    """Raise `ConfigError` when a pool's pages are not of the layout's size."""
    if pool.page_bytes != layout.page_bytes:
        raise ConfigError(
            f"the KV pool has pages of {pool.page_bytes} bytes, but its layout has {layout.page_bytes}"
        )


def pool_info(agent: str, metadata: bytes, pool: PoolView, layout: KVLayout) -> PoolInfo:
    """The message that tells another process of a pool."""
    return PoolInfo(
        agent=agent,
        metadata=metadata,
        base_address=pool.base_address,
        device_id=pool.device_id,
        memory=pool.memory,
        num_pages=pool.num_pages,
        page_bytes=pool.page_bytes,
        fingerprint=layout.fingerprint,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        dtype=layout.dtype,
        shards=layout.shards,
        shard=layout.shard,
    )


def remote_pool(ours: KVLayout, info: PoolInfo) -> RemotePool:
    """Where the pages that we write are in the other process's pool, which fits ours (`misfit`).

    Of each whole page a rank writes its own part: shard r the bytes from r * ours.page_bytes on. The other
    process puts the heads in order when it has all parts.
    """
    base = info.base_address + ours.shard * ours.page_bytes
    stride = None if ours.shards == 1 else info.page_bytes
    pool = PoolView(base, info.num_pages, ours.page_bytes, info.memory, info.device_id, stride)
    return RemotePool(info.agent, info.metadata, pool)


def misfit(ours: KVLayout, info: PoolInfo) -> str | None:
    """In what the other pool's pages differ from ours, as text; None when pages may travel.

    The other pool's are whole pages, whatever ours are: only such can be put together from shards.
    """
    if info.shards != 1:
        return f"shards is {info.shards}, expected 1: shards can be assembled in whole pages only"
    whole = ours.whole()
    theirs = KVLayout(
        fingerprint=info.fingerprint,
        layers=info.layers,
        kv_heads=info.kv_heads,
        head_dim=info.head_dim,
        page_size=info.page_size,
        dtype=info.dtype,
    )
    difference = whole.difference(theirs)
    if difference is None and info.page_bytes != whole.page_bytes:
        difference = f"page_bytes is {info.page_bytes}, expected {whole.page_bytes}"
    return difference
