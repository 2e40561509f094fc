"""A cache that does nothing, to measure what the simulator itself costs."""

from __future__ import annotations

from benchmarks.peers.peer import SIMULATOR, Peer
from benchmarks.workload import Tokens


class Nothing(Peer):
    """Finds nothing, stores nothing, and has always room."""

    sections = (SIMULATOR,)
    calls = "nothing"

    def reset(self, capacity: int) -> None:
        """Nothing to start anew."""

    def request(self, tokens: Tokens) -> Tokens:
        """Give the tokens as they are."""
        return tokens

    def look_up_and_release(self, prompt: Tokens) -> int:
        """Find nothing."""
        return 0

    def insert(self, request: Tokens) -> None:
        """Store nothing."""

    def evict(self, num_blocks: int) -> int:
        """Give up whatever is asked for."""
        return num_blocks

    def look_up(self, request: Tokens) -> None:
        """Find nothing."""

    def num_matched(self, match: None) -> int:
        """Nothing was found."""
        return 0

    def insert_rest(self, request: Tokens, match: None, num_blocks: int) -> None:
        """Store nothing."""

    def release(self, request: Tokens, held: None) -> None:
        """Nothing is held."""
