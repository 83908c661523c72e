"""The native host's pure parts: pages, prefix cache, memory, planner, policy, request table, validation."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioprefill.config import NativeConfig
from aioprefill.engine.port import ModelSpec, PageIds, TokenIds
from aioprefill.errors import InvalidMove, InvalidRequest
from aioprefill.kv_layout import KVLayout
from aioprefill.native.memory import KVMemory
from aioprefill.native.pages import PagePool
from aioprefill.native.planner import Limits, Piece, cut, plan
from aioprefill.native.prefix_cache import PrefixCache
from aioprefill.native.request_state import MOVES, OVER, Move, Request, State
from aioprefill.native.stage_timers import Stage, StageTimers
from aioprefill.native.validate import validate
from aioprefill.request import PrefillRequest
from aioprefill.sampling_params import SamplingParams

PAGE = 4


def tokens(*values: int) -> TokenIds:
    """A prompt."""
    return np.array(values, dtype=np.uint32)


def pages(*numbers: int) -> PageIds:
    """Page numbers."""
    return np.array(numbers, dtype=np.int32)


def request(length: int, *, name: str = "r", arrival: int = 0, prompt: TokenIds | None = None) -> Request:
    """A request with nothing behind it."""
    return Request(
        request_id=name,
        tokens=np.arange(length, dtype=np.uint32) if prompt is None else prompt,
        sampling=SamplingParams(),
        peer=None,
        max_new_tokens=1,
        ignore_eos=False,
        handle=cast(Any, None),
        arrival=arrival,
    )


# Pages


def test_pages_go_from_free_to_held_to_idle_to_free() -> None:
    """Counts follow, the last freed page is handed out first."""
    pool = PagePool(4)
    both = pool.take(2)
    a = both[:1]
    assert both.tolist() == [0, 1] and pool.held == 2
    pool.hold(a)
    pool.cache(a)
    pool.drop(both)
    assert pool.held_among(both) == 1 and pool.free == 3
    pool.drop(a)
    assert pool.idle == 1 and pool.available == 4 and "idle=1" in repr(pool)
    pool.check()
    pool.hold(a)
    assert pool.idle == 0 and pool.held_among(a) == 1
    pool.drop(a)
    pool.evict(a)
    assert pool.take(1).tolist() == [0]
    pool.check()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.take(4),
        lambda pool: pool.hold(pages(2)),
        lambda pool: pool.drop(pages(2)),
        lambda pool: pool.cache(pages(2)),
        lambda pool: (pool.cache(pages(0)), pool.cache(pages(0))),
        lambda pool: pool.evict(pages(0)),
        lambda pool: (pool.cache(pages(0)), pool.evict(pages(0))),
    ],
)
def test_misuse_of_the_pool_is_refused(misuse: Any) -> None:
    """Pages cannot be made, lost, or freed under somebody."""
    pool = PagePool(3)
    pool.take(1)
    with pytest.raises(AssertionError):
        misuse(pool)


def test_the_pool_check_finds_damage() -> None:
    """A page that is lost, doubled, or miscounted."""
    for damage in ("lost", "double", "used", "count"):
        pool = PagePool(3)
        page = pool.take(1)
        pool.cache(page)
        if damage == "lost":
            pool._free -= 1
        elif damage == "double":
            pool._stack[1] = pool._stack[0]
        elif damage == "used":
            pool._push(page)
        else:
            pool.idle = 2
        with pytest.raises(AssertionError):
            pool.check()


# Prefix cache


def keep(cache: PrefixCache, pool: PagePool, prompt: TokenIds) -> list[int]:
    """Compute a prompt and leave its full pages idle in the cache; the tree's pages."""
    mine = pool.take(len(prompt) // PAGE)
    path = cache.insert(prompt, mine)
    pool.drop(mine)
    return path.tolist()


def test_a_prefix_is_found_in_whole_pages_and_never_the_whole_prompt() -> None:
    """One token at least is left to compute."""
    pool = PagePool(10)
    cache = PrefixCache(pool, PAGE)
    prompt = np.arange(12, dtype=np.uint32)
    kept = keep(cache, pool, prompt)
    assert cache.match(np.arange(13, dtype=np.uint32)).tolist() == kept
    assert cache.match(prompt).tolist() == kept[:2]
    assert cache.match(np.arange(11, dtype=np.uint32)).tolist() == kept[:2]
    assert cache.match(tokens(0, 1, 2, 3)).tolist() == []
    assert cache.match(tokens(9, 9, 9, 9, 9)).tolist() == []
    assert "pages=3" in repr(cache)


def test_edges_split_where_prompts_part() -> None:
    """The shared pages are kept once."""
    pool = PagePool(20)
    cache = PrefixCache(pool, PAGE)
    shared = np.arange(8, dtype=np.uint32)
    first = keep(cache, pool, np.concatenate([shared, tokens(50, 51, 52, 53)]))
    second = keep(cache, pool, np.concatenate([shared, tokens(60, 61, 62, 63, 64, 65, 66, 67)]))
    assert second[:2] == first[:2] and cache.pages == 5 and cache.nodes == 3
    assert keep(cache, pool, shared[:4]) == first[:1]
    cache.check()
    pool.check()
    assert pool.idle == 5


def test_eviction_takes_the_least_recently_used_ends_first() -> None:
    """A match makes a path young; held pages stay."""
    pool = PagePool(6)
    cache = PrefixCache(pool, PAGE)
    old, young = np.arange(0, 8, dtype=np.uint32), np.arange(100, 108, dtype=np.uint32)
    old_pages, young_pages = keep(cache, pool, old), keep(cache, pool, young)
    cache.match(np.append(old, 9).astype(np.uint32))
    assert cache.evict(1) == 1
    assert cache.match(np.append(young, 9).astype(np.uint32)).tolist() == young_pages[:1]
    pool.hold(pages(*old_pages))
    assert cache.clear() == 1
    assert cache.pages == 2 and cache.evict(5) == 0
    pool.drop(pages(*old_pages))
    assert cache.evict(1) == 1 and cache.evict(9) == 1 and cache.nodes == 0
    cache.check()


def test_parents_become_evictable_when_their_last_child_is_gone() -> None:
    """A tree with branches empties completely."""
    pool = PagePool(10)
    cache = PrefixCache(pool, PAGE)
    for last in (1, 2, 3):
        keep(cache, pool, tokens(0, 0, 0, 0, last, last, last, last))
    assert cache.pages == 4
    assert cache.evict(100) == 4 and pool.free == 10


def test_the_eviction_queue_stays_bounded() -> None:
    """Ten thousand matches of one path leave a short queue."""
    pool = PagePool(4)
    cache = PrefixCache(pool, PAGE)
    prompt = np.arange(9, dtype=np.uint32)
    keep(cache, pool, prompt)
    for _ in range(10_000):
        cache.match(prompt)
    assert len(cache._lru) < 200
    assert cache.evict(9) == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_the_cache_agrees_with_a_plain_model(seed: int) -> None:
    """Random admissions, results and releases: same hits as a set of prefixes, invariants throughout."""
    rng = random.Random(seed)
    memory = KVMemory(24, PAGE, prefix_cache=True)
    live: list[Request] = []
    seen: set[bytes] = set()
    for step in range(60):
        if live and rng.random() < 0.5:
            done = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.8:
                done.computed = done.length
                memory.keep_prefix(done)
                seen |= {done.tokens[: k * PAGE].tobytes() for k in range(1, done.length // PAGE + 1)}
            memory.release(done)
        else:
            length = rng.randrange(1, 20)
            prompt = np.array([rng.randrange(2) for _ in range(length)], dtype=np.uint32)
            fresh = request(length, name=str(step), prompt=prompt)
            if memory.admit(fresh):
                assert fresh.cached < length and fresh.cached % PAGE == 0
                assert all(prompt[:k].tobytes() in seen for k in range(PAGE, fresh.cached + 1, PAGE))
                assert len(fresh.pages) == -(-length // PAGE)
                assert len(set(fresh.pages.tolist())) == len(fresh.pages)
                live.append(fresh)
            else:
                held = sum(len(set(r.pages.tolist())) for r in live)
                assert held + -(-length // PAGE) > 24 - memory.pool.idle
        memory.check()
    for rest in live:
        memory.release(rest)
    assert memory.cache is not None
    memory.cache.clear()
    assert memory.pool.free == 24


def test_a_prompt_computed_twice_at_once_holds_the_page_that_the_tree_kept() -> None:
    """Otherwise the tree could evict a page above one that is held."""
    memory = KVMemory(10, PAGE, prefix_cache=True)
    twins = [request(9, name=name) for name in "ab"]
    for twin in twins:
        assert memory.admit(twin)
    for twin in twins:
        twin.computed = 8
        memory.keep_prefix(twin)
    memory.check()
    assert twins[1].tree_pages.tolist() == twins[0].pages[:2].tolist()
    memory.release(twins[0])
    assert memory.cache is not None and memory.cache.clear() == 0
    memory.release(twins[1])
    memory.check()
    assert memory.cache.clear() == 2 and memory.pool.free == 10


def test_without_a_prefix_cache_pages_come_and_go() -> None:
    """No page stays behind."""
    memory = KVMemory(3, PAGE, prefix_cache=False)
    one = request(12)
    assert memory.admit(one) and not memory.admit(request(1))
    one.computed = 12
    memory.keep_prefix(one)
    memory.release(one)
    memory.check()
    assert memory.pool.free == 3


def test_a_flush_forgets_held_prefixes_too() -> None:
    """Idle pages come free at once, held ones when they are released; mixed KV is not kept."""
    memory = KVMemory(8, PAGE, prefix_cache=True)
    idle, held, mixed = request(8), request(12, prompt=tokens(*range(50, 62))), request(4)
    for one in (idle, held):
        assert memory.admit(one)
        one.computed = one.length
        memory.keep_prefix(one)
    memory.release(idle)
    assert memory.flush() == 2
    memory.check()
    assert memory.cache is not None and memory.cache.pages == 0 and memory.pool.held == 3
    memory.release(held)
    assert memory.pool.free == 8
    mixed.cacheable, mixed.computed = False, 4
    assert memory.admit(mixed)
    mixed.computed = 4
    memory.keep_prefix(mixed)
    assert memory.cache.pages == 0
    memory.release(mixed)
    assert KVMemory(8, PAGE, prefix_cache=False).flush() == 0


def test_a_failed_admission_holds_nothing() -> None:
    """Also when part of the prompt was cached."""
    memory = KVMemory(4, PAGE, prefix_cache=True)
    first = request(8)
    assert memory.admit(first)
    first.computed = 8
    memory.keep_prefix(first)
    memory.release(first)
    assert not memory.admit(request(17))
    assert memory.pool.held == 0
    assert memory.admit(request(16)), "cached pages are reused, the rest is free"


def test_layouts_say_where_they_differ() -> None:
    """The first field, with both values; and how many bytes and pages things take."""
    mine = SPEC.layout
    assert mine.difference(mine) is None
    other = KVLayout("f", layers=2, kv_heads=1, head_dim=1, page_size=PAGE, dtype="float32")
    assert mine.difference(other) == "layers is 2, expected 1"
    assert mine.page_bytes == 1 * 2 * PAGE * 4 and mine.pages_for(9) == 3


# Planner

LIMITS = Limits(tokens=8, requests=3, page_size=PAGE)


def spans(pieces: list[Piece]) -> list[tuple[str, int, int, bool]]:
    """Pieces as plain tuples."""
    return [(piece.request.request_id, piece.start, piece.end, piece.final) for piece in pieces]


def test_chunks_end_on_page_boundaries_but_the_last() -> None:
    """KV chunks are ranges of whole pages."""
    long = request(11)
    assert spans([cut(long, 7, PAGE)]) == [("r", 0, 4, False)]  # type: ignore[list-item]
    long.planned = 8
    assert spans([cut(long, 7, PAGE)]) == [("r", 8, 11, True)]  # type: ignore[list-item]
    assert cut(request(11), 3, PAGE) is None


def test_prompts_under_way_come_first_then_waiting_ones_fill_the_budget() -> None:
    """Chunked prefill mixes the end of a long prompt with short ones."""
    long = request(13, name="long")
    long.planned = 8
    waiting = [request(2, name="s1"), request(9, name="s2")]
    pieces = plan([long], waiting, LIMITS, lambda _: True)
    assert spans(pieces) == [("long", 8, 13, True), ("s1", 0, 2, True)]
    assert [piece.tokens for piece in pieces] == [5, 2]


def test_a_prompt_under_way_that_does_not_fit_ends_the_batch() -> None:
    """Nothing passes it by."""
    a, b = request(8, name="a"), request(20, name="b")
    assert spans(plan([a, b], [request(1, name="c")], LIMITS, lambda _: True)) == [("a", 0, 8, True)]


def test_the_number_of_requests_is_bounded() -> None:
    """Both for prompts under way and for waiting ones."""
    many = [request(1, name=f"r{i}") for i in range(5)]
    assert len(plan(many, [], LIMITS, lambda _: True)) == 3
    assert len(plan([], many, LIMITS, lambda _: True)) == 3
    assert len(plan([], many[:2], LIMITS, lambda _: True)) == 2


def test_the_first_that_cannot_be_admitted_ends_the_batch() -> None:
    """The one behind it is not even asked."""
    asked: list[str] = []

    def admit(candidate: Request) -> bool:
        asked.append(candidate.request_id)
        return candidate.request_id == "a"

    waiting = [request(1, name=name) for name in "abc"]
    assert spans(plan([], waiting, LIMITS, admit)) == [("a", 0, 1, True)]
    assert asked == ["a", "b"]


def test_nobody_is_admitted_for_less_than_a_page() -> None:
    """Pages are not taken in vain when the budget is used up."""
    asked: list[str] = []
    waiting = [request(6, name="a"), request(20, name="b")]
    plan([], waiting, LIMITS, lambda r: asked.append(r.request_id) or True)  # type: ignore[func-returns-value]
    assert asked == ["a"]


# The request table


def test_every_state_is_reached_and_the_last_two_are_final() -> None:
    """The table has no dead ends and no ways out of the end."""
    reached = set(MOVES.values()) | {State.BOOTSTRAPPING}
    assert reached == set(State)
    assert {state for state, _ in MOVES} == set(State) - OVER
    assert all((state, Move.FAILED) in MOVES for state in set(State) - OVER)


def test_an_illegal_move_tells_the_story() -> None:
    """The error names the request, its state and what came before."""
    one = request(3, name="seven")
    with pytest.raises(InvalidMove, match="nothing yet"):
        one.move(Move.TRANSFERRED)
    one.move(Move.ADMITTED)
    one.move(Move.PREFILLED_LOCAL)
    with pytest.raises(InvalidMove, match=r"seven is done .* admitted -> prefilled_local"):
        one.move(Move.ADMITTED)


def test_a_request_is_quiet_when_nothing_touches_its_pages() -> None:
    """Over is not enough: forwards and transfers may still be under way."""
    one = request(3)
    assert not one.quiet and not one.all_launched
    one.move(Move.ADMITTED)
    one.planned = 3
    assert one.all_launched
    one.in_flight, one.room_open = 1, True
    one.move(Move.FAILED)
    assert one.over and not one.quiet
    one.in_flight = 0
    assert not one.quiet
    one.room_open = False
    assert one.quiet


# Validation

SPEC = ModelSpec(
    name="m",
    vocab_size=100,
    context_length=50,
    eos_token_ids=(0,),
    layout=KVLayout("f", layers=1, kv_heads=1, head_dim=1, page_size=PAGE, dtype="float32"),
)


def check(**fields: Any) -> TokenIds:
    """Validate a request that is right but for `fields`."""
    return validate(PrefillRequest(**{"token_ids": [1, 2, 3], **fields}), SPEC, num_pages=10)


def test_a_right_request_passes() -> None:
    """The prompt comes back as uint32."""
    assert check().dtype == np.uint32
    assert check(token_ids=np.array([5], dtype=np.int64)).tolist() == [5]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"token_ids": []}),
        ("prompt", {"token_ids": [[1], [2]]}),
        ("prompt", {"token_ids": [[1], [2, 3]]}),
        ("prompt", {"token_ids": [1.5]}),
        ("prompt", {"token_ids": ["a"]}),
        ("prompt", {"token_ids": [-1, 1]}),
        ("prompt", {"token_ids": [100]}),
        ("prompt", {"token_ids": list(range(50))}),
        ("prompt", {"token_ids": [1] * 41}),
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 129}),
        ("peer", {"peer": ""}),
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=math.nan)}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=math.inf)}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=-0.1)}),
        ("sampling.top_p", {"sampling": SamplingParams(top_p=0.0)}),
        ("sampling.top_p", {"sampling": SamplingParams(top_p=math.nan)}),
        ("sampling.top_k", {"sampling": SamplingParams(top_k=-1)}),
        ("sampling.top_k", {"sampling": SamplingParams(top_k=101)}),
        ("sampling.seed", {"sampling": SamplingParams(seed=-1)}),
        ("sampling.logprobs", {"sampling": SamplingParams(logprobs=65)}),
    ],
)
def test_bad_input_is_refused_by_the_name_of_its_field(field: str, fields: dict[str, Any]) -> None:
    """Each kind of bad input gets `InvalidRequest` with the field."""
    with pytest.raises(InvalidRequest) as caught:
        check(**fields)
    assert caught.value.field == field


# Stage timers


def test_stage_timers_end_once_in_order_and_stay_small() -> None:
    """A thousand changes of stage leave a short queue; only the present stage ends."""
    timers = StageTimers(NativeConfig(queue_timeout_s=5.0, running_timeout_s=None))
    looks: list[float | None] = []
    timers.on_earlier = lambda: looks.append(timers.next())
    first, second = request(3, name="a", arrival=0), request(3, name="b", arrival=1)
    timers.enter(second, Stage.QUEUE, 0.0)
    for now in range(1000):
        timers.enter(first, Stage.QUEUE, float(now + 1))
    assert len(timers._heap) < 100 and timers.next() == 5.0
    assert looks[0] == 5.0 and looks[-1] == 5.0
    assert [late.request_id for late, _ in timers.expired(2000.0)] == ["b", "a"]
    assert timers.expired(2000.0) == [] and timers.next() is None
    timers.enter(first, Stage.RUNNING, 0.0)
    timers.enter(second, Stage.QUEUE, 0.0)
    timers.leave(second)
    assert timers.next() is None
