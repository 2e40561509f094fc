"""How many ids of slots or blocks there are to hand out, for peers whose caller owns the pool."""

from __future__ import annotations

__all__ = ["NUM_IDS", "IdRange"]

# More than any section hands out in all, so that no id is in the cache twice.
NUM_IDS = 8_000_000


class IdRange:
    """A counting allocator: each call gives the next ids in order, as a slice of one array that holds them all.

    An engine takes ids off a free list, which costs every cache the same; this costs next to nothing.
    """

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> slice:
        """Hand out the next `count` ids."""
        first = self._next
        self._next = first + count
        if self._next > NUM_IDS:
            raise RuntimeError(f"the workload takes more than {NUM_IDS} ids")
        return slice(first, self._next)
