"""Moving the rows of a pool together: in the order of paths, without the free rows between them.

A path whose blocks were inserted one by one, or into rows that others had freed, lies scattered; moved, each node
stands right after its parent where it is the newest child, and a walk needs no search. :func:`number_rows` decides,
:func:`move_rows` fills new arrays and changes nothing else, :func:`exchange_rows` lets them take effect in one step.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.hashing import table_hash
from metrale_numba.kernels.layout import (
    NONE,
    POOL_BLOCK_SIZE,
    POOL_DISK_ROWS,
    POOL_DISKS,
    POOL_FIRST_ROOT,
    POOL_FREE,
    POOL_LINKS,
    POOL_NODES,
    POOL_NUM_FREE,
    POOL_NUMBER,
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
    SHARED_FIELDS,
    SHARED_HEAP_NODES,
    SHARED_HEAP_ROWS,
    SHARED_HEAP_SIZE,
    SHARED_MULTIPLIER,
)
from metrale_numba.kernels.memory import int64_view, link_view, node_view, suffix_view, uint32_view, uint64_view
from metrale_numba.kernels.tables import add_row

_HALF_WORD = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFF_FFFF)
_NO_ROW = np.uint32(NONE)


def number_rows(pool, new_rows):
    """Number the live rows along their paths, root by root, and return how many there are.

    `new_rows` has a place for each row ever used; that of a row that is free stays as it is.
    """
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    count = np.int64(0)
    root = np.uint32(pool[POOL_FIRST_ROOT])
    while root != _NO_ROW:
        row = np.int64(root)
        new_rows[row] = np.uint32(count)
        count += 1
        while True:
            if links[row].first_child != _NO_ROW:
                row = np.int64(links[row].first_child)
            else:
                while row != np.int64(root) and links[row].next_sibling == _NO_ROW:
                    row = np.int64(nodes[row].parent)
                if row == np.int64(root):
                    break
                row = np.int64(links[row].next_sibling)
            new_rows[row] = np.uint32(count)
            count += 1
        root = links[np.int64(root)].next_sibling
    return count


@register_jitable(forceinline=True)
def _moved(new_rows, row):
    return _NO_ROW if row == _NO_ROW else new_rows[np.int64(row)]


def move_rows(pool, new_rows, nodes_out, links_out, tokens_out, disks_out, table_out, suffixes_out, suffix_tokens_out):
    """Copy every live row to its new number, with all that names rows, and fill the empty table `table_out`.

    The arrays are those of a pool, with room for all; `disks_out` has none if the pool stores no disk ids.
    Returns the number of partial suffixes.
    """
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    block_size = pool[POOL_BLOCK_SIZE]
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    chunks = uint32_view(pool[POOL_TOKENS], pool[POOL_ROWS] * block_size)
    disks = uint32_view(pool[POOL_DISKS], pool[POOL_DISK_ROWS])
    suffixes = suffix_view(pool[POOL_SUFFIXES], pool[POOL_SUFFIX_ROWS])
    suffix_tokens = uint32_view(pool[POOL_SUFFIX_TOKENS], pool[POOL_SUFFIX_ROWS] * (block_size - 1))
    multiplier = np.uint64(shared[SHARED_MULTIPLIER])
    num_suffixes = np.int64(0)
    for row in range(pool[POOL_USED]):
        if nodes[row].parent == _NO_ROW:
            continue
        new = np.int64(new_rows[row])
        nodes_out[new] = nodes[row]
        links_out[new] = links[row]
        if nodes[row].parent < np.uint32(ROOT):
            nodes_out[new].parent = new_rows[np.int64(nodes[row].parent)]
            for i in range(block_size):
                tokens_out[new * block_size + i] = chunks[row * block_size + i]
        links_out[new].first_child = _moved(new_rows, links[row].first_child)
        links_out[new].next_sibling = _moved(new_rows, links[row].next_sibling)
        links_out[new].previous_sibling = _moved(new_rows, links[row].previous_sibling)
        links_out[new].root = new_rows[np.int64(links[row].root)]
        if disks.size > 0:
            disks_out[new] = disks[row]
        if links[row].suffix != _NO_ROW:
            suffix = np.int64(links[row].suffix)
            suffixes_out[num_suffixes] = suffixes[suffix]
            suffixes_out[num_suffixes].node = np.uint32(new)
            for i in range(np.int64(suffixes[suffix].length)):
                suffix_tokens_out[num_suffixes * (block_size - 1) + i] = suffix_tokens[suffix * (block_size - 1) + i]
            links_out[new].suffix = np.uint32(num_suffixes)
            num_suffixes += 1
        add_row(table_out, table_hash(nodes[row].state, multiplier), new)
    return num_suffixes


def exchange_rows(pool, new_rows, addresses, rows, table_size, num_rows, suffix_rows, num_suffixes):
    """Let a pool have the arrays that :func:`move_rows` filled.

    `addresses` are those of nodes, links, tokens, disks, table, suffixes and their tokens. Cannot fail: nothing that
    interrupts Python comes between its steps.
    """
    shared = int64_view(pool[POOL_SHARED], SHARED_FIELDS)
    heap = uint64_view(shared[SHARED_HEAP_NODES], shared[SHARED_HEAP_ROWS])
    for place in range(shared[SHARED_HEAP_SIZE]):
        if heap[place] >> _HALF_WORD == np.uint64(pool[POOL_NUMBER]):
            row = new_rows[np.int64(heap[place] & _LOW_HALF)]
            heap[place] = (heap[place] >> _HALF_WORD << _HALF_WORD) | np.uint64(row)
    if pool[POOL_FIRST_ROOT] != np.int64(NONE):
        pool[POOL_FIRST_ROOT] = np.int64(new_rows[pool[POOL_FIRST_ROOT]])
    has_disks = pool[POOL_DISK_ROWS] > 0
    pool[POOL_NODES] = addresses[0]
    pool[POOL_LINKS] = addresses[1]
    pool[POOL_TOKENS] = addresses[2]
    pool[POOL_DISKS] = addresses[3]
    pool[POOL_TABLE] = addresses[4]
    pool[POOL_SUFFIXES] = addresses[5]
    pool[POOL_SUFFIX_TOKENS] = addresses[6]
    pool[POOL_ROWS] = rows
    pool[POOL_DISK_ROWS] = rows if has_disks else np.int64(0)
    pool[POOL_TABLE_SIZE] = table_size
    pool[POOL_USED] = num_rows
    pool[POOL_FREE] = -1
    pool[POOL_NUM_FREE] = 0
    pool[POOL_SUFFIX_ROWS] = suffix_rows
    pool[POOL_SUFFIX_USED] = num_suffixes
    pool[POOL_SUFFIX_FREE] = -1
