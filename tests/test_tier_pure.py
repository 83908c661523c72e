"""The pure parts of the storage tier: names, index, deadlines, and the prefix cache's side of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioprefill.kv_layout import KVLayout
from aioprefill.native.memory import KVMemory
from aioprefill.native.tier.index import TierIndex
from aioprefill.native.tier.keys import DIGEST_BYTES, Evicted, PageKeys, names
from aioprefill.native.tier.prefetch import PrefetchBook

LAYOUT = KVLayout("weights a", layers=1, kv_heads=1, head_dim=1, page_size=4, dtype="float32")
NONE = np.empty(0, dtype=np.uint32)


def tokens(*pages: int, rest: int = 0) -> np.ndarray:
    """A prompt whose pages of four tokens are named by numbers, and `rest` tokens more."""
    whole = np.repeat(np.array(pages, dtype=np.uint32), 4)
    return np.append(whole, np.full(rest, 999, dtype=np.uint32)).astype(np.uint32)


# Keys


def test_a_page_is_named_by_its_tokens_all_before_it_the_weights_and_the_layout() -> None:
    """Any difference gives other names, from the first different page on."""
    keys = PageKeys(LAYOUT, "weights a")
    mine = names(keys.chain(keys.root, tokens(1, 2, 3).tobytes()))
    assert mine == names(keys.chain(keys.root, tokens(1, 2, 3).tobytes()))
    assert len(set(mine)) == 3 and all(len(name) == 2 * DIGEST_BYTES for name in mine)
    other = names(keys.chain(keys.root, tokens(1, 7, 3).tobytes()))
    assert other[0] == mine[0] and other[1] != mine[1] and other[2] != mine[2]
    roots = {keys.root, PageKeys(LAYOUT, "weights b").root}
    for change in ({"page_size": 8}, {"dtype": "bfloat16"}, {"layers": 2}, {"kv_heads": 2}, {"head_dim": 2}):
        fields = {name: getattr(LAYOUT, name) for name in LAYOUT.__slots__}
        roots.add(PageKeys(KVLayout(**{**fields, **change}), "weights a").root)
    assert len(roots) == 7


def test_a_chain_can_be_continued_page_by_page() -> None:
    """`next` gives what `chain` gives."""
    keys = PageKeys(LAYOUT, "w")
    chain = keys.chain(keys.root, tokens(5, 6).tobytes())
    first = keys.next(keys.root, tokens(5).tobytes())
    assert chain == first + keys.next(first, tokens(6).tobytes())
    assert keys.chain(first, tokens(6).tobytes()) == chain[DIGEST_BYTES:]


# Index


def test_the_index_lets_go_of_the_least_recently_used() -> None:
    """Room for three: a touch saves the oldest; a page can be read only once it is written."""
    index = TierIndex(300)
    for name in "abc":
        assert index.begin_write(name, 100) == []
        assert name not in index and index.knows(name)
        index.end_write(name, stored=True)
        assert name in index
    index.touch("a")
    index.touch("unknown")
    assert index.begin_write("d", 100) == ["b"]
    assert index.bytes == 300 and len(index) == 2
    index.end_write("d", stored=False)
    assert index.bytes == 200 and not index.knows("d")
    index.drop("a")
    index.drop("a")
    assert index.bytes == 100 and "pages=1" in repr(index)
    index.check()


def test_the_index_never_promises_more_than_the_limit() -> None:
    """Pages being written cannot be let go of, so a further one is refused."""
    index = TierIndex(250)
    assert index.begin_write("a", 100) == [] and index.begin_write("b", 100) == []
    assert index.room(100) == 0 and index.room(50) == 1
    with pytest.raises(AssertionError, match="no room"):
        index.begin_write("c", 100)
    index.limit_bytes = 150
    assert index.room(50) == 0
    index.limit_bytes = 250
    index.check()
    with pytest.raises(AssertionError, match="written twice"):
        index.begin_write("a", 100)


def test_what_a_scan_finds_is_older_than_what_is_there_and_must_fit() -> None:
    """After a restart with a smaller limit the oldest files go."""
    index = TierIndex(300)
    index.begin_write("new", 100)
    index.end_write("new", stored=True)
    assert index.load([("x", 100), ("y", 100), ("new", 100), ("z", 100)]) == ["x"]
    assert [name in index for name in ("x", "y", "z", "new")] == [False, True, True, True]
    assert index.begin_write("w", 100) == ["y"]
    index.check()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("wsfdt"), st.integers(0, 7), st.integers(1, 120)), max_size=60))
def test_the_index_keeps_its_invariants(moves: list[tuple[str, int, int]]) -> None:
    """Whatever is written, used and dropped in whatever order."""
    index = TierIndex(300)
    writing: set[str] = set()
    for move, number, size in moves:
        name = f"n{number}"
        if move == "w" and not index.knows(name):
            if index.room(size):
                index.begin_write(name, size)
                writing.add(name)
        elif move in "sf" and name in writing:
            writing.remove(name)
            index.end_write(name, stored=move == "s")
        elif move == "d":
            index.drop(name)
        elif move == "t":
            index.touch(name)
        index.check()
        assert index.bytes <= 300


# Deadlines


def test_deadlines_are_counted_in_steps() -> None:
    """Two steps; a request without anything in the tier never waits."""
    book = PrefetchBook(deadline_steps=2)
    book.nothing("cold")
    item = book.begin("hit", NONE, ["a", "b", "c"], 0, now=0.0)
    assert book.knows("cold") and not book.blocks("cold") and not book.knows("other")
    assert not book.blocks("other") and book.blocks("hit") and list(book.active) == [item]
    assert item.batch(2) == ["a", "b"]
    assert book.step() == 0 and book.blocks("hit")
    assert book.step() == 1 and item.over and not book.blocks("hit")
    assert book.step() == 0 and len(book) == 2 and "active=0" in repr(book)


def test_an_idle_loop_has_a_clock_for_a_deadline() -> None:
    """By the reading of the host call, not by steps."""
    book = PrefetchBook(deadline_steps=9, limit_s=2.0)
    book.begin("hit", NONE, ["a"], 0, now=10.0)
    assert book.expire(11.9) == 0 and book.blocks("hit")
    assert book.expire(12.0) == 1 and not book.blocks("hit")


def test_a_request_that_left_is_forgotten_and_may_come_again() -> None:
    """What is read for it is marked as unwanted."""
    book = PrefetchBook()
    item = book.begin("a", NONE, ["x"], 0, now=0.0)
    book.forget("a")
    book.forget("a")
    assert item.over and not book.knows("a")
    again = book.begin("a", NONE, ["x"], 0, now=0.0)
    book.nothing("b")
    book.forget_all()
    assert again.over and len(book) == 0


# The prefix cache


class Saved:
    """A memory with ten pages of four tokens, and what it evicts: (page, name)."""

    def __init__(self, pages: int = 10) -> None:
        self.memory = KVMemory(pages, 4, prefix_cache=True)
        self.keys = PageKeys(LAYOUT, "w")
        self.pages: list[tuple[int, str]] = []
        self.memory.save_evicted(self.keys, self.save)

    def save(self, evicted: Evicted) -> None:
        """As the tier does; nobody has the pages yet."""
        for pages, chain in evicted:
            assert len(chain) == len(pages) * DIGEST_BYTES > 0
            assert not self.memory.pool.held_among(pages)
            self.pages += zip(pages.tolist(), names(chain), strict=True)

    def add(self, prompt: np.ndarray) -> list[int]:
        """Put all pages of a prompt into the cache."""
        pages = self.memory.pool.take(len(prompt) // 4)
        cache = self.memory.cache
        assert cache is not None
        cache.insert(prompt, pages)
        self.memory.pool.drop(pages[::-1])
        self.memory.check()
        return pages.tolist()

    def names(self, prompt: np.ndarray) -> list[str]:
        """What the pages of a prompt are called."""
        return names(self.keys.chain(self.keys.root, prompt.tobytes()))

    def evict(self, count: int) -> None:
        """Evict, and check what is left."""
        cache = self.memory.cache
        assert cache is not None
        cache.evict(count)
        self.memory.check()


def test_evicted_pages_come_with_their_names_also_after_splits_and_trims() -> None:
    """Two prompts that share two of four pages, evicted in three goes."""
    world = Saved()
    one, two = tokens(1, 2, 3, 4), tokens(1, 2, 8, 9)
    first = world.add(one)
    second = world.add(two)
    expected = dict(zip(first, world.names(one), strict=True)) | dict(
        zip(second[2:], world.names(two)[2:], strict=True)
    )
    for count in (1, 2, 5):
        world.evict(count)
    assert dict(world.pages) == expected and len(world.pages) == 6


def test_tail_tells_where_a_cached_prefix_ends() -> None:
    """In the middle of an edge, behind a split, at the root; at least one token is left out."""
    world = Saved()
    world.add(tokens(1, 2, 3))
    cache = world.memory.cache
    assert cache is not None
    for prompt, count in (
        (tokens(1, 2, 7, rest=1), 2),
        (tokens(1, 2, 3, rest=1), 3),
        (tokens(1, 2, 3), 2),
        (tokens(5, rest=1), 0),
    ):
        pages, digest = cache.tail(prompt)
        chain = world.keys.chain(world.keys.root, prompt[: count * 4].tobytes())
        assert (pages, digest) == (count, (world.keys.root + chain)[-DIGEST_BYTES:])
        assert len(cache.match(prompt)) == count
    world.add(tokens(1, 2, 7))
    assert cache.tail(tokens(1, 2, 7, rest=1))[0] == 3


def test_restored_pages_join_the_cache_and_can_be_matched() -> None:
    """Fresh pages behind those that are cached; nothing is held afterwards."""
    world = Saved()
    have = world.add(tokens(1, 2))
    prompt = tokens(1, 2, 3, 4, rest=1)
    restored = world.memory.restore(prompt, 2, 2)
    assert restored is not None and restored[0] == 2
    fresh = restored[1].tolist()
    world.memory.check()
    assert world.memory.pool.held == 0 and world.memory.cache is not None
    assert world.memory.cache.match(prompt).tolist() == have + fresh


def test_restoring_makes_room_by_eviction_but_never_from_what_is_held() -> None:
    """Four pages: the idle ones go; where too much is held nothing changes."""
    world = Saved(4)
    world.add(tokens(7, 8))
    assert world.memory.restore(tokens(1, 2, 3, rest=1), 0, 3) is not None
    assert [name for _, name in world.pages] == world.names(tokens(7, 8))[1:]
    world.evict(4)
    held = world.memory.pool.take(2)
    assert world.memory.restore(tokens(1, 2, 3, rest=1), 0, 3) is None
    world.memory.check()
    world.memory.pool.drop(held)
    assert world.memory.pool.free == 4


def test_restoring_what_is_there_or_what_nothing_leads_to_gives_no_pages() -> None:
    """Others computed it meanwhile; or the pages before it are gone."""
    world = Saved()
    world.add(tokens(1, 2, 3))
    known, fresh = world.memory.restore(tokens(1, 2, 3, rest=1), 1, 2) or (None, NONE)
    assert known == 3 and len(fresh) == 0
    known, fresh = world.memory.restore(tokens(4, 5, 6, rest=1), 1, 2) or (None, NONE)
    assert known == 0 and len(fresh) == 0
    assert world.memory.pool.free == 7


def test_the_digests_follow_new_weights() -> None:
    """Only an empty tree can change its keys."""
    world = Saved()
    world.add(tokens(1))
    other = PageKeys(LAYOUT, "other")
    with pytest.raises(AssertionError, match="no digests"):
        world.memory.save_evicted(other, world.save)
    world.memory.flush()
    assert world.pages == [], "old weights' pages are not saved"
    world.keys = other
    world.memory.save_evicted(other, world.save)
    world.add(tokens(1))
    world.evict(1)
    assert [name for _, name in world.pages] == world.names(tokens(1))
