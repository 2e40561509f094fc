"""What is done to a serving cache as a whole: forget, count, recount, save; and what every end of a sequence does.

:class:`Upkeep` is the half of :class:`~metrale_numba.serving.ServingCache` that no request waits for. It owns the lock.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from metrale_numba import forking
from metrale_numba.arguments import as_bool, as_count, as_path, as_tokens, as_u64
from metrale_numba.copies import write_file
from metrale_numba.errors import CacheFileError, IntegrityError
from metrale_numba.interface import EMPTY_IDS, Cleared, EvictedBlocks, Ids, IdSequence, Spill
from metrale_numba.no_caching import NoPrefixCaching
from metrale_numba.radix_tree import RadixTree
from metrale_numba.serving.block_pool import BlockPool, SnapshotPool
from metrale_numba.serving.books import Books
from metrale_numba.serving.mover import SnapshotMover
from metrale_numba.serving.saved_part import SavedPart
from metrale_numba.serving.sequence import Holdings
from metrale_numba.serving.serving_stats import ServingStats
from metrale_numba.serving.snapshot_store import SnapshotStore
from metrale_numba.serving.stored_twice import StoredTwice
from metrale_numba.serving.tier import TierStore
from metrale_numba.serving.transfers import Identity

_logger = logging.getLogger(__name__)


class Upkeep:
    """The half of :class:`ServingCache` that looks after the whole."""

    def _set_up(
        self,
        cache: RadixTree | NoPrefixCaching,
        blocks: BlockPool | int,
        mover: SnapshotMover | None,
        *,
        slots: SnapshotPool | int,
        disk_blocks: BlockPool | int | None,
        tier: TierStore | None,
        identity: Identity,
        spill_min_tokens: int,
        keep_copies: bool,
        hybrid: bool | None,
    ) -> None:
        if isinstance(cache, RadixTree):
            if cache._is_served:
                raise ValueError("cache has a serving cache already, which has taken references on what is in it")
            cache._is_served = True
        self._cache = cache
        self._tree = cache if isinstance(cache, RadixTree) else None
        self._blocks = blocks if isinstance(blocks, BlockPool) else BlockPool(as_count(blocks, "blocks"))
        self._slots = slots if isinstance(slots, SnapshotPool) else SnapshotPool(as_count(slots, "slots"))
        if disk_blocks is not None and not isinstance(disk_blocks, BlockPool):
            disk_blocks = BlockPool(as_count(disk_blocks, "disk_blocks"))
        self._disk_blocks = disk_blocks
        self._block_size = cache.block_size
        self._shares_tails = self._tree is not None and self._tree.settings.partial_tail_sharing
        adopts = self._shares_tails and self._tree is not None and self._tree.settings.adopt_blocks
        self._twice = StoredTwice(self._blocks.num_blocks) if adopts else None
        self._is_hybrid = self._slots.num_slots > 0 if hybrid is None else as_bool(hybrid, "hybrid")
        spill_min_tokens = as_count(spill_min_tokens, "spill_min_tokens")
        keep_copies = as_bool(keep_copies, "keep_copies")
        if mover is not None:
            _require_methods(mover, "mover", ("read_slot", "write_slot", "copy_rows"))
            as_count(getattr(mover, "slot_bytes", None), "mover.slot_bytes")
        if tier is not None:
            _require_methods(tier, "tier", ("put", "get", "delete", "contains", "keys", "close"))
            for attribute in ("persistent", "bytes_used"):
                # Looked for and not asked for: to say how much is in it, a tier may have to talk to its medium.
                try:
                    inspect.getattr_static(tier, attribute)
                except AttributeError:
                    raise TypeError(f"tier must have {attribute}, which {type(tier).__name__} lacks") from None
        if mover is None and tier is not None:
            raise ValueError("mover must be given with a tier: snapshots cannot get there without it")
        if mover is None and self._shares_tails:
            raise ValueError("mover must be given with partial-tail sharing: it copies blocks that are matched in part")
        self._mover = mover
        self._tier = tier
        self._identity = identity
        self._lock = threading.Lock()
        self._books = Books(self._put_right)
        self._running: set[Holdings] = set()
        # Filled by finalizers, which must not take the lock.
        self._forgotten: deque[Holdings] = deque()
        self._num_requests = self._queried_tokens = self._hit_tokens = self._recompute_tokens = 0
        self._snapshot_hits = self._num_finished = self._num_aborted = self._num_forgotten = self._evicted_blocks = 0
        self._num_refused = 0
        self._store = SnapshotStore(
            cache,
            self._slots,
            self._lock,
            self._books,
            mover=mover,
            tier=tier,
            identity=identity,
            spill_min_tokens=spill_min_tokens,
            keep_copies=keep_copies,
        )
        forking.register_layer(self)

    def _fork_locks(self) -> Iterable[forking.Lock]:
        return (*self._store.stripes, self._lock)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {len(self._running)} sequences, {self._blocks.num_used} of "
            f"{self._blocks.num_blocks} blocks, {self._slots.num_used} of {self._slots.num_slots} slots in use>"
        )

    @property
    def cache(self) -> RadixTree | NoPrefixCaching:
        """The index, to ask and not to change."""
        return self._cache

    @property
    def blocks(self) -> BlockPool:
        """The pool of KV blocks."""
        return self._blocks

    @property
    def slots(self) -> SnapshotPool:
        """The pool of snapshot slots."""
        return self._slots

    @property
    def disk_blocks(self) -> BlockPool | None:
        """The pool of disk blocks, if there is one."""
        return self._disk_blocks

    @property
    def tier(self) -> TierStore | None:
        """Where snapshots are spilled to, if anywhere."""
        return self._tier

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def is_hybrid(self) -> bool:
        """Whether the model has recurrent state."""
        return self._is_hybrid

    @property
    def num_free_blocks(self) -> int:
        """How many blocks a sequence can allocate now, those included that would be evicted for it."""
        return self._blocks.num_free + self._num_evictable()

    def _num_evictable(self) -> int:
        """How many blocks would become free if everything were evicted that nobody holds."""
        if self._tree is None:
            return 0
        evictable = self._tree.num_evictable()
        # A few too few, where such a block is held: what is promised must be kept.
        return evictable if self._twice is None else max(evictable - self._twice.surplus, 0)

    def _is_stale(self, holdings: Holdings) -> bool:
        return self._tree is not None and self._tree.adapter_epoch(holdings.adapter) != holdings.epoch

    def _drop_blocks(self, blocks: EvictedBlocks) -> None:
        """Drop the references of the cache on what it has given up."""
        self._blocks.dec_ref(blocks.physical)
        if self._twice is not None:
            self._twice.remove(blocks.physical)
        if blocks.disk_block_ids.size:
            assert self._disk_blocks is not None
            self._disk_blocks.dec_ref(blocks.disk_block_ids)

    # Ends

    def _release_forgotten(self) -> None:
        while self._forgotten:
            holdings = self._forgotten.popleft()
            self._num_forgotten += 1
            self._drop(holdings)

    def _drop(self, holdings: Holdings) -> None:
        """End a sequence: give back what it holds, once."""
        if not holdings.is_ended:
            holdings.is_ended = True
            self._running.discard(holdings)
            self._give_back(holdings)

    def _give_back(self, holdings: Holdings) -> None:
        """Give back what a sequence holds: in the cache, unless that is another epoch's by now, and in the pools."""
        held, holdings.held = holdings.held, 0
        table, holdings.table = holdings.table, EMPTY_IDS
        disks, holdings.disks = holdings.disks_in_use(), None if holdings.disks is None else EMPTY_IDS
        slot, holdings.slot = holdings.slot, None
        holdings.cached_tokens = holdings.slot_tokens = 0
        try:
            if held and self._tree is not None and not self._is_stale(holdings):
                self._tree.release(holdings.tokens[:held], adapter_id=holdings.adapter)
        finally:
            self._blocks.dec_ref(table)
            if slot is not None:
                self._slots.dec_ref([slot])
            if self._disk_blocks is not None:
                self._disk_blocks.dec_ref(disks)

    # The whole

    def clear(self) -> None:
        """Forget everything, as when new weights were loaded.

        Running sequences go on with the blocks that they have, and are stale: nothing of theirs enters the cache any
        more. They give their blocks back when they end.
        """
        if self._tree is not None:
            self._forget(self._tree.clear)

    def drop_adapter(self, adapter: int) -> None:
        """Forget everything of one adapter, as when its weights changed under the same id; see :meth:`clear`.

        Parameters
        ----------
        adapter : int
            The adapter, 0..2^64-1.

        Raises
        ------
        TypeError, ValueError
            If `adapter` is not an adapter id; nothing has changed then.
        """
        adapter = as_u64(adapter, "adapter")
        tree = self._tree
        if tree is not None:
            self._forget(lambda: tree.drop_adapter(adapter))

    def _forget(self, forget: Callable[[], Cleared]) -> None:
        with self._lock, self._books:
            self._release_forgotten()
            cleared = forget()
            self._drop_blocks(cleared.blocks)
            self._store.forgotten(cleared.snapshot_slots, cleared.tier_keys.tolist())
        # The caller waits for what it has forgotten, and nobody else.
        self._store.settle(most_deletions=cleared.tier_keys.size + len(cleared.snapshot_slots))

    def stats(self) -> ServingStats:
        """Tell what was done, and what is where now. Changes nothing but to give back what forgotten sequences held.

        Returns
        -------
        ServingStats
            Counters from the beginning on, and figures of this moment.
        """
        with self._lock, self._books:
            self._release_forgotten()
            counts = self._store.counts
            _, cached_blocks = self._cache.stats()
            return ServingStats(
                requests=self._num_requests,
                queried_tokens=self._queried_tokens,
                hit_tokens=self._hit_tokens,
                recompute_tokens=self._recompute_tokens,
                snapshot_hits=self._snapshot_hits,
                finished=self._num_finished,
                aborted=self._num_aborted,
                refused=self._num_refused,
                forgotten=self._num_forgotten,
                running=len(self._running),
                evicted_blocks=self._evicted_blocks,
                blocks=self._blocks.num_blocks,
                free_blocks=self._blocks.num_free,
                evictable_blocks=self._num_evictable(),
                cached_blocks=cached_blocks,
                most_blocks=self._blocks.high_water,
                slots=self._slots.num_slots,
                free_slots=self._slots.num_free,
                snapshots=self._cache.snapshot_count(),
                spills=counts.spills,
                clean_spills=counts.clean_spills,
                fault_ins=counts.fault_ins,
                lost_writes=counts.lost_writes,
                tier_misses=counts.tier_misses,
                tier_errors=counts.tier_errors,
            )

    def check_integrity(self, *, disk_blocks: IdSequence = ()) -> None:
        """Recount everything: each id is owned by the cache and by sequences as often as its pool says.

        Changes nothing but to give back what forgotten sequences held. Takes time in proportion to the size of the
        cache and of the pools, with the lock held.

        Parameters
        ----------
        disk_blocks : sequence of int, optional
            Disk blocks that the caller has allocated and not given to a sequence yet.

        Raises
        ------
        IntegrityError
            Naming the first fault.
        TypeError, ValueError
            If `disk_blocks` is not a sequence of ids.
        """
        own_disks = as_tokens(disk_blocks, "disk_blocks")
        with self._lock, self._books:
            self._release_forgotten()
            contents = self._contents()
            tables = [holdings.table for holdings in self._running]
            _compare("block", self._blocks, [contents.blocks.physical, *tables])
            surplus = contents.blocks.physical.size - np.unique(contents.blocks.physical).size
            if surplus != (self._twice.surplus if self._twice is not None else 0):
                raise IntegrityError(f"the cache stores {surplus} blocks twice, which is not what was counted")
            if self._disk_blocks is not None:
                disks = [holdings.disks_in_use() for holdings in self._running]
                _compare("disk block", self._disk_blocks, [own_disks, contents.blocks.disk_block_ids, *disks])
            lent = [holdings.slot for holdings in self._running if holdings.slot is not None]
            referred = [*contents.snapshot_slots, *lent, *self._store.in_transit]
            _compare("slot", self._slots, [np.array(referred, np.uint32)])
            for fault in self._store.faults(contents.snapshot_slots, contents.tier_keys.tolist()):
                raise IntegrityError(fault)
            for holdings in self._running:
                self._check_held(holdings)
            self._check_holds()
        if self._tree is not None:
            self._tree.check_integrity()

    def _put_right(self) -> None:
        """Count the books anew, after an exception cut a step short between the cache and a pool.

        The pools of blocks and slots are this layer's alone. Of disk blocks, callers have some in hand.
        """
        _logger.warning("an exception cut a call short; the books are counted anew")
        contents = self._contents()
        tables = [holdings.table for holdings in self._running]
        self._blocks._restore(np.concatenate([contents.blocks.physical, *tables]))
        self._store.put_right(contents.snapshot_slots, contents.tier_keys.tolist())
        lent = [holdings.slot for holdings in self._running if holdings.slot is not None]
        slots = self._contents().snapshot_slots
        self._slots._restore(np.array([*slots, *lent, *self._store.in_transit], np.uint32))
        if self._disk_blocks is not None:
            disks = [holdings.disks_in_use() for holdings in self._running]
            self._disk_blocks._restore(np.concatenate([contents.blocks.disk_block_ids, *disks]), keeps_more=True)
        if self._twice is not None:
            self._twice.restore(contents.blocks.physical)

    def _contents(self) -> Cleared:
        if self._tree is not None:
            return self._tree.contents()
        return Cleared(EvictedBlocks(), [], np.empty(0, np.uint64))

    def _check_held(self, holdings: Holdings) -> None:
        if self._tree is None or self._is_stale(holdings):
            return
        stored = self._tree.peek_matched_tokens(holdings.tokens[: holdings.held], adapter_id=holdings.adapter)
        if stored != holdings.held:
            raise IntegrityError(f"a sequence holds {holdings.held} tokens, but the cache has {stored} of them")

    def _check_holds(self) -> None:
        """Raise if somebody else holds nodes of the cache, which nothing could evict then."""
        if self._tree is None:
            return
        sequences = sum(holdings.held for holdings in self._running if not self._is_stale(holdings)) // self._block_size
        counted, pins = self._tree._num_holds()
        if counted != sequences + pins:
            raise IntegrityError(
                f"nodes of the cache are held {counted} times, by sequences {sequences} times and by pins {pins} times"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a file, and the snapshots to the tier, for a process that takes over from here.

        The file is written in one step: killed at any moment, it is the earlier one or this one, whole. It says what
        the cache would hold if all sequences had ended. A tier that outlives the process is given the bytes of all
        resident snapshots, which stay where they are; without one they are left out. The KV blocks are the engine's:
        what the index says is of use to those only who bring back their contents. Other threads go on meanwhile.

        Parameters
        ----------
        path : str or path-like
            The file; its folder must exist. It holds the key of the check hash, so treat it as secret.

        Raises
        ------
        TypeError, ValueError
            If `path` is not what it should be, or there is no index because caching is off.
        OSError
            If the file cannot be written; an earlier one is untouched then.
        """
        path = as_path(path)
        if self._tree is None:
            raise TypeError("caching is off, so there is nothing to save")
        keeps_snapshots = self._tier is not None and self._tier.persistent
        with self._lock, self._books:
            self._release_forgotten()
            twin = copy.deepcopy(self._tree)
            for holdings in self._running:
                if not self._is_stale(holdings):
                    twin.release(holdings.tokens[: holdings.held], adapter_id=holdings.adapter)
            stored = self._store.stored_keys() if keeps_snapshots else {}
            under_way = self._store.writes_under_way()
            residents = [(spill, self._store.resident(spill.slot)) for spill in _spill_all(twin)]
        if keeps_snapshots:
            for spill, resident in residents:
                with self._lock, self._books:
                    write = self._store.stage_copy(resident, spill)
                self._store.write_staged()
                if write is not None:
                    under_way.append(write)
                    stored[spill.key] = write.store_key
            # Another thread may be writing them.
            for write in under_way:
                write.is_over.wait()
            missing = [key for key, store_key in stored.items() if not self._store.may_have(store_key)]
            for key in missing:
                del stored[key]
            if missing:
                _logger.warning("%d of the snapshots are not in the tier, and are left out of %s", len(missing), path)
        for key in twin.contents().tier_keys.tolist():
            if key not in stored:
                twin.forget_snapshot_tier_key(key)
        twin.take_dead_tier_keys()
        meta, arrays = twin._file_parts()
        part = SavedPart(self._identity, self._blocks.high_water, stored)
        write_file(path, {**meta, "serving": part.as_json()}, arrays)

    def _restore(self, path: str | os.PathLike[str], saved: SavedPart) -> None:
        """Let the pools and the tier be as a loaded index says."""
        tree = self._tree
        assert tree is not None
        contents = tree.contents()
        if contents.snapshot_slots:
            raise CacheFileError(f"{os.fspath(path)} has snapshots in slots, which no saved serving cache has")
        pools = [("blocks", self._blocks, contents.blocks.physical), ("slots", self._slots, EMPTY_IDS)]
        disks = contents.blocks.disk_block_ids
        if self._disk_blocks is not None:
            pools.append(("disk_blocks", self._disk_blocks, disks))
        elif disks.size:
            raise ValueError(f"disk_blocks are none, but the saved cache has block {disks.max()}")
        for name, pool, ids in pools:
            if pool.num_used:
                raise ValueError(f"{name} must be unused: {pool!r}")
            if ids.size and ids.max() >= pool.num_free:
                raise ValueError(f"{name} are {pool.num_free}, but the saved cache has block {ids.max()}")
        for name, pool, ids in pools:
            pool._restore(ids, saved.most_blocks if name == "blocks" else 0)
        if self._twice is not None:
            self._twice.restore(contents.blocks.physical)
        stored = {}
        for key in contents.tier_keys.tolist():
            if key in saved.stored and self._store.may_have(saved.stored[key]):
                stored[key] = saved.stored[key]
            else:
                tree.forget_snapshot_tier_key(key)
        if self._tier is not None:
            self._store.restore(stored)
            self._store.settle()


def _require_methods(value: object, name: str, methods: Iterable[str]) -> None:
    # Asking a protocol would evaluate the properties as well, which may talk to a medium that is down.
    for method in methods:
        if not callable(getattr(value, method, None)):
            raise TypeError(f"{name} must have a method {method}, which {type(value).__name__} lacks")


def _spill_all(tree: RadixTree) -> Iterable[Spill]:
    """Have a cache take every resident snapshot out of its slot."""
    while (gone := tree.evict_snapshot_to_tier(0)) is not None:
        # Of at least 0 tokens are all.
        assert isinstance(gone, Spill)
        yield gone


def _compare(noun: str, pool: BlockPool | SnapshotPool, owned: list[Ids]) -> None:
    """Raise if the counts of a pool are not how often its ids are owned."""
    pool.check_integrity()
    counts = pool.ref_counts()
    owners: npt.NDArray[np.int64] = np.bincount(np.concatenate(owned), minlength=counts.size)
    if owners.size > counts.size:
        raise IntegrityError(f"{noun} {owners.size - 1} is owned, but the pool has {counts.size}")
    (wrong,) = np.nonzero(owners != counts)
    if wrong.size:
        number = int(wrong[0])
        raise IntegrityError(f"{noun} {number} has {counts[number]} references, but {owners[number]} owners")
