"""Named holds on prefixes, as for system prompts: which names hold what, how much in all, and until when.

:class:`Pins` only keeps the books, under the cache's lock; taking and dropping the references is
:class:`~metrale_numba.radix_tree.RadixTree`'s.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from metrale_numba.interface import Ids


class Pin(NamedTuple):
    """A named hold on a prefix, as :meth:`RadixTree.pins` lists it.

    Attributes
    ----------
    matched_tokens : int
        Tokens of the prefix that were cached when it was pinned, and are held since.
    num_blocks : int
        Full blocks held.
    block_size : int
        Tokens per block.
    adapter_id : int
        The adapter under which the prefix is cached.
    seconds_left : float or None
        Until the pin ends by itself; None if it does not.
    """

    matched_tokens: int
    num_blocks: int
    block_size: int
    adapter_id: int
    seconds_left: float | None


class Hold(NamedTuple):
    """What a pin must give back: the full blocks of `tokens`."""

    tokens: Ids
    matched_tokens: int
    block_size: int
    adapter_id: int
    ends_at: float | None

    @property
    def num_blocks(self) -> int:
        """Full blocks held."""
        return self.matched_tokens // self.block_size


class Pins:
    """The holds by name.

    Parameters
    ----------
    limit : int or None
        Full blocks that all pins together may hold.
    """

    __slots__ = ("by_name", "limit", "num_blocks")

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.num_blocks = 0
        self.by_name: dict[str, Hold] = {}

    def excess(self, name: str, num_blocks: int) -> int:
        """How far beyond the limit a pin of so many blocks would go, in place of what the name holds now."""
        if self.limit is None:
            return 0
        earlier = self.by_name.get(name)
        return self.num_blocks - (earlier.num_blocks if earlier else 0) + num_blocks - self.limit

    def put(self, name: str, hold: Hold) -> Hold | None:
        """Enter a hold and return the one it takes the place of."""
        earlier = self.take(name)
        self.by_name[name] = hold
        self.num_blocks += hold.num_blocks
        return earlier

    def take(self, name: str) -> Hold | None:
        """Strike a name off and return what it held."""
        hold = self.by_name.pop(name, None)
        if hold is not None:
            self.num_blocks -= hold.num_blocks
        return hold

    def take_ended(self) -> list[Hold]:
        """Strike off every pin whose time is over."""
        now = time.monotonic()
        ended = [name for name, hold in self.by_name.items() if hold.ends_at is not None and hold.ends_at <= now]
        return [hold for name in ended if (hold := self.take(name)) is not None]

    def strike(self, adapter_id: int | None) -> None:
        """Strike off an adapter's pins, or all, whose nodes are gone already."""
        for name in [name for name, hold in self.by_name.items() if adapter_id in (None, hold.adapter_id)]:
            self.take(name)

    def listed(self) -> dict[str, Pin]:
        """Every pin by name."""
        now = time.monotonic()
        return {
            name: Pin(
                hold.matched_tokens,
                hold.num_blocks,
                hold.block_size,
                hold.adapter_id,
                None if hold.ends_at is None else max(0.0, hold.ends_at - now),
            )
            for name, hold in self.by_name.items()
        }

    def holds(self) -> dict[str, Hold]:
        """Every hold by name, with what is left of its time in place of when it ends."""
        now = time.monotonic()
        return {
            name: hold if hold.ends_at is None else hold._replace(ends_at=max(0.0, hold.ends_at - now))
            for name, hold in self.by_name.items()
        }

    def restore(self, holds: dict[str, Hold]) -> None:
        """Enter what :meth:`holds` gave, counting the time from now."""
        now = time.monotonic()
        for name, hold in holds.items():
            self.put(name, hold if hold.ends_at is None else hold._replace(ends_at=now + hold.ends_at))
