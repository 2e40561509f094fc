"""The cache: :class:`RadixTree` checks its arguments, takes its lock, calls a kernel and builds the result.

No algorithm lives here. How a chunk is found, what is evicted next and which snapshot is deepest is in
:mod:`metrale_numba.kernels`, which is compiled, or loaded from disk, when the first cache is made.
"""

from __future__ import annotations

import hashlib
import os
import threading

import numpy as np

from metrale_numba import metrics
from metrale_numba.arguments import (
    as_block_size,
    as_block_table,
    as_check,
    as_count,
    as_disk_block_ids,
    as_matched_tokens,
    as_slot,
    as_tokens,
    as_u64,
    check_block_table,
)
from metrale_numba.errors import IntegrityError
from metrale_numba.interface import (
    EMPTY_IDS,
    NONE,
    EvictedBlocks,
    Ids,
    IdSequence,
    InsertAcquired,
    PrefixCache,
    PrefixMatch,
    SnapshotStats,
    StatsDetail,
    TierEvict,
    Tokens,
)
from metrale_numba.kernels import layout
from metrale_numba.kernels.compile import kernels
from metrale_numba.kernels.layout import PoolArrays
from metrale_numba.settings import Settings, resolve
from metrale_numba.snapshot_index import SnapshotIndex, to_signed, to_unsigned

# What kernels get for an array that this call has no use for: they refuse the read-only EMPTY_IDS.
_NO_ROOM = np.empty(0, np.uint32)
_SECRET_BYTES = 32
_PERSON = b"metrale.check.v1"


def _hash_keys(secret: bytes | None) -> tuple[int, int]:
    """The base of the check hash and the multiplier that places hashes in tables, derived or drawn anew."""
    seed = os.urandom(_SECRET_BYTES) if secret is None else secret
    digest = hashlib.blake2b(seed, digest_size=24, person=_PERSON).digest()
    # 128 bits modulo a 64-bit number are even enough; 0 and 1 would make a polynomial blind.
    base = 2 + int.from_bytes(digest[:16], "little") % (2**64 - 59 - 2)
    return base, int.from_bytes(digest[16:], "little") | 1


class RadixTree(PrefixCache):
    """A prefix cache: a forest of KV blocks for each adapter and block size, and an index of recurrent-state snapshots.

    Any number of threads may call any method at any time; each call is one atomic step. Every method's contract
    is in :class:`PrefixCache`; :ref:`protocol` says in which order a serving engine calls them.

    Parameters
    ----------
    partial_tail_sharing : bool, optional
        Whether a look-up may match into a block. Default: ``METRALE_PREFIX_SUBBLOCK``, or off.
    tail_protect : bool, optional
        Whether the tails of the session that looked up last are passed over when a snapshot is evicted.
        Default: on, unless ``METRALE_DISABLE_SSM_TAIL_PROTECT`` turns it off.
    tail_lease_ttl : int, optional
        For how many evictions they are. Default: ``METRALE_SSM_TAIL_LEASE_TTL``, or 64.
    evict_alpha : float, optional
        Weight of a snapshot's depth against its age, 0 to 8. Default: ``METRALE_SNAP_EVICT_ALPHA``, or 0.
    evict_legacy : bool, optional
        Whether :meth:`evict_snapshot_lru` takes the oldest snapshot and nothing else counts.
        Default: on if ``METRALE_SNAP_EVICT_LEGACY`` is set.
    hermetic : bool, optional
        Whether a session finds its own snapshots only. Default: ``METRALE_HERMETIC``, or off.
    adopt_blocks : bool, optional
        Whether an insert lets an existing node take over the sequence's block. Default: ``METRALE_ADOPT_BLOCKS``,
        or off.
    block_size : int, optional
        Tokens per block, where a call does not say. Default: 16.
    check_secret : bytes, optional
        Derives the key of the check hash, so that replicas agree on check hashes. Default: a random key.

    Raises
    ------
    TypeError, ValueError
        If a setting is not what it should be. A variable that is not is logged, and the default holds.
    """

    def __init__(
        self,
        *,
        partial_tail_sharing: bool | None = None,
        tail_protect: bool | None = None,
        tail_lease_ttl: int | None = None,
        evict_alpha: float | None = None,
        evict_legacy: bool | None = None,
        hermetic: bool | None = None,
        adopt_blocks: bool | None = None,
        block_size: int | None = None,
        check_secret: bytes | None = None,
    ) -> None:
        settings = resolve(
            partial_tail_sharing=partial_tail_sharing,
            tail_protect=tail_protect,
            tail_lease_ttl=tail_lease_ttl,
            evict_alpha=evict_alpha,
            evict_legacy=evict_legacy,
            hermetic=hermetic,
            adopt_blocks=adopt_blocks,
            block_size=block_size,
            check_secret=check_secret,
        )
        self._settings = settings
        self._kernels = kernels("cache")
        base, multiplier = _hash_keys(settings.check_secret)
        powers = np.empty(layout.CHECK_GROUP + 1, np.uint64)
        self._kernels["fill_powers"](np.uint64(base), powers)
        self._shared = layout.SharedArrays(
            powers,
            multiplier,
            partial_tail_sharing=settings.partial_tail_sharing,
            adopt_blocks=settings.adopt_blocks,
        )
        self._index = SnapshotIndex(settings, powers, multiplier, self._kernels)
        self._shared.header[layout.SHARED_INDEX] = layout.address_of(self._index.arrays.header)
        self._pools = self._shared.pools
        # Whether a disk id was ever stored: until then no call makes room for any.
        self._has_disk_ids = False
        self._lock = threading.Lock()
        metrics.register(self, self._shared.header[: metrics.NUM_COUNTERS])

    @property
    def settings(self) -> Settings:
        """The settings that hold, keywords and environment resolved."""
        return self._settings

    @property
    def block_size(self) -> int:
        """Tokens per block where a call does not say."""
        return self._settings.block_size

    def __repr__(self) -> str:
        detail = self.stats_detail()
        return (
            f"<{type(self).__name__}: {detail.num_blocks} blocks, {self.snapshot_count()} snapshots, "
            f"block_size={self.block_size}>"
        )

    def lookup(
        self, tokens: Tokens, block_size: int | None = None, session_hash: int = 0, adapter_id: int = 0
    ) -> PrefixMatch:
        tokens = as_tokens(tokens)
        block_size = as_block_size(block_size, self._settings.block_size)
        session = to_signed(as_u64(session_hash, "session_hash"))
        adapter = to_signed(as_u64(adapter_id, "adapter_id"))
        room = tokens.size // block_size
        if self._settings.partial_tail_sharing and tokens.size % block_size:
            room += 1
        blocks = np.empty(room, np.uint32)
        with self._lock:
            disks = np.empty(room, np.uint32) if self._has_disk_ids else _NO_ROOM
            pool = self._pools.get(block_size)
            if pool is None:
                self._shared.header[layout.SHARED_MISSES] += 1
                return PrefixMatch()
            found = self._kernels["lookup"](pool.header, tokens, blocks, disks, session, adapter)
        return self._match(blocks, disks, *found)

    def _match(
        self,
        blocks: Ids,
        disks: Ids,
        num_blocks: int,
        matched_tokens: int,
        any_disk: int,
        slot: int,
        depth: int,
        flags: int,
        key: int,
        check: int,
    ) -> PrefixMatch:
        if matched_tokens == 0:
            return PrefixMatch()
        blocks = blocks[:num_blocks]
        disks = disks[:num_blocks] if any_disk else EMPTY_IDS
        if flags < 0:
            return PrefixMatch(blocks, disks, matched_tokens)
        is_tail = flags & layout.TAIL != 0
        check = to_unsigned(check)
        if flags & layout.SPILLED:
            key = to_unsigned(key)
            return PrefixMatch(blocks, disks, matched_tokens, None, 0, key, depth, is_tail, check)
        return PrefixMatch(blocks, disks, matched_tokens, slot, depth, None, 0, is_tail, check)

    def peek_matched_tokens(self, tokens: Tokens, block_size: int | None = None, adapter_id: int = 0) -> int:
        tokens = as_tokens(tokens)
        block_size = as_block_size(block_size, self._settings.block_size)
        adapter = to_signed(as_u64(adapter_id, "adapter_id"))
        with self._lock:
            pool = self._pools.get(block_size)
            if pool is None:
                return 0
            matched_tokens: int = self._kernels["peek"](pool.header, tokens, adapter)
            return matched_tokens

    def pin_prefix(self, tokens: Tokens, block_size: int | None = None, adapter_id: int = 0) -> int:
        tokens = as_tokens(tokens)
        block_size = as_block_size(block_size, self._settings.block_size)
        adapter = to_signed(as_u64(adapter_id, "adapter_id"))
        path = np.empty(tokens.size // block_size, np.uint32)
        with self._lock:
            pool = self._pools.get(block_size)
            if pool is None:
                return 0
            matched_tokens: int = self._kernels["pin"](pool.header, tokens, path, adapter)
            return matched_tokens

    def insert(
        self,
        tokens: Tokens,
        block_table: IdSequence,
        disk_block_ids: IdSequence = (),
        block_size: int | None = None,
        matched_tokens: int = 0,
        adapter_id: int = 0,
    ) -> InsertAcquired:
        tokens = as_tokens(tokens)
        block_table = as_block_table(block_table)
        disk_block_ids = as_disk_block_ids(disk_block_ids, block_table)
        block_size = as_block_size(block_size, self._settings.block_size)
        try:
            matched_tokens = as_matched_tokens(matched_tokens, tokens.size)
            adapter_id = as_u64(adapter_id, "adapter_id")
        except (TypeError, ValueError):
            # The kernel looks for NONE, faster than this can; but of two faults the first in the signature is told.
            check_block_table(block_table, tokens.size, block_size)
            raise
        with self._lock:
            return self._insert(tokens, block_table, disk_block_ids, block_size, matched_tokens, adapter_id)

    def _insert(
        self,
        tokens: Ids,
        block_table: Ids,
        disk_block_ids: Ids,
        block_size: int,
        matched_tokens: int,
        adapter_id: int,
    ) -> InsertAcquired:
        count = min(tokens.size // block_size, block_table.size)
        if count == 0:
            self._shared.header[layout.SHARED_CLOCK] += 1
            return InsertAcquired()
        pool = self._pools.get(block_size)
        if pool is None:
            # Refused here, no pool is made for nothing; where there is one, the kernel looks.
            check_block_table(block_table, tokens.size, block_size)
            pool = self._shared.add_pool(block_size)
        blocks = np.empty(count + 1, np.uint32)
        disks = np.empty(count + 1, np.uint32) if disk_block_ids.size else _NO_ROOM
        released = np.empty(count, np.uint32) if self._settings.adopt_blocks else _NO_ROOM
        arguments = (tokens, block_table, disk_block_ids, blocks, disks, released)
        adapter = to_signed(adapter_id)
        num_blocks, num_disks, num_released, suffix_block, suffix_disk = self._insert_growing(
            pool, block_size, arguments, matched_tokens, adapter
        )
        if num_disks:
            self._has_disk_ids = True
        released_blocks = released[:num_released] if num_released else EMPTY_IDS
        if suffix_block != NONE:
            released_blocks = np.append(released_blocks, np.uint32(suffix_block))
        return InsertAcquired(
            disks[:num_disks] if num_disks else EMPTY_IDS,
            blocks[:num_blocks] if num_blocks else EMPTY_IDS,
            released_blocks,
            np.array([suffix_disk], np.uint32) if suffix_disk != NONE else EMPTY_IDS,
        )

    def _insert_growing(
        self, pool: PoolArrays, block_size: int, arguments: tuple[Ids, ...], matched_tokens: int, adapter: int
    ) -> tuple[int, ...]:
        """Call the kernel, which changes nothing while room is missing, and make that room, until it is done."""
        try:
            while True:
                status, number, *rest = self._kernels["insert"](pool.header, *arguments, matched_tokens, adapter)
                if status == layout.DONE:
                    return number, *rest
                if status == layout.BAD_BLOCK:
                    tokens, block_table = arguments[:2]
                    check_block_table(block_table, tokens.size, block_size)
                elif status == layout.SHORT_OF_ROWS:
                    pool.grow(number, self._kernels["rehash"])
                else:
                    pool.grow_suffixes(number)
        except MemoryError:
            self._drop_pool_if_empty(pool)
            raise

    def _drop_pool_if_empty(self, pool: PoolArrays) -> None:
        if pool.header[layout.POOL_NUM_NODES] == 0:
            self._shared.drop_pool(pool.block_size)

    def insert_with_snapshot(
        self,
        tokens: Tokens,
        block_table: IdSequence,
        disk_block_ids: IdSequence,
        block_size: int | None,
        snapshot_id: int,
        session_hash: int = 0,
        matched_tokens: int = 0,
        adapter_id: int = 0,
    ) -> tuple[int | None, InsertAcquired]:
        tokens = as_tokens(tokens)
        block_table = as_block_table(block_table)
        disk_block_ids = as_disk_block_ids(disk_block_ids, block_table)
        block_size = as_block_size(block_size, self._settings.block_size)
        check_block_table(block_table, tokens.size, block_size)
        slot = as_slot(snapshot_id)
        session = to_signed(as_u64(session_hash, "session_hash"))
        matched_tokens = as_matched_tokens(matched_tokens, tokens.size)
        adapter_id = as_u64(adapter_id, "adapter_id")
        with self._lock:
            self._index.reserve_entry()
            acquired = self._insert(tokens, block_table, disk_block_ids, block_size, matched_tokens, adapter_id)
            adapter = to_signed(adapter_id)
            return self._index.register(tokens, slot, session, adapter, sibling=False), acquired

    def insert_intermediate_snapshot(
        self,
        tokens: Tokens,
        block_table: IdSequence,
        disk_block_ids: IdSequence,
        block_size: int | None,
        snapshot_id: int,
        session_hash: int = 0,
        matched_tokens: int = 0,
        adapter_id: int = 0,
    ) -> int | None:
        tokens = as_tokens(tokens)
        block_table = as_block_table(block_table)
        as_disk_block_ids(disk_block_ids, block_table)
        block_size = as_block_size(block_size, self._settings.block_size)
        check_block_table(block_table, tokens.size, block_size)
        slot = as_slot(snapshot_id)
        session = to_signed(as_u64(session_hash, "session_hash"))
        as_matched_tokens(matched_tokens, tokens.size)
        adapter = to_signed(as_u64(adapter_id, "adapter_id"))
        with self._lock:
            return self._index.register(tokens, slot, session, adapter, sibling=False)

    def insert_tail_snapshot(
        self, tokens: Tokens, snapshot_id: int, session_hash: int = 0, adapter_id: int = 0
    ) -> list[int]:
        tokens = as_tokens(tokens)
        slot = as_slot(snapshot_id)
        session = to_signed(as_u64(session_hash, "session_hash"))
        adapter = to_signed(as_u64(adapter_id, "adapter_id"))
        with self._lock:
            return self._index.register_tail(tokens, slot, session, adapter)

    def insert_tail_sibling_snapshot(
        self, tokens: Tokens, snapshot_id: int, session_hash: int = 0, adapter_id: int = 0
    ) -> int | None:
        tokens = as_tokens(tokens)
        slot = as_slot(snapshot_id)
        session = to_signed(as_u64(session_hash, "session_hash"))
        adapter = to_signed(as_u64(adapter_id, "adapter_id"))
        with self._lock:
            return self._index.register(tokens, slot, session, adapter, sibling=True)

    def release(self, tokens: Tokens, block_size: int | None = None, adapter_id: int = 0) -> None:
        tokens = as_tokens(tokens)
        block_size = as_block_size(block_size, self._settings.block_size)
        adapter = to_signed(as_u64(adapter_id, "adapter_id"))
        self._release(tokens, block_size, tokens.size, adapter)

    def release_matched(self, tokens: Tokens, block_size: int | None, matched_tokens: int, adapter_id: int = 0) -> None:
        tokens = as_tokens(tokens)
        block_size = as_block_size(block_size, self._settings.block_size)
        matched_tokens = as_matched_tokens(matched_tokens, tokens.size)
        adapter = to_signed(as_u64(adapter_id, "adapter_id"))
        self._release(tokens, block_size, matched_tokens, adapter)

    def _release(self, tokens: Ids, block_size: int, num_tokens: int, adapter: int) -> None:
        with self._lock:
            pool = self._pools.get(block_size)
            if pool is not None:
                self._kernels["release"](pool.header, tokens, num_tokens, adapter)

    def evict(self, num_blocks: int) -> EvictedBlocks:
        num_blocks = as_count(num_blocks, "num_blocks")
        with self._lock:
            header = self._shared.header
            stored = int(header[layout.SHARED_NUM_NODES] + header[layout.SHARED_NUM_SUFFIXES])
            # One more than asked: the last leaf's partial suffix goes with it.
            room = min(num_blocks, stored) + 1
            blocks = np.empty(room, np.uint32)
            disks = np.empty(room, np.uint32) if self._has_disk_ids else _NO_ROOM
            num_out, num_disks, num_emptied = self._kernels["evict"](header, num_blocks, blocks, disks)
            if num_emptied:
                for pool in list(self._pools.values()):
                    if pool.block_size != self._settings.block_size:
                        self._drop_pool_if_empty(pool)
        return EvictedBlocks(blocks[:num_out] if num_out else EMPTY_IDS, disks[:num_disks] if num_disks else EMPTY_IDS)

    def evict_snapshot_lru(self) -> int | None:
        with self._lock:
            return self._index.evict_lru()

    def evict_snapshot_to_tier(self, min_tokens: int) -> TierEvict | None:
        min_tokens = as_count(min_tokens, "min_tokens")
        with self._lock:
            return self._index.evict_to_tier(min_tokens)

    def evict_snapshot_slot(self, slot: int) -> bool:
        """Remove the resident snapshot in a slot, for an engine that frees a slot of its own choice.

        Changes the snapshot index only. Counts as an eviction in :meth:`snapshot_stats`, but not against a
        session's lease.

        Parameters
        ----------
        slot : int
            The slot, 0..2^63-1. If several entries hold it, the first in the index goes.

        Returns
        -------
        bool
            Whether an entry was removed; its slot is then the caller's.

        Raises
        ------
        TypeError, ValueError
            If `slot` is not a slot; nothing has changed then.
        """
        slot = as_slot(slot, "slot")
        with self._lock:
            return self._index.evict_slot(slot)

    def promote_snapshot(self, key: int, new_slot: int, check: int | None = None) -> bool:
        key = as_u64(key, "key")
        new_slot = as_slot(new_slot, "new_slot")
        check = as_check(check)
        with self._lock:
            return self._index.promote(key, new_slot, check)

    def forget_snapshot_tier_key(self, key: int) -> bool:
        key = as_u64(key, "key")
        with self._lock:
            return self._index.forget(key)

    def snapshot_count(self) -> int:
        with self._lock:
            return len(self._index)

    def stats(self) -> tuple[int, int]:
        with self._lock:
            num_nodes = int(self._shared.header[layout.SHARED_NUM_NODES])
        return num_nodes, num_nodes

    def snapshot_stats(self) -> SnapshotStats:
        """Read the counters of the snapshot index. Changes nothing.

        Returns
        -------
        SnapshotStats
            From the cache's beginning on.
        """
        with self._lock:
            return self._index.stats()

    def stats_detail(self) -> StatsDetail:
        """Read the counters and sizes of the tree, in one step. Changes nothing.

        Returns
        -------
        StatsDetail
            Counters from the cache's beginning on, sizes as they are now.
        """
        with self._lock:
            header: list[int] = self._shared.header.tolist()
        return StatsDetail(
            cache_hits=header[layout.SHARED_HITS],
            cache_misses=header[layout.SHARED_MISSES],
            cache_hit_tokens=header[layout.SHARED_HIT_TOKENS],
            over_releases=header[layout.SHARED_OVER_RELEASES],
            num_blocks=header[layout.SHARED_NUM_NODES],
            num_suffix_blocks=header[layout.SHARED_NUM_SUFFIXES],
            clock=header[layout.SHARED_CLOCK],
        )

    def check_integrity(self) -> None:
        """Recount everything that is derived, in one pass over the cache, and compare.

        Links between nodes, counts, both hashes of every prefix, the hash tables, the order of eviction, the list
        of resident snapshots and the filter of their depths. Changes nothing; meant for tests and for a
        caller in doubt, since it takes time in proportion to the cache and holds the lock.

        Raises
        ------
        IntegrityError
            Naming the first fault found: a defect of this package, or memory that something else wrote over.
        """
        checks = kernels("integrity")
        with self._lock:
            header = self._shared.header
            num_nodes = num_suffixes = num_candidates = 0
            for pool in self._pools.values():
                fault, where, candidates = checks["check_pool"](pool.header)
                if fault:
                    raise IntegrityError(f"blocks of {pool.block_size} tokens: {layout.FAULTS[fault]} (at {where})")
                num_nodes += int(pool.header[layout.POOL_NUM_NODES])
                num_suffixes += int(pool.header[layout.POOL_NUM_SUFFIXES])
                num_candidates += candidates
            fault, where = checks["check_heap"](header, num_candidates)
            if fault:
                raise IntegrityError(f"candidates for eviction: {layout.FAULTS[fault]} (at {where})")
            if num_nodes != header[layout.SHARED_NUM_NODES] or num_suffixes != header[layout.SHARED_NUM_SUFFIXES]:
                raise IntegrityError(
                    f"the cache counts {header[layout.SHARED_NUM_NODES]} blocks and "
                    f"{header[layout.SHARED_NUM_SUFFIXES]} partial suffixes, but stores {num_nodes} and {num_suffixes}"
                )
            self._index.check_integrity(checks)
