"""Ghosts: what is remembered of the nodes that were evicted last, so that a miss can be explained.

Every function takes the header of the ghosts, and nothing here is called unless a cache was made with some. An evicted
node is read where it was: its row is on the free list, which gives back first what was freed last, and but for two
fields it still says what it said before.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.hashing import table_hash
from metrale_numba.kernels.layout import (
    EMPTY_SLOT,
    GHOSTS_CAPACITY,
    GHOSTS_COUNT,
    GHOSTS_LOST,
    GHOSTS_MULTIPLIER,
    GHOSTS_ROWS,
    GHOSTS_SIZE,
    GHOSTS_TABLE,
    GHOSTS_TABLE_SIZE,
    POOL_BLOCK_SIZE,
    POOL_FIELDS,
    POOL_FREE,
    POOL_LINKS,
    POOL_NODES,
    POOL_NUM_FREE,
    POOL_ROWS,
    POOL_TABLE,
    POOL_TABLE_SIZE,
    POOL_TOKENS,
    SHARED_CLOCK,
    SHARED_MULTIPLIER,
    SHARED_NUM_POOLS,
    SHARED_POOLS,
)
from metrale_numba.kernels.memory import ghost_view, int64_view, link_view, node_view, uint32_view, uint64_view
from metrale_numba.kernels.tables import add_row, first_slot, next_slot, remove_row, row_of
from metrale_numba.kernels.walk import begin_walk, find_child, find_root

_EMPTY = np.uint64(EMPTY_SLOT)
_HALF_WORD = np.uint64(32)


@register_jitable
def _find(ghosts, rows, state, block_size):
    """Row of the ghost of a prefix cached in blocks of a size, or -1."""
    table = uint64_view(ghosts[GHOSTS_TABLE], ghosts[GHOSTS_TABLE_SIZE])
    hash32 = table_hash(state, np.uint64(ghosts[GHOSTS_MULTIPLIER]))
    slot = first_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        if table[slot] >> _HALF_WORD == hash32:
            row = row_of(table[slot])
            if rows[row].state == state and rows[row].block_size == block_size:
                return row
        slot = next_slot(slot, table.size)
    return np.int64(-1)


@register_jitable
def _drop(ghosts, rows, row):
    """Take a ghost out; its row stays empty until the ring comes round to it."""
    table = uint64_view(ghosts[GHOSTS_TABLE], ghosts[GHOSTS_TABLE_SIZE])
    remove_row(table, table_hash(rows[row].state, np.uint64(ghosts[GHOSTS_MULTIPLIER])), row)
    rows[row].number = np.int64(-1)
    ghosts[GHOSTS_SIZE] -= 1


@register_jitable
def _next_removed(nodes, links, row, left):
    """The next of the `left` rows from `row` on that was a node, and how many there are with it; a root is no block."""
    while left > 0 and links[row].root == np.uint32(row):
        row = np.int64(nodes[row].block)
        left -= 1
    return row, left


def remember(shared, free_before, cursors, ghosts, by_adapter):
    """Make ghosts of the nodes that were evicted since a pool, by its number, had `free_before` free rows.

    `free_before` is brought up to date, so that the same call again does nothing. `cursors` is scratch space for two
    numbers for each pool.
    """
    pools = int64_view(shared[SHARED_POOLS], shared[SHARED_NUM_POOLS])
    rows = ghost_view(ghosts[GHOSTS_ROWS], ghosts[GHOSTS_CAPACITY])
    capacity = ghosts[GHOSTS_CAPACITY]
    total = np.int64(0)
    for i in range(shared[SHARED_NUM_POOLS]):
        cursors[2 * i + 1] = 0
        if pools[i] == 0:
            continue
        pool = int64_view(pools[i], POOL_FIELDS)
        nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
        links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
        left = pool[POOL_NUM_FREE] - free_before[i]
        free_before[i] = pool[POOL_NUM_FREE]
        row, left = _next_removed(nodes, links, pool[POOL_FREE], left)
        cursors[2 * i] = row
        cursors[2 * i + 1] = left
        while left > 0:
            total += 1
            row, left = _next_removed(nodes, links, np.int64(nodes[row].block), left - 1)
    count = ghosts[GHOSTS_COUNT] + total
    ghosts[GHOSTS_COUNT] = count
    for number in range(count - 1, count - total - 1, -1):
        # Eviction goes by stamps, over all pools, so of the last of each pool the one with the newest went last.
        last = np.int64(-1)
        newest = np.int64(-1)
        for i in range(shared[SHARED_NUM_POOLS]):
            if cursors[2 * i + 1] > 0:
                pool = int64_view(pools[i], POOL_FIELDS)
                stamp = node_view(pool[POOL_NODES], pool[POOL_ROWS])[cursors[2 * i]].stamp
                if stamp > newest:
                    last = np.int64(i)
                    newest = stamp
        pool = int64_view(pools[last], POOL_FIELDS)
        nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
        links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
        row = cursors[2 * last]
        if number >= count - capacity:
            place = number % capacity
            if rows[place].number >= 0:
                _drop(ghosts, rows, place)
                ghosts[GHOSTS_LOST] = 1
            state = nodes[row].state
            earlier = _find(ghosts, rows, state, pool[POOL_BLOCK_SIZE])
            if earlier >= 0:
                _drop(ghosts, rows, earlier)
            rows[place].state = state
            # Of a root the stamp is its adapter, also when it was evicted with its last node.
            rows[place].adapter = np.uint64(nodes[np.int64(links[row].root)].stamp)
            rows[place].number = number
            rows[place].tick = shared[SHARED_CLOCK]
            rows[place].stamp = nodes[row].stamp
            rows[place].block_size = pool[POOL_BLOCK_SIZE]
            rows[place].by_adapter = np.uint32(by_adapter)
            table = uint64_view(ghosts[GHOSTS_TABLE], ghosts[GHOSTS_TABLE_SIZE])
            add_row(table, table_hash(state, np.uint64(ghosts[GHOSTS_MULTIPLIER])), place)
            ghosts[GHOSTS_SIZE] += 1
        else:
            ghosts[GHOSTS_LOST] = 1
        row, left = _next_removed(nodes, links, np.int64(nodes[row].block), cursors[2 * last + 1] - 1)
        cursors[2 * last] = row
        cursors[2 * last + 1] = left


def forget_new(address, tokens, num_new, adapter, ghosts):
    """Drop the ghosts of the `num_new` nodes that an insert of `tokens` has just added: they end the path."""
    pool = int64_view(address, POOL_FIELDS)
    rows = ghost_view(ghosts[GHOSTS_ROWS], ghosts[GHOSTS_CAPACITY])
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    block_size = pool[POOL_BLOCK_SIZE]
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * block_size)
    node = find_root(pool, nodes, adapter)
    begin_walk(pool)
    for block in range(tokens.size // block_size):
        child = find_child(pool, nodes, chunks, node, tokens, block, block_size)
        if child < 0:
            break
        node = child
    for _ in range(num_new):
        ghost = _find(ghosts, rows, nodes[node].state, block_size)
        if ghost >= 0:
            _drop(ghosts, rows, ghost)
        node = np.int64(nodes[node].parent)


def forget_adapter(ghosts, adapter):
    """Drop the ghosts of an adapter."""
    rows = ghost_view(ghosts[GHOSTS_ROWS], ghosts[GHOSTS_CAPACITY])
    for row in range(ghosts[GHOSTS_CAPACITY]):
        if rows[row].number >= 0 and rows[row].adapter == np.uint64(adapter):
            _drop(ghosts, rows, row)


def find_ghosts(ghosts, states, block_size, rows_out):
    """List, for each prefix with a check hash, the row of its ghost, or -1."""
    rows = ghost_view(ghosts[GHOSTS_ROWS], ghosts[GHOSTS_CAPACITY])
    for i in range(states.size):
        rows_out[i] = _find(ghosts, rows, states[i], block_size)


@register_jitable
def _is_cached(shared, state, block_size):
    """Whether there is a node with a check hash in the pool of a block size."""
    pools = int64_view(shared[SHARED_POOLS], shared[SHARED_NUM_POOLS])
    for i in range(shared[SHARED_NUM_POOLS]):
        if pools[i] == 0:
            continue
        pool = int64_view(pools[i], POOL_FIELDS)
        if pool[POOL_BLOCK_SIZE] != block_size:
            continue
        nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
        table = uint64_view(pool[POOL_TABLE], pool[POOL_TABLE_SIZE])
        hash32 = table_hash(state, np.uint64(shared[SHARED_MULTIPLIER]))
        slot = first_slot(hash32, table.size)
        while table[slot] != _EMPTY:
            if table[slot] >> _HALF_WORD == hash32 and nodes[row_of(table[slot])].state == state:
                return True
            slot = next_slot(slot, table.size)
    return False


def check_ghosts(shared, ghosts):
    """Compare every ghost with its place, its table and the nodes. Returns the first fault and its row, or 0."""
    rows = ghost_view(ghosts[GHOSTS_ROWS], ghosts[GHOSTS_CAPACITY])
    table = uint64_view(ghosts[GHOSTS_TABLE], ghosts[GHOSTS_TABLE_SIZE])
    capacity = ghosts[GHOSTS_CAPACITY]
    count = ghosts[GHOSTS_COUNT]
    size = np.int64(0)
    for row in range(capacity):
        number = rows[row].number
        if number < 0:
            continue
        size += 1
        is_in_place = number % capacity == row and count - capacity <= number < count
        if not is_in_place or rows[row].tick > shared[SHARED_CLOCK] or rows[row].stamp > rows[row].tick:
            return 41, np.int64(row)
        if _find(ghosts, rows, rows[row].state, rows[row].block_size) != row:
            return 42, np.int64(row)
        if _is_cached(shared, rows[row].state, rows[row].block_size):
            return 44, np.int64(row)
    used = np.int64(0)
    for slot in range(table.size):
        used += np.int64(table[slot] != _EMPTY)
    if size != ghosts[GHOSTS_SIZE] or used != size:
        return 43, size
    return 0, np.int64(0)
