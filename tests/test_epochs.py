"""Forgetting on purpose: everything, or one adapter's part; epochs; and the keys whose stored bytes are garbage.

It relies on :mod:`pair` where what comes back is counted, and names exact slots and keys elsewhere.
"""

from __future__ import annotations

import numpy as np
import pytest
from model import tier_key
from pair import Pair, forge
from state import differences, sizes_of, snapshot_of

from metrale_numba import Cleared, EvictedBlocks, RadixTree, Spill

A, B = 7, 2**64 - 1


def populated() -> RadixTree:
    """Three adapters with blocks of two sizes, held and not, suffixes, disk ids, snapshots resident and spilled."""
    cache = RadixTree(block_size=2)
    for number, adapter in enumerate((0, A, B)):
        first = 100 * number
        disks = [first + 50, 2**32 - 1, first + 52]
        cache.insert([1, 2, 3, 4, 5], [first, first + 1, first + 2], disks, 2, 0, adapter)
        cache.insert([1, 2, 8, 8], [first + 90, first + 3], (), 2, 0, adapter)
        cache.release([1, 2, 8, 8], 2, adapter)
        cache.insert([1, 2, 3], [first + 4], (), 3, 0, adapter)
        for depth in range(1, 4):
            cache.insert_intermediate_snapshot([1, 2, 3][:depth], (), (), 2, first + depth, depth, 0, adapter)
    for adapter in (0, A, B):
        # The oldest session goes first, and of its entries the first.
        cache.lookup([1, 2, 3, 4], 2, 2, adapter)
        cache.release([1, 2, 3, 4], 2, adapter)
    for _ in range(3):
        cache.evict_snapshot_to_tier(0)
    return cache


def keys_of(cleared: Cleared) -> list[int]:
    assert cleared.tier_keys.dtype == np.uint64
    return sorted(cleared.tier_keys.tolist())


# --- clear --------------------------------------------------------------------------------------------------------


def test_clear_hands_back_every_block_disk_id_slot_and_key_held_or_not() -> None:
    cleared = populated().clear()
    assert isinstance(cleared, Cleared)
    assert isinstance(cleared.blocks, EvictedBlocks)
    assert sorted(cleared.blocks.physical.tolist()) == sorted(
        first + block for first in (0, 100, 200) for block in range(5)
    )
    assert sorted(cleared.blocks.disk_block_ids.tolist()) == [50, 52, 150, 152, 250, 252]
    assert sorted(cleared.snapshot_slots) == [2, 3, 102, 103, 202, 203]
    assert keys_of(cleared) == sorted(tier_key(adapter, [1]) for adapter in (0, A, B))


def test_contents_lists_what_clear_would_hand_back_and_changes_nothing() -> None:
    cache = populated()
    before = snapshot_of(cache)
    contents = cache.contents()
    assert differences(before, snapshot_of(cache)) == []
    assert contents == cache.clear()
    assert cache.contents() == cache.clear()


def test_clear_leaves_nothing_to_find() -> None:
    cache = populated()
    cache.clear()
    assert cache.stats() == (0, 0)
    assert cache.snapshot_count() == 0
    assert cache.num_evictable() == 0
    assert cache.stats_detail().blocks_by_adapter == {}
    for adapter in (0, A, B):
        assert cache.lookup([1, 2, 3, 4, 5], 2, 2, adapter).is_empty()
        assert cache.peek_matched_tokens([1, 2, 3], 3, adapter) == 0
        assert not cache.forget_snapshot_tier_key(tier_key(adapter, [1]))
    assert cache.evict(10**9).is_empty()
    assert cache.evict_snapshot_lru() is None
    cache.check_integrity()


def test_clear_of_an_empty_cache_hands_back_nothing() -> None:
    cleared = RadixTree().clear()
    assert cleared.blocks.is_empty()
    assert (cleared.snapshot_slots, cleared.tier_keys.tolist()) == ([], [])


def test_clear_lets_clocks_and_counters_go_on() -> None:
    cache = populated()
    before, snapshots = cache.stats_detail(), cache.snapshot_stats()
    cache.clear()
    after = cache.stats_detail()
    assert after == before._replace(
        num_blocks=0, num_suffix_blocks=0, num_evictable=0, blocks_by_adapter={}, epoch=before.epoch + 1
    )
    assert cache.snapshot_stats() == snapshots
    cache.insert([1, 2], [0])
    assert cache.stats_detail().clock == before.clock + 1


def test_clear_and_compact_give_the_memory_back_and_the_cache_can_be_used_again() -> None:
    cache = RadixTree(block_size=2)
    cache.insert([1, 2], [0])
    small = sum(cache.memory_usage().values())
    for adapter in range(50):
        cache.insert(range(100), range(50), (), 2, 0, adapter)
        cache.insert(range(99), range(33), (), 3, 0, adapter)
        cache.insert_intermediate_snapshot(range(adapter), (), (), 2, adapter)
    assert sum(cache.memory_usage().values()) > 4 * small
    rows = cache._pools[2].rows
    cache.clear()
    # The arrays of the default block size are kept, since the next prompts need them; those of the other are gone.
    assert {size: pool.rows for size, pool in cache._pools.items()} == {2: rows}
    cache.check_integrity()
    cache.compact()
    assert sum(cache.memory_usage().values()) <= small
    assert cache.insert([1, 2, 3], [5, 6]).blocks.tolist() == [5, 6]
    cache.check_integrity()


def test_clear_ends_the_lease() -> None:
    def evicted_after_a_lease(clear: bool) -> int | None:
        cache = RadixTree(block_size=1)
        cache.insert([1], [1])
        cache.lookup([1], session_hash=5)
        if clear:
            cache.clear()
        cache.insert_tail_snapshot([1], 50, session_hash=5)
        cache.insert_tail_snapshot([2], 60, session_hash=6)
        return cache.evict_snapshot_lru()

    assert evicted_after_a_lease(clear=False) == 60
    assert evicted_after_a_lease(clear=True) == 50


def test_clear_leaves_the_list_of_dead_keys_and_does_not_add_what_it_hands_back() -> None:
    cache = RadixTree()
    cache.insert_intermediate_snapshot([1], (), (), None, 1)
    cache.evict_snapshot_to_tier(0)
    cache.insert_intermediate_snapshot([1], (), (), None, 2)
    cache.insert_intermediate_snapshot([2], (), (), None, 3, 9)
    cache.evict_snapshot_slot(2)
    cache.evict_snapshot_to_tier(0)
    assert cache.clear().tier_keys.tolist() == [tier_key(0, [2])]
    assert cache.take_dead_tier_keys().tolist() == [tier_key(0, [1])]


def test_a_sequence_that_outlives_a_clear_would_release_what_a_new_one_holds() -> None:
    # Why the docs forbid it: a cache cannot tell one from the other.
    cache = RadixTree(block_size=2)
    cache.insert([1, 2], [0])
    cache.clear()
    cache.insert([1, 2], [1])
    cache.release([1, 2])
    assert cache.evict(1).physical.tolist() == [1]


# --- epochs -------------------------------------------------------------------------------------------------------


def test_epochs_begin_at_0_and_cannot_be_set() -> None:
    cache = RadixTree()
    assert (cache.epoch, cache.adapter_epoch(0), cache.adapter_epoch(B)) == (0, 0, 0)
    with pytest.raises(AttributeError):
        cache.epoch = 1  # type: ignore[misc]


def test_clear_raises_every_epoch() -> None:
    cache = RadixTree()
    for times in (1, 2, 3):
        cache.clear()
        assert [cache.epoch, *map(cache.adapter_epoch, (0, A, B))] == [times] * 4


def test_drop_adapter_raises_its_own_epoch_alone() -> None:
    cache = RadixTree()
    cache.drop_adapter(A)
    cache.drop_adapter(A)
    cache.drop_adapter(0)
    assert [cache.epoch, *map(cache.adapter_epoch, (0, A, B))] == [0, 1, 2, 0]
    cache.clear()
    assert [cache.epoch, *map(cache.adapter_epoch, (0, A, B))] == [1, 2, 3, 1]


def test_asking_for_an_epoch_changes_nothing() -> None:
    cache = populated()
    before = snapshot_of(cache)
    cache.adapter_epoch(12345)
    assert differences(before, snapshot_of(cache)) == []


def test_an_epoch_is_kept_for_every_adapter_ever_dropped_and_none_for_one_only_used() -> None:
    cache = RadixTree(block_size=1)
    for adapter in range(1, 1000):
        cache.insert([1], [1], adapter_id=adapter)
        cache.release([1], adapter_id=adapter)
        cache.evict(1)
    untouched = snapshot_of(cache)
    assert not any(isinstance(part, dict) and part for part in untouched.values())
    cache.drop_adapter(5)
    assert {adapter: cache.adapter_epoch(adapter) for adapter in (4, 5, 6)} == {4: 0, 5: 1, 6: 0}
    assert cache._adapter_drops == {5: 1}


# --- drop_adapter -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "adapter"), [(0, 0), (1, A), (2, B)])
def test_drop_adapter_hands_back_what_is_its_own_of_every_block_size(number: int, adapter: int) -> None:
    first = 100 * number
    cleared = populated().drop_adapter(adapter)
    assert sorted(cleared.blocks.physical.tolist()) == [first + block for block in range(5)]
    assert sorted(cleared.blocks.disk_block_ids.tolist()) == [first + 50, first + 52]
    assert sorted(cleared.snapshot_slots) == [first + 2, first + 3]
    assert keys_of(cleared) == [tier_key(adapter, [1])]


@pytest.mark.parametrize("adapter", [0, A, B])
def test_drop_adapter_leaves_the_others_as_they_were(adapter: int) -> None:
    cache, untouched = populated(), populated()
    cache.drop_adapter(adapter)
    cache.check_integrity()
    assert cache.lookup([1, 2, 3, 4, 5], 2, 2, adapter).is_empty()
    untouched.lookup([9, 9], 2, 2, adapter)
    others = [other for other in (0, A, B) if other != adapter]
    assert cache.stats_detail().blocks_by_adapter == dict.fromkeys(others, 4)
    for other in others:
        for size, length in ((2, 5), (3, 3), (2, 1)):
            tokens = [1, 2, 3, 4, 5][:length]
            match = cache.lookup(tokens, size, 2, other)
            # The check hash is keyed at random.
            theirs = untouched.lookup(tokens, size, 2, other)._replace(ssm_snapshot_check=match.ssm_snapshot_check)
            assert match == theirs
        assert cache.forget_snapshot_tier_key(tier_key(other, [1]))


def test_drop_adapter_of_an_unknown_one_hands_back_nothing_and_still_raises_its_epoch() -> None:
    cache = populated()
    before = cache.stats_detail()
    cleared = cache.drop_adapter(12345)
    assert cleared.blocks.is_empty()
    assert (cleared.snapshot_slots, cleared.tier_keys.tolist()) == ([], [])
    assert cache.stats_detail() == before
    assert cache.adapter_epoch(12345) == 1


def test_drop_adapter_gives_a_block_size_back_that_nobody_else_uses() -> None:
    cache = RadixTree(block_size=2)
    before = sizes_of(cache)
    cache.insert([1, 2, 3], [0], (), 3, 0, A)
    assert sizes_of(cache).keys() > before.keys()
    cache.drop_adapter(A)
    assert sizes_of(cache).keys() == before.keys()


@pytest.mark.parametrize(("dropped", "evicted"), [(A, 60), (B, 60), (0, 50)])
def test_the_lease_ends_with_the_adapter_that_took_it_and_with_no_other(dropped: int, evicted: int) -> None:
    cache = RadixTree(block_size=1)
    cache.insert([1], [1])
    cache.lookup([1], session_hash=5)
    cache.insert_tail_snapshot([1], 50, 5, 3)
    cache.insert_tail_snapshot([2], 60, 6, 3)
    cache.drop_adapter(dropped)
    assert cache.evict_snapshot_lru() == evicted


def test_the_lease_belongs_to_the_adapter_of_the_look_up_that_took_it_last() -> None:
    cache = RadixTree(block_size=1)
    for adapter in (A, B):
        cache.insert([1], [1], adapter_id=adapter)
        cache.lookup([1], session_hash=5, adapter_id=adapter)
    cache.insert_tail_snapshot([1], 50, 5)
    cache.insert_tail_snapshot([2], 60, 6)
    cache.drop_adapter(A)
    assert cache.evict_snapshot_lru() == 60
    cache.insert_tail_snapshot([2], 60, 6)
    cache.drop_adapter(B)
    assert cache.evict_snapshot_lru() == 50


def test_a_look_up_that_is_not_recorded_neither_takes_the_lease_nor_ends_it() -> None:
    cache = RadixTree(block_size=1)
    cache.insert([1], [1])
    cache.lookup([1], session_hash=5)
    cache.lookup([1], session_hash=6, record=False)
    cache.insert_tail_snapshot([1], 50, 5)
    cache.insert_tail_snapshot([2], 60, 6)
    assert cache.evict_snapshot_lru() == 60


def test_what_is_dropped_in_pieces_or_at_once_adds_up_to_what_was_stored() -> None:
    pair = Pair(RadixTree, {"block_size": 2, "adopt_blocks": True})
    block = 0
    for adapter in (0, A, B):
        for size, length in ((2, 9), (3, 11), (2, 6)):
            tokens = (*range(length),)
            table = (*range(block, block + length),)
            block += length
            pair.insert_with_snapshot(tokens, table, table, size, block, adapter % 3, 0, adapter)
            pair.insert_tail(tokens[:3], block + 1, 5, adapter)
    for _ in range(3):
        pair.evict_to_tier(0)
    pair.drop_adapter(A)
    pair.compare_state()
    pair.clear()
    pair.compare_state()
    assert (pair.blocks.total(), pair.disks.total(), pair.slots.total()) == (0, 0, 0)
    assert not pair.stored_keys


# --- dead keys ----------------------------------------------------------------------------------------------------


def spilled(cache: RadixTree, tokens: list[int], slot: int, session: int = 1) -> int:
    """Register a snapshot, spill it, and return its key."""
    cache.insert_intermediate_snapshot(tokens, (), (), None, slot, session)
    spill = cache.evict_snapshot_to_tier(0)
    assert isinstance(spill, Spill)
    assert spill.slot == slot
    return spill.key


OVERWRITERS = {
    "insert_intermediate_snapshot": lambda cache, tokens: cache.insert_intermediate_snapshot(tokens, (), (), None, 9),
    "insert_with_snapshot": lambda cache, tokens: cache.insert_with_snapshot(tokens, (), (), None, 9),
    "insert_tail_snapshot": lambda cache, tokens: cache.insert_tail_snapshot(tokens, 9),
    "insert_tail_sibling_snapshot": lambda cache, tokens: cache.insert_tail_sibling_snapshot(tokens, 9),
}


@pytest.mark.parametrize("call", OVERWRITERS)
def test_the_key_of_a_spilled_entry_is_dead_once_any_insert_overwrites_it(call: str) -> None:
    cache = RadixTree()
    key = spilled(cache, [1, 2, 3], 5)
    OVERWRITERS[call](cache, [1, 2, 3])
    dead = cache.take_dead_tier_keys()
    assert (dead.dtype, dead.tolist()) == (np.uint64, [key])
    assert cache.take_dead_tier_keys().tolist() == []


@pytest.mark.parametrize("call", OVERWRITERS)
def test_overwriting_a_resident_entry_makes_no_key_dead(call: str) -> None:
    cache = RadixTree()
    cache.insert_intermediate_snapshot([1, 2, 3], (), (), None, 5)
    OVERWRITERS[call](cache, [1, 2, 3])
    assert cache.take_dead_tier_keys().tolist() == []


def test_a_key_is_dead_too_if_another_prefix_with_that_key_overwrites_it() -> None:
    cache = RadixTree()
    key = spilled(cache, [1, 7], 5)
    other = forge(3, (9,), key)
    cache.insert_tail_snapshot(other, 6, adapter_id=3)
    assert cache.take_dead_tier_keys().tolist() == [key]


def test_the_keys_of_a_session_s_spilled_tail_and_siblings_are_dead_when_a_new_tail_sweeps_them() -> None:
    cache = RadixTree()
    cache.insert_tail_snapshot([1], 1, 5)
    cache.insert_tail_sibling_snapshot([2], 2, 5)
    cache.insert_tail_sibling_snapshot([3], 3, 5)
    cache.insert_tail_sibling_snapshot([4], 4, 6)
    assert [cache.evict_snapshot_to_tier(0).slot for _ in range(2)] == [1, 2]  # type: ignore[union-attr]
    assert cache.insert_tail_snapshot([5], 9, 5) == [3]
    assert cache.take_dead_tier_keys().tolist() == [tier_key(0, [1]), tier_key(0, [2])]


def test_dead_keys_are_listed_from_the_oldest_on() -> None:
    cache = RadixTree()
    keys = [spilled(cache, [token], token) for token in range(5)]
    order = [3, 0, 4, 1, 2]
    for token in order:
        cache.insert_tail_sibling_snapshot([token], 10)
    assert cache.take_dead_tier_keys().tolist() == [keys[token] for token in order]


def test_a_key_that_is_spilled_again_is_off_the_list_and_comes_back_as_the_newest() -> None:
    cache = RadixTree()
    first, second = spilled(cache, [1], 1), spilled(cache, [2], 2)
    cache.insert_intermediate_snapshot([1], (), (), None, 3)
    cache.insert_intermediate_snapshot([2], (), (), None, 4)
    spill = cache.evict_snapshot_to_tier(0)
    assert isinstance(spill, Spill)
    assert spill.key == first
    cache.insert_intermediate_snapshot([1], (), (), None, 5)
    assert cache.take_dead_tier_keys().tolist() == [second, first]


def test_a_dead_key_that_is_spilled_again_and_stays_so_is_not_listed() -> None:
    cache = RadixTree()
    key = spilled(cache, [1], 1)
    cache.insert_intermediate_snapshot([1], (), (), None, 2)
    assert cache.evict_snapshot_to_tier(0).key == key  # type: ignore[union-attr]
    assert cache.take_dead_tier_keys().tolist() == []


def test_a_key_that_dies_again_after_it_was_taken_is_listed_again() -> None:
    cache = RadixTree()
    for _ in range(3):
        key = spilled(cache, [1], 1)
        cache.insert_intermediate_snapshot([1], (), (), None, 2)
        assert cache.take_dead_tier_keys().tolist() == [key]


@pytest.mark.parametrize("how", ["promote", "forget", "evict the slot", "drop", "clear"])
def test_a_key_whose_bytes_the_caller_was_told_of_is_not_dead(how: str) -> None:
    cache = RadixTree()
    key = spilled(cache, [1], 1)
    if how == "promote":
        assert cache.promote_snapshot(key, 2)
        cache.insert_intermediate_snapshot([1], (), (), None, 3)
    elif how == "forget":
        assert cache.forget_snapshot_tier_key(key)
    elif how == "evict the slot":
        assert cache.promote_snapshot(key, 2)
        assert cache.evict_snapshot_slot(2)
    elif how == "drop":
        assert cache.drop_adapter(0).tier_keys.tolist() == [key]
    else:
        assert cache.clear().tier_keys.tolist() == [key]
    assert cache.take_dead_tier_keys().tolist() == []


def test_a_shallow_snapshot_that_is_dropped_instead_of_spilled_leaves_its_dead_key_on_the_list() -> None:
    # The bytes of its predecessor are still stored, and still garbage.
    cache = RadixTree()
    key = spilled(cache, [1], 1)
    cache.insert_intermediate_snapshot([1], (), (), None, 2)
    cache.evict_snapshot_to_tier(100)
    assert cache.take_dead_tier_keys().tolist() == [key]
