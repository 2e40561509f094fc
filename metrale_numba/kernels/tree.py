"""The tree: look-up, peek, pin, insert and release over the nodes of one block size.

Every function takes the header of a live pool (the caller holds the lock) and tokens that were checked. A hash
finds a candidate; only the comparison of every token and of the parent makes it the answer. Rows are
``int64`` here, 32 bits wide in the arrays.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.eviction import free_suffix, update_candidate
from metrale_numba.kernels.hashing import advance_check, advance_key, first_check, first_key, table_hash
from metrale_numba.kernels.layout import (
    BAD_BLOCK,
    CHECK_GROUP,
    DONE,
    EMPTY_SLOT,
    INDEX_FIELDS,
    NONE,
    POOL_BLOCK_SIZE,
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
    SHARED_HIT_TOKENS,
    SHARED_HITS,
    SHARED_INDEX,
    SHARED_MISSES,
    SHARED_MULTIPLIER,
    SHARED_NUM_NODES,
    SHARED_NUM_SUFFIXES,
    SHARED_OVER_RELEASES,
    SHARED_PARTIAL_TAILS,
    SHARED_POWERS,
    SHORT_OF_ROWS,
    SHORT_OF_SUFFIXES,
)
from metrale_numba.kernels.memory import int64_view, link_view, node_view, suffix_view, uint32_view, uint64_view
from metrale_numba.kernels.snapshots import deepest_snapshot
from metrale_numba.kernels.tables import add_row, home_slot, next_slot, row_of

_EMPTY = np.uint64(EMPTY_SLOT)
_HALF_WORD = np.uint64(32)
_COMMON_BLOCK_SIZE = 16


@register_jitable(forceinline=True)
def _same_tokens(left, left_start, right, right_start, length):
    """Whether two runs of tokens are equal; the common block size has no exit inside, so it takes whole vectors."""
    difference = np.uint32(0)
    # An index without a sign needs no test for counting from the end, which would keep the loop from becoming vectors.
    left_at = np.uint64(left_start)
    right_at = np.uint64(right_start)
    if length == _COMMON_BLOCK_SIZE:
        for i in range(np.uint64(_COMMON_BLOCK_SIZE)):
            difference |= left[left_at + i] ^ right[right_at + i]
        return difference == np.uint32(0)
    done = np.uint64(0)
    end = np.uint64(length)
    while done < end:
        stop = min(done + np.uint64(_COMMON_BLOCK_SIZE), end)
        for i in range(done, stop):
            difference |= left[left_at + i] ^ right[right_at + i]
        if difference != np.uint32(0):
            return False
        done = stop
    return True


@register_jitable(forceinline=True)
def _find_child(pool, nodes, chunks, parent, tokens, start):
    """The child of `parent` whose chunk is the block of tokens from `start` on, or -1, visible or not."""
    block_size = pool[POOL_BLOCK_SIZE]
    # Blocks that were inserted together stand in consecutive rows, so the next row is most often right.
    row = parent + 1
    if (
        row < pool[POOL_USED]
        and nodes[row].parent == np.uint32(parent)
        and _same_tokens(chunks, row * block_size, tokens, start, block_size)
    ):
        return row
    if nodes[parent].children == np.uint32(0):
        return np.int64(-1)
    return _search_child(pool, nodes, chunks, parent, tokens, start)


@register_jitable(forceinline=False)
def _search_child(pool, nodes, chunks, parent, tokens, start):
    """The same by hash."""
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    block_size = pool[POOL_BLOCK_SIZE]
    powers = uint64_view(shared[SHARED_POWERS], CHECK_GROUP + 1)
    state = advance_check(nodes[parent].state, tokens, start, start + block_size, powers)
    hash32 = table_hash(state, np.uint64(shared[SHARED_MULTIPLIER]))
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    slot = home_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        if table[slot] >> _HALF_WORD == hash32:
            row = row_of(table[slot])
            if nodes[row].parent == np.uint32(parent) and _same_tokens(
                chunks, row * block_size, tokens, start, block_size
            ):
                return row
        slot = next_slot(slot, table.size)
    return np.int64(-1)


@register_jitable
def _find_root(pool, nodes, adapter):
    """The root of an adapter's forest, or -1."""
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    powers = uint64_view(shared[SHARED_POWERS], CHECK_GROUP + 1)
    hash32 = table_hash(first_check(np.uint64(adapter), powers), np.uint64(shared[SHARED_MULTIPLIER]))
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    slot = home_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        if table[slot] >> _HALF_WORD == hash32:
            row = row_of(table[slot])
            if nodes[row].parent == np.uint32(ROOT) and nodes[row].stamp == adapter:
                return row
        slot = next_slot(slot, table.size)
    return np.int64(-1)


@register_jitable
def _find_tail(pool, nodes, chunks, node, tokens, start):
    """Where the rest of a query, shorter than a block, is stored: a child of `node` or its partial suffix.

    Returns the child's row or -1, and the suffix's row or -1; at most one of them is not -1. Children stand
    newest first, so the first that fits is the right one.
    """
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    block_size = pool[POOL_BLOCK_SIZE]
    rest = tokens.size - start
    child = links[node].first_child
    while child != np.uint32(NONE):
        row = np.int64(child)
        if nodes[row].count > np.uint32(0) and _same_tokens(chunks, row * block_size, tokens, start, rest):
            return row, np.int64(-1)
        child = links[row].next_sibling
    if nodes[node].parent != np.uint32(ROOT) and links[node].suffix != np.uint32(NONE):
        suffix = np.int64(links[node].suffix)
        suffixes = suffix_view(pool[POOL_SUFFIXES], pool[POOL_SUFFIX_ROWS])
        suffix_tokens = uint32_view(pool[POOL_SUFFIX_TOKENS], pool[POOL_SUFFIX_ROWS] * (block_size - 1))
        if np.int64(suffixes[suffix].length) >= rest and _same_tokens(
            suffix_tokens, suffix * (block_size - 1), tokens, start, rest
        ):
            return np.int64(-1), suffix
    return np.int64(-1), np.int64(-1)


@register_jitable
def _to_front(nodes, links, parent, row):
    """Make a node that was just stamped the first of its siblings."""
    first = links[parent].first_child
    if first == np.uint32(row):
        return
    before = np.int64(links[row].previous_sibling)
    after = links[row].next_sibling
    links[before].next_sibling = after
    if after != np.uint32(NONE):
        links[np.int64(after)].previous_sibling = np.uint32(before)
    links[row].previous_sibling = np.uint32(NONE)
    links[row].next_sibling = first
    links[np.int64(first)].previous_sibling = np.uint32(row)
    links[parent].first_child = np.uint32(row)


@register_jitable
def _hold_prefix(pool, nodes, chunks, tokens, root, path_out):
    """Reference and stamp the visible full blocks of `tokens`; their rows go to `path_out`. Returns their number."""
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    block_size = pool[POOL_BLOCK_SIZE]
    full = tokens.size // block_size
    stamp = shared[SHARED_CLOCK] + 1
    ordered = shared[SHARED_PARTIAL_TAILS] != 0
    node = root
    matched = np.int64(0)
    while matched < full:
        row = _find_child(pool, nodes, chunks, node, tokens, matched * block_size)
        if row < 0 or nodes[row].count == np.uint32(0):
            break
        nodes[row].count += np.uint32(1)
        nodes[row].stamp = stamp
        if ordered and nodes[node].children > np.uint32(1):
            _to_front(nodes, links, node, row)
        path_out[matched] = np.uint32(row)
        node = row
        matched += 1
    # Only the deepest node can be a leaf, and only a leaf can have been a candidate.
    if matched > 0 and nodes[node].children == np.uint32(0):
        update_candidate(shared, pool, nodes, links, node)
    return matched


@register_jitable
def _peek_prefix(pool, nodes, chunks, tokens, root):
    """The deepest visible node of `tokens` (the root if none) and the number of full blocks down to it."""
    block_size = pool[POOL_BLOCK_SIZE]
    full = tokens.size // block_size
    node = root
    matched = np.int64(0)
    while matched < full:
        row = _find_child(pool, nodes, chunks, node, tokens, matched * block_size)
        if row < 0 or nodes[row].count == np.uint32(0):
            break
        node = row
        matched += 1
    return node, matched


@register_jitable
def _has_tail(pool, tokens, matched):
    """Whether a partial tail may be matched: sharing is on, all full blocks matched, and something is left."""
    block_size = pool[POOL_BLOCK_SIZE]
    return (
        int64_view(pool[POOL_SHARED], SHARED_FIELDS)[SHARED_PARTIAL_TAILS] != 0
        and matched == tokens.size // block_size
        and tokens.size % block_size > 0
    )


def peek(pool, tokens, adapter):
    """Number of tokens that a look-up would match. Changes nothing."""
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    root = _find_root(pool, nodes, adapter)
    if root < 0:
        return np.int64(0)
    node, matched = _peek_prefix(pool, nodes, chunks, tokens, root)
    matched_tokens = matched * pool[POOL_BLOCK_SIZE]
    if _has_tail(pool, tokens, matched):
        child, suffix = _find_tail(pool, nodes, chunks, node, tokens, matched_tokens)
        if child >= 0 or suffix >= 0:
            return np.int64(tokens.size)
    return matched_tokens


def pin(pool, tokens, path_out, adapter):
    """Reference and stamp what a look-up would, and return the number of tokens it would match.

    `path_out` is scratch space for as many rows as `tokens` has full blocks.
    """
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    root = _find_root(pool, nodes, adapter)
    if root < 0:
        return np.int64(0)
    matched = _hold_prefix(pool, nodes, chunks, tokens, root, path_out)
    matched_tokens = matched * pool[POOL_BLOCK_SIZE]
    if _has_tail(pool, tokens, matched):
        node = np.int64(path_out[matched - 1]) if matched > 0 else root
        child, suffix = _find_tail(pool, nodes, chunks, node, tokens, matched_tokens)
        if child >= 0 or suffix >= 0:
            matched_tokens = np.int64(tokens.size)
    if matched_tokens > 0:
        shared[SHARED_CLOCK] += 1
    return matched_tokens


def lookup(pool, tokens, blocks_out, disks_out, session, adapter):
    """Match, reference, stamp and count; then ask the snapshot index.

    `blocks_out` has room for every block of `tokens`, a partial one included where tails are shared;
    `disks_out` is as long, or empty if no disk id was ever stored. Returns the number of blocks and of
    tokens matched, whether a disk id was among them, and five numbers of the snapshot (see
    :func:`snapshots.deepest_snapshot`).
    """
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    block_size = pool[POOL_BLOCK_SIZE]
    root = _find_root(pool, nodes, adapter)
    num_blocks = np.int64(0)
    matched_tokens = np.int64(0)
    any_disk = np.int64(0)
    tail_block = np.uint32(NONE)
    if root >= 0:
        num_blocks = _hold_prefix(pool, nodes, chunks, tokens, root, blocks_out)
        matched_tokens = num_blocks * block_size
        if _has_tail(pool, tokens, num_blocks):
            node = np.int64(blocks_out[num_blocks - 1]) if num_blocks > 0 else root
            child, suffix = _find_tail(pool, nodes, chunks, node, tokens, matched_tokens)
            tail_disk = np.uint32(NONE)
            if child >= 0:
                matched_tokens = np.int64(tokens.size)
                tail_block = nodes[child].block
                tail_disk = links[child].disk
            elif suffix >= 0:
                matched_tokens = np.int64(tokens.size)
                suffixes = suffix_view(pool[POOL_SUFFIXES], pool[POOL_SUFFIX_ROWS])
                tail_block = suffixes[suffix].block
                tail_disk = suffixes[suffix].disk
            if disks_out.size > 0 and tail_disk != np.uint32(NONE):
                any_disk = np.int64(1)
                disks_out[num_blocks] = tail_disk
            elif disks_out.size > 0 and matched_tokens > num_blocks * block_size:
                disks_out[num_blocks] = np.uint32(NONE)
    if matched_tokens == 0:
        shared[SHARED_MISSES] += 1
        nothing = np.int64(-1)
        return num_blocks, matched_tokens, any_disk, nothing, nothing, nothing, nothing, nothing
    shared[SHARED_CLOCK] += 1
    shared[SHARED_HITS] += 1
    shared[SHARED_HIT_TOKENS] += matched_tokens
    index = int64_view(shared[SHARED_INDEX], INDEX_FIELDS)
    slot, depth, flags, key, check = deepest_snapshot(
        index, nodes, links, block_size, root, blocks_out, num_blocks, tokens, matched_tokens, session
    )
    # The rows of the path become its blocks only now: the snapshot look-up reads the nodes' hashes.
    if disks_out.size > 0:
        for i in range(num_blocks):
            disks_out[i] = links[np.int64(blocks_out[i])].disk
            if disks_out[i] != np.uint32(NONE):
                any_disk = np.int64(1)
    for i in range(num_blocks):
        blocks_out[i] = nodes[np.int64(blocks_out[i])].block
    if matched_tokens > num_blocks * block_size:
        blocks_out[num_blocks] = tail_block
        num_blocks += 1
    return num_blocks, matched_tokens, any_disk, slot, depth, flags, key, check


def release(pool, tokens, num_tokens, adapter):
    """Take one reference from each node along the full blocks of ``tokens[:num_tokens]``, visible or not.

    Stops at the first block that has no node. A count of 0 stays 0; a count that was at most the cache's own is
    counted as an over-release.
    """
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * pool[POOL_BLOCK_SIZE])
    node = _find_root(pool, nodes, adapter)
    if node < 0:
        return
    block_size = pool[POOL_BLOCK_SIZE]
    over = np.int64(0)
    depth = np.int64(0)
    for start in range(0, (num_tokens // block_size) * block_size, block_size):
        row = _find_child(pool, nodes, chunks, node, tokens, start)
        if row < 0:
            break
        count = nodes[row].count
        if count <= np.uint32(1):
            over += 1
        if count > np.uint32(0):
            nodes[row].count = count - np.uint32(1)
        node = row
        depth += 1
    if depth > 0 and nodes[node].children == np.uint32(0):
        update_candidate(
            int64_view(pool[POOL_SHARED], SHARED_FIELDS),
            pool,
            nodes,
            link_view(pool[POOL_LINKS], pool[POOL_ROWS]),
            node,
        )
    if over > 0:
        int64_view(pool[POOL_SHARED], SHARED_FIELDS)[SHARED_OVER_RELEASES] += over


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
    nodes[row].count = np.uint32(1)
    nodes[row].children = np.uint32(0)
    links[row].key = first_key(np.uint64(adapter))
    links[row].first_child = np.uint32(NONE)
    links[row].next_sibling = np.uint32(NONE)
    links[row].previous_sibling = np.uint32(NONE)
    links[row].disk = np.uint32(NONE)
    links[row].suffix = np.uint32(NONE)
    links[row].place = np.uint32(NONE)
    pool[POOL_NUM_ROOTS] += 1
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    add_row(table, table_hash(nodes[row].state, np.uint64(shared[SHARED_MULTIPLIER])), row)
    return row


@register_jitable(forceinline=True)
def _add_child(pool, nodes, links, chunks, parent, tokens, start, stamp, count, block, disk):
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
    links[row].disk = disk
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
def _set_suffix(pool, links, node, tokens, start, block, disk):
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
    pool[POOL_NUM_SUFFIXES] += 1
    shared[SHARED_NUM_SUFFIXES] += 1


@register_jitable
def _missing_rows(pool, nodes, chunks, root, tokens, count):
    """Rows that storing the first `count` blocks of `tokens` will take, a root included."""
    if root < 0:
        return count + 1
    block_size = pool[POOL_BLOCK_SIZE]
    node = root
    for i in range(count):
        node = _find_child(pool, nodes, chunks, node, tokens, i * block_size)
        if node < 0:
            return count - i
    return np.int64(0)


def insert(pool, tokens, block_table, disk_ids, blocks_out, disks_out, released_out, matched_tokens, adapter):
    """Store the full blocks of `tokens` that `block_table` covers, at least one, then the partial suffix.

    `blocks_out` has room for each of them, `disks_out` too if `disk_ids` is not empty, and `released_out`
    for as many blocks less the suffix if blocks are adopted. Returns one of

    * ``(DONE, blocks, disk ids, released blocks, suffix block, suffix disk id)``: how many stand in each list, and
      what a dropped or replaced suffix held (NONE for nothing), which comes last in its list;
    * ``(SHORT_OF_ROWS or SHORT_OF_SUFFIXES, how many, 0, 0, 0, 0)``, or ``(BAD_BLOCK, position, ...)``: nothing has
      changed.
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
    root = _find_root(pool, nodes, adapter)
    free_rows = pool[POOL_ROWS] - pool[POOL_USED] + pool[POOL_NUM_FREE]
    if free_rows < count + 1:
        missing = _missing_rows(pool, nodes, chunks, root, tokens, count) - free_rows
        if missing > 0:
            return np.int64(SHORT_OF_ROWS), missing, zero, zero, zero, zero
    if has_suffix and pool[POOL_NUM_SUFFIXES] == pool[POOL_SUFFIX_ROWS]:
        return np.int64(SHORT_OF_SUFFIXES), np.int64(1), zero, zero, zero, zero

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
        row = _find_child(pool, nodes, chunks, node, tokens, i * block_size)
        if row < 0:
            break
        nodes[row].stamp = stamp
        if ordered and nodes[node].children > np.uint32(1):
            _to_front(nodes, links, node, row)
        if nodes[row].count == np.uint32(0):
            nodes[row].count = np.uint32(1)
        if i * block_size >= matched_tokens:
            nodes[row].count += np.uint32(1)
            if adopts and nodes[row].block != block_table[i]:
                released_out[num_released] = nodes[row].block
                num_released += 1
                nodes[row].block = block_table[i]
                blocks_out[num_blocks] = block_table[i]
                num_blocks += 1
        if disk_ids.size > 0 and disk_ids[i] != np.uint32(NONE) and links[row].disk == np.uint32(NONE):
            links[row].disk = disk_ids[i]
            disks_out[num_disks] = disk_ids[i]
            num_disks += 1
        node = row
        i += 1

    deepest_found = node
    if i < count and node != root and links[node].suffix != np.uint32(NONE):
        dropped_block, dropped_disk = free_suffix(shared, pool, links, node)
    pool[POOL_NUM_NODES] += count - i
    shared[SHARED_NUM_NODES] += count - i
    while i < count:
        references = np.uint32(2) if i * block_size >= matched_tokens else np.uint32(1)
        disk = disk_ids[i] if disk_ids.size > 0 else np.uint32(NONE)
        node = _add_child(
            pool, nodes, links, chunks, node, tokens, i * block_size, stamp, references, block_table[i], disk
        )
        blocks_out[num_blocks] = block_table[i]
        num_blocks += 1
        if disk != np.uint32(NONE):
            disks_out[num_disks] = disk
            num_disks += 1
        i += 1

    if has_suffix:
        old_block = np.int64(NONE)
        old_disk = np.int64(NONE)
        new_block = np.int64(block_table[full])
        new_disk = np.int64(disk_ids[full]) if disk_ids.size > 0 else np.int64(NONE)
        if links[node].suffix != np.uint32(NONE):
            old_block, old_disk = free_suffix(shared, pool, links, node)
        _set_suffix(pool, links, node, tokens, full * block_size, np.uint32(new_block), np.uint32(new_disk))
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
