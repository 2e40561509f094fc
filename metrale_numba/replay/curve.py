"""How many blocks of a load are hit at every capacity a cache may have, found out in one pass over its requests.

Leaf-first LRU is a stack algorithm. List all blocks ever seen by last use, the newest first, those of one prompt by
depth: a block comes after the blocks it builds on, whose last use is never older. So the last of the first C blocks is
a leaf among them, and the one that LRU evicts: whatever was played, a cache of C blocks holds the first C of the list.
A block is then hit at just the capacities from its place in the list on, its *distance*, and counting distances counts
the hits of all capacities at once. They are those of :class:`~metrale_numba.replay.player.Replay`, not estimates.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from metrale_numba.interface import PrefixCache
from metrale_numba.replay.player import default_block_size, prompt_tokens, tokens_per_block
from metrale_numba.replay.requests import Request

__all__ = ["CurveCounter", "CurvePoint", "HitCurve", "default_capacities"]

Counts = npt.NDArray[np.int64]

# Where the default capacities begin: what a cache of so small a part of all blocks hits is next to nothing.
_SMALLEST_PART = 2_000
_STEPS_OF_A_DECADE = (1, 2, 5)


class CurvePoint(NamedTuple):
    """What a replay with one capacity comes to; a rate of nothing is None."""

    capacity: int
    """Blocks the cache may hold."""
    hit_blocks: int
    """Blocks of the prompts that it held already."""
    evicted_blocks: int
    """Blocks it gave up to make room."""
    cached_blocks: int
    """Blocks it holds at the end."""
    block_hit_rate: float | None
    """`hit_blocks` in all blocks of the prompts."""
    token_hit_rate: float | None
    """The same in tokens of the prompts."""


def _nothing() -> Counts:
    return np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class HitCurve:
    """What replays of one load come to, at every capacity. By default, that nothing was played.

    Attributes
    ----------
    requests : int
        Requests played.
    blocks : int
        Blocks of all their prompts.
    tokens : int
        Tokens of all their prompts.
    tokens_per_block : int
        Tokens that a block stands for; 0 if there was no request.
    hit_blocks, hit_tokens : array of int64, shape (distinct_blocks + 1,)
        What a cache of so many blocks hits, by its capacity.
    wanted_blocks : array of int64, shape (distinct_blocks + 1,)
        Blocks of all prompts of which each is cut to the capacity, by that: what is hit or inserted.
    """

    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    tokens_per_block: int = 0
    hit_blocks: Counts = field(default_factory=_nothing)
    hit_tokens: Counts = field(default_factory=_nothing)
    wanted_blocks: Counts = field(default_factory=_nothing)

    @property
    def distinct_blocks(self) -> int:
        """How many blocks a cache holds in the end that never evicts one."""
        return self.hit_blocks.size - 1

    def point(self, capacity: int) -> CurvePoint:
        """Give what a replay with `capacity` blocks comes to.

        Parameters
        ----------
        capacity : int
            Blocks; 0 or more.

        Returns
        -------
        CurvePoint
            Equal in each count to the result of a replay.
        """
        held = min(capacity, self.distinct_blocks)
        hit_blocks = int(self.hit_blocks[held])
        return CurvePoint(
            capacity=capacity,
            hit_blocks=hit_blocks,
            evicted_blocks=int(self.wanted_blocks[held]) - hit_blocks - held,
            cached_blocks=held,
            block_hit_rate=hit_blocks / self.blocks if self.blocks else None,
            token_hit_rate=int(self.hit_tokens[held]) / self.tokens if self.tokens else None,
        )

    def smallest_capacity(self, percent: int) -> int | None:
        """Give the smallest capacity at which `percent` of the hits of an endless cache are hits.

        Parameters
        ----------
        percent : int
            Of the hit blocks of a cache that never evicts; 1 to 100.

        Returns
        -------
        int or None
            The capacity in blocks, to the block; None if an endless cache hits nothing.
        """
        endless = int(self.hit_blocks[-1])
        if endless == 0:
            return None
        # Rounded up, in integers: 90% of 11 hits are reached with 10.
        return int(np.searchsorted(self.hit_blocks, -(-percent * endless // 100)))


def default_capacities(curve: HitCurve) -> list[int]:
    """Choose capacities that show a curve: 1, 2, 5, 10, 20, ... blocks, and all that an endless cache holds.

    Parameters
    ----------
    curve : HitCurve
        The curve, from whose endless cache's blocks the first capacity follows too.

    Returns
    -------
    list of int
        In ascending order, the last of which is ``curve.distinct_blocks``; empty if that is 0.
    """
    largest = curve.distinct_blocks
    capacities = []
    decade = 1
    while decade < largest:
        capacities += [step * decade for step in _STEPS_OF_A_DECADE]
        decade *= 10
    shown = [capacity for capacity in capacities if largest / _SMALLEST_PART <= capacity < largest]
    return [*shown, largest] if largest else []


class CurveCounter:
    """Plays requests into a cache that never evicts, and counts at which distances blocks are hit.

    For one thread, and the only caller of its cache. Costs one replay without limit, whatever capacities are asked
    for later; holds some 30 bytes a request beside the cache and 8 bytes a distinct block.

    Parameters
    ----------
    cache : PrefixCache
        The cache to play into, with nothing in it.
    block_size : int, optional
        Tokens of a block where a trace holds tokens. Default: that of
        :func:`~metrale_numba.replay.player.default_block_size`. Where it holds hash ids, each is a block.
    """

    def __init__(self, cache: PrefixCache, *, block_size: int | None = None) -> None:
        self._cache = cache
        self._block_size = block_size
        self._tokens_per_block = 0
        self._blocks = 0
        self._tokens = 0
        self._distinct_blocks = 0
        self._prompt_blocks = array("q")
        self._in_use = _RunLengths()
        # By block, the number of the request that used it last.
        self._last_use = np.empty(1_024, dtype=np.int64)
        # Runs of hits at consecutive distances, and last blocks that are not full: where, and by how many tokens.
        self._run_starts = array("q")
        self._run_lengths = array("q")
        self._short_distances = array("q")
        self._short_tokens = array("q")

    @property
    def requests(self) -> int:
        """How many requests were played."""
        return len(self._prompt_blocks)

    def play(self, request: Request) -> None:
        """Count the hits of one request, and cache its prompt. Changes the cache; holds no reference in it afterwards.

        Parameters
        ----------
        request : Request
            The request, all of whose ids count as full blocks; of tokens, the full blocks count.
        """
        # A hash id is a block however it is spelled out, so one token of the tree will do.
        block_size = 1 if request.tokens_per_id > 1 else self._block_size or default_block_size(request)
        block_tokens = tokens_per_block(request, block_size)
        self._tokens_per_block = self._tokens_per_block or block_tokens
        tokens = prompt_tokens(request, block_size)
        prompt_blocks = tokens.size // block_size

        match = self._cache.lookup(tokens, block_size=block_size, adapter_id=request.adapter)
        known = match.matched_blocks
        # Blocks are numbered in the order in which they are first seen, so that an id tells which block it is.
        unseen = np.arange(self._distinct_blocks, self._distinct_blocks + prompt_blocks - len(known), dtype=np.uint32)
        blocks = np.concatenate((known, unseen))
        self._cache.insert(
            tokens,
            blocks,
            block_size=block_size,
            matched_tokens=len(known) * block_size,
            adapter_id=request.adapter,
        )
        self._cache.release(tokens, block_size=block_size, adapter_id=request.adapter)

        self._count_hits(known)
        if len(known) == prompt_blocks and request.input_length < prompt_blocks * block_tokens:
            self._short_distances.append(self._run_starts[-1] + self._run_lengths[-1] - 1)
            self._short_tokens.append(prompt_blocks * block_tokens - request.input_length)
        self._distinct_blocks += unseen.size
        if self._distinct_blocks > self._last_use.size:
            self._last_use = np.concatenate((self._last_use, np.empty(self._distinct_blocks, dtype=np.int64)))
        self._last_use[blocks] = self.requests
        self._in_use.append(prompt_blocks)
        self._prompt_blocks.append(prompt_blocks)
        self._blocks += prompt_blocks
        self._tokens += request.input_length

    def curve(self) -> HitCurve:
        """Sum up what was played so far; changes nothing, and more may be played after it.

        Returns
        -------
        HitCurve
            Over all requests whose :meth:`play` is done.
        """
        size = self._distinct_blocks + 2
        starts, lengths = _counts(self._run_starts), _counts(self._run_lengths)
        hit_blocks = np.cumsum(np.bincount(starts, minlength=size) - np.bincount(starts + lengths, minlength=size))
        hit_tokens = hit_blocks * self._tokens_per_block
        np.subtract.at(hit_tokens, _counts(self._short_distances), _counts(self._short_tokens))
        longer = self.requests - np.cumsum(np.bincount(_counts(self._prompt_blocks), minlength=size))
        wanted_blocks = np.concatenate(([0], np.cumsum(longer)))
        return HitCurve(
            requests=self.requests,
            blocks=self._blocks,
            tokens=self._tokens,
            tokens_per_block=self._tokens_per_block,
            hit_blocks=np.cumsum(hit_blocks)[:-1],
            hit_tokens=np.cumsum(hit_tokens)[:-1],
            wanted_blocks=wanted_blocks[: size - 1],
        )

    def _count_hits(self, known: npt.NDArray[np.uint32]) -> None:
        """Count the distances of blocks that are all on one path, and take them out of where they were used last."""
        if not len(known):
            return
        last_use = self._last_use[known]
        # Going down a path, the last use gets older in steps. Between two of them are neighbours on the list.
        turns = np.flatnonzero(last_use[1:] != last_use[:-1]) + 1
        for begin, end in pairwise((0, *turns.tolist(), len(known))):
            request = int(last_use[begin])
            # What this prompt has taken out already was in front of these, too.
            self._run_starts.append(self._in_use.after(request) + begin + 1)
            self._run_lengths.append(end - begin)
            self._in_use.shorten(request, end - begin)


class _RunLengths:
    """By request, how many blocks were used last by it: a Fenwick tree that grows at its end."""

    def __init__(self) -> None:
        self._sums = [0, 0]
        self._count = 0
        self._total = 0

    def append(self, length: int) -> None:
        """Add the blocks of one more request."""
        size = len(self._sums) - 1
        if self._count == size:
            # The last place of a tree whose size is a power of two holds the sum of all.
            self._sums += [0] * (size - 1) + [self._total]
        self._count += 1
        self._add(self._count, length)

    def shorten(self, request: int, length: int) -> None:
        """Take blocks from a request, which is named by how many came before it."""
        self._add(request + 1, -length)

    def after(self, request: int) -> int:
        """Sum up the blocks of all requests that came after one."""
        place = request + 1
        rest = self._total
        while place:
            rest -= self._sums[place]
            place &= place - 1
        return rest

    def _add(self, place: int, length: int) -> None:
        self._total += length
        sums = self._sums
        while place < len(sums):
            sums[place] += length
            place += place & -place


def _counts(values: array[int]) -> Counts:
    return np.frombuffer(values, dtype=np.int64) if values else np.empty(0, dtype=np.int64)
