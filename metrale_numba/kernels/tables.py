"""Open-addressing tables from 32 bits of a hash to a row, with linear probing.

A slot holds the hash above the row, so a table is rehashed and repaired without looking at what its rows
hold. Slots stand in the order of their hashes, so rehashing reads and writes two nearly sequential
streams. There is always a free slot. Finding is the caller's: it alone can tell a hit from a collision.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.counting import SLOTS_PROBED, tally
from metrale_numba.kernels.layout import EMPTY_SLOT

_EMPTY = np.uint64(EMPTY_SLOT)
_HALF_WORD = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFF_FFFF)


@register_jitable(forceinline=True)
def home_slot(hash32, size):
    """Where a hash belongs."""
    return np.int64((hash32 * np.uint64(size)) >> _HALF_WORD)


@register_jitable(forceinline=True)
def first_slot(hash32, size):
    """Where the search for a hash begins."""
    tally(SLOTS_PROBED, 1)
    return home_slot(hash32, size)


@register_jitable(forceinline=True)
def next_slot(slot, size):
    """Where the search goes on."""
    tally(SLOTS_PROBED, 1)
    slot += 1
    return np.int64(0) if slot == size else slot


@register_jitable(forceinline=True)
def row_of(value):
    """The row that a used slot's value names."""
    return np.int64(value & _LOW_HALF)


@register_jitable(forceinline=True)
def add_row(table, hash32, row):
    """Enter a row that is not in the table yet."""
    size = table.size
    slot = first_slot(hash32, size)
    while table[slot] != _EMPTY:
        slot = next_slot(slot, size)
    table[slot] = (hash32 << _HALF_WORD) | np.uint64(row)


@register_jitable
def slot_of(table, hash32, row):
    """The slot of a row that is in the table."""
    value = (hash32 << _HALF_WORD) | np.uint64(row)
    size = table.size
    slot = first_slot(hash32, size)
    while table[slot] != value:
        slot = next_slot(slot, size)
    return slot


@register_jitable
def replace_row(table, hash32, row, new_row):
    """Let the slot of a row that is in the table name another row with the same hash."""
    table[slot_of(table, hash32, row)] = (hash32 << _HALF_WORD) | np.uint64(new_row)


@register_jitable
def remove_row(table, hash32, row):
    """Take a row out, and move later rows up so that no search meets a hole before its goal."""
    size = table.size
    hole = slot_of(table, hash32, row)
    slot = next_slot(hole, size)
    while table[slot] != _EMPTY:
        value = table[slot]
        home = home_slot(value >> _HALF_WORD, size)
        # The row may move to the hole only if the hole lies between its home and its slot, going round.
        behind = slot - home
        if behind < 0:
            behind += size
        gap = slot - hole
        if gap < 0:
            gap += size
        if behind >= gap:
            table[hole] = value
            hole = slot
        slot = next_slot(slot, size)
    table[hole] = _EMPTY


def rehash(old, new):
    """Enter every row of the table `old` into the empty, larger table `new`."""
    for slot in range(old.size):
        tally(SLOTS_PROBED, 1)
        value = old[slot]
        if value != _EMPTY:
            add_row(new, value >> _HALF_WORD, row_of(value))
