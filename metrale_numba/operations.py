"""What an operator asks of a cache beside its look-ups: epochs, pins, quotas, copies, counters, a recount.

:class:`Operations` is the half of :class:`~metrale_numba.radix_tree.RadixTree` that is off the hot path. Like the
other half, it checks its arguments, takes the lock, calls kernels and builds the result.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from metrale_numba import forking, metrics
from metrale_numba.arguments import (
    MAX_INT64,
    as_block_size,
    as_count,
    as_name,
    as_seconds,
    as_tokens,
    as_u64,
)
from metrale_numba.copies import Arrays, flatten, has_disk_ids, unflatten, write_file
from metrale_numba.errors import CacheFileError, IntegrityError
from metrale_numba.ghosts import Ghosts, LostSnapshots
from metrale_numba.inspection import Inspection
from metrale_numba.interface import (
    EMPTY_IDS,
    Cleared,
    EvictedBlocks,
    SnapshotStats,
    StatsDetail,
    Tokens,
)
from metrale_numba.kernels import layout
from metrale_numba.kernels.arrays import PoolArrays, SharedArrays
from metrale_numba.kernels.compile import kernels
from metrale_numba.pins import Hold, Pin, Pins
from metrale_numba.settings import Settings, as_quotas, resolve
from metrale_numba.snapshot_index import SnapshotIndex, to_signed, to_unsigned

# What kernels get for an array that a call has no use for: they refuse the read-only EMPTY_IDS.
NO_ROOM = np.empty(0, np.uint32)
# The check hash is a polynomial modulo this.
_CHECK_PRIME = 2**64 - 59


class Operations(Inspection):
    """The half of :class:`RadixTree` that is off the hot path; it also owns the arrays and the lock."""

    def _set_up(self, settings: Settings, hash_keys: tuple[int, int], quotas: dict[int, int]) -> None:
        """Make an empty cache."""
        self._settings = settings
        self._hash_keys = hash_keys
        self._kernels = kernels("cache")
        # For the hot path, which reads attributes of its own and nothing behind them.
        self._block_size = settings.block_size
        self._partial_tail_sharing = settings.partial_tail_sharing
        self._adopt_blocks = settings.adopt_blocks
        self._strict = int(settings.strict)
        base, multiplier = hash_keys
        powers = np.empty(layout.NUM_POWERS, np.uint64)
        self._kernels["fill_powers"](np.uint64(base), powers)
        self._index = SnapshotIndex(settings, powers, multiplier, self._kernels)
        self._shared = SharedArrays(
            powers,
            multiplier,
            self._index.arrays.header,
            partial_tail_sharing=settings.partial_tail_sharing,
            adopt_blocks=settings.adopt_blocks,
        )
        self._pools = self._shared.pools
        self._ghosts = None
        if settings.ghosts:
            lost_snapshots = LostSnapshots(settings.ghosts, self._shared.header, self._index.arrays, self._kernels)
            self._index.use(lost_snapshots.kernels())
            self._ghosts = Ghosts(settings.ghosts, self._shared, lost_snapshots, self._kernels, kernels("ghosts"))
        # Whether a disk id was ever stored: until then no call makes room for any.
        self._has_disk_ids = False
        self._epoch = 0
        self._adapter_drops: dict[int, int] = {}
        self._pins = Pins(settings.max_pinned_blocks)
        self._quotas = quotas
        # Whether a serving cache takes and drops the references on what is in this one.
        self._is_served = False
        self._lock = threading.Lock()

    def _add_default_pool(self) -> None:
        """Have the pool of the default block size, which is never dropped, with the room that the settings ask for."""
        settings = self._settings
        pool = self._pools.get(settings.block_size) or self._shared.add_pool(settings.block_size)
        if settings.reserve:
            pool.reserve(settings.reserve, self._kernels["rehash"])
        self._pool = pool
        # For the hot path, which reads attributes of its own and nothing behind them.
        self._address = pool.address
        self._lookup_kernel = self._kernels["lookup"]
        self._release_kernel = self._kernels["release"]
        self._insert_kernel = self._kernels["insert"]
        self._evict_kernel = self._kernels["evict"]
        if self._ghosts is not None:
            self._insert_kernel = self._ghosts.insert
            self._evict_kernel = self._ghosts.evict

    def _go_live(self) -> None:
        """Take part in the process's counters and forks, from what the counters are now."""
        metrics.register(self, self._shared.header[: metrics.NUM_COUNTERS])
        forking.register(self)

    @property
    def settings(self) -> Settings:
        """The settings that hold, keywords and environment resolved."""
        return self._settings

    @property
    def block_size(self) -> int:
        """Tokens per block where a call does not say."""
        return self._settings.block_size

    # Epochs

    @property
    def epoch(self) -> int:
        """How often :meth:`clear` forgot everything.

        A sequence begun in an earlier epoch must not release, insert, register or promote any more: its release
        would take the reference of a new owner.
        """
        return self._epoch

    def adapter_epoch(self, adapter_id: int) -> int:
        """Count how often an adapter's part of the cache was forgotten, alone or with everything else.

        Changes nothing.

        Parameters
        ----------
        adapter_id : int
            The adapter, 0..2^64-1.

        Returns
        -------
        int
            Goes up with every :meth:`clear`, and with every :meth:`drop_adapter` of this adapter.

        Raises
        ------
        TypeError, ValueError
            If `adapter_id` is not an adapter id.
        """
        adapter_id = as_u64(adapter_id, "adapter_id")
        with self._lock:
            return self._epoch + self._adapter_drops.get(adapter_id, 0)

    def clear(self) -> Cleared:
        """Forget everything, held by sequences or not, as when new weights were loaded.

        Ends every pin and the lease, and raises :attr:`epoch`. Clocks, counters, quotas and the list of dead keys go
        on. Sequences that are still running must drop their own pool references and nothing else.

        Returns
        -------
        Cleared
            The cache's reference on every block and disk block, every resident slot, every spilled key.
        """
        with self._lock:
            contents = self._contents()
            epoch = self._epoch + 1
            # What was interrupted is done again: half of it would leave tables and counts that do not agree.
            try:
                self._forget(epoch)
            except BaseException:
                self._forget(epoch)
                raise
            return contents

    def contents(self) -> Cleared:
        """List everything that :meth:`clear` would give back, for a recount of the caller's pools.

        Changes nothing, and takes time in proportion to the size of the cache.

        Returns
        -------
        Cleared
            Every block and disk block, as often as the cache stores it; every resident slot; every spilled key.
        """
        with self._lock:
            return self._contents()

    def _num_holds(self) -> tuple[int, int]:
        """Count the references on nodes beside the cache's own, and how many of them are those of named pins."""
        with self._lock:
            counted = 0
            for pool in self._pools.values():
                nodes = pool.nodes[: pool.header[layout.POOL_USED]]
                counts = nodes["count"][nodes["parent"] < layout.ROOT].astype(np.int64)
                counted += int(np.maximum(counts - 1, 0).sum())
            holds = self._pins.holds().values()
            return counted, sum(hold.matched_tokens // hold.block_size for hold in holds)

    def _contents(self) -> Cleared:
        stored = [pool.stored() for pool in self._pools.values()]
        blocks = EvictedBlocks(
            np.concatenate([EMPTY_IDS, *(blocks for blocks, _ in stored)]),
            np.concatenate([EMPTY_IDS, *(disks for _, disks in stored)]),
        )
        slots, keys = self._index.contents()
        return Cleared(blocks, slots, np.array(keys, np.uint64))

    def _forget(self, epoch: int) -> None:
        self._index.arrays.clear()
        self._shared.clear(self._pool)
        self._pins.strike(None)
        if self._ghosts is not None:
            self._ghosts.clear()
        self._epoch = epoch

    def drop_adapter(self, adapter_id: int) -> Cleared:
        """Forget everything of one adapter, as when its weights changed under the same id.

        Ends the adapter's pins, and the lease if a look-up under the adapter took it. Raises the adapter's epoch,
        but not :attr:`epoch`. With salted ids (:func:`adapter_key`), call it for each.

        Parameters
        ----------
        adapter_id : int
            The adapter, 0..2^64-1.

        Returns
        -------
        Cleared
            As from :meth:`clear`, of this adapter alone.

        Raises
        ------
        TypeError, ValueError
            If `adapter_id` is not an adapter id; nothing has changed then.
        """
        adapter_id = as_u64(adapter_id, "adapter_id")
        adapter = to_signed(adapter_id)
        tenants = kernels("adapters")
        with self._lock:
            room = int(tenants["count_nodes"](self._shared.header, adapter))
            room += int(self._shared.header[layout.SHARED_NUM_SUFFIXES])
            blocks = np.empty(room, np.uint32)
            disks = np.empty(room, np.uint32) if self._has_disk_ids else NO_ROOM
            slots, keys = self._index.drop_adapter(adapter, tenants["drop_adapter"])
            num_blocks = num_disks = 0
            for pool in list(self._pools.values()):
                num_blocks, num_disks = tenants["drop_forest"](
                    pool.header, adapter, blocks, disks, num_blocks, num_disks
                )
                self._drop_pool_if_spare(pool)
            self._pins.strike(adapter_id)
            if self._ghosts is not None:
                self._ghosts.drop_adapter(adapter)
            self._adapter_drops[adapter_id] = self._adapter_drops.get(adapter_id, 0) + 1
        # No copies: without memory for them, what was taken out would be lost.
        return Cleared(EvictedBlocks(blocks[:num_blocks], disks[:num_disks]), slots, np.array(keys, np.uint64))

    def _drop_pool_if_spare(self, pool: PoolArrays) -> None:
        """Give back the arrays of a block size without nodes, unless it is the one that calls use by default."""
        if pool.header[layout.POOL_NUM_NODES] == 0 and pool.block_size != self._settings.block_size:
            self._shared.drop_pool(pool.block_size)

    def take_dead_tier_keys(self) -> npt.NDArray[np.uint64]:
        """Hand over the keys whose stored bytes became garbage, and forget them.

        These are the keys of entries that an insert overwrote, or a session's new tail removed, while they were
        spilled. Delete their bytes before the next spill: a key that is spilled again is off the list.

        Returns
        -------
        ndarray of uint64
            Each key once, oldest first, since the last call.
        """
        with self._lock:
            keys = np.array(list(self._index.dead_keys), np.uint64)
            self._index.dead_keys.clear()
            return keys

    # Pins

    def pin(
        self,
        name: str,
        tokens: Tokens,
        block_size: int | None = None,
        adapter_id: int = 0,
        ttl: float | None = None,
    ) -> int:
        """Hold the cached part of a prefix under a name, as for a system prompt, so that eviction passes it by.

        Takes the references and writes the stamps of :meth:`pin_prefix`, and keeps them until :meth:`unpin`, until
        `ttl` seconds have passed, or until the prefix is forgotten by :meth:`clear` or :meth:`drop_adapter`. A name
        that holds something already gives that up for this.

        Parameters
        ----------
        name : str
            Names the hold.
        tokens : array of uint32, shape (n,)
            The prefix.
        block_size : int, optional
            Tokens per block. Default: the constructor's.
        adapter_id : int, default 0
            The adapter under which the prefix is cached.
        ttl : float, optional
            Seconds on the monotonic clock after which the pin ends by itself; :meth:`evict`, :meth:`pins` and
            whatever else counts or evicts look. Default: it does not.

        Returns
        -------
        int
            Tokens matched, and held as far as they fill blocks. With 0 nothing is held and the name is not entered.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be, or all pins together would hold more full blocks than the
            constructor's `max_pinned_blocks`; nothing has changed then.
        """
        name = as_name(name)
        tokens = as_tokens(tokens)
        block_size = as_block_size(block_size, self._settings.block_size)
        adapter_id = as_u64(adapter_id, "adapter_id")
        seconds = as_seconds(ttl, "ttl")
        adapter = to_signed(adapter_id)
        path = np.empty(tokens.size // block_size, np.uint32)
        with self._lock:
            self._end_expired_pins()
            pool = self._pools.get(block_size)
            matched_tokens = 0 if pool is None else int(self._kernels["peek"](pool.header, tokens, adapter))
            excess = self._pins.excess(name, matched_tokens // block_size)
            if excess > 0:
                raise ValueError(
                    f"pin {name!r} of {matched_tokens // block_size} blocks would go {excess} beyond "
                    f"max_pinned_blocks, which is {self._pins.limit}"
                )
            ends_at = None if seconds is None else time.monotonic() + seconds
            # Copied before any reference is taken: without memory for it, nobody could give them back.
            hold = Hold(tokens[:matched_tokens].copy(), matched_tokens, block_size, adapter_id, ends_at)
            if pool is not None:
                self._kernels["pin"](pool.header, tokens, path, adapter)
            earlier = self._pins.put(name, hold) if matched_tokens else self._pins.take(name)
            if earlier is not None:
                self._drop_hold(earlier)
        return matched_tokens

    def unpin(self, name: str) -> bool:
        """Give up what a name holds.

        Parameters
        ----------
        name : str
            As given to :meth:`pin`.

        Returns
        -------
        bool
            Whether the name held anything; False also if the pin has ended by itself.

        Raises
        ------
        TypeError
            If `name` is not a str.
        """
        name = as_name(name)
        with self._lock:
            self._end_expired_pins()
            hold = self._pins.take(name)
            if hold is not None:
                self._drop_hold(hold)
            return hold is not None

    def pins(self) -> dict[str, Pin]:
        """List what is pinned. Ends the pins whose time is over; changes nothing else.

        Returns
        -------
        dict of str to Pin
            By name, in the order in which they were set.
        """
        with self._lock:
            self._end_expired_pins()
            return self._pins.listed()

    def _end_expired_pins(self) -> None:
        for hold in self._pins.take_ended():
            self._drop_hold(hold)

    def _drop_hold(self, hold: Hold) -> None:
        pool = self._pools.get(hold.block_size)
        # The nodes are there, since the pin held them, unless someone released what was not theirs.
        if pool is not None:
            adapter = to_signed(hold.adapter_id)
            self._kernels["release"](pool.address, hold.tokens, hold.matched_tokens, adapter, 0)

    # Tenants

    def set_quota(self, adapter_id: int, blocks: int | None) -> None:
        """Bound the full blocks that one adapter may have in the cache, from its next insert on.

        An :meth:`insert` that would take the adapter past its quota first evicts the adapter's own oldest leaves,
        never a node of the path being inserted; what it evicts is in the insert's `released_blocks` and
        `released_disk_block_ids`. If that is not enough, it stores fewer blocks. Nothing is evicted by this call.

        Parameters
        ----------
        adapter_id : int
            The adapter, 0..2^64-1.
        blocks : int or None
            Full blocks, at least 0; partial suffixes are not counted. None lifts the quota.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """
        adapter_id = as_u64(adapter_id, "adapter_id")
        quota = None if blocks is None else as_count(blocks, "blocks")
        with self._lock:
            if quota is None:
                self._quotas.pop(adapter_id, None)
            else:
                self._quotas[adapter_id] = quota

    def evict_from(self, adapter_id: int, num_blocks: int) -> EvictedBlocks:
        """Evict one adapter's least recently used leaves that no sequence holds.

        As :meth:`evict`, of this adapter alone. Takes time in proportion to what the adapter has cached.

        Parameters
        ----------
        adapter_id : int
            The adapter, 0..2^64-1.
        num_blocks : int
            Blocks wanted, at least 0.

        Returns
        -------
        EvictedBlocks
            At least that many, if the adapter has as many to give; a partial suffix goes with its node.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """
        adapter_id = as_u64(adapter_id, "adapter_id")
        num_blocks = as_count(num_blocks, "num_blocks")
        with self._lock:
            self._end_expired_pins()
            evicted, _ = self._evict_from(to_signed(adapter_id), num_blocks, MAX_INT64)
            for pool in list(self._pools.values()):
                self._drop_pool_if_spare(pool)
            return evicted

    def _evict_from(self, adapter: int, num_blocks: int, num_nodes: int) -> tuple[EvictedBlocks, int]:
        """Evict an adapter's oldest candidates up to a number of blocks and of nodes; also count the nodes."""
        tenants = kernels("adapters")
        header = self._shared.header
        nodes = int(tenants["count_nodes"](header, adapter))
        room = nodes + int(header[layout.SHARED_NUM_SUFFIXES])
        blocks = np.empty(room, np.uint32)
        disks = np.empty(room, np.uint32) if self._has_disk_ids else NO_ROOM
        stamps, members = np.empty(nodes, np.int64), np.empty(nodes, np.uint64)

        def evict() -> tuple[int, int, int, int]:
            numbers: tuple[int, int, int, int] = tenants["evict_from"](
                header, adapter, num_blocks, num_nodes, blocks, disks, stamps, members
            )
            return numbers

        num_out, num_disks, num_removed, _ = (
            evict() if self._ghosts is None else self._ghosts.watch(evict, by_adapter=True)
        )
        # No copies: without memory for them, what was taken out would be lost.
        return EvictedBlocks(blocks[:num_out], disks[:num_disks]), num_removed

    # Counters

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
        """Read the counters and sizes of the tree, in one step.

        Ends the pins whose time is over; changes nothing else. Takes time in proportion to the number of adapters
        that have blocks, for the last field.

        Returns
        -------
        StatsDetail
            Counters from the cache's beginning on, sizes as they are now.
        """
        tenants = kernels("adapters")
        with self._lock:
            self._end_expired_pins()
            header: list[int] = self._shared.header.tolist()
            by_adapter: dict[int, int] = {}
            for pool in self._pools.values():
                num_roots = int(pool.header[layout.POOL_NUM_ROOTS])
                adapters, counts = np.empty(num_roots, np.int64), np.empty(num_roots, np.int64)
                tenants["count_by_adapter"](pool.header, adapters, counts)
                for adapter, count in zip(adapters.tolist(), counts.tolist(), strict=True):
                    adapter_id = to_unsigned(adapter)
                    by_adapter[adapter_id] = by_adapter.get(adapter_id, 0) + count
            return StatsDetail(
                cache_hits=header[layout.SHARED_HITS],
                cache_misses=header[layout.SHARED_MISSES],
                cache_hit_tokens=header[layout.SHARED_HIT_TOKENS],
                over_releases=header[layout.SHARED_OVER_RELEASES],
                num_blocks=header[layout.SHARED_NUM_NODES],
                num_suffix_blocks=header[layout.SHARED_NUM_SUFFIXES],
                clock=header[layout.SHARED_CLOCK],
                num_evictable=header[layout.SHARED_NUM_EVICTABLE],
                epoch=self._epoch,
                num_pinned_blocks=self._pins.num_blocks,
                blocks_by_adapter=by_adapter,
            )

    def num_evictable(self) -> int:
        """Count the blocks that repeated :meth:`evict` could free now, in constant time.

        Partial suffixes are included. Exact while holds nest, that is, while no block is held more often than the one
        before it, as the protocol makes them; otherwise an upper bound. Ends the pins whose time is over, since
        :meth:`evict` would do so first; changes nothing else.

        Returns
        -------
        int
            Blocks, not nodes.
        """
        with self._lock:
            if self._pins.by_name:
                self._end_expired_pins()
            return int(self._shared.header[layout.SHARED_NUM_EVICTABLE])

    def memory_usage(self) -> dict[str, int]:
        """Measure the arrays, all block sizes together. Changes nothing.

        Returns
        -------
        dict of str to int
            Bytes by array, by capacity and not by use.
        """
        with self._lock:
            sizes: dict[str, int] = {}
            for group, arrays in self._groups_of_arrays():
                for name, array in arrays.items():
                    sizes[f"{group}.{name}"] = sizes.get(f"{group}.{name}", 0) + array.nbytes
            return sizes

    def compact(self) -> int:
        """Give memory back, and put the blocks of each path next to each other again.

        Arrays grow by a quarter and never shrink by themselves. This moves everything into new ones that have just
        the room for it, or for what the constructor's `reserve` asks. No answer of a later call is another. Takes
        about 0.2 s for a million blocks and holds the lock, with both copies in memory meanwhile.

        Returns
        -------
        int
            Bytes given back; below 0 if a block size's arrays were smaller than the reserve.

        Raises
        ------
        MemoryError
            If there is no room for the copies. Some arrays have given memory back then and others not; every answer is
            what it was.
        """
        movers = kernels("compaction")
        with self._lock:
            before = self._num_bytes()
            for block_size, pool in self._pools.items():
                pool.compact(self._settings.reserve if block_size == self._settings.block_size else 0, movers)
            self._shared.compact_heap()
            self._index.arrays.compact(self._kernels["rehash"])
            return before - self._num_bytes()

    def _num_bytes(self) -> int:
        return sum(array.nbytes for _, arrays in self._groups_of_arrays() for array in arrays.values())

    def _groups_of_arrays(self) -> list[tuple[str, Mapping[str, npt.NDArray[Any]]]]:
        return [
            ("shared", self._shared.arrays()),
            ("snapshots", self._index.arrays.arrays()),
            *(("blocks", pool.arrays()) for pool in self._pools.values()),
            *([("ghosts", self._ghosts.arrays())] if self._ghosts is not None else []),
        ]

    def peek_many(self, prompts: Sequence[Tokens], block_size: int | None = None, adapter_id: int = 0) -> list[int]:
        """Answer :meth:`peek_matched_tokens` for many prompts in one step, as of one moment. Changes nothing.

        Parameters
        ----------
        prompts : sequence of arrays of uint32
            Any number of prompts.
        block_size : int, optional
            Tokens per block. Default: the constructor's.
        adapter_id : int, default 0
            The adapter.

        Returns
        -------
        list of int
            Tokens that a look-up of each would match.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be.
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
            raise TypeError(f"prompts must be a sequence of token sequences, not {type(prompts).__name__}")
        arrays = [as_tokens(prompt, f"prompts[{position}]") for position, prompt in enumerate(prompts)]
        block_size = as_block_size(block_size, self._settings.block_size)
        adapter = to_signed(as_u64(adapter_id, "adapter_id"))
        with self._lock:
            pool = self._pools.get(block_size)
            if pool is None:
                return [0] * len(arrays)
            return [int(self._kernels["peek"](pool.header, tokens, adapter)) for tokens in arrays]

    def check_integrity(self) -> None:
        """Recount everything that is derived, in one pass over the cache, and compare.

        Links between nodes, counts, both hashes of every prefix, the hash tables, the order of eviction, the list
        of resident snapshots and the filter of their depths. Changes nothing; meant for tests and for a
        caller in doubt, since it takes time in proportion to the cache and holds the lock. Holds that do not nest
        are no fault: single calls may make them.

        Raises
        ------
        IntegrityError
            Naming the first fault found: a defect of this package, or memory that something else wrote over.
        """
        checks = kernels("integrity")
        with self._lock:
            # First, since nodes are compared with it.
            self._index.check_integrity(checks)
            header = self._shared.header
            num_nodes = num_suffixes = num_candidates = num_evictable = 0
            for pool in self._pools.values():
                fault, where, candidates, evictable = checks["check_pool"](pool.header)
                if fault:
                    raise IntegrityError(f"blocks of {pool.block_size} tokens: {layout.FAULTS[fault]} (at {where})")
                num_nodes += int(pool.header[layout.POOL_NUM_NODES])
                num_suffixes += int(pool.header[layout.POOL_NUM_SUFFIXES])
                num_candidates += candidates
                num_evictable += evictable
            fault, where = checks["check_heap"](header, num_candidates)
            if fault:
                raise IntegrityError(f"candidates for eviction: {layout.FAULTS[fault]} (at {where})")
            counted = (num_nodes, num_suffixes, num_evictable)
            kept = (
                int(header[layout.SHARED_NUM_NODES]),
                int(header[layout.SHARED_NUM_SUFFIXES]),
                int(header[layout.SHARED_NUM_EVICTABLE]),
            )
            if counted != kept:
                raise IntegrityError(
                    f"the cache keeps count of {kept[0]} blocks, {kept[1]} partial suffixes and {kept[2]} evictable "
                    f"blocks, but has {counted[0]}, {counted[1]} and {counted[2]}"
                )
            if self._ghosts is not None:
                self._ghosts.check_integrity()

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {
                "settings": self._settings,
                "hash_keys": self._hash_keys,
                "quotas": dict(self._quotas),
                "shared": self._shared.state(),
                "pools": {block_size: pool.state(self._kernels["rehash"]) for block_size, pool in self._pools.items()},
                "index": self._index.arrays.state(),
                "dead_keys": list(self._index.dead_keys),
                "epoch": self._epoch,
                "adapter_drops": dict(self._adapter_drops),
                "holds": self._pins.holds(),
                "has_disk_ids": self._has_disk_ids,
                # Not in a file, which says nothing of what is not in the cache.
                "ghosts": None if self._ghosts is None else self._ghosts.state(),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(state["settings"], state["hash_keys"], dict(state["quotas"]))
        self._shared.restore(state["shared"], state["pools"])
        self._index.arrays.restore(state["index"])
        self._index.dead_keys = dict.fromkeys(state["dead_keys"])
        self._epoch = state["epoch"]
        self._adapter_drops = dict(state["adapter_drops"])
        self._pins.restore(state["holds"])
        self._has_disk_ids = state["has_disk_ids"]
        if self._ghosts is not None:
            self._ghosts.restore(state["ghosts"])
        self._add_default_pool()
        self._go_live()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole cache to a file, in one step: an earlier file stays whole until this one is.

        The copy is of one moment; other threads go on meanwhile. The file holds the key of the check hash, so treat
        it as secret, and no code. It names blocks, slots and keys of the caller's pools, which the caller saves.
        Changes nothing.

        Parameters
        ----------
        path : str or path-like
            The file; its folder must exist.

        Raises
        ------
        TypeError, ValueError
            If `path` is not what it should be.
        OSError
            If it cannot be written; an earlier file is untouched then.
        """
        meta, arrays = self._file_parts()
        write_file(path, meta, arrays)

    def _file_parts(self) -> tuple[dict[str, Any], Arrays]:
        """Give what a file says of this cache: the description and the arrays."""
        state = self.__getstate__()
        arrays = flatten(state)
        pins = []
        for number, (name, hold) in enumerate(state["holds"].items()):
            arrays[f"pin/{number}"] = hold.tokens
            pins.append([name, hold.matched_tokens, hold.block_size, hold.adapter_id, hold.ends_at])
        settings = asdict(state["settings"])
        secret = settings.pop("check_secret")
        # What memory is there is a matter of the machine that loads.
        del settings["reserve"], settings["ghosts"]
        meta = {
            "settings": settings,
            "check_secret": None if secret is None else secret.hex(),
            "hash_keys": state["hash_keys"],
            "quotas": list(state["quotas"].items()),
            "block_sizes": list(state["pools"]),
            "dead_keys": state["dead_keys"],
            "epoch": state["epoch"],
            "adapter_drops": list(state["adapter_drops"].items()),
            "pins": pins,
            "has_disk_ids": state["has_disk_ids"],
        }
        return meta, arrays

    @staticmethod
    def _state_of_parts(
        path: str | os.PathLike[str], meta: Mapping[str, Any], arrays: Arrays, reserve: int, ghosts: int
    ) -> dict[str, Any]:
        """Check everything that a file says, but for what only a recount can tell."""
        try:
            secret = meta["check_secret"]
            base, multiplier = (as_u64(key, "hash_keys") for key in meta["hash_keys"])
            # Of a base that is no residue of the prime, or blind, kernels would make check hashes that collide.
            if not 2 <= base < _CHECK_PRIME or multiplier % 2 == 0:
                raise ValueError("its hash keys are none that a cache has")
            block_sizes = [as_block_size(block_size, 0) for block_size in meta["block_sizes"]]
            holds = {
                as_name(name): Hold(
                    as_tokens(arrays[f"pin/{number}"]),
                    as_count(matched_tokens, "pin"),
                    as_block_size(block_size, 0),
                    as_u64(adapter_id, "pin"),
                    as_seconds(seconds, "pin"),
                )
                for number, (name, matched_tokens, block_size, adapter_id, seconds) in enumerate(meta["pins"])
            }
            saved = {**meta["settings"], "check_secret": None if secret is None else bytes.fromhex(secret)}
            settings = resolve(**saved, reserve=reserve, ghosts=ghosts)
            # What is missing or null would come from the environment.
            if asdict(settings) != {**saved, "reserve": reserve, "ghosts": ghosts}:
                raise ValueError("its settings are not complete")
            for name, hold in holds.items():
                if hold.tokens.size != hold.matched_tokens:
                    raise ValueError(f"pin {name!r} has {hold.tokens.size} tokens, not {hold.matched_tokens}")
            state = unflatten(arrays, block_sizes)
            if has_disk_ids(state["pools"]) and meta["has_disk_ids"] is not True:
                raise ValueError("it has disk ids and says that it has none")
            return {
                "settings": settings,
                "hash_keys": (base, multiplier),
                "quotas": as_quotas(dict(meta["quotas"])),
                "dead_keys": [as_u64(key, "dead_keys") for key in meta["dead_keys"]],
                "epoch": as_count(meta["epoch"], "epoch"),
                "adapter_drops": {
                    as_u64(adapter_id, "adapter_drops"): as_count(drops, "adapter_drops")
                    for adapter_id, drops in meta["adapter_drops"]
                },
                "holds": holds,
                "has_disk_ids": bool(meta["has_disk_ids"]),
                "ghosts": None,
                **state,
            }
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CacheFileError(f"{os.fspath(path)} cannot be read as a saved cache: {error}") from error
