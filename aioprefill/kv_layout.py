"""The shape of one KV page. Pure; engine, hosts, transfer and decode worker all speak of pages in it."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What two processes must share before pages may travel between them.

    A page holds the keys and values of `page_size` consecutive tokens, all layers, as one contiguous
    block of shape (layers, 2, page_size, kv_heads, head_dim). One page is one transfer descriptor.
    """

    fingerprint: str
    """Names the weights: equal fingerprints mean equal model files."""
    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    """Tokens per page."""
    dtype: str
    """One of `DTYPE_BYTES`."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layers * 2 * self.page_size * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def difference(self, other: KVLayout) -> str | None:
        """The first field in which `other` differs, as text for an error message; None when equal."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {theirs!r}, expected {mine!r}"
        return None
