"""How old cached blocks get, counted as they are hit and evicted, in memory that grows with the blocks alone.

Relies on being told of each block that is inserted, hit or evicted. Ages are counted exactly up to 2,047, and beyond to
within a part in 1,024.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from metrale_numba.interface import Ids

__all__ = ["AgeCounter", "Ages", "BlockAges", "BlockClock"]

Counts = npt.NDArray[np.int64]

# Buckets of each doubling, and so how finely ages are told apart.
_BITS: Final = 10
_PER_DOUBLING: Final = 1 << _BITS
# Ages are below 2^53, which floats hold exactly.
_DOUBLINGS: Final = 53 - _BITS

_FEWEST_BLOCKS: Final = 1_024


class Ages(NamedTuple):
    """Ages in ascending order, and how many there are of each."""

    values: Counts
    """Every age that came up, rounded down by less than a part in 1,024."""
    counts: Counts
    """How often each came up."""

    @property
    def total(self) -> int:
        """How many ages there are."""
        return int(self.counts.sum())

    def percentile(self, percent: int) -> int | None:
        """Give the age that so many per cent are at or below.

        Parameters
        ----------
        percent : int
            1 to 100.

        Returns
        -------
        int or None
            One of `values`; None if there are none.
        """
        if not self.counts.size:
            return None
        # In integers, rounded up: half of 3 ages are reached with the second.
        rank = -(-percent * self.total // 100)
        return int(self.values[np.searchsorted(np.cumsum(self.counts), rank)])


class BlockAges(NamedTuple):
    """How old blocks get, in requests or in milliseconds of the trace."""

    lifetime: Ages
    """Of each evicted block, from its insert on."""
    idle_at_eviction: Ages
    """Of each evicted block, since it was used last: by the look-up that hit it, or by its insert."""
    idle_at_hit: Ages
    """Of each hit block, the same."""


class AgeCounter:
    """Counts ages."""

    def __init__(self) -> None:
        self._counts = np.zeros((_DOUBLINGS + 1) * _PER_DOUBLING, dtype=np.int64)

    def add(self, ages: Counts) -> None:
        """Count some ages.

        Parameters
        ----------
        ages : array of int64
            Each from 0 to 2^53-1.
        """
        if not ages.size:
            return
        _, exponents = np.frexp(ages.astype(np.float64))
        shifts = np.maximum(exponents - (_BITS + 1), 0)
        buckets = (shifts << _BITS) + (ages >> shifts)
        # Most requests hit or evict few blocks, which are not worth a pass over all buckets.
        np.add.at(self._counts, buckets, 1)

    def ages(self) -> Ages:
        """Sum up what was counted so far.

        Returns
        -------
        Ages
            Of all that were added.
        """
        buckets = np.flatnonzero(self._counts)
        shifts = np.maximum((buckets >> _BITS) - 1, 0)
        return Ages((buckets - (shifts << _BITS)) << shifts, self._counts[buckets])


class _AgeCounters:
    """Ages of blocks by one clock."""

    def __init__(self) -> None:
        self.lifetime = AgeCounter()
        self.idle_at_eviction = AgeCounter()
        self.idle_at_hit = AgeCounter()

    def ages(self) -> BlockAges:
        """Sum up."""
        return BlockAges(self.lifetime.ages(), self.idle_at_eviction.ages(), self.idle_at_hit.ages())


class BlockClock:
    """When each cached block was inserted and used last, by two clocks: requests played, and time of the trace."""

    def __init__(self) -> None:
        self.in_requests = _AgeCounters()
        self.in_milliseconds = _AgeCounters()
        self.never_hit_blocks = 0
        # Rows: by requests and by milliseconds. Columns: by block id.
        self._inserted = np.zeros((2, _FEWEST_BLOCKS), dtype=np.int64)
        self._last_use = np.zeros((2, _FEWEST_BLOCKS), dtype=np.int64)

    def note(self, request: int, milliseconds: int, hit: Ids, evicted: Ids, acquired: Ids) -> None:
        """Note the blocks that one request hit, that were evicted for it and that it inserted."""
        for row, (now, counters) in enumerate(
            ((request, self.in_requests), (milliseconds, self.in_milliseconds)),
        ):
            counters.idle_at_hit.add(now - self._last_use[row, hit])
            counters.idle_at_eviction.add(now - self._last_use[row, evicted])
            counters.lifetime.add(now - self._inserted[row, evicted])
        # A block is hit by a later request than the one that inserted it.
        self.never_hit_blocks += int(np.count_nonzero(self._inserted[0, evicted] == self._last_use[0, evicted]))

        size = self._last_use.shape[1]
        most = int(acquired.max(initial=0))
        if most >= size:
            more = np.zeros((2, max(size, most + 1 - size)), dtype=np.int64)
            self._inserted = np.concatenate((self._inserted, more), axis=1)
            self._last_use = np.concatenate((self._last_use, more), axis=1)
        # An evicted block may be inserted again at once, so this comes last.
        now_by_both = np.array([[request], [milliseconds]])
        self._last_use[:, hit] = now_by_both
        self._last_use[:, acquired] = now_by_both
        self._inserted[:, acquired] = now_by_both
