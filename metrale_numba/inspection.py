"""Looking into a cache: why a prompt matches as far as it does, and which blocks there are.

:class:`Inspection` is the part of :class:`~metrale_numba.radix_tree.RadixTree` that changes nothing: it takes no
reference, writes no stamp and counts nothing. It relies on the arrays and the lock, which
:class:`~metrale_numba.operations.Operations` owns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from metrale_numba.arguments import as_block_size, as_tokens, as_u64
from metrale_numba.explain import (
    EvictedPrefix,
    Explanation,
    LostSnapshotInfo,
    PassedSnapshot,
    SnapshotExplanation,
)
from metrale_numba.ghosts import Ghosts
from metrale_numba.interface import Ids, Tokens
from metrale_numba.kernels.arrays import PoolArrays, SharedArrays, UInt64Array
from metrale_numba.kernels.compile import kernels
from metrale_numba.kernels.layout import INDEX_SIZE, POOL_NUM_ROOTS, SHARED_CLOCK, SPILLED, TAIL
from metrale_numba.nodes import NodeInfo, copy_of, listed, snapshot_depths
from metrale_numba.settings import Settings
from metrale_numba.snapshot_index import SnapshotIndex, to_signed, to_unsigned


class Inspection:
    """The part of :class:`RadixTree` that looks and changes nothing."""

    _settings: Settings
    _kernels: Mapping[str, Callable[..., Any]]
    _shared: SharedArrays
    _pools: dict[int, PoolArrays]
    _index: SnapshotIndex
    _ghosts: Ghosts | None
    _epoch: int
    _adapter_drops: dict[int, int]
    _lock: threading.Lock

    def explain(
        self, tokens: Tokens, block_size: int | None = None, session_hash: int = 0, adapter_id: int = 0
    ) -> Explanation:
        """Say where the match of a look-up of these tokens would end, and why there.

        Changes nothing: no reference, no stamp, no counter. Takes time in proportion to the prompt, the adapters, the
        snapshots and the ghosts, so it is for whoever asks why a request missed, and not for each request. Only a
        cache that was made with ``ghosts=`` can tell what was evicted; see :ref:`explain`.

        Parameters
        ----------
        tokens : array of uint32, shape (n,)
            The prompt.
        block_size : int, optional
            Tokens per block. Default: the constructor's.
        session_hash : int, default 0
            The session that would look it up, or 0.
        adapter_id : int, default 0
            The adapter.

        Returns
        -------
        Explanation
            In fields; ``str()`` of it is in words.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be.
        """
        tokens = as_tokens(tokens)
        block_size = as_block_size(block_size, self._settings.block_size)
        session_hash = as_u64(session_hash, "session_hash")
        adapter_id = as_u64(adapter_id, "adapter_id")
        # Before the lock is taken: to compile them takes long.
        for group in ("adapters", "listing"):
            kernels(group)
        with self._lock:
            # What is walked again below must be what was walked first, whatever another thread writes meanwhile.
            return self._explain(tokens.copy(), block_size, session_hash, adapter_id)

    def iter_nodes(self, adapter_id: int | None = None, block_size: int | None = None) -> Iterator[NodeInfo]:
        """List the cached blocks as of one moment, those used last first and parents before children.

        What is needed of them is copied at once, under the lock; the cache may change while the iterator is used up.
        The first *n* are the *n* that would be evicted last, if nothing were held, and hang together. Changes
        nothing.

        Parameters
        ----------
        adapter_id : int, optional
            List those of this adapter alone. Default: of all.
        block_size : int, optional
            List blocks of so many tokens alone. Default: of all sizes.

        Returns
        -------
        iterator of NodeInfo
            One for each cached block; partial suffixes are told of with the block before them.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be.
        """
        adapter = None if adapter_id is None else to_signed(as_u64(adapter_id, "adapter_id"))
        size = None if block_size is None else as_block_size(block_size, self._settings.block_size)
        list_nodes = kernels("listing")["list_nodes"]
        with self._lock:
            index = self._index.arrays
            snapshots = snapshot_depths(index)
            copies = [
                copy_of(pool, index, snapshots, adapter, list_nodes)
                for pool in self._pools.values()
                if size in (None, pool.block_size)
            ]
            clock = int(self._shared.header[SHARED_CLOCK])
        return listed(copies, clock)

    def _explain(self, tokens: Ids, block_size: int, session: int, adapter_id: int) -> Explanation:
        adapter = to_signed(adapter_id)
        full = tokens.size // block_size
        matched_tokens = self._peek(tokens, block_size, adapter)
        matched_blocks = matched_tokens // block_size
        other_adapter, other_tokens = self._deepest_of_others(tokens, block_size, adapter)
        if other_tokens <= matched_tokens:
            other_adapter, other_tokens = None, 0
        evicted = None
        if matched_tokens == tokens.size:
            reason = "whole_prompt"
        elif matched_blocks == full:
            reason = "tail_not_cached" if self._settings.partial_tail_sharing else "partial_block"
        elif self._num_stored(tokens, block_size, full, adapter) > matched_blocks:
            reason = "hidden"
        else:
            ends = np.arange(matched_blocks + 1, full + 1) * block_size
            evicted = self._evicted(self._checks(tokens, adapter, ends), block_size, adapter_id)
            if evicted is not None:
                reason = "evicted"
            elif other_tokens >= (matched_blocks + 1) * block_size:
                reason = "other_adapter"
            else:
                reason = "never_seen" if self._remembers_all(adapter_id) else "not_cached"
        return Explanation(
            reason=reason,
            num_tokens=int(tokens.size),
            matched_tokens=matched_tokens,
            matched_blocks=matched_blocks,
            block_size=block_size,
            adapter_id=adapter_id,
            session_hash=session,
            evicted=evicted,
            other_adapter=other_adapter,
            other_adapter_tokens=other_tokens,
            ghosts=self._settings.ghosts,
            snapshot=self._explain_snapshot(tokens, matched_tokens, session, adapter_id),
        )

    def _peek(self, tokens: Ids, block_size: int, adapter: int) -> int:
        pool = self._pools.get(block_size)
        return 0 if pool is None else int(self._kernels["peek"](pool.header, tokens, adapter))

    def _deepest_of_others(self, tokens: Ids, block_size: int, adapter: int) -> tuple[int | None, int]:
        """Give the adapter, but for one, that has most of a prompt, and how many tokens that are."""
        pool = self._pools.get(block_size)
        if pool is None:
            return None, 0
        num_roots = int(pool.header[POOL_NUM_ROOTS])
        adapters, counts = np.empty(num_roots, np.int64), np.empty(num_roots, np.int64)
        kernels("adapters")["count_by_adapter"](pool.header, adapters, counts)
        found = [(self._peek(tokens, block_size, other), other) for other in adapters.tolist() if other != adapter]
        # Of several with as much, the one with the smallest id.
        most, other = max(found, key=lambda pair: (pair[0], -to_unsigned(pair[1])), default=(0, 0))
        return (to_unsigned(other), most) if most else (None, 0)

    def _num_stored(self, tokens: Ids, block_size: int, full: int, adapter: int) -> int:
        """Count the blocks of a prompt that have nodes, hidden or not."""
        pool = self._pools.get(block_size)
        if pool is None:
            return 0
        return full - int(kernels("adapters")["count_missing"](pool.header, tokens, full, adapter))

    def _checks(self, tokens: Ids, adapter: int, depths: npt.NDArray[np.int64]) -> UInt64Array:
        """Hash the prefixes of these depths, which do not fall."""
        checks: UInt64Array = np.empty(depths.size, np.uint64)
        kernels("listing")["hash_prefixes"](self._shared.powers, tokens, adapter, depths, checks)
        return checks

    def _evicted(self, checks: UInt64Array, block_size: int, adapter_id: int) -> EvictedPrefix | None:
        """Tell what is remembered of the blocks after a match, by their check hashes."""
        if self._ghosts is None:
            return None
        found = self._ghosts.find(checks, block_size)
        if found.size == 0:
            return None
        first = found[0]
        by_adapter = bool(first["by_adapter"])
        only = adapter_id if by_adapter else None
        return EvictedPrefix(
            blocks=found.size,
            evictions_ago=self._ghosts.count - int(first["number"]) - 1,
            ticks_ago=int(self._shared.header[SHARED_CLOCK] - first["tick"]),
            idle_ticks=int(first["tick"] - first["stamp"]),
            more_blocks=self._ghosts.num_since(int(first["number"]), only),
            more_blocks_for_all=self._ghosts.num_since(int(found["number"].min()), only),
            by_adapter=by_adapter,
        )

    def _remembers_all(self, adapter_id: int) -> bool:
        """Whether a block that was ever cached under an adapter, and is no more, would have a ghost."""
        was_dropped = self._epoch + self._adapter_drops.get(adapter_id, 0) > 0
        return self._ghosts is not None and self._ghosts.are_complete and not was_dropped

    def _explain_snapshot(self, tokens: Ids, matched_tokens: int, session: int, adapter_id: int) -> SnapshotExplanation:
        if matched_tokens == 0:
            return SnapshotExplanation("no_match")
        entries = self._entries_of(tokens, adapter_id)
        is_own = (entries["session"] == np.uint64(session)) & (session != 0)
        is_tail = entries["flags"] & TAIL != 0
        is_usable = is_own | ~(is_tail | self._settings.hermetic)
        is_inside = entries["depth"] <= matched_tokens
        usable = entries[is_usable & is_inside]
        # Entries of one prompt stand in the order of their depths.
        depth = int(usable["depth"][-1]) if usable.size else -1
        passed = entries[~is_usable & is_inside & (entries["depth"] > depth)][::-1]
        beyond = entries["depth"][is_usable & ~is_inside]
        found = SnapshotExplanation(
            "found",
            passed=tuple(
                PassedSnapshot(int(entry["depth"]), bool(entry["flags"] & SPILLED), bool(entry["flags"] & TAIL))
                for entry in passed
            ),
            lost=self._lost_of(tokens, adapter_id, entries, depth, matched_tokens, session),
            beyond_match=int(beyond[0]) if beyond.size else None,
        )
        if usable.size:
            flags = int(usable["flags"][-1])
            return found._replace(
                depth=depth,
                is_spilled=bool(flags & SPILLED),
                is_tail=bool(flags & TAIL),
                recompute_tokens=matched_tokens - depth,
            )
        deepest_passed = found.passed[0].depth if found.passed else -1
        if found.lost and found.lost[0].depth > deepest_passed:
            return found._replace(reason="lost")
        if found.passed:
            return found._replace(reason="other_session" if found.passed[0].is_tail else "hermetic")
        return found._replace(reason="none" if found.beyond_match is None else "beyond_match")

    def _entries_of(self, tokens: Ids, adapter_id: int) -> npt.NDArray[Any]:
        """Copy the entries of the prefixes of a prompt, those of small depth first."""
        entries = self._index.arrays.entries[: self._index.arrays.header[INDEX_SIZE]]
        entries = entries[(entries["adapter"] == np.uint64(adapter_id)) & (entries["depth"] <= tokens.size)]
        entries = entries[np.argsort(entries["depth"], kind="stable")]
        is_of_prompt = entries["check"] == self._checks(tokens, to_signed(adapter_id), entries["depth"].copy())
        of_prompt: npt.NDArray[Any] = entries[is_of_prompt]
        return of_prompt

    def _lost_of(
        self,
        tokens: Ids,
        adapter_id: int,
        entries: npt.NDArray[Any],
        above: int,
        matched_tokens: int,
        session: int,
    ) -> tuple[LostSnapshotInfo, ...]:
        """List the lost snapshots of a prompt, deeper than `above` and inside the match, that were for the session."""
        if self._ghosts is None:
            return ()
        there = set(entries["check"].tolist())
        lost = [
            snapshot
            for snapshot in self._ghosts.lost_snapshots.by_key.values()
            if snapshot.adapter == adapter_id
            and above < snapshot.depth <= matched_tokens
            and snapshot.check not in there
            and ((session != 0 and snapshot.session == session) or not (snapshot.was_tail or self._settings.hermetic))
        ]
        lost.sort(key=lambda snapshot: snapshot.depth)
        depths = np.array([snapshot.depth for snapshot in lost], np.int64)
        checks = self._checks(tokens, to_signed(adapter_id), depths).tolist()
        clock = int(self._shared.header[SHARED_CLOCK])
        return tuple(
            LostSnapshotInfo(snapshot.depth, snapshot.cause, clock - snapshot.tick)
            for snapshot, check in reversed(list(zip(lost, checks, strict=True)))
            if snapshot.check == check
        )
