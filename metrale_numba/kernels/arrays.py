"""Owners of the arrays that `layout` describes: they make them, grow them, and give them back.

An owner writes an array's address into its header whenever the array moves. Growing may fail with
``MemoryError`` at any point and leaves everything usable and unchanged. Nothing here is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from metrale_numba.kernels.layout import (
    DEPTH_CLASSES,
    EMPTY_SLOT,
    ENTRY,
    FLOOR,
    INDEX_CHECKS,
    INDEX_CLOCK,
    INDEX_DEPTH_BITS,
    INDEX_DEPTH_COUNTS,
    INDEX_ENTRIES,
    INDEX_EVICTIONS_SINCE_LOOKUP,
    INDEX_FIELDS,
    INDEX_FLOOR_TABLE,
    INDEX_FLOOR_TABLE_SIZE,
    INDEX_FLOORS,
    INDEX_FLOORS_FREE,
    INDEX_FLOORS_USED,
    INDEX_GRID,
    INDEX_HERMETIC,
    INDEX_KEYS,
    INDEX_LEASED_ADAPTER,
    INDEX_LEASED_SESSION,
    INDEX_LEGACY,
    INDEX_MULTIPLIER,
    INDEX_NUM_FLOORS,
    INDEX_NUM_RESIDENTS,
    INDEX_POOL,
    INDEX_POWERS,
    INDEX_RESIDENTS,
    INDEX_ROWS,
    INDEX_SESSIONS,
    INDEX_SIZE,
    INDEX_STATS,
    INDEX_TABLE_SIZE,
    INDEX_TAIL_LEASE_TTL,
    INDEX_TAIL_PROTECT,
    LARGEST_GRID,
    LINK,
    NODE,
    NONE,
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
    SHARED_ADOPT_BLOCKS,
    SHARED_CLOCK,
    SHARED_FIELDS,
    SHARED_HEAP_NODES,
    SHARED_HEAP_ROWS,
    SHARED_HEAP_SIZE,
    SHARED_HEAP_STAMPS,
    SHARED_HIT_TOKENS,
    SHARED_HITS,
    SHARED_INDEX,
    SHARED_MISSES,
    SHARED_MULTIPLIER,
    SHARED_NUM_EVICTABLE,
    SHARED_NUM_NODES,
    SHARED_NUM_POOLS,
    SHARED_NUM_SUFFIXES,
    SHARED_OVER_RELEASES,
    SHARED_PARTIAL_TAILS,
    SHARED_POOLS,
    SHARED_POWERS,
    SUFFIX,
)
from metrale_numba.kernels.pages import Pages

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
UInt32Array = npt.NDArray[np.uint32]
# Moves every slot of the first table into the second: `kernels.tables.rehash`, handed in since this module
# is imported before anything is compiled.
Rehash = Callable[[UInt64Array, UInt64Array], None]

# What a restored header takes over from the saved one; addresses, sizes and settings are its own.
_SHARED_KEPT = (
    SHARED_HITS,
    SHARED_MISSES,
    SHARED_HIT_TOKENS,
    SHARED_CLOCK,
    SHARED_NUM_NODES,
    SHARED_NUM_SUFFIXES,
    SHARED_OVER_RELEASES,
    SHARED_NUM_EVICTABLE,
    SHARED_HEAP_SIZE,
)
_POOL_KEPT = (
    POOL_FREE,
    POOL_NUM_FREE,
    POOL_NUM_NODES,
    POOL_NUM_ROOTS,
    POOL_FIRST_ROOT,
    POOL_SUFFIX_FREE,
    POOL_NUM_SUFFIXES,
)
_INDEX_KEPT = (
    INDEX_CLOCK,
    INDEX_LEASED_SESSION,
    INDEX_LEASED_ADAPTER,
    INDEX_EVICTIONS_SINCE_LOOKUP,
    INDEX_FLOORS_FREE,
    INDEX_NUM_FLOORS,
    *range(INDEX_STATS, INDEX_FIELDS),
)
_POOL_ARRAYS = {
    "nodes": POOL_NODES,
    "links": POOL_LINKS,
    "tokens": POOL_TOKENS,
    "disks": POOL_DISKS,
    "table": POOL_TABLE,
    "suffixes": POOL_SUFFIXES,
    "suffix_tokens": POOL_SUFFIX_TOKENS,
}
_INDEX_TABLES = {
    "keys": INDEX_KEYS,
    "checks": INDEX_CHECKS,
    "sessions": INDEX_SESSIONS,
    "floor_table": INDEX_FLOOR_TABLE,
}
_INDEX_ARRAYS = {
    "entries": INDEX_ENTRIES,
    "residents": INDEX_RESIDENTS,
    "floors": INDEX_FLOORS,
    **_INDEX_TABLES,
    "depth_counts": INDEX_DEPTH_COUNTS,
    "depth_bits": INDEX_DEPTH_BITS,
}

# As many ids as one row of an array can have for NumPy. No prompt fills a longer block, so its pool stays empty.
_WIDEST = 2**60
_FIRST_TOKENS = 1024
_GROWTH = 1.25
# A step of growth is no larger than this, 8 MB for blocks of 16 tokens, so that no call waits long for memory.
_MOST_MORE_ROWS = 65_536


def table_size(rows: int) -> int:
    """Slots for `rows` entries at a load of at most a half: a fuller table makes searches and removals long."""
    return 2 * rows + 4


def _index_table(name: str, rows: int) -> UInt64Array:
    """An empty table of the snapshot index; that of the floors has room to tell at once what is none."""
    size = table_size(rows)
    return np.full(4 * size if name == "floor_table" else size, EMPTY_SLOT, np.uint64)


def row_shapes(block_size: int) -> tuple[int, int]:
    """Ids in a row of `tokens`, and in one of `suffix_tokens`: a suffix is shorter than a block."""
    return min(block_size, _WIDEST), min(block_size - 1, _WIDEST)


def _rows_for(blocks: int) -> int:
    """Rows for so many blocks that are reserved, and for the roots of adapters with 32 blocks each, or more."""
    return blocks + blocks // 32 + 16


def _resize(array: npt.NDArray[np.generic], rows: int) -> None:
    """Lengthen an owned array in place by zeros, most often without a copy.

    Views made by kernels are gone by now, and no other part keeps one, so the reference check is off.
    """
    if rows > array.shape[0]:
        array.resize((rows, *array.shape[1:]), refcheck=False)


def _publish(header: Int64Array, arrays: Mapping[int, npt.NDArray[np.generic]], sizes: Mapping[int, int]) -> None:
    """Write where arrays are now, and how large, into a header.

    A signal's handler may raise between any two steps, KeyboardInterrupt above all, and a header that is half
    written leads kernels into freed memory. So every growth ends here, also one that fails, and whatever leads here
    is done again if it is interrupted: each caller has the lines for that, since a function of their own could be
    interrupted before its first.
    """
    for field, array in arrays.items():
        header[field] = address_of(array)
    for field, size in sizes.items():
        header[field] = size


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Address of the first element; asked for when an array moves, never for each call."""
    return int(array.ctypes.data)


def _pool_pages(rows: int, block_size: int) -> dict[str, Pages]:
    """Pages for the arrays of a pool that a walk reads, those first for which memory is most likely to be short."""
    return {
        "tokens": Pages(np.uint32, rows, row_shapes(block_size)[0]),
        "nodes": Pages(NODE, rows),
        "links": Pages(LINK, rows),
    }


class SharedArrays:
    """What the pools of one cache share: clock, counters, the heap of eviction candidates, the hash keys.

    Parameters
    ----------
    powers : array of uint64, shape (NUM_POWERS,)
        Powers of the secret base of the check hash.
    multiplier : int
        Secret odd number below 2**64 that places hashes in tables.
    index : array of int64
        Header of the snapshot index.
    partial_tail_sharing, adopt_blocks : bool
        Settings that kernels read.
    """

    __slots__ = (
        "_addresses",
        "_free_numbers",
        "_index",
        "address",
        "header",
        "heap_nodes",
        "heap_stamps",
        "pool_rows",
        "pools",
        "powers",
    )

    def __init__(
        self,
        powers: UInt64Array,
        multiplier: int,
        index: Int64Array,
        *,
        partial_tail_sharing: bool,
        adopt_blocks: bool,
    ) -> None:
        self._index = index
        self.header: Int64Array = np.zeros(SHARED_FIELDS, np.int64)
        self.powers = powers
        self.heap_stamps: Int64Array = np.zeros(0, np.int64)
        self.heap_nodes: UInt64Array = np.zeros(0, np.uint64)
        self.pools: dict[int, PoolArrays] = {}
        # Capacity of all pools together.
        self.pool_rows = 0
        self._addresses: Int64Array = np.zeros(1, np.int64)
        self._free_numbers: list[int] = []
        header = self.header
        self.address = address_of(header)
        header[SHARED_POWERS] = address_of(powers)
        header[SHARED_MULTIPLIER] = np.uint64(multiplier).astype(np.int64)
        header[SHARED_PARTIAL_TAILS] = partial_tail_sharing
        header[SHARED_ADOPT_BLOCKS] = adopt_blocks
        header[SHARED_POOLS] = address_of(self._addresses)
        header[SHARED_INDEX] = address_of(index)

    def add_pool(self, block_size: int) -> PoolArrays:
        """Make the empty pool of a block size that has none."""
        if self._free_numbers:
            number = self._free_numbers[-1]
        else:
            number = int(self.header[SHARED_NUM_POOLS])
            if number == self._addresses.shape[0]:
                try:
                    _resize(self._addresses, 2 * number)
                finally:
                    try:
                        _publish(self.header, {SHARED_POOLS: self._addresses}, {})
                    except BaseException:
                        _publish(self.header, {SHARED_POOLS: self._addresses}, {})
                        raise
        pool = PoolArrays(self, number, block_size)
        if self._free_numbers:
            self._free_numbers.pop()
        else:
            self.header[SHARED_NUM_POOLS] += 1
        try:
            self._enter_pool(pool)
        except BaseException:
            self._enter_pool(pool)
            raise
        return pool

    def _enter_pool(self, pool: PoolArrays) -> None:
        """Let kernels find a pool, and the index the one whose nodes bear its marks."""
        self._addresses[pool.header[POOL_NUMBER]] = pool.address
        self.pools[pool.block_size] = pool
        if pool.block_size == self._index[INDEX_GRID]:
            self._index[INDEX_POOL] = pool.address

    def drop_pool(self, block_size: int) -> None:
        """Give back the arrays of a pool that has no nodes left."""
        pool = self.pools[block_size]
        number = int(pool.header[POOL_NUMBER])
        # Unnamed first: were it freed first, an interruption in between would leave its address to be followed.
        self._addresses[number] = 0
        if block_size == self._index[INDEX_GRID]:
            self._index[INDEX_POOL] = 0
        del self.pools[block_size]
        self._free_numbers.append(number)
        self.pool_rows -= pool.rows

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Every array that is shared by name, the header included."""
        return {
            "header": self.header,
            "heap_stamps": self.heap_stamps,
            "heap_nodes": self.heap_nodes,
            "powers": self.powers,
            "addresses": self._addresses,
        }

    def clear(self, kept: PoolArrays) -> None:
        """Drop every pool but one, which becomes empty, and every candidate; clock, counters and settings stay."""
        header = self.header
        # Nothing is freed before no kernel would go there any more, wherever an interruption falls.
        header[SHARED_HEAP_SIZE] = 0
        for field in (SHARED_NUM_NODES, SHARED_NUM_SUFFIXES, SHARED_NUM_EVICTABLE):
            header[field] = 0
        for block_size in [block_size for block_size in self.pools if block_size != kept.block_size]:
            self.drop_pool(block_size)
        kept.forget()

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Copies of the arrays, to what is used of them; those of the pools are apart."""
        size = self.header[SHARED_HEAP_SIZE]
        return {
            "header": self.header.copy(),
            "heap_stamps": self.heap_stamps[:size].copy(),
            "heap_nodes": self.heap_nodes[:size].copy(),
        }

    def restore(self, state: dict[str, npt.NDArray[np.generic]], pools: dict[int, dict[str, Any]]) -> None:
        """Become what :meth:`state`, and that of every pool by its block size, were taken of; settings stay."""
        for field in _SHARED_KEPT:
            self.header[field] = state["header"][field]
        numbers = {int(pool["header"][POOL_NUMBER]): block_size for block_size, pool in pools.items()}
        self.header[SHARED_NUM_POOLS] = max(numbers, default=-1) + 1
        addresses: Int64Array = np.zeros(max(1, int(self.header[SHARED_NUM_POOLS])), np.int64)
        self._addresses = addresses
        self.header[SHARED_POOLS] = address_of(addresses)
        self._free_numbers = [number for number in range(self.header[SHARED_NUM_POOLS]) if number not in numbers]
        for number, block_size in numbers.items():
            pool = PoolArrays(self, number, block_size)
            pool.restore(pools[block_size])
            self._enter_pool(pool)
            self.pool_rows += pool.rows
        self.grow_heap(0)
        size = state["heap_stamps"].shape[0]
        self.heap_stamps[:size] = state["heap_stamps"]
        self.heap_nodes[:size] = state["heap_nodes"]

    def compact_heap(self) -> None:
        """Give back the room that the heap has beyond a place for each row."""
        rows = min(self.pool_rows, int(self.header[SHARED_HEAP_ROWS]))
        stamps = self.heap_stamps[:rows].copy()
        nodes = self.heap_nodes[:rows].copy()
        try:
            self.heap_stamps = stamps
            self.heap_nodes = nodes
        finally:
            try:
                self._publish_heap(rows)
            except BaseException:
                self._publish_heap(rows)
                raise

    def grow_heap(self, more: int) -> None:
        """Make room for `more` rows than the pools have now: a release or an eviction must never have to grow."""
        rows = self.pool_rows + more
        try:
            _resize(self.heap_stamps, rows)
            _resize(self.heap_nodes, rows)
        finally:
            try:
                self._publish_heap(rows)
            except BaseException:
                self._publish_heap(rows)
                raise

    def _publish_heap(self, rows: int) -> None:
        capacity = min(rows, self.heap_stamps.shape[0], self.heap_nodes.shape[0])
        arrays = {SHARED_HEAP_STAMPS: self.heap_stamps, SHARED_HEAP_NODES: self.heap_nodes}
        _publish(self.header, arrays, {SHARED_HEAP_ROWS: capacity})


class PoolArrays:
    """The nodes, token chunks and partial suffixes of one block size, over all adapters.

    A row is a node or a forest's root. Rows are handed out upwards, and freed ones last-in first-out, so
    that the blocks of one insert stand next to each other.
    """

    __slots__ = (
        "_pages",
        "address",
        "disks",
        "header",
        "links",
        "nodes",
        "shared",
        "suffix_tokens",
        "suffixes",
        "table",
        "tokens",
    )
    nodes: npt.NDArray[Any]
    links: npt.NDArray[Any]
    tokens: UInt32Array

    def __init__(self, shared: SharedArrays, number: int, block_size: int) -> None:
        self.shared = shared
        self._pages = _pool_pages(0, block_size)
        self._view_pages()
        # Most caches never see a disk id, and pay nothing for them.
        self.disks: UInt32Array = np.zeros(0, np.uint32)
        self.table: UInt64Array = np.full(table_size(0), EMPTY_SLOT, np.uint64)
        self.suffixes = np.zeros(0, SUFFIX)
        # At block size 1 there are none.
        self.suffix_tokens: UInt32Array = np.zeros((0, row_shapes(block_size)[1]), np.uint32)
        self.header: Int64Array = np.zeros(POOL_FIELDS, np.int64)
        header = self.header
        # Of the header, by which the hot path names the pool; it stays where it is.
        self.address = address_of(header)
        header[POOL_SHARED] = shared.address
        header[POOL_NUMBER] = number
        header[POOL_BLOCK_SIZE] = block_size
        header[POOL_FREE] = -1
        header[POOL_SUFFIX_FREE] = -1
        header[POOL_FIRST_ROOT] = NONE
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
        more = max(int(self.rows * (_GROWTH - 1)), min(_FIRST_TOKENS // self.block_size, 64))
        self._grow_to(self.rows + max(missing, min(more, _MOST_MORE_ROWS)), rehash)

    def reserve(self, blocks: int, rehash: Rehash) -> None:
        """Make room for so many blocks in all, and for their roots."""
        rows = _rows_for(blocks)
        if rows > self.rows:
            self._grow_to(rows, rehash)

    def _grow_to(self, rows: int, rehash: Rehash) -> None:
        capacity = self.rows
        try:
            for name, pages in self._pages.items():
                setattr(self, name, None)
                pages.grow(rows)
            if self.header[POOL_DISK_ROWS]:
                self._resize_disks(rows)
            self.shared.grow_heap(rows - capacity)
            # Counted before it is used: counted twice after an interruption, it only makes the heap too large.
            self.shared.pool_rows += rows - capacity
            if self.table.shape[0] < table_size(rows):
                # Entering every row anew takes time for all of them, so it is not done at each step.
                table = np.full(table_size(max(rows, int(capacity * _GROWTH))), EMPTY_SLOT, np.uint64)
                rehash(self.table, table)
                self.table = table
            capacity = rows
        finally:
            try:
                self._publish_rows(capacity)
            except BaseException:
                self._publish_rows(capacity)
                raise

    def _view_pages(self) -> None:
        """Have the arrays as they are in their pages now."""
        for name, pages in self._pages.items():
            setattr(self, name, pages.array())

    def add_disks(self) -> None:
        """Make room for the disk ids of all rows, when the first is to be stored."""
        try:
            self._resize_disks(self.rows)
        finally:
            try:
                self._publish_rows(self.rows)
            except BaseException:
                self._publish_rows(self.rows)
                raise

    def _resize_disks(self, rows: int) -> None:
        before = self.disks.shape[0]
        _resize(self.disks, rows)
        self.disks[before:] = NONE

    def _publish_rows(self, rows: int) -> None:
        """Tell the kernels where the arrays are, of which `rows` rows may be used."""
        self._view_pages()
        arrays = {
            POOL_NODES: self.nodes,
            POOL_LINKS: self.links,
            POOL_TOKENS: self.tokens,
            POOL_DISKS: self.disks,
            POOL_TABLE: self.table,
        }
        disk_rows = rows if self.disks.shape[0] >= rows else 0
        sizes = {POOL_TABLE_SIZE: self.table.shape[0], POOL_ROWS: rows, POOL_DISK_ROWS: disk_rows}
        _publish(self.header, arrays, sizes)

    def compact(self, reserve: int, kernels: Mapping[str, Callable[..., Any]]) -> None:
        """Move the live rows into new arrays that have just the room for them, and for `reserve` blocks at least."""
        header = self.header
        new_rows: UInt32Array = np.empty(header[POOL_USED], np.uint32)
        num_rows = kernels["number_rows"](header, new_rows)
        rows = max(num_rows, _rows_for(reserve) if reserve else 0)
        suffix_rows = int(header[POOL_NUM_SUFFIXES])
        moved_pages = _pool_pages(rows, self.block_size)
        moved: dict[str, npt.NDArray[Any]] = {
            **{name: moved_pages[name].array() for name in ("nodes", "links", "tokens")},
            "disks": np.full(rows if header[POOL_DISK_ROWS] else 0, NONE, np.uint32),
            "table": np.full(table_size(rows), EMPTY_SLOT, np.uint64),
            "suffixes": np.full(suffix_rows, 0, SUFFIX),
            "suffix_tokens": np.full((suffix_rows, row_shapes(self.block_size)[1]), 0, np.uint32),
        }
        num_suffixes = kernels["move_rows"](header, new_rows, *(array.reshape(-1) for array in moved.values()))
        addresses = np.array([address_of(array) for array in moved.values()], np.int64)
        more = rows - self.rows
        if more > 0:
            self.shared.grow_heap(more)
            self.shared.pool_rows += more
        try:
            kernels["exchange_rows"](
                header, new_rows, addresses, rows, table_size(rows), num_rows, suffix_rows, num_suffixes
            )
        finally:
            try:
                self._keep(moved_pages, moved, addresses)
            except BaseException:
                self._keep(moved_pages, moved, addresses)
                raise
        if more < 0:
            self.shared.pool_rows += more

    def _keep(self, pages: dict[str, Pages], arrays: dict[str, npt.NDArray[Any]], addresses: Int64Array) -> None:
        """Have the arrays that were moved to, if that is what the header names by now, or else the earlier ones."""
        if self.header[POOL_NODES] == addresses[0]:
            self._pages = pages
            for name, array in arrays.items():
                setattr(self, name, array)

    def forget(self) -> None:
        """Become empty, but keep the arrays."""
        self.table[:] = EMPTY_SLOT
        for field in (POOL_USED, POOL_NUM_FREE, POOL_NUM_NODES, POOL_NUM_ROOTS, POOL_NUM_SUFFIXES, POOL_SUFFIX_USED):
            self.header[field] = 0
        self.header[POOL_FREE] = self.header[POOL_SUFFIX_FREE] = -1
        self.header[POOL_FIRST_ROOT] = NONE

    def grow_suffixes(self, missing: int) -> None:
        """Make room for `missing` more partial suffixes than are free now."""
        rows = int(self.header[POOL_SUFFIX_ROWS])
        rows = max(rows + missing, int(rows * _GROWTH), min(_FIRST_TOKENS // self.block_size, 16))
        try:
            _resize(self.suffixes, rows)
            _resize(self.suffix_tokens, rows)
        finally:
            try:
                self._publish_suffixes()
            except BaseException:
                self._publish_suffixes()
                raise

    def _publish_suffixes(self) -> None:
        capacity = min(self.suffixes.shape[0], self.suffix_tokens.shape[0])
        arrays = {POOL_SUFFIXES: self.suffixes, POOL_SUFFIX_TOKENS: self.suffix_tokens}
        _publish(self.header, arrays, {POOL_SUFFIX_ROWS: capacity})

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Every array of this pool by name, its header included."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in ("shared", "address", "_pages")}

    def stored(self) -> tuple[UInt32Array, UInt32Array]:
        """Every block stored, those of partial suffixes after the others, and every disk id."""
        used = self.header[POOL_USED]
        is_node = self.nodes["parent"][:used] < ROOT
        suffixes = self.suffixes[: self.header[POOL_SUFFIX_USED]]
        suffixes = suffixes[suffixes["node"] != NONE]
        disks = [self.disks[: self.header[POOL_DISK_ROWS]][:used], suffixes["disk"]]
        if disks[0].size:
            disks[0] = disks[0][is_node]
        all_disks = np.concatenate(disks)
        return np.concatenate([self.nodes["block"][:used][is_node], suffixes["block"]]), all_disks[all_disks != NONE]

    def state(self, rehash: Rehash) -> dict[str, npt.NDArray[np.generic]]:
        """Copies of the arrays, to what is used of them."""
        used = self.header[POOL_USED]
        suffixes_used = self.header[POOL_SUFFIX_USED]
        table: UInt64Array = np.full(table_size(int(used)), EMPTY_SLOT, np.uint64)
        rehash(self.table, table)
        return {
            "header": self.header.copy(),
            "nodes": self.nodes[:used].copy(),
            "links": self.links[:used].copy(),
            "tokens": self.tokens[:used].copy(),
            "disks": self.disks[: self.header[POOL_DISK_ROWS]][:used].copy(),
            "table": table,
            "suffixes": self.suffixes[:suffixes_used].copy(),
            "suffix_tokens": self.suffix_tokens[:suffixes_used].copy(),
        }

    def restore(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Become the pool that :meth:`state` was taken of."""
        header = self.header
        for field in _POOL_KEPT:
            header[field] = state["header"][field]
        self._pages = _pool_pages(state["nodes"].shape[0], self.block_size)
        self._view_pages()
        for name, field in _POOL_ARRAYS.items():
            if name in self._pages:
                getattr(self, name)[...] = state[name]
            else:
                setattr(self, name, state[name].copy())
            header[field] = address_of(getattr(self, name))
        header[POOL_ROWS] = header[POOL_USED] = self.nodes.shape[0]
        header[POOL_DISK_ROWS] = self.disks.shape[0]
        header[POOL_TABLE_SIZE] = self.table.shape[0]
        header[POOL_SUFFIX_ROWS] = header[POOL_SUFFIX_USED] = self.suffixes.shape[0]


class IndexArrays:
    """The entries of the snapshot index, dense and in order, and what finds them.

    Parameters
    ----------
    powers, multiplier
        As for :class:`SharedArrays`.
    block_size : int
        The cache's default, whose nodes bear the marks of snapshots.
    tail_protect, tail_lease_ttl, evict_legacy, hermetic
        Settings that kernels read.
    """

    __slots__ = (
        "checks",
        "depth_bits",
        "depth_counts",
        "entries",
        "floor_table",
        "floors",
        "header",
        "keys",
        "powers",
        "residents",
        "sessions",
    )
    keys: UInt64Array
    checks: UInt64Array
    sessions: UInt64Array
    floor_table: UInt64Array

    def __init__(
        self,
        powers: UInt64Array,
        multiplier: int,
        *,
        block_size: int,
        tail_protect: bool,
        tail_lease_ttl: int,
        evict_legacy: bool,
        hermetic: bool,
    ) -> None:
        self.entries = np.zeros(0, ENTRY)
        self.residents: UInt32Array = np.zeros(0, np.uint32)
        self.floors = np.zeros(0, FLOOR)
        self.depth_counts: UInt32Array = np.zeros(DEPTH_CLASSES, np.uint32)
        self.depth_bits: UInt64Array = np.zeros(DEPTH_CLASSES // 64, np.uint64)
        self.powers = powers
        self.header: Int64Array = np.zeros(INDEX_FIELDS, np.int64)
        header = self.header
        for name, field in _INDEX_TABLES.items():
            table = _index_table(name, 0)
            setattr(self, name, table)
            header[field] = address_of(table)
        header[INDEX_TABLE_SIZE] = self.keys.shape[0]
        header[INDEX_FLOOR_TABLE_SIZE] = self.floor_table.shape[0]
        header[INDEX_FLOORS_FREE] = -1
        header[INDEX_GRID] = block_size if block_size <= LARGEST_GRID else 0
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
        old_tables: dict[str, UInt64Array] = {name: getattr(self, name) for name in _INDEX_TABLES}
        tables = old_tables
        capacity = int(self.header[INDEX_ROWS])
        try:
            for array in (self.entries, self.residents, self.floors):
                _resize(array, rows)
            grown: dict[str, UInt64Array] = {}
            for name, old_table in old_tables.items():
                grown[name] = _index_table(name, rows)
                rehash(old_table, grown[name])
            tables = grown
            capacity = rows
        finally:
            try:
                self._publish_entries(tables, capacity)
            except BaseException:
                self._publish_entries(tables, capacity)
                raise

    def _publish_entries(self, others: Mapping[str, npt.NDArray[Any]], rows: int) -> None:
        """Have other arrays in place of some, and tell the kernels where all are, of which `rows` may be used."""
        for name, array in others.items():
            setattr(self, name, array)
        arrays = {field: getattr(self, name) for name, field in _INDEX_ARRAYS.items()}
        _publish(self.header, arrays, {**self._table_sizes(), INDEX_ROWS: rows})

    def compact(self, rehash: Rehash) -> None:
        """Give back the room beyond the entries that there are."""
        header = self.header
        used = int(header[INDEX_SIZE])
        rows = max(used, int(header[INDEX_FLOORS_USED]))
        arrays: dict[str, npt.NDArray[Any]] = {
            "entries": self.entries[:rows].copy(),
            "residents": self.residents[:rows].copy(),
            "floors": self.floors[:rows].copy(),
        }
        for name in _INDEX_TABLES:
            arrays[name] = _index_table(name, rows)
            rehash(getattr(self, name), arrays[name])
        try:
            self._publish_entries(arrays, rows)
        except BaseException:
            self._publish_entries(arrays, rows)
            raise

    def _table_sizes(self) -> dict[int, int]:
        return {INDEX_TABLE_SIZE: self.keys.shape[0], INDEX_FLOOR_TABLE_SIZE: self.floor_table.shape[0]}

    def clear(self) -> None:
        """Remove every entry; clock, counters and settings stay, the lease ends."""
        for name in _INDEX_TABLES:
            getattr(self, name)[:] = EMPTY_SLOT
        self.depth_counts[:] = 0
        self.depth_bits[:] = 0
        for field in (INDEX_SIZE, INDEX_NUM_RESIDENTS, INDEX_LEASED_SESSION, INDEX_FLOORS_USED, INDEX_NUM_FLOORS):
            self.header[field] = 0
        self.header[INDEX_FLOORS_FREE] = -1

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Copies of the arrays, to what is used of them."""
        header = self.header
        used = {"entries": INDEX_SIZE, "residents": INDEX_NUM_RESIDENTS, "floors": INDEX_FLOORS_USED}
        return {
            "header": header.copy(),
            **{
                name: getattr(self, name)[: header[used[name]] if name in used else None].copy()
                for name in _INDEX_ARRAYS
            },
        }

    def restore(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Become the index that :meth:`state` was taken of; settings stay."""
        header = self.header
        for field in _INDEX_KEPT:
            header[field] = state["header"][field]
        header[INDEX_SIZE] = state["entries"].shape[0]
        header[INDEX_NUM_RESIDENTS] = state["residents"].shape[0]
        header[INDEX_FLOORS_USED] = state["floors"].shape[0]
        # There may have been more floors once than there are entries now.
        rows = max(state["entries"].shape[0], state["floors"].shape[0])
        for name, field in _INDEX_ARRAYS.items():
            array = state[name].copy()
            if name in ("entries", "residents", "floors"):
                _resize(array, rows)
            setattr(self, name, array)
            header[field] = address_of(array)
        header[INDEX_ROWS] = rows
        for field, size in self._table_sizes().items():
            header[field] = size

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Every array of the index by name, its header included."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "powers"}
