"""The pieces of prompts that were hit as one, found by counting how often each block of all prompts was hit.

Relies on blocks that are numbered as they first come up, so that a block has a greater number than those in front of
it. Takes some 30 bytes a block and 8 bytes a request.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

import numpy as np

from metrale_numba.interface import NONE, Ids

__all__ = ["PrefixTree", "SharedPrefix"]

_FEWEST_BLOCKS: Final = 1_024


class SharedPrefix(NamedTuple):
    """A piece of prompts that was hit as one: blocks that follow one another and were hit equally often.

    Every hit block of a replay is in exactly one of them.
    """

    first_request: int
    """The request, counted from 1, whose prompt was the first to have it."""
    begins: int
    """Blocks of the prompt in front of it."""
    blocks: int
    """How many blocks it has."""
    requests: int
    """Requests whose prompt has all of it."""
    hits: int
    """Requests that hit it."""

    @property
    def hit_blocks(self) -> int:
        """Blocks that did not have to be computed, as they were hit here."""
        return self.hits * self.blocks


class PrefixTree:
    """How often each block of all prompts was asked for and hit, by the blocks in front of it."""

    def __init__(self) -> None:
        self._size = 0
        self._parents = np.empty(_FEWEST_BLOCKS, dtype=np.uint32)
        self._depths = np.empty(_FEWEST_BLOCKS, dtype=np.int64)
        self._requests = np.empty(_FEWEST_BLOCKS, dtype=np.int64)
        self._hits = np.empty(_FEWEST_BLOCKS, dtype=np.int64)
        # By request, how many blocks there were after it.
        self._sizes = array("q")

    def note(self, path: Ids, hit_blocks: int) -> None:
        """Note a prompt, whose blocks are numbered as they first come up, and how many of them were hit."""
        size = max(self._size, int(path[-1]) + 1) if path.size else self._size
        if size > self._parents.size:
            more = max(size - self._parents.size, self._parents.size)
            self._parents = np.concatenate((self._parents, np.empty(more, dtype=np.uint32)))
            self._depths, self._requests, self._hits = (
                np.concatenate((each, np.empty(more, dtype=np.int64)))
                for each in (self._depths, self._requests, self._hits)
            )
        if size > self._size:
            known = path.size - (size - self._size)
            new = slice(self._size, size)
            self._parents[new] = np.concatenate(((NONE if known == 0 else path[known - 1],), path[known:-1]))
            self._depths[new] = np.arange(known, path.size)
            self._requests[new] = self._hits[new] = 0
        self._requests[path] += 1
        self._hits[path[:hit_blocks]] += 1
        self._size = size
        self._sizes.append(size)

    def hottest(self, most: int) -> list[SharedPrefix]:
        """Give the prefixes that brought the most hit blocks, most of them first."""
        hits = self._hits[: self._size]
        parents = self._parents[: self._size]
        nodes = np.flatnonzero(hits)
        if not nodes.size:
            return []
        # Two children of a block are hit by different requests, so at most one is hit as often as the block itself.
        begins = np.ones(self._size, dtype=bool)
        inner = nodes[parents[nodes] != NONE]
        begins[inner] = hits[parents[inner]] != hits[inner]
        heads = np.arange(self._size)
        heads[~begins] = parents[~begins]
        while True:
            further = heads[heads]
            if np.array_equal(further, heads):
                break
            heads = further
        blocks = np.bincount(heads[nodes], minlength=self._size)
        # Of several that are written to one place, the last stays; and the deepest has the greatest number.
        deepest = np.zeros(self._size, dtype=np.int64)
        deepest[heads[nodes]] = nodes
        saved = hits * blocks
        found = np.flatnonzero(saved)
        # The order in which they first came up decides between equals.
        order = found[np.argsort(-saved[found], kind="stable")][:most]
        first_requests = np.searchsorted(np.frombuffer(self._sizes, dtype=np.int64), deepest[order], side="right") + 1
        return [
            SharedPrefix(
                first_request=int(first),
                begins=int(self._depths[head]),
                blocks=int(blocks[head]),
                requests=int(self._requests[deepest[head]]),
                hits=int(hits[head]),
            )
            for head, first in zip(order, first_requests, strict=True)
        ]
