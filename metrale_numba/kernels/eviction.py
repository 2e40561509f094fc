"""The eviction order: a heap of the nodes that could go now, over all block sizes, the oldest stamp first.

A candidate is a node without children that no sequence holds. A node enters and leaves the heap at the
moment it becomes or stops being one, so nothing stale is ever sorted out and no call scans. Each candidate
keeps its place in the heap. The heap always has room for every row there is.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.hashing import table_hash
from metrale_numba.kernels.layout import (
    NONE,
    POOL_FIELDS,
    POOL_FREE,
    POOL_LINKS,
    POOL_NODES,
    POOL_NUM_FREE,
    POOL_NUM_NODES,
    POOL_NUM_ROOTS,
    POOL_NUM_SUFFIXES,
    POOL_NUMBER,
    POOL_ROWS,
    POOL_SUFFIX_FREE,
    POOL_SUFFIX_ROWS,
    POOL_SUFFIXES,
    POOL_TABLE,
    POOL_TABLE_SIZE,
    ROOT,
    SHARED_HEAP_NODES,
    SHARED_HEAP_ROWS,
    SHARED_HEAP_SIZE,
    SHARED_HEAP_STAMPS,
    SHARED_MULTIPLIER,
    SHARED_NUM_NODES,
    SHARED_NUM_POOLS,
    SHARED_NUM_SUFFIXES,
    SHARED_POOLS,
)
from metrale_numba.kernels.memory import int64_view, link_view, node_view, suffix_view, uint64_view
from metrale_numba.kernels.tables import remove_row

# Four children share a cache line of stamps, and a heap of a million is ten levels deep.
_ARITY = 4
_HALF_WORD = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFF_FFFF)


@register_jitable(forceinline=True)
def _put(shared, stamps, nodes, place, stamp, node):
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
def _remove_at(shared, place):
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
    if nodes[row].children == np.uint32(0) and nodes[row].count <= np.uint32(1):
        stamps = int64_view(shared[SHARED_HEAP_STAMPS], shared[SHARED_HEAP_ROWS])
        heap = uint64_view(shared[SHARED_HEAP_NODES], shared[SHARED_HEAP_ROWS])
        if place == NONE:
            place = shared[SHARED_HEAP_SIZE]
            shared[SHARED_HEAP_SIZE] = place + 1
        node = (np.uint64(pool[POOL_NUMBER]) << _HALF_WORD) | np.uint64(row)
        _settle(shared, stamps, heap, place, nodes[row].stamp, node)
    elif place != NONE:
        links[row].place = np.uint32(NONE)
        _remove_at(shared, place)


@register_jitable
def free_suffix(shared, pool, links, row):
    """Take the partial suffix off a node that has one and return its block and disk id."""
    suffixes = suffix_view(pool[POOL_SUFFIXES], pool[POOL_SUFFIX_ROWS])
    suffix = np.int64(links[row].suffix)
    block = np.int64(suffixes[suffix].block)
    disk = np.int64(suffixes[suffix].disk)
    links[row].suffix = np.uint32(NONE)
    suffixes[suffix].node = np.uint32(NONE)
    suffixes[suffix].block = np.uint32(pool[POOL_SUFFIX_FREE] & NONE)
    pool[POOL_SUFFIX_FREE] = suffix
    pool[POOL_NUM_SUFFIXES] -= 1
    shared[SHARED_NUM_SUFFIXES] -= 1
    return block, disk


@register_jitable(forceinline=True)
def _free_row(shared, pool, nodes, row):
    """Take a row out of the table and put it on the free list."""
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    remove_row(table, table_hash(nodes[row].state, np.uint64(shared[SHARED_MULTIPLIER])), row)
    nodes[row].parent = np.uint32(NONE)
    nodes[row].block = np.uint32(pool[POOL_FREE] & NONE)
    pool[POOL_FREE] = row
    pool[POOL_NUM_FREE] += 1


@register_jitable(forceinline=True)
def _unlink(shared, pool, nodes, links, row):
    """Free a node without children and return its parent, or -1 if that was a root and now is empty and gone."""
    parent = np.int64(nodes[row].parent)
    before = links[row].previous_sibling
    after = links[row].next_sibling
    if before == np.uint32(NONE):
        links[parent].first_child = after
    else:
        links[np.int64(before)].next_sibling = after
    if after != np.uint32(NONE):
        links[np.int64(after)].previous_sibling = before
    nodes[parent].children -= np.uint32(1)
    _free_row(shared, pool, nodes, row)
    pool[POOL_NUM_NODES] -= 1
    shared[SHARED_NUM_NODES] -= 1
    if nodes[parent].parent == np.uint32(ROOT):
        if nodes[parent].children == np.uint32(0):
            _free_row(shared, pool, nodes, parent)
            pool[POOL_NUM_ROOTS] -= 1
        return np.int64(-1)
    return parent


def evict(shared, num_blocks, blocks_out, disks_out):
    """Remove the oldest candidates until `num_blocks` blocks are out or none is left.

    `blocks_out` has room for one block more than asked; `disks_out` has as much, or none if no disk id was
    ever stored. Returns the numbers of blocks and disk ids, and how many pools became empty.
    """
    num_out = np.int64(0)
    num_disks = np.int64(0)
    num_empty = np.int64(0)
    pools = int64_view(shared[SHARED_POOLS], shared[SHARED_NUM_POOLS])
    while num_out < num_blocks and shared[SHARED_HEAP_SIZE] > 0:
        stamps = int64_view(shared[SHARED_HEAP_STAMPS], shared[SHARED_HEAP_ROWS])
        heap = uint64_view(shared[SHARED_HEAP_NODES], shared[SHARED_HEAP_ROWS])
        number = np.int64(heap[0] >> _HALF_WORD)
        row = np.int64(heap[0] & _LOW_HALF)
        pool = int64_view(pools[number], POOL_FIELDS)
        nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
        links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
        _remove_at(shared, np.int64(0))
        while True:
            blocks_out[num_out] = nodes[row].block
            num_out += 1
            if links[row].disk != np.uint32(NONE):
                disks_out[num_disks] = links[row].disk
                num_disks += 1
            if links[row].suffix != np.uint32(NONE):
                block, disk = free_suffix(shared, pool, links, row)
                blocks_out[num_out] = np.uint32(block)
                num_out += 1
                if disk != NONE:
                    disks_out[num_disks] = np.uint32(disk)
                    num_disks += 1
            row = _unlink(shared, pool, nodes, links, row)
            if row < 0 or nodes[row].children != np.uint32(0) or nodes[row].count > np.uint32(1):
                break
            # A sequence that drains never passes through the heap: its next block is older than the top.
            if num_out >= num_blocks or (shared[SHARED_HEAP_SIZE] > 0 and stamps[0] < nodes[row].stamp):
                update_candidate(shared, pool, nodes, links, row)
                break
        if pool[POOL_NUM_NODES] == 0:
            num_empty += 1
    return num_out, num_disks, num_empty
