"""The shape of one KV page. Pure; engine, hosts, transfer and decode worker all speak of pages in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aioprefill.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What two processes must share before pages may travel between them.

    A page holds the keys and values of `page_size` consecutive tokens, all layers, as one contiguous
    block of shape (layers, 2, page_size, kv_heads, head_dim). One page is one transfer descriptor.
    With tensor-parallel ranks each rank's pages hold its own heads only: `shard` of `shards`.
    """

    fingerprint: str
    """Names the weights: equal fingerprints mean equal model files."""
    layers: int
    kv_heads: int
    """Heads in a page of this layout: with shards, one rank's."""
    head_dim: int
    page_size: int
    """Tokens per page."""
    dtype: str
    """One of `DTYPE_BYTES`."""
    shards: int = 1
    """Ranks that a page's heads are divided over."""
    shard: int = 0
    """Which part this is: heads [shard * kv_heads, (shard + 1) * kv_heads) of the whole page."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layers * 2 * self.page_size * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def whole(self) -> KVLayout:
        """The layout of pages that hold the heads of all shards; `self` when there is but one."""
        if self.shards == 1:
            return self
        return replace(self, kv_heads=self.kv_heads * self.shards, shards=1, shard=0)

    def shard_of(self, shard: int, shards: int) -> KVLayout:
        """Part `shard` of a whole page divided over `shards` ranks.

        Raises `ConfigError` when the heads cannot be divided so.
        """
        if shards < 1 or self.kv_heads % shards:
            raise ConfigError(f"tp {shards}: {self.kv_heads} KV heads cannot be divided over {shards} ranks")
        assert self.shards == 1 and 0 <= shard < shards
        return replace(self, kv_heads=self.kv_heads // shards, shards=shards, shard=shard)

    def difference(self, other: KVLayout) -> str | None:
        """The first field in which `other` differs, as text for an error message; None when equal."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {theirs!r}, expected {mine!r}"
        return None
