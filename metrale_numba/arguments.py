"""What calls accept: every argument of every public call is checked here, once, and worded here if it is refused.

It relies on nothing but NumPy. Sequences come out as contiguous ``uint32`` arrays that kernels can read as they are,
scalars as plain ``int``; what does not fit raises :class:`TypeError` or :class:`ValueError` with the argument, the
position and the value in the message. No value is ever wrapped, rounded or read by way of a float.
"""

from __future__ import annotations

import operator
import os
import reprlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "MAX_INT64",
    "MAX_UINT32",
    "MAX_UINT64",
    "as_block_size",
    "as_block_table",
    "as_bool",
    "as_check",
    "as_count",
    "as_disk_block_ids",
    "as_matched_tokens",
    "as_name",
    "as_path",
    "as_seconds",
    "as_slot",
    "as_text",
    "as_tokens",
    "as_u64",
    "check_block_table",
    "shown",
]

MAX_UINT32: Final = 0xFFFF_FFFF
MAX_INT64: Final = 0x7FFF_FFFF_FFFF_FFFF
MAX_UINT64: Final = 0xFFFF_FFFF_FFFF_FFFF

Uint32s: TypeAlias = npt.NDArray[np.uint32]

_UINT32: Final = np.dtype(np.uint32)

# Shared, for it has nothing to write to. Writeable, because kernels refuse read-only arrays.
_NOTHING: Final[Uint32s] = np.empty(0, dtype=_UINT32)

# str() of an int refuses more than some thousand digits, and nobody reads as many.
_BITS_SHOWN = 256


def as_tokens(tokens: object, name: str = "tokens") -> Uint32s:
    """Give `tokens` as an array that kernels can read.

    Parameters
    ----------
    tokens : sequence of int, shape (n,)
        An array of any integer type, a list, tuple, range, ``array.array``, integer buffer or other sequence.
    name : str, default "tokens"
        What a refusal calls them.

    Returns
    -------
    ndarray of uint32, shape (n,)
        Contiguous, aligned, writeable, in native byte order: `tokens` itself if it is all that, otherwise a copy.

    Raises
    ------
    TypeError
        If `tokens` is no sequence, or holds anything but integers.
    ValueError
        If `tokens` is not one-dimensional, or a token is outside 0..2^32-1.
    """
    return _as_uint32s(tokens, name)


def as_block_table(block_table: object) -> Uint32s:
    """Give `block_table` as an array that kernels can read; as :func:`as_tokens`.

    Whether an entry that is used is NONE can be told only with the tokens at hand: :func:`check_block_table`.
    """
    return _as_uint32s(block_table, "block_table")


def as_disk_block_ids(disk_block_ids: object, block_table: Uint32s) -> Uint32s:
    """Give `disk_block_ids` as an array that kernels can read; as :func:`as_tokens`.

    Raises
    ------
    TypeError
        If `disk_block_ids` is no sequence, or holds anything but integers.
    ValueError
        If it is not one-dimensional, an id is outside 0..2^32-1, or it is neither empty nor as long as `block_table`.
    """
    if type(disk_block_ids) is tuple and not disk_block_ids:
        return _NOTHING
    ids = _as_uint32s(disk_block_ids, "disk_block_ids")
    if ids.size not in (0, block_table.size):
        raise ValueError(
            f"disk_block_ids has {ids.size} ids, but must be empty or have one for each of {block_table.size} blocks"
        )
    return ids


def check_block_table(block_table: Uint32s, num_tokens: int, block_size: int) -> None:
    """Refuse NONE in the part of `block_table` that an insert of `num_tokens` tokens would use.

    That is the block of each full chunk and, if tokens remain and a full chunk comes before them, the next one. The
    rest is not looked at.

    Raises
    ------
    ValueError
        If an entry in that part is NONE.
    """
    full = num_tokens // block_size
    remainder_is_kept = full >= 1 and num_tokens % block_size > 0
    used = block_table[: full + remainder_is_kept]
    if used.size == 0:
        return
    # NONE is the greatest id there is, so the first greatest one is the first NONE if there is any.
    position = int(used.argmax())
    if used.item(position) == MAX_UINT32:
        raise ValueError(
            f"block_table[{position}] is {MAX_UINT32}, which stands for no block, but a block is needed there"
        )


def as_block_size(value: object, default: int) -> int:
    """Give `block_size` as an int, 1..2^63-1; None stands for `default`.

    Raises
    ------
    TypeError
        If `value` is not an integer.
    ValueError
        If it is out of range.
    """
    if value is None:
        return default
    if type(value) is int and 1 <= value <= MAX_INT64:
        return value
    return _as_int_within(value, "block_size", 1, MAX_INT64)


def as_matched_tokens(value: object, num_tokens: int) -> int:
    """Give `matched_tokens` as an int, 0..num_tokens.

    Raises
    ------
    TypeError
        If `value` is not an integer.
    ValueError
        If it is negative, or more than there are tokens.
    """
    if type(value) is int and 0 <= value <= num_tokens:
        return value
    return _as_int_within(value, "matched_tokens", 0, num_tokens)


def as_count(value: object, name: str, most: int = MAX_INT64) -> int:
    """Give a number of things as an int, 0..`most`.

    Raises
    ------
    TypeError
        If `value` is not an integer.
    ValueError
        If it is out of range.
    """
    if type(value) is int and 0 <= value <= most:
        return value
    return _as_int_within(value, name, 0, most)


def as_slot(value: object, name: str = "snapshot_id") -> int:
    """Give a snapshot slot as an int, 0..2^63-1.

    Raises
    ------
    TypeError
        If `value` is not an integer.
    ValueError
        If it is out of range.
    """
    if type(value) is int and 0 <= value <= MAX_INT64:
        return value
    return _as_int_within(value, name, 0, MAX_INT64)


def as_u64(value: object, name: str) -> int:
    """Give a hash, an adapter or a tier key as an int, 0..2^64-1.

    Raises
    ------
    TypeError
        If `value` is not an integer.
    ValueError
        If it is out of range.
    """
    if type(value) is int and 0 <= value <= MAX_UINT64:
        return value
    return _as_int_within(value, name, 0, MAX_UINT64)


def as_check(value: object) -> int | None:
    """Give `check` as an int, 0..2^64-1, or None if it is None.

    Raises
    ------
    TypeError
        If `value` is neither None nor an integer.
    ValueError
        If it is out of range.
    """
    if value is None:
        return None
    return _as_int_within(value, "check", 0, MAX_UINT64)


def as_bool(value: object, name: str) -> bool:
    """Give a switch as it is.

    Raises
    ------
    TypeError
        If it is not a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {shown(value)} ({type(value).__name__})")
    return value


def as_name(value: object) -> str:
    """Give the name of a pin as it is; as :func:`as_text`."""
    return as_text(value, "name")


def as_text(value: object, name: str) -> str:
    """Give a text as it is.

    Raises
    ------
    TypeError
        If it is not a str.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {shown(value)} ({type(value).__name__})")
    return value


def as_seconds(value: object, name: str) -> float | None:
    """Give a length of time as a float, or None if it is None.

    Raises
    ------
    TypeError
        If `value` is neither None nor a number.
    ValueError
        If it is negative or not finite.
    """
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number of seconds, not {shown(value)} ({type(value).__name__})")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = float("inf")
    # Written so that NaN, which is on neither side of anything, is refused too.
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name} is {shown(value)}, but must be a finite number of seconds from 0 on")
    return seconds


def as_path(value: object) -> Path:
    """Give the path of a file as a Path.

    Raises
    ------
    TypeError
        If it is neither a str nor what stands for one.
    ValueError
        If it has a null character, which no path can have.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str):
        raise TypeError(f"path must be a str or a path, not {shown(value)} ({type(value).__name__})")
    if "\0" in path:
        raise ValueError(f"path is {shown(path)}, but cannot have a null character")
    return Path(path)


# The callers have let plain ints that are within pass already, at a third of what the way through here costs.
def _as_int_within(value: object, name: str, least: int, most: int) -> int:
    if isinstance(value, (bool, np.bool_, np.ndarray)):
        # All of these can pass for an index: a bool as 0 or 1, an array if it has no dimension.
        _refuse_number(value, name)
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what is none raises TypeError
    except TypeError:
        _refuse_number(value, name)
    if not least <= number <= most:
        raise ValueError(f"{name} is {shown(number)}, outside {least}..{most}")
    return number


def _refuse_number(value: object, name: str) -> NoReturn:
    raise TypeError(f"{name} must be an integer, not {shown(value)} ({type(value).__name__})") from None


def _as_uint32s(values: object, name: str) -> Uint32s:
    if type(values) is np.ndarray:
        if values.dtype == _UINT32 and values.ndim == 1 and values.flags.carray:
            return values
        return _from_array(values, name)
    if isinstance(values, (list, tuple)):
        return _from_sequence(values, name)
    if isinstance(values, (str, bytes)):
        return _from_text(values, name)
    if isinstance(values, np.generic):
        _refuse_sequence(values, name)
    if isinstance(values, (array, bytearray, memoryview)):
        return _from_array(_from_buffer(values, name), name)
    if hasattr(values, "__array__"):
        return _from_array(np.asarray(values), name)
    if isinstance(values, Sequence):
        return _from_sequence(values, name)
    _refuse_sequence(values, name)


def _refuse_sequence(values: object, name: str) -> NoReturn:
    raise TypeError(f"{name} must be a sequence of integers, not {shown(values)} ({type(values).__name__})")


def _from_buffer(values: array[Any] | bytearray | memoryview, name: str) -> npt.NDArray[Any]:
    try:
        view = memoryview(values)
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {error}") from None
    try:
        return np.asarray(view)
    except ValueError:
        raise TypeError(f"{name} must hold integers, not items of format {view.format!r}") from None


def _from_text(values: str | bytes, name: str) -> Uint32s:
    if values:
        _refuse_sequence(values, name)
    return _NOTHING


def _from_array(values: npt.NDArray[Any], name: str) -> Uint32s:
    kind = values.dtype.kind
    if kind not in "iu" and values.size > 0:
        raise TypeError(f"{name} must hold integers, not {values.dtype}")
    if values.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, but has {values.ndim} dimensions")
    if values.size == 0:
        return _NOTHING
    if kind == "i" or values.dtype.itemsize > _UINT32.itemsize:
        # One pass in place of two for the least and the greatest: a sign bit or a bit beyond the lowest 32 that any
        # of them has set is set in all of them or-ed together.
        bits = int(np.bitwise_or.reduce(values))
        if not 0 <= bits <= MAX_UINT32:
            outside = (values < 0) | (values > MAX_UINT32)
            position = int(outside.argmax())
            _refuse_value(int(values[position]), name, position)
    return values.astype(_UINT32, order="C")


def _from_sequence(values: Sequence[Any], name: str) -> Uint32s:
    if isinstance(values, range) and values:
        # Its ends say all about the rest, and it may be longer than the memory.
        if not 0 <= values[0] <= MAX_UINT32:
            _refuse_value(values[0], name, 0)
        if not 0 <= values[-1] <= MAX_UINT32:
            last_good = MAX_UINT32 if values.step > 0 else 0
            position = (last_good - values[0]) // values.step + 1
            _refuse_value(values[position], name, position)
    ids = _fast_array(values)
    if ids is None:
        ids = array("I", _each_checked(values, name))
    return np.frombuffer(ids, dtype=_UINT32)


def _fast_array(values: Sequence[Any]) -> array[int] | None:
    """Take all at once, or give None if an element is refused: the error would say neither which nor where."""
    try:
        return array("I", values)
    except (TypeError, OverflowError):
        return None


def _each_checked(values: Iterable[Any], name: str) -> Iterable[int]:
    for position, value in enumerate(values):
        if isinstance(value, (list, tuple, range, array)) or (isinstance(value, np.ndarray) and value.ndim > 0):
            raise ValueError(f"{name} must be one-dimensional, but {name}[{position}] is {shown(value)}")
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{name} must hold integers, but {name}[{position}] is {shown(value)} ({type(value).__name__})"
            ) from None
        if not 0 <= number <= MAX_UINT32:
            _refuse_value(number, name, position)
        yield number


def _refuse_value(value: int, name: str, position: int) -> NoReturn:
    raise ValueError(f"{name}[{position}] is {shown(value)}, outside 0..{MAX_UINT32}")


def shown(value: object) -> str:
    """Give `value` as a message shows it: its repr, cut short if it is long."""
    if not isinstance(value, int):
        return reprlib.repr(value)
    return repr(value) if value.bit_length() <= _BITS_SHOWN else f"an integer of {value.bit_length()} bits"
