"""The arrays of the cache: every field of a node and of a snapshot entry, the address headers, and how they grow.

This is the schema of the whole package. Kernels see the arrays through a *header*, an ``int64`` array of
addresses and scalars; the classes here own the arrays, and write an address into its header whenever an
array moves. Growing may fail with ``MemoryError`` at any point and leaves everything usable and unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
UInt32Array = npt.NDArray[np.uint32]
# Moves every slot of the first table into the second: `kernels.tables.rehash`, handed in since this module
# is imported before anything is compiled.
Rehash = Callable[[UInt64Array, UInt64Array], None]

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
        ("count", np.uint32),  # references: the cache's own, and one for each sequence
        ("children", np.uint32),  # number of children
    ],
    align=True,
)
# What only inserting, evicting and partial tails touch.
LINK = np.dtype(
    [
        ("key", np.uint64),  # tier key (FNV-1a) of the whole prefix up to this node's end
        ("first_child", np.uint32),
        ("next_sibling", np.uint32),
        ("previous_sibling", np.uint32),
        ("disk", np.uint32),  # disk id or NONE
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
    ],
    align=True,
)
SPILLED = 1
TAIL = 2
SIBLING = 4

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
    POOL_NODES,  # address
    POOL_LINKS,  # address
    POOL_TOKENS,  # address; row i holds tokens i * block size and on
    POOL_TABLE,  # address
    POOL_TABLE_SIZE,
    POOL_SUFFIXES,  # address
    POOL_SUFFIX_TOKENS,  # address
    POOL_SUFFIX_ROWS,  # capacity
    POOL_SUFFIX_USED,
    POOL_SUFFIX_FREE,
    POOL_NUM_SUFFIXES,
    POOL_FIELDS,
) = range(21)

# Shared header: what all pools have in common. The first three are the counters that metrics.py reads.
(
    SHARED_HITS,
    SHARED_MISSES,
    SHARED_HIT_TOKENS,
    SHARED_CLOCK,
    SHARED_NUM_NODES,
    SHARED_NUM_SUFFIXES,
    SHARED_OVER_RELEASES,
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
) = range(19)

# Header of the snapshot index.
(
    INDEX_CLOCK,
    INDEX_ENTRIES,  # address
    INDEX_ROWS,  # capacity
    INDEX_SIZE,
    INDEX_RESIDENTS,  # address: rows of the resident entries, in no order
    INDEX_NUM_RESIDENTS,
    INDEX_TABLE,  # address
    INDEX_TABLE_SIZE,
    INDEX_DEPTH_COUNTS,  # address: entries by depth modulo DEPTH_CLASSES
    INDEX_DEPTH_BITS,  # address: one bit for each count above 0
    INDEX_LEASED_SESSION,
    INDEX_EVICTIONS_SINCE_LOOKUP,
    INDEX_TAIL_PROTECT,  # setting
    INDEX_TAIL_LEASE_TTL,  # setting
    INDEX_LEGACY,  # setting
    INDEX_HERMETIC,  # setting
    INDEX_POWERS,  # address, as SHARED_POWERS
    INDEX_MULTIPLIER,
    INDEX_STATS,  # the eleven counters of SnapshotStats follow
) = range(19)
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

# What insert answers before the numbers: done, a row or a suffix short, or a block id that may not be stored.
DONE = 0
SHORT_OF_ROWS = 1
SHORT_OF_SUFFIXES = 2
BAD_BLOCK = 3

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
    "a tier key is not that of the node's prefix",
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
    "a snapshot entry is not in the table where a search would find it",
    "the table of snapshot keys holds more entries than there are",
    "the list of resident snapshots and the entries do not name each other",
    "the number of resident snapshots is not what the entries say",
    "the counts of snapshot depths are not what the entries say",
    "a snapshot's stamp is newer than the index's clock or not above 0",
    "two snapshot entries bear the same key",
)

_FIRST_TOKENS = 1024
_GROWTH = 1.25


def table_size(rows: int) -> int:
    """Slots for `rows` entries at a load of at most three quarters, never full."""
    return rows + rows // 3 + 4


def _resize(array: npt.NDArray[np.generic], rows: int, header: Int64Array, field: int) -> None:
    """Lengthen an owned array in place (most often without a copy) and note where it is now.

    Views made by kernels are gone by now, and no other part keeps one, so the reference check is off.
    """
    if rows > array.shape[0]:
        array.resize((rows, *array.shape[1:]), refcheck=False)
        header[field] = address_of(array)


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Address of the first element; asked for when an array moves, never for each call."""
    return int(array.ctypes.data)


class SharedArrays:
    """What the pools of one cache share: clock, counters, the heap of eviction candidates, the hash keys.

    Parameters
    ----------
    powers : array of uint64, shape (CHECK_GROUP + 1,)
        Powers of the secret base of the check hash.
    multiplier : int
        Secret odd number below 2**64 that places hashes in tables.
    partial_tail_sharing, adopt_blocks : bool
        Settings that kernels read.
    """

    __slots__ = ("_addresses", "_free_numbers", "header", "heap_nodes", "heap_stamps", "pools", "powers")

    def __init__(self, powers: UInt64Array, multiplier: int, *, partial_tail_sharing: bool, adopt_blocks: bool) -> None:
        self.header: Int64Array = np.zeros(SHARED_FIELDS, np.int64)
        self.powers = powers
        self.heap_stamps: Int64Array = np.zeros(0, np.int64)
        self.heap_nodes: UInt64Array = np.zeros(0, np.uint64)
        self.pools: dict[int, PoolArrays] = {}
        self._addresses: Int64Array = np.zeros(1, np.int64)
        self._free_numbers: list[int] = []
        header = self.header
        header[SHARED_POWERS] = address_of(powers)
        header[SHARED_MULTIPLIER] = np.uint64(multiplier).astype(np.int64)
        header[SHARED_PARTIAL_TAILS] = partial_tail_sharing
        header[SHARED_ADOPT_BLOCKS] = adopt_blocks
        header[SHARED_POOLS] = address_of(self._addresses)

    def add_pool(self, block_size: int) -> PoolArrays:
        """Make the empty pool of a block size that has none."""
        if self._free_numbers:
            number = self._free_numbers[-1]
        else:
            number = int(self.header[SHARED_NUM_POOLS])
            if number == self._addresses.shape[0]:
                _resize(self._addresses, 2 * number, self.header, SHARED_POOLS)
        pool = PoolArrays(self, number, block_size)
        if self._free_numbers:
            self._free_numbers.pop()
        else:
            self.header[SHARED_NUM_POOLS] += 1
        self._addresses[number] = address_of(pool.header)
        self.pools[block_size] = pool
        return pool

    def drop_pool(self, block_size: int) -> None:
        """Give back the arrays of a pool that has no nodes left."""
        pool = self.pools.pop(block_size)
        number = int(pool.header[POOL_NUMBER])
        self._addresses[number] = 0
        self._free_numbers.append(number)

    def grow_heap(self) -> None:
        """Make room for every row of every pool: a release or an eviction must never have to grow."""
        rows = sum(pool.rows for pool in self.pools.values())
        _resize(self.heap_stamps, rows, self.header, SHARED_HEAP_STAMPS)
        _resize(self.heap_nodes, rows, self.header, SHARED_HEAP_NODES)
        self.header[SHARED_HEAP_ROWS] = min(self.heap_stamps.shape[0], self.heap_nodes.shape[0])


class PoolArrays:
    """The nodes, token chunks and partial suffixes of one block size, over all adapters.

    A row is a node or a forest's root. Rows are handed out upwards, and freed ones last-in first-out, so
    that the blocks of one insert stand next to each other.
    """

    __slots__ = ("header", "links", "nodes", "shared", "suffix_tokens", "suffixes", "table", "tokens")

    def __init__(self, shared: SharedArrays, number: int, block_size: int) -> None:
        self.shared = shared
        self.nodes = np.zeros(0, NODE)
        self.links = np.zeros(0, LINK)
        self.tokens: UInt32Array = np.zeros((0, block_size), np.uint32)
        self.table: UInt64Array = np.full(table_size(0), EMPTY_SLOT, np.uint64)
        self.suffixes = np.zeros(0, SUFFIX)
        # A suffix is shorter than a block; at block size 1 there are none.
        self.suffix_tokens: UInt32Array = np.zeros((0, block_size - 1), np.uint32)
        self.header: Int64Array = np.zeros(POOL_FIELDS, np.int64)
        header = self.header
        header[POOL_SHARED] = address_of(shared.header)
        header[POOL_NUMBER] = number
        header[POOL_BLOCK_SIZE] = block_size
        header[POOL_FREE] = -1
        header[POOL_SUFFIX_FREE] = -1
        header[POOL_TABLE] = address_of(self.table)
        header[POOL_TABLE_SIZE] = self.table.shape[0]

    @property
    def rows(self) -> int:
        """Capacity in rows."""
        return int(self.header[POOL_ROWS])

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.header[POOL_BLOCK_SIZE])

    def grow(self, missing: int, rehash: Rehash) -> None:
        """Make room for `missing` more rows than are free now."""
        rows = self.rows + missing
        rows = max(rows, int(self.rows * _GROWTH), min(_FIRST_TOKENS // self.block_size, 64))
        table: UInt64Array = np.full(table_size(rows), EMPTY_SLOT, np.uint64)
        _resize(self.nodes, rows, self.header, POOL_NODES)
        _resize(self.links, rows, self.header, POOL_LINKS)
        _resize(self.tokens, rows, self.header, POOL_TOKENS)
        self._grow_shared_heap(rows)
        rehash(self.table, table)
        self.table = table
        self.header[POOL_TABLE] = address_of(table)
        self.header[POOL_TABLE_SIZE] = table.shape[0]
        self.header[POOL_ROWS] = rows

    def _grow_shared_heap(self, rows: int) -> None:
        before = self.header[POOL_ROWS]
        self.header[POOL_ROWS] = rows
        try:
            self.shared.grow_heap()
        finally:
            self.header[POOL_ROWS] = before

    def grow_suffixes(self, missing: int) -> None:
        """Make room for `missing` more partial suffixes than are free now."""
        rows = int(self.header[POOL_SUFFIX_ROWS])
        rows = max(rows + missing, int(rows * _GROWTH), min(_FIRST_TOKENS // self.block_size, 16))
        _resize(self.suffixes, rows, self.header, POOL_SUFFIXES)
        _resize(self.suffix_tokens, rows, self.header, POOL_SUFFIX_TOKENS)
        self.header[POOL_SUFFIX_ROWS] = rows

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Every array of this pool by name, its header included."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "shared"}


class IndexArrays:
    """The entries of the snapshot index, dense and in order, and what finds them.

    Parameters
    ----------
    powers, multiplier
        As for :class:`SharedArrays`.
    tail_protect, tail_lease_ttl, evict_legacy, hermetic
        Settings that kernels read.
    """

    __slots__ = ("depth_bits", "depth_counts", "entries", "header", "powers", "residents", "table")

    def __init__(
        self,
        powers: UInt64Array,
        multiplier: int,
        *,
        tail_protect: bool,
        tail_lease_ttl: int,
        evict_legacy: bool,
        hermetic: bool,
    ) -> None:
        self.entries = np.zeros(0, ENTRY)
        self.residents: UInt32Array = np.zeros(0, np.uint32)
        self.table: UInt64Array = np.full(table_size(0), EMPTY_SLOT, np.uint64)
        self.depth_counts: UInt32Array = np.zeros(DEPTH_CLASSES, np.uint32)
        self.depth_bits: UInt64Array = np.zeros(DEPTH_CLASSES // 64, np.uint64)
        self.powers = powers
        self.header: Int64Array = np.zeros(INDEX_FIELDS, np.int64)
        header = self.header
        header[INDEX_TABLE] = address_of(self.table)
        header[INDEX_TABLE_SIZE] = self.table.shape[0]
        header[INDEX_DEPTH_COUNTS] = address_of(self.depth_counts)
        header[INDEX_DEPTH_BITS] = address_of(self.depth_bits)
        header[INDEX_POWERS] = address_of(powers)
        header[INDEX_MULTIPLIER] = np.uint64(multiplier).astype(np.int64)
        header[INDEX_TAIL_PROTECT] = tail_protect
        header[INDEX_TAIL_LEASE_TTL] = tail_lease_ttl
        header[INDEX_LEGACY] = evict_legacy
        header[INDEX_HERMETIC] = hermetic

    def grow(self, rehash: Rehash) -> None:
        """Make room for at least one more entry."""
        rows = int(self.header[INDEX_ROWS])
        rows = max(rows + 1, int(rows * _GROWTH), 16)
        table: UInt64Array = np.full(table_size(rows), EMPTY_SLOT, np.uint64)
        _resize(self.entries, rows, self.header, INDEX_ENTRIES)
        _resize(self.residents, rows, self.header, INDEX_RESIDENTS)
        rehash(self.table, table)
        self.table = table
        self.header[INDEX_TABLE] = address_of(table)
        self.header[INDEX_TABLE_SIZE] = table.shape[0]
        self.header[INDEX_ROWS] = rows

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Every array of the index by name, its header included."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "powers"}
