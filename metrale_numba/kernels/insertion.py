"""The tree for its writers: storing the blocks of a sequence, and its partial suffix.

:func:`insert` makes sure of room before its first write; short of it, it answers what is missing and has
changed nothing.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.candidates import update_candidate
from metrale_numba.kernels.counting import NODES_ADDED, TOKENS_COPIED, tally
from metrale_numba.kernels.entries import is_floor
from metrale_numba.kernels.hashing import advance_check, advance_group, first_check, table_hash
from metrale_numba.kernels.layout import (
    BAD_BLOCK,
    CHILDREN,
    DONE,
    HAS_SNAPSHOTS,
    HAS_SUFFIX,
    INDEX_FIELDS,
    INDEX_GRID,
    INDEX_NUM_FLOORS,
    NONE,
    NUM_POWERS,
    POOL_BLOCK_SIZE,
    POOL_DISK_ROWS,
    POOL_DISKS,
    POOL_FIELDS,
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
    REFUSED,
    ROOT,
    SHARED_ADOPT_BLOCKS,
    SHARED_CLOCK,
    SHARED_FIELDS,
    SHARED_INDEX,
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
from metrale_numba.kernels.memory import (
    copy_16,
    int64_view,
    is_whole,
    link_view,
    node_view,
    prefetch,
    suffix_view,
    uint32_view,
    uint64_view,
)
from metrale_numba.kernels.removal import free_suffix
from metrale_numba.kernels.tables import add_row, home_slot
from metrale_numba.kernels.walk import COMMON_BLOCK_SIZE, begin_walk, find_child, find_root, to_front

_SUFFIX_SHIFT = np.uint32(31)
_ONE = np.uint64(1)
_AHEAD = np.uint64(12)
# New nodes that wait for their slots of the table to arrive in the cache: half of what a first-level cache holds.
_WAITING = 128


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
    powers = uint64_view(shared[SHARED_POWERS], NUM_POWERS)
    tally(NODES_ADDED, 1)
    row = _take_row(pool, nodes)
    nodes[row].stamp = adapter
    nodes[row].state = first_check(np.uint64(adapter), powers)
    nodes[row].parent = np.uint32(ROOT)
    nodes[row].block = np.uint32(NONE)
    nodes[row].count = np.uint32(0)
    nodes[row].children = np.uint32(0)
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
    _enter_rows(shared, pool, nodes, table, np.uint64(shared[SHARED_MULTIPLIER]), row, np.int64(1))
    return row


@register_jitable(forceinline=True)
def _add_child(pool, nodes, links, chunks, powers, parent, tokens, start, block_size):
    """Make the node of the block of tokens from `start` on, as the newest child of `parent`.

    Its stamp, count and block are the caller's to write, and it is not in the table yet.
    """
    tally(NODES_ADDED, 1)
    tally(TOKENS_COPIED, block_size)
    row = _take_row(pool, nodes)
    at = np.uint64(row)
    above = np.uint64(parent)
    begin = row * block_size
    if block_size == COMMON_BLOCK_SIZE:
        # Of no use but to be checked in a build with bounds checks.
        _ = chunks[np.uint64(begin + block_size - 1)]
        _ = tokens[np.uint64(start + block_size - 1)]
        copy_16(chunks, np.uint64(begin), tokens, np.uint64(start))
    else:
        for i in range(block_size):
            chunks[begin + i] = tokens[start + i]
    # Hashed as stored: should another thread write to the caller's array meanwhile, node and hash still agree.
    state = advance_check(nodes[above].state, chunks, begin, begin + block_size, powers)
    first = links[above].first_child
    nodes[at].state = state
    nodes[at].parent = np.uint32(parent)
    nodes[at].children = np.uint32(0)
    links[at].first_child = np.uint32(NONE)
    links[at].next_sibling = first
    links[at].previous_sibling = np.uint32(NONE)
    links[at].root = links[above].root
    links[at].suffix = np.uint32(NONE)
    links[at].place = np.uint32(NONE)
    if first != np.uint32(NONE):
        links[np.uint64(first)].previous_sibling = np.uint32(row)
    links[above].first_child = np.uint32(row)
    nodes[above].children += np.uint32(1)
    return row


@register_jitable(forceinline=True)
def _enter_rows(shared, pool, nodes, table, multiplier, row, count):
    """Enter a new node and those above it, `count` in all, into the table, and mark those that are floors."""
    index = int64_view(shared[SHARED_INDEX], INDEX_FIELDS)
    is_on_grid = index[INDEX_NUM_FLOORS] > 0 and index[INDEX_GRID] == pool[POOL_BLOCK_SIZE]
    for _ in range(count):
        at = np.uint64(row)
        hash32 = table_hash(nodes[at].state, multiplier)
        add_row(table, hash32, row)
        if is_on_grid and is_floor(index, hash32, nodes[at].state):
            nodes[at].children |= np.uint32(HAS_SNAPSHOTS)
        row = np.int64(nodes[at].parent)


# A function of its own, and not part of the loop that calls it, so that all it needs stays in registers.
@register_jitable(forceinline=False)
def _add_run(pool, tokens, block_table, out, parent, block, stop, stamp, num_out):
    """Make the nodes of the blocks from `block` to `stop` below `parent`, a node that has no child yet.

    For blocks of the common size, held by a sequence, and a pool without disk ids. Lists their ids in `out` from
    `num_out` on. They are not in the table yet, but their slots are on their way into the cache. Returns the last node.
    """
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * COMMON_BLOCK_SIZE)
    powers = uint64_view(shared[SHARED_POWERS], NUM_POWERS)
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    multiplier = np.uint64(shared[SHARED_MULTIPLIER])
    size = np.uint64(COMMON_BLOCK_SIZE)
    above = np.uint64(parent)
    state = nodes[above].state
    root = links[above].root
    free = pool[POOL_FREE]
    used = pool[POOL_USED]
    num_free = pool[POOL_NUM_FREE]
    at = np.uint64(block)
    end = np.uint64(stop)
    listed = np.uint64(num_out)
    while at < end:
        tally(NODES_ADDED, 1)
        tally(TOKENS_COPIED, COMMON_BLOCK_SIZE)
        row = np.uint64(used)
        if free < 0:
            used += 1
        else:
            row = np.uint64(free)
            following = nodes[row].block
            free = np.int64(-1) if following == np.uint32(NONE) else np.int64(following)
            num_free -= 1
        prefetch(tokens, (at + _AHEAD) * size)
        prefetch(chunks, (row + _AHEAD) * size)
        prefetch(nodes, row + _AHEAD)
        prefetch(links, row + _AHEAD)
        # Of no use but to be checked in a build with bounds checks.
        _ = chunks[row * size + size - _ONE]
        _ = tokens[at * size + size - _ONE]
        copy_16(chunks, row * size, tokens, at * size)
        # Hashed as stored: should another thread write to the caller's array meanwhile, node and hash still agree.
        state = advance_group(state, chunks, row * size, powers)
        prefetch(table, np.uint64(home_slot(table_hash(state, multiplier), table.size)))
        nodes[row].stamp = stamp
        nodes[row].state = state
        nodes[row].parent = np.uint32(above)
        nodes[row].block = block_table[at]
        nodes[row].count = np.uint32(2)
        nodes[row].children = np.uint32(0)
        links[row].first_child = np.uint32(NONE)
        links[row].next_sibling = np.uint32(NONE)
        links[row].previous_sibling = np.uint32(NONE)
        links[row].root = root
        links[row].suffix = np.uint32(NONE)
        links[row].place = np.uint32(NONE)
        nodes[above].children += np.uint32(1)
        links[above].first_child = np.uint32(row)
        out[listed] = block_table[at]
        above = row
        at += _ONE
        listed += _ONE
    pool[POOL_FREE] = free
    pool[POOL_USED] = used
    pool[POOL_NUM_FREE] = num_free
    return np.int64(above)


@register_jitable(forceinline=True)
def _add_blocks(
    shared,
    pool,
    nodes,
    links,
    chunks,
    disks,
    node,
    tokens,
    block_table,
    disk_ids,
    out,
    half,
    num_blocks,
    num_disks,
    i,
    count,
    stamp,
    matched_tokens,
    block_size,
):
    """Add the nodes of the blocks from number `i` to `count` below `node`, and list what is stored, as :func:`insert`.

    Returns the deepest node and the new lengths of both lists.
    """
    powers = uint64_view(shared[SHARED_POWERS], NUM_POWERS)
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    multiplier = np.uint64(shared[SHARED_MULTIPLIER])
    evictable = np.int64(0)
    while i < count:
        begun = i * block_size >= matched_tokens and nodes[np.uint64(node)].children & np.uint32(CHILDREN) == np.uint32(
            0
        )
        if begun and block_size == COMMON_BLOCK_SIZE and disks.size == 0:
            stop = min(count, i + _WAITING)
            node = _add_run(pool, tokens, block_table, out, node, i, stop, stamp, num_blocks)
            _enter_rows(shared, pool, nodes, table, multiplier, node, stop - i)
            num_blocks += stop - i
            i = stop
            continue
        node = _add_child(pool, nodes, links, chunks, powers, node, tokens, i * block_size, block_size)
        at = np.uint64(node)
        nodes[at].stamp = stamp
        nodes[at].block = block_table[i]
        if i * block_size >= matched_tokens:
            nodes[at].count = np.uint32(2)
        else:
            nodes[at].count = np.uint32(1)
            evictable += 1
        out[num_blocks] = block_table[i]
        num_blocks += 1
        if disks.size > 0:
            disks[node] = disk_ids[i] if disk_ids.size > 0 else np.uint32(NONE)
            if disks[node] != np.uint32(NONE):
                out[half + num_disks] = disks[node]
                num_disks += 1
        i += 1
        _enter_rows(shared, pool, nodes, table, multiplier, node, np.int64(1))
    shared[SHARED_NUM_EVICTABLE] += evictable
    return node, num_blocks, num_disks


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
    tally(TOKENS_COPIED, tokens.size - start)
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
    begin_walk(pool)
    for i in range(count):
        node = find_child(pool, nodes, chunks, node, tokens, i, block_size)
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


def insert(address, tokens, block_table, disk_ids, out, matched_tokens, adapter):
    """Store the full blocks of `tokens` that `block_table` covers, at least one, then the partial suffix.

    What is stored goes to `out`, which has room for a block of each; the first half of it, if there are `disk_ids` or
    blocks are adopted. The second half is for the disk ids that are stored, or else the blocks that are released.
    Returns one of

    * ``(DONE, blocks, disk ids, released blocks, suffix block, suffix disk id)``: how many stand in each list, and
      what a dropped or replaced suffix held (NONE for nothing), which comes last in its list;
    * ``(REFUSED, 0, 0, 0, 0, 0)``: `tokens` or `block_table` are no whole array;
    * ``(SHORT_OF_ROWS, SHORT_OF_SUFFIXES or SHORT_OF_DISKS, how many, 0, 0, 0, 0)``, or
      ``(BAD_BLOCK, position, 0, 0, 0, 0)``: nothing has changed.
    """
    pool = int64_view(address, POOL_FIELDS)
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    block_size = pool[POOL_BLOCK_SIZE]
    half = np.int64(out.size // 2)
    zero = np.int64(0)
    if not (is_whole(tokens) and is_whole(block_table)):
        return np.int64(REFUSED), zero, zero, zero, zero, zero
    full = np.int64(tokens.size // block_size)
    # Another thread may have lengthened the caller's array since the room was made.
    has_halves = disk_ids.size > 0 or shared[SHARED_ADOPT_BLOCKS] != 0
    room = half if has_halves else np.int64(out.size)
    count = min(full, np.int64(block_table.size), room)
    has_suffix = tokens.size % block_size > 0 and block_table.size > full and full < room
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
    begin_walk(pool)
    while i < count:
        row = find_child(pool, nodes, chunks, node, tokens, i, block_size)
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
                out[half + num_released] = nodes[row].block
                num_released += 1
                nodes[row].block = block_table[i]
                out[num_blocks] = block_table[i]
                num_blocks += 1
        if stores_disks and disk_ids[i] != np.uint32(NONE) and disks[row] == np.uint32(NONE):
            disks[row] = disk_ids[i]
            out[half + num_disks] = disk_ids[i]
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
    if i < count:
        node, num_blocks, num_disks = _add_blocks(
            shared,
            pool,
            nodes,
            links,
            chunks,
            disks,
            node,
            tokens,
            block_table,
            disk_ids,
            out,
            half,
            num_blocks,
            num_disks,
            i,
            count,
            stamp,
            matched_tokens,
            block_size,
        )

    if has_suffix:
        old_block = np.int64(NONE)
        old_disk = np.int64(NONE)
        new_block = np.int64(block_table[full])
        new_disk = np.int64(disk_ids[full]) if disk_ids.size > 0 else np.int64(NONE)
        if links[node].suffix != np.uint32(NONE):
            old_block, old_disk = free_suffix(shared, pool, nodes, links, node)
        _set_suffix(pool, nodes, links, node, tokens, full * block_size, np.uint32(new_block), np.uint32(new_disk))
        if new_block != old_block:
            out[num_blocks] = np.uint32(new_block)
            num_blocks += 1
            if old_block != NONE:
                dropped_block = old_block
        if new_disk != old_disk:
            if new_disk != NONE:
                out[half + num_disks] = np.uint32(new_disk)
                num_disks += 1
            if old_disk != NONE:
                dropped_disk = old_disk
    if deepest_found != root:
        update_candidate(shared, pool, nodes, links, deepest_found)
    if node != deepest_found:
        update_candidate(shared, pool, nodes, links, node)
    return np.int64(DONE), num_blocks, num_disks, num_released, dropped_block, dropped_disk
