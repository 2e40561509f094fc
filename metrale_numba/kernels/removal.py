"""Taking nodes out: their partial suffix, their links, their place in the table, and an empty forest's root.

What calls these has taken the node out of the candidates already, or never had it there.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.counting import NODES_REMOVED, tally
from metrale_numba.kernels.hashing import table_hash
from metrale_numba.kernels.layout import (
    HAS_SUFFIX,
    NONE,
    POOL_DISK_ROWS,
    POOL_DISKS,
    POOL_FIRST_ROOT,
    POOL_FREE,
    POOL_NUM_FREE,
    POOL_NUM_NODES,
    POOL_NUM_ROOTS,
    POOL_NUM_SUFFIXES,
    POOL_SUFFIX_FREE,
    POOL_SUFFIX_ROWS,
    POOL_SUFFIXES,
    POOL_TABLE,
    POOL_TABLE_SIZE,
    SHARED_MULTIPLIER,
    SHARED_NUM_EVICTABLE,
    SHARED_NUM_NODES,
    SHARED_NUM_SUFFIXES,
)
from metrale_numba.kernels.memory import prefetch, suffix_view, uint32_view, uint64_view
from metrale_numba.kernels.tables import home_slot, remove_row


@register_jitable
def free_suffix(shared, pool, nodes, links, row):
    """Take the partial suffix off a node that has one and return its block and disk id."""
    suffixes = suffix_view(pool[POOL_SUFFIXES], pool[POOL_SUFFIX_ROWS])
    suffix = np.int64(links[row].suffix)
    block = np.int64(suffixes[suffix].block)
    disk = np.int64(suffixes[suffix].disk)
    links[row].suffix = np.uint32(NONE)
    nodes[row].children ^= np.uint32(HAS_SUFFIX)
    suffixes[suffix].node = np.uint32(NONE)
    suffixes[suffix].block = np.uint32(pool[POOL_SUFFIX_FREE] & NONE)
    pool[POOL_SUFFIX_FREE] = suffix
    pool[POOL_NUM_SUFFIXES] -= 1
    shared[SHARED_NUM_SUFFIXES] -= 1
    if nodes[row].count <= np.uint32(1):
        shared[SHARED_NUM_EVICTABLE] -= 1
    return block, disk


@register_jitable(forceinline=True)
def prefetch_slot(shared, pool, nodes, row):
    """Ask for a node's slot of the table."""
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    hash32 = table_hash(nodes[row].state, np.uint64(shared[SHARED_MULTIPLIER]))
    prefetch(table, np.uint64(home_slot(hash32, table.size)))


@register_jitable(forceinline=True)
def prefetch_neighbours(shared, pool, nodes, links, row):
    """Ask for what the removal of a node will write to: its slot of the table, its siblings and its parent."""
    prefetch_slot(shared, pool, nodes, row)
    # One that is NONE asks for a line that does not exist, which does nothing.
    prefetch(links, np.uint64(links[row].previous_sibling))
    prefetch(links, np.uint64(links[row].next_sibling))
    prefetch(links, np.uint64(nodes[row].parent))
    prefetch(nodes, np.uint64(nodes[row].parent))


@register_jitable(forceinline=True)
def _free_row(shared, pool, nodes, row):
    """Take a row out of the table and put it on the free list."""
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    remove_row(table, table_hash(nodes[row].state, np.uint64(shared[SHARED_MULTIPLIER])), row)
    tally(NODES_REMOVED, 1)
    nodes[row].parent = np.uint32(NONE)
    nodes[row].block = np.uint32(pool[POOL_FREE] & NONE)
    pool[POOL_FREE] = row
    pool[POOL_NUM_FREE] += 1


@register_jitable
def _free_root(shared, pool, nodes, links, row):
    """Give back the root of an empty forest."""
    before = links[row].previous_sibling
    after = links[row].next_sibling
    if before == np.uint32(NONE):
        pool[POOL_FIRST_ROOT] = np.int64(after)
    else:
        links[np.int64(before)].next_sibling = after
    if after != np.uint32(NONE):
        links[np.int64(after)].previous_sibling = before
    _free_row(shared, pool, nodes, row)
    pool[POOL_NUM_ROOTS] -= 1


@register_jitable(forceinline=True)
def _unlink(shared, pool, nodes, links, row):
    """Free a node without children and return its parent, or -1 if that is a root; an empty forest's goes too."""
    parent = np.int64(nodes[row].parent)
    root = np.int64(links[row].root)
    before = links[row].previous_sibling
    after = links[row].next_sibling
    if before == np.uint32(NONE):
        links[parent].first_child = after
    else:
        links[np.int64(before)].next_sibling = after
    if after != np.uint32(NONE):
        links[np.int64(after)].previous_sibling = before
    nodes[parent].children -= np.uint32(1)
    nodes[root].count -= np.uint32(1)
    _free_row(shared, pool, nodes, row)
    pool[POOL_NUM_NODES] -= 1
    shared[SHARED_NUM_NODES] -= 1
    if parent != root:
        return parent
    if nodes[root].count == np.uint32(0):
        _free_root(shared, pool, nodes, links, root)
    return np.int64(-1)


@register_jitable(forceinline=True)
def remove_leaf(shared, pool, nodes, links, row, blocks_out, num_out, disks_out, num_disks):
    """Remove a node without children; its blocks and disk ids go out.

    Returns how many of each are out now, and its parent, or -1 if that is a root.
    """
    blocks_out[num_out] = nodes[row].block
    num_out += 1
    if pool[POOL_DISK_ROWS] > 0:
        disks = uint32_view(pool[POOL_DISKS], pool[POOL_DISK_ROWS])
        if disks[row] != np.uint32(NONE):
            disks_out[num_disks] = disks[row]
            num_disks += 1
    if links[row].suffix != np.uint32(NONE):
        block, disk = free_suffix(shared, pool, nodes, links, row)
        blocks_out[num_out] = np.uint32(block)
        num_out += 1
        if disk != NONE:
            disks_out[num_disks] = np.uint32(disk)
            num_disks += 1
    if nodes[row].count <= np.uint32(1):
        shared[SHARED_NUM_EVICTABLE] -= 1
    return num_out, num_disks, _unlink(shared, pool, nodes, links, row)
