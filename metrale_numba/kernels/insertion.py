"""The tree for its writers: storing the blocks of a sequence, and its partial suffix.

:func:`insert` makes sure of room before its first write; short of it, it answers what is missing and has
changed nothing.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.candidates import update_candidate
from metrale_numba.kernels.hashing import advance_check, advance_key, first_check, first_key, table_hash
from metrale_numba.kernels.layout import (
    BAD_BLOCK,
    CHECK_GROUP,
    CHILDREN,
    DONE,
    HAS_SUFFIX,
    NONE,
    POOL_BLOCK_SIZE,
    POOL_DISK_ROWS,
    POOL_DISKS,
    POOL_FIRST_ROOT,
    POOL_FREE,
    POOL_LINKS,
    POOL_NODES,
    POOL_NUM_FREE,
    POOL_NUM_NODES,
    POOL_NUM_ROOTS,
    POOL_NUM_SUFFIXES,
    POOL_ROWS,
    POOL_SHARED,
    POOL_SUFFIX_FREE,
    POOL_SUFFIX_ROWS,
    POOL_SUFFIX_TOKENS,
    POOL_SUFFIX_USED,
    POOL_SUFFIXES,
    POOL_TABLE,
    POOL_TABLE_SIZE,
    POOL_TOKENS,
    POOL_USED,
    ROOT,
    SHARED_ADOPT_BLOCKS,
    SHARED_CLOCK,
    SHARED_FIELDS,
    SHARED_MULTIPLIER,
    SHARED_NUM_EVICTABLE,
    SHARED_NUM_NODES,
    SHARED_NUM_SUFFIXES,
    SHARED_PARTIAL_TAILS,
    SHARED_POWERS,
    SHORT_OF_DISKS,
    SHORT_OF_ROWS,
    SHORT_OF_SUFFIXES,
)
from metrale_numba.kernels.memory import int64_view, link_view, node_view, suffix_view, uint32_view, uint64_view
from metrale_numba.kernels.removal import free_suffix
from metrale_numba.kernels.tables import add_row
from metrale_numba.kernels.walk import find_child, find_root, to_front

_SUFFIX_SHIFT = np.uint32(31)


@register_jitable(forceinline=True)
def _take_row(pool, nodes):
    row = pool[POOL_FREE]
    if row < 0:
        row = pool[POOL_USED]
        pool[POOL_USED] = row + 1
        return row
    following = nodes[row].block
    pool[POOL_FREE] = np.int64(-1) if following == np.uint32(NONE) else np.int64(following)
    pool[POOL_NUM_FREE] -= 1
    return row


@register_jitable
def _add_root(pool, nodes, links, adapter):
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    powers = uint64_view(shared[SHARED_POWERS], CHECK_GROUP + 1)
    row = _take_row(pool, nodes)
    nodes[row].stamp = adapter
    nodes[row].state = first_check(np.uint64(adapter), powers)
    nodes[row].parent = np.uint32(ROOT)
    nodes[row].block = np.uint32(NONE)
    nodes[row].count = np.uint32(0)
    nodes[row].children = np.uint32(0)
    links[row].key = first_key(np.uint64(adapter))
    first = np.uint32(pool[POOL_FIRST_ROOT])
    links[row].first_child = np.uint32(NONE)
    links[row].next_sibling = first
    links[row].previous_sibling = np.uint32(NONE)
    links[row].root = np.uint32(row)
    links[row].suffix = np.uint32(NONE)
    links[row].place = np.uint32(NONE)
    if first != np.uint32(NONE):
        links[np.int64(first)].previous_sibling = np.uint32(row)
    pool[POOL_FIRST_ROOT] = row
    pool[POOL_NUM_ROOTS] += 1
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    add_row(table, table_hash(nodes[row].state, np.uint64(shared[SHARED_MULTIPLIER])), row)
    return row


@register_jitable(forceinline=True)
def _add_child(pool, nodes, links, chunks, parent, tokens, start, stamp, count, block):
    """Make the node of the block of tokens from `start` on, as the newest child of `parent`."""
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    powers = uint64_view(shared[SHARED_POWERS], CHECK_GROUP + 1)
    block_size = pool[POOL_BLOCK_SIZE]
    row = _take_row(pool, nodes)
    begin = row * block_size
    for i in range(block_size):
        chunks[begin + i] = tokens[start + i]
    # Hashed as stored: should another thread write to the caller's array meanwhile, node and hash still agree.
    state = advance_check(nodes[parent].state, chunks, begin, begin + block_size, powers)
    first = links[parent].first_child
    nodes[row].stamp = stamp
    nodes[row].state = state
    nodes[row].parent = np.uint32(parent)
    nodes[row].block = block
    nodes[row].count = count
    nodes[row].children = np.uint32(0)
    links[row].key = advance_key(links[parent].key, chunks, begin, begin + block_size)
    links[row].first_child = np.uint32(NONE)
    links[row].next_sibling = first
    links[row].previous_sibling = np.uint32(NONE)
    links[row].root = links[parent].root
    links[row].suffix = np.uint32(NONE)
    links[row].place = np.uint32(NONE)
    if first != np.uint32(NONE):
        links[np.int64(first)].previous_sibling = np.uint32(row)
    links[parent].first_child = np.uint32(row)
    nodes[parent].children += np.uint32(1)
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    add_row(table, table_hash(state, np.uint64(shared[SHARED_MULTIPLIER])), row)
    return row


@register_jitable
def _take_suffix(pool):
    suffixes = suffix_view(pool[POOL_SUFFIXES], pool[POOL_SUFFIX_ROWS])
    row = pool[POOL_SUFFIX_FREE]
    if row < 0:
        row = pool[POOL_SUFFIX_USED]
        pool[POOL_SUFFIX_USED] = row + 1
        return row
    following = suffixes[row].block
    pool[POOL_SUFFIX_FREE] = np.int64(-1) if following == np.uint32(NONE) else np.int64(following)
    return row


@register_jitable
def _set_suffix(pool, nodes, links, node, tokens, start, block, disk):
    """Give a node that has none the partial suffix ``tokens[start:]``."""
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    width = pool[POOL_BLOCK_SIZE] - 1
    suffixes = suffix_view(pool[POOL_SUFFIXES], pool[POOL_SUFFIX_ROWS])
    suffix_tokens = uint32_view(pool[POOL_SUFFIX_TOKENS], pool[POOL_SUFFIX_ROWS] * width)
    row = _take_suffix(pool)
    for i in range(tokens.size - start):
        suffix_tokens[row * width + i] = tokens[start + i]
    suffixes[row].length = np.uint32(tokens.size - start)
    suffixes[row].block = block
    suffixes[row].disk = disk
    suffixes[row].node = np.uint32(node)
    links[node].suffix = np.uint32(row)
    nodes[node].children |= np.uint32(HAS_SUFFIX)
    pool[POOL_NUM_SUFFIXES] += 1
    shared[SHARED_NUM_SUFFIXES] += 1
    if nodes[node].count <= np.uint32(1):
        shared[SHARED_NUM_EVICTABLE] += 1


@register_jitable
def _missing_rows(pool, nodes, chunks, root, tokens, count):
    """Rows that storing the first `count` blocks of `tokens` will take, a root included."""
    if root < 0:
        return count + 1
    block_size = pool[POOL_BLOCK_SIZE]
    node = root
    for i in range(count):
        node = find_child(pool, nodes, chunks, node, tokens, i * block_size, block_size)
        if node < 0:
            return count - i
    return np.int64(0)


def count_missing(pool, tokens, num_blocks, adapter):
    """Nodes that storing the first `num_blocks` blocks of `tokens` would add."""
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    root = find_root(pool, nodes, adapter)
    if root < 0:
        return num_blocks
    return _missing_rows(pool, nodes, chunks, root, tokens, num_blocks)


def insert(pool, tokens, block_table, disk_ids, blocks_out, disks_out, released_out, matched_tokens, adapter):
    """Store the full blocks of `tokens` that `block_table` covers, at least one, then the partial suffix.

    `blocks_out` has room for each of them, `disks_out` too if `disk_ids` is not empty, and `released_out`
    for as many blocks less the suffix if blocks are adopted. Returns one of

    * ``(DONE, blocks, disk ids, released blocks, suffix block, suffix disk id)``: how many stand in each list, and
      what a dropped or replaced suffix held (NONE for nothing), which comes last in its list;
    * ``(SHORT_OF_ROWS, SHORT_OF_SUFFIXES or SHORT_OF_DISKS, how many, 0, 0, 0, 0)``, or
      ``(BAD_BLOCK, position, 0, 0, 0, 0)``: nothing has changed.
    """
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    block_size = pool[POOL_BLOCK_SIZE]
    zero = np.int64(0)
    full = np.int64(tokens.size // block_size)
    count = min(full, np.int64(block_table.size))
    has_suffix = tokens.size % block_size > 0 and block_table.size > full
    for i in range(count + 1 if has_suffix else count):
        if block_table[i] == np.uint32(NONE):
            return np.int64(BAD_BLOCK), np.int64(i), zero, zero, zero, zero
    root = find_root(pool, nodes, adapter)
    free_rows = pool[POOL_ROWS] - pool[POOL_USED] + pool[POOL_NUM_FREE]
    if free_rows < count + 1:
        missing = _missing_rows(pool, nodes, chunks, root, tokens, count) - free_rows
        if missing > 0:
            return np.int64(SHORT_OF_ROWS), missing, zero, zero, zero, zero
    if has_suffix and pool[POOL_NUM_SUFFIXES] == pool[POOL_SUFFIX_ROWS]:
        return np.int64(SHORT_OF_SUFFIXES), np.int64(1), zero, zero, zero, zero
    stores_disks = disk_ids.size > 0
    disks = uint32_view(pool[POOL_DISKS], pool[POOL_DISK_ROWS])
    if stores_disks and disks.size == 0:
        return np.int64(SHORT_OF_DISKS), zero, zero, zero, zero, zero

    num_blocks = zero
    num_disks = zero
    num_released = zero
    dropped_block = np.int64(NONE)
    dropped_disk = np.int64(NONE)
    stamp = shared[SHARED_CLOCK] + 1
    shared[SHARED_CLOCK] = stamp
    ordered = shared[SHARED_PARTIAL_TAILS] != 0
    adopts = shared[SHARED_ADOPT_BLOCKS] != 0 and disk_ids.size == 0
    if root < 0:
        root = _add_root(pool, nodes, links, adapter)
    node = root
    i = zero
    while i < count:
        row = find_child(pool, nodes, chunks, node, tokens, i * block_size, block_size)
        if row < 0:
            break
        nodes[row].stamp = stamp
        if ordered and nodes[node].children & np.uint32(CHILDREN) > np.uint32(1):
            to_front(nodes, links, node, row)
        if nodes[row].count == np.uint32(0):
            nodes[row].count = np.uint32(1)
        if i * block_size >= matched_tokens:
            if nodes[row].count == np.uint32(1):
                shared[SHARED_NUM_EVICTABLE] -= np.int64(1) + np.int64(nodes[row].children >> _SUFFIX_SHIFT)
            nodes[row].count += np.uint32(1)
            if adopts and nodes[row].block != block_table[i]:
                released_out[num_released] = nodes[row].block
                num_released += 1
                nodes[row].block = block_table[i]
                blocks_out[num_blocks] = block_table[i]
                num_blocks += 1
        if stores_disks and disk_ids[i] != np.uint32(NONE) and disks[row] == np.uint32(NONE):
            disks[row] = disk_ids[i]
            disks_out[num_disks] = disk_ids[i]
            num_disks += 1
        node = row
        i += 1

    deepest_found = node
    free_rows = pool[POOL_ROWS] - pool[POOL_USED] + pool[POOL_NUM_FREE]
    if count - i > free_rows:
        # Another thread wrote to the caller's tokens since the room was measured: store what there is room for.
        count = i + free_rows
        has_suffix = False
    if i < count and node != root and links[node].suffix != np.uint32(NONE):
        dropped_block, dropped_disk = free_suffix(shared, pool, nodes, links, node)
    nodes[root].count += np.uint32(count - i)
    pool[POOL_NUM_NODES] += count - i
    shared[SHARED_NUM_NODES] += count - i
    while i < count:
        references = np.uint32(2) if i * block_size >= matched_tokens else np.uint32(1)
        node = _add_child(pool, nodes, links, chunks, node, tokens, i * block_size, stamp, references, block_table[i])
        if references == np.uint32(1):
            shared[SHARED_NUM_EVICTABLE] += 1
        blocks_out[num_blocks] = block_table[i]
        num_blocks += 1
        if disks.size > 0:
            disks[node] = disk_ids[i] if stores_disks else np.uint32(NONE)
            if disks[node] != np.uint32(NONE):
                disks_out[num_disks] = disks[node]
                num_disks += 1
        i += 1

    if has_suffix:
        old_block = np.int64(NONE)
        old_disk = np.int64(NONE)
        new_block = np.int64(block_table[full])
        new_disk = np.int64(disk_ids[full]) if disk_ids.size > 0 else np.int64(NONE)
        if links[node].suffix != np.uint32(NONE):
            old_block, old_disk = free_suffix(shared, pool, nodes, links, node)
        _set_suffix(pool, nodes, links, node, tokens, full * block_size, np.uint32(new_block), np.uint32(new_disk))
        if new_block != old_block:
            blocks_out[num_blocks] = np.uint32(new_block)
            num_blocks += 1
            if old_block != NONE:
                dropped_block = old_block
        if new_disk != old_disk:
            if new_disk != NONE:
                disks_out[num_disks] = np.uint32(new_disk)
                num_disks += 1
            if old_disk != NONE:
                dropped_disk = old_disk
    if deepest_found != root:
        update_candidate(shared, pool, nodes, links, deepest_found)
    if node != deepest_found:
        update_candidate(shared, pool, nodes, links, node)
    return np.int64(DONE), num_blocks, num_disks, num_released, dropped_block, dropped_disk
