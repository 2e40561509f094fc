"""References on ids that stand for blocks or slots: taken, added and dropped for a whole array of ids, or for none.

A pool is a header, a count of references for each id, and a stack of the free ids. Relies on the caller's lock.
"""

from __future__ import annotations

import numpy as np

from metrale_numba.kernels.layout import ID_POOL_HIGH_WATER, ID_POOL_NUM_FREE

# Stands in a count between the two passes of a drop, for an id that is on the stack already.
_PUSHED = np.int64(-1)


def take_ids(header, counts, free, ids):
    """Take as many free ids as `ids` has room for, with one reference on each. The caller has seen that there are."""
    num_free = header[ID_POOL_NUM_FREE]
    for place in range(ids.size):
        num_free -= 1
        ids[place] = free[num_free]
        counts[ids[place]] = np.int64(1)
    header[ID_POOL_NUM_FREE] = num_free
    header[ID_POOL_HIGH_WATER] = max(header[ID_POOL_HIGH_WATER], np.int64(counts.size) - num_free)


def add_references(counts, ids):
    """Add a reference on each id; if one is unknown or free, nothing is changed.

    Returns the position of that one, or -1 if all are well.
    """
    for place in range(ids.size):
        if np.int64(ids[place]) >= np.int64(counts.size) or counts[ids[place]] == 0:
            return np.int64(place)
    for place in range(ids.size):
        counts[ids[place]] += np.int64(1)
    return np.int64(-1)


def drop_references(header, counts, free, ids):
    """Drop a reference on each id; if one is unknown or has none left, its position, and nothing is changed.

    Returns the position, or -1 if all are well, and how many ids became free.
    """
    for place in range(ids.size):
        if np.int64(ids[place]) >= np.int64(counts.size) or counts[ids[place]] == 0:
            for done in range(place):
                counts[ids[done]] += np.int64(1)
            return np.int64(place), np.int64(0)
        counts[ids[place]] -= np.int64(1)
    before = header[ID_POOL_NUM_FREE]
    num_free = before
    # From the end, so that ids which were given back in order are taken in order again.
    for place in range(ids.size - 1, -1, -1):
        if counts[ids[place]] == 0:
            free[num_free] = ids[place]
            num_free += 1
            counts[ids[place]] = _PUSHED
    for place in range(before, num_free):
        counts[free[place]] = np.int64(0)
    header[ID_POOL_NUM_FREE] = num_free
    return np.int64(-1), num_free - before


def check_ids(header, counts, free):
    """Whether the stack holds each id without references, once, and nothing else."""
    num_free = header[ID_POOL_NUM_FREE]
    size = np.int64(counts.size)
    if num_free < 0 or num_free > size:
        return False
    if header[ID_POOL_HIGH_WATER] < size - num_free or header[ID_POOL_HIGH_WATER] > size:
        return False
    without = np.int64(0)
    for place in range(size):
        if counts[place] < 0:
            return False
        if counts[place] == 0:
            without += 1
    is_on_stack = np.zeros(size, np.uint8)
    for place in range(num_free):
        number = np.int64(free[place])
        if number >= size or counts[number] != 0 or is_on_stack[number] != 0:
            return False
        is_on_stack[number] = np.uint8(1)
    return without == num_free
