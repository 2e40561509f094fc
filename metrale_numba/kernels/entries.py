"""Entries of the snapshot index: their tables, their floors with the marks on nodes, the residents, the depth filter.

An entry stands in a dense array and is found by its tier key, by its check hash and, if it is a session's tail or
sibling, by its session. Every function takes the header of a live index, with room for one entry more where one may
be added.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.counting import ENTRIES_LOOKED_AT, tally
from metrale_numba.kernels.hashing import advance_check, advance_key, first_check, first_key, table_hash
from metrale_numba.kernels.layout import (
    DEPTH_CLASSES,
    EMPTY_SLOT,
    HAS_SNAPSHOTS,
    INDEX_CHECKS,
    INDEX_CLOCK,
    INDEX_DEPTH_BITS,
    INDEX_DEPTH_COUNTS,
    INDEX_ENTRIES,
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
    INDEX_POOL,
    INDEX_POWERS,
    INDEX_RESIDENTS,
    INDEX_ROWS,
    INDEX_SESSIONS,
    INDEX_SIZE,
    INDEX_TABLE_SIZE,
    NONE,
    NUM_POWERS,
    POOL_FIELDS,
    POOL_NODES,
    POOL_ROWS,
    POOL_TABLE,
    POOL_TABLE_SIZE,
    SIBLING,
    SPILLED,
    TAIL,
)
from metrale_numba.kernels.memory import entry_view, floor_view, int64_view, node_view, uint32_view, uint64_view
from metrale_numba.kernels.tables import add_row, first_slot, next_slot, remove_row, replace_row, row_of

_EMPTY = np.uint64(EMPTY_SLOT)
_HALF_WORD = np.uint64(32)
_ONE = np.uint64(1)
WORD_BITS = 64
_SPILLED = np.uint32(SPILLED)
TAIL_OR_SIBLING = np.uint32(TAIL | SIBLING)


@register_jitable(forceinline=True)
def hash_in(index, value):
    return table_hash(value, np.uint64(index[INDEX_MULTIPLIER]))


@register_jitable
def find_key(index, key):
    """Row of the entry with a tier key, or -1."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    table = uint64_view(index[INDEX_KEYS], index[INDEX_TABLE_SIZE])
    hash32 = hash_in(index, key)
    slot = first_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        if table[slot] >> _HALF_WORD == hash32:
            tally(ENTRIES_LOOKED_AT, 1)
            row = row_of(table[slot])
            if entries[row].key == key:
                return row
        slot = next_slot(slot, table.size)
    return np.int64(-1)


@register_jitable
def find_usable(index, check, depth, session, hermetic):
    """Row of the entry of the prefix with a check hash and a depth, if the session may use it, or -1."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    table = uint64_view(index[INDEX_CHECKS], index[INDEX_TABLE_SIZE])
    hash32 = hash_in(index, check)
    slot = first_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        if table[slot] >> _HALF_WORD == hash32:
            tally(ENTRIES_LOOKED_AT, 1)
            row = row_of(table[slot])
            is_own = session != 0 and entries[row].session == np.uint64(session)
            is_private = hermetic or entries[row].flags & np.uint32(TAIL) != np.uint32(0)
            if entries[row].check == check and entries[row].depth == depth and (is_own or not is_private):
                return row
        slot = next_slot(slot, table.size)
    return np.int64(-1)


@register_jitable
def find_of_session(index, session):
    """The first row, in the order of rows, of a session's tail or sibling, or -1."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    table = uint64_view(index[INDEX_SESSIONS], index[INDEX_TABLE_SIZE])
    hash32 = hash_in(index, np.uint64(session))
    first = np.int64(-1)
    slot = first_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        if table[slot] >> _HALF_WORD == hash32:
            tally(ENTRIES_LOOKED_AT, 1)
            row = row_of(table[slot])
            if entries[row].session == np.uint64(session) and (first < 0 or row < first):
                first = row
        slot = next_slot(slot, table.size)
    return first


@register_jitable
def _find_floor(index, hash32, state):
    table = uint64_view(index[INDEX_FLOOR_TABLE], index[INDEX_FLOOR_TABLE_SIZE])
    floors = floor_view(index[INDEX_FLOORS], index[INDEX_ROWS])
    slot = first_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        if table[slot] >> _HALF_WORD == hash32:
            row = row_of(table[slot])
            if floors[row].state == state:
                return row
        slot = next_slot(slot, table.size)
    return np.int64(-1)


@register_jitable(forceinline=True)
def is_floor(index, hash32, state):
    """Whether a node with a check hash, and the hash32 of it, is the floor of an entry."""
    # Most nodes are not, and in a table with so much room the home slot tells, most often.
    table = uint64_view(index[INDEX_FLOOR_TABLE], index[INDEX_FLOOR_TABLE_SIZE])
    if table[first_slot(hash32, table.size)] == _EMPTY:
        return False
    return _find_floor(index, hash32, state) >= 0


@register_jitable
def offsets_of(index, state):
    """The offsets, as bits, at which entries may stand above the floor with a check hash."""
    floor = _find_floor(index, hash_in(index, state), state)
    if floor < 0:
        return np.uint64(0)
    return floor_view(index[INDEX_FLOORS], index[INDEX_ROWS])[floor].offsets


@register_jitable
def _mark_node(index, hash32, state, is_on):
    """Set or clear the mark of the node with a check hash, if there is one."""
    if index[INDEX_POOL] == 0:
        return
    pool = int64_view(index[INDEX_POOL], POOL_FIELDS)
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    slot = first_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        if table[slot] >> _HALF_WORD == hash32:
            row = row_of(table[slot])
            if nodes[row].state == state:
                if is_on:
                    nodes[row].children |= np.uint32(HAS_SNAPSHOTS)
                else:
                    nodes[row].children &= np.uint32(~HAS_SNAPSHOTS & 0xFFFF_FFFF)
        slot = next_slot(slot, table.size)


@register_jitable
def _enter_floor(index, entries, row, state, offset):
    """Give an entry its floor, a new one if it is the first there."""
    floors = floor_view(index[INDEX_FLOORS], index[INDEX_ROWS])
    hash32 = hash_in(index, state)
    floor = _find_floor(index, hash32, state)
    if floor < 0:
        floor = index[INDEX_FLOORS_FREE]
        if floor < 0:
            floor = index[INDEX_FLOORS_USED]
            index[INDEX_FLOORS_USED] = floor + 1
        else:
            following = floors[floor].next_free
            index[INDEX_FLOORS_FREE] = np.int64(-1) if following == np.uint32(NONE) else np.int64(following)
        index[INDEX_NUM_FLOORS] += 1
        floors[floor].state = state
        floors[floor].offsets = np.uint64(0)
        floors[floor].count = np.uint32(0)
        add_row(uint64_view(index[INDEX_FLOOR_TABLE], index[INDEX_FLOOR_TABLE_SIZE]), hash32, floor)
        _mark_node(index, hash32, state, True)
    floors[floor].offsets |= _ONE << np.uint64(offset)
    floors[floor].count += np.uint32(1)
    entries[row].floor = np.uint32(floor)


@register_jitable
def _leave_floor(index, entries, row):
    """Take an entry off its floor, and the floor away if it was the last there."""
    if entries[row].floor == np.uint32(NONE):
        return
    floors = floor_view(index[INDEX_FLOORS], index[INDEX_ROWS])
    floor = np.int64(entries[row].floor)
    floors[floor].count -= np.uint32(1)
    if floors[floor].count > np.uint32(0):
        return
    state = floors[floor].state
    hash32 = hash_in(index, state)
    remove_row(uint64_view(index[INDEX_FLOOR_TABLE], index[INDEX_FLOOR_TABLE_SIZE]), hash32, floor)
    _mark_node(index, hash32, state, False)
    floors[floor].next_free = np.uint32(index[INDEX_FLOORS_FREE] & NONE)
    index[INDEX_FLOORS_FREE] = floor
    index[INDEX_NUM_FLOORS] -= 1


@register_jitable
def _count_depth(index, depth, change):
    """Add to, or take from, the number of entries of a depth, and keep its bit."""
    counts = uint32_view(index[INDEX_DEPTH_COUNTS], DEPTH_CLASSES)
    bits = uint64_view(index[INDEX_DEPTH_BITS], DEPTH_CLASSES // WORD_BITS)
    depth_class = depth % DEPTH_CLASSES
    counts[depth_class] = np.uint32(np.int64(counts[depth_class]) + change)
    mask = _ONE << np.uint64(depth_class % WORD_BITS)
    word = depth_class // WORD_BITS
    if counts[depth_class] == np.uint32(0):
        bits[word] = bits[word] & ~mask
    else:
        bits[word] = bits[word] | mask


@register_jitable
def add_resident(index, entries, row):
    residents = uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])
    place = index[INDEX_NUM_RESIDENTS]
    index[INDEX_NUM_RESIDENTS] = place + 1
    residents[place] = np.uint32(row)
    entries[row].place = np.uint32(place)


@register_jitable
def remove_resident(index, entries, row):
    residents = uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])
    last = index[INDEX_NUM_RESIDENTS] - 1
    index[INDEX_NUM_RESIDENTS] = last
    place = np.int64(entries[row].place)
    moved = residents[last]
    residents[place] = moved
    entries[np.int64(moved)].place = np.uint32(place)
    entries[row].place = np.uint32(NONE)


@register_jitable(forceinline=True)
def _is_of_session(entries, row):
    """Whether an entry stands in the table of sessions."""
    return entries[row].flags & TAIL_OR_SIBLING != np.uint32(0) and entries[row].session != np.uint64(0)


@register_jitable
def _withdraw(index, entries, row):
    """Take an entry out of everything that depends on its prefix and session, but for its tier key."""
    remove_row(uint64_view(index[INDEX_CHECKS], index[INDEX_TABLE_SIZE]), hash_in(index, entries[row].check), row)
    if _is_of_session(entries, row):
        remove_row(
            uint64_view(index[INDEX_SESSIONS], index[INDEX_TABLE_SIZE]), hash_in(index, entries[row].session), row
        )
    _leave_floor(index, entries, row)
    _count_depth(index, entries[row].depth, -1)


@register_jitable
def remove_entry(index, row):
    """Remove an entry; the last one moves into its place."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    if entries[row].flags & _SPILLED == np.uint32(0):
        remove_resident(index, entries, row)
    _withdraw(index, entries, row)
    keys = uint64_view(index[INDEX_KEYS], index[INDEX_TABLE_SIZE])
    checks = uint64_view(index[INDEX_CHECKS], index[INDEX_TABLE_SIZE])
    sessions = uint64_view(index[INDEX_SESSIONS], index[INDEX_TABLE_SIZE])
    remove_row(keys, hash_in(index, entries[row].key), row)
    last = index[INDEX_SIZE] - 1
    index[INDEX_SIZE] = last
    if row != last:
        replace_row(keys, hash_in(index, entries[last].key), last, row)
        replace_row(checks, hash_in(index, entries[last].check), last, row)
        if _is_of_session(entries, last):
            replace_row(sessions, hash_in(index, entries[last].session), last, row)
        entries[row] = entries[last]
        if entries[row].flags & _SPILLED == np.uint32(0):
            uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])[np.int64(entries[row].place)] = np.uint32(row)


@register_jitable
def write_entry(index, tokens, adapter, slot, session, flags):
    """Write the resident entry of a prefix, over the one with its key or as the last.

    Returns the slot that the earlier entry gives up (-1 if it was spilled, or holds the slot now given),
    whether the entry is new, whether the earlier one was spilled and so leaves bytes behind, and the key.
    """
    adapter_bits = np.uint64(adapter)
    powers = uint64_view(index[INDEX_POWERS], NUM_POWERS)
    depth = np.int64(tokens.size)
    grid = index[INDEX_GRID]
    offset = depth % grid if grid > 0 else np.int64(0)
    key = advance_key(first_key(adapter_bits), tokens, np.int64(0), depth)
    floor_state = advance_check(first_check(adapter_bits, powers), tokens, np.int64(0), depth - offset, powers)
    check = advance_check(floor_state, tokens, depth - offset, depth, powers)
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    row = find_key(index, key)
    is_new = row < 0
    displaced = np.int64(-1)
    was_spilled = np.int64(0)
    if is_new:
        row = index[INDEX_SIZE]
        index[INDEX_SIZE] = row + 1
        add_row(uint64_view(index[INDEX_KEYS], index[INDEX_TABLE_SIZE]), hash_in(index, key), row)
        add_resident(index, entries, row)
    else:
        _withdraw(index, entries, row)
        if entries[row].flags & _SPILLED != np.uint32(0):
            was_spilled = np.int64(1)
            add_resident(index, entries, row)
        elif entries[row].slot != slot:
            displaced = entries[row].slot
    index[INDEX_CLOCK] += 1
    entries[row].key = key
    entries[row].check = check
    entries[row].adapter = adapter_bits
    entries[row].session = np.uint64(session)
    entries[row].slot = slot
    entries[row].depth = depth
    entries[row].stamp = index[INDEX_CLOCK]
    entries[row].flags = np.uint32(flags)
    entries[row].floor = np.uint32(NONE)
    add_row(uint64_view(index[INDEX_CHECKS], index[INDEX_TABLE_SIZE]), hash_in(index, check), row)
    if _is_of_session(entries, row):
        add_row(uint64_view(index[INDEX_SESSIONS], index[INDEX_TABLE_SIZE]), hash_in(index, entries[row].session), row)
    if grid > 0:
        _enter_floor(index, entries, row, floor_state, offset)
    _count_depth(index, depth, 1)
    return displaced, is_new, was_spilled, np.int64(key)
