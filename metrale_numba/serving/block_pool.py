"""Pools of ids: which blocks, and which snapshot slots, are in use, and by how many.

A pool knows numbers only; the memory that they stand for is the engine's. Any number of threads may call any method at
any time, and each call is one step for all of its ids: it does everything, or is refused and does nothing.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from metrale_numba import forking
from metrale_numba.arguments import MAX_UINT32, as_count, as_tokens
from metrale_numba.errors import IntegrityError, MetraleError, RefcountError
from metrale_numba.interface import Ids, IdSequence
from metrale_numba.kernels.compile import kernels
from metrale_numba.kernels.layout import ID_POOL_FIELDS, ID_POOL_HIGH_WATER, ID_POOL_NUM_FREE

__all__ = ["BlockPool", "OutOfBlocks", "OutOfSlots", "SnapshotPool"]


class _OutOfIds(MetraleError):
    """There are not as many free ids as were asked for.

    Attributes
    ----------
    wanted, free, total : int
        How many were asked for, how many are free, and how many there are.
    """

    def __init__(self, message: str, wanted: int, free: int, total: int) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.free = free
        self.total = total

    def __reduce__(self) -> tuple[type[_OutOfIds], tuple[str, int, int, int]]:
        return type(self), (str(self), self.wanted, self.free, self.total)


class OutOfBlocks(_OutOfIds):
    """There are not as many free blocks as were asked for, and no more can be had now. Nothing was taken.

    Attributes
    ----------
    wanted : int
        How many were asked for.
    free : int
        How many could be had, those included that would be evicted.
    total : int
        How many there are. If more are needed than that, waiting is of no use.
    """


class OutOfSlots(_OutOfIds):
    """There are not as many free slots as were asked for. Nothing was taken.

    Attributes
    ----------
    wanted, free, total : int
        How many were asked for, how many are free, and how many there are.
    """


class _IdPool:
    """Ids from 0 on, with a count of references on each; one without any is free."""

    _noun = "id"
    _shortage: type[_OutOfIds] = _OutOfIds

    def __init__(self, size: int) -> None:
        self._kernels = kernels("pools")
        self._counts = np.zeros(size, np.int64)
        # Taken from the end, so the first to be taken is 0.
        self._free = np.arange(size, dtype=np.uint32)[::-1].copy()
        self._header = np.zeros(ID_POOL_FIELDS, np.int64)
        self._header[ID_POOL_NUM_FREE] = size
        self._lock = threading.Lock()
        forking.register(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.num_used} of {self._counts.size} {self._noun}s in use>"

    @property
    def num_free(self) -> int:
        """How many are free."""
        return int(self._header[ID_POOL_NUM_FREE])

    @property
    def num_used(self) -> int:
        """How many are in use."""
        return self._counts.size - self.num_free

    @property
    def high_water(self) -> int:
        """The most that were ever in use at once."""
        return int(self._header[ID_POOL_HIGH_WATER])

    def allocate(self, n: int) -> Ids:
        """Take free ids, with one reference on each.

        Changes the pool. Those given back last are taken first, and a run that was given back together comes out in
        the same order.

        Parameters
        ----------
        n : int
            How many, at least 0.

        Returns
        -------
        ndarray of uint32, shape (n,)
            The ids.

        Raises
        ------
        OutOfBlocks, OutOfSlots
            If fewer are free, each from its own pool; nothing has changed then.
        TypeError, ValueError
            If `n` is not a number of ids; nothing has changed then.
        """
        n = as_count(n, "n")
        with self._lock:
            if n > self._header[ID_POOL_NUM_FREE]:
                free, total = self.num_free, self._counts.size
                raise self._shortage(f"{n} {self._noun}s wanted, {free} of {total} free", n, free, total)
            ids = np.empty(n, np.uint32)
            self._kernels["take_ids"](self._header, self._counts, self._free, ids)
        return ids

    def inc_ref(self, ids: IdSequence) -> None:
        """Add one reference for each entry of `ids`.

        Changes the pool. An id that is listed twice gets two.

        Parameters
        ----------
        ids : sequence of int, shape (n,)
            Ids in use.

        Raises
        ------
        RefcountError
            If one of them is free: there is nothing to share. Nothing has changed then.
        TypeError, ValueError
            If `ids` is not a sequence of ids of this pool; nothing has changed then.
        """
        wanted = _own(ids)
        with self._lock:
            bad = self._kernels["add_references"](self._counts, wanted)
        if bad >= 0:
            raise self._refused(wanted, bad, "so no reference can be added")

    def dec_ref(self, ids: IdSequence) -> int:
        """Drop one reference for each entry of `ids`; what has none left is free.

        Changes the pool. An id that is listed twice loses two.

        Parameters
        ----------
        ids : sequence of int, shape (n,)
            Ids in use.

        Returns
        -------
        int
            How many became free.

        Raises
        ------
        RefcountError
            If one of them has fewer references than it is listed. Nothing has changed then.
        TypeError, ValueError
            If `ids` is not a sequence of ids of this pool; nothing has changed then.
        """
        wanted = _own(ids)
        with self._lock:
            bad, num_freed = self._kernels["drop_references"](self._header, self._counts, self._free, wanted)
        if bad >= 0:
            raise self._refused(wanted, bad, "so there is no reference to drop")
        return int(num_freed)

    def _refused(self, ids: Ids, position: int, why: str) -> ValueError:
        number = int(ids[position])
        if number >= self._counts.size:
            last = self._counts.size - 1
            known = f"outside 0..{last}" if last >= 0 else "but the pool is empty"
            return ValueError(f"ids[{position}] is {number}, {known}")
        times = int(np.count_nonzero(ids[:position] == number))
        before = f" after the {times} before it" if times else ""
        return RefcountError(f"ids[{position}] is {self._noun} {number}, which is free{before}, {why}")

    def ref_count(self, number: int) -> int:
        """Count the references on one id. Changes nothing.

        Parameters
        ----------
        number : int
            An id of this pool.

        Returns
        -------
        int
            0 if it is free.

        Raises
        ------
        TypeError, ValueError
            If it is not an id of this pool.
        """
        number = as_count(number, "number")
        if number >= self._counts.size:
            raise ValueError(f"number is {number}, but the pool has {self._counts.size} {self._noun}s")
        return int(self._counts[number])

    def ref_counts(self) -> npt.NDArray[np.int64]:
        """Count the references on every id. Changes nothing.

        Returns
        -------
        ndarray of int64, shape (size of the pool,)
            A copy.
        """
        with self._lock:
            return np.array(self._counts)

    def check_integrity(self) -> None:
        """Recount what is free. Changes nothing, and takes time in proportion to the size of the pool.

        Raises
        ------
        IntegrityError
            If the free ids are not those without references, each once.
        """
        with self._lock:
            if not self._kernels["check_ids"](self._header, self._counts, self._free):
                raise IntegrityError(f"the free {self._noun}s of the pool are not those without references")

    def _restore(self, ids: Ids, high_water: int = 0, *, keeps_more: bool = False) -> None:
        """Let each id have as many references as `ids` lists it, or at least as many."""
        with self._lock:
            counts = np.bincount(ids, minlength=self._counts.size)
            self._counts[:] = np.maximum(counts, self._counts) if keeps_more else counts
            free = np.flatnonzero(self._counts == 0)[::-1]
            self._free[: free.size] = free
            self._header[ID_POOL_NUM_FREE] = free.size
            most = max(high_water, int(self._header[ID_POOL_HIGH_WATER]), self._counts.size - free.size)
            self._header[ID_POOL_HIGH_WATER] = most


def _own(ids: IdSequence) -> Ids:
    # Read twice below, so nobody else may write to it between.
    wanted = as_tokens(ids, "ids")
    return wanted.copy() if wanted is ids else wanted


class BlockPool(_IdPool):
    """The KV blocks of an engine, or its disk blocks, with a count of references on each.

    Parameters
    ----------
    num_blocks : int
        How many there are, 0 to 2^32-1; their ids are 0 to `num_blocks` - 1. About 12 bytes each.

    Raises
    ------
    TypeError, ValueError
        If `num_blocks` is not a number of blocks.
    """

    _noun = "block"
    _shortage = OutOfBlocks

    def __init__(self, num_blocks: int) -> None:
        super().__init__(as_count(num_blocks, "num_blocks", MAX_UINT32))

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        return self._counts.size


class SnapshotPool(_IdPool):
    """The snapshot slots of an engine, with a count of references on each.

    Parameters
    ----------
    num_slots : int
        How many there are, 0 to 2^32-1; they are numbered from 0 to `num_slots` - 1.

    Raises
    ------
    TypeError, ValueError
        If `num_slots` is not a number of slots.
    """

    _noun = "slot"
    _shortage = OutOfSlots

    def __init__(self, num_slots: int) -> None:
        super().__init__(as_count(num_slots, "num_slots", MAX_UINT32))

    @property
    def num_slots(self) -> int:
        """How many there are."""
        return self._counts.size
