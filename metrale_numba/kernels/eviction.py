"""Eviction: of the oldest candidates of all, of one adapter's, or of a whole forest whether held or not.

The order is that of the heap in :mod:`metrale_numba.kernels.candidates`. Lists of blocks go out in the
order in which nodes were removed, so a child always comes before its parent.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.candidates import remove_at, update_candidate
from metrale_numba.kernels.counting import CANDIDATES_MOVED, NODES_VISITED, tally
from metrale_numba.kernels.layout import (
    CHILDREN,
    NONE,
    POOL_FIELDS,
    POOL_FIRST_ROOT,
    POOL_LINKS,
    POOL_NODES,
    POOL_NUM_NODES,
    POOL_NUM_ROOTS,
    POOL_NUMBER,
    POOL_ROWS,
    POOL_SHARED,
    SHARED_FIELDS,
    SHARED_HEAP_NODES,
    SHARED_HEAP_ROWS,
    SHARED_HEAP_SIZE,
    SHARED_HEAP_STAMPS,
    SHARED_NUM_POOLS,
    SHARED_POOLS,
)
from metrale_numba.kernels.memory import int64_view, link_view, node_view, prefetch, uint64_view
from metrale_numba.kernels.removal import prefetch_neighbours, prefetch_slot, remove_leaf
from metrale_numba.kernels.walk import find_root

_HALF_WORD = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFF_FFFF)
# How many rows before its turn a node is asked for while a sequence drains, and then its slot of the table.
_FAR = 16
_NEAR = 8


@register_jitable(forceinline=True)
def _prefetch_node(pools, member):
    """Ask for the node of a member of the heap."""
    pool = int64_view(pools[np.int64(member >> _HALF_WORD)], POOL_FIELDS)
    row = member & _LOW_HALF
    prefetch(node_view(pool[POOL_NODES], pool[POOL_ROWS]), row)
    prefetch(link_view(pool[POOL_LINKS], pool[POOL_ROWS]), row)


def evict(address, num_blocks, blocks_out, disks_out):
    """Remove the oldest candidates until `num_blocks` blocks are out or none is left.

    `blocks_out` has room for one block more than asked; `disks_out` has as much, or none if no disk id was
    ever stored. Returns the numbers of blocks and disk ids, and how many pools became empty.
    """
    shared = int64_view(address, SHARED_FIELDS)
    num_out = np.int64(0)
    num_disks = np.int64(0)
    num_empty = np.int64(0)
    pools = int64_view(shared[SHARED_POOLS], shared[SHARED_NUM_POOLS])
    stamps = int64_view(shared[SHARED_HEAP_STAMPS], shared[SHARED_HEAP_ROWS])
    heap = uint64_view(shared[SHARED_HEAP_NODES], shared[SHARED_HEAP_ROWS])
    while num_out < num_blocks and shared[SHARED_HEAP_SIZE] > 0:
        pool = int64_view(pools[np.int64(heap[0] >> _HALF_WORD)], POOL_FIELDS)
        row = np.int64(heap[0] & _LOW_HALF)
        nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
        links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
        # Everything around the victim is on its way into the cache while the heap is put in order, and the next victim
        # while this one is removed.
        prefetch_neighbours(shared, pool, nodes, links, row)
        remove_at(shared, np.int64(0))
        if shared[SHARED_HEAP_SIZE] > 0:
            _prefetch_node(pools, heap[0])
        while True:
            # Blocks that were inserted together stand in consecutive rows: these are the ancestors, most often.
            if row >= _FAR:
                prefetch(nodes, np.uint64(row - _FAR))
                prefetch(links, np.uint64(row - _FAR))
                prefetch_slot(shared, pool, nodes, row - _NEAR)
            num_out, num_disks, row = remove_leaf(
                shared, pool, nodes, links, row, blocks_out, num_out, disks_out, num_disks
            )
            if row < 0 or nodes[row].children & np.uint32(CHILDREN) != np.uint32(0) or nodes[row].count > np.uint32(1):
                break
            # A sequence that drains never passes through the heap: its next block is older than the top.
            if num_out >= num_blocks or (shared[SHARED_HEAP_SIZE] > 0 and stamps[0] < nodes[row].stamp):
                update_candidate(shared, pool, nodes, links, row)
                break
        if pool[POOL_NUM_NODES] == 0:
            num_empty += 1
    return num_out, num_disks, num_empty


@register_jitable
def _sift_down(stamps, members, size, place):
    """Restore the order of a plain binary heap below a place."""
    while True:
        below = 2 * place + 1
        if below >= size:
            return
        if below + 1 < size and stamps[below + 1] < stamps[below]:
            below += 1
        if stamps[place] <= stamps[below]:
            return
        tally(CANDIDATES_MOVED, 1)
        stamps[place], stamps[below] = stamps[below], stamps[place]
        members[place], members[below] = members[below], members[place]
        place = below


@register_jitable
def _collect_candidates(pool, nodes, links, root, stamps, members, size):
    """Append the candidates of a forest to a list and return its length."""
    number = np.uint64(pool[POOL_NUMBER]) << _HALF_WORD
    row = root
    while True:
        tally(NODES_VISITED, 1)
        if links[row].first_child != np.uint32(NONE):
            row = np.int64(links[row].first_child)
            continue
        if nodes[row].count <= np.uint32(1):
            stamps[size] = nodes[row].stamp
            members[size] = number | np.uint64(row)
            size += 1
        while row != root and links[row].next_sibling == np.uint32(NONE):
            row = np.int64(nodes[row].parent)
        if row == root:
            return size
        row = np.int64(links[row].next_sibling)


def count_nodes(shared, adapter):
    """Nodes that an adapter has in all pools."""
    pools = int64_view(shared[SHARED_POOLS], shared[SHARED_NUM_POOLS])
    total = np.int64(0)
    for number in range(shared[SHARED_NUM_POOLS]):
        if pools[number] != 0:
            pool = int64_view(pools[number], POOL_FIELDS)
            nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
            root = find_root(pool, nodes, adapter)
            if root >= 0:
                total += np.int64(nodes[root].count)
    return total


def evict_from(shared, adapter, num_blocks, num_nodes, blocks_out, disks_out, stamps, members):
    """Remove an adapter's oldest candidates until `num_blocks` blocks or `num_nodes` nodes are out, or none is left.

    Collects them by a walk over the adapter's forests: the common heap knows nothing of adapters. `stamps` and
    `members` are scratch space for as many candidates as the adapter has nodes. `blocks_out` has room for one
    block more than asked, `disks_out` too unless no disk id was ever stored. Returns the numbers of blocks,
    disk ids and nodes removed, and how many pools became empty.
    """
    pools = int64_view(shared[SHARED_POOLS], shared[SHARED_NUM_POOLS])
    size = np.int64(0)
    for number in range(shared[SHARED_NUM_POOLS]):
        if pools[number] != 0:
            pool = int64_view(pools[number], POOL_FIELDS)
            nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
            links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
            root = find_root(pool, nodes, adapter)
            if root >= 0:
                size = _collect_candidates(pool, nodes, links, root, stamps, members, size)
    for place in range(size // 2 - 1, -1, -1):
        _sift_down(stamps, members, size, place)
    num_out = np.int64(0)
    num_disks = np.int64(0)
    num_removed = np.int64(0)
    num_empty = np.int64(0)
    while size > 0 and num_out < num_blocks and num_removed < num_nodes:
        pool = int64_view(pools[np.int64(members[0] >> _HALF_WORD)], POOL_FIELDS)
        row = np.int64(members[0] & _LOW_HALF)
        nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
        links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
        remove_at(shared, np.int64(links[row].place))
        num_out, num_disks, parent = remove_leaf(
            shared, pool, nodes, links, row, blocks_out, num_out, disks_out, num_disks
        )
        num_removed += 1
        if pool[POOL_NUM_NODES] == 0:
            num_empty += 1
        if (
            parent >= 0
            and nodes[parent].children & np.uint32(CHILDREN) == np.uint32(0)
            and nodes[parent].count <= np.uint32(1)
        ):
            update_candidate(shared, pool, nodes, links, parent)
            stamps[0] = nodes[parent].stamp
            members[0] = (np.uint64(pool[POOL_NUMBER]) << _HALF_WORD) | np.uint64(parent)
        else:
            size -= 1
            stamps[0] = stamps[size]
            members[0] = members[size]
        _sift_down(stamps, members, size, np.int64(0))
    return num_out, num_disks, num_removed, num_empty


def drop_forest(pool, adapter, blocks_out, disks_out, num_out, num_disks):
    """Remove every node of an adapter in one pool, held or not, and its root.

    Both arrays have room for all that the adapter has, after the first `num_out` blocks and `num_disks` disk ids
    that they hold already. Returns both numbers as they are then.
    """
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    row = find_root(pool, nodes, adapter)
    if row < 0:
        return num_out, num_disks
    root = row
    left = np.int64(nodes[root].count)
    while left > 0:
        while links[row].first_child != np.uint32(NONE):
            row = np.int64(links[row].first_child)
        if links[row].place != np.uint32(NONE):
            remove_at(shared, np.int64(links[row].place))
        num_out, num_disks, row = remove_leaf(
            shared, pool, nodes, links, row, blocks_out, num_out, disks_out, num_disks
        )
        left -= 1
        if row < 0:
            row = root
    return num_out, num_disks


def count_by_adapter(pool, adapters_out, counts_out):
    """List the adapters that have nodes in a pool, as many as it has roots, and how many each has."""
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    row = pool[POOL_FIRST_ROOT]
    for i in range(pool[POOL_NUM_ROOTS]):
        adapters_out[i] = nodes[row].stamp
        counts_out[i] = np.int64(nodes[row].count)
        row = np.int64(links[row].next_sibling)
