"""The arrays of the cache: every field of a node and of a snapshot entry, and the headers.

This is the schema of the whole package. Kernels see the arrays through a *header*, an ``int64`` array of
addresses and scalars whose fields are numbered here; :mod:`metrale_numba.kernels.arrays` owns the arrays.
"""

from __future__ import annotations

import numpy as np

NONE = 0xFFFF_FFFF
"""No block, no disk id, no node: the mark that ends every list of 32-bit ids."""
ROOT = 0xFFFF_FFFE
"""The `parent` of a forest's root."""

# The four fields that a walk compares or writes, and what finds the next node, share half a cache line.
NODE = np.dtype(
    [
        ("stamp", np.int64),  # last access; for a root: its adapter id
        ("state", np.uint64),  # check hash of the whole prefix up to this node's end; finds children too
        ("parent", np.uint32),  # node, ROOT for a root, NONE for a free row
        ("block", np.uint32),  # KV block id; for a free row: the next free row
        ("count", np.uint32),  # references: the cache's own, and one for each sequence; for a root: its nodes
        ("children", np.uint32),  # number of children, HAS_SUFFIX and HAS_SNAPSHOTS
    ],
    align=True,
)
HAS_SUFFIX = 0x8000_0000
"""Set in `children` of a node that bears a partial suffix, where a walk sees it without touching another line."""
HAS_SNAPSHOTS = 0x4000_0000
"""Set in `children` of a node, or root, of the index's grid that is the floor of a snapshot: see FLOOR."""
CHILDREN = 0x3FFF_FFFF
"""The rest of `children`: their number."""

# What only inserting, evicting and partial tails touch.
LINK = np.dtype(
    [
        ("first_child", np.uint32),
        ("next_sibling", np.uint32),  # roots are linked to each other
        ("previous_sibling", np.uint32),
        ("root", np.uint32),  # root of the forest; for a root: itself
        ("suffix", np.uint32),  # row of the partial suffix or NONE
        ("place", np.uint32),  # place in the heap of eviction candidates or NONE
    ],
    align=True,
)
SUFFIX = np.dtype(
    [
        ("length", np.uint32),  # tokens, 1 to block size - 1
        ("block", np.uint32),  # for a free row: the next free row
        ("disk", np.uint32),
        ("node", np.uint32),  # the node it hangs on, NONE for a free row
    ],
    align=True,
)
ENTRY = np.dtype(
    [
        ("key", np.uint64),  # tier key (FNV-1a) of the prefix
        ("check", np.uint64),  # check hash of the prefix
        ("adapter", np.uint64),
        ("session", np.uint64),
        ("slot", np.int64),
        ("depth", np.int64),  # tokens
        ("stamp", np.int64),
        ("flags", np.uint32),
        ("place", np.uint32),  # place among the resident entries or NONE
        ("floor", np.uint32),  # row of the entry's floor, or NONE where the index has no grid
    ],
    align=True,
)
SPILLED = 1
TAIL = 2
SIBLING = 4

# The floor of a snapshot is the longest part of its prefix that is whole blocks of the index's grid. The node that ends
# there bears a mark, so that a look-up knows which of its nodes have snapshots below the next block.
FLOOR = np.dtype(
    [
        ("state", np.uint64),  # check hash of the floor
        ("offsets", np.uint64),  # bit i: some entry is, or was, i tokens deeper
        ("count", np.uint32),  # entries with this floor; 0 for a free row
        ("next_free", np.uint32),
    ],
    align=True,
)
LARGEST_GRID = 64
"""Block sizes up to this can be the index's grid: `offsets` has a bit for each token of a block."""

EMPTY_SLOT = 0xFFFF_FFFF_FFFF_FFFF
"""A free slot of a hash table; a used one holds 32 bits of the hash above the 32-bit row."""

# Header of a pool: the nodes of one block size.
(
    POOL_SHARED,  # address of the shared header
    POOL_NUMBER,  # this pool's place in the list of pools
    POOL_BLOCK_SIZE,
    POOL_ROWS,  # capacity
    POOL_USED,  # rows ever used; those above are blank
    POOL_FREE,  # first free row below POOL_USED, or -1
    POOL_NUM_FREE,
    POOL_NUM_NODES,  # without roots
    POOL_NUM_ROOTS,
    POOL_FIRST_ROOT,  # row, or NONE
    POOL_NODES,  # address
    POOL_LINKS,  # address
    POOL_TOKENS,  # address; row i holds tokens i * block size and on
    POOL_DISKS,  # address; the disk id of each row or NONE
    POOL_DISK_ROWS,  # as POOL_ROWS, or 0 until a disk id is stored
    POOL_TABLE,  # address
    POOL_TABLE_SIZE,
    POOL_SUFFIXES,  # address
    POOL_SUFFIX_TOKENS,  # address
    POOL_SUFFIX_ROWS,  # capacity
    POOL_SUFFIX_USED,
    POOL_SUFFIX_FREE,
    POOL_NUM_SUFFIXES,
    POOL_LAST_ROOT,  # the row that was a root when one was last searched for
    POOL_SEARCHED,  # of the walk under way: the last block that was searched for by hash, or -2
    POOL_AHEAD,  # the block up to which hashes were made ahead
    POOL_HASHES,  # LOOK_AHEAD of them, by block modulo that
) = range(27)
LOOK_AHEAD = 8
"""Blocks of a scattered path whose cache misses overlap."""
POOL_FIELDS = POOL_HASHES + LOOK_AHEAD

# Shared header: what all pools have in common. The first three are the counters that metrics.py reads.
(
    SHARED_HITS,
    SHARED_MISSES,
    SHARED_HIT_TOKENS,
    SHARED_CLOCK,
    SHARED_NUM_NODES,
    SHARED_NUM_SUFFIXES,
    SHARED_OVER_RELEASES,
    SHARED_NUM_EVICTABLE,  # blocks of nodes that no sequence holds, partial suffixes included
    SHARED_PARTIAL_TAILS,  # setting
    SHARED_ADOPT_BLOCKS,  # setting
    SHARED_INDEX,  # address of the header of the snapshot index
    SHARED_POOLS,  # address of the list of pool headers' addresses
    SHARED_NUM_POOLS,
    SHARED_HEAP_STAMPS,  # address
    SHARED_HEAP_NODES,  # address; pool number above the 32-bit row
    SHARED_HEAP_ROWS,  # capacity
    SHARED_HEAP_SIZE,
    SHARED_POWERS,  # address: powers of the check hash's secret base
    SHARED_MULTIPLIER,  # secret odd multiplier that places hashes in tables
    SHARED_FIELDS,
) = range(20)

# Header of the snapshot index.
(
    INDEX_CLOCK,
    INDEX_ENTRIES,  # address
    INDEX_ROWS,  # capacity of the entries, residents and floors
    INDEX_SIZE,
    INDEX_RESIDENTS,  # address: rows of the resident entries, in no order
    INDEX_NUM_RESIDENTS,
    INDEX_TABLE_SIZE,  # of each of the next three
    INDEX_KEYS,  # address: table of the entries by tier key
    INDEX_CHECKS,  # address: the same by check hash
    INDEX_SESSIONS,  # address: the tails and siblings of sessions, by session
    INDEX_FLOOR_TABLE,  # address: table of the floors by state
    INDEX_FLOOR_TABLE_SIZE,  # eight slots for each floor: each new node asks whether it is one, and is not
    INDEX_FLOORS,  # address
    INDEX_FLOORS_USED,  # rows ever used
    INDEX_FLOORS_FREE,  # first free row, or -1
    INDEX_NUM_FLOORS,
    INDEX_GRID,  # block size whose nodes bear marks, the cache's default; 0 if that is above LARGEST_GRID
    INDEX_POOL,  # address of the header of the pool of that block size, or 0 while there is none
    INDEX_DEPTH_COUNTS,  # address: entries by depth modulo DEPTH_CLASSES
    INDEX_DEPTH_BITS,  # address: one bit for each count above 0
    INDEX_LEASED_SESSION,
    INDEX_LEASED_ADAPTER,  # of the look-up that took the lease
    INDEX_EVICTIONS_SINCE_LOOKUP,
    INDEX_TAIL_PROTECT,  # setting
    INDEX_TAIL_LEASE_TTL,  # setting
    INDEX_LEGACY,  # setting
    INDEX_HERMETIC,  # setting
    INDEX_POWERS,  # address, as SHARED_POWERS
    INDEX_MULTIPLIER,
    INDEX_STATS,  # the eleven counters of SnapshotStats follow
) = range(30)
(
    STAT_SAVES,
    STAT_LOOKUPS,
    STAT_HITS,
    STAT_ANCHOR_DEPTH_SUM,
    STAT_RECOMPUTE_TOKENS_ON_HIT,
    STAT_RECOMPUTE_TOKENS_ON_MISS,
    STAT_EVICTIONS,
    STAT_TIER_SPILLS,
    STAT_TIER_HITS,
    STAT_TIER_FAULT_INS,
    STAT_TIER_REAPS,
) = range(INDEX_STATS, INDEX_STATS + 11)
INDEX_FIELDS = INDEX_STATS + 11

DEPTH_CLASSES = 4096
"""Depths are filtered modulo this: 16 KB of counts, 512 bytes of bits, whatever the number of entries."""
CHECK_GROUP = 16
"""Tokens that the check hash takes in one step."""
NUM_POWERS = 2 * CHECK_GROUP + 1
"""Powers of its base that are kept: 0 to CHECK_GROUP, then those of a step in the order of its tokens."""

# What a look-up is told: to count itself, and that disk ids may be stored.
RECORD = 1
WITH_DISKS = 2
REFUSED = -1
"""What the hot kernels answer to an array that is not aligned, has gaps or runs backwards: nothing has changed."""

# What insert answers before the numbers: done, a row, a suffix or disk ids short, or a block id that may not be stored.
DONE = 0
SHORT_OF_ROWS = 1
SHORT_OF_SUFFIXES = 2
SHORT_OF_DISKS = 3
BAD_BLOCK = 4

# What is remembered of an evicted node, if ghosts were asked for. They stand in a ring: that of the n-th eviction is in
# row n modulo the number of rows.
GHOST = np.dtype(
    [
        ("state", np.uint64),  # check hash of the prefix that ended there
        ("adapter", np.uint64),
        ("number", np.int64),  # nodes evicted before it; -1 for a row without a ghost
        ("tick", np.int64),  # the clock when it was evicted
        ("stamp", np.int64),  # last access before that
        ("block_size", np.int64),
        ("by_adapter", np.uint32),  # 1 if it went for its adapter's quota or by evict_from, 0 if for the whole cache
    ],
    align=True,
)

# Header of the ghosts.
(
    GHOSTS_ROWS,  # address
    GHOSTS_CAPACITY,
    GHOSTS_TABLE,  # address: table of the ghosts by state
    GHOSTS_TABLE_SIZE,
    GHOSTS_MULTIPLIER,  # as SHARED_MULTIPLIER
    GHOSTS_COUNT,  # nodes evicted so far
    GHOSTS_SIZE,  # ghosts that there are
    GHOSTS_LOST,  # 1 once an evicted node is remembered no longer, and was not inserted again
    GHOSTS_FIELDS,
) = range(9)

# Header of a pool of ids: blocks, slots or disk blocks with a count of references each.
(
    ID_POOL_NUM_FREE,  # length of the stack of free ids
    ID_POOL_HIGH_WATER,  # the most ids that were ever in use at once
) = range(2)
ID_POOL_FIELDS = 2

# What ranks the leaves that a simulated policy may evict, of which the lowest goes.
(
    RANK_LAST_USE,  # the last request that used it
    RANK_FREQUENCY,  # how many did, halved now and then, and then the last
    RANK_NEXT_USE,  # the next that will, the farthest lowest
) = range(3)

# What an integrity check answers, by number.
FAULTS = (
    "none",
    "the free list holds a row that is in use or out of range",
    "the free list is not as long as its count",
    "the number of nodes or roots is not what the rows say",
    "a parent is not a live row",
    "a root has no child",
    "a child names another parent than the one whose list it is in",
    "a list of siblings is not linked both ways",
    "the number of children is not the length of their list",
    "a node cannot be reached from its root",
    "a check hash is not that of the node's prefix",
    "a node and its mark disagree on whether it is the floor of a snapshot",
    "a row is not in the hash table where a search would find it",
    "the hash table holds more rows than there are",
    "two children of one parent bear the same chunk",
    "a stamp is newer than the clock or not above 0",
    "a node is stamped newer than its parent",
    "siblings are not in the order of their stamps, newest first",
    "a node has no block",
    "a partial suffix and its node do not name each other",
    "a partial suffix is empty, as long as a block, or without a block",
    "the number of partial suffixes is not what the nodes say",
    "a node is a candidate for eviction but not in the heap, or the reverse",
    "the heap does not name the node that names its place",
    "the heap bears another stamp than its node",
    "the heap is not in order",
    "the heap is not as large as the number of candidates",
    "a snapshot entry is not in every table where a search would find it",
    "a table of the snapshot index holds more rows than there are",
    "the list of resident snapshots and the entries do not name each other",
    "the number of resident snapshots is not what the entries say",
    "the counts of snapshot depths are not what the entries say",
    "a snapshot's stamp is newer than the index's clock or not above 0",
    "two snapshot entries bear the same key",
    "a node names another root than its parent",
    "a node and its mark disagree on whether it bears a partial suffix",
    "the list of roots is not linked both ways or not as long as their number",
    "a root miscounts the nodes of its forest",
    "a snapshot's floor is a free row or lacks the snapshot's offset",
    "a floor does not count its snapshots",
    "a floor is not in the table where a search would find it, or its free list is broken",
    "a ghost is not in the row of its number, or newer than the last eviction or than the clock",
    "a ghost is not in the table where a search would find it",
    "the ghosts or their table are not as many as their count",
    "a block that is cached has a ghost",
)
