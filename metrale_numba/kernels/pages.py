"""Memory for the arrays that a walk reads: mapped in pages of its own, so it starts at a cache line and grows in place.

What the C library hands out starts 16 bytes into a cache line, and then every chunk of 16 tokens and every second
node lies across two. Growing moves page tables and not bytes. Nothing here is compiled.
"""

from __future__ import annotations

import errno
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

# EINVAL is the answer to more than there are addresses, EAGAIN to more than may be locked in memory.
_NO_MEMORY = (errno.ENOMEM, errno.EINVAL, errno.EAGAIN)


class Pages:
    """An array that owns its pages. Whoever holds its array must let go of it before it grows.

    Parameters
    ----------
    dtype : dtype
        Of an element.
    rows : int
        Elements to begin with, all zero; of `width` each.
    width : int, optional
        Elements in a row of a two-dimensional array.
    """

    __slots__ = ("_dtype", "_map", "_rows", "_width")

    def __init__(self, dtype: npt.DTypeLike, rows: int, width: int | None = None) -> None:
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        self._width = width
        self._rows = rows
        self._map = _mapped(self._num_bytes(rows))
        self._touch(0)

    def _num_bytes(self, rows: int) -> int:
        return rows * (self._width or 1) * self._dtype.itemsize

    def array(self) -> npt.NDArray[Any]:
        """The array as it is now; a view that must be gone when :meth:`grow` is called."""
        flat = np.frombuffer(self._map, self._dtype, self._rows * (self._width or 1))
        return flat if self._width is None else flat.reshape(self._rows, self._width)

    def grow(self, rows: int) -> None:
        """Lengthen by zeros; without memory for them, raise MemoryError and change nothing."""
        size = _in_pages(self._num_bytes(rows))
        before = len(self._map)
        if size > before:
            try:
                self._map.resize(size)
            except BufferError:
                # Someone looks at the array from outside, a debugger perhaps, and keeps what it looks at.
                larger = _mapped(size)
                larger[:before] = self._map[:]
                self._map = larger
            except OSError as error:
                raise _explained(error, size) from error
            self._touch(before)
        self._rows = max(rows, self._rows)

    def _touch(self, start: int) -> None:
        """Write to every page from one on, so that no later call waits for it."""
        np.frombuffer(self._map, np.uint8)[start :: mmap.PAGESIZE] = 0


def _in_pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _mapped(num_bytes: int) -> mmap.mmap:
    size = _in_pages(num_bytes)
    try:
        # Private, or else a forked child would write into its parent's cache.
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise _explained(error, size) from error


def _explained(error: Exception, size: int) -> Exception:
    if isinstance(error, OverflowError) or getattr(error, "errno", None) in _NO_MEMORY:
        return MemoryError(f"no memory for an array of {size} bytes")
    return error
