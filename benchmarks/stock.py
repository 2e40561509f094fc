"""Caches that are filled before they are measured, and the sequences in them.

All work is seeded. Nothing in a filled cache is held by anyone. Two ways to fill it: *in order*, a sequence at a time,
so that its blocks get rows next to each other; or *scattered*, a block at a time in turn over all sequences, so that
no two blocks of a sequence do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.yardsticks import Comparison
from metrale_numba import RadixTree

__all__ = [
    "BLOCK_IDS",
    "BLOCK_SIZE",
    "LENGTHS",
    "LONG",
    "SEQUENCE",
    "SHORT",
    "Stock",
    "Tokens",
    "draw",
    "fill",
    "fresh",
    "leaves",
    "register",
    "store",
]

Tokens = npt.NDArray[np.uint32]

BLOCK_SIZE = 16
SHORT, SEQUENCE, LONG = LENGTHS = (256, 2_048, 32_768)
BLOCK_IDS = np.arange(2_048, dtype=np.uint32)
"""Block tables are slices of it: the cache does not ask whether a block is in two places."""
_NO_DISKS = np.empty(0, np.uint32)
_VOCABULARY = 128_000


def draw(count: int, length: int, seed: int) -> npt.NDArray[np.uint32]:
    """Draw sequences at random, as the rows of one array."""
    tokens: Tokens = np.random.default_rng(seed).integers(0, _VOCABULARY, (count, length), dtype=np.uint32)
    return tokens


def fresh(tokens: Tokens) -> Tokens:
    """Copy a prompt, so that the call gets an array that it has not seen."""
    copy: Tokens = tokens.copy()
    return copy


def store(cache: RadixTree, tokens: Tokens) -> None:
    """Insert a sequence without holding any of it."""
    cache.insert(tokens=tokens, block_table=BLOCK_IDS[: tokens.size // BLOCK_SIZE], matched_tokens=tokens.size)


def register(cache: RadixTree, tokens: Tokens, slot: int) -> None:
    """Register a snapshot at the end of some tokens."""
    cache.insert_intermediate_snapshot(
        tokens=tokens, block_table=_NO_DISKS, disk_block_ids=_NO_DISKS, block_size=None, snapshot_id=slot
    )


@dataclass
class Stock:
    """A filled cache and the sequences in it."""

    cache: RadixTree
    sequences: dict[int, list[Tokens]]
    """By their length."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self.cache.stats()[0]

    def hot(self, length: int, calls: int) -> list[Tokens]:
        """Give a few prompts over and over, so that their nodes are in the processor's caches."""
        few = self.sequences[length][: max(1, min(8, 4 * SEQUENCE // length))]
        return [few[call % len(few)] for call in range(calls)]

    def cold(self, length: int, calls: int) -> list[Tokens]:
        """Give prompts in an order that no processor cache can foresee, each once before any comes twice.

        All of them are looked up before, in another order: what is in the processor's caches is then what a cache of
        this size leaves there, and not what was inserted last.
        """
        some = self.sequences[length]
        rng = np.random.default_rng(34)
        for number in rng.permutation(len(some)).tolist():
            self.cache.peek_matched_tokens(tokens=some[number])
        order = np.concatenate([rng.permutation(len(some)) for _ in range(-(-calls // len(some)))])
        return [some[number] for number in order[:calls]]

    @staticmethod
    def pairs(prompts: Sequence[Tokens]) -> list[Comparison]:
        """Pair prompts with copies of their own, one for each distinct prompt."""
        copies = {id(tokens): tokens.copy() for tokens in prompts}
        return [Comparison(tokens, copies[id(tokens)]) for tokens in prompts]


def fill(
    num_blocks: int,
    *,
    seed: int,
    num_long: int = 0,
    num_short: int = 0,
    scattered: bool = False,
    num_snapshots: int = 0,
) -> Stock:
    """Make a cache of about `num_blocks` blocks in sequences of 2,048 tokens, and some long and short ones.

    Parameters
    ----------
    num_blocks : int
        Blocks of all sequences together, to the nearest sequence of 2,048 tokens below.
    seed : int
        Decides on the tokens.
    num_long, num_short : int
        Sequences of 32,768 and of 256 tokens among them.
    scattered : bool
        Whether no two blocks of a sequence are stored one after the other.
    num_snapshots : int
        Snapshots at two thirds of the depth, on the block grid or off it, of the sequences that come first.

    Returns
    -------
    Stock
        The cache, with its sequences.
    """
    num_usual = max(1, (num_blocks - (num_long * LONG + num_short * SHORT) // BLOCK_SIZE) * BLOCK_SIZE // SEQUENCE)
    sequences = {
        length: list(draw(count, length, seed + length))
        for length, count in ((LONG, num_long), (SHORT, num_short), (SEQUENCE, num_usual))
        if count
    }
    everything = [tokens for some in sequences.values() for tokens in some]
    cache = RadixTree(block_size=BLOCK_SIZE)
    if scattered:
        for end in range(BLOCK_SIZE, max(tokens.size for tokens in everything) + 1, BLOCK_SIZE):
            for tokens in everything:
                if tokens.size >= end:
                    store(cache, tokens[:end])
    else:
        for tokens in everything:
            store(cache, tokens)
    # Long, short and usual ones in turn: each row that is hot has prompts with snapshots.
    firsts = [some[number] for number in range(num_snapshots) for some in sequences.values() if number < len(some)]
    for slot, tokens in enumerate(firsts[:num_snapshots]):
        register(cache, tokens[: 2 * tokens.size // 3 + slot], slot)
    return Stock(cache, sequences)


def leaves(num_blocks: int, *, seed: int, below: Tokens | None = None, partial_tail_sharing: bool = False) -> Stock:
    """Make a cache in which every block is a leaf: sequences of one block, or of one block after a shared one.

    Parameters
    ----------
    num_blocks : int
        How many.
    seed : int
        Decides on the tokens.
    below : array of uint32, optional
        The shared first block.
    partial_tail_sharing : bool
        As the cache takes it.

    Returns
    -------
    Stock
        The cache, with its sequences.
    """
    rows = draw(num_blocks, BLOCK_SIZE, seed)
    if below is not None:
        rows = np.hstack([np.broadcast_to(below, (num_blocks, BLOCK_SIZE)), rows])
    cache = RadixTree(block_size=BLOCK_SIZE, partial_tail_sharing=partial_tail_sharing)
    for tokens in rows:
        store(cache, tokens)
    return Stock(cache, {rows.shape[1]: list(rows)})
