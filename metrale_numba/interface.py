"""The contract of a prefix cache: :class:`PrefixCache` and the results its calls give.

It relies on nothing else in this package, so an engine can be written and type-checked against this file alone.
What a docstring here says about references, changes and errors holds for every implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

__all__ = [
    "EMPTY_IDS",
    "NONE",
    "Cleared",
    "Drop",
    "EvictedBlocks",
    "IdSequence",
    "Ids",
    "InsertAcquired",
    "PrefixCache",
    "PrefixMatch",
    "SnapshotStats",
    "Spill",
    "StatsDetail",
    "TierEvict",
    "Tokens",
]

NONE: Final = 0xFFFF_FFFF
"""The id that stands for "no block" and "no disk block"."""

Ids: TypeAlias = npt.NDArray[np.uint32]
"""Block ids, or disk-block ids, as results hold them: a one-dimensional ``uint32`` array."""

IdSequence: TypeAlias = npt.NDArray[np.integer[Any]] | Sequence[int]
"""Block ids, or disk-block ids, as calls take them: any one-dimensional sequence of integers in 0..2^32-1."""

Tokens: TypeAlias = npt.NDArray[np.integer[Any]] | Sequence[int]
"""Token ids as calls take them: any one-dimensional sequence of integers in 0..2^32-1.

A contiguous ``uint32`` array passes without a copy; everything else is copied first.
"""

EMPTY_IDS: Final[Ids] = np.empty(0, dtype=np.uint32)
"""No ids at all: one zero-length array that empty results share, read-only."""
EMPTY_IDS.setflags(write=False)

# Up to this many ids are printed in full; of more, a few from either end and the number of them.
_IDS_SHOWN = 8
_IDS_SHOWN_HEAD = 4
_IDS_SHOWN_TAIL = 2


def _same(mine: object, theirs: object) -> bool:
    if isinstance(mine, np.ndarray) or isinstance(theirs, np.ndarray):
        return np.array_equal(mine, theirs)  # type: ignore[arg-type]  # takes anything
    return mine == theirs


def _shown(value: object) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    if value.size <= _IDS_SHOWN:
        return str(value.tolist())
    head = ", ".join(map(str, value[:_IDS_SHOWN_HEAD].tolist()))
    tail = ", ".join(map(str, value[-_IDS_SHOWN_TAIL:].tolist()))
    return f"[{head}, ..., {tail}] ({value.size} ids)"


class _Result(tuple[Any, ...]):
    """How every result compares and prints.

    A tuple's own ``==`` asks an array for its truth value, which raises; and a hash would have to change with the
    arrays, so there is none.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # how Python says: not hashable

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple):
            return NotImplemented
        # By way of plain tuples: len() of a result need not be its number of fields.
        mine, theirs = tuple(self), tuple(other)
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def __repr__(self) -> str:
        names = cast("NamedTuple", self)._fields
        fields = ", ".join(f"{name}={_shown(value)}" for name, value in zip(names, self, strict=True))
        return f"{type(self).__name__}({fields})"


class _PrefixMatchFields(NamedTuple):
    matched_blocks: Ids = EMPTY_IDS
    matched_disk_block_ids: Ids = EMPTY_IDS
    matched_tokens: int = 0
    ssm_snapshot: int | None = None
    ssm_snapshot_tokens: int = 0
    ssm_snapshot_tier_key: int | None = None
    ssm_snapshot_tier_tokens: int = 0
    ssm_snapshot_is_tail: bool = False
    ssm_snapshot_check: int | None = None


class PrefixMatch(_Result, _PrefixMatchFields):
    """What :meth:`PrefixCache.lookup` found.

    Immutable, unpackable, equal by value, not hashable. The arrays belong to whoever receives them; the cache keeps
    no view of them. The *blocks* they name are safe from eviction until the matching :meth:`PrefixCache.release` or
    :meth:`PrefixCache.release_matched`, except a last block that was matched only in part, and the slot in
    `ssm_snapshot`, which are lent without any reference: both are safe only until the next call on the cache unless
    the caller takes a reference of its own pool on them first (:ref:`protocol`).

    Attributes
    ----------
    matched_blocks : ndarray of uint32, shape (m,)
        The blocks to reuse, in token order.
    matched_disk_block_ids : ndarray of uint32, shape (m,) or (0,)
        The disk-block id of each matched block, :data:`NONE` where it has none; empty if no matched block has one.
    matched_tokens : int
        Tokens covered by `matched_blocks`. A multiple of the block size unless the last block was matched in part.
    ssm_snapshot : int or None
        The slot of the deepest snapshot inside the match, if that snapshot is resident.
    ssm_snapshot_tokens : int
        The depth of `ssm_snapshot` in tokens, at most `matched_tokens`; recurrent state from there on is to be
        recomputed. 0 if there is no resident snapshot.
    ssm_snapshot_tier_key : int or None
        The tier key of the deepest snapshot inside the match, if that snapshot is spilled; `ssm_snapshot` is then
        None. Read its bytes into a slot, then call :meth:`PrefixCache.promote_snapshot`.
    ssm_snapshot_tier_tokens : int
        The depth of the spilled snapshot in tokens. 0 if there is none.
    ssm_snapshot_is_tail : bool
        Whether the snapshot found, resident or spilled, is a session's tail.
    ssm_snapshot_check : int or None
        The check hash of the snapshot found, resident or spilled; None without one. A tier key alone does not say
        whose state it names: bytes read from a tier are the right ones only if they were stored with this check.
    """

    __slots__ = ()

    @classmethod
    def empty(cls) -> PrefixMatch:
        """Return the match of nothing: no blocks, no tokens, no snapshot."""
        return cls()

    def is_empty(self) -> bool:
        """Whether no token was matched."""
        return self.matched_tokens == 0


class _InsertAcquiredFields(NamedTuple):
    disk_block_ids: Ids = EMPTY_IDS
    blocks: Ids = EMPTY_IDS
    released_blocks: Ids = EMPTY_IDS
    released_disk_block_ids: Ids = EMPTY_IDS


class InsertAcquired(_Result, _InsertAcquiredFields):
    """What an insert began and ceased to store, for the caller to take and drop pool references.

    The cache owns one pool reference on a block for each place where it stores it. First take one for each entry of
    `blocks` and `disk_block_ids`, then drop one for each entry of `released_blocks` and `released_disk_block_ids`: in
    the other order a block in both lists could be freed between. A chunk that was cached already keeps the block it
    has, so these lists, and not the sequence's block table, say what to reference.

    Immutable, unpackable, equal by value, not hashable. ``InsertAcquired()`` is the insert that changed nothing.

    Attributes
    ----------
    disk_block_ids : ndarray of uint32
        Disk blocks the cache now refers to and did not before.
    blocks : ndarray of uint32
        Blocks the cache now stores in a place where it did not before: those of new nodes and of a new partial
        suffix, and those adopted from the sequence. A block may be listed again while the cache stores it already:
        with ``adopt_blocks``, a node may adopt the block that is still its parent's partial suffix. Count a
        reference for every listing; a flag for each block would lose one.
    released_blocks : ndarray of uint32
        Blocks that left such a place: those of dropped or replaced partial suffixes, and those exchanged for a
        sequence's own where the cache adopts blocks. Again one reference for every listing.
    released_disk_block_ids : ndarray of uint32
        Disk blocks the cache no longer refers to: those of dropped or replaced partial suffixes.
    """

    __slots__ = ()


class _EvictedBlocksFields(NamedTuple):
    physical: Ids = EMPTY_IDS
    disk_block_ids: Ids = EMPTY_IDS


class EvictedBlocks(_Result, _EvictedBlocksFields):
    """What :meth:`PrefixCache.evict` removed, for the caller to hand the cache's references back to its pool.

    Drop one pool reference on each of `physical`, one disk reference on each of `disk_block_ids`. A block that a
    sequence still holds is not free after that.

    Immutable, unpackable into its two fields, equal by value, not hashable. ``len(evicted)`` is the number of blocks
    in `physical`, not the number of fields. ``EvictedBlocks()`` is the eviction that removed nothing.

    Attributes
    ----------
    physical : ndarray of uint32
        Blocks the cache no longer stores, in the order in which they were removed.
    disk_block_ids : ndarray of uint32
        The disk-block ids those blocks carried. Blocks without one are left out, so this is not parallel to
        `physical`.
    """

    __slots__ = ()

    def __len__(self) -> int:
        return self.physical.size

    # The inherited one counts the fields with len(); _replace() and copy.replace() go through here as well.
    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> EvictedBlocks:  # type: ignore[override]
        physical, disk_block_ids = iterable
        return cls(physical, disk_block_ids)

    # reversed() would go by len() too.
    def __reversed__(self) -> Iterator[Ids]:
        yield from (self.disk_block_ids, self.physical)

    def is_empty(self) -> bool:
        """Whether no block was removed."""
        return self.physical.size == 0


class _ClearedFields(NamedTuple):
    blocks: EvictedBlocks
    snapshot_slots: list[int]
    tier_keys: npt.NDArray[np.uint64]


class Cleared(_Result, _ClearedFields):
    """What was forgotten at once: by :meth:`RadixTree.clear`, or for one adapter by :meth:`RadixTree.drop_adapter`.

    The cache's own references are handed back; a sequence that still holds a block keeps its pool references until it
    ends, and drops nothing but those. :meth:`RadixTree.contents` lists the same and forgets nothing.

    Attributes
    ----------
    blocks : EvictedBlocks
        Every block that was stored, held by a sequence or not, and every disk-block id.
    snapshot_slots : list of int
        The slots of the resident snapshots.
    tier_keys : ndarray of uint64
        The keys of the spilled snapshots, whose stored bytes are garbage now.
    """

    __slots__ = ()


class _SpillFields(NamedTuple):
    slot: int
    key: int
    depth: int
    check: int


class Spill(_Result, _SpillFields):
    """A resident snapshot was marked spilled: write its bytes out, then use its slot again.

    The entry stays findable under its key. Write the bytes *before* the slot is used for anything else.

    Attributes
    ----------
    slot : int
        The slot the snapshot was in. The cache has given it up; it is free once no sequence reads it.
    key : int
        The tier key to store the bytes under.
    depth : int
        Tokens that the snapshot covers.
    check : int
        The check hash of the snapshot. Store it beside the bytes and pass it to
        :meth:`PrefixCache.promote_snapshot`.
    """

    __slots__ = ()


class _DropFields(NamedTuple):
    slot: int
    depth: int


class Drop(_Result, _DropFields):
    """A resident snapshot too shallow to be worth a spill was removed.

    Attributes
    ----------
    slot : int
        The slot the snapshot was in. The cache has given it up; it is free once no sequence reads it.
    depth : int
        Tokens that the snapshot covered.
    """

    __slots__ = ()


TierEvict: TypeAlias = Spill | Drop
"""What :meth:`PrefixCache.evict_snapshot_to_tier` did with its victim: a :class:`Spill` or a :class:`Drop`."""


class SnapshotStats(NamedTuple):
    """Counters of one cache's snapshot index, from the cache's beginning on.

    Attributes
    ----------
    saves : int
        Entries added by register calls and as tail siblings; overwritten entries and tails are not counted.
    lookups : int
        Look-ups that matched any token, and so asked the index.
    hits : int
        Those that found a snapshot, resident or spilled.
    anchor_depth_sum : int
        Tokens covered by the snapshots found, summed over `hits`.
    recompute_tokens_on_hit : int
        Matched tokens beyond the snapshot found, summed over `hits`.
    recompute_tokens_on_miss : int
        Matched tokens, summed over the look-ups that found no snapshot.
    evictions : int
        Entries removed to free their slot: by ``evict_snapshot_lru``, as a :class:`Drop`, or by slot.
    tier_spills : int
        Entries marked spilled.
    tier_hits : int
        Those of `hits` that found a spilled snapshot.
    tier_fault_ins : int
        Spilled entries made resident again.
    tier_reaps : int
        Spilled entries forgotten because their bytes are gone.
    """

    saves: int
    lookups: int
    hits: int
    anchor_depth_sum: int
    recompute_tokens_on_hit: int
    recompute_tokens_on_miss: int
    evictions: int
    tier_spills: int
    tier_hits: int
    tier_fault_ins: int
    tier_reaps: int


class StatsDetail(NamedTuple):
    """Counters and sizes of one cache's tree.

    Attributes
    ----------
    cache_hits : int
        Look-ups that matched any token.
    cache_misses : int
        Look-ups that matched none.
    cache_hit_tokens : int
        Tokens matched, summed over `cache_hits`.
    over_releases : int
        References dropped from nodes that no sequence held, once for each node and call. Above 0, a caller breaks
        the protocol (:ref:`protocol`).
    num_blocks : int
        Full blocks stored now.
    num_suffix_blocks : int
        Blocks of partial suffixes stored now.
    clock : int
        The stamp given last.
    num_evictable : int
        Blocks, partial suffixes included, that no sequence and no pin holds.
    epoch : int
        How often everything was forgotten.
    num_pinned_blocks : int
        Full blocks that named pins hold, counted for each pin.
    blocks_by_adapter : dict of int to int
        Full blocks stored for each adapter that has any.
    """

    cache_hits: int
    cache_misses: int
    cache_hit_tokens: int
    over_releases: int
    num_blocks: int
    num_suffix_blocks: int
    clock: int
    num_evictable: int
    epoch: int
    num_pinned_blocks: int
    blocks_by_adapter: dict[int, int]


class PrefixCache(ABC):
    """An index from token prefixes to the blocks, and the recurrent-state snapshots, computed for them.

    The cache stores ids only, never the memory they stand for. It counts references on its own nodes; the caller's
    pool counts references on blocks. :ref:`protocol` says in which order a caller takes and drops them.

    Every call is one atomic step and may come from any thread. Every argument is checked before anything changes:
    a call that raises has left the cache as it was. Arrays given to a call are only read, and not kept.

    The arguments that several calls share:

    * `tokens`: a one-dimensional sequence of integers in 0..2^32-1. A contiguous ``uint32`` array is the fastest;
      lists, tuples, ranges, ``array.array`` and NumPy arrays of any integer type are copied first.
    * `block_table`: ``block_table[i]`` is the block of tokens ``[i * block_size, (i + 1) * block_size)``. It may be
      longer than the tokens need; the rest is not looked at.
    * `disk_block_ids`: empty, or as long as `block_table`, with :data:`NONE` where a block has no disk block.
    * `block_size`: tokens per block, at least 1. None stands for the size the cache was built with. Calls with
      different sizes never match each other.
    * `session_hash`: names the conversation, 0..2^64-1; 0 is no session. It gates who sees a session's tail.
    * `adapter_id`: the adapter the blocks were computed under, 0..2^64-1; 0 is the base model. Calls under different
      adapters never match each other.
    * slots: integers in 0..2^63-1, opaque to the cache. A slot that any call *returns* has lost the cache's
      reference; it is free once no sequence reads it.

    Any call raises :class:`TypeError` for an argument of the wrong kind (a float, bool, string or None where an
    integer belongs, or a sequence that holds other things than integers) and :class:`ValueError` for one out of
    range or not one-dimensional. The message names the argument, the position and the value.
    """

    def is_active(self) -> bool:
        """Whether this cache stores blocks and holds references. Changes nothing.

        Returns
        -------
        bool
            False tells the caller to skip its own bookkeeping for the cache. The default is True.
        """
        return True

    @abstractmethod
    def lookup(
        self, tokens: Tokens, block_size: int | None = None, session_hash: int = 0, adapter_id: int = 0
    ) -> PrefixMatch:
        """Find the longest cached prefix of `tokens` and take one reference on each of its full blocks.

        Changes the cache: the matched nodes are referenced and stamped as used, the hit or miss is counted, and the
        snapshot index is asked for the deepest snapshot inside the match, which stamps the one found. A nonzero
        `session_hash` whose look-up matches anything leases that session's tail for a while.

        To leave k tokens to compute, look up ``tokens[:len(tokens) - k]``: cutting the match afterwards leaves
        references and a snapshot that are too deep.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            The prompt.
        block_size : int, optional
            Tokens per block. Default: the cache's own.
        session_hash : int, default 0
            The conversation asking.
        adapter_id : int, default 0
            The adapter in use.

        Returns
        -------
        PrefixMatch
            Empty if nothing matched. Its full blocks are safe from eviction until :meth:`release` or
            :meth:`release_matched`; a partly matched block and the snapshot slot only until the next call on the
            cache.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """

    def peek_matched_tokens(self, tokens: Tokens, block_size: int | None = None, adapter_id: int = 0) -> int:
        """Tell how many tokens :meth:`lookup` would match. Changes nothing and takes no reference.

        Nothing is stamped or counted either, so the answer may be out of date by the next call.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            The prompt.
        block_size : int, optional
            Tokens per block. Default: the cache's own.
        adapter_id : int, default 0
            The adapter in use.

        Returns
        -------
        int
            Tokens, 0..n. The default is 0.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be.
        """
        return 0

    def pin_prefix(self, tokens: Tokens, block_size: int | None = None, adapter_id: int = 0) -> int:
        """Take one reference on each full block that :meth:`lookup` would match, so that eviction passes them over.

        Changes the cache: the nodes are referenced and stamped as a look-up would. It counts no hit and no miss and
        does not ask for a snapshot. A partly matched last block counts in the answer, but gets no reference.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            The prefix to keep.
        block_size : int, optional
            Tokens per block. Default: the cache's own.
        adapter_id : int, default 0
            The adapter in use.

        Returns
        -------
        int
            Tokens pinned, 0..n; give this number to :meth:`release_matched` to undo the call. The default pins
            nothing and is 0.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """
        return 0

    @abstractmethod
    def insert(
        self,
        tokens: Tokens,
        block_table: IdSequence,
        disk_block_ids: IdSequence = (),
        block_size: int | None = None,
        matched_tokens: int = 0,
        adapter_id: int = 0,
    ) -> InsertAcquired:
        """Store the blocks of a computed prefix.

        Changes the cache: every full chunk of `tokens` that has a block is stored or, where it is cached already,
        stamped as used; a chunk past `matched_tokens` gets a reference of the inserting sequence, which its
        :meth:`release` drops. A cached chunk keeps the block it has. A shorter remainder is kept as the partial
        suffix of the last chunk, if it has a block.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            What has been computed, from the first token on.
        block_table : sequence of int, shape (m,)
            The block of each chunk. No entry that is used may be :data:`NONE`.
        disk_block_ids : sequence of int, shape (0,) or (m,), default ()
            The disk block of each chunk, or nothing.
        block_size : int, optional
            Tokens per block. Default: the cache's own.
        matched_tokens : int, default 0
            How many of `tokens` the sequence holds through a look-up or an earlier insert, 0..n, always rounded
            *down* to a multiple of the block size. Unrounded, the chunk it ends in gets no reference of the
            sequence, and the later release takes the cache's own.
        adapter_id : int, default 0
            The adapter the blocks were computed under.

        Returns
        -------
        InsertAcquired
            The pool references to take and to drop, before any other call on the cache. Ids come in the order in
            which the call met them, root first.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be, an entry of `block_table` that would be used is :data:`NONE`, or
            `disk_block_ids` is neither empty nor as long as `block_table`; nothing has changed then.
        """

    @abstractmethod
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
        """:meth:`insert`, then register a snapshot for the whole of `tokens`, in one step.

        Changes the cache as :meth:`insert` does, and the snapshot index as :meth:`insert_intermediate_snapshot` does.
        The cache takes over the caller's reference on the slot.

        Parameters
        ----------
        tokens, block_table, disk_block_ids, block_size, matched_tokens, adapter_id
            As in :meth:`insert`.
        snapshot_id : int
            The slot that holds the state after the last token.
        session_hash : int, default 0
            The conversation the snapshot belongs to.

        Returns
        -------
        displaced : int or None
            The slot of the resident snapshot that was overwritten, for the caller to free. Never the slot just given.
        acquired : InsertAcquired
            As from :meth:`insert`.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then, and the slot is still the caller's.
        """

    @abstractmethod
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
        """Register a snapshot for `tokens`, the sequence up to the point where the snapshot was made.

        Changes the snapshot index only: the entry of this prefix is overwritten, or a new one is added. No block is
        stored and no node referenced; the arguments that concern blocks are checked as in :meth:`insert` and change
        nothing. The cache takes over the caller's reference on the slot.

        Parameters
        ----------
        tokens, block_table, disk_block_ids, block_size, matched_tokens, adapter_id
            As in :meth:`insert`.
        snapshot_id : int
            The slot that holds the state after the last of `tokens`.
        session_hash : int, default 0
            The conversation the snapshot belongs to.

        Returns
        -------
        int or None
            The slot of the resident snapshot that was overwritten, for the caller to free. Never the slot just given.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then, and the slot is still the caller's.
        """

    @abstractmethod
    def insert_tail_snapshot(
        self, tokens: Tokens, snapshot_id: int, session_hash: int = 0, adapter_id: int = 0
    ) -> list[int]:
        """Register the tail of a session: the snapshot its next turn will want.

        Changes the snapshot index only. Under a nonzero `session_hash` the session's earlier tail and sibling are
        removed first, and only that session will be given this one. The cache takes over the caller's reference on
        the slot.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            The sequence up to the snapshot.
        snapshot_id : int
            The slot that holds the state after the last of `tokens`.
        session_hash : int, default 0
            The conversation. No look-up is ever given a tail of session 0.
        adapter_id : int, default 0
            The adapter the state was computed under.

        Returns
        -------
        list of int
            The slots of the snapshots that were removed or overwritten, for the caller to free. Never the slot just
            given.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then, and the slot is still the caller's.
        """

    @abstractmethod
    def insert_tail_sibling_snapshot(
        self, tokens: Tokens, snapshot_id: int, session_hash: int = 0, adapter_id: int = 0
    ) -> int | None:
        """Register the sibling of a session's tail: a second snapshot that is leased and replaced together with it.

        Changes the snapshot index only. Call it after :meth:`insert_tail_snapshot`, which would otherwise remove it
        as the session's earlier sibling. Unlike a tail, a sibling is found by every session, unless the cache is
        hermetic. The cache takes over the caller's reference on the slot.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            The sequence up to the snapshot.
        snapshot_id : int
            The slot that holds the state after the last of `tokens`.
        session_hash : int, default 0
            The conversation.
        adapter_id : int, default 0
            The adapter the state was computed under.

        Returns
        -------
        int or None
            The slot of the resident snapshot that was overwritten, for the caller to free. Never the slot just given.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then, and the slot is still the caller's.
        """

    @abstractmethod
    def release(self, tokens: Tokens, block_size: int | None = None, adapter_id: int = 0) -> None:
        """Drop one sequence's reference on every full block of `tokens` that the cache holds.

        Changes counts only: nothing is evicted, stamped or counted as a look-up. Blocks that no sequence holds any
        more become candidates of :meth:`evict`. Tokens that the cache does not hold are no error. A count never falls
        below 0, but a release of what was never held takes another sequence's reference or the cache's own.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            Exactly what this sequence holds: what its look-up matched, or what it inserted if that is longer.
        block_size : int, optional
            Tokens per block. Default: the cache's own.
        adapter_id : int, default 0
            The adapter given at look-up and insert.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """

    @abstractmethod
    def release_matched(self, tokens: Tokens, block_size: int | None, matched_tokens: int, adapter_id: int = 0) -> None:
        """Drop the references that one :meth:`lookup` or :meth:`pin_prefix` took.

        For a caller that gives a look-up up before any insert. Changes counts only, as :meth:`release` does.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            The tokens that were looked up.
        block_size : int or None
            Tokens per block; None is the cache's own.
        matched_tokens : int
            How many tokens were matched, 0..n; only the full blocks inside them are released.
        adapter_id : int, default 0
            The adapter given at the look-up.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """

    @abstractmethod
    def evict(self, num_blocks: int) -> EvictedBlocks:
        """Remove the least recently used leaves that no sequence holds, until `num_blocks` blocks came back.

        Changes the cache: the leaves are forgotten, and a parent left without children is a leaf from then on. All
        adapters and block sizes share one order. Snapshots are not touched.

        Parameters
        ----------
        num_blocks : int
            Blocks wanted, at least 0.

        Returns
        -------
        EvictedBlocks
            The pool references to drop. Fewer than `num_blocks` if no more leaf is free to go, none if there is
            nothing to evict; one more if the last leaf had a partial suffix, whose block goes with it.

        Raises
        ------
        TypeError, ValueError
            If `num_blocks` is not what it should be; nothing has changed then.
        """

    @abstractmethod
    def evict_snapshot_lru(self) -> int | None:
        """Remove one resident snapshot from the index.

        Changes the snapshot index only. The choice follows how long ago its session was active, its age and its
        depth; the tail of a session with a running lease is passed over while there is anything else.

        Returns
        -------
        int or None
            The slot of the removed snapshot, for the caller to free; None if nothing is resident.
        """

    def evict_snapshot_to_tier(self, min_tokens: int) -> TierEvict | None:
        """Take one resident snapshot out of its slot: spill it if it is deep enough, remove it if not.

        Changes the snapshot index only. The choice is that of :meth:`evict_snapshot_lru`.

        Parameters
        ----------
        min_tokens : int
            The least depth in tokens worth a spill, at least 0. With 0 the snapshot is always spilled.

        Returns
        -------
        Spill, Drop or None
            What was done and the slot it leaves; None if nothing is resident. The default is None.

        Raises
        ------
        TypeError, ValueError
            If `min_tokens` is not what it should be; nothing has changed then.
        """
        return None

    def promote_snapshot(self, key: int, new_slot: int, check: int | None = None) -> bool:
        """Make a spilled snapshot resident again, after its bytes were read into `new_slot`.

        Changes the snapshot index only, and only if it answers True; the cache then has taken over the caller's
        reference on the slot.

        Parameters
        ----------
        key : int
            The tier key, 0..2^64-1.
        new_slot : int
            The slot the bytes were read into.
        check : int, optional
            The check hash stored beside the bytes, 0..2^64-1. Without it, bytes of another prefix with the same key
            would be taken for this one's.

        Returns
        -------
        bool
            False, and the slot is still the caller's to free, if the key is unknown, its snapshot is resident
            already (somebody else read it first), or `check` is not the entry's. The default is False.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """
        return False

    def forget_snapshot_tier_key(self, key: int) -> bool:
        """Remove a spilled snapshot whose stored bytes are gone, so that look-ups no longer find it.

        Changes the snapshot index only. A resident snapshot of that key is left alone, for its slot is in use.

        Parameters
        ----------
        key : int
            The tier key, 0..2^64-1.

        Returns
        -------
        bool
            Whether a spilled snapshot was removed. The default is False.

        Raises
        ------
        TypeError, ValueError
            If `key` is not what it should be; nothing has changed then.
        """
        return False

    @abstractmethod
    def snapshot_count(self) -> int:
        """Count the snapshots in the index, resident and spilled. Changes nothing.

        Returns
        -------
        int
            Number of entries.
        """

    @abstractmethod
    def stats(self) -> tuple[int, int]:
        """Tell how much the tree holds. Changes nothing.

        Returns
        -------
        entries : int
            Entries in the tree.
        cached_blocks : int
            Full blocks stored. Blocks of partial suffixes are not counted.
        """
