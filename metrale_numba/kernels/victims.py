"""Which resident snapshot goes next: the session that was idle longest, then age and depth, past the lease.

Looks at the resident entries only, whatever is spilled.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.counting import ENTRIES_LOOKED_AT, tally
from metrale_numba.kernels.entries import TAIL_OR_SIBLING
from metrale_numba.kernels.hashing import table_hash
from metrale_numba.kernels.layout import (
    INDEX_ENTRIES,
    INDEX_EVICTIONS_SINCE_LOOKUP,
    INDEX_LEASED_SESSION,
    INDEX_MULTIPLIER,
    INDEX_NUM_RESIDENTS,
    INDEX_RESIDENTS,
    INDEX_ROWS,
    INDEX_TAIL_LEASE_TTL,
    INDEX_TAIL_PROTECT,
)
from metrale_numba.kernels.memory import entry_view, uint32_view
from metrale_numba.kernels.tables import first_slot, next_slot


@register_jitable
def _is_leased(index, entries, row):
    """Whether the lease passes an entry over, given that the lease holds."""
    return entries[row].flags & TAIL_OR_SIBLING != np.uint32(0) and entries[row].session == np.uint64(
        index[INDEX_LEASED_SESSION]
    )


@register_jitable
def _norm(value, least, greatest):
    """Min-max norm of a number among others, 0 where all are equal."""
    if greatest == least:
        return np.float64(0.0)
    return np.float64(value - least) / np.float64(greatest - least)


@register_jitable
def _newest_by_session(index, entries, residents, size):
    """For each resident, by place, the newest stamp of its session."""
    places = np.full(2 * size, np.int64(-1))
    newest = np.empty(size, np.int64)
    group = np.empty(size, np.int64)
    multiplier = np.uint64(index[INDEX_MULTIPLIER])
    for i in range(size):
        tally(ENTRIES_LOOKED_AT, 1)
        row = np.int64(residents[i])
        slot = first_slot(table_hash(entries[row].session, multiplier), places.size)
        while places[slot] >= 0 and entries[np.int64(residents[places[slot]])].session != entries[row].session:
            slot = next_slot(slot, places.size)
        if places[slot] < 0:
            places[slot] = i
            newest[i] = entries[row].stamp
        first = places[slot]
        group[i] = first
        newest[first] = max(newest[first], entries[row].stamp)
    for i in range(size):
        newest[i] = newest[group[i]]
    return newest


@register_jitable
def victim(index, alpha):
    """Row of the resident entry to go next, at least one being resident."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    residents = uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])
    size = index[INDEX_NUM_RESIDENTS]
    first = np.int64(residents[0])
    least_stamp = entries[first].stamp
    greatest_stamp = least_stamp
    least_depth = entries[first].depth
    greatest_depth = least_depth
    num_leased = np.int64(0)
    leasing = (
        index[INDEX_LEASED_SESSION] != 0
        and index[INDEX_TAIL_PROTECT] != 0
        and index[INDEX_EVICTIONS_SINCE_LOOKUP] < index[INDEX_TAIL_LEASE_TTL]
    )
    for i in range(size):
        tally(ENTRIES_LOOKED_AT, 1)
        row = np.int64(residents[i])
        least_stamp = min(least_stamp, entries[row].stamp)
        greatest_stamp = max(greatest_stamp, entries[row].stamp)
        least_depth = min(least_depth, entries[row].depth)
        greatest_depth = max(greatest_depth, entries[row].depth)
        if leasing and _is_leased(index, entries, row):
            num_leased += 1
    passing_over = leasing and num_leased < size
    newest = _newest_by_session(index, entries, residents, size)
    victim = np.int64(-1)
    stalest = np.int64(0)
    least_score = np.float64(0.0)
    for i in range(size):
        tally(ENTRIES_LOOKED_AT, 1)
        row = np.int64(residents[i])
        if passing_over and _is_leased(index, entries, row):
            continue
        if victim >= 0 and newest[i] > stalest:
            continue
        score = _norm(entries[row].stamp, least_stamp, greatest_stamp) + alpha * _norm(
            entries[row].depth, least_depth, greatest_depth
        )
        if victim < 0 or newest[i] < stalest or score < least_score or (score == least_score and row < victim):
            victim = row
            stalest = newest[i]
            least_score = score
    return victim


@register_jitable
def oldest(index):
    """Row of the resident entry with the smallest stamp, at least one being resident."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    residents = uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])
    oldest = np.int64(residents[0])
    for i in range(1, index[INDEX_NUM_RESIDENTS]):
        tally(ENTRIES_LOOKED_AT, 1)
        row = np.int64(residents[i])
        if entries[row].stamp < entries[oldest].stamp:
            oldest = row
    return oldest
