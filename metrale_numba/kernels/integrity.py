"""Recounts of everything that is derived: links, counts, hashes, tables, the candidate order, the depth filter.

Each function looks at every row once and returns the number of the first fault (see :data:`layout.FAULTS`) and
the row it was found at, or 0. Nothing is changed.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.entries import TAIL_OR_SIBLING, find_key, is_floor
from metrale_numba.kernels.hashing import advance_check, first_check, table_hash
from metrale_numba.kernels.layout import (
    CHILDREN,
    DEPTH_CLASSES,
    EMPTY_SLOT,
    HAS_SNAPSHOTS,
    HAS_SUFFIX,
    INDEX_CHECKS,
    INDEX_CLOCK,
    INDEX_DEPTH_BITS,
    INDEX_DEPTH_COUNTS,
    INDEX_ENTRIES,
    INDEX_FIELDS,
    INDEX_FLOOR_TABLE,
    INDEX_FLOOR_TABLE_SIZE,
    INDEX_FLOORS,
    INDEX_FLOORS_FREE,
    INDEX_FLOORS_USED,
    INDEX_GRID,
    INDEX_KEYS,
    INDEX_MULTIPLIER,
    INDEX_NUM_FLOORS,
    INDEX_NUM_RESIDENTS,
    INDEX_RESIDENTS,
    INDEX_ROWS,
    INDEX_SESSIONS,
    INDEX_SIZE,
    INDEX_TABLE_SIZE,
    NONE,
    NUM_POWERS,
    POOL_BLOCK_SIZE,
    POOL_FIELDS,
    POOL_FIRST_ROOT,
    POOL_FREE,
    POOL_LINKS,
    POOL_NODES,
    POOL_NUM_FREE,
    POOL_NUM_NODES,
    POOL_NUM_ROOTS,
    POOL_NUM_SUFFIXES,
    POOL_NUMBER,
    POOL_ROWS,
    POOL_SHARED,
    POOL_SUFFIX_FREE,
    POOL_SUFFIX_ROWS,
    POOL_SUFFIX_USED,
    POOL_SUFFIXES,
    POOL_TABLE,
    POOL_TABLE_SIZE,
    POOL_TOKENS,
    POOL_USED,
    ROOT,
    SHARED_CLOCK,
    SHARED_FIELDS,
    SHARED_HEAP_NODES,
    SHARED_HEAP_ROWS,
    SHARED_HEAP_SIZE,
    SHARED_HEAP_STAMPS,
    SHARED_INDEX,
    SHARED_MULTIPLIER,
    SHARED_NUM_POOLS,
    SHARED_PARTIAL_TAILS,
    SHARED_POOLS,
    SHARED_POWERS,
    SPILLED,
)
from metrale_numba.kernels.memory import (
    entry_view,
    floor_view,
    int64_view,
    link_view,
    node_view,
    suffix_view,
    uint32_view,
    uint64_view,
)
from metrale_numba.kernels.tables import home_slot, next_slot

_EMPTY = np.uint64(EMPTY_SLOT)
_HALF_WORD = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFF_FFFF)
_NO_ROW = np.uint32(NONE)


@register_jitable
def _in_table(table, hash32, row):
    """Whether a search from the hash's home meets the row before a free slot."""
    wanted = (hash32 << _HALF_WORD) | np.uint64(row)
    slot = home_slot(hash32, table.size)
    for _ in range(table.size):
        if table[slot] == wanted:
            return True
        if table[slot] == _EMPTY:
            return False
        slot = next_slot(slot, table.size)
    return False


@register_jitable
def _num_used(table):
    used = np.int64(0)
    for slot in range(table.size):
        if table[slot] != _EMPTY:
            used += 1
    return used


@register_jitable
def _same_chunk(chunks, left, right, block_size):
    for i in range(block_size):
        if chunks[left * block_size + i] != chunks[right * block_size + i]:
            return False
    return True


@register_jitable
def _check_rows(pool, nodes):
    """Free list and the counts of each kind of row."""
    used = pool[POOL_USED]
    num_nodes = np.int64(0)
    num_roots = np.int64(0)
    num_free = np.int64(0)
    for row in range(used):
        if nodes[row].parent == _NO_ROW:
            num_free += 1
        elif nodes[row].parent == np.uint32(ROOT):
            num_roots += 1
        else:
            num_nodes += 1
    free = pool[POOL_FREE]
    length = np.int64(0)
    while free >= 0:
        if free >= used or nodes[free].parent != _NO_ROW:
            return 1, free
        length += 1
        if length > num_free:
            return 2, free
        free = np.int64(-1) if nodes[free].block == _NO_ROW else np.int64(nodes[free].block)
    if length != num_free or length != pool[POOL_NUM_FREE]:
        return 2, length
    if num_nodes != pool[POOL_NUM_NODES] or num_roots != pool[POOL_NUM_ROOTS]:
        return 3, num_nodes
    return 0, np.int64(0)


@register_jitable
def _check_children(pool, nodes, links, row, ordered):
    """The list of one row's children."""
    length = np.int64(0)
    before = _NO_ROW
    child = links[row].first_child
    while child != _NO_ROW:
        if np.int64(child) >= pool[POOL_USED] or nodes[np.int64(child)].parent != np.uint32(row):
            return 6, np.int64(child)
        if links[np.int64(child)].previous_sibling != before:
            return 7, np.int64(child)
        if ordered and before != _NO_ROW and nodes[np.int64(child)].stamp >= nodes[np.int64(before)].stamp:
            return 17, np.int64(child)
        length += 1
        if length > np.int64(nodes[row].children & np.uint32(CHILDREN)):
            break
        before = child
        child = links[np.int64(child)].next_sibling
    if length != np.int64(nodes[row].children & np.uint32(CHILDREN)):
        return 8, row
    return 0, np.int64(0)


@register_jitable
def _check_reachable(pool, nodes, links):
    """Whether the lists of children lead from the roots to every node, each once."""
    reached = np.int64(0)
    for root in range(pool[POOL_USED]):
        if nodes[root].parent != np.uint32(ROOT):
            continue
        row = np.int64(root)
        while True:
            if links[row].first_child != _NO_ROW:
                row = np.int64(links[row].first_child)
            else:
                while row != root and links[row].next_sibling == _NO_ROW:
                    row = np.int64(nodes[row].parent)
                if row == root:
                    break
                row = np.int64(links[row].next_sibling)
            reached += 1
            if reached > pool[POOL_NUM_NODES]:
                return 9, row
    if reached != pool[POOL_NUM_NODES]:
        return 9, reached
    return 0, np.int64(0)


@register_jitable
def _check_hashes(pool, nodes, chunks, table, row):
    """Check hash and mark of a live row, its place in the table, and that no sibling in its cluster is its twin."""
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    powers = uint64_view(shared[SHARED_POWERS], NUM_POWERS)
    block_size = pool[POOL_BLOCK_SIZE]
    if nodes[row].parent == np.uint32(ROOT):
        state = first_check(np.uint64(nodes[row].stamp), powers)
    else:
        parent = np.int64(nodes[row].parent)
        start = row * block_size
        state = advance_check(nodes[parent].state, chunks, start, start + block_size, powers)
    if nodes[row].state != state:
        return 10, row
    hash32 = table_hash(state, np.uint64(shared[SHARED_MULTIPLIER]))
    index = int64_view(shared[SHARED_INDEX], INDEX_FIELDS)
    is_marked = nodes[row].children & np.uint32(HAS_SNAPSHOTS) != np.uint32(0)
    if is_marked != (index[INDEX_GRID] == block_size and is_floor(index, hash32, state)):
        return 11, row
    if not _in_table(table, hash32, row):
        return 12, row
    slot = home_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        other = np.int64(table[slot] & _LOW_HALF)
        if other != row and nodes[other].parent == nodes[row].parent:
            if nodes[row].parent == np.uint32(ROOT):
                if nodes[other].stamp == nodes[row].stamp:
                    return 14, row
            elif _same_chunk(chunks, row, other, block_size):
                return 14, row
        slot = next_slot(slot, table.size)
    return 0, np.int64(0)


@register_jitable
def _check_suffix(pool, links, suffixes, row):
    suffix = np.int64(links[row].suffix)
    if suffix >= pool[POOL_SUFFIX_USED] or suffixes[suffix].node != np.uint32(row):
        return 19, row
    length = np.int64(suffixes[suffix].length)
    if length < 1 or length >= pool[POOL_BLOCK_SIZE] or suffixes[suffix].block == _NO_ROW:
        return 20, row
    return 0, np.int64(0)


@register_jitable
def _check_suffix_rows(pool, suffixes, attached):
    """The counts of partial suffixes, and that every row without one is on the free list."""
    used = pool[POOL_SUFFIX_USED]
    num_free = np.int64(0)
    for suffix in range(used):
        if suffixes[suffix].node == _NO_ROW:
            num_free += 1
    length = np.int64(0)
    free = pool[POOL_SUFFIX_FREE]
    while free >= 0:
        if free >= used or suffixes[free].node != _NO_ROW or length == num_free:
            return 21, free
        length += 1
        free = np.int64(-1) if suffixes[free].block == _NO_ROW else np.int64(suffixes[free].block)
    if length != num_free or attached != used - num_free or attached != pool[POOL_NUM_SUFFIXES]:
        return 21, attached
    return 0, np.int64(0)


@register_jitable
def _check_candidate(shared, pool, nodes, links, row):
    place = np.int64(links[row].place)
    is_candidate = nodes[row].children & np.uint32(CHILDREN) == np.uint32(0) and nodes[row].count <= np.uint32(1)
    if is_candidate != (place != NONE):
        return 22, row
    if is_candidate:
        stamps = int64_view(shared[SHARED_HEAP_STAMPS], shared[SHARED_HEAP_ROWS])
        heap = uint64_view(shared[SHARED_HEAP_NODES], shared[SHARED_HEAP_ROWS])
        if place >= shared[SHARED_HEAP_SIZE] or heap[place] != (
            (np.uint64(pool[POOL_NUMBER]) << _HALF_WORD) | np.uint64(row)
        ):
            return 23, row
        if stamps[place] != nodes[row].stamp:
            return 24, row
    return 0, np.int64(0)


@register_jitable
def _check_node(shared, pool, nodes, links, row, clock):
    """Everything about a node that looks only at it and its parent."""
    parent = np.int64(nodes[row].parent)
    if parent >= pool[POOL_USED] or nodes[parent].parent == _NO_ROW:
        return 4, row
    if nodes[row].stamp > clock or nodes[row].stamp < 1:
        return 15, row
    if nodes[parent].parent != np.uint32(ROOT) and nodes[row].stamp > nodes[parent].stamp:
        return 16, row
    if nodes[row].block == _NO_ROW:
        return 18, row
    if links[row].root != links[parent].root:
        return 34, row
    if (nodes[row].children & np.uint32(HAS_SUFFIX) != np.uint32(0)) != (links[row].suffix != _NO_ROW):
        return 35, row
    return _check_candidate(shared, pool, nodes, links, row)


@register_jitable
def _check_roots(pool, nodes, links):
    """The list of roots, and that each counts the nodes of its forest."""
    counted = np.zeros(pool[POOL_USED], np.int64)
    for row in range(pool[POOL_USED]):
        if nodes[row].parent < np.uint32(ROOT):
            counted[np.int64(links[row].root)] += 1
    length = np.int64(0)
    before = _NO_ROW
    root = np.uint32(pool[POOL_FIRST_ROOT])
    while root != _NO_ROW:
        row = np.int64(root)
        if row >= pool[POOL_USED] or nodes[row].parent != np.uint32(ROOT) or links[row].previous_sibling != before:
            return 36, row
        length += 1
        if length > pool[POOL_NUM_ROOTS]:
            return 36, row
        if links[row].root != root or np.int64(nodes[row].count) != counted[row]:
            return 37, row
        before = root
        root = links[row].next_sibling
    if length != pool[POOL_NUM_ROOTS]:
        return 36, length
    return 0, np.int64(0)


@register_jitable
def _check_rows_alone(shared, pool, nodes, links, suffixes):
    """What can be said of each row by itself and its parent; also the candidates, suffixes and evictable blocks."""
    num_candidates = np.int64(0)
    num_suffixes = np.int64(0)
    num_evictable = np.int64(0)
    for row in range(pool[POOL_USED]):
        if nodes[row].parent == _NO_ROW:
            continue
        if nodes[row].parent == np.uint32(ROOT):
            if nodes[row].children & np.uint32(CHILDREN) == np.uint32(0):
                return 5, np.int64(row), num_candidates, num_suffixes, num_evictable
            continue
        fault, where = _check_node(shared, pool, nodes, links, row, shared[SHARED_CLOCK])
        if fault != 0:
            return fault, where, num_candidates, num_suffixes, num_evictable
        if links[row].place != _NO_ROW:
            num_candidates += 1
        if nodes[row].count <= np.uint32(1):
            num_evictable += 1
        if links[row].suffix != _NO_ROW:
            num_suffixes += 1
            if nodes[row].count <= np.uint32(1):
                num_evictable += 1
            fault, where = _check_suffix(pool, links, suffixes, row)
            if fault != 0:
                return fault, where, num_candidates, num_suffixes, num_evictable
    return 0, np.int64(0), num_candidates, num_suffixes, num_evictable


def check_pool(pool):
    """The first fault in the nodes of one block size, its row, and the numbers of candidates and evictable blocks."""
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    block_size = pool[POOL_BLOCK_SIZE]
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * block_size)
    suffixes = suffix_view(pool[POOL_SUFFIXES], pool[POOL_SUFFIX_ROWS])
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    ordered = shared[SHARED_PARTIAL_TAILS] != 0
    fault, where = _check_rows(pool, nodes)
    if fault != 0:
        return fault, where, np.int64(0), np.int64(0)
    fault, where, num_candidates, num_suffixes, num_evictable = _check_rows_alone(shared, pool, nodes, links, suffixes)
    if fault != 0:
        return fault, where, num_candidates, num_evictable
    for row in range(pool[POOL_USED]):
        if nodes[row].parent == _NO_ROW:
            continue
        fault, where = _check_children(pool, nodes, links, row, ordered)
        if fault != 0:
            return fault, where, num_candidates, num_evictable
    fault, where = _check_reachable(pool, nodes, links)
    if fault != 0:
        return fault, where, num_candidates, num_evictable
    for row in range(pool[POOL_USED]):
        if nodes[row].parent == _NO_ROW:
            continue
        fault, where = _check_hashes(pool, nodes, chunks, table, row)
        if fault != 0:
            return fault, where, num_candidates, num_evictable
    if _num_used(table) != pool[POOL_NUM_NODES] + pool[POOL_NUM_ROOTS]:
        return 13, _num_used(table), num_candidates, num_evictable
    fault, where = _check_suffix_rows(pool, suffixes, num_suffixes)
    if fault == 0:
        fault, where = _check_roots(pool, nodes, links)
    return fault, where, num_candidates, num_evictable


def check_heap(shared, num_candidates):
    """The first fault in the order of the heap, and its place."""
    size = shared[SHARED_HEAP_SIZE]
    if size != num_candidates:
        return 26, size
    stamps = int64_view(shared[SHARED_HEAP_STAMPS], shared[SHARED_HEAP_ROWS])
    heap = uint64_view(shared[SHARED_HEAP_NODES], shared[SHARED_HEAP_ROWS])
    for place in range(1, size):
        if stamps[place] <= stamps[(place - 1) // 4]:
            return 25, np.int64(place)
    num_pools = shared[SHARED_NUM_POOLS]
    addresses = int64_view(shared[SHARED_POOLS], num_pools)
    for place in range(size):
        number = np.int64(heap[place] >> _HALF_WORD)
        if number >= num_pools or addresses[number] == 0:
            return 23, np.int64(place)
        pool = int64_view(addresses[number], POOL_FIELDS)
        row = np.int64(heap[place] & _LOW_HALF)
        if row >= pool[POOL_USED]:
            return 23, np.int64(place)
        links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
        if np.int64(links[row].place) != place:
            return 23, np.int64(place)
    return 0, np.int64(0)


@register_jitable
def _check_floors(index):
    """The floors: their free list, their table, and that each counts its entries and knows their offsets."""
    size = index[INDEX_SIZE]
    used = index[INDEX_FLOORS_USED]
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    floors = floor_view(index[INDEX_FLOORS], index[INDEX_ROWS])
    table = uint64_view(index[INDEX_FLOOR_TABLE], index[INDEX_FLOOR_TABLE_SIZE])
    multiplier = np.uint64(index[INDEX_MULTIPLIER])
    counts = np.zeros(used, np.int64)
    for row in range(size):
        floor = np.int64(entries[row].floor)
        if index[INDEX_GRID] == 0:
            if floor != NONE:
                return 38, np.int64(row)
            continue
        if floor >= used or floors[floor].count == np.uint32(0):
            return 38, np.int64(row)
        offset = np.uint64(entries[row].depth % index[INDEX_GRID])
        if (floors[floor].offsets >> offset) & np.uint64(1) == np.uint64(0):
            return 38, np.int64(row)
        counts[floor] += 1
    num_floors = np.int64(0)
    for floor in range(used):
        if np.int64(floors[floor].count) != counts[floor]:
            return 39, np.int64(floor)
        if counts[floor] > 0:
            num_floors += 1
            if not _in_table(table, table_hash(floors[floor].state, multiplier), floor):
                return 40, np.int64(floor)
    length = np.int64(0)
    free = index[INDEX_FLOORS_FREE]
    while free >= 0:
        if free >= used or floors[free].count != np.uint32(0) or length == used - num_floors:
            return 40, free
        length += 1
        free = np.int64(-1) if floors[free].next_free == _NO_ROW else np.int64(floors[free].next_free)
    if length != used - num_floors or num_floors != index[INDEX_NUM_FLOORS]:
        return 40, length
    if _num_used(table) != num_floors:
        return 28, num_floors
    return 0, np.int64(0)


def check_index(index):
    """The first fault in the snapshot index, and its entry."""
    size = index[INDEX_SIZE]
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    residents = uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])
    keys = uint64_view(index[INDEX_KEYS], index[INDEX_TABLE_SIZE])
    checks = uint64_view(index[INDEX_CHECKS], index[INDEX_TABLE_SIZE])
    sessions = uint64_view(index[INDEX_SESSIONS], index[INDEX_TABLE_SIZE])
    multiplier = np.uint64(index[INDEX_MULTIPLIER])
    counts = np.zeros(DEPTH_CLASSES, np.int64)
    num_residents = np.int64(0)
    num_of_sessions = np.int64(0)
    for row in range(size):
        if not _in_table(keys, table_hash(entries[row].key, multiplier), row):
            return 27, np.int64(row)
        if not _in_table(checks, table_hash(entries[row].check, multiplier), row):
            return 27, np.int64(row)
        if entries[row].session != np.uint64(0) and entries[row].flags & TAIL_OR_SIBLING != np.uint32(0):
            num_of_sessions += 1
            if not _in_table(sessions, table_hash(entries[row].session, multiplier), row):
                return 27, np.int64(row)
        place = np.int64(entries[row].place)
        if entries[row].flags & np.uint32(SPILLED) == np.uint32(0):
            num_residents += 1
            if place >= index[INDEX_NUM_RESIDENTS] or residents[place] != np.uint32(row):
                return 29, np.int64(row)
        elif place != NONE:
            return 29, np.int64(row)
        counts[entries[row].depth % DEPTH_CLASSES] += 1
        if entries[row].stamp > index[INDEX_CLOCK] or entries[row].stamp < 1:
            return 32, np.int64(row)
    if num_residents != index[INDEX_NUM_RESIDENTS]:
        return 30, num_residents
    for table, used in ((keys, size), (checks, size), (sessions, num_of_sessions)):
        if _num_used(table) != used:
            return 28, used
    for row in range(size):
        if find_key(index, entries[row].key) != row:
            return 33, np.int64(row)
    stored_counts = uint32_view(index[INDEX_DEPTH_COUNTS], DEPTH_CLASSES)
    bits = uint64_view(index[INDEX_DEPTH_BITS], DEPTH_CLASSES // 64)
    for depth in range(DEPTH_CLASSES):
        bit = (bits[depth // 64] >> np.uint64(depth % 64)) & np.uint64(1)
        if np.int64(stored_counts[depth]) != counts[depth] or (bit == np.uint64(1)) != (counts[depth] > 0):
            return 31, np.int64(depth)
    return _check_floors(index)
