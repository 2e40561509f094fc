"""Tenants: quotas, eviction from one adapter, and adapters that come and go by the hundred thousand.

It relies on :mod:`pair` where every answer and what comes back is checked, and names exact blocks elsewhere.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from model import NONE
from pair import Clock, Pair
from state import differences, sizes_of, snapshot_of

from metrale_numba import InsertAcquired, RadixTree
from metrale_numba.kernels import layout

TENANT, OTHER = 7, 2**64 - 1


def make(quota: int | None, **settings: object) -> RadixTree:
    quotas = None if quota is None else {TENANT: quota}
    return RadixTree(block_size=2, quotas=quotas, **settings)  # type: ignore[arg-type]


def put(cache: RadixTree, tokens: list[int], table: list[int], adapter: int = TENANT, hold: bool = False) -> list[int]:
    """Insert, and mostly release what was stored; return the new blocks."""
    acquired = cache.insert(tokens, table, adapter_id=adapter)
    if not hold:
        cache.release(tokens, adapter_id=adapter)
    return acquired.blocks.tolist()


def lists_of(acquired: InsertAcquired) -> tuple[list[int], ...]:
    return tuple(ids.tolist() for ids in acquired)


def blocks_of(cache: RadixTree, adapter: int = TENANT) -> int:
    return cache.stats_detail().blocks_by_adapter.get(adapter, 0)


# --- an insert past the quota -------------------------------------------------------------------------------------


def test_an_insert_within_the_quota_evicts_nothing() -> None:
    cache = make(3)
    put(cache, [1, 1], [10])
    acquired = cache.insert([2, 2, 3, 3], [11, 12], adapter_id=TENANT)
    assert lists_of(acquired) == ([], [11, 12], [], [])
    assert blocks_of(cache) == 3


def test_an_insert_past_the_quota_evicts_the_tenant_s_oldest_leaves_and_lists_them() -> None:
    cache = make(3)
    put(cache, [1, 1, 2, 2], [10, 11])
    put(cache, [3, 3], [12])
    acquired = cache.insert([4, 4, 5, 5], [13, 14], adapter_id=TENANT)
    # 11 is the oldest leaf, and then its parent is.
    assert lists_of(acquired) == ([], [13, 14], [11, 10], [])
    assert blocks_of(cache) == 3
    assert cache.peek_matched_tokens([3, 3], adapter_id=TENANT) == 2


def test_other_tenants_and_other_block_sizes_of_them_are_left_alone() -> None:
    cache = make(1)
    put(cache, [1, 1], [10], OTHER)
    put(cache, [1, 1], [11], 0)
    put(cache, [1, 1], [12])
    assert lists_of(cache.insert([2, 2], [13], adapter_id=TENANT)) == ([], [13], [12], [])
    assert cache.stats_detail().blocks_by_adapter == {OTHER: 1, 0: 1, TENANT: 1}


def test_tenants_without_a_quota_are_not_bounded_by_another_s() -> None:
    cache = make(1)
    assert put(cache, [1, 1, 2, 2, 3, 3], [10, 11, 12], OTHER) == [10, 11, 12]


def test_blocks_of_all_sizes_count_against_one_quota_and_go_in_one_order() -> None:
    cache = make(2)
    cache.insert([1, 2, 3], [10], (), 3, 0, TENANT)
    cache.release([1, 2, 3], 3, TENANT)
    put(cache, [1, 1], [11])
    assert lists_of(cache.insert([5, 5, 5, 5], [12], (), 4, 0, TENANT)) == ([], [12], [10], [])
    assert lists_of(cache.insert([6, 6, 6], [13], (), 3, 0, TENANT)) == ([], [13], [11], [])
    assert blocks_of(cache) == 2
    cache.check_integrity()


def test_disk_ids_and_suffixes_of_what_is_evicted_are_listed_as_released() -> None:
    cache = make(1)
    cache.insert([1, 1, 2], [10, 11], [50, 51], 2, 0, TENANT)
    cache.release([1, 1], 2, TENANT)
    acquired = cache.insert([3, 3], [12], [52], 2, 0, TENANT)
    assert lists_of(acquired) == ([52], [12], [10, 11], [50, 51])


def test_what_the_quota_evicts_is_listed_before_what_the_insert_replaces() -> None:
    cache = make(3)
    put(cache, [1, 1, 2], [10, 11])
    put(cache, [3, 3, 4], [12, 13])
    # The suffix 11 makes way for the new child of 10.
    acquired = cache.insert([1, 1, 5, 5, 6, 6], [10, 14, 15], adapter_id=TENANT)
    assert lists_of(acquired) == ([], [14, 15], [12, 13, 11], [])


def test_suffix_blocks_do_not_count_against_the_quota() -> None:
    cache = make(1)
    assert lists_of(cache.insert([1, 1, 2], [10, 11], adapter_id=TENANT)) == ([], [10, 11], [], [])
    assert cache.stats_detail().num_suffix_blocks == 1


def test_the_clock_moves_by_one_whatever_the_quota_does() -> None:
    cache = make(1)
    for number, tokens in enumerate(([1, 1], [2, 2], [1, 1, 2, 2], [3, 3, 4, 4], []), 1):
        cache.insert(tokens, [10, 11], adapter_id=TENANT)
        assert cache.stats_detail().clock == number


# --- the path being inserted --------------------------------------------------------------------------------------


def test_no_node_of_the_path_being_inserted_is_evicted() -> None:
    cache = make(3)
    # The path is the oldest there is, and nobody holds it.
    put(cache, [1, 1, 2, 2], [10, 11])
    put(cache, [3, 3], [12])
    acquired = cache.insert([1, 1, 2, 2, 4, 4], [20, 21, 22], (), 2, 0, TENANT)
    assert lists_of(acquired) == ([], [22], [12], [])
    assert cache.peek_matched_tokens([1, 1, 2, 2, 4, 4], adapter_id=TENANT) == 6


def test_a_path_that_fills_the_quota_by_itself_gets_no_more_and_keeps_what_it_has() -> None:
    cache = make(2)
    put(cache, [1, 1, 2, 2], [10, 11])
    acquired = cache.insert([1, 1, 2, 2, 3, 3], [20, 21, 22], (), 2, 0, TENANT)
    assert lists_of(acquired) == ([], [], [], [])
    assert cache.peek_matched_tokens([1, 1, 2, 2, 3, 3], adapter_id=TENANT) == 4


def test_the_part_of_the_path_that_is_there_is_held_and_stamped_although_nothing_is_stored() -> None:
    cache = make(2)
    put(cache, [1, 1], [10])
    put(cache, [2, 2], [11], hold=True)
    cache.insert([1, 1, 3, 3], [20, 21], adapter_id=TENANT)
    assert cache.evict(9).is_empty()
    cache.release([1, 1], adapter_id=TENANT)
    cache.release([2, 2], adapter_id=TENANT)
    assert cache.evict(9).physical.tolist() == [11, 10]
    assert cache.stats_detail().over_releases == 0


def test_the_whole_part_of_the_path_that_is_there_is_held_by_a_tenant_far_past_its_quota_too() -> None:
    cache = make(None)
    put(cache, [1, 1, 2, 2], [10, 11])
    cache.set_quota(TENANT, 0)
    assert lists_of(cache.insert([1, 1, 2, 2, 3, 3], [20, 21, 22], adapter_id=TENANT)) == ([], [], [], [])
    assert cache.num_evictable() == 0
    cache.release([1, 1, 2, 2], adapter_id=TENANT)
    assert cache.stats_detail().over_releases == 0


def test_siblings_of_the_path_may_go_and_its_invisible_nodes_may_not() -> None:
    cache = make(4)
    put(cache, [1, 1, 2, 2], [10, 11])
    put(cache, [1, 1, 3, 3], [10, 12])
    put(cache, [4, 4], [13])
    # Nothing sees 10 and 11 any more, but they are still nodes of the path.
    cache.release([1, 1, 2, 2], adapter_id=TENANT)
    acquired = cache.insert([1, 1, 2, 2, 5, 5, 6, 6], [10, 11, 14, 15], adapter_id=TENANT)
    assert lists_of(acquired) == ([], [14, 15], [12, 13], [])
    cache.check_integrity()


def test_an_insert_of_what_is_all_there_evicts_nothing_even_past_the_quota() -> None:
    cache = make(None)
    put(cache, [1, 1, 2, 2], [10, 11])
    put(cache, [3, 3], [12])
    cache.set_quota(TENANT, 1)
    assert lists_of(cache.insert([1, 1, 2, 2], [20, 21], adapter_id=TENANT)) == ([], [], [], [])
    assert blocks_of(cache) == 3


# --- too little room ----------------------------------------------------------------------------------------------


def test_if_eviction_is_not_enough_fewer_chunks_are_stored() -> None:
    cache = make(4)
    put(cache, [1, 1, 2, 2], [10, 11], hold=True)
    put(cache, [3, 3], [12])
    acquired = cache.insert([5, 5, 6, 6, 7, 7], [13, 14, 15], adapter_id=TENANT)
    assert lists_of(acquired) == ([], [13, 14], [12], [])
    assert cache.peek_matched_tokens([5, 5, 6, 6, 7, 7], adapter_id=TENANT) == 4


def test_a_sequence_holds_only_what_was_stored_of_it() -> None:
    cache = make(2)
    cache.insert([5, 5, 6, 6, 7, 7], [13, 14, 15], adapter_id=TENANT)
    assert cache.num_evictable() == 0
    cache.release([5, 5, 6, 6], adapter_id=TENANT)
    assert cache.num_evictable() == 2
    assert cache.stats_detail().over_releases == 0


def test_an_insert_that_is_cut_short_stores_no_suffix_and_leaves_the_one_there_is() -> None:
    cache = make(1)
    put(cache, [1, 1, 9], [10, 11])
    acquired = cache.insert([1, 1, 2, 2, 3], [10, 12, 13], [50, 51, 52], 2, 0, TENANT)
    # Neither is the suffix 11 dropped for a child that is not stored, nor 13 kept behind one.
    assert lists_of(acquired) == ([50], [], [], [])
    assert cache.stats_detail().num_suffix_blocks == 1
    assert cache.clear().blocks.physical.tolist() == [10, 11]


def test_an_insert_that_just_fits_stores_its_suffix() -> None:
    cache = make(2)
    put(cache, [9, 9], [10])
    acquired = cache.insert([1, 1, 2, 2, 3], [11, 12, 13], [51, 52, 53], 2, 0, TENANT)
    assert lists_of(acquired) == ([51, 52, 53], [11, 12, 13], [10], [])


def test_adopting_exchanges_the_blocks_of_the_path_and_evicts_beside() -> None:
    cache = make(2, adopt_blocks=True)
    put(cache, [1, 1], [10])
    put(cache, [2, 2], [11])
    acquired = cache.insert([1, 1, 3, 3], [20, 21], adapter_id=TENANT)
    assert lists_of(acquired) == ([], [20, 21], [11, 10], [])
    # A block that is both taken and given back changes hands but once: of a path that is cut short, too.
    acquired = cache.insert([1, 1, 3, 3, 4, 4], [30, 31, 32], adapter_id=TENANT)
    assert lists_of(acquired) == ([], [30, 31], [20, 21], [])


def test_the_first_chunks_are_the_ones_that_are_stored_and_get_their_own_disk_ids() -> None:
    cache = make(2)
    acquired = cache.insert([1, 1, 2, 2, 3, 3], [10, 11, 12], [NONE, 51, 52], 2, 0, TENANT)
    assert lists_of(acquired) == ([51], [10, 11], [], [])


def test_a_quota_of_0_stores_nothing_and_leaves_nothing_behind() -> None:
    cache = make(0)
    put(cache, [1, 1], [10], OTHER)
    before = sizes_of(cache)
    for size in (2, 3, 16):
        acquired = cache.insert(range(33), range(33), range(33), size, 0, TENANT)
        assert lists_of(acquired) == ([], [], [], [])
    assert cache.stats() == (1, 1)
    assert cache.stats_detail().blocks_by_adapter == {OTHER: 1}
    assert cache.lookup([1, 1], adapter_id=TENANT).is_empty()
    assert sizes_of(cache).keys() == before.keys()
    cache.check_integrity()


def test_a_snapshot_is_registered_even_if_no_block_is_stored() -> None:
    cache = make(0)
    displaced, acquired = cache.insert_with_snapshot([1, 1], [10], (), 2, 5, 0, 0, TENANT)
    assert (displaced, lists_of(acquired)) == (None, ([], [], [], []))
    assert cache.snapshot_count() == 1


def test_what_is_pinned_is_not_evicted_for_the_quota() -> None:
    cache = make(2)
    put(cache, [1, 1], [10])
    put(cache, [2, 2], [11])
    cache.pin("system", [1, 1], adapter_id=TENANT)
    assert lists_of(cache.insert([3, 3, 4, 4], [12, 13], adapter_id=TENANT)) == ([], [12], [11], [])


def test_what_was_pinned_goes_for_the_quota_once_its_time_is_over(clock: Clock) -> None:
    cache = make(1)
    put(cache, [1, 1], [10])
    cache.pin("system", [1, 1], adapter_id=TENANT, ttl=2)
    clock.seconds += 1
    assert lists_of(cache.insert([2, 2], [11], adapter_id=TENANT)) == ([], [], [], [])
    clock.seconds += 1
    assert lists_of(cache.insert([2, 2], [11], adapter_id=TENANT)) == ([], [11], [10], [])
    assert cache.pins() == {}


def test_a_refused_insert_evicts_nothing() -> None:
    cache = make(1)
    put(cache, [1, 1], [10])
    for arguments in (
        {"tokens": [2, 2], "block_table": [NONE]},
        {"tokens": [2, 2, 3, 3], "block_table": [11, NONE]},
        {"tokens": [2, 2, 3], "block_table": [11, NONE]},
        {"tokens": [2, 2], "block_table": [11], "disk_block_ids": [1, 2]},
        {"tokens": [2, 2], "block_table": [11], "matched_tokens": 3},
    ):
        before = snapshot_of(cache)
        with pytest.raises(ValueError, match=r"block_table\[|disk_block_ids|matched_tokens"):
            cache.insert(**arguments, adapter_id=TENANT)  # type: ignore[arg-type]
        assert differences(before, snapshot_of(cache)) == []


# --- setting quotas -----------------------------------------------------------------------------------------------


def test_set_quota_evicts_nothing_itself() -> None:
    cache = make(None)
    put(cache, [1, 1, 2, 2], [10, 11])
    cache.set_quota(TENANT, 1)
    assert blocks_of(cache) == 2


def test_after_a_quota_was_lowered_the_next_insert_of_something_new_brings_the_tenant_down_to_it() -> None:
    cache = make(None)
    for token in range(1, 6):
        put(cache, [token, token], [10 + token])
    cache.set_quota(TENANT, 2)
    acquired = cache.insert([9, 9], [20], adapter_id=TENANT)
    assert lists_of(acquired) == ([], [20], [11, 12, 13, 14], [])
    assert blocks_of(cache) == 2


def test_a_tenant_that_cannot_be_brought_down_to_a_lowered_quota_stores_nothing_new() -> None:
    cache = make(None)
    put(cache, [1, 1, 2, 2, 3, 3], [10, 11, 12], hold=True)
    put(cache, [4, 4], [13])
    cache.set_quota(TENANT, 2)
    assert lists_of(cache.insert([9, 9], [20], adapter_id=TENANT)) == ([], [], [13], [])
    assert blocks_of(cache) == 3


def test_a_quota_can_be_raised_and_lifted() -> None:
    cache = make(1)
    cache.set_quota(TENANT, 2)
    assert put(cache, [1, 1, 2, 2, 3, 3], [10, 11, 12]) == [10, 11]
    cache.set_quota(TENANT, None)
    assert put(cache, [1, 1, 2, 2, 3, 3], [10, 11, 12]) == [12]
    cache.set_quota(OTHER, None)


def test_the_quotas_given_to_the_constructor_are_copied() -> None:
    quotas = {TENANT: 1}
    cache = RadixTree(block_size=2, quotas=quotas)
    quotas[TENANT] = 100
    quotas[OTHER] = 0
    assert put(cache, [1, 1, 2, 2], [10, 11]) == [10]
    assert put(cache, [1, 1], [12], OTHER) == [12]
    cache.set_quota(TENANT, 2)
    assert quotas[TENANT] == 100


def test_quotas_outlive_clear_and_drop_adapter_and_go_with_copies() -> None:
    cache = make(1)
    put(cache, [1, 1, 2, 2], [10, 11])
    cache.drop_adapter(TENANT)
    assert put(cache, [1, 1, 2, 2], [10, 11]) == [10]
    cache.clear()
    twin = copy.deepcopy(cache)
    cache.set_quota(TENANT, None)
    assert put(twin, [1, 1, 2, 2], [10, 11]) == [10]
    assert put(cache, [1, 1, 2, 2], [10, 11]) == [10, 11]


def test_a_quota_nobody_reaches_changes_no_answer() -> None:
    free, bounded = make(None), make(10**6)
    rng = np.random.default_rng(7)
    for number in range(300):
        tokens = rng.integers(0, 2, int(rng.integers(1, 14)))
        table = range(number * 10, number * 10 + 10)
        calls = (
            ("insert", (tokens, table, (), 2, 0, TENANT)),
            ("release", (tokens, 2, TENANT)),
            ("lookup", (tokens[:-1], 2, 0, TENANT)),
            ("release", (tokens[:-1], 2, TENANT)),
            ("evict", (number % 2,)),
        )
        for name, arguments in calls:
            assert getattr(free, name)(*arguments) == getattr(bounded, name)(*arguments)
    assert free.stats_detail() == bounded.stats_detail()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("adopt_blocks", [False, True])
def test_nothing_is_lost_and_no_quota_is_passed(seed: int, adopt_blocks: bool) -> None:
    """Tenants with quotas insert what others inserted before; every answer is the model's, and the books balance."""
    quotas = {0: 6, TENANT: 3, OTHER: 0}
    settings = {"block_size": 2, "quotas": quotas, "adopt_blocks": adopt_blocks, "partial_tail_sharing": True}
    pair = Pair(RadixTree, settings)
    rng = np.random.default_rng(seed)
    for number in range(250):
        tokens = tuple(rng.integers(0, 2, int(rng.integers(1, 14))).tolist())
        adapter = (0, TENANT, OTHER, 5)[number % 4]
        size = 2 if rng.random() < 0.8 else 3
        table = tuple(range(number * 14, number * 14 + len(tokens)))
        disks = tuple(block if block % 3 else NONE for block in table) if rng.random() < 0.5 else ()
        pair.insert(tokens, table, disks, size, 0, adapter)
        stored = pair.peek(tokens, size, adapter)
        if rng.random() < 0.9:
            pair.release(tokens[: stored - stored % size], size, adapter)
        pair.evict(int(rng.random() < 0.2))
        for tenant, quota in quotas.items():
            assert blocks_of(pair.cache, tenant) <= quota
        pair.compare_state()
    assert pair.cache.stats_detail().over_releases == 0
    pair.drain()


# --- evict_from ---------------------------------------------------------------------------------------------------


def test_evict_from_takes_the_oldest_leaves_of_one_adapter_in_the_order_of_evict() -> None:
    cache = make(None)
    put(cache, [1, 1, 2, 2], [10, 11])
    put(cache, [3, 3], [20], OTHER)
    put(cache, [1, 1, 4, 4], [10, 12])
    cache.insert([5, 5, 5], [13], (), 3, 0, TENANT)
    cache.release([5, 5, 5], 3, TENANT)
    put(cache, [6, 6], [14])
    cache.lookup([1, 1, 2, 2], adapter_id=TENANT)
    cache.release([1, 1, 2, 2], adapter_id=TENANT)
    alone = copy.deepcopy(cache)
    alone.drop_adapter(OTHER)
    assert cache.evict_from(TENANT, 10**9).physical.tolist() == [12, 13, 14, 11, 10]
    assert alone.evict(10**9).physical.tolist() == [12, 13, 14, 11, 10]
    assert cache.evict(10**9).physical.tolist() == [20]


def test_evict_from_stops_at_as_many_blocks_as_were_asked_for() -> None:
    cache = make(None)
    for token in range(1, 6):
        put(cache, [token, token], [10 + token])
    assert cache.evict_from(TENANT, 0).is_empty()
    assert cache.evict_from(TENANT, 2).physical.tolist() == [11, 12]
    assert cache.evict_from(TENANT, 1).physical.tolist() == [13]
    assert blocks_of(cache) == 2


def test_evict_from_takes_a_suffix_with_its_node_and_lists_the_disk_ids() -> None:
    cache = make(None)
    cache.insert([1, 1, 2], [10, 11], [50, 51], 2, 0, TENANT)
    cache.release([1, 1], 2, TENANT)
    put(cache, [3, 3], [12])
    evicted = cache.evict_from(TENANT, 1)
    assert (evicted.physical.tolist(), evicted.disk_block_ids.tolist()) == ([10, 11], [50, 51])


def test_evict_from_passes_over_what_is_held_and_what_has_children() -> None:
    cache = make(None)
    put(cache, [1, 1, 2, 2], [10, 11])
    cache.lookup([1, 1, 2, 2], adapter_id=TENANT)
    put(cache, [1, 1, 3, 3], [10, 12])
    assert cache.evict_from(TENANT, 9).physical.tolist() == [12]
    cache.release([1, 1, 2, 2], adapter_id=TENANT)
    assert cache.evict_from(TENANT, 9).physical.tolist() == [11, 10]


def test_evict_from_an_adapter_that_has_nothing_changes_nothing() -> None:
    cache = make(None)
    put(cache, [1, 1], [10])
    before = snapshot_of(cache)
    assert cache.evict_from(OTHER, 10**9).is_empty()
    assert differences(before, snapshot_of(cache)) == []


def test_evict_from_moves_no_clock() -> None:
    cache = make(None)
    put(cache, [1, 1], [10])
    before = cache.stats_detail().clock
    cache.evict_from(TENANT, 1)
    assert cache.stats_detail().clock == before


# --- blocks by adapter --------------------------------------------------------------------------------------------


def test_blocks_by_adapter_counts_full_blocks_of_all_sizes_for_each_adapter_that_has_any() -> None:
    cache = make(None)
    put(cache, [1, 1, 2, 2, 3], [10, 11, 12])
    cache.insert([1, 2, 3], [13], (), 3, 0, TENANT)
    put(cache, [1, 1], [14], OTHER, hold=True)
    put(cache, [1, 1], [15], 2**63, hold=True)
    put(cache, [1, 1], [16], 0)
    assert cache.stats_detail().blocks_by_adapter == {TENANT: 3, OTHER: 1, 2**63: 1, 0: 1}
    cache.evict(10**9)
    assert cache.stats_detail().blocks_by_adapter == {TENANT: 1, OTHER: 1, 2**63: 1}


# --- adapters that come and go ------------------------------------------------------------------------------------

NUM_ADAPTERS = 200_000
AT_ONCE = 1000


def num_roots(cache: RadixTree) -> int:
    return sum(int(pool.header[layout.POOL_NUM_ROOTS]) for pool in cache._pools.values())


def test_adapters_without_number_that_are_used_and_evicted_leave_nothing_behind() -> None:
    cache = RadixTree(block_size=2)
    tokens, table = np.array([1, 2, 3, 4, 5], np.uint32), np.array([1, 2, 3], np.uint32)
    sizes = {}
    for first in range(1, NUM_ADAPTERS, AT_ONCE):
        for adapter in range(first, first + AT_ONCE):
            # Spread over all 64 bits.
            adapter = adapter * 0x9E37_79B9_7F4A_7C15 % 2**64  # noqa: PLW2901
            cache.insert(tokens, table, (), 2, 0, adapter)
            cache.release(tokens, 2, adapter)
        assert num_roots(cache) == AT_ONCE
        assert len(cache.evict(3 * AT_ONCE)) == 3 * AT_ONCE
        assert num_roots(cache) == 0
        sizes = sizes or sizes_of(cache)
    assert sizes_of(cache) == sizes
    assert cache.stats_detail().blocks_by_adapter == {}
    cache.check_integrity()
    state = snapshot_of(cache)
    assert sum(len(part) for part in state.values() if isinstance(part, tuple)) < 1000


@pytest.mark.parametrize("how", ["evict_from", "quota", "another block size"])
def test_however_adapters_go_their_roots_go_with_them(how: str) -> None:
    cache = RadixTree(block_size=2)
    cache.insert([9, 9], [99])
    tokens, table = np.array([1, 2, 3, 4], np.uint32), np.array([1, 2], np.uint32)
    sizes = {}
    for adapter in range(1, 10_000):
        if how == "quota":
            # Nothing is stored, so there is no root to begin with.
            cache.set_quota(adapter, 0)
            assert cache.insert(tokens, table, (), 2, 0, adapter).blocks.size == 0
            cache.set_quota(adapter, None)
        else:
            size = 2 if how == "evict_from" else 4
            cache.insert(tokens, table, (), size, 0, adapter)
            cache.release(tokens, size, adapter)
            assert len(cache.evict_from(adapter, 2)) == 4 // size
        if adapter == 10:
            sizes = sizes_of(cache)
    assert sizes_of(cache) == sizes
    assert num_roots(cache) == 1
    assert cache.stats_detail().blocks_by_adapter == {0: 1}
    cache.check_integrity()


def test_adapters_that_are_dropped_leave_their_epochs_alone() -> None:
    cache = RadixTree(block_size=2)
    tokens, table = np.array([1, 2, 3, 4], np.uint32), np.array([1, 2], np.uint32)
    sizes = {}
    for adapter in range(10_000):
        cache.insert_with_snapshot(tokens, table, (), 2, adapter, 0, 0, adapter)
        assert len(cache.drop_adapter(adapter).blocks) == 2
        sizes = sizes or sizes_of(cache)
    assert sizes_of(cache) == sizes
    assert num_roots(cache) == 0
    assert cache._adapter_drops == dict.fromkeys(range(10_000), 1)
    cache.check_integrity()


def test_adapters_that_are_only_asked_for_leave_nothing_behind() -> None:
    cache = RadixTree(block_size=2)
    cache.insert([1, 2], [1])
    before = snapshot_of(cache)
    for adapter in range(1, 3000):
        cache.peek_matched_tokens([1, 2], 2, adapter)
        cache.pin_prefix([1, 2], 2, adapter)
        cache.pin("name", [1, 2], 2, adapter)
        cache.release([1, 2], 2, adapter)
        cache.evict_from(adapter, 5)
        cache.adapter_epoch(adapter)
        cache.lookup([1, 2], 2, adapter, adapter, record=False)
    assert differences(before, snapshot_of(cache)) == []
