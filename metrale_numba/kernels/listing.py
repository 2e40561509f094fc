"""For who looks at a cache from outside: its nodes in the order of paths, and the check hashes of a prompt.

Nothing here changes anything, and no call of a serving engine needs it.
"""

from __future__ import annotations

import numpy as np

from metrale_numba.kernels.hashing import advance_check, first_check
from metrale_numba.kernels.layout import NONE, POOL_FIRST_ROOT, POOL_LINKS, POOL_NODES, POOL_ROWS
from metrale_numba.kernels.memory import link_view, node_view
from metrale_numba.kernels.walk import find_root


def list_nodes(pool, every, adapter, rows_out, depths_out):
    """List the nodes of every adapter, or of one, parents before children, and how many blocks deep each ends.

    Both arrays have room for all nodes of the pool. Returns their number.
    """
    nodes = node_view(pool[POOL_NODES], pool[POOL_ROWS])
    links = link_view(pool[POOL_LINKS], pool[POOL_ROWS])
    root = pool[POOL_FIRST_ROOT] if every != 0 else find_root(pool, nodes, adapter)
    count = np.int64(0)
    while root >= 0 and root != NONE:
        row = root
        depth = np.int64(0)
        while True:
            if links[row].first_child != np.uint32(NONE):
                row = np.int64(links[row].first_child)
                depth += 1
            else:
                while row != root and links[row].next_sibling == np.uint32(NONE):
                    row = np.int64(nodes[row].parent)
                    depth -= 1
                if row == root:
                    break
                row = np.int64(links[row].next_sibling)
            rows_out[count] = np.uint32(row)
            depths_out[count] = depth
            count += 1
        if every == 0:
            break
        root = np.int64(links[root].next_sibling)
    return count


def hash_prefixes(powers, tokens, adapter, depths, checks_out):
    """Write the check hashes of the prefixes of `tokens` that are as long as `depths` say, which do not fall."""
    check = first_check(np.uint64(adapter), powers)
    start = np.int64(0)
    for i in range(depths.size):
        check = advance_check(check, tokens, start, depths[i], powers)
        checks_out[i] = check
        start = depths[i]
