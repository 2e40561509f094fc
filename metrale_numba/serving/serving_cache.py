"""The cache, the pools, the tier and the engine's memory, bound together: :class:`ServingCache`.

It follows :ref:`protocol` for its user. Each step of the protocol that joins several calls is made under one lock; the
tier is talked to without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from metrale_numba.arguments import as_bool, as_count, as_text, as_tokens, as_u64
from metrale_numba.copies import read_file
from metrale_numba.errors import RefcountError
from metrale_numba.interface import NONE, EvictedBlocks, Ids, IdSequence, InsertAcquired, PrefixMatch, Tokens
from metrale_numba.no_caching import NoPrefixCaching
from metrale_numba.radix_tree import RadixTree
from metrale_numba.serving.block_pool import BlockPool, OutOfBlocks, SnapshotPool
from metrale_numba.serving.mover import SnapshotMover
from metrale_numba.serving.saved_part import SavedPart
from metrale_numba.serving.sequence import Holdings, Sequence, SequenceEnded
from metrale_numba.serving.tier import TierStore
from metrale_numba.serving.transfers import FaultIn, Identity
from metrale_numba.serving.upkeep import Upkeep
from metrale_numba.settings import as_reserve

__all__ = ["ServingCache"]

_Write = Callable[[int], object]

# Of snapshots that the tier no longer has, a request finds out about so many; then it computes.
_MOST_FETCHES = 8


class ServingCache(Upkeep):
    """A prefix cache with the books that its caller would have to keep: pools, sequences, snapshots and their tier.

    :meth:`begin` gives a :class:`Sequence` for each request. Any number of threads may call any method at any time.
    The pools of blocks and of slots are the serving cache's alone, and other code never calls the prefix cache itself,
    save to ask.

    Parameters
    ----------
    cache : RadixTree or NoPrefixCaching
        The index, empty. With the second one nothing is shared, and all else works the same.
    blocks : BlockPool or int
        The KV blocks, or how many there are.
    mover : SnapshotMover, optional
        How the engine's memory is moved. Needed with a tier, and with partial-tail sharing.
    slots : SnapshotPool or int, default 0
        The snapshot slots, or how many there are.
    disk_blocks : BlockPool or int, optional
        The disk blocks, or how many there are, for an engine that stores KV blocks on a disk as well.
    tier : TierStore, optional
        Where snapshots go when slots are short. Without one they are dropped.
    model : str, default ""
        A fingerprint of the weights. Together with `dtype` and `rank` it says whose snapshots are whose in the tier:
        two serving caches may use one tier only if they differ in one of these.
    dtype : str, default ""
        In what form the state is stored.
    rank : int, default 0
        Which part of a divided model this process has.
    spill_min_tokens : int, default 0
        Snapshots of fewer tokens are dropped and not spilled.
    keep_copies : bool, default True
        Whether the tier keeps the bytes of a snapshot that came back, so that it need not be written again when it is
        spilled again.
    hybrid : bool, optional
        Whether the model has recurrent state, so that computing begins at a snapshot. Default: if there are slots.

    Raises
    ------
    TypeError, ValueError
        If an argument is not what it should be, or does not go with the others.
    """

    def __init__(
        self,
        cache: RadixTree | NoPrefixCaching,
        blocks: BlockPool | int,
        mover: SnapshotMover | None = None,
        *,
        slots: SnapshotPool | int = 0,
        disk_blocks: BlockPool | int | None = None,
        tier: TierStore | None = None,
        model: str = "",
        dtype: str = "",
        rank: int = 0,
        spill_min_tokens: int = 0,
        keep_copies: bool = True,
        hybrid: bool | None = None,
    ) -> None:
        if not isinstance(cache, (RadixTree, NoPrefixCaching)):
            raise TypeError(f"cache must be a RadixTree or a NoPrefixCaching, not {type(cache).__name__}")
        if cache.stats() != (0, 0) or cache.snapshot_count() != 0:
            raise ValueError("cache must be empty: nobody has taken references on what is in it")
        self._set_up(
            cache,
            blocks,
            mover,
            slots=slots,
            disk_blocks=disk_blocks,
            tier=tier,
            identity=_as_identity(model, dtype, rank),
            spill_min_tokens=spill_min_tokens,
            keep_copies=keep_copies,
            hybrid=hybrid,
        )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        blocks: BlockPool | int,
        mover: SnapshotMover | None = None,
        *,
        slots: SnapshotPool | int = 0,
        disk_blocks: BlockPool | int | None = None,
        tier: TierStore | None = None,
        model: str = "",
        dtype: str = "",
        rank: int = 0,
        spill_min_tokens: int = 0,
        keep_copies: bool = True,
        hybrid: bool | None = None,
        reserve: int = 0,
    ) -> ServingCache:
        """Read what :meth:`save` wrote, and go on from there.

        The pools count the references of the index, and every snapshot that the tier still has is spilled in it. What
        else the tier has under this `model`, `dtype` and `rank` is deleted: it was written after the index was saved.
        The index has its saved settings. Bring back the contents of the blocks before the first sequence begins.

        Parameters
        ----------
        path : str or path-like
            The file.
        blocks : BlockPool or int
            The KV blocks, unused so far; at least as many as the index refers to.
        mover, slots, disk_blocks, tier, model, dtype, rank, spill_min_tokens, keep_copies, hybrid
            As for the constructor; `model`, `dtype` and `rank` as they were.
        reserve : int, default 0
            As for :meth:`metrale_numba.RadixTree.load`.

        Returns
        -------
        ServingCache
            A new one, without sequences, its counters at 0, but for the most blocks that were ever in use.

        Raises
        ------
        OSError
            If the file cannot be read.
        CacheFileError
            If it is no saved serving cache, is damaged, or is of another format.
        TypeError, ValueError
            If an argument is not what it should be, or does not go with what was saved.
        """
        reserve = as_reserve(reserve)
        identity = _as_identity(model, dtype, rank)
        meta, arrays = read_file(path)
        saved = SavedPart.of_file(path, meta)
        if saved.identity != identity:
            raise ValueError(f"{os.fspath(path)} was saved for {saved.identity}, not for {identity}")
        serving = cls.__new__(cls)
        serving._set_up(
            RadixTree._of_parts(path, meta, arrays, reserve),
            blocks,
            mover,
            slots=slots,
            disk_blocks=disk_blocks,
            tier=tier,
            identity=identity,
            spill_min_tokens=spill_min_tokens,
            keep_copies=keep_copies,
            hybrid=hybrid,
        )
        serving._restore(path, saved)
        return serving

    # Sequences

    def begin(
        self,
        tokens: Tokens,
        *,
        session: int = 0,
        adapter: int = 0,
        min_compute: int = 1,
        retry: bool | Sequence = False,
    ) -> Sequence:
        """Begin a request with as much of its prompt as is cached.

        Takes references on the blocks that it finds, copies a block that it matched in part, and brings a spilled
        snapshot back, for which it may wait for the tier.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            The prompt, which is copied.
        session : int, default 0
            The conversation, 0..2^64-1, best given by the caller; see :func:`metrale_numba.session_hash`.
        adapter : int, default 0
            The adapter it is computed under, 0..2^64-1.
        min_compute : int, default 1
            How many of the tokens at the end are left to compute in any case.
        retry : bool or Sequence, default False
            The earlier sequence of this request, if it is begun again because blocks were short or it was preempted.
            A request is counted once, when it first gets its blocks, with what was cached for it then. True for one
            that has been counted.

        Returns
        -------
        Sequence
            To be ended by :meth:`Sequence.finish`, :meth:`Sequence.abort` or a ``with`` statement.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """
        prompt = np.array(as_tokens(tokens))
        session = as_u64(session, "session")
        adapter = as_u64(adapter, "adapter")
        min_compute = as_count(min_compute, "min_compute")
        holdings = Holdings(prompt, session, adapter, has_disks=self._disk_blocks is not None)
        if isinstance(retry, Sequence):
            if retry._serving is not self:
                raise ValueError("retry is a sequence of another serving cache")
            holdings.is_counted = retry._holdings.is_counted
        else:
            holdings.is_counted = as_bool(retry, "retry")
        record = retry is False
        try:
            fault = self._match(holdings, min_compute, record, may_fetch=True)
            fetches = 1
            while fault is not None and self._fetch(holdings, fault):
                fault = self._match(holdings, min_compute, record=False, may_fetch=fetches < _MOST_FETCHES)
                fetches += 1
            # Last, since the request waits for what it reads from the tier, and for nothing that is written to it.
            self._store.write_staged()
        except BaseException:
            with self._lock, self._books:
                self._drop(holdings)
            self._store.write_staged()
            raise
        holdings.had_snapshot = holdings.slot is not None
        return Sequence(self, holdings)

    def _match(self, holdings: Holdings, min_compute: int, record: bool, *, may_fetch: bool) -> FaultIn | None:
        with self._lock, self._books:
            self._release_forgotten()
            # From here on its references are somebody's, even if the next line fails.
            self._running.add(holdings)
            return self._look_up(holdings, min_compute, record, may_fetch)

    def _look_up(self, holdings: Holdings, min_compute: int, record: bool, may_fetch: bool) -> FaultIn | None:
        if self._tree is None:
            return None
        holdings.epoch = self._tree.adapter_epoch(holdings.adapter)
        query = holdings.tokens[: max(holdings.num_tokens - min_compute, 0)]
        rest = query.size % self._block_size
        # Nothing may be evicted between the look-up and the copy of a block that it matched in part.
        if self._shares_tails and rest and self._blocks.num_free == 0:
            matched = self._tree.peek_matched_tokens(query, adapter_id=holdings.adapter)
            if matched % self._block_size and not self._make_room(1):
                query = query[: query.size - rest]
        match = self._tree.lookup(query, session_hash=holdings.session, adapter_id=holdings.adapter, record=record)
        if match.is_empty():
            return None
        self._hold(holdings, match)
        if match.ssm_snapshot is not None:
            self._slots.inc_ref([match.ssm_snapshot])
            holdings.slot = match.ssm_snapshot
            holdings.slot_tokens = match.ssm_snapshot_tokens
        elif match.ssm_snapshot_tier_key is not None and may_fetch:
            assert match.ssm_snapshot_check is not None
            holdings.slot_tokens = match.ssm_snapshot_tier_tokens
            fault = self._store.plan(
                match.ssm_snapshot_tier_key, match.ssm_snapshot_check, holdings.adapter, holdings.epoch
            )
            if fault is None:
                holdings.slot_tokens = 0
            return fault
        return None

    def _hold(self, holdings: Holdings, match: PrefixMatch) -> None:
        """Take the references of a look-up, and copy the last block if it was matched in part."""
        # First what nobody could count anew.
        rows = match.matched_tokens % self._block_size
        holdings.held = match.matched_tokens - rows
        holdings.table = match.matched_blocks
        holdings.cached_tokens = match.matched_tokens
        self._blocks.inc_ref(match.matched_blocks)
        if self._disk_blocks is not None:
            holdings.disks = np.full(holdings.table.size, NONE, np.uint32)
            # A copy is on no disk.
            whole = match.matched_disk_block_ids[: holdings.held // self._block_size]
            self._disk_blocks.inc_ref(whole[whole != NONE])
            holdings.disks[: whole.size] = whole
        if rows:
            assert self._mover is not None
            lent = holdings.table[-1:]
            own = self._blocks.allocate(1)
            try:
                self._mover.copy_rows(int(lent[0]), int(own[0]), rows)
            except BaseException:
                self._blocks.dec_ref(own)
                raise
            holdings.table = np.concatenate([holdings.table[:-1], own])
            self._blocks.dec_ref(lent)

    def _fetch(self, holdings: Holdings, fault: FaultIn) -> bool:
        """Bring a spilled snapshot back; whether the look-up was given up and is to be made again."""
        ask_again = self._store.fetch(fault)
        with self._lock, self._books:
            if fault.load.slot is not None:
                self._store.settle_transit(fault.load.slot)
                holdings.slot = fault.load.slot
            else:
                holdings.slot_tokens = 0
            if ask_again:
                self._give_back(holdings)
        return ask_again

    def _count(self, holdings: Holdings) -> None:
        """Count a request, once, when it is sure that it will be computed."""
        if holdings.is_counted:
            return
        holdings.is_counted = True
        self._num_requests += 1
        self._queried_tokens += holdings.prompt_tokens
        self._hit_tokens += holdings.cached_tokens
        if self._is_hybrid:
            self._snapshot_hits += holdings.had_snapshot
            self._recompute_tokens += holdings.cached_tokens - holdings.slot_tokens

    def _require_running(self, holdings: Holdings) -> None:
        if holdings.is_ended:
            raise SequenceEnded("the sequence has come to its end in another thread")

    def _make_room(self, wanted: int) -> bool:
        """Evict until so many blocks are free; False, with nothing evicted, if that cannot be."""
        short = wanted - self._blocks.num_free
        if short <= 0:
            return True
        if self._tree is None or self._num_evictable() < short:
            return False
        while short > 0:
            evicted = self._tree.evict(short)
            if evicted.is_empty():
                return False
            self._evicted_blocks += len(evicted)
            self._drop_blocks(evicted)
            short = wanted - self._blocks.num_free
        return True

    def _allocate(self, holdings: Holdings, n: int | None) -> Ids:
        with self._lock, self._books:
            self._release_forgotten()
            self._require_running(holdings)
            if n is None:
                n = max(-(-holdings.num_tokens // self._block_size) - holdings.table.size, 0)
            if not self._make_room(n):
                raise self._out_of_blocks(holdings, n)
            blocks = self._blocks.allocate(n)
            holdings.extend(blocks)
            self._count(holdings)
            return blocks

    def _out_of_blocks(self, holdings: Holdings, n: int) -> OutOfBlocks:
        free, total, evictable = self._blocks.num_free, self._blocks.num_blocks, self._num_evictable()
        message = f"{n} blocks wanted, {free} of {total} free and {evictable} evictable; "
        table = holdings.table.size
        if table + n > total:
            message += f"with the {table} that it has, the sequence needs more than there are"
        else:
            message += "running sequences and pins hold the others"
        return OutOfBlocks(message, n, free + evictable, total)

    def _set_disk_blocks(self, holdings: Holdings, first: int, ids: Ids) -> None:
        if self._disk_blocks is None:
            raise ValueError("ids: this serving cache has no disk blocks")
        with self._lock, self._books:
            self._require_running(holdings)
            end = first + ids.size
            if end > holdings.table.size:
                raise ValueError(
                    f"first is {first}, and with {ids.size} ids that ends behind the table's {holdings.table.size}"
                )
            assert holdings.disks is not None
            taken = np.flatnonzero(holdings.disks[first:end] != NONE)
            if taken.size:
                place = first + int(taken[0])
                raise ValueError(f"first is {first}, but block {place} of the table has a disk block already")
            listed = set()
            for position, number in enumerate(ids.tolist()):
                if number in listed:
                    raise ValueError(f"ids[{position}] is {number}, which is listed before")
                listed.add(number)
                if number >= self._disk_blocks.num_blocks:
                    raise ValueError(f"ids[{position}] is {number}, outside 0..{self._disk_blocks.num_blocks - 1}")
                if self._disk_blocks.ref_count(number) == 0:
                    raise RefcountError(f"ids[{position}] is disk block {number}, which is free")
            disks = holdings.disks.copy()
            disks[first:end] = ids
            holdings.disks = disks

    def _publish(self, holdings: Holdings, upto: int) -> int:
        with self._lock, self._books:
            self._release_forgotten()
            self._require_running(holdings)
            self._count(holdings)
            whole = upto - upto % self._block_size
            done = upto if self._shares_tails else whole
            if self._tree is None or done <= holdings.held or self._is_stale(holdings):
                return holdings.held
            tokens = holdings.tokens[:done]
            num_blocks = -(-done // self._block_size)
            disks: IdSequence = ()
            if holdings.disks is not None and (holdings.disks[:num_blocks] != NONE).any():
                disks = holdings.disks[:num_blocks]
            acquired = self._tree.insert(
                tokens,
                holdings.table[:num_blocks],
                disks,
                matched_tokens=holdings.held,
                adapter_id=holdings.adapter,
            )
            num_new = (whole - holdings.held) // self._block_size
            if acquired.blocks.size < num_new:
                # Part of it was there already, or a quota cut it short: a release of what is not held would take
                # somebody else's reference.
                whole = min(whole, self._tree.peek_matched_tokens(tokens[:whole], adapter_id=holdings.adapter))
            # Before the pools' books, which can be counted anew.
            holdings.held = max(holdings.held, whole)
            self._take_over(acquired)
            return holdings.held

    def _take_over(self, acquired: InsertAcquired) -> None:
        self._blocks.inc_ref(acquired.blocks)
        if self._twice is not None:
            self._twice.add(acquired.blocks)
        if self._disk_blocks is not None:
            self._disk_blocks.inc_ref(acquired.disk_block_ids)
        self._drop_blocks(EvictedBlocks(acquired.released_blocks, acquired.released_disk_block_ids))

    # Snapshots

    def _save_snapshot(self, holdings: Holdings, depth: int, write: _Write) -> bool:
        def register(tree: RadixTree, slots: list[int]) -> list[list[int]]:
            old = tree.insert_intermediate_snapshot(
                tokens=holdings.tokens[:depth],
                block_table=(),
                disk_block_ids=(),
                block_size=None,
                snapshot_id=slots[0],
                session_hash=holdings.session,
                adapter_id=holdings.adapter,
            )
            return [[] if old is None else [old]]

        return self._with_slots(holdings, [write], register)

    def _save_tail(self, holdings: Holdings, depth: int, write: _Write, sibling: tuple[int, _Write] | None) -> bool:
        def register(tree: RadixTree, slots: list[int]) -> list[list[int]]:
            identity = {"session_hash": holdings.session, "adapter_id": holdings.adapter}
            displaced = [tree.insert_tail_snapshot(holdings.tokens[:depth], slots[0], **identity)]
            if sibling is not None and len(slots) > 1:
                old = tree.insert_tail_sibling_snapshot(holdings.tokens[: sibling[0]], slots[1], **identity)
                displaced.append([] if old is None else [old])
            return displaced

        return self._with_slots(holdings, [write] if sibling is None else [write, sibling[1]], register)

    def _with_slots(
        self,
        holdings: Holdings,
        writes: list[_Write],
        register: Callable[[RadixTree, list[int]], list[list[int]]],
    ) -> bool:
        """Take a slot for each, have them written to, and register them; False if there is none, or no use for one.

        For all but the first it does without, if there are not as many. `register` tells what each displaced.
        """
        tree = self._tree
        if tree is None:
            return False
        slots: list[int] = []
        try:
            with self._lock, self._books:
                self._release_forgotten()
                self._require_running(holdings)
                # All at once, so that none makes room for itself at the cost of another.
                try:
                    while len(slots) < len(writes) and not self._is_stale(holdings):
                        slot = self._store.take_slot()
                        if slot is None:
                            break
                        slots.append(slot)
                except BaseException:
                    for slot in slots:
                        self._store.give_back(slot)
                    raise
            if not slots:
                return False
            displaced: list[list[int]] = []
            is_of_use = False
            try:
                for slot, write in zip(slots, writes, strict=False):
                    write(slot)
                is_of_use = True
            finally:
                with self._lock, self._books:
                    is_of_use = is_of_use and not holdings.is_ended and not self._is_stale(holdings)
                    try:
                        if is_of_use:
                            displaced = register(tree, slots)
                    finally:
                        for slot, old in zip(slots, displaced, strict=False):
                            self._store.registered(slot, holdings.adapter, old)
                        for slot in slots[len(displaced) :]:
                            self._store.give_back(slot)
            return is_of_use
        finally:
            self._store.settle()

    def _release_slot(self, holdings: Holdings) -> None:
        with self._lock, self._books:
            if holdings.slot is not None:
                self._slots.dec_ref([holdings.slot])
                holdings.slot = None

    def _end(self, holdings: Holdings, *, is_abort: bool) -> None:
        with self._lock, self._books:
            self._release_forgotten()
            if holdings.is_ended:
                return
            if not is_abort:
                self._count(holdings)
                self._num_finished += 1
            elif holdings.is_counted:
                self._num_aborted += 1
            else:
                self._num_refused += 1
            self._drop(holdings)
        self._store.settle()


def _as_identity(model: object, dtype: object, rank: object) -> Identity:
    return Identity(as_text(model, "model"), as_text(dtype, "dtype"), as_count(rank, "rank"))
