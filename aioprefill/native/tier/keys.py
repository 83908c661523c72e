"""Names of prefix pages, by content: a page's digest covers its tokens, all before it, and the model. Pure.

The chain begins with a root that names the weights and the layout of a page; so a page of other weights,
another page size or another number format can never be taken for this one, whatever files lie around.
"""

from __future__ import annotations

import hashlib

from aioprefill.engine.port import PageIds
from aioprefill.kv_layout import KVLayout

DIGEST_BYTES = 32
Evicted = list[tuple[PageIds, bytes]]
"""Runs of pages that one eviction takes, and their digests. What follows a page comes in an earlier run."""
_FORMAT = "aioprefill prefix page 1"


class PageKeys:
    """Digests of chains of pages. `fingerprint` names the weights, as `KVLayout.fingerprint` does."""

    def __init__(self, layout: KVLayout, fingerprint: str, *, token_bytes: int = 4) -> None:
        shape = [f"{name}={getattr(layout, name)}" for name in layout.__slots__ if name != "fingerprint"]
        text = "\n".join((_FORMAT, fingerprint, *shape))
        self.root = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        """What the first page follows."""
        self.page_bytes = layout.page_size * token_bytes
        """Bytes of a page's packed tokens."""

    def next(self, before: bytes, tokens: bytes) -> bytes:
        """Digest of the page with these packed tokens that follows the page with digest `before`."""
        return hashlib.blake2b(tokens, key=before, digest_size=DIGEST_BYTES).digest()

    def chain(self, before: bytes, tokens: bytes) -> bytes:
        """Digests of the pages of `tokens`, one after the other in one string."""
        digests = []
        for at in range(0, len(tokens), self.page_bytes):
            before = self.next(before, tokens[at : at + self.page_bytes])
            digests.append(before)
        return b"".join(digests)


def names(chain: bytes) -> list[str]:
    """The digests of a chain, in hex: the names that pages are stored under."""
    return [chain[at : at + DIGEST_BYTES].hex() for at in range(0, len(chain), DIGEST_BYTES)]
