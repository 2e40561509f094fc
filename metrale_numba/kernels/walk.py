"""Finding the way: from a root along chunks that are equal, token by token, and to what a partial tail matches.

A hash finds a candidate; only the comparison of every token and of the parent makes it the answer. Rows are
``int64`` here, 32 bits wide in the arrays. Nothing here changes a node, but for the order of siblings.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.counting import HASHES_AHEAD, NODES_VISITED, SEARCHES, tally
from metrale_numba.kernels.hashing import advance_check, first_check, table_hash
from metrale_numba.kernels.layout import (
    CHILDREN,
    EMPTY_SLOT,
    LOOK_AHEAD,
    NONE,
    NUM_POWERS,
    POOL_AHEAD,
    POOL_BLOCK_SIZE,
    POOL_HASHES,
    POOL_LAST_ROOT,
    POOL_LINKS,
    POOL_NODES,
    POOL_ROWS,
    POOL_SEARCHED,
    POOL_SHARED,
    POOL_SUFFIX_ROWS,
    POOL_SUFFIX_TOKENS,
    POOL_SUFFIXES,
    POOL_TABLE,
    POOL_TABLE_SIZE,
    POOL_TOKENS,
    POOL_USED,
    ROOT,
    SHARED_FIELDS,
    SHARED_MULTIPLIER,
    SHARED_PARTIAL_TAILS,
    SHARED_POWERS,
)
from metrale_numba.kernels.memory import (
    int64_view,
    link_view,
    node_view,
    prefetch,
    same_16,
    suffix_view,
    uint32_view,
    uint64_view,
)
from metrale_numba.kernels.tables import first_slot, home_slot, next_slot, row_of

_EMPTY = np.uint64(EMPTY_SLOT)
_HALF_WORD = np.uint64(32)
COMMON_BLOCK_SIZE = 16


@register_jitable(forceinline=True)
def _same_tokens(left, left_start, right, right_start, length):
    """Whether two runs of tokens are equal; the common block size has no exit inside, so it takes whole vectors."""
    # An index without a sign needs no test for counting from the end, which would keep a loop from becoming vectors.
    left_at = np.uint64(left_start)
    right_at = np.uint64(right_start)
    if length == COMMON_BLOCK_SIZE:
        # Of no use but to be checked in a build with bounds checks.
        _ = left[left_at + np.uint64(COMMON_BLOCK_SIZE - 1)]
        _ = right[right_at + np.uint64(COMMON_BLOCK_SIZE - 1)]
        return same_16(left, left_at, right, right_at)
    done = np.uint64(0)
    end = np.uint64(length)
    while done < end:
        stop = min(done + np.uint64(COMMON_BLOCK_SIZE), end)
        difference = np.uint32(0)
        for i in range(done, stop):
            difference = np.uint32(difference | np.uint32(left[left_at + i] ^ right[right_at + i]))
        if difference != np.uint32(0):
            return False
        done = stop
    return True


@register_jitable(forceinline=True)
def same_chunk(chunks, row, tokens, block):
    """Whether the chunk of a row is a block of tokens; both numbers are uint64, and blocks of the common size."""
    size = np.uint64(COMMON_BLOCK_SIZE)
    # Of no use but to be checked in a build with bounds checks.
    _ = chunks[row * size + size - np.uint64(1)]
    _ = tokens[block * size + size - np.uint64(1)]
    return same_16(chunks, row * size, tokens, block * size)


@register_jitable(forceinline=True)
def begin_walk(pool):
    """Forget what an earlier walk was searching for."""
    pool[POOL_SEARCHED] = -2
    pool[POOL_AHEAD] = 0


@register_jitable(forceinline=True)
def find_child(pool, nodes, chunks, parent, tokens, block, block_size):
    """The child of `parent` whose chunk is the block of tokens with the number `block`, or -1, visible or not."""
    tally(NODES_VISITED, 1)
    # Blocks that were inserted together stand in consecutive rows, so the next row is most often right.
    row = parent + 1
    if (
        row < pool[POOL_USED]
        and nodes[np.uint64(row)].parent == np.uint32(parent)
        and _same_tokens(chunks, row * block_size, tokens, block * block_size, block_size)
    ):
        return row
    if nodes[np.uint64(parent)].children & np.uint32(CHILDREN) == np.uint32(0):
        return np.int64(-1)
    return search_child(pool, tokens, parent, block)


@register_jitable(forceinline=False)
def search_child(pool, tokens, parent, block):
    """The same by hash, for a `parent` that has children; when the block before was searched for too, looks ahead."""
    tally(SEARCHES, 1)
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    block_size = pool[POOL_BLOCK_SIZE]
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * block_size)
    if pool[POOL_SEARCHED] == block - 1 and block >= pool[POOL_AHEAD]:
        _look_ahead(pool, tokens, parent, block)
    pool[POOL_SEARCHED] = block
    if block < pool[POOL_AHEAD]:
        hash32 = np.uint64(pool[POOL_HASHES + block % LOOK_AHEAD])
    else:
        powers = uint64_view(shared[SHARED_POWERS], NUM_POWERS)
        start = block * block_size
        state = advance_check(nodes[parent].state, tokens, start, start + block_size, powers)
        hash32 = table_hash(state, np.uint64(shared[SHARED_MULTIPLIER]))
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    slot = first_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        if table[slot] >> _HALF_WORD == hash32:
            tally(NODES_VISITED, 1)
            row = row_of(table[slot])
            if nodes[row].parent == np.uint32(parent) and _same_tokens(
                chunks, row * block_size, tokens, block * block_size, block_size
            ):
                return row
        slot = next_slot(slot, table.size)
    return np.int64(-1)


@register_jitable(forceinline=False)
def _look_ahead(pool, tokens, parent, block):
    """Hash the next blocks and ask for their slots, then for the nodes that these name.

    A hash depends on the tokens before it and on no node, so the cache misses of a path whose nodes lie far
    apart need not wait for each other.
    """
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    block_size = pool[POOL_BLOCK_SIZE]
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * block_size)
    powers = uint64_view(shared[SHARED_POWERS], NUM_POWERS)
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    state = nodes[parent].state
    stop = min(block + LOOK_AHEAD, tokens.size // block_size)
    for ahead in range(block, stop):
        tally(HASHES_AHEAD, 1)
        start = ahead * block_size
        state = advance_check(state, tokens, start, start + block_size, powers)
        hash32 = table_hash(state, np.uint64(shared[SHARED_MULTIPLIER]))
        pool[POOL_HASHES + ahead % LOOK_AHEAD] = np.int64(hash32)
        prefetch(table, np.uint64(home_slot(hash32, table.size)))
    pool[POOL_AHEAD] = stop
    for ahead in range(block, stop):
        hash32 = np.uint64(pool[POOL_HASHES + ahead % LOOK_AHEAD])
        slot = first_slot(hash32, table.size)
        while table[slot] != _EMPTY:
            if table[slot] >> _HALF_WORD == hash32:
                row = np.uint64(row_of(table[slot]))
                prefetch(nodes, row)
                # A chunk of the common size is one cache line; of a longer one, what follows comes by itself.
                prefetch(chunks, row * np.uint64(block_size))
                break
            slot = next_slot(slot, table.size)


@register_jitable
def find_root(pool, nodes, adapter):
    """The root of an adapter's forest, or -1."""
    row = pool[POOL_LAST_ROOT]
    if row < pool[POOL_USED] and nodes[row].parent == np.uint32(ROOT) and nodes[row].stamp == adapter:
        return row
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    powers = uint64_view(shared[SHARED_POWERS], NUM_POWERS)
    hash32 = table_hash(first_check(np.uint64(adapter), powers), np.uint64(shared[SHARED_MULTIPLIER]))
    table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
    slot = first_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        if table[slot] >> _HALF_WORD == hash32:
            row = row_of(table[slot])
            if nodes[row].parent == np.uint32(ROOT) and nodes[row].stamp == adapter:
                pool[POOL_LAST_ROOT] = row
                return row
        slot = next_slot(slot, table.size)
    return np.int64(-1)


@register_jitable
def find_tail(pool, nodes, chunks, node, tokens, start):
    """Where the rest of a query, shorter than a block, is stored: a child of `node` or its partial suffix.

    Returns the child's row or -1, and the suffix's row or -1; at most one of them is not -1. Children stand
    newest first, so the first that fits is the right one.
    """
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    block_size = pool[POOL_BLOCK_SIZE]
    rest = tokens.size - start
    child = links[node].first_child
    while child != np.uint32(NONE):
        tally(NODES_VISITED, 1)
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
def to_front(nodes, links, parent, row):
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
def has_tail(pool, tokens, matched):
    """Whether a partial tail may be matched: sharing is on, all full blocks matched, and something is left."""
    block_size = pool[POOL_BLOCK_SIZE]
    return (
        int64_view(pool[POOL_SHARED], SHARED_FIELDS)[SHARED_PARTIAL_TAILS] != 0
        and matched == tokens.size // block_size
        and tokens.size % block_size > 0
    )
