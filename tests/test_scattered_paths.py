"""Paths whose blocks lie together, scattered, or partly so: every look-up that leaves one anywhere ends just there.

A walk goes from a node to the row after it, or searches by hash and looks some blocks ahead. It relies on a dict of all
prefixes that were stored for what must be found, and makes paths end, fork and go wrong at every block and every token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from metrale_numba import RadixTree
from metrale_numba.kernels import layout

#: Some windows of the search ahead, and a bit.
LENGTH = 3 * layout.LOOK_AHEAD + 3
SIZES = (1, 3, 16, 20)
EACH_SIZE = pytest.mark.parametrize("size", SIZES)


class Stored:
    """A cache and what must be in it: the block of every prefix.

    Parameters
    ----------
    size : int
        Tokens per block.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.cache = RadixTree(block_size=size)
        self.blocks: dict[bytes, int] = {}
        self.numbers = itertools.count(1)

    def insert(self, tokens: np.ndarray) -> None:
        """Store the blocks of a prompt and hold none."""
        table = []
        for end in range(self.size, tokens.size + 1, self.size):
            table.append(self.blocks.setdefault(tokens[:end].tobytes(), next(self.numbers)))
        self.cache.insert(tokens, np.array(table, np.uint32))
        self.cache.release(tokens)

    def wanted(self, tokens: np.ndarray) -> list[int]:
        """The blocks that a look-up must match."""
        found = []
        for end in range(self.size, tokens.size + 1, self.size):
            block = self.blocks.get(tokens[:end].tobytes())
            if block is None:
                break
            found.append(block)
        return found

    def look_up(self, tokens: np.ndarray) -> int:
        """Peek, look up, count and let go; every answer must be the wanted one. Gives the number of blocks."""
        wanted = self.wanted(tokens)
        total = len(self.blocks)
        assert self.cache.peek_matched_tokens(tokens) == len(wanted) * self.size
        assert self.cache.num_evictable() == total
        match = self.cache.lookup(tokens)
        assert match.matched_blocks.tolist() == wanted
        assert self.cache.num_evictable() == total - len(wanted)
        # One more hold makes no more of them held; releases take exactly what was given.
        assert self.cache.lookup(tokens).matched_tokens == match.matched_tokens
        assert self.cache.num_evictable() == total - len(wanted)
        self.cache.release(tokens)
        assert self.cache.num_evictable() == total - len(wanted)
        self.cache.release_matched(tokens, None, match.matched_tokens)
        assert self.cache.num_evictable() == total
        assert self.cache.stats_detail().over_releases == 0
        return len(wanted)


def paths(size: int, count: int, forks: bool) -> list[np.ndarray]:
    """Prompts that have nothing in common, or, with `forks`, part from the first one block by block later."""
    made = [np.random.default_rng(number).integers(0, 2**32, LENGTH * size, np.uint32) for number in range(count)]
    if forks:
        for number, path in enumerate(made[1:], 1):
            shared = number * LENGTH // count * size
            path[:shared] = made[0][:shared]
    return made


def in_turn(stored: Stored, prompts: list[np.ndarray]) -> None:
    """One block of each at a time, so that none lies after its parent."""
    for end in range(1, LENGTH + 1):
        for tokens in prompts:
            stored.insert(tokens[: end * stored.size])


def in_turn_by_stretches(stored: Stored, prompts: list[np.ndarray]) -> None:
    """Some blocks of each at a time, so that short runs lie together."""
    ends = [0] * len(prompts)
    rng = random.Random(3)
    while min(ends) < LENGTH:
        which = rng.randrange(len(prompts))
        ends[which] = min(LENGTH, ends[which] + rng.choice((1, 1, 2, 5, 9)))
        stored.insert(prompts[which][: ends[which] * stored.size])


def at_once(stored: Stored, prompts: list[np.ndarray]) -> None:
    for tokens in prompts:
        stored.insert(tokens)


def into_freed_rows(stored: Stored, prompts: list[np.ndarray]) -> None:
    """Into rows that were freed in an order of their own."""
    fillers = [np.full(stored.size, number, np.uint32) for number in range(3 * LENGTH)]
    for filler in random.Random(4).sample(fillers, len(fillers)):
        stored.cache.insert(filler, [0])
        stored.cache.release(filler)
    for _ in fillers:
        assert len(stored.cache.evict(1)) == 1
    at_once(stored, prompts)


def then_compacted(stored: Stored, prompts: list[np.ndarray]) -> None:
    in_turn(stored, prompts)
    stored.cache.compact()


EACH_WAY = pytest.mark.parametrize("fill", [in_turn, in_turn_by_stretches, at_once, into_freed_rows, then_compacted])
Fill = Callable[[Stored, list[np.ndarray]], None]


@EACH_SIZE
@EACH_WAY
@pytest.mark.parametrize("forks", [False, True])
def test_a_look_up_ends_at_the_block_that_goes_wrong(size: int, fill: Fill, forks: bool) -> None:
    stored = Stored(size)
    prompts = paths(size, 4, forks)
    fill(stored, prompts)
    stored.cache.check_integrity()
    for number, tokens in enumerate(prompts):
        assert stored.look_up(tokens) == LENGTH
        for position in range(tokens.size):
            # Every position of one prompt, a few of the others.
            if number and position % (7 * size + 1):
                continue
            wrong = tokens.copy()
            wrong[position] ^= 1 << (position % 32)
            assert stored.look_up(wrong) == position // size
    stored.cache.check_integrity()
    assert len(stored.cache.evict(10**9)) == len(stored.blocks)


@EACH_SIZE
@EACH_WAY
def test_a_look_up_ends_where_the_path_or_the_query_does(size: int, fill: Fill) -> None:
    stored = Stored(size)
    prompts = paths(size, 3, forks=True)
    fill(stored, prompts)
    more = np.arange(20 * size, dtype=np.uint32)
    for tokens in prompts:
        for end in range(LENGTH + 1):
            assert stored.look_up(tokens[: end * size]) == end
            assert stored.look_up(tokens[: end * size + size // 2]) == end
        assert stored.look_up(np.concatenate((tokens, more))) == LENGTH


@EACH_SIZE
@EACH_WAY
def test_a_look_up_goes_from_path_to_path_only_where_they_part(size: int, fill: Fill) -> None:
    stored = Stored(size)
    prompts = paths(size, 4, forks=True)
    fill(stored, prompts)
    for one, other in itertools.permutations(prompts, 2):
        for block in range(LENGTH):
            tokens = np.concatenate((one[: block * size], other[block * size :]))
            stored.look_up(tokens)


@EACH_SIZE
@EACH_WAY
def test_blocks_evicted_from_the_end_are_no_longer_found_and_come_back(size: int, fill: Fill) -> None:
    stored = Stored(size)
    prompts = paths(size, 2, forks=False)
    fill(stored, prompts)
    by_block = {block: prefix for prefix, block in stored.blocks.items()}
    for count in (1, 2, 7, 20, 30):
        for block in stored.cache.evict(count).physical.tolist():
            del stored.blocks[by_block.pop(block)]
        for tokens in prompts:
            stored.look_up(tokens)
        stored.cache.check_integrity()
    fill(stored, prompts)
    for tokens in prompts:
        assert stored.look_up(tokens) == LENGTH


@EACH_SIZE
@EACH_WAY
def test_what_is_inserted_below_any_block_is_found_there(size: int, fill: Fill) -> None:
    stored = Stored(size)
    prompts = paths(size, 2, forks=False)
    fill(stored, prompts)
    for block in range(LENGTH):
        fork = np.concatenate((prompts[0][: block * size], prompts[1][: 2 * size] ^ np.uint32(block + 1)))
        stored.insert(fork)
        assert stored.look_up(fork) == block + 2
        assert stored.look_up(prompts[0]) == LENGTH
    stored.cache.check_integrity()


@EACH_SIZE
@EACH_WAY
def test_a_release_ends_where_the_path_does_and_counts_what_nobody_held(size: int, fill: Fill) -> None:
    stored = Stored(size)
    prompts = paths(size, 3, forks=False)
    fill(stored, prompts)
    cache, tokens = stored.cache, prompts[1]
    for held in (0, 1, 5, LENGTH - 1, LENGTH):
        over = cache.stats_detail().over_releases
        cache.lookup(tokens[: held * size])
        wrong = tokens.copy()
        wrong[-1] ^= 1
        # All but the last block, of which the first ones are held: nothing may fall below what the cache holds itself.
        cache.release(wrong)
        assert cache.stats_detail().over_releases == over + LENGTH - 1 - min(held, LENGTH - 1)
        if held == LENGTH:
            assert cache.num_evictable() == len(stored.blocks) - 1
            cache.lookup(tokens[: (LENGTH - 1) * size])
            cache.release(tokens)
        # What lost the cache's own reference is invisible until it is inserted again.
        assert cache.peek_matched_tokens(tokens) == (held if held < LENGTH - 1 else LENGTH) * size
        stored.insert(tokens)
        assert cache.peek_matched_tokens(tokens) == LENGTH * size
        assert cache.num_evictable() == len(stored.blocks)
    cache.check_integrity()


@EACH_SIZE
@EACH_WAY
def test_a_strict_release_names_the_first_block_that_is_not_held(size: int, fill: Fill) -> None:
    stored = Stored(size)
    stored.cache = RadixTree(block_size=size, strict=True)
    prompts = paths(size, 2, forks=False)
    fill(stored, prompts)
    for held in (0, 1, 9, LENGTH - 1):
        stored.cache.lookup(prompts[0][: held * size])
        with pytest.raises(ValueError, match=f"^block {held} of tokens is held by no sequence"):
            stored.cache.release(prompts[0])
        with pytest.raises(ValueError, match=f"^block {held} of tokens is held by no sequence"):
            stored.cache.release_matched(prompts[0], None, prompts[0].size)
        stored.cache.release(prompts[0][: held * size])
        assert stored.cache.num_evictable() == len(stored.blocks)


@EACH_SIZE
@EACH_WAY
@pytest.mark.parametrize("hole", [0, 1, layout.LOOK_AHEAD, LENGTH - 2])
def test_a_block_in_the_middle_that_lost_all_references_ends_a_look_up(size: int, fill: Fill, hole: int) -> None:
    stored = Stored(size)
    prompts = paths(size, 2, forks=False)
    fill(stored, prompts)
    cache, tokens = stored.cache, prompts[0]
    total = len(stored.blocks)
    # Everything below the hole is held once more, and the hole and what is above it lost the cache's own reference.
    cache.lookup(tokens)
    cache.release(tokens[: (hole + 1) * size])
    cache.release(tokens[: (hole + 1) * size])
    if hole:
        cache.insert(tokens[: hole * size], list(range(hole)), matched_tokens=hole * size)
    assert cache.peek_matched_tokens(tokens) == hole * size
    assert cache.lookup(tokens).matched_tokens == hole * size
    assert cache.num_evictable() == total - (LENGTH - 1)
    cache.release(tokens[: hole * size])
    stored.insert(tokens)
    cache.release(tokens)
    cache.insert(tokens, list(range(LENGTH)), matched_tokens=tokens.size)
    assert cache.peek_matched_tokens(tokens) == tokens.size
    assert cache.num_evictable() == total
    cache.check_integrity()


@EACH_SIZE
@pytest.mark.parametrize("cached", [0, 1, 2, layout.LOOK_AHEAD, LENGTH - 1])
@pytest.mark.parametrize("with_disks", [False, True])
def test_an_insert_holds_the_blocks_from_the_match_on_and_no_others(size: int, cached: int, with_disks: bool) -> None:
    tokens = paths(size, 1, forks=False)[0]
    table = np.arange(LENGTH, dtype=np.uint32)
    for matched in sorted({block * size + extra for block in range(LENGTH) for extra in (0, 1)} | {tokens.size}):
        cache = RadixTree(block_size=size)
        if cached:
            cache.insert(tokens[: cached * size], table[:cached], table[:cached] if with_disks else ())
            cache.release(tokens)
        acquired = cache.insert(tokens, table, (), None, matched)
        assert acquired.blocks.tolist() == list(range(cached, LENGTH))
        unheld = -(-matched // size)
        assert cache.num_evictable() == unheld
        cache.check_integrity()
        cache.release(tokens)
        assert cache.stats_detail().over_releases == unheld
        assert cache.num_evictable() == LENGTH
