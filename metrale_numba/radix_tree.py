"""The cache: :class:`RadixTree` checks its arguments, takes its lock, calls a kernel and builds the result.

No algorithm lives here. How a chunk is found, what is evicted next and which snapshot is deepest is in
:mod:`metrale_numba.kernels`, which is compiled, or loaded from disk, when the first cache is made. What is off the hot
path is in :mod:`metrale_numba.operations`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from metrale_numba.arguments import (
    MAX_INT64,
    as_block_size,
    as_block_table,
    as_bool,
    as_check,
    as_count,
    as_disk_block_ids,
    as_matched_tokens,
    as_slot,
    as_tokens,
    as_u64,
    check_block_table,
)
from metrale_numba.copies import Arrays, read_file
from metrale_numba.errors import CacheFileError, IntegrityError, RefcountError
from metrale_numba.interface import (
    EMPTY_IDS,
    NONE,
    EvictedBlocks,
    Ids,
    IdSequence,
    InsertAcquired,
    PrefixCache,
    PrefixMatch,
    TierEvict,
    Tokens,
)
from metrale_numba.kernels import layout
from metrale_numba.kernels.arrays import PoolArrays
from metrale_numba.kernels.compile import kernels
from metrale_numba.kernels.layout import DONE, RECORD, REFUSED, SPILLED, TAIL, WITH_DISKS
from metrale_numba.operations import NO_ROOM, Operations
from metrale_numba.settings import as_ghosts, as_quotas, as_reserve, resolve
from metrale_numba.snapshot_index import to_signed, to_unsigned

_UINT32 = np.dtype(np.uint32)
# Bound once: the hot path looks up as few names as it can, and none in two steps.
_ndarray = np.ndarray
_int = int
_empty = np.empty
_new = tuple.__new__
_NO_MATCH = PrefixMatch()
_TWO_TO_64 = 1 << 64
# Up to here it takes longer to ask how many blocks there are than to make room for all that are asked for.
_SMALL_ROOM = 8192
_SECRET_BYTES = 32
_PERSON = b"metrale.check.v1"


def _hash_keys(secret: bytes | None) -> tuple[int, int]:
    """The base of the check hash and the multiplier that places hashes in tables, derived or drawn anew."""
    seed = os.urandom(_SECRET_BYTES) if secret is None else secret
    digest = hashlib.blake2b(seed, digest_size=24, person=_PERSON).digest()
    # 128 bits modulo a 64-bit number are even enough; 0 and 1 would make a polynomial blind.
    base = 2 + int.from_bytes(digest[:16], "little") % (2**64 - 59 - 2)
    return base, int.from_bytes(digest[16:], "little") | 1


def _release_too_many(position: int) -> RefcountError:
    return RefcountError(f"block {position - 1} of tokens is held by no sequence, so there is nothing to release")


class RadixTree(Operations, PrefixCache):
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
    strict : bool, default False
        Whether a release that would drop a reference which no sequence holds raises :class:`RefcountError` instead of
        being counted. A release of tokens that are not cached, under another adapter say, is not noticed.
    max_pinned_blocks : int, optional
        Full blocks that all pins together may hold. Default: any number.
    quotas : mapping of int to int, optional
        Full blocks that an adapter may have, by adapter id; see :meth:`set_quota`. Default: none.
    reserve : int, default 0
        Blocks of the default block size for which memory is taken now, about 157 bytes each, so that no insert
        of that block size has to grow an array of the tree up to then. Includes an adapter for each 32 of them, but no
        snapshots, disk ids or partial suffixes. What is reserved stays reserved.
    ghosts : int, default 0
        Evictions to remember, of blocks and of snapshots each, so that :meth:`explain` can tell what was evicted and
        how much more room would have kept it. Takes 72 bytes for each, and some time at evictions and inserts; no
        other answer changes. Default: none, which costs nothing.

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
        strict: bool = False,
        max_pinned_blocks: int | None = None,
        quotas: Mapping[int, int] | None = None,
        reserve: int = 0,
        ghosts: int = 0,
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
            strict=strict,
            max_pinned_blocks=max_pinned_blocks,
            reserve=reserve,
            ghosts=ghosts,
        )
        self._set_up(settings, _hash_keys(settings.check_secret), as_quotas(quotas))
        self._add_default_pool()
        self._go_live()

    @classmethod
    def load(cls, path: str | os.PathLike[str], reserve: int = 0, ghosts: int = 0) -> RadixTree:
        """Read a cache that :meth:`save` wrote; it answers every later call as the saved one would have.

        It has the saved settings, whatever the environment says now, and names the same blocks, slots and keys, so
        the caller restores their pools. Its share of the process-wide counters starts at 0.

        Parameters
        ----------
        path : str or path-like
            The file.
        reserve : int, default 0
            As given to the constructor. It is not saved: another machine has other memory.
        ghosts : int, default 0
            As given to the constructor. Neither it nor what was remembered is saved.

        Returns
        -------
        RadixTree
            A new cache.

        Raises
        ------
        OSError
            If the file cannot be read.
        CacheFileError
            If it is no saved cache, is damaged, or is of another format. Nothing in it is ever executed.
        TypeError, ValueError
            If `path` is no path, or `reserve` or `ghosts` is not what it should be.
        """
        reserve = as_reserve(reserve)
        ghosts = as_ghosts(ghosts)
        meta, arrays = read_file(path)
        return cls._of_parts(path, meta, arrays, reserve, ghosts)

    @classmethod
    def _of_parts(
        cls, path: str | os.PathLike[str], meta: Mapping[str, Any], arrays: Arrays, reserve: int = 0, ghosts: int = 0
    ) -> RadixTree:
        """Make a cache of what a file says, once all of it was checked."""
        cache = cls.__new__(cls)
        cache.__setstate__(cls._state_of_parts(path, meta, arrays, reserve, ghosts))
        try:
            cache.check_integrity()
        except IntegrityError as error:
            raise CacheFileError(f"{os.fspath(path)} is damaged: {error}") from error
        return cache

    def __repr__(self) -> str:
        num_blocks, _ = self.stats()
        return (
            f"<{type(self).__name__}: {num_blocks} blocks, {self.snapshot_count()} snapshots, "
            f"block_size={self.block_size}>"
        )

    def lookup(
        self,
        tokens: Tokens,
        block_size: int | None = None,
        session_hash: int = 0,
        adapter_id: int = 0,
        *,
        record: bool = True,
    ) -> PrefixMatch:
        """Find the longest cached prefix and hold it, as :meth:`PrefixCache.lookup` says.

        Parameters
        ----------
        tokens, block_size, session_hash, adapter_id
            As in :meth:`PrefixCache.lookup`.
        record : bool, default True
            Whether hits, misses and snapshot counters go up, and the session takes the lease. False for a retry or a
            second look at the same request, which must not be counted twice; references and stamps are the same.

        Returns
        -------
        PrefixMatch
            What was found.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """
        # The usual call, whose arguments need no more looking at than this.
        if (
            type(tokens) is _ndarray
            and tokens.dtype is _UINT32
            and tokens.ndim == 1
            and block_size is None
            and record is True
            and type(session_hash) is _int
            and type(adapter_id) is _int
            and not (session_hash | adapter_id) >> 63
        ):
            block_size = self._block_size
            address = self._address
            flags = RECORD
        else:
            tokens = as_tokens(tokens)
            block_size = as_block_size(block_size, self._block_size)
            session_hash = to_signed(as_u64(session_hash, "session_hash"))
            adapter_id = to_signed(as_u64(adapter_id, "adapter_id"))
            flags = RECORD if as_bool(record, "record") else 0
            address = 0
        size = tokens.size
        room = size // block_size
        if self._partial_tail_sharing and size % block_size:
            room += 1
        with self._lock:
            if not address:
                pool = self._pools.get(block_size)
                if pool is None:
                    self._shared.header[layout.SHARED_MISSES] += flags
                    return _NO_MATCH
                address = pool.address
            if self._has_disk_ids:
                blocks = _empty(2 * room, _UINT32)
                flags |= WITH_DISKS
            else:
                blocks = _empty(room, _UINT32)
            num_blocks, matched_tokens, any_disk, slot, depth, entry_flags, key, check = self._lookup_kernel(
                address, tokens, blocks, session_hash, adapter_id, flags
            )
        if matched_tokens <= 0:
            if matched_tokens == REFUSED:
                readable = as_tokens(tokens)
                return self.lookup(readable, session_hash=session_hash, adapter_id=adapter_id)
            return _NO_MATCH
        disks = EMPTY_IDS
        if any_disk:
            disks = blocks[room : room + num_blocks]
        if num_blocks != blocks.size:
            blocks = blocks[:num_blocks]
        if entry_flags < 0:
            return _new(PrefixMatch, (blocks, disks, matched_tokens, None, 0, None, 0, False, None))
        is_tail = entry_flags & TAIL != 0
        if check < 0:
            check += _TWO_TO_64
        if entry_flags & SPILLED:
            key = to_unsigned(key)
            return _new(PrefixMatch, (blocks, disks, matched_tokens, None, 0, key, depth, is_tail, check))
        return _new(PrefixMatch, (blocks, disks, matched_tokens, slot, depth, None, 0, is_tail, check))

    def peek_matched_tokens(self, tokens: Tokens, block_size: int | None = None, adapter_id: int = 0) -> int:
        tokens = as_tokens(tokens)
        block_size = as_block_size(block_size, self._block_size)
        adapter = to_signed(as_u64(adapter_id, "adapter_id"))
        with self._lock:
            pool = self._pools.get(block_size)
            if pool is None:
                return 0
            matched_tokens: int = self._kernels["peek"](pool.header, tokens, adapter)
            return matched_tokens

    def pin_prefix(self, tokens: Tokens, block_size: int | None = None, adapter_id: int = 0) -> int:
        tokens = as_tokens(tokens)
        block_size = as_block_size(block_size, self._block_size)
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
        if (
            type(tokens) is _ndarray
            and tokens.dtype is _UINT32
            and tokens.ndim == 1
            and type(block_table) is _ndarray
            and block_table.dtype is _UINT32
            and block_table.ndim == 1
            and type(disk_block_ids) is tuple
            and not disk_block_ids
            and block_size is None
            and type(matched_tokens) is _int
            and type(adapter_id) is _int
            and not adapter_id >> 63
            and not self._adopt_blocks
        ):
            size = tokens.size
            room = block_table.size
            full = size // self._block_size
            if room > full:
                room = full + 1 if size % self._block_size else full
            if full and room and 0 <= matched_tokens <= size:
                blocks = _empty(room, _UINT32)
                with self._lock:
                    # Where nothing has to grow and no quota holds; else nothing changes here.
                    if not self._quotas:
                        status, num_blocks, _, _, suffix_block, suffix_disk = self._insert_kernel(
                            self._address, tokens, block_table, NO_ROOM, blocks, matched_tokens, adapter_id
                        )
                        if status == DONE:
                            if num_blocks != room:
                                blocks = blocks[:num_blocks] if num_blocks else EMPTY_IDS
                            released = EMPTY_IDS if suffix_block == NONE else np.array([suffix_block], np.uint32)
                            released_disks = EMPTY_IDS if suffix_disk == NONE else np.array([suffix_disk], np.uint32)
                            return _new(InsertAcquired, (EMPTY_IDS, blocks, released, released_disks))
        tokens = as_tokens(tokens)
        block_table = as_block_table(block_table)
        disk_block_ids = as_disk_block_ids(disk_block_ids, block_table)
        block_size = as_block_size(block_size, self._block_size)
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
        if pool is None or adapter_id in self._quotas:
            # Refused here, no pool is made and nothing evicted in vain; elsewhere the kernel looks.
            check_block_table(block_table, tokens.size, block_size)
        if pool is None:
            pool = self._shared.add_pool(block_size)
        adapter = to_signed(adapter_id)
        try:
            if adapter_id not in self._quotas:
                return self._insert_all(pool, tokens, block_table, disk_block_ids, count, matched_tokens, adapter)
            self._end_expired_pins()
            # Several walks must see one sequence, whatever another thread does to the caller's array meanwhile.
            tokens = tokens.copy()
            # The room is made before anything is evicted: a failure must not lose what was.
            self._make_room(pool, tokens, disk_block_ids, count, adapter, self._quotas[adapter_id])
            evicted, count = self._make_quota(pool, tokens, count, adapter, self._quotas[adapter_id])
            fits = block_table[:count] if count < tokens.size // block_size else block_table
            acquired = InsertAcquired()
            if count:
                acquired = self._insert_all(
                    pool, tokens, fits, disk_block_ids[: fits.size], count, matched_tokens, adapter
                )
            else:
                self._shared.header[layout.SHARED_CLOCK] += 1
                self._drop_pool_if_spare(pool)
            return acquired._replace(
                released_blocks=np.concatenate([evicted.physical, acquired.released_blocks]),
                released_disk_block_ids=np.concatenate([evicted.disk_block_ids, acquired.released_disk_block_ids]),
            )
        except BaseException:
            self._drop_pool_if_spare(pool)
            raise

    def _insert_all(
        self,
        pool: PoolArrays,
        tokens: Ids,
        block_table: Ids,
        disk_block_ids: Ids,
        count: int,
        matched_tokens: int,
        adapter: int,
    ) -> InsertAcquired:
        # Disk ids and released blocks, which never come together, take the second half.
        room = count + 1
        halves = 2 if disk_block_ids.size or self._settings.adopt_blocks else 1
        out = np.empty(halves * room, np.uint32)
        had_disk_ids = self._has_disk_ids
        while True:
            # Before the kernel, since an interruption right after it must not leave disk ids that later calls make no
            # room for.
            self._has_disk_ids = had_disk_ids or disk_block_ids.size > 0
            # The kernel changes nothing while room is missing.
            status, number, num_disks, num_released, suffix_block, suffix_disk = self._insert_kernel(
                pool.address, tokens, block_table, disk_block_ids, out, matched_tokens, adapter
            )
            if status == DONE:
                break
            self._has_disk_ids = had_disk_ids
            if status == layout.BAD_BLOCK:
                check_block_table(block_table, tokens.size, pool.block_size)
            elif status == layout.SHORT_OF_ROWS:
                pool.grow(number, self._kernels["rehash"])
            elif status == layout.SHORT_OF_SUFFIXES:
                pool.grow_suffixes(number)
            else:
                pool.add_disks()
        released_blocks = out[room : room + num_released] if num_released else EMPTY_IDS
        if suffix_block != NONE:
            released_blocks = np.append(released_blocks, np.uint32(suffix_block))
        return InsertAcquired(
            out[room : room + num_disks] if num_disks else EMPTY_IDS,
            out[:number] if number else EMPTY_IDS,
            released_blocks,
            np.array([suffix_disk], np.uint32) if suffix_disk != NONE else EMPTY_IDS,
        )

    def _make_room(
        self, pool: PoolArrays, tokens: Ids, disk_block_ids: Ids, count: int, adapter: int, quota: int
    ) -> None:
        """Make all the room that an insert can ask for, which adds no more blocks than the quota."""
        header = pool.header
        free = header[layout.POOL_ROWS] - header[layout.POOL_USED] + header[layout.POOL_NUM_FREE]
        missing = min(kernels("adapters")["count_missing"](header, tokens, count, adapter), quota) + 1 - int(free)
        if missing > 0:
            pool.grow(missing, self._kernels["rehash"])
        if header[layout.POOL_NUM_SUFFIXES] == header[layout.POOL_SUFFIX_ROWS]:
            pool.grow_suffixes(1)
        if disk_block_ids.size and not header[layout.POOL_DISK_ROWS]:
            pool.add_disks()

    def _make_quota(
        self, pool: PoolArrays, tokens: Ids, count: int, adapter: int, quota: int
    ) -> tuple[EvictedBlocks, int]:
        """Evict an adapter's own leaves for an insert of `count` blocks, and say how many may be stored."""
        tenants = kernels("adapters")
        missing = tenants["count_missing"](pool.header, tokens, count, adapter)
        excess = tenants["count_nodes"](self._shared.header, adapter) + missing - quota
        if missing == 0 or excess <= 0:
            return EvictedBlocks(), count
        tenants["guard"](pool.header, tokens, count, adapter, 1)
        try:
            evicted, num_removed = self._evict_from(adapter, MAX_INT64, excess)
        finally:
            tenants["guard"](pool.header, tokens, count, adapter, 0)
        for other in list(self._pools.values()):
            if other is not pool:
                self._drop_pool_if_spare(other)
        return evicted, count - min(missing, max(0, excess - num_removed))

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
        block_size = as_block_size(block_size, self._block_size)
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
        block_size = as_block_size(block_size, self._block_size)
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
        if (
            type(tokens) is _ndarray
            and tokens.dtype is _UINT32
            and tokens.ndim == 1
            and block_size is None
            and type(adapter_id) is _int
            and not adapter_id >> 63
        ):
            with self._lock:
                unheld = self._release_kernel(self._address, tokens, tokens.size, adapter_id, self._strict)
            if not unheld:
                return
            if unheld != REFUSED:
                raise _release_too_many(unheld)
        tokens = as_tokens(tokens)
        block_size = as_block_size(block_size, self._block_size)
        self._release_prefix(tokens, block_size, tokens.size, to_signed(as_u64(adapter_id, "adapter_id")))

    def release_matched(self, tokens: Tokens, block_size: int | None, matched_tokens: int, adapter_id: int = 0) -> None:
        tokens = as_tokens(tokens)
        block_size = as_block_size(block_size, self._block_size)
        matched_tokens = as_matched_tokens(matched_tokens, tokens.size)
        self._release_prefix(tokens, block_size, matched_tokens, to_signed(as_u64(adapter_id, "adapter_id")))

    def _release_prefix(self, tokens: Ids, block_size: int, num_tokens: int, adapter: int) -> None:
        with self._lock:
            pool = self._pools.get(block_size)
            if pool is None:
                return
            unheld = self._release_kernel(pool.address, tokens, num_tokens, adapter, self._strict)
        if unheld:
            raise _release_too_many(unheld)

    def evict(self, num_blocks: int) -> EvictedBlocks:
        if type(num_blocks) is not _int or num_blocks < 0 or num_blocks >> 63:
            num_blocks = as_count(num_blocks, "num_blocks")
        with self._lock:
            if self._pins.by_name:
                self._end_expired_pins()
            room = num_blocks
            if room > _SMALL_ROOM:
                header = self._shared.header
                room = min(room, int(header[layout.SHARED_NUM_NODES] + header[layout.SHARED_NUM_SUFFIXES]))
            # One more than asked: the last leaf's partial suffix goes with it.
            room += 1
            blocks = _empty(room, _UINT32)
            disks = _empty(room, _UINT32) if self._has_disk_ids else NO_ROOM
            num_out, num_disks, num_emptied = self._evict_kernel(self._shared.address, num_blocks, blocks, disks)
            if num_emptied:
                for pool in list(self._pools.values()):
                    self._drop_pool_if_spare(pool)
        blocks = blocks[:num_out] if num_out else EMPTY_IDS
        return _new(EvictedBlocks, (blocks, disks[:num_disks] if num_disks else EMPTY_IDS))

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
