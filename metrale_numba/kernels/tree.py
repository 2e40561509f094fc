"""The tree for its readers: look-up, peek and pin, and the release of what they hold, at one block size.

Every function takes the header of a live pool (the caller holds the lock) and tokens that were checked.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.candidates import update_candidate
from metrale_numba.kernels.counting import NODES_CLIMBED, NODES_VISITED, tally
from metrale_numba.kernels.layout import (
    CHILDREN,
    HAS_SNAPSHOTS,
    INDEX_FIELDS,
    INDEX_GRID,
    NONE,
    POOL_BLOCK_SIZE,
    POOL_DISK_ROWS,
    POOL_DISKS,
    POOL_FIELDS,
    POOL_LINKS,
    POOL_NODES,
    POOL_ROWS,
    POOL_SHARED,
    POOL_SUFFIX_ROWS,
    POOL_SUFFIXES,
    POOL_TOKENS,
    POOL_USED,
    RECORD,
    REFUSED,
    SHARED_CLOCK,
    SHARED_FIELDS,
    SHARED_HIT_TOKENS,
    SHARED_HITS,
    SHARED_INDEX,
    SHARED_MISSES,
    SHARED_NUM_EVICTABLE,
    SHARED_OVER_RELEASES,
    SHARED_PARTIAL_TAILS,
    WITH_DISKS,
)
from metrale_numba.kernels.memory import (
    int64_view,
    is_whole,
    link_view,
    node_view,
    prefetch,
    suffix_view,
    uint32_view,
)
from metrale_numba.kernels.snapshots import begin_lookup, deepest_by_depths, deepest_by_marks, use_entry
from metrale_numba.kernels.walk import (
    COMMON_BLOCK_SIZE,
    begin_walk,
    find_child,
    find_root,
    find_tail,
    has_tail,
    same_chunk,
    search_child,
    to_front,
)

_SUFFIX_SHIFT = np.uint32(31)
_ONE = np.uint64(1)
# How many rows before their turn nodes and chunks are asked for.
_AHEAD = np.uint64(16)


@register_jitable(forceinline=True)
def _disk_of(pool, row):
    """The disk id of a node or NONE."""
    if pool[POOL_DISK_ROWS] == 0:
        return np.uint32(NONE)
    return uint32_view(pool[POOL_DISKS], pool[POOL_DISK_ROWS])[row]


# A function of its own, and not part of the loop that calls it, so that all it needs stays in registers.
@register_jitable(forceinline=False)
def _hold_run(pool, tokens, blocks_out, node, matched, full, stamp):
    """Reference and stamp the nodes in the rows right after `node`, as long as they are the next visible ones.

    Begins with the block `matched` and ends before the block `full`, for blocks of the common size. Returns the number
    of blocks matched in all, the last node, how many blocks became held, and the deepest node with a mark (-1 if
    none) and how deep it is.
    """
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * COMMON_BLOCK_SIZE)
    at = np.uint64(node) + _ONE
    block = np.uint64(matched)
    stop = block + min(np.uint64(full) - block, np.uint64(pool[POOL_USED]) - at)
    taken = np.uint64(0)
    marked = np.int64(-1)
    level = np.int64(0)
    while block < stop:
        prefetch(chunks, (at + _AHEAD) * np.uint64(COMMON_BLOCK_SIZE))
        prefetch(nodes, at + _AHEAD)
        tally(NODES_VISITED, 1)
        if nodes[at].parent != np.uint32(at - _ONE) or not same_chunk(chunks, at, tokens, block):
            break
        count = nodes[at].count
        if count == np.uint32(0):
            break
        is_idle = np.uint64(count == np.uint32(1))
        taken += is_idle
        nodes[at].count = count + np.uint32(1)
        nodes[at].stamp = stamp
        blocks_out[block] = nodes[at].block
        block += _ONE
        if nodes[at].children > np.uint32(CHILDREN):
            taken += is_idle & np.uint64(nodes[at].children >> _SUFFIX_SHIFT)
            if nodes[at].children & np.uint32(HAS_SNAPSHOTS) != np.uint32(0):
                marked = np.int64(at)
                level = np.int64(block)
        at += _ONE
    return np.int64(block), np.int64(at - _ONE), np.int64(taken), marked, level


@register_jitable(forceinline=False)
def _release_run(pool, tokens, node, block, full):
    """Take a reference from the nodes in the rows right after `node`, as long as they are the next and are held.

    Begins with the block `block` and ends before the block `full`, for blocks of the common size. Returns the number
    of blocks done in all, the last node, and how many blocks became idle.
    """
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * COMMON_BLOCK_SIZE)
    at = np.uint64(node) + _ONE
    done = np.uint64(block)
    stop = done + min(np.uint64(full) - done, np.uint64(pool[POOL_USED]) - at)
    freed = np.uint64(0)
    while done < stop:
        tally(NODES_VISITED, 1)
        if nodes[at].parent != np.uint32(at - _ONE) or not same_chunk(chunks, at, tokens, done):
            break
        count = nodes[at].count
        if count < np.uint32(2):
            break
        becomes_idle = np.uint64(count == np.uint32(2))
        freed += becomes_idle + (becomes_idle & np.uint64(nodes[at].children >> _SUFFIX_SHIFT))
        nodes[at].count = count - np.uint32(1)
        done += _ONE
        at += _ONE
    return np.int64(done), np.int64(at - _ONE), np.int64(freed)


@register_jitable(forceinline=True)
def _hold_prefix(pool, nodes, chunks, tokens, root, blocks_out, room):
    """Reference and stamp the visible full blocks of `tokens`; their block ids go to `blocks_out`.

    Returns their number, the deepest node (the root if none), and the deepest with a mark and how deep that is.
    """
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    begin_walk(pool)
    block_size = pool[POOL_BLOCK_SIZE]
    # Another thread may have lengthened the caller's array since the room was made.
    full = min(tokens.size // block_size, room)
    stamp = shared[SHARED_CLOCK] + 1
    ordered = shared[SHARED_PARTIAL_TAILS] != 0
    node = root
    marked = root
    level = np.int64(0)
    matched = np.int64(0)
    taken = np.int64(0)
    while matched < full:
        if block_size == COMMON_BLOCK_SIZE and not ordered:
            matched, node, newly_held, last_marked, its_level = _hold_run(
                pool, tokens, blocks_out, node, matched, full, stamp
            )
            taken += newly_held
            if last_marked >= 0:
                marked = last_marked
                level = its_level
            if matched == full or nodes[np.uint64(node)].children & np.uint32(CHILDREN) == np.uint32(0):
                break
            row = search_child(pool, tokens, node, matched)
        else:
            row = find_child(pool, nodes, chunks, node, tokens, matched, block_size)
        if row < 0:
            break
        at = np.uint64(row)
        count = nodes[at].count
        if count <= np.uint32(1):
            if count == np.uint32(0):
                break
            taken += np.int64(1) + np.int64(nodes[at].children >> _SUFFIX_SHIFT)
        nodes[at].count = count + np.uint32(1)
        nodes[at].stamp = stamp
        if ordered and nodes[node].children & np.uint32(CHILDREN) > np.uint32(1):
            to_front(nodes, links, node, row)
        blocks_out[np.uint64(matched)] = nodes[at].block
        node = row
        matched += 1
        if nodes[at].children & np.uint32(HAS_SNAPSHOTS) != np.uint32(0):
            marked = row
            level = matched
    shared[SHARED_NUM_EVICTABLE] -= taken
    # Only the deepest node can be a leaf, and only a leaf can have been a candidate.
    if matched > 0 and nodes[node].children & np.uint32(CHILDREN) == np.uint32(0):
        update_candidate(shared, pool, nodes, links, node)
    return matched, node, marked, level


@register_jitable(forceinline=True)
def _peek_prefix(pool, nodes, chunks, tokens, root):
    """The deepest visible node of `tokens` (the root if none) and the number of full blocks down to it."""
    begin_walk(pool)
    block_size = pool[POOL_BLOCK_SIZE]
    full = tokens.size // block_size
    node = root
    matched = np.int64(0)
    while matched < full:
        row = find_child(pool, nodes, chunks, node, tokens, matched, block_size)
        if row < 0 or nodes[np.uint64(row)].count == np.uint32(0):
            break
        node = row
        matched += 1
    return node, matched


def peek(pool, tokens, adapter):
    """Number of tokens that a look-up would match. Changes nothing."""
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    root = find_root(pool, nodes, adapter)
    if root < 0:
        return np.int64(0)
    node, matched = _peek_prefix(pool, nodes, chunks, tokens, root)
    matched_tokens = matched * pool[POOL_BLOCK_SIZE]
    if has_tail(pool, tokens, matched):
        child, suffix = find_tail(pool, nodes, chunks, node, tokens, matched_tokens)
        if child >= 0 or suffix >= 0:
            return np.int64(tokens.size)
    return matched_tokens


def pin(pool, tokens, blocks_out, adapter):
    """Reference and stamp what a look-up would, and return the number of tokens it would match.

    `blocks_out` is scratch space for as many blocks as `tokens` fills.
    """
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    root = find_root(pool, nodes, adapter)
    if root < 0:
        return np.int64(0)
    matched, node, _, _ = _hold_prefix(pool, nodes, chunks, tokens, root, blocks_out, np.int64(blocks_out.size))
    matched_tokens = matched * pool[POOL_BLOCK_SIZE]
    if has_tail(pool, tokens, matched):
        child, suffix = find_tail(pool, nodes, chunks, node, tokens, matched_tokens)
        if child >= 0 or suffix >= 0:
            matched_tokens = np.int64(tokens.size)
    if matched_tokens > 0:
        shared[SHARED_CLOCK] += 1
    return matched_tokens


def lookup(address, tokens, out, session, adapter, flags):
    """Match, reference, stamp and, with RECORD among the flags, count; then ask the snapshot index.

    The blocks go to `out`, which has room for every block of `tokens`, a partial one included where tails are shared;
    with WITH_DISKS among the flags twice the room, and disk ids go to the second half. Returns the number of blocks
    and of tokens matched, whether a disk id was among them, and five numbers of the snapshot (see
    :func:`snapshots.use_entry`); or REFUSED, if `tokens` are no whole array.
    """
    # An array costs a call five times what a number does, so the pool comes as its address.
    pool = int64_view(address, POOL_FIELDS)
    if not is_whole(tokens):
        refused = np.int64(REFUSED)
        return refused, refused, refused, refused, refused, refused, refused, refused
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    block_size = pool[POOL_BLOCK_SIZE]
    record = flags & RECORD
    with_disks = flags & WITH_DISKS != 0
    room = np.int64(out.size // 2) if with_disks else np.int64(out.size)
    root = find_root(pool, nodes, adapter)
    num_blocks = np.int64(0)
    matched_tokens = np.int64(0)
    any_disk = np.int64(0)
    tail_block = np.uint32(NONE)
    node = root
    marked = root
    level = np.int64(0)
    if root >= 0:
        num_blocks, node, marked, level = _hold_prefix(pool, nodes, chunks, tokens, root, out, room)
        matched_tokens = num_blocks * block_size
        if num_blocks < room and has_tail(pool, tokens, num_blocks):
            child, suffix = find_tail(pool, nodes, chunks, node, tokens, matched_tokens)
            tail_disk = np.uint32(NONE)
            if child >= 0:
                matched_tokens = np.int64(tokens.size)
                tail_block = nodes[child].block
                tail_disk = _disk_of(pool, child)
            elif suffix >= 0:
                matched_tokens = np.int64(tokens.size)
                suffixes = suffix_view(pool[POOL_SUFFIXES], pool[POOL_SUFFIX_ROWS])
                tail_block = suffixes[suffix].block
                tail_disk = suffixes[suffix].disk
            if with_disks and matched_tokens > num_blocks * block_size:
                out[room + num_blocks] = tail_disk
                any_disk = np.int64(tail_disk != np.uint32(NONE))
    if matched_tokens == 0:
        shared[SHARED_MISSES] += record
        nothing = np.int64(-1)
        return num_blocks, matched_tokens, any_disk, nothing, nothing, nothing, nothing, nothing
    shared[SHARED_CLOCK] += 1
    shared[SHARED_HITS] += record
    shared[SHARED_HIT_TOKENS] += record * matched_tokens
    index = int64_view(shared[SHARED_INDEX], INDEX_FIELDS)
    begin_lookup(index, session, adapter, record)
    entry = np.int64(-1)
    if block_size != index[INDEX_GRID]:
        entry = deepest_by_depths(index, nodes, block_size, node, num_blocks, tokens, matched_tokens, session)
    elif nodes[marked].children & np.uint32(HAS_SNAPSHOTS) != np.uint32(0):
        entry = deepest_by_marks(index, nodes, block_size, marked, level, tokens, matched_tokens, session)
    if with_disks:
        row = node
        for i in range(num_blocks - 1, -1, -1):
            tally(NODES_CLIMBED, 1)
            disk = _disk_of(pool, row)
            out[room + i] = disk
            if disk != np.uint32(NONE):
                any_disk = np.int64(1)
            row = np.int64(nodes[row].parent)
    slot, depth, entry_flags, key, check = use_entry(index, entry, matched_tokens, record)
    if matched_tokens > num_blocks * block_size:
        out[num_blocks] = tail_block
        num_blocks += 1
    return num_blocks, matched_tokens, any_disk, slot, depth, entry_flags, key, check


@register_jitable(forceinline=True)
def _first_unheld(pool, nodes, chunks, tokens, num_tokens, root):
    """Position, in blocks from 1, of the first node on the way that no sequence holds, or 0."""
    block_size = pool[POOL_BLOCK_SIZE]
    node = root
    begin_walk(pool)
    for block in range(num_tokens // block_size):
        node = find_child(pool, nodes, chunks, node, tokens, block, block_size)
        if node < 0:
            break
        if nodes[node].count <= np.uint32(1):
            return np.int64(block + 1)
    return np.int64(0)


@register_jitable(forceinline=True)
def _release_prefix(pool, nodes, chunks, tokens, num_tokens, root):
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    begin_walk(pool)
    block_size = pool[POOL_BLOCK_SIZE]
    full = num_tokens // block_size
    node = root
    over = np.int64(0)
    freed = np.int64(0)
    block = np.int64(0)
    while block < full:
        if block_size == COMMON_BLOCK_SIZE:
            block, node, newly_idle = _release_run(pool, tokens, node, block, full)
            freed += newly_idle
            if block == full or nodes[np.uint64(node)].children & np.uint32(CHILDREN) == np.uint32(0):
                break
            row = search_child(pool, tokens, node, block)
        else:
            row = find_child(pool, nodes, chunks, node, tokens, block, block_size)
        if row < 0:
            break
        at = np.uint64(row)
        count = nodes[at].count
        if count <= np.uint32(2):
            if count == np.uint32(2):
                freed += np.int64(1) + np.int64(nodes[at].children >> _SUFFIX_SHIFT)
            else:
                over += 1
        if count > np.uint32(0):
            nodes[at].count = count - np.uint32(1)
        node = row
        block += 1
    shared[SHARED_NUM_EVICTABLE] += freed
    if block > 0 and nodes[node].children & np.uint32(CHILDREN) == np.uint32(0):
        update_candidate(shared, pool, nodes, link_view(pool[POOL_LINKS], pool[POOL_ROWS]), node)
    shared[SHARED_OVER_RELEASES] += over


def release(address, tokens, num_tokens, adapter, strict):
    """Take one reference from each node along the full blocks of ``tokens[:num_tokens]``, visible or not.

    Stops at the first block that has no node. A count of 0 stays 0; a count that was at most the cache's own is
    counted as an over-release or, if `strict` is not 0, nothing changes and the position of its block, from 1,
    is returned. Otherwise returns 0; or REFUSED, if `tokens` are no whole array.
    """
    pool = int64_view(address, POOL_FIELDS)
    if not is_whole(tokens):
        return np.int64(REFUSED)
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    node = find_root(pool, nodes, adapter)
    if node < 0:
        return np.int64(0)
    if strict != 0:
        position = _first_unheld(pool, nodes, chunks, tokens, num_tokens, node)
        if position > 0:
            return position
    _release_prefix(pool, nodes, chunks, tokens, num_tokens, node)
    return np.int64(0)


def guard(pool, tokens, num_blocks, adapter, is_on):
    """Keep the nodes of the first `num_blocks` blocks of `tokens` from eviction, or undo that.

    Two references more make any node one that is held, also one that is not visible. Nothing is stamped.
    """
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    block_size = pool[POOL_BLOCK_SIZE]
    node = find_root(pool, nodes, adapter)
    if node < 0:
        return
    begin_walk(pool)
    for block in range(num_blocks):
        node = find_child(pool, nodes, chunks, node, tokens, block, block_size)
        if node < 0:
            break
        if is_on != 0:
            if nodes[node].count <= np.uint32(1):
                shared[SHARED_NUM_EVICTABLE] -= np.int64(1) + np.int64(nodes[node].children >> _SUFFIX_SHIFT)
            nodes[node].count += np.uint32(2)
        else:
            nodes[node].count -= np.uint32(2)
            if nodes[node].count <= np.uint32(1):
                shared[SHARED_NUM_EVICTABLE] += np.int64(1) + np.int64(nodes[node].children >> _SUFFIX_SHIFT)
        update_candidate(shared, pool, nodes, links, node)
