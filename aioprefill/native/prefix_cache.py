"""Radix prefix cache with LRU eviction, in whole pages. Pure.

An edge of the tree holds the tokens of one or more pages, as packed bytes, so that comparing a whole edge
is one memory comparison. Requests hold the pages they match, from the root down; so the idle pages are
always ends of paths, and trimming leaves from their ends can evict every one of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from aioprefill.engine.port import PageIds, TokenIds
from aioprefill.native.pages import PagePool
from aioprefill.native.request_state import NO_PAGES
from aioprefill.native.tier.keys import DIGEST_BYTES, Evicted, PageKeys

TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class Node:
    """One edge and what lies below it."""

    key: bytes
    """Packed tokens of the edge's pages."""
    pages: PageIds
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    """By the packed tokens of the child's first page."""
    chain: bytes = b""
    """Digests of the pages, where the cache keeps them (see `save_evicted`)."""
    used: int = 0
    """Logical time of the last match or insert through this node."""


class PrefixCache:
    """Finds, keeps and evicts pages by the tokens that lead to them."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_bytes = page_size * TOKEN_BYTES
        self._page_size = page_size
        self._root = Node(b"", NO_PAGES, None)
        self._clock = 0
        self._lru: list[tuple[int, int, Node]] = []
        self._entries = 0
        self._keys: PageKeys | None = None
        self._on_evict: Callable[[Evicted], None] | None = None
        self._evicted: Evicted = []
        self.nodes = 0
        self.pages = 0
        """Pages in the tree."""

    def __repr__(self) -> str:
        return f"<PrefixCache pages={self.pages} nodes={self.nodes}>"

    def save_evicted(self, keys: PageKeys, save: Callable[[Evicted], None]) -> None:
        """Call `save` at the end of each eviction, before anybody can take the pages.

        For an empty tree only: it digests what is added to it.
        """
        assert not self.nodes, "what is in the tree has no digests"
        self._keys, self._on_evict = keys, save
        self._root.chain = keys.root

    def tail(self, tokens: TokenIds) -> tuple[int, bytes]:
        """Pages of the longest cached prefix, as `match` finds it, and the digest of the last one.

        Nothing counts as used. Without `save_evicted` there are no digests.
        """
        key = self._key(tokens, (len(tokens) - 1) // self._page_size)
        node, at, end = self._root, 0, DIGEST_BYTES
        while (child := node.children.get(key[at : at + self._page_bytes])) is not None:
            common = self._common(child.key, key, at)
            node, at, end = child, at + common, common // self._page_bytes * DIGEST_BYTES
            if common < len(child.key):
                break
        return at // self._page_bytes, node.chain[end - DIGEST_BYTES : end]

    def match(self, tokens: TokenIds) -> PageIds:
        """Pages of the longest cached prefix, in whole pages. They are not held yet.

        At least one token is left out, for a forward needs a token to give logits.
        """
        key = self._key(tokens, (len(tokens) - 1) // self._page_size)
        found = [NO_PAGES]
        node, at = self._root, 0
        self._clock += 1
        while (child := node.children.get(key[at : at + self._page_bytes])) is not None:
            common = self._common(child.key, key, at)
            found.append(child.pages[: common // self._page_bytes])
            self._touch(child)
            if common < len(child.key):
                break
            node, at = child, at + common
        return np.concatenate(found)

    def covered(self, tokens: TokenIds) -> int:
        """Pages that `match` would find; unlike it, this is no use of them."""
        key = self._key(tokens, (len(tokens) - 1) // self._page_size)
        node, at = self._root, 0
        while (child := node.children.get(key[at : at + self._page_bytes])) is not None:
            common = self._common(child.key, key, at)
            at += common
            if common < len(child.key):
                break
            node = child
        return at // self._page_bytes

    def insert(self, tokens: TokenIds, pages: PageIds) -> PageIds:
        """Keep the first `len(pages)` pages of `tokens`, which the caller holds.

        Returns the tree's pages for these tokens. Where the tree had a page already it keeps its own;
        the caller must hold those too for as long as it holds the ones below them.
        """
        path = [NO_PAGES]
        key = self._key(tokens, len(pages))
        node, at = self._root, 0
        self._clock += 1
        while at < len(key):
            child = node.children.get(key[at : at + self._page_bytes])
            if child is None:
                path.append(pages[at // self._page_bytes :])
                self._add(node, key[at:], path[-1])
                break
            common = self._common(child.key, key, at)
            if common < len(child.key) and at + common < len(key):
                child = self._split(child, common)
            self._touch(child)
            path.append(child.pages[: common // self._page_bytes])
            node, at = child, at + common
        return np.concatenate(path)

    def evict(self, count: int) -> int:
        """Free up to `count` idle pages, least recently used first; how many."""
        freed = 0
        busy: list[tuple[int, int, Node]] = []
        while freed < count and self._lru:
            entry = heapq.heappop(self._lru)
            node = entry[2]
            if entry[0] != node.used or node.children or not len(node.pages):
                continue  # stale: used since, no leaf any more, or gone
            freed += self._trim(node, count - freed)
            if len(node.pages):
                busy.append(entry)
        for entry in busy:
            heapq.heappush(self._lru, entry)
        if self._on_evict is not None and self._evicted:
            evicted, self._evicted = self._evicted, []
            self._on_evict(evicted)
        return freed

    def clear(self) -> int:
        """Free every idle page; how many."""
        return self.evict(self._pool.num_pages)

    def forget(self) -> None:
        """Drop the whole tree: idle pages become free, held ones when their holders let go."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            self._pool.uncache(node.pages)
            node.pages = NO_PAGES
        self._root.children.clear()
        self._lru.clear()
        self.nodes = self.pages = 0

    # Inside

    def _key(self, tokens: TokenIds, pages: int) -> bytes:
        return tokens[: pages * self._page_size].tobytes()

    def _common(self, edge: bytes, key: bytes, at: int) -> int:
        """Bytes, in whole pages, that `edge` and `key` from `at` share; the first page is known to."""
        if key.startswith(edge, at):
            return len(edge)
        low, high = 1, min(len(edge), len(key) - at) // self._page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            end = middle * self._page_bytes
            if key.startswith(edge[:end], at):
                low = middle
            else:
                high = middle - 1
        return low * self._page_bytes

    def _touch(self, node: Node) -> None:
        node.used = self._clock
        if not node.children:
            self._remember(node)

    def _remember(self, node: Node) -> None:
        """Queue a leaf for eviction; older entries of it become stale."""
        self._entries += 1
        heapq.heappush(self._lru, (node.used, self._entries, node))
        if len(self._lru) > 4 * self.nodes + 64:
            self._lru = [entry for entry in self._lru if entry[0] == entry[2].used and len(entry[2].pages)]
            heapq.heapify(self._lru)

    def _add(self, parent: Node, key: bytes, pages: PageIds) -> None:
        node = Node(key, pages, parent, used=self._clock)
        if self._keys is not None:
            node.chain = self._keys.chain(parent.chain[-DIGEST_BYTES:], key)
        parent.children[key[: self._page_bytes]] = node
        self.nodes += 1
        self.pages += len(pages)
        self._pool.cache(pages)
        self._remember(node)

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after `at` bytes; the upper half, which is new."""
        assert node.parent is not None
        cut = at // self._page_bytes
        upper = Node(node.key[:at], node.pages[:cut], node.parent, used=node.used)
        upper.chain, node.chain = node.chain[: cut * DIGEST_BYTES], node.chain[cut * DIGEST_BYTES :]
        node.parent.children[upper.key[: self._page_bytes]] = upper
        node.key, node.pages, node.parent = node.key[at:], node.pages[cut:], upper
        upper.children[node.key[: self._page_bytes]] = node
        self.nodes += 1
        return upper

    def _trim(self, node: Node, count: int) -> int:
        """Free up to `count` idle pages from the end of a leaf; how many."""
        keep = max(self._pool.held_among(node.pages), len(node.pages) - count)  # the held ones come first
        gone = node.pages[keep:]
        if self._on_evict is not None and len(gone):
            self._evicted.append((gone, node.chain[keep * DIGEST_BYTES :]))
            node.chain = node.chain[: keep * DIGEST_BYTES]
        self._pool.evict(gone[::-1])
        self.pages -= len(gone)
        if keep == 0:
            self._remove(node)
        else:
            node.key, node.pages = node.key[: keep * self._page_bytes], node.pages[:keep]
        return len(gone)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key[: self._page_bytes]]
        node.pages = NO_PAGES
        self.nodes -= 1
        if not node.parent.children and len(node.parent.pages):
            self._remember(node.parent)

    def check(self) -> None:
        """Assert the tree's invariants."""
        pages, nodes, stack = 0, 0, list(self._root.children.values())
        while stack:
            node = stack.pop()
            nodes += 1
            pages += len(node.pages)
            assert len(node.key) == len(node.pages) * self._page_bytes > 0
            assert node.parent is not None
            if self._keys is not None:
                chain = self._keys.chain(node.parent.chain[-DIGEST_BYTES:], node.key)
                assert node.chain == chain, "digests do not fit the tokens"
            assert node.parent.children[node.key[: self._page_bytes]] is node
            held = self._pool.held_among(node.pages)
            assert held == self._pool.held_among(node.pages[:held]), "a held page lies below an idle one"
            for child in node.children.values():
                above = self._pool.held_among(node.pages[-1:])
                assert above or not self._pool.held_among(child.pages), "a held page lies below an idle one"
            stack += node.children.values()
        assert (pages, nodes) == (self.pages, self.nodes)
