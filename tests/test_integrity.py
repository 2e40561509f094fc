"""`check_integrity` finds every kind of damage: each fault it knows is planted in the arrays and must be named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from metrale_numba import IntegrityError, RadixTree
from metrale_numba.ghosts import Ghosts
from metrale_numba.kernels import layout
from metrale_numba.kernels.arrays import PoolArrays, UInt64Array
from metrale_numba.kernels.compile import kernels
from metrale_numba.kernels.layout import FAULTS, NONE


def populated() -> tuple[RadixTree, PoolArrays]:
    """Two forests with forks, held and free leaves, suffixes, freed rows, a ghost; snapshots resident and spilled.

    Rows at block size 2: 0 root, 1-3 the chain 0..5 with a suffix on 3, 4 a fork below 1, 5 root of adapter 9,
    6 its only node, 7 freed.
    """
    cache = RadixTree(block_size=2, partial_tail_sharing=True, ghosts=4)
    cache.insert([0, 1, 2, 3, 4, 5, 6], [10, 11, 12, 13])
    cache.insert([0, 1, 8, 8], [10, 14])
    cache.insert([7, 7], [15], adapter_id=9)
    cache.insert([6, 6], [16])
    cache.release([6, 6])
    cache.evict(1)
    cache.release([0, 1, 8, 8])
    cache.release([7, 7], adapter_id=9)
    for depth in range(1, 5):
        cache.insert_tail_sibling_snapshot(list(range(depth)), depth, session_hash=depth)
    cache.evict_snapshot_to_tier(0)
    cache.check_integrity()
    return cache, cache._pools[2]


def row_of(pool: PoolArrays, block: int) -> int:
    """The row of the node that stores a block."""
    used = pool.header[layout.POOL_USED]
    rows = np.flatnonzero((pool.nodes["block"][:used] == block) & (pool.nodes["parent"][:used] < layout.ROOT))
    (row,) = rows.tolist()
    return row


def first_used_slot(table: UInt64Array) -> int:
    return int(np.flatnonzero(table != layout.EMPTY_SLOT)[0])


def give_the_hash_of(table: UInt64Array, row: int, other: int) -> None:
    """Let `other` stand in a table under the hash of `row`, where every search finds what it found before."""
    values = table.copy()
    rows = np.where(values == layout.EMPTY_SLOT, -1, (values & np.uint64(NONE)).astype(np.int64))
    hashed = values[rows == row] >> np.uint64(32) << np.uint64(32)
    values[rows == other] = hashed | np.uint64(other)
    table[:] = layout.EMPTY_SLOT
    kernels("cache")["rehash"](values, table)


Damage = Callable[[RadixTree, PoolArrays], None]


def free_list_names_a_live_row(cache: RadixTree, pool: PoolArrays) -> None:
    pool.header[layout.POOL_FREE] = row_of(pool, 10)


def free_count_is_wrong(cache: RadixTree, pool: PoolArrays) -> None:
    pool.header[layout.POOL_NUM_FREE] += 1


def node_count_is_wrong(cache: RadixTree, pool: PoolArrays) -> None:
    pool.header[layout.POOL_NUM_NODES] += 1


def parent_is_a_free_row(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["parent"][row_of(pool, 12)] = pool.header[layout.POOL_FREE]


def root_lost_its_child(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["children"][pool.nodes["parent"][row_of(pool, 15)]] = 0


def list_holds_anothers_child(cache: RadixTree, pool: PoolArrays) -> None:
    pool.links["first_child"][row_of(pool, 10)] = row_of(pool, 12)


def sibling_points_back_wrongly(cache: RadixTree, pool: PoolArrays) -> None:
    pool.links["previous_sibling"][row_of(pool, 11)] = NONE


def children_are_miscounted(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["children"][row_of(pool, 10)] += 1


def root_is_anothers(cache: RadixTree, pool: PoolArrays) -> None:
    pool.links["root"][row_of(pool, 11)] = pool.links["root"][row_of(pool, 15)]


def suffix_mark_is_lost(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["children"][row_of(pool, 12)] ^= layout.HAS_SUFFIX


def root_left_the_list(cache: RadixTree, pool: PoolArrays) -> None:
    pool.links["next_sibling"][pool.header[layout.POOL_FIRST_ROOT]] = NONE


def root_miscounts_its_nodes(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["count"][pool.links["root"][row_of(pool, 15)]] += 1


def two_nodes_hang_on_each_other(cache: RadixTree, pool: PoolArrays) -> None:
    # A ring: 11 and 12 are each other's only child, all their own links agree, and no root leads there.
    a, b, top = row_of(pool, 11), row_of(pool, 12), row_of(pool, 10)
    other = row_of(pool, 14)
    pool.nodes["stamp"][a] = pool.nodes["stamp"][b]
    pool.nodes["parent"][a] = b
    pool.links["first_child"][b] = a
    pool.nodes["children"][b] += 1
    pool.links["next_sibling"][a] = pool.links["previous_sibling"][a] = NONE
    pool.links["first_child"][top] = other
    pool.links["next_sibling"][other] = pool.links["previous_sibling"][other] = NONE
    pool.nodes["children"][top] -= 1


def check_hash_is_wrong(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["state"][row_of(pool, 12)] ^= np.uint64(1)


def mark_of_a_snapshot_is_lost(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["children"][row_of(pool, 10)] ^= layout.HAS_SNAPSHOTS


def node_without_snapshots_is_marked(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["children"][row_of(pool, 14)] |= layout.HAS_SNAPSHOTS


def token_is_overwritten(cache: RadixTree, pool: PoolArrays) -> None:
    pool.tokens[row_of(pool, 12), 1] ^= np.uint32(1)


def row_left_the_table(cache: RadixTree, pool: PoolArrays) -> None:
    pool.table[first_used_slot(pool.table)] = layout.EMPTY_SLOT


def table_holds_a_row_too_many(cache: RadixTree, pool: PoolArrays) -> None:
    free = int(np.flatnonzero(pool.table == layout.EMPTY_SLOT)[-1])
    pool.table[free] = np.uint64(pool.header[layout.POOL_FREE])


def siblings_are_twins(cache: RadixTree, pool: PoolArrays) -> None:
    # The leaf 14 becomes a second 11, hashes and table included.
    twin, row = row_of(pool, 14), row_of(pool, 11)
    give_the_hash_of(pool.table, row, twin)
    pool.tokens[twin] = pool.tokens[row]
    pool.nodes["state"][twin] = pool.nodes["state"][row]
    pool.nodes["children"][twin] |= pool.nodes["children"][row] & layout.HAS_SNAPSHOTS


def stamp_is_from_the_future(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["stamp"][row_of(pool, 12)] = 1000


def child_is_newer_than_its_parent(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["stamp"][row_of(pool, 10)] = 1


def siblings_are_out_of_order(cache: RadixTree, pool: PoolArrays) -> None:
    rows = [row_of(pool, 11), row_of(pool, 14)]
    pool.nodes["stamp"][rows] = pool.nodes["stamp"][rows[::-1]]
    pool.nodes["stamp"][row_of(pool, 12)] = 1
    # The heap agrees, so that only the order of the siblings is at fault.
    for row in (*rows, row_of(pool, 12)):
        place = pool.links["place"][row]
        if place != NONE:
            cache._shared.heap_stamps[place] = pool.nodes["stamp"][row]


def node_lost_its_block(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["block"][row_of(pool, 11)] = NONE


def suffix_names_another_node(cache: RadixTree, pool: PoolArrays) -> None:
    pool.suffixes["node"][pool.links["suffix"][row_of(pool, 12)]] = row_of(pool, 10)


def suffix_is_empty(cache: RadixTree, pool: PoolArrays) -> None:
    pool.suffixes["length"][pool.links["suffix"][row_of(pool, 12)]] = 0


def suffixes_are_miscounted(cache: RadixTree, pool: PoolArrays) -> None:
    pool.header[layout.POOL_NUM_SUFFIXES] += 1


def suffix_row_is_lost(cache: RadixTree, pool: PoolArrays) -> None:
    pool.links["suffix"][row_of(pool, 12)] = NONE
    pool.nodes["children"][row_of(pool, 12)] ^= layout.HAS_SUFFIX


def candidate_is_forgotten(cache: RadixTree, pool: PoolArrays) -> None:
    pool.links["place"][row_of(pool, 14)] = NONE


def held_node_is_a_candidate(cache: RadixTree, pool: PoolArrays) -> None:
    pool.nodes["count"][row_of(pool, 14)] = 2


def heap_names_another_node(cache: RadixTree, pool: PoolArrays) -> None:
    cache._shared.heap_nodes[pool.links["place"][row_of(pool, 14)]] += np.uint64(1)


def heap_bears_another_stamp(cache: RadixTree, pool: PoolArrays) -> None:
    cache._shared.heap_stamps[pool.links["place"][row_of(pool, 14)]] += 1


def heap_is_upside_down(cache: RadixTree, pool: PoolArrays) -> None:
    rows = sorted((row_of(pool, 14), row_of(pool, 15)), key=lambda row: pool.nodes["stamp"][row], reverse=True)
    for place, row in enumerate(rows):
        pool.links["place"][row] = place
        cache._shared.heap_nodes[place] = row
        cache._shared.heap_stamps[place] = pool.nodes["stamp"][row]


def heap_is_too_large(cache: RadixTree, pool: PoolArrays) -> None:
    cache._shared.header[layout.SHARED_HEAP_SIZE] += 1


def entry_left_the_table_of(name: str) -> Damage:
    def damage(cache: RadixTree, pool: PoolArrays) -> None:
        table = getattr(cache._index.arrays, name)
        table[first_used_slot(table)] = layout.EMPTY_SLOT

    damage.__name__ = f"entry_left_{name}"
    return damage


def table_of_the_index_holds_a_row_too_many(name: str) -> Damage:
    def damage(cache: RadixTree, pool: PoolArrays) -> None:
        add_lonely_row(getattr(cache._index.arrays, name))

    damage.__name__ = f"{name}_hold_a_row_too_many"
    return damage


def add_lonely_row(table: UInt64Array) -> None:
    # Behind a free slot, where no search for another key passes it.
    free = np.flatnonzero(table == layout.EMPTY_SLOT)
    lonely = next(slot for slot in free if table[slot - 1] == layout.EMPTY_SLOT)
    table[lonely] = np.uint64(lonely) << np.uint64(32)


def resident_list_names_another(cache: RadixTree, pool: PoolArrays) -> None:
    residents = cache._index.arrays.residents
    residents[0], residents[1] = residents[1], residents[0]


def residents_are_miscounted(cache: RadixTree, pool: PoolArrays) -> None:
    cache._index.arrays.header[layout.INDEX_NUM_RESIDENTS] += 1


def depths_are_miscounted(cache: RadixTree, pool: PoolArrays) -> None:
    cache._index.arrays.depth_counts[3] += 1


def depth_bit_is_lost(cache: RadixTree, pool: PoolArrays) -> None:
    cache._index.arrays.depth_bits[0] = 0


def snapshot_stamp_is_from_the_future(cache: RadixTree, pool: PoolArrays) -> None:
    cache._index.arrays.entries["stamp"][0] = 1000


def floor_of_an_entry_is_out_of_range(cache: RadixTree, pool: PoolArrays) -> None:
    cache._index.arrays.entries["floor"][0] = 1000


def floor_lacks_an_offset(cache: RadixTree, pool: PoolArrays) -> None:
    cache._index.arrays.floors["offsets"][0] = 0


def floor_miscounts_its_entries(cache: RadixTree, pool: PoolArrays) -> None:
    cache._index.arrays.floors["count"][0] += 1


def floor_left_the_table(cache: RadixTree, pool: PoolArrays) -> None:
    table = cache._index.arrays.floor_table
    table[first_used_slot(table)] = layout.EMPTY_SLOT


def free_list_of_floors_holds_one_in_use(cache: RadixTree, pool: PoolArrays) -> None:
    cache._index.arrays.header[layout.INDEX_FLOORS_FREE] = 0


def floors_are_miscounted(cache: RadixTree, pool: PoolArrays) -> None:
    cache._index.arrays.header[layout.INDEX_NUM_FLOORS] += 1


def two_entries_bear_one_key(cache: RadixTree, pool: PoolArrays) -> None:
    arrays = cache._index.arrays
    arrays.entries["key"][1] = arrays.entries["key"][0]
    give_the_hash_of(arrays.keys, 0, 1)


def ghosts_of(cache: RadixTree) -> Ghosts:
    assert cache._ghosts is not None
    return cache._ghosts


def ghost_is_in_anothers_row(cache: RadixTree, pool: PoolArrays) -> None:
    ghosts_of(cache).rows["number"][0] = 1


def ghost_is_older_than_there_is_room_for(cache: RadixTree, pool: PoolArrays) -> None:
    ghosts_of(cache).header[layout.GHOSTS_COUNT] = 5


def ghost_is_from_the_future(cache: RadixTree, pool: PoolArrays) -> None:
    ghosts_of(cache).rows["tick"][0] = 99


def ghost_was_used_after_it_was_evicted(cache: RadixTree, pool: PoolArrays) -> None:
    ghosts_of(cache).rows["stamp"][0] = 99


def ghost_left_the_table(cache: RadixTree, pool: PoolArrays) -> None:
    table = ghosts_of(cache).table
    table[first_used_slot(table)] = layout.EMPTY_SLOT


def ghosts_are_miscounted(cache: RadixTree, pool: PoolArrays) -> None:
    ghosts_of(cache).header[layout.GHOSTS_SIZE] = 0


def table_of_ghosts_holds_a_row_too_many(cache: RadixTree, pool: PoolArrays) -> None:
    table = ghosts_of(cache).table
    free = int(np.flatnonzero(table == layout.EMPTY_SLOT)[0])
    table[free] = np.uint64(3)


def inserted_block_keeps_its_ghost(cache: RadixTree, pool: PoolArrays) -> None:
    cache._insert_kernel = kernels("cache")["insert"]
    cache.insert([6, 6], [16])


DAMAGE: list[tuple[Damage, int]] = [
    (free_list_names_a_live_row, 1),
    (free_count_is_wrong, 2),
    (node_count_is_wrong, 3),
    (parent_is_a_free_row, 4),
    (root_lost_its_child, 5),
    (list_holds_anothers_child, 6),
    (sibling_points_back_wrongly, 7),
    (children_are_miscounted, 8),
    (two_nodes_hang_on_each_other, 9),
    (check_hash_is_wrong, 10),
    (mark_of_a_snapshot_is_lost, 11),
    (node_without_snapshots_is_marked, 11),
    (token_is_overwritten, 10),
    (row_left_the_table, 12),
    (table_holds_a_row_too_many, 13),
    (siblings_are_twins, 14),
    (stamp_is_from_the_future, 15),
    (child_is_newer_than_its_parent, 16),
    (siblings_are_out_of_order, 17),
    (node_lost_its_block, 18),
    (suffix_names_another_node, 19),
    (suffix_is_empty, 20),
    (suffixes_are_miscounted, 21),
    (suffix_row_is_lost, 21),
    (candidate_is_forgotten, 22),
    (held_node_is_a_candidate, 22),
    (heap_names_another_node, 23),
    (heap_bears_another_stamp, 24),
    (heap_is_upside_down, 25),
    (heap_is_too_large, 26),
    *((entry_left_the_table_of(name), 27) for name in ("keys", "checks", "sessions")),
    *((table_of_the_index_holds_a_row_too_many(name), 28) for name in ("keys", "checks", "sessions", "floor_table")),
    (resident_list_names_another, 29),
    (residents_are_miscounted, 30),
    (depths_are_miscounted, 31),
    (depth_bit_is_lost, 31),
    (snapshot_stamp_is_from_the_future, 32),
    (two_entries_bear_one_key, 33),
    (root_is_anothers, 34),
    (suffix_mark_is_lost, 35),
    (root_left_the_list, 36),
    (root_miscounts_its_nodes, 37),
    (floor_of_an_entry_is_out_of_range, 38),
    (floor_lacks_an_offset, 38),
    (floor_miscounts_its_entries, 39),
    (floor_left_the_table, 40),
    (free_list_of_floors_holds_one_in_use, 40),
    (floors_are_miscounted, 40),
    (ghost_is_in_anothers_row, 41),
    (ghost_is_older_than_there_is_room_for, 41),
    (ghost_is_from_the_future, 41),
    (ghost_was_used_after_it_was_evicted, 41),
    (ghost_left_the_table, 42),
    (ghosts_are_miscounted, 43),
    (table_of_ghosts_holds_a_row_too_many, 43),
    (inserted_block_keeps_its_ghost, 44),
]


@pytest.mark.parametrize(("damage", "fault"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_check_integrity_names_the_damage(damage: Damage, fault: int) -> None:
    cache, pool = populated()
    damage(cache, pool)
    with pytest.raises(IntegrityError, match=FAULTS[fault]):
        cache.check_integrity()


def test_every_fault_is_planted() -> None:
    assert {fault for _, fault in DAMAGE} == set(range(1, len(FAULTS)))


@pytest.mark.parametrize(
    ("field", "kept"),
    [
        (layout.SHARED_NUM_NODES, "count of 6 blocks, 1 partial suffixes and 2 evictable blocks"),
        (layout.SHARED_NUM_SUFFIXES, "count of 5 blocks, 2 partial suffixes and 2 evictable blocks"),
        (layout.SHARED_NUM_EVICTABLE, "count of 5 blocks, 1 partial suffixes and 3 evictable blocks"),
    ],
)
def test_totals_over_all_block_sizes_are_compared(field: int, kept: str) -> None:
    cache, _ = populated()
    cache._shared.header[field] += 1
    with pytest.raises(IntegrityError, match=f"{kept}, but has 5, 1 and 2"):
        cache.check_integrity()


def test_check_integrity_changes_nothing() -> None:
    cache, pool = populated()
    arrays = {**pool.arrays(), **cache._index.arrays.arrays(), "shared": cache._shared.header}
    before = {name: array.copy() for name, array in arrays.items()}
    cache.check_integrity()
    for name, array in arrays.items():
        assert np.array_equal(array, before[name]), name
