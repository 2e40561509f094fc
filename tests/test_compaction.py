"""`compact()`: no later answer is another, memory comes back, and paths lie together afterwards.

It relies on random calls to make caches that are full of holes, and on copies that are left as they are: every call
after it goes to both.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import Call, Caller, answer_of, same, told_by
from pair import COPIES, without_order
from state import differences, sizes_of, snapshot_of

from metrale_numba import RadixTree, operations
from metrale_numba.kernels import arrays, layout, pages
from metrale_numba.kernels.compile import kernels

#: What says how much room there is, what says how much time is left, and what says nothing.
NOT_COMPARED = ("memory_usage", "compact", "pins", "copy")
BLOCK_SIZES: list[tuple[int, ...]] = [(1,), (2, 3), (16,), (16, 5), (70, 2)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"partial_tail_sharing": True, "adopt_blocks": True},
    {"hermetic": True, "reserve": 300},
    {"partial_tail_sharing": True, "evict_alpha": 0.75, "tail_lease_ttl": 3, "quotas": {1: 20}},
]


def call(cache: RadixTree, caller: Caller, count: int, *others: RadixTree) -> None:
    """Make random calls, and find that the other caches answer as the first does."""
    for _ in range(count):
        made = caller.draw()
        answer = answer_of(cache, made)
        for other in others if made.name not in NOT_COMPARED else ():
            again = answer_of(other, made)
            if made.name == "clear":
                # What was forgotten comes in no order that is promised.
                assert same(without_order(again), without_order(answer))
            else:
                assert same(again, answer), made
        caller.learn(made, answer)


def part_with(cache: RadixTree, twin: RadixTree) -> None:
    """Evict everything from both, block by block and snapshot by snapshot; all must come in the same order."""
    assert told_by(cache)[:3] == told_by(twin)[:3]
    while True:
        mine, others = cache.evict_snapshot_to_tier(2), twin.evict_snapshot_to_tier(2)
        assert mine == others
        if mine is None:
            break
    for adapter in (0, 1, 2**63 + 7):
        assert cache.evict_from(adapter, 3) == twin.evict_from(adapter, 3)
    while True:
        mine, others = cache.evict(1), twin.evict(1)
        assert mine == others
        if mine.is_empty():
            break
    for which in (cache, twin):
        which.check_integrity()
    assert same(without_order(cache.clear()), without_order(twin.clear()))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "default")
@pytest.mark.parametrize("block_sizes", BLOCK_SIZES, ids=str)
def test_a_compacted_cache_answers_like_one_that_was_not(
    block_sizes: tuple[int, ...], settings: dict[str, Any]
) -> None:
    cache = RadixTree(**{"block_size": block_sizes[0], **settings})
    caller = Caller(7, block_sizes=block_sizes, max_chunks=8)
    twin = copy.deepcopy(cache)
    for _ in range(12):
        cache.compact()
        cache.check_integrity()
        call(cache, caller, 150, twin)
    twin.check_integrity()
    cache.compact()
    part_with(cache, twin)


def test_compacting_twice_in_a_row_gives_nothing_back_the_second_time() -> None:
    cache, caller = RadixTree(block_size=2), Caller(3)
    call(cache, caller, 2000)
    assert cache.compact() > 0
    before = sizes_of(cache)
    assert cache.compact() == 0
    assert differences(before, sizes_of(cache)) == []
    cache.check_integrity()


def test_what_compacting_gives_back_is_what_the_arrays_have_shrunk_by() -> None:
    cache = RadixTree(block_size=2)
    tokens = np.arange(20_000, dtype=np.uint32)
    cache.insert(tokens, np.arange(10_000), np.arange(10_000))
    for slot in range(1000):
        cache.insert_tail_sibling_snapshot(tokens[: slot + 1], slot)
    cache.release(tokens)
    cache.evict(9_900)
    for _ in range(990):
        cache.evict_snapshot_lru()
    before = sum(sizes_of(cache).values())
    given_back = cache.compact()
    assert type(given_back) is int
    assert given_back == before - sum(sizes_of(cache).values())
    # Rows of floors, once used, are kept.
    assert given_back > 0.85 * before
    assert cache.lookup(tokens).matched_blocks.tolist() == list(range(100))
    assert cache.lookup(tokens).matched_disk_block_ids.tolist() == list(range(100))
    cache.check_integrity()


def test_an_empty_cache_can_be_compacted_and_used() -> None:
    for cache in (RadixTree(), RadixTree(block_size=1), RadixTree(block_size=100, partial_tail_sharing=True)):
        cache.compact()
        cache.check_integrity()
        size = cache.block_size
        assert cache.insert(range(2 * size), [5, 6]).blocks.tolist() == [5, 6]
        cache.insert_tail_snapshot(range(2 * size), 3)
        assert cache.lookup(range(2 * size)).ssm_snapshot is None
        assert cache.lookup(range(2 * size)).matched_blocks.tolist() == [5, 6]
        cache.compact()
        cache.check_integrity()
        cache.release(range(2 * size))
        cache.release(range(2 * size))
        cache.release(range(2 * size))
        assert cache.evict(9).physical.tolist() == [6, 5]
        assert cache.compact() > 0
        cache.check_integrity()


@pytest.mark.parametrize("way", COPIES)
def test_a_compacted_cache_can_be_copied_and_a_copy_compacted(way: str) -> None:
    cache, caller = RadixTree(block_size=2, partial_tail_sharing=True), Caller(5)
    call(cache, caller, 2000)
    cache.compact()
    first = COPIES[way](cache)
    second = COPIES[way](cache)
    second.compact()
    call(cache, caller, 1000, first, second)
    for twin in (first, second):
        twin.check_integrity()


def test_everything_that_a_block_can_have_moves_with_it() -> None:
    cache = RadixTree(block_size=2, partial_tail_sharing=True)
    for first in range(40):
        # Disk ids on some, a suffix on all, freed rows between them, two adapters, a fork in each.
        tokens = [first, 1, 2, 3, 4]
        disks = [first + 300, layout.NONE, first + 500] if first % 3 else ()
        cache.insert(tokens, [3 * first, 3 * first + 1, 3 * first + 2], disks, adapter_id=first % 2)
        cache.insert([first, 1, 7, 7], [3 * first, first + 1000], adapter_id=first % 2)
        cache.release(tokens, adapter_id=first % 2)
        cache.release([first, 1, 7, 7], adapter_id=first % 2)
        if first % 4 == 3:
            cache.evict(3)
        cache.insert_tail_sibling_snapshot(tokens[: first % 6], first, first, first % 2)
    twin = copy.deepcopy(cache)
    cache.compact()
    cache.check_integrity()
    for first in range(40):
        for tokens in ([first, 1, 2, 3, 4], [first, 1, 7], [first]):
            for adapter in (0, 1):
                assert cache.lookup(tokens, None, first, adapter) == twin.lookup(tokens, None, first, adapter)
                for which in (cache, twin):
                    which.release(tokens, adapter_id=adapter)
    part_with(cache, twin)


def test_held_and_pinned_blocks_stay_held_and_pinned() -> None:
    cache = RadixTree(block_size=1)
    cache.insert(range(5), range(5))
    cache.insert([0, 1, 9, 9], range(10, 14))
    cache.release(range(5))
    cache.release([0, 1, 9, 9])
    cache.pin("system", [0, 1, 9])
    cache.lookup([0, 1, 2])
    cache.compact()
    assert cache.num_evictable() == 3
    assert cache.evict(9).physical.tolist() == [4, 3, 13]
    assert cache.unpin("system")
    assert cache.evict(9).physical.tolist() == [12]
    cache.release([0, 1, 2])
    assert cache.evict(9).physical.tolist() == [2, 1, 0]
    assert cache.stats_detail().over_releases == 0


# --- paths --------------------------------------------------------------------------------------------------------


def interleaved(block_size: int, num_paths: int, length: int) -> tuple[RadixTree, list[np.ndarray]]:
    """Paths that grow in turn, one block at a time, so that no two blocks of one lie together."""
    cache = RadixTree(block_size=block_size)
    paths = [np.arange(length * block_size, dtype=np.uint32) + np.uint32(1000 * path) for path in range(num_paths)]
    blocks = itertools.count()
    for end in range(1, length + 1):
        for path in paths:
            cache.insert(path[: end * block_size], [next(blocks)] * end, (), None, (end - 1) * block_size)
    return cache, paths


def last_search(cache: RadixTree, tokens: np.ndarray) -> int:
    """The last block that had to be searched for by hash when the cache peeked, or -2."""
    assert cache.peek_matched_tokens(tokens) == tokens.size
    return int(cache._pool.header[layout.POOL_SEARCHED])


@pytest.mark.parametrize("block_size", [1, 16, 5])
def test_the_blocks_of_a_path_lie_next_to_each_other_afterwards(block_size: int) -> None:
    cache, paths = interleaved(block_size, 4, 50)
    assert all(last_search(cache, path) == 49 for path in paths)
    cache.compact()
    # Of the children of the root only one can lie right after it.
    assert sorted(last_search(cache, path) for path in paths) == [-2, 0, 0, 0]
    nodes = cache._pool.nodes
    consecutive = nodes["parent"][1:] == np.arange(nodes.size - 1)
    assert nodes.size == 201
    assert consecutive.sum() == 197
    cache.check_integrity()


def test_a_path_is_followed_by_its_newest_fork() -> None:
    cache = RadixTree(block_size=1)
    cache.insert([1, 2, 3], [1, 2, 3])
    cache.insert([1, 9, 9], [1, 4, 5])
    cache.insert([7], [6])
    cache.compact()
    assert cache._pool.nodes["block"].tolist() == [layout.NONE, 6, 1, 4, 5, 2, 3]
    assert last_search(cache, np.array([1, 9, 9], np.uint32)) == 0
    assert last_search(cache, np.array([1, 2, 3], np.uint32)) == 1


# --- without memory -----------------------------------------------------------------------------------------------


class ShortOfMemory:
    """NumPy, which makes so many arrays and then no more."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        return self.counted(found) if name in ("full", "empty", "zeros", "array") else found

    def counted(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **by_name: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise MemoryError("no more arrays")
            return make(*arguments, **by_name)

        return counted


def make_short_of_memory(patch: pytest.MonkeyPatch, left: int) -> None:
    """Let so many arrays be made, by NumPy or in pages of their own, and then no more."""
    short = ShortOfMemory(left)
    patch.setattr(arrays, "np", short)
    patch.setattr(pages, "_mapped", short.counted(pages._mapped))


@pytest.mark.parametrize("reserve", [0, 5000])
def test_without_memory_for_the_copies_no_answer_changes(reserve: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RadixTree(block_size=2, partial_tail_sharing=True)
    caller = Caller(9)
    call(cache, caller, 1500)
    if reserve:
        # As of a cache that was made with it, and whose arrays are not as large yet.
        object.__setattr__(cache.settings, "reserve", reserve)
    twin = copy.deepcopy(cache)
    failures = 0
    for left in itertools.count():
        with monkeypatch.context() as patch:
            make_short_of_memory(patch, left)
            try:
                cache.compact()
            except MemoryError:
                failures += 1
            else:
                break
        cache.check_integrity()
        call(cache, caller, 40, twin)
        twin.check_integrity()
    # Nine arrays of each of the two block sizes, and the tables of the index.
    assert failures >= 9 + 9 + 4
    cache.check_integrity()
    part_with(cache, twin)


def test_without_memory_for_its_first_pool_nothing_at_all_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RadixTree(block_size=2, partial_tail_sharing=True)
    caller = Caller(9, block_sizes=(2,))
    call(cache, caller, 1500)
    for left in range(9):
        before = snapshot_of(cache)
        with monkeypatch.context() as patch:
            make_short_of_memory(patch, left)
            with pytest.raises(MemoryError):
                cache.compact()
        assert differences(before, snapshot_of(cache)) == []


@pytest.mark.parametrize("step", ["number_rows", "move_rows", "exchange_rows"])
@pytest.mark.parametrize("after", [False, True])
def test_an_interruption_in_between_leaves_a_whole_cache(
    step: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, caller = RadixTree(block_size=2, partial_tail_sharing=True), Caller(11)
    call(cache, caller, 1500)
    twin = copy.deepcopy(cache)
    movers = kernels("compaction")

    def interrupted(*arguments: Any) -> None:
        if after:
            movers[step](*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(operations, "kernels", lambda group: {**kernels(group), step: interrupted})
    with pytest.raises(KeyboardInterrupt):
        cache.compact()
    monkeypatch.undo()
    cache.check_integrity()
    call(cache, caller, 300, twin)
    cache.compact()
    part_with(cache, twin)


def test_compacting_changes_nothing_that_a_cache_tells() -> None:
    cache, caller = RadixTree(block_size=2), Caller(13)
    call(cache, caller, 500)
    before = told_by(cache)
    cache.compact()
    assert told_by(cache) == before
    assert (
        answer_of(cache, Call("clear", {})).blocks.physical.size == before[0].num_blocks + before[0].num_suffix_blocks
    )
