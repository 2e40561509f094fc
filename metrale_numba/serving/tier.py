"""Tiers: where the bytes of spilled snapshots are kept, and how they are named there.

:class:`TierStore` is the contract and :class:`MemoryTier` the plainest tier there is. A tier only stores; which entry
of the index stands behind a blob, and when it is of no more use, is for the serving layer to know.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from metrale_numba.arguments import as_count, as_seconds, as_text, as_u64, shown
from metrale_numba.errors import MetraleError

__all__ = ["Buffer", "MemoryTier", "StoreKey", "TierError", "TierStore"]

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
"""What :meth:`TierStore.put` takes and :meth:`TierStore.get` fills: a C-contiguous buffer of items of any type."""


class TierError(MetraleError, OSError):
    """A tier cannot be reached, cannot do what it is asked for now, or is closed. What it holds is not lost by that."""


class StoreKey(NamedTuple):
    """The name of a blob in a tier: everything that two snapshots must agree in to be the same.

    Attributes
    ----------
    model : str
        A fingerprint of the weights.
    dtype : str
        The form of the bytes.
    rank : int
        Which part of a model that is spread over several workers.
    adapter : int
        The adapter of the prefix.
    key : int
        The tier key of the prefix. Prefixes can share one.
    check : int
        The check hash of the prefix, which tells those apart.
    """

    model: str
    dtype: str
    rank: int
    adapter: int
    key: int
    check: int


@runtime_checkable
class TierStore(Protocol):
    """What the serving layer asks of a tier. Every method may be called from any thread.

    A blob is stored whole or not at all, and given back only for the very key under which it was stored, with exactly
    the bytes that were stored. A tier may discard blobs at any time, those that were not used for longest first.

    Anything that goes wrong with the medium is an :class:`OSError`, as is the use of a tier that is closed. Arguments
    that are not what they should be raise :class:`TypeError` or :class:`ValueError`, and nothing has changed then.
    """

    @property
    def persistent(self) -> bool:
        """Whether what is stored outlives the process."""

    def put(self, key: StoreKey, data: Buffer) -> bool:
        """Store `data` in place of what the key had, and make it the last to be discarded.

        Parameters
        ----------
        key : StoreKey
            The name.
        data : bytes-like
            A C-contiguous buffer, which is copied.

        Returns
        -------
        bool
            False if it is too large ever to be kept; the key has nothing then.

        Raises
        ------
        OSError
            If it could not be stored. The key has what it had before, or nothing.
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """

    def get(self, key: StoreKey, into: Buffer) -> bool:
        """Fill `into` with what is stored, and make it the last to be discarded.

        Parameters
        ----------
        key : StoreKey
            The name.
        into : bytes-like
            A C-contiguous buffer that can be written to, as long as what was stored.

        Returns
        -------
        bool
            False if there is nothing, if it has another length than `into`, or if it is damaged; a damaged blob is
            removed. What `into` holds then is undefined.

        Raises
        ------
        OSError
            If nobody can say whether it is there.
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """

    def delete(self, key: StoreKey) -> bool:
        """Remove what is stored.

        Parameters
        ----------
        key : StoreKey
            The name.

        Returns
        -------
        bool
            Whether there was anything.

        Raises
        ------
        OSError
            If nobody can say whether it is gone.
        TypeError, ValueError
            If `key` is not what it should be; nothing has changed then.
        """

    def contains(self, key: StoreKey) -> bool:
        """Tell whether there is a blob, without reading it: it may be gone, or found to be damaged, when it is read.

        Parameters
        ----------
        key : StoreKey
            The name.

        Returns
        -------
        bool
            Whether there is one.

        Raises
        ------
        OSError
            If nobody can say.
        TypeError, ValueError
            If `key` is not what it should be.
        """

    def keys(self) -> list[StoreKey]:
        """List the keys of all blobs. May take time in proportion to their number.

        Returns
        -------
        list of StoreKey
            Those that would be discarded first at the front.
        """

    @property
    def bytes_used(self) -> int:
        """Bytes of all blobs, without what the tier adds to each."""

    def close(self) -> None:
        """Let go of files, connections and memory. The tier is of no more use then; closing it again does nothing."""


def as_store_key(key: object) -> StoreKey:
    """Give the name of a blob with every part checked.

    Raises
    ------
    TypeError
        If it is no :class:`StoreKey`, or a part of it is of the wrong kind.
    ValueError
        If a number is out of range.
    """
    if not isinstance(key, StoreKey):
        raise TypeError(f"key must be a StoreKey, not {shown(key)} ({type(key).__name__})")
    return StoreKey(
        as_text(key.model, "key.model"),
        as_text(key.dtype, "key.dtype"),
        as_count(key.rank, "key.rank"),
        as_u64(key.adapter, "key.adapter"),
        as_u64(key.key, "key.key"),
        as_u64(key.check, "key.check"),
    )


def as_data(data: object) -> memoryview:
    """Give the bytes of `data`, not copied.

    Raises
    ------
    TypeError
        If it is no buffer.
    ValueError
        If its bytes do not lie one after the other.
    """
    return _as_bytes(data, "data")


def as_target(into: object) -> memoryview:
    """Give the bytes of `into`, to be written.

    Raises
    ------
    TypeError
        If it is no buffer.
    ValueError
        If its bytes do not lie one after the other, or cannot be written.
    """
    view = _as_bytes(into, "into")
    if view.readonly:
        raise ValueError("into must be writable, but is a read-only buffer")
    return view


def _as_bytes(value: object, name: str) -> memoryview:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"{name} must hold plain data, not references to objects")
        # No buffer can describe some types, like dates, but their bytes are as good as any.
        if value.flags.c_contiguous and value.nbytes:
            value = np.asarray(value).reshape(-1).view(np.uint8)
    try:
        view = memoryview(value)  # type: ignore[arg-type]  # what is none raises TypeError
    except TypeError:
        raise TypeError(f"{name} must be a buffer, not {shown(value)} ({type(value).__name__})") from None
    except ValueError as error:
        raise ValueError(f"{name} cannot be used: {error}") from None
    if "O" in view.format:
        raise TypeError(f"{name} must hold plain data, not references to objects")
    if not view.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous: its bytes must lie one after the other")
    if view.nbytes == 0:
        # Which cannot be cast if it has more than one dimension.
        return memoryview(b"" if view.readonly else bytearray())
    return view.cast("B")


def as_timeout(timeout: object) -> float:
    """Give the seconds that a call may wait.

    Raises
    ------
    TypeError
        If it is no number.
    ValueError
        If it is not above 0, or not finite.
    """
    seconds = as_seconds(timeout, "timeout")
    if seconds is None:
        raise TypeError("timeout must be a number of seconds, not None")
    if seconds == 0:
        raise ValueError(f"timeout is {shown(timeout)}, but must be a number of seconds above 0")
    return seconds


class _Forked(Protocol):
    def _after_fork(self) -> None: ...


_tiers: weakref.WeakSet[_Forked] = weakref.WeakSet()


def renew_after_fork(tier: _Forked) -> None:
    """Have a tier renew its locks in every forked child, where the thread that held one is gone."""
    _tiers.add(tier)


def _in_child() -> None:
    for tier in list(_tiers):
        tier._after_fork()


os.register_at_fork(after_in_child=_in_child)


class MemoryTier(TierStore):
    """A tier in the memory of the process.

    Every method may be called from any thread. A fork gives the child a copy.

    Parameters
    ----------
    max_bytes : int
        What all blobs together may have.
    """

    persistent: bool = False

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = as_count(max_bytes, "max_bytes")
        self._lock = threading.Lock()
        # The one that was not used for longest comes first.
        self._blobs: OrderedDict[StoreKey, bytes] = OrderedDict()
        self._bytes_used = 0
        # Stays when a change was cut off half-way: by an exception that a signal handler raised, or by a fork.
        self._is_changing = False
        self._is_closed = False
        renew_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def put(self, key: StoreKey, data: Buffer) -> bool:
        key = as_store_key(key)
        view = as_data(data)
        is_kept = view.nbytes <= self.max_bytes
        blob = bytes(view) if is_kept else b""
        with self._lock:
            self._check_open()
            self._count_if_cut_off()
            self._is_changing = True
            self._remove(key)
            if is_kept:
                self._blobs[key] = blob
                self._bytes_used += len(blob)
            while self._bytes_used > self.max_bytes:
                self._remove(next(iter(self._blobs)))
            self._is_changing = False
        return is_kept

    def get(self, key: StoreKey, into: Buffer) -> bool:
        key = as_store_key(key)
        view = as_target(into)
        with self._lock:
            self._check_open()
            blob = self._blobs.get(key)
            if blob is None or len(blob) != view.nbytes:
                return False
            self._blobs.move_to_end(key)
        view[:] = blob
        return True

    def delete(self, key: StoreKey) -> bool:
        key = as_store_key(key)
        with self._lock:
            self._check_open()
            self._count_if_cut_off()
            self._is_changing = True
            is_removed = self._remove(key)
            self._is_changing = False
            return is_removed

    def contains(self, key: StoreKey) -> bool:
        key = as_store_key(key)
        with self._lock:
            self._check_open()
            return key in self._blobs

    def keys(self) -> list[StoreKey]:
        with self._lock:
            self._check_open()
            return list(self._blobs)

    @property
    def bytes_used(self) -> int:
        with self._lock:
            self._check_open()
            self._count_if_cut_off()
            return self._bytes_used

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._blobs.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError("the tier is closed")

    def _count_if_cut_off(self) -> None:
        if self._is_changing:
            self._bytes_used = sum(map(len, self._blobs.values()))
            self._is_changing = False

    def _remove(self, key: StoreKey) -> bool:
        blob = self._blobs.pop(key, None)
        if blob is None:
            return False
        self._bytes_used -= len(blob)
        return True
