"""The eviction order: a heap of the nodes that could go now, over all block sizes, the oldest stamp first.

A candidate is a node without children that no sequence holds. A node enters and leaves the heap at the
moment it becomes or stops being one, so nothing stale is ever sorted out and no call scans. Each candidate
keeps its place in the heap. The heap always has room for every row there is.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.counting import CANDIDATES_MOVED, tally
from metrale_numba.kernels.layout import (
    CHILDREN,
    NONE,
    POOL_FIELDS,
    POOL_LINKS,
    POOL_NUMBER,
    POOL_ROWS,
    SHARED_HEAP_NODES,
    SHARED_HEAP_ROWS,
    SHARED_HEAP_SIZE,
    SHARED_HEAP_STAMPS,
    SHARED_NUM_POOLS,
    SHARED_POOLS,
)
from metrale_numba.kernels.memory import int64_view, link_view, uint64_view

# Four children share a cache line of stamps, and a heap of a million is ten levels deep.
_ARITY = 4
_HALF_WORD = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFF_FFFF)


@register_jitable(forceinline=True)
def _put(shared, stamps, nodes, place, stamp, node):
    tally(CANDIDATES_MOVED, 1)
    stamps[place] = stamp
    nodes[place] = node
    pools = int64_view(shared[SHARED_POOLS], shared[SHARED_NUM_POOLS])
    pool = int64_view(pools[np.int64(node >> _HALF_WORD)], POOL_FIELDS)
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    links[np.int64(node & _LOW_HALF)].place = np.uint32(place)


@register_jitable
def _settle(shared, stamps, nodes, place, stamp, node):
    """Put a candidate where it belongs, given that `place` is free and the rest is in order."""
    start = place
    while place > 0:
        above = (place - 1) // _ARITY
        if stamps[above] <= stamp:
            break
        _put(shared, stamps, nodes, place, stamps[above], nodes[above])
        place = above
    if place == start:
        size = shared[SHARED_HEAP_SIZE]
        while True:
            below = place * _ARITY + 1
            if below >= size:
                break
            least = below
            for other in range(below + 1, min(below + _ARITY, size)):
                if stamps[other] < stamps[least]:
                    least = other
            if stamps[least] >= stamp:
                break
            _put(shared, stamps, nodes, place, stamps[least], nodes[least])
            place = least
    _put(shared, stamps, nodes, place, stamp, node)


@register_jitable
def remove_at(shared, place):
    stamps = int64_view(shared[SHARED_HEAP_STAMPS], shared[SHARED_HEAP_ROWS])
    nodes = uint64_view(shared[SHARED_HEAP_NODES], shared[SHARED_HEAP_ROWS])
    last = shared[SHARED_HEAP_SIZE] - 1
    shared[SHARED_HEAP_SIZE] = last
    if place != last:
        _settle(shared, stamps, nodes, place, stamps[last], nodes[last])


@register_jitable
def update_candidate(shared, pool, nodes, links, row):
    """Bring a node's standing as a candidate up to date after its count, stamp or children changed."""
    place = np.int64(links[row].place)
    if nodes[row].children & np.uint32(CHILDREN) == np.uint32(0) and nodes[row].count <= np.uint32(1):
        stamps = int64_view(shared[SHARED_HEAP_STAMPS], shared[SHARED_HEAP_ROWS])
        heap = uint64_view(shared[SHARED_HEAP_NODES], shared[SHARED_HEAP_ROWS])
        if place == NONE:
            place = shared[SHARED_HEAP_SIZE]
            shared[SHARED_HEAP_SIZE] = place + 1
        node = (np.uint64(pool[POOL_NUMBER]) << _HALF_WORD) | np.uint64(row)
        _settle(shared, stamps, heap, place, nodes[row].stamp, node)
    elif place != NONE:
        links[row].place = np.uint32(NONE)
        remove_at(shared, place)
