"""What a peer can do: the operations that are timed, and those around them that are not.

An adapter puts one library behind :class:`Peer`. It builds what the library takes as input outside the timed part,
and adds as little of its own as it can inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from benchmarks.workload import Tokens

__all__ = ["EVICT", "INSERT", "LOOKUP", "MEMORY", "SECTIONS", "SIMULATOR", "Peer"]

MEMORY, LOOKUP, INSERT, EVICT, SIMULATOR = SECTIONS = ("memory", "lookup", "insert", "evict", "simulator")


class Peer(ABC):
    """One cache, of which a process measures one at a time. What it lacks is left out of `sections` and not called."""

    sections: ClassVar[tuple[str, ...]] = SECTIONS
    calls: ClassVar[str]
    """What is timed, for the notes below the table."""
    withheld_blocks: ClassVar[int] = 0
    """Blocks at the end of a prompt that a look-up may leave out though they are cached."""

    @abstractmethod
    def reset(self, capacity: int) -> None:
        """Start anew with an empty cache that has room for `capacity` blocks."""

    @abstractmethod
    def request(self, tokens: Tokens) -> Any:
        """Build, untimed, what :meth:`insert` and the steps of the simulator take."""

    def prompt(self, tokens: Tokens) -> Any:
        """Build, untimed, what :meth:`look_up_and_release` takes."""
        return self.request(tokens)

    def get_ready(self, cached: Sequence[Tokens]) -> None:
        """Do, untimed, what comes once between filling the cache with these sequences and measuring it."""

    def store(self, tokens: Tokens) -> None:
        """Put a sequence, of which a part may be cached already, into the cache and let it go; untimed."""
        request = self.request(tokens)
        self.insert(request)
        self.settle(request)

    @abstractmethod
    def look_up_and_release(self, prompt: Any) -> int:
        """Find and hold the longest cached prefix, let it go again, and say how many tokens it had."""

    def get_ready_to_insert(self, request: Any) -> None:
        """Do, untimed, what a request's look-up has done by the time it is inserted."""

    @abstractmethod
    def insert(self, request: Any) -> None:
        """Store a sequence of which nothing is cached."""

    def settle(self, request: Any) -> None:
        """Give back, untimed, what :meth:`insert` left held."""

    def get_ready_to_evict(self) -> None:
        """Do, untimed, what makes the next :meth:`evict` give up cached blocks."""

    def evict(self, num_blocks: int) -> int:
        """Give up at least `num_blocks` blocks, if there are as many, and say how many it were."""
        raise NotImplementedError

    # What follows is one request of the simulator, step by step.

    def look_up(self, request: Any) -> Any:
        """Find and hold the longest cached prefix."""
        raise NotImplementedError

    def num_matched(self, match: Any) -> int:
        """Say how many blocks a look-up found."""
        raise NotImplementedError

    def make_room(self, num_blocks: int) -> int:
        """Evict what a request lacks."""
        return self.evict(num_blocks)

    def insert_rest(self, request: Any, match: Any, num_blocks: int) -> Any:
        """Store the `num_blocks` blocks that were not found; what it returns goes to :meth:`release`."""
        raise NotImplementedError

    def release(self, request: Any, held: Any) -> None:
        """End the request."""
        raise NotImplementedError
