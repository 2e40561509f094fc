"""The cache of this project, by its public class and with keyword arguments, as an engine calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.peers.peer import Peer
from benchmarks.peers.slots import NUM_IDS, IdRange
from benchmarks.workload import BLOCK_SIZE, Tokens
from metrale_numba import PrefixMatch, RadixTree
from metrale_numba.interface import Ids

# Any will do; they are passed because an engine passes some.
_SESSION = 1
_ADAPTER = 0
_SNAPSHOTS = 64


class Request(NamedTuple):
    """A sequence, and the blocks that it is computed into if nothing of it is cached."""

    tokens: Tokens
    block_table: Ids


class Metrale(Peer):
    """A :class:`~metrale_numba.RadixTree` with counters on and snapshots in its index."""

    calls = (
        "RadixTree: lookup() and release() with a fresh uint32 array, references and stamps written, counters on, 64 "
        "snapshots in the index; insert() with a block table; evict()"
    )

    def __init__(self) -> None:
        self._block_ids = np.arange(NUM_IDS, dtype=np.uint32)

    def reset(self, capacity: int) -> None:
        """Start anew; the tree grows as it needs to."""
        self._cache = RadixTree(block_size=BLOCK_SIZE)
        self._ids = IdRange()

    def get_ready(self, cached: Sequence[Tokens]) -> None:
        """Register the snapshots, at half the depth of sequences that are spread over the cache."""
        for slot in range(_SNAPSHOTS):
            tokens = cached[(slot + 1) * len(cached) // _SNAPSHOTS - 1]
            depth = tokens.size // 2
            self._cache.insert_intermediate_snapshot(
                tokens=tokens[:depth],
                block_table=np.zeros(depth // BLOCK_SIZE, np.uint32),
                disk_block_ids=(),
                block_size=None,
                snapshot_id=slot,
                session_hash=_SESSION,
                adapter_id=_ADAPTER,
            )

    def prompt(self, tokens: Tokens) -> Tokens:
        """Copy the tokens, so that every call has an array of its own."""
        fresh: Tokens = tokens.copy()
        return fresh

    def request(self, tokens: Tokens) -> Request:
        """Copy the tokens and hand out blocks."""
        return Request(tokens.copy(), self._block_ids[self._ids.take(tokens.size // BLOCK_SIZE)])

    def look_up_and_release(self, prompt: Tokens) -> int:
        """Release the whole prompt if all of it was matched, which is what the sequence holds then."""
        cache = self._cache
        match = cache.lookup(tokens=prompt, session_hash=_SESSION, adapter_id=_ADAPTER)
        matched_tokens = match.matched_tokens
        if matched_tokens == prompt.size:
            cache.release(tokens=prompt, adapter_id=_ADAPTER)
        elif matched_tokens:
            cache.release_matched(tokens=prompt, block_size=None, matched_tokens=matched_tokens, adapter_id=_ADAPTER)
        return matched_tokens

    def insert(self, request: Request) -> None:
        """Store every block."""
        self._cache.insert(tokens=request.tokens, block_table=request.block_table, adapter_id=_ADAPTER)

    def settle(self, request: Request) -> None:
        """Release what the insert holds for the sequence."""
        self._cache.release(tokens=request.tokens, adapter_id=_ADAPTER)

    def evict(self, num_blocks: int) -> int:
        """Evict exactly so many, if they are there."""
        return self._cache.evict(num_blocks=num_blocks).physical.size

    def look_up(self, request: Request) -> PrefixMatch:
        """Look the whole sequence up."""
        return self._cache.lookup(tokens=request.tokens, session_hash=_SESSION, adapter_id=_ADAPTER)

    def num_matched(self, match: PrefixMatch) -> int:
        """Count the blocks."""
        return match.matched_tokens // BLOCK_SIZE

    def insert_rest(self, request: Request, match: PrefixMatch, num_blocks: int) -> None:
        """Insert by a block table of matched blocks and new ones."""
        block_table = np.concatenate((match.matched_blocks, self._block_ids[self._ids.take(num_blocks)]))
        self._cache.insert(
            tokens=request.tokens,
            block_table=block_table,
            matched_tokens=match.matched_tokens,
            adapter_id=_ADAPTER,
        )

    def release(self, request: Request, held: None) -> None:
        """Release what the sequence holds."""
        self._cache.release(tokens=request.tokens, adapter_id=_ADAPTER)
