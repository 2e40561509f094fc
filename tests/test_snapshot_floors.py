"""Marks on nodes and the floors of snapshots: which nodes bear a mark, and that look-ups find what is below it.

A snapshot's floor is the longest part of its prefix that fills blocks of the default size; the node, or root, that ends
there bears a mark, by which look-ups find the snapshot. It relies on :mod:`pair`, so that the model answers every call
too, and on the cache's own recount of floors and marks after each.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from model import Tokens, tier_key
from pair import COPIES, Pair, forge

from metrale_numba import RadixTree
from metrale_numba.kernels import layout

#: Of the last two, nodes bear no marks: a floor has 64 bits for the depths above it.
GRIDS = (1, 2, 16, 24, 63, 64)
NO_GRIDS = (65, 100)
EACH_SIZE = pytest.mark.parametrize("size", GRIDS + NO_GRIDS)
EACH_GRID = pytest.mark.parametrize("size", GRIDS)
ADAPTER = 2**63 + 7


def pair_of(size: int, **settings: Any) -> Pair:
    return Pair(RadixTree, {"block_size": size, **settings})


def prompt(length: int, first: int = 0) -> Tokens:
    """Tokens of which each names its place."""
    return tuple(range(first, first + length))


def store(pair: Pair, tokens: Tokens, first_block: int = 0, adapter: int = 0, size: int | None = None) -> None:
    """Insert tokens with consecutive blocks, and hold nothing."""
    size = size or pair.model.block_size
    pair.insert(tokens, tuple(range(first_block, first_block - (-len(tokens) // size))), (), size, 0, adapter)
    pair.release(tokens, size, adapter)


def marked(pair: Pair) -> set[int | str]:
    """The blocks of the default size whose nodes bear a mark, and ``"root"`` if a root does."""
    pool = pair.cache._pools[pair.model.block_size]
    used = pool.header[layout.POOL_USED]
    nodes = pool.nodes[:used]
    nodes = nodes[(nodes["parent"] != layout.NONE) & (nodes["children"] & layout.HAS_SNAPSHOTS != 0)]
    return {"root" if node["parent"] == layout.ROOT else int(node["block"]) for node in nodes}


def num_floors(pair: Pair) -> int:
    return int(pair.cache._index.arrays.header[layout.INDEX_NUM_FLOORS])


def find(pair: Pair, tokens: Tokens, session: int = 0, adapter: int = 0, size: int | None = None) -> int | None:
    """Look up, let go, and give the depth of the snapshot that was found."""
    size = size or pair.model.block_size
    match = pair.lookup(tokens, size, session, adapter)
    pair.release_matched(tokens, size, match.matched_tokens, adapter)
    pair.compare_state()
    if match.ssm_snapshot is None and match.ssm_snapshot_tier_key is None:
        return None
    return match.ssm_snapshot_tokens if match.ssm_snapshot is not None else match.ssm_snapshot_tier_tokens


def register(pair: Pair, tokens: Tokens, slot: int, session: int = 0, adapter: int = 0) -> None:
    pair.insert_sibling(tokens, slot, session, adapter)
    pair.compare_state()


@EACH_GRID
@pytest.mark.parametrize("blocks_first", [True, False])
@pytest.mark.parametrize("offset", [0, 1, -1])
def test_a_mark_is_set_whichever_of_snapshot_and_blocks_comes_first(size: int, blocks_first: bool, offset: int) -> None:
    pair = pair_of(size)
    depth = 2 * size + offset % size
    tokens = prompt(4 * size)
    if blocks_first:
        store(pair, tokens, 10)
        register(pair, tokens[:depth], 5)
    else:
        register(pair, tokens[:depth], 5)
        assert marked_anywhere(pair) == set()
        store(pair, tokens, 10)
    assert marked(pair) == {11}
    assert find(pair, tokens) == depth
    assert find(pair, tokens[: depth - depth % size + size]) == depth
    # Of a match that ends before it, it is no part; the block that it ends in may not be there at all.
    assert find(pair, tokens[: 2 * size]) == (depth if offset % size == 0 else None)
    assert find(pair, tokens[:size]) is None
    pair.drain()


def marked_anywhere(pair: Pair) -> set[int | str]:
    return marked(pair) if pair.model.block_size in pair.cache._pools else set()


@EACH_GRID
def test_a_node_that_is_evicted_and_comes_back_bears_its_mark_again(size: int) -> None:
    pair = pair_of(size)
    tokens = prompt(3 * size)
    store(pair, tokens, 10)
    register(pair, tokens[: 2 * size], 5)
    for first_block in (20, 30):
        pair.evict(2)
        assert marked(pair) == set()
        assert find(pair, tokens) is None
        store(pair, tokens, first_block)
        assert marked(pair) == {first_block + 1}
        assert find(pair, tokens) == 2 * size
    pair.evict(10)
    store(pair, tokens[: 2 * size], 40)
    assert marked(pair) == {41}
    pair.drain()


@EACH_GRID
def test_a_node_that_another_makes_in_the_row_of_a_marked_one_bears_no_mark(size: int) -> None:
    pair = pair_of(size)
    register(pair, prompt(size), 5)
    for turn in range(5):
        store(pair, prompt(size), 10)
        assert marked(pair) == {10}
        pair.evict(1)
        store(pair, prompt(size, 1000 + turn), 20)
        assert marked(pair) == set()
        assert find(pair, prompt(size, 1000 + turn)) is None
        pair.evict(1)
    pair.drain()


@EACH_SIZE
def test_every_depth_above_a_floor_is_found_from_every_length(size: int) -> None:
    pair = pair_of(size, partial_tail_sharing=True)
    tokens = prompt(2 * size)
    offsets = sorted({0, 1, size // 2, size - 2, size - 1} & set(range(size)))
    store(pair, tokens, 10)
    for slot, offset in enumerate(offsets):
        register(pair, tokens[: size + offset], slot)
    assert num_floors(pair) == (1 if size in GRIDS else 0)
    assert marked(pair) == ({10} if size in GRIDS else set())
    for length in range(size, 2 * size + 1):
        assert find(pair, tokens[:length]) == size + max(offset for offset in offsets if size + offset <= length)
    pair.drain()


@EACH_GRID
@pytest.mark.parametrize("way", ["evict_slot", "evict_lru", "spill and forget", "drop"])
def test_a_floor_goes_with_its_last_entry(size: int, way: str) -> None:
    pair = pair_of(size)
    tokens = prompt(3 * size)
    store(pair, tokens, 10)
    depths = sorted({size, size + size // 2, 2 * size - 1})
    for slot, depth in enumerate(depths):
        register(pair, tokens[:depth], slot)
    for left in range(len(depths), 0, -1):
        assert marked(pair) == {10}
        assert num_floors(pair) == 1
        if way == "evict_slot":
            assert pair.evict_slot(left - 1)
        elif way == "evict_lru":
            assert pair.evict_lru() is not None
        elif way == "drop":
            pair.evict_to_tier(10**6)
        else:
            spill = pair.evict_to_tier(0)
            # One that is spilled is still there to be found.
            assert marked(pair) == {10}
            assert find(pair, tokens) is not None
            pair.forget(spill.key)
        pair.compare_state()
    assert marked(pair) == set()
    assert num_floors(pair) == 0
    assert find(pair, tokens) is None
    pair.drain()


@EACH_GRID
def test_promoting_leaves_the_floor_and_its_later_eviction_takes_it(size: int) -> None:
    pair = pair_of(size)
    tokens = prompt(2 * size)
    store(pair, tokens, 10)
    register(pair, tokens[:size], 3)
    spill = pair.evict_to_tier(0)
    assert pair.promote(spill.key, 4, (0, tokens[:size]))
    pair.compare_state()
    assert marked(pair) == {10}
    assert find(pair, tokens) == size
    assert pair.evict_slot(4)
    assert marked(pair) == set()
    pair.drain()


@EACH_GRID
def test_a_tail_takes_the_floors_of_the_session_with_it(size: int) -> None:
    pair = pair_of(size)
    tokens = prompt(4 * size)
    store(pair, tokens, 10)
    register(pair, tokens[:size], 1, session=9)
    pair.insert_tail(tokens[: 2 * size], 2, 9, 0)
    assert marked(pair) == {11}
    register(pair, tokens[: 2 * size + size // 2], 3, session=9)
    assert marked(pair) == {11}
    pair.insert_tail(tokens[: 3 * size], 4, 9, 0)
    assert marked(pair) == {12}
    assert find(pair, tokens, session=9) == 3 * size
    assert find(pair, tokens, session=8) is None
    pair.drain()


@EACH_SIZE
def test_the_floor_of_what_is_shorter_than_a_block_is_the_root(size: int) -> None:
    pair = pair_of(size)
    depths = sorted({0, size // 2, size - 1} & set(range(size)))
    for slot, depth in enumerate(depths):
        register(pair, prompt(depth), slot)
    assert marked_anywhere(pair) == set()
    for turn in range(3):
        store(pair, prompt(2 * size), 10)
        assert marked(pair) == ({"root"} if size in GRIDS else set())
        assert find(pair, prompt(2 * size)) == depths[-1]
        assert find(pair, prompt(size, first=5000)) is None
        store(pair, prompt(size, first=5000), 20)
        # Of another prompt, only the snapshot of no tokens is a part.
        assert find(pair, prompt(size, first=5000)) == 0
        pair.evict(1 if turn else 10)
        pair.evict(10)
    pair.drain()


@EACH_SIZE
def test_floors_of_adapters_are_apart_and_go_with_the_adapter(size: int) -> None:
    pair = pair_of(size)
    tokens = prompt(3 * size)
    for number, adapter in enumerate((0, 1, ADAPTER)):
        store(pair, tokens, 10 * number, adapter)
        register(pair, tokens[: size * (number % 2 + 1)], number, adapter=adapter)
        register(pair, tokens[: size - 1], 10 + number, adapter=adapter)
    before = marked(pair)
    assert before == ({0, 11, 20, "root"} if size in GRIDS else set())
    pair.drop_adapter(1)
    pair.compare_state()
    assert marked(pair) == before - {11}
    assert num_floors(pair) == (4 if size in GRIDS else 0)
    assert find(pair, tokens, adapter=1) is None
    assert find(pair, tokens, adapter=ADAPTER) == size
    store(pair, tokens, 40, 1)
    assert find(pair, tokens, adapter=1) is None
    assert marked(pair) == before - {11}
    pair.drain()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("stem", [0, 1, 2, 6, 20])
@pytest.mark.parametrize("other_adapter", [False, True])
def test_an_entry_that_a_forged_key_moves_takes_its_floor_along(size: int, stem: int, other_adapter: bool) -> None:
    pair = pair_of(size)
    mine = prompt(4, first=3)
    adapter = ADAPTER if other_adapter else 0
    forged = forge(adapter, prompt(stem, first=100), tier_key(0, mine))
    padding = prompt(size, first=500)
    store(pair, (*mine, *padding), 0)
    store(pair, (*forged, *padding), 100, adapter)
    register(pair, mine, 1)
    mine_marked = marked(pair)
    assert find(pair, (*mine, *padding)) == 4
    assert find(pair, (*forged, *padding), adapter=adapter) is None
    register(pair, forged, 2, adapter=adapter)
    assert pair.cache.snapshot_count() == 1
    assert num_floors(pair) == 1
    floor = len(forged) // size
    assert marked(pair) == ({99 + floor} if floor else {"root"})
    assert find(pair, (*mine, *padding)) is None
    assert find(pair, (*forged, *padding), adapter=adapter) == len(forged)
    # And back, over one that is spilled.
    pair.evict_to_tier(0)
    register(pair, mine, 3)
    assert marked(pair) == mine_marked
    assert find(pair, (*mine, *padding)) == 4
    assert find(pair, (*forged, *padding), adapter=adapter) is None
    pair.drain()


@EACH_SIZE
def test_in_a_pool_of_another_block_size_snapshots_are_found_without_marks(size: int) -> None:
    pair = pair_of(size, partial_tail_sharing=True)
    other = 3 if size != 3 else 4
    tokens = prompt(5 * size + 30)
    store(pair, tokens, 10)
    store(pair, tokens, 1000, size=other)
    depths = sorted({0, 1, other, other + 1, size, size + 1, 3 * size - 1, 5 * size, 5 * size + 29})
    for slot, depth in enumerate(depths):
        register(pair, tokens[:depth], slot)
    pool = pair.cache._pools[other]
    assert not (pool.nodes["children"][: pool.header[layout.POOL_USED]] & layout.HAS_SNAPSHOTS).any()
    for length in {*depths, *(depth + 1 for depth in depths), *(depth - 1 for depth in depths)} - {-1, 0}:
        wanted = max(depth for depth in depths if depth <= length)
        assert find(pair, tokens[:length], size=other) == wanted
        assert find(pair, tokens[:length]) in (wanted, None) or length % size
    pair.drain()


def test_a_depth_of_another_class_is_told_apart_in_a_pool_without_marks() -> None:
    # Depths are filtered by their remainder; 4096 deeper is the same class.
    pair = pair_of(16)
    tokens = prompt(3 * 4096)
    store(pair, tokens, 10, size=8)
    register(pair, tokens[:40], 1)
    for length, wanted in ((4096 + 40, 40), (8192 + 48, 40), (40, 40), (32, None)):
        assert find(pair, tokens[:length], size=8) == wanted
    register(pair, tokens[: 4096 + 40], 2)
    assert find(pair, tokens[: 4096 + 32], size=8) == 40
    assert find(pair, tokens, size=8) == 4096 + 40
    pair.drain()


@EACH_SIZE
@pytest.mark.parametrize("through", ["child", "suffix"])
def test_a_snapshot_inside_a_partial_tail_is_found_as_far_as_the_match_reaches(size: int, through: str) -> None:
    if size < 2:
        pytest.skip("a block of one token has no part")
    pair = pair_of(size, partial_tail_sharing=True)
    tokens = prompt(3 * size if through == "child" else 3 * size - 1)
    store(pair, tokens, 10)
    depths = sorted({size - 1, 2 * size, 2 * size + 1, 3 * size - 1})
    for slot, depth in enumerate(depths):
        register(pair, tokens[:depth], slot)
    for length in range(2 * size, 3 * size):
        assert pair.peek(tokens[:length], size, 0) == length
        assert find(pair, tokens[:length]) == max(depth for depth in depths if depth <= length)
    # Of a query that ends otherwise, no part of the block is matched.
    assert find(pair, (*tokens[: 2 * size], 9999)) == 2 * size
    pair.drain()


@EACH_SIZE
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_has_floors_and_marks(size: int, way: str) -> None:
    pair = pair_of(size)
    tokens = prompt(3 * size)
    store(pair, tokens, 10)
    for slot, depth in enumerate((0, size, 2 * size + size // 2, 3 * size + 1)):
        register(pair, tokens[:depth] if depth <= len(tokens) else (*tokens, 77), slot)
    pair.evict_slot(1)
    before, floors = marked(pair), num_floors(pair)
    pair.copy(way)
    pair.part(keep_the_copy=True)
    assert (marked(pair), num_floors(pair)) == (before, floors)
    register(pair, tokens[:size], 7)
    assert find(pair, tokens) == 2 * size + size // 2
    store(pair, (*tokens, *prompt(size, 77)), 50)
    assert find(pair, (*tokens, *prompt(size, 77))) == 3 * size + 1
    pair.drain()


def test_clearing_takes_every_floor_and_the_index_begins_anew() -> None:
    pair = pair_of(2)
    for turn in range(3):
        store(pair, prompt(8), 10)
        for slot in range(8):
            register(pair, prompt(slot), slot)
        assert num_floors(pair) == 4
        pair.clear()
        assert num_floors(pair) == 0
        store(pair, prompt(8), 10)
        assert marked(pair) == set()
        assert find(pair, prompt(8)) is None
        register(pair, prompt(3 + turn), 1)
        pair.compact()
    pair.drain()


def test_many_floors_come_and_go_and_their_rows_are_used_again() -> None:
    pair = pair_of(2)
    rng = random.Random(5)
    slots = itertools.count()
    for _ in range(300):
        tokens = tuple(rng.choices((0, 1), k=rng.randrange(9)))
        if rng.random() < 0.5:
            register(pair, tokens, next(slots))
        elif rng.random() < 0.5:
            pair.evict_lru()
        else:
            store(pair, tokens, next(slots) * 10)
        find(pair, (*tokens, *tokens))
    assert pair.cache._index.arrays.header[layout.INDEX_FLOORS_USED] < 80
    pair.drain()


def random_calls(pair: Pair, rng: random.Random, sizes: Iterable[int], count: int) -> None:
    """Calls that are mostly about snapshots, near the ends of blocks, on few prompts."""
    sizes = tuple(sizes)
    ids = itertools.count(1)
    stems = [tuple(rng.choices((0, 1, 2**32 - 1), k=5 * max(sizes))) for _ in range(3)]
    for _ in range(count):
        stem, size, adapter = rng.choice(stems), rng.choice(sizes), rng.choice((0, 0, ADAPTER))
        length = rng.randrange(6) * sizes[0] + rng.choice((-1, 0, 0, 1, sizes[0] // 2))
        tokens = stem[: max(length, 0)]
        table = tuple(next(ids) for _ in range(-(-len(tokens) // size)))
        what = rng.randrange(14)
        if what < 3:
            pair.insert_sibling(tokens, next(ids), rng.choice((0, 1, 2)), adapter)
        elif what < 5:
            pair.insert_tail(tokens, next(ids), rng.choice((0, 1, 2)), adapter)
        elif what < 7:
            pair.insert(tokens, table, (), size, 0, adapter)
            pair.release(tokens, size, adapter)
        elif what == 7:
            pair.evict(rng.choice((1, 2, 5, 10**9)))
        elif what == 8:
            spill = pair.evict_to_tier(rng.choice((0, sizes[0])))
            if spill is not None and hasattr(spill, "key") and rng.random() < 0.5:
                pair.promote(spill.key, next(ids), spill.check)
        elif what == 9:
            pair.evict_lru()
        elif what == 10 and pair.spilled():
            pair.forget(rng.choice(pair.spilled()).key)
        elif what == 11:
            rng.choice((pair.compact, lambda adapter=adapter: pair.drop_adapter(adapter)))()
        else:
            find(pair, (*tokens, *rng.choice(stems)[: rng.randrange(size + 1)]), rng.choice((0, 1, 2)), adapter, size)
        pair.compare_state()
    pair.drain()


@pytest.mark.parametrize("hermetic", [False, True])
@pytest.mark.parametrize("partial_tail_sharing", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (2,), (16,), (16, 5), (64,), (65,), (5, 64), (70, 16)], ids=str)
def test_any_calls_answer_like_the_model(sizes: tuple[int, ...], partial_tail_sharing: bool, hermetic: bool) -> None:
    pair = pair_of(sizes[0], partial_tail_sharing=partial_tail_sharing, hermetic=hermetic)
    random_calls(pair, random.Random(str(sizes)), sizes, 250)


def test_check_hashes_of_one_floor_are_those_of_its_tokens() -> None:
    # A floor is kept by its check hash alone, so the same tokens under another adapter must be another floor.
    cache = RadixTree(block_size=4)
    tokens = np.arange(8, dtype=np.uint32)
    for adapter in (0, 1, ADAPTER):
        cache.insert_tail_sibling_snapshot(tokens, adapter & 7, 0, adapter)
    assert cache._index.arrays.header[layout.INDEX_NUM_FLOORS] == 3
    assert np.unique(cache._index.arrays.floors["state"][:3]).size == 3
