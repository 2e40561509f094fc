"""Blocks that the cache stores in two places, as a node's and as a partial suffix: evicting one of these frees nothing.

That happens only where the cache adopts blocks and shares partial tails. What can be evicted is promised to sequences,
so it has to be known how much of it would not become free.
"""

from __future__ import annotations

import numpy as np

from metrale_numba.interface import Ids

__all__ = ["StoredTwice"]


class StoredTwice:
    """Counts in how many places the cache stores each block. Called with the serving cache's lock held."""

    def __init__(self, num_blocks: int) -> None:
        self._places = np.zeros(num_blocks, np.int32)
        self.surplus = 0
        """Places, less the blocks that are in them."""

    def add(self, blocks: Ids) -> None:
        """Note that the cache stores these blocks in one place more for each time they are listed."""
        self._change(blocks, 1)

    def remove(self, blocks: Ids) -> None:
        """Note that it stores them in one place less."""
        self._change(blocks, -1)

    def restore(self, blocks: Ids) -> None:
        """Count anew: `blocks` lists each block as often as the cache stores it."""
        self._places[:] = np.bincount(blocks, minlength=self._places.size)
        self.surplus = int(np.maximum(self._places - 1, 0).sum())

    def _change(self, blocks: Ids, step: int) -> None:
        changed = np.unique(blocks)
        before = np.maximum(self._places[changed], 1).sum()
        np.add.at(self._places, blocks, step)
        self.surplus += int(np.maximum(self._places[changed], 1).sum() - before)
