"""Everything that a cache consists of, as one value, and the memory that it owns.

It relies on the package keeping its state in attributes and slots, and knows none of them by name, but for what a walk
over the nodes notes for itself. It promises to leave nothing else out: an object of a kind that it cannot look into is
an error.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import metrale_numba
from metrale_numba.kernels import layout
from metrale_numba.settings import Settings

_ATOMS = (type(None), bool, int, float, str, bytes, np.generic, np.ndarray, np.dtype, Settings)
_LOCK = type(threading.Lock())


def snapshot_of(cache: Any) -> dict[str, Any]:
    """Copy everything that `cache` can reach, and the process's counters; equal copies mean that nothing changed.

    Of an array the copy holds type, shape, content and also the place: one that moved was written anew.
    """
    state = {path: _copy_of(part, path) for path, part in _parts_of(cache, "cache", set())}
    state["process"] = (
        metrale_numba.cache_hit_count(),
        metrale_numba.cache_miss_count(),
        metrale_numba.cache_hit_tokens_total(),
    )
    return state


def arrays_of(cache: Any) -> dict[str, np.ndarray]:
    """Every array that `cache` can reach, itself and not a copy, by where it is."""
    return {path: part for path, part in _parts_of(cache, "cache", set()) if isinstance(part, np.ndarray)}


def sizes_of(cache: Any) -> dict[str, int]:
    """The bytes of every array that `cache` can reach, by where it is."""
    return {path: array.nbytes for path, array in arrays_of(cache).items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Where two copies differ."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def _copy_of(part: Any, path: str) -> Any:
    if isinstance(part, np.ndarray):
        content = part
        if path.endswith(".header") and part.shape == (layout.POOL_FIELDS,):
            # The root that was last asked for, and hashes of the walk before: any walk, a peek too, notes them.
            content = part.copy()
            content[layout.POOL_LAST_ROOT :] = 0
        return part.dtype, part.shape, part.ctypes.data, content.tobytes()
    return part


def _parts_of(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _ATOMS):
        yield path, value
    elif isinstance(value, _LOCK):
        yield path, value.locked()
    elif isinstance(value, mmap.mmap):
        # What is in it is in the array over it.
        yield path, (id(value), len(value))
    elif isinstance(value, Mapping):
        yield path, tuple(value)
        for key, part in value.items():
            yield from _parts_of(part, f"{path}[{key!r}]", seen)
    elif isinstance(value, Sequence):
        yield path, len(value)
        for i, part in enumerate(value):
            yield from _parts_of(part, f"{path}[{i}]", seen)
    elif type(value).__module__.startswith("metrale_numba."):
        if id(value) not in seen:
            seen.add(id(value))
            for name in _attributes_of(value):
                yield from _parts_of(getattr(value, name), f"{path}.{name}", seen)
    elif callable(value):
        yield path, value
    else:
        raise TypeError(f"cannot look into {path}, {value!r}")


def _attributes_of(value: object) -> list[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*vars(value), *slots] if hasattr(value, "__dict__") else slots
