"""What a cache remembers of what it gave up, so that :meth:`RadixTree.explain` can tell why something is missing.

:class:`Ghosts` keeps the blocks that were evicted last, :class:`LostSnapshots` the snapshots. Both are used by
:class:`~metrale_numba.radix_tree.RadixTree` alone, under its lock, and exist only in a cache that was made with
``ghosts=``: another one never comes here. No answer of any other call depends on them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from metrale_numba.errors import IntegrityError
from metrale_numba.interface import Ids
from metrale_numba.kernels.arrays import IndexArrays, Int64Array, SharedArrays, UInt64Array, address_of, table_size
from metrale_numba.kernels.layout import (
    EMPTY_SLOT,
    FAULTS,
    GHOST,
    GHOSTS_CAPACITY,
    GHOSTS_COUNT,
    GHOSTS_FIELDS,
    GHOSTS_LOST,
    GHOSTS_MULTIPLIER,
    GHOSTS_ROWS,
    GHOSTS_SIZE,
    GHOSTS_TABLE,
    GHOSTS_TABLE_SIZE,
    INDEX_SIZE,
    POOL_NUM_FREE,
    POOL_NUMBER,
    SHARED_CLOCK,
    SHARED_MULTIPLIER,
    SHARED_NUM_NODES,
    SHARED_NUM_POOLS,
    SIBLING,
    TAIL,
)

_Answer = TypeVar("_Answer")
# What is remembered of the ghosts beside their rows and table; addresses and sizes are those of the copy.
_KEPT = (GHOSTS_COUNT, GHOSTS_SIZE, GHOSTS_LOST)


class Ghosts:
    """The last evicted blocks of a cache: what each was, when it went, and whether for its own adapter alone.

    A block that is inserted again has no ghost from then on; any other is forgotten after as many evictions as there
    is room for.

    Parameters
    ----------
    capacity : int
        Evictions to remember, at least 1.
    shared : SharedArrays
        Of the cache.
    lost_snapshots : LostSnapshots
        What goes and comes with the ghosts.
    cache_kernels, kernels : mapping
        The compiled kernels of the groups "cache" and "ghosts".
    """

    __slots__ = ("_evict", "_insert", "_kernels", "_shared", "header", "lost_snapshots", "rows", "table")

    def __init__(
        self,
        capacity: int,
        shared: SharedArrays,
        lost_snapshots: LostSnapshots,
        cache_kernels: Mapping[str, Callable[..., Any]],
        kernels: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._shared = shared
        self._insert = cache_kernels["insert"]
        self._evict = cache_kernels["evict"]
        self._kernels = kernels
        self.rows: npt.NDArray[Any] = np.zeros(capacity, GHOST)
        self.table: UInt64Array = np.empty(table_size(capacity), np.uint64)
        self.header: Int64Array = np.zeros(GHOSTS_FIELDS, np.int64)
        self.header[GHOSTS_ROWS] = address_of(self.rows)
        self.header[GHOSTS_CAPACITY] = capacity
        self.header[GHOSTS_TABLE] = address_of(self.table)
        self.header[GHOSTS_TABLE_SIZE] = self.table.size
        self.header[GHOSTS_MULTIPLIER] = shared.header[SHARED_MULTIPLIER]
        self.lost_snapshots = lost_snapshots
        self.clear()

    @property
    def count(self) -> int:
        """Blocks evicted since the cache began."""
        return int(self.header[GHOSTS_COUNT])

    @property
    def are_complete(self) -> bool:
        """Whether every block that was evicted and is not cached again is remembered."""
        return not self.header[GHOSTS_LOST]

    def insert(
        self,
        address: int,
        tokens: Ids,
        block_table: Ids,
        disk_block_ids: Ids,
        out: Ids,
        matched_tokens: int,
        adapter: int,
    ) -> Any:
        """Call the kernel of this name, and drop the ghosts of the blocks that it added."""
        # A second walk must see what was stored, whatever another thread does to the caller's array meanwhile.
        tokens = tokens.copy()
        before = int(self._shared.header[SHARED_NUM_NODES])
        try:
            return self._insert(address, tokens, block_table, disk_block_ids, out, matched_tokens, adapter)
        finally:
            try:
                self._forget_new(address, tokens, before, adapter)
            except BaseException:
                self._forget_new(address, tokens, before, adapter)
                raise

    def _forget_new(self, address: int, tokens: Ids, before: int, adapter: int) -> None:
        num_new = int(self._shared.header[SHARED_NUM_NODES]) - before
        if num_new and self.header[GHOSTS_SIZE]:
            self._kernels["forget_new"](address, tokens, num_new, adapter, self.header)

    def evict(self, address: int, num_blocks: int, blocks_out: Ids, disks_out: Ids) -> Any:
        """Call the kernel of this name, and remember what it evicts."""
        return self.watch(lambda: self._evict(address, num_blocks, blocks_out, disks_out), by_adapter=False)

    def watch(self, evict: Callable[[], _Answer], *, by_adapter: bool) -> _Answer:
        """Make a call that evicts, for one adapter's sake or for the whole cache, and remember what goes."""
        num_pools = int(self._shared.header[SHARED_NUM_POOLS])
        free: Int64Array = np.zeros(num_pools, np.int64)
        cursors: Int64Array = np.empty(2 * num_pools, np.int64)
        for pool in self._shared.pools.values():
            free[pool.header[POOL_NUMBER]] = pool.header[POOL_NUM_FREE]
        arguments = (self._shared.header, free, cursors, self.header, int(by_adapter))
        try:
            return evict()
        finally:
            try:
                self._kernels["remember"](*arguments)
            except BaseException:
                self._kernels["remember"](*arguments)
                raise

    def find(self, states: UInt64Array, block_size: int) -> npt.NDArray[Any]:
        """Give the ghosts of the prefixes with these check hashes, up to the first that has none."""
        places: Int64Array = np.empty(states.size, np.int64)
        self._kernels["find_ghosts"](self.header, states, block_size, places)
        missing = np.flatnonzero(places < 0)
        found = self.rows[places[: missing[0] if missing.size else None]]
        return found

    def num_since(self, number: int, adapter: int | None) -> int:
        """Count the ghosts that are as young as the one with a number, or younger; of one adapter, or of all."""
        is_since = self.rows["number"] >= number
        if adapter is not None:
            is_since &= self.rows["adapter"] == np.uint64(adapter)
        return int(np.count_nonzero(is_since))

    def clear(self) -> None:
        """Forget everything but how much was evicted."""
        self.table[:] = EMPTY_SLOT
        self.rows["number"] = -1
        self.header[GHOSTS_SIZE] = 0
        self.lost_snapshots.by_key.clear()

    def drop_adapter(self, adapter: int) -> None:
        """Forget what was an adapter's; the id has the bits of an int64."""
        self._kernels["forget_adapter"](self.header, adapter)
        self.lost_snapshots.drop_adapter(adapter % 2**64)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Every array by name, the header included."""
        return {"header": self.header, "rows": self.rows, "table": self.table}

    def state(self) -> dict[str, Any]:
        """Copies of everything."""
        arrays = {name: array.copy() for name, array in self.arrays().items()}
        return {**arrays, "lost_snapshots": dict(self.lost_snapshots.by_key)}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Become what :meth:`state` was taken of; without it, what was evicted before is known to be unknown."""
        if state is None:
            self.header[GHOSTS_LOST] = 1
            return
        self.rows[:] = state["rows"]
        self.table[:] = state["table"]
        for field in _KEPT:
            self.header[field] = state["header"][field]
        self.lost_snapshots.by_key.update(state["lost_snapshots"])

    def check_integrity(self) -> None:
        """Raise IntegrityError if the ghosts, their table and what is cached do not agree."""
        fault, where = self._kernels["check_ghosts"](self._shared.header, self.header)
        if fault:
            raise IntegrityError(f"{int(self.header[GHOSTS_SIZE])} ghosts: {FAULTS[fault]} (at {where})")


class LostSnapshot(NamedTuple):
    """A snapshot that the index has no more: which it was, why it went, and the cache's clock at that time."""

    check: int
    adapter: int
    depth: int
    session: int
    was_tail: bool
    cause: str
    tick: int


class LostSnapshots:
    """The snapshots that went last, by tier key, oldest first.

    Parameters
    ----------
    capacity : int
        How many to remember.
    header : array of int64
        The shared header, for its clock.
    arrays : IndexArrays
        Of the snapshot index.
    kernels : mapping
        The compiled kernels of the group "cache".
    """

    __slots__ = ("_arrays", "_capacity", "_header", "_kernels", "by_key")

    def __init__(
        self, capacity: int, header: Int64Array, arrays: IndexArrays, kernels: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._capacity = capacity
        self._header = header
        self._arrays = arrays
        self._kernels = kernels
        self.by_key: OrderedDict[int, LostSnapshot] = OrderedDict()

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """Give the kernels of a cache, those that take entries out so that these are remembered."""
        return {
            **self._kernels,
            "evict_lru": partial(self._remove, "evict_lru", "evicted"),
            "evict_slot": partial(self._remove, "evict_slot", "evicted"),
            "evict_to_tier": partial(self._remove, "evict_to_tier", "dropped"),
            "forget": partial(self._remove, "forget", "forgotten"),
            "register_tail": self._register_tail,
        }

    def drop_adapter(self, adapter_id: int) -> None:
        """Forget those of an adapter."""
        for key in [key for key, lost in self.by_key.items() if lost.adapter == adapter_id]:
            del self.by_key[key]

    def _remove(self, kernel: str, cause: str, *arguments: Any) -> Any:
        """Call a kernel that takes out one entry or none."""
        before = self._entries().copy()
        answer = self._kernels[kernel](*arguments)
        after = self._entries()
        if after.size < before.size:
            # The last entry has moved into the place of the one that is gone.
            moved = np.flatnonzero(before["key"][:-1] != after["key"])
            row = int(moved[0]) if moved.size else before.size - 1
            self._remember(before[row : row + 1], cause)
        return answer

    def _register_tail(self, header: Int64Array, tokens: Ids, adapter: int, slot: int, session: int, *out: Any) -> Any:
        """Call the kernel of this name, which takes out the earlier tail and siblings of the session."""
        before = self._entries()
        is_of_session = (before["session"] == np.uint64(session % 2**64)) & (before["flags"] & (TAIL | SIBLING) != 0)
        before = before[is_of_session & (session != 0)].copy()
        answer = self._kernels["register_tail"](header, tokens, adapter, slot, session, *out)
        self._remember(before[~np.isin(before["key"], self._entries()["key"])], "replaced")
        return answer

    def _entries(self) -> npt.NDArray[Any]:
        return self._arrays.entries[: self._arrays.header[INDEX_SIZE]]

    def _remember(self, entries: npt.NDArray[Any], cause: str) -> None:
        tick = int(self._header[SHARED_CLOCK])
        for entry in entries:
            key = int(entry["key"])
            self.by_key.pop(key, None)
            self.by_key[key] = LostSnapshot(
                int(entry["check"]),
                int(entry["adapter"]),
                int(entry["depth"]),
                int(entry["session"]),
                bool(entry["flags"] & TAIL),
                cause,
                tick,
            )
        while len(self.by_key) > self._capacity:
            self.by_key.popitem(last=False)
