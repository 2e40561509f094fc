"""A cache that counts how often each of its blocks was hit, for who looks at what it holds after a replay."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from metrale_numba.interface import IdSequence, InsertAcquired, PrefixMatch, Tokens
from metrale_numba.radix_tree import RadixTree

__all__ = ["HitCountingCache"]


class HitCountingCache(RadixTree):
    """A :class:`RadixTree` that counts the look-ups that matched each block, from its insert on; for one thread.

    Takes the constructor's keywords. The counts are by block id, so no block may be stored in two places.
    """

    _hits: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def hits_of(self, block: int) -> int:
        """Say how often a block was hit since it was inserted.

        Parameters
        ----------
        block : int
            A block that is cached.

        Returns
        -------
        int
            Look-ups that matched it.
        """
        return int(self._hits[block])

    def lookup(
        self,
        tokens: Tokens,
        block_size: int | None = None,
        session_hash: int = 0,
        adapter_id: int = 0,
        *,
        record: bool = True,
    ) -> PrefixMatch:
        """Look up as :meth:`RadixTree.lookup` does, and count."""
        match = super().lookup(tokens, block_size, session_hash, adapter_id, record=record)
        # A prompt has no block twice.
        self._hits[match.matched_blocks] += 1
        return match

    def insert(
        self,
        tokens: Tokens,
        block_table: IdSequence,
        disk_block_ids: IdSequence = (),
        block_size: int | None = None,
        matched_tokens: int = 0,
        adapter_id: int = 0,
    ) -> InsertAcquired:
        """Insert as :meth:`RadixTree.insert` does; what is new was not hit yet."""
        acquired = super().insert(tokens, block_table, disk_block_ids, block_size, matched_tokens, adapter_id)
        most = int(acquired.blocks.max(initial=0))
        if most >= self._hits.size:
            self._hits = np.concatenate([self._hits, np.zeros(most + 1, np.int64)])
        self._hits[acquired.blocks] = 0
        return acquired
