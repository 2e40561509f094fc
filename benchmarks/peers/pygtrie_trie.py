"""pygtrie's trie, a general-purpose one in Python, with blocks of tokens as the steps of a path.

It counts no references and evicts nothing, so it has look-ups and inserts alone.
"""

from __future__ import annotations

import pygtrie

from benchmarks.peers.peer import INSERT, LOOKUP, MEMORY, Peer
from benchmarks.workload import BLOCK_SIZE, Tokens


class PygtrieTrie(Peer):
    """A ``Trie`` that holds the number of every block under the path to it."""

    sections = (MEMORY, LOOKUP, INSERT)
    calls = (
        "Trie: longest_prefix() of tuples built beforehand; one item for every new block; no references, no eviction"
    )

    def reset(self, capacity: int) -> None:
        """Start anew; the trie has no bound."""
        self._cache = pygtrie.Trie()

    def request(self, tokens: Tokens) -> list[tuple[int, ...]]:
        """Build the path."""
        full = tokens[: tokens.size // BLOCK_SIZE * BLOCK_SIZE]
        return [tuple(block) for block in full.reshape(-1, BLOCK_SIZE).tolist()]

    def look_up_and_release(self, prompt: list[tuple[int, ...]]) -> int:
        """Match; there is nothing to release."""
        step = self._cache.longest_prefix(prompt)
        return len(step.key) * BLOCK_SIZE if step else 0

    def insert(self, request: list[tuple[int, ...]]) -> None:
        """Store from the deepest block upwards, until one is there already."""
        cache = self._cache
        for depth in range(len(request), 0, -1):
            path = request[:depth]
            if path in cache:
                return
            cache[path] = depth
