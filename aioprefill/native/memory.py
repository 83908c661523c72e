"""Gives requests their KV pages and takes them back: page pool and prefix cache together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from aioprefill.engine.port import PageIds, TokenIds
from aioprefill.native.pages import PagePool
from aioprefill.native.prefix_cache import PrefixCache
from aioprefill.native.request_state import NO_PAGES, Request
from aioprefill.native.tier.keys import Evicted, PageKeys


class KVMemory:
    """The pages of one KV pool."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool) -> None:
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, page_size) if prefix_cache else None
        self.page_size = page_size

    def admit(self, request: Request) -> bool:
        """Give a request pages for its whole prompt, reusing cached ones; False: not enough pages now.

        All at once, so that a prompt under way never waits for memory that another one holds.
        """
        matched = self.cache.match(request.tokens) if self.cache is not None else NO_PAGES
        self.pool.hold(matched)
        missing = -(-request.length // self.page_size) - len(matched)
        if missing > self.pool.available:
            self.pool.drop(matched)
            return False
        if self.cache is not None and missing > self.pool.free:
            self.cache.evict(missing - self.pool.free)
        request.pages = np.concatenate([matched, self.pool.take(missing)])
        request.inserted = len(matched)
        request.cached = request.planned = request.computed = len(matched) * self.page_size
        return True

    def cached_tokens(self, tokens: TokenIds) -> int:
        """Tokens of a prompt that the prefix cache holds now. Changes nothing."""
        return 0 if self.cache is None else self.cache.covered(tokens) * self.page_size

    def keep_prefix(self, request: Request) -> None:
        """Give the full pages that a request has computed so far to the prefix cache."""
        full = request.computed // self.page_size
        if self.cache is None or not request.cacheable or full <= request.inserted:
            return
        own = request.pages[:full]
        path = self.cache.insert(request.tokens, own)
        # from the root on: a flush may have put pages of others where this request has seen its own
        others = path[path != own]
        others = others[~np.isin(others, request.tree_pages)]
        if len(others):
            self.pool.hold(others)
            request.tree_pages = np.concatenate([request.tree_pages, others])
        request.inserted = full

    def release(self, request: Request) -> None:
        """Take back all that a request holds."""
        if len(request.tree_pages):
            self.pool.drop(request.tree_pages)
        self.pool.drop(request.pages[::-1])
        request.pages = request.tree_pages = NO_PAGES

    def save_evicted(self, keys: PageKeys, save: Callable[[Evicted], None]) -> None:
        """See `PrefixCache.save_evicted`."""
        assert self.cache is not None, "there is no prefix cache"
        self.cache.save_evicted(keys, save)

    def restore(self, tokens: TokenIds, start: int, count: int) -> tuple[int, PageIds] | None:
        """Give pages [start, start + count) of a prompt a place in the prefix cache; idle ones go for it.

        Returns how many pages of the prompt the cache has had, and the fresh pages for those from there on:
        the caller must have them filled before the next forward. With fewer than `start` there are none,
        for something is missing between. None: no room now.
        """
        assert self.cache is not None
        matched = self.cache.match(tokens)
        missing = start + count - len(matched)
        if len(matched) < start or missing <= 0:
            return len(matched), NO_PAGES
        self.pool.hold(matched)
        if missing > self.pool.available:
            self.pool.drop(matched)
            return None
        if missing > self.pool.free:
            self.cache.evict(missing - self.pool.free)
        fresh = self.pool.take(missing)
        pages = np.concatenate([matched, fresh])
        self.cache.insert(tokens, pages)
        self.pool.drop(pages[::-1])
        return len(matched), fresh

    def flush(self, live: Iterable[Request] = ()) -> int:
        """Forget every cached prefix, also those whose pages requests still hold; pages that came free.

        Of the `live` requests those that had a part in the cache keep out of it from now on: another one
        may hold some of their pages and not those that would lie above them in the new tree.
        """
        free = self.pool.free
        if self.cache is not None:
            self.cache.forget()
            for request in live:
                request.cacheable = request.cacheable and request.inserted == 0
        return self.pool.free - free

    def restart(self) -> None:
        """As after a start: no prefix is cached. No request may hold a page."""
        self.flush()
        self.pool.restart()

    def check(self) -> None:
        """Assert the invariants of pool and cache."""
        self.pool.check()
        if self.cache is not None:
            self.cache.check()
            assert self.pool.idle <= self.cache.pages
