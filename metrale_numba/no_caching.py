"""The cache that stores nothing, for an engine that runs with prefix caching switched off.

It relies on :mod:`metrale_numba.arguments` and promises to refuse exactly what a real cache refuses, so that a
mistake in a call shows whether caching is on or not.
"""

from __future__ import annotations

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
from metrale_numba.interface import (
    EvictedBlocks,
    IdSequence,
    InsertAcquired,
    PrefixCache,
    PrefixMatch,
    TierEvict,
    Tokens,
)
from metrale_numba.settings import DEFAULT_BLOCK_SIZE

__all__ = ["NoPrefixCaching"]


class NoPrefixCaching(PrefixCache):
    """A prefix cache that finds nothing, stores nothing and holds no reference.

    Every call checks its arguments and changes nothing, whatever it says in :class:`PrefixCache`; no look-up is
    counted as a miss. A snapshot slot offered to it stays the caller's: it is neither kept nor among the slots that a
    call hands back, which are those the *cache* gave up, so a caller who offers slots to a cache that is not
    active frees them itself. Any thread may call anything.

    Parameters
    ----------
    block_size : int, default 16
        Tokens per block where a call does not say; it matters to the checks alone.

    Raises
    ------
    TypeError, ValueError
        If `block_size` is not an integer of at least 1.
    """

    def __init__(self, *, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        self._block_size = as_block_size(block_size, DEFAULT_BLOCK_SIZE)

    @property
    def block_size(self) -> int:
        """Tokens per block where a call does not say."""
        return self._block_size

    def is_active(self) -> bool:
        """Answer False: there is no bookkeeping to do for this cache."""
        return False

    def lookup(
        self, tokens: Tokens, block_size: int | None = None, session_hash: int = 0, adapter_id: int = 0
    ) -> PrefixMatch:
        """Find nothing: the empty match, and no hit or miss is counted."""
        as_tokens(tokens)
        as_block_size(block_size, self._block_size)
        as_u64(session_hash, "session_hash")
        as_u64(adapter_id, "adapter_id")
        return PrefixMatch.empty()

    def peek_matched_tokens(self, tokens: Tokens, block_size: int | None = None, adapter_id: int = 0) -> int:
        """Find nothing: 0 tokens."""
        self._check_prefix(tokens, block_size, adapter_id)
        return 0

    def pin_prefix(self, tokens: Tokens, block_size: int | None = None, adapter_id: int = 0) -> int:
        """Pin nothing: 0 tokens."""
        self._check_prefix(tokens, block_size, adapter_id)
        return 0

    def insert(
        self,
        tokens: Tokens,
        block_table: IdSequence,
        disk_block_ids: IdSequence = (),
        block_size: int | None = None,
        matched_tokens: int = 0,
        adapter_id: int = 0,
    ) -> InsertAcquired:
        """Store nothing: the caller has no reference to take or drop."""
        num_tokens = self._check_blocks(tokens, block_table, disk_block_ids, block_size)
        as_matched_tokens(matched_tokens, num_tokens)
        as_u64(adapter_id, "adapter_id")
        return InsertAcquired()

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
        """Store nothing: no slot is displaced, and `snapshot_id` stays the caller's."""
        self._check_snapshot(
            tokens, block_table, disk_block_ids, block_size, snapshot_id, session_hash, matched_tokens, adapter_id
        )
        return None, InsertAcquired()

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
        """Register nothing: no slot is displaced, and `snapshot_id` stays the caller's."""
        self._check_snapshot(
            tokens, block_table, disk_block_ids, block_size, snapshot_id, session_hash, matched_tokens, adapter_id
        )
        return None

    def insert_tail_snapshot(
        self, tokens: Tokens, snapshot_id: int, session_hash: int = 0, adapter_id: int = 0
    ) -> list[int]:
        """Register nothing: no slot is displaced, and `snapshot_id` stays the caller's."""
        self._check_tail(tokens, snapshot_id, session_hash, adapter_id)
        return []

    def insert_tail_sibling_snapshot(
        self, tokens: Tokens, snapshot_id: int, session_hash: int = 0, adapter_id: int = 0
    ) -> int | None:
        """Register nothing: no slot is displaced, and `snapshot_id` stays the caller's."""
        self._check_tail(tokens, snapshot_id, session_hash, adapter_id)
        return None

    def release(self, tokens: Tokens, block_size: int | None = None, adapter_id: int = 0) -> None:
        """Release nothing: no reference was taken."""
        self._check_prefix(tokens, block_size, adapter_id)

    def release_matched(self, tokens: Tokens, block_size: int | None, matched_tokens: int, adapter_id: int = 0) -> None:
        """Release nothing: no reference was taken."""
        num_tokens = as_tokens(tokens).size
        as_block_size(block_size, self._block_size)
        as_matched_tokens(matched_tokens, num_tokens)
        as_u64(adapter_id, "adapter_id")

    def evict(self, num_blocks: int) -> EvictedBlocks:
        """Evict nothing: no block is stored."""
        as_count(num_blocks, "num_blocks")
        return EvictedBlocks()

    def evict_snapshot_lru(self) -> int | None:
        """Evict nothing: None, for no snapshot is resident."""
        return None

    def evict_snapshot_to_tier(self, min_tokens: int) -> TierEvict | None:
        """Spill nothing: None, for no snapshot is resident."""
        as_count(min_tokens, "min_tokens")
        return None

    def promote_snapshot(self, key: int, new_slot: int, check: int | None = None) -> bool:
        """Promote nothing: False, for no key is known, and `new_slot` stays the caller's."""
        as_u64(key, "key")
        as_slot(new_slot, "new_slot")
        as_check(check)
        return False

    def forget_snapshot_tier_key(self, key: int) -> bool:
        """Forget nothing: False, for no key is known."""
        as_u64(key, "key")
        return False

    def snapshot_count(self) -> int:
        """Count the snapshots: 0."""
        return 0

    def stats(self) -> tuple[int, int]:
        """Count entries and blocks: 0 and 0."""
        return 0, 0

    def _check_prefix(self, tokens: Tokens, block_size: int | None, adapter_id: int) -> None:
        as_tokens(tokens)
        as_block_size(block_size, self._block_size)
        as_u64(adapter_id, "adapter_id")

    def _check_blocks(
        self, tokens: Tokens, block_table: IdSequence, disk_block_ids: IdSequence, block_size: int | None
    ) -> int:
        num_tokens = as_tokens(tokens).size
        blocks = as_block_table(block_table)
        as_disk_block_ids(disk_block_ids, blocks)
        check_block_table(blocks, num_tokens, as_block_size(block_size, self._block_size))
        return num_tokens

    def _check_snapshot(
        self,
        tokens: Tokens,
        block_table: IdSequence,
        disk_block_ids: IdSequence,
        block_size: int | None,
        snapshot_id: int,
        session_hash: int,
        matched_tokens: int,
        adapter_id: int,
    ) -> None:
        num_tokens = self._check_blocks(tokens, block_table, disk_block_ids, block_size)
        as_slot(snapshot_id)
        as_u64(session_hash, "session_hash")
        as_matched_tokens(matched_tokens, num_tokens)
        as_u64(adapter_id, "adapter_id")

    def _check_tail(self, tokens: Tokens, snapshot_id: int, session_hash: int, adapter_id: int) -> None:
        as_tokens(tokens)
        as_slot(snapshot_id)
        as_u64(session_hash, "session_hash")
        as_u64(adapter_id, "adapter_id")
