"""Strict caches, look-ups that are not recorded, many peeks at once, and what a scheduler asks at every step.

It relies on :mod:`state` to find that a refused call changed nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
from model import tier_key
from state import arrays_of, differences, snapshot_of

from metrale_numba import (
    MetraleError,
    RadixTree,
    RefcountError,
    cache_hit_count,
    cache_hit_tokens_total,
    cache_miss_count,
)

# --- strict -------------------------------------------------------------------------------------------------------

PROMPT = [1, 2, 3, 4, 5, 6]


def strict_cache() -> RadixTree:
    """Three blocks that one sequence holds, of a cache that refuses what nobody is entitled to."""
    cache = RadixTree(block_size=2, strict=True)
    cache.insert(PROMPT, [10, 11, 12])
    return cache


def assert_refused(cache: RadixTree, tokens: list[int], block: int, matched_tokens: int | None = None) -> None:
    before = snapshot_of(cache)
    name, rest = ("release", ()) if matched_tokens is None else ("release_matched", (2, matched_tokens))
    with pytest.raises(RefcountError, match=rf"^block {block} of tokens is held by no sequence"):
        getattr(cache, name)(tokens, *rest)
    assert differences(before, snapshot_of(cache)) == []


def test_a_strict_cache_lets_every_hold_go_once() -> None:
    cache = strict_cache()
    cache.lookup(PROMPT)
    cache.release(PROMPT)
    cache.release_matched(PROMPT, 2, 6)
    assert cache.evict(3).physical.tolist() == [12, 11, 10]


def test_a_strict_cache_refuses_a_release_too_many_and_changes_nothing() -> None:
    cache = strict_cache()
    cache.release(PROMPT)
    assert_refused(cache, PROMPT, 0)
    assert_refused(cache, PROMPT, 0, matched_tokens=6)
    assert cache.stats_detail().over_releases == 0


def test_a_strict_cache_refuses_the_whole_release_for_its_first_block_that_nobody_holds() -> None:
    cache = strict_cache()
    cache.lookup(PROMPT[:4])
    cache.release(PROMPT)
    # The first two blocks are still held, the third is not.
    assert_refused(cache, PROMPT, 2)
    assert_refused(cache, PROMPT, 2, matched_tokens=6)
    cache.release_matched(PROMPT, 2, 5)
    assert cache.num_evictable() == 3


def test_a_strict_cache_refuses_what_an_insert_with_an_unaligned_match_did_not_hold() -> None:
    cache = RadixTree(block_size=2, strict=True)
    cache.insert(PROMPT, [10, 11, 12], matched_tokens=3)
    # The first block was said to be held already, and the second, where the match ends, got no hold either.
    assert_refused(cache, PROMPT, 0)


def test_a_strict_cache_does_not_mind_tokens_that_are_not_cached() -> None:
    cache = strict_cache()
    cache.release([9, 9])
    cache.release([*PROMPT, 7, 7])
    cache.release([1])
    cache.release([])
    cache.release(PROMPT, 3)
    assert_refused(cache, [*PROMPT, 7, 7], 0)
    cache.release_matched(PROMPT, 2, 1)


def test_a_refused_release_is_a_bad_value_of_this_package() -> None:
    assert issubclass(RefcountError, ValueError)
    assert issubclass(RefcountError, MetraleError)


def test_a_cache_that_is_not_strict_counts_instead() -> None:
    cache = RadixTree(block_size=2)
    cache.insert(PROMPT, [10, 11, 12])
    cache.release(PROMPT)
    cache.release(PROMPT)
    assert cache.stats_detail().over_releases == 3
    cache.release(PROMPT[:2])
    assert cache.stats_detail().over_releases == 4


# --- look-ups that are not recorded -------------------------------------------------------------------------------


def with_snapshots() -> RadixTree:
    cache = RadixTree(block_size=2, check_secret=b"the same in all")
    cache.insert_with_snapshot(PROMPT, [10, 11, 12], (), 2, 50, 5)
    cache.insert_tail_snapshot(PROMPT[:4], 51, 6)
    return cache


def test_a_look_up_that_is_not_recorded_answers_and_holds_as_any_other() -> None:
    one, other = with_snapshots(), with_snapshots()
    for tokens, session in ((PROMPT, 5), (PROMPT[:4], 6), (PROMPT[:3], 0), ([9], 1)):
        assert one.lookup(tokens, 2, session, record=False) == other.lookup(tokens, 2, session)
    assert one.stats_detail().clock == other.stats_detail().clock
    assert one.num_evictable() == other.num_evictable() == 0
    for cache in (one, other):
        for tokens in (PROMPT, PROMPT, PROMPT[:4], PROMPT[:3]):
            cache.release(tokens)
    assert one.evict(3) == other.evict(3)
    assert one.stats_detail().over_releases == 0


def test_a_look_up_that_is_not_recorded_counts_nowhere() -> None:
    cache = with_snapshots()
    detail, snapshots = cache.stats_detail(), cache.snapshot_stats()
    process = cache_hit_count(), cache_miss_count(), cache_hit_tokens_total()
    cache.lookup(PROMPT, 2, 5, record=False)
    cache.lookup([9, 9], 2, 5, record=False)
    cache.lookup([9, 9], 77, 5, record=False)
    assert cache.stats_detail() == detail._replace(clock=detail.clock + 1)
    assert cache.snapshot_stats() == snapshots
    assert (cache_hit_count(), cache_miss_count(), cache_hit_tokens_total()) == process


def test_a_look_up_that_is_not_recorded_makes_the_snapshot_it_finds_fresh() -> None:
    cache = RadixTree(block_size=1)
    cache.insert([1, 2], [10, 11])
    cache.insert_intermediate_snapshot([1], (), (), 1, 50, 5)
    cache.insert_intermediate_snapshot([2], (), (), 1, 51, 6)
    assert cache.lookup([1], 1, 0, record=False).ssm_snapshot == 50
    assert cache.evict_snapshot_lru() == 51


def test_a_second_look_after_a_tier_miss_is_one_request() -> None:
    cache = RadixTree(block_size=1)
    cache.insert_with_snapshot([1, 2], [10, 11], (), 1, 50)
    cache.evict_snapshot_to_tier(0)
    first = cache.lookup([1, 2])
    assert first.ssm_snapshot_tier_key == tier_key(0, [1, 2])
    cache.forget_snapshot_tier_key(first.ssm_snapshot_tier_key)
    cache.release_matched([1, 2], 1, first.matched_tokens)
    again = cache.lookup([1, 2], record=False)
    assert (again.matched_tokens, again.ssm_snapshot_tier_key) == (2, None)
    assert cache.stats_detail().cache_hits == 1
    assert cache.snapshot_stats()[1:3] == (1, 1)


# --- many peeks ---------------------------------------------------------------------------------------------------


def test_many_peeks_answer_as_each_alone_and_change_nothing() -> None:
    cache = RadixTree(block_size=2, partial_tail_sharing=True)
    cache.insert(PROMPT, [10, 11, 12])
    cache.insert([7, 8, 9], [13, 14], adapter_id=5)
    prompts = [PROMPT, PROMPT[:5], [1], [7, 8, 9], [], np.array([1, 2, 9]), [4] * 100]
    before = snapshot_of(cache)
    for size in (None, 1, 2, 3):
        for adapter in (0, 5, 6):
            alone = [cache.peek_matched_tokens(tokens, size, adapter) for tokens in prompts]
            assert cache.peek_many(prompts, size, adapter) == alone
    assert differences(before, snapshot_of(cache)) == []


# --- what can be evicted ------------------------------------------------------------------------------------------


def test_num_evictable_counts_blocks_and_suffixes_that_nobody_holds() -> None:
    cache = RadixTree(block_size=2)
    assert cache.num_evictable() == 0
    cache.insert([1, 2, 3, 4, 5], [10, 11, 12])
    assert cache.num_evictable() == 0
    cache.release([1, 2, 3, 4])
    assert cache.num_evictable() == 3
    cache.lookup([1, 2])
    assert cache.num_evictable() == 2
    assert len(cache.evict(10)) == 2
    assert cache.num_evictable() == 0
    cache.release([1, 2])
    assert cache.num_evictable() == 1


def test_num_evictable_is_exact_while_holds_nest_and_evict_frees_that_many() -> None:
    rng = np.random.default_rng(3)
    cache = RadixTree(block_size=2)
    held: list[list[int]] = []
    for number in range(300):
        tokens = rng.integers(0, 2, int(rng.integers(2, 14))).tolist()
        matched = cache.lookup(tokens).matched_tokens
        cache.insert(tokens, range(number * 10, number * 10 + 10), (), 2, matched)
        held.append(tokens)
        while len(held) > 5:
            cache.release(held.pop(int(rng.integers(len(held)))))
        foreseen = cache.num_evictable()
        if number % 7 == 0:
            assert len(cache.evict(10**9)) == foreseen
            assert cache.num_evictable() == 0
    assert cache.stats_detail().over_releases == 0


def test_num_evictable_is_an_upper_bound_where_holds_do_not_nest() -> None:
    cache = RadixTree(block_size=2)
    # The sequence is said to hold the first block already, and does not.
    cache.insert([1, 2, 3, 4], [10, 11], matched_tokens=2)
    assert cache.num_evictable() == 1
    assert cache.evict(10).is_empty()
    cache.check_integrity()


def test_num_evictable_takes_no_longer_for_a_large_cache() -> None:
    # What it reads is one number that is kept: the arrays of the tree may as well be gone.
    cache = RadixTree(block_size=1)
    cache.insert(range(10_000), range(10_000))
    cache.release(range(10_000))
    pools = cache._pools
    cache._pools = {}
    assert cache.num_evictable() == 10_000
    cache._pools = pools
    cache.check_integrity()


# --- sizes --------------------------------------------------------------------------------------------------------


def test_memory_usage_is_what_the_arrays_take() -> None:
    cache = with_snapshots()
    cache.insert(PROMPT, [10, 11], [50, 51], 3)
    before = snapshot_of(cache)
    usage = cache.memory_usage()
    assert differences(before, snapshot_of(cache)) == []
    assert all(type(size) is int for size in usage.values())
    # Each array once, in however many places the cache has it.
    arrays = {(array.ctypes.data, array.nbytes) for array in arrays_of(cache).values()}
    assert sum(usage.values()) == sum(size for _, size in arrays)


def test_memory_usage_grows_with_what_is_stored() -> None:
    cache = RadixTree(block_size=1)
    before = sum(cache.memory_usage().values())
    cache.insert(range(100_000), range(100_000))
    grown = sum(cache.memory_usage().values()) - before
    assert 40 * 100_000 < grown < 400 * 100_000
