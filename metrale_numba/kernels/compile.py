"""Compiles the kernels at first use, or loads them from a cache directory of our own.

Numba's cache notices a change only in the file of the function itself, and does not tell a build with bounds
checks from one without. So the directory's name is a digest of every kernel source, the versions and
the flags: whatever changes, other code is never found.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)
_lock = threading.RLock()
_compiled: dict[str, Mapping[str, Callable[..., Any]]] = {}

CACHE_DIRECTORY_VARIABLES = ("METRALE_CACHE_DIR", "NUMBA_CACHE_DIR")
# Kernels that make scratch arrays, for which they need Numba's runtime.
_ALLOCATING = frozenset(
    {
        "evict_lru",
        "evict_to_tier",
        "check_index",
        "check_pool",
        "check_ids",
        "play_by_rank",
        "play_sieve",
        "play_s3_fifo",
    }
)
# Kernels that are called without a dispatcher, which costs a call 100 to 150 ns to tell the types of the arguments: the
# class has looked already. Given anything but arrays of the right type, dimension and strides, they would crash.
_HOT = frozenset({"lookup", "insert", "release", "evict"})
_dispatchers: list[Any] = []
# Settings of Numba that change the code it makes but are no part of its cache's key.
_CODE_FLAGS = ("BOUNDSCHECK", "OPT", "DEBUGINFO_DEFAULT", "CPU_NAME", "CPU_FEATURES", "DISABLE_INTEL_SVML")


def _groups() -> dict[str, dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]]:
    """Every kernel with the types of its arguments, by the occasion at which it is first needed."""
    from numba import from_dtype, types

    from metrale_numba.kernels import (
        compaction,
        eviction,
        ghosts,
        hashing,
        insertion,
        integrity,
        layout,
        listing,
        policies,
        pools,
        snapshots,
        tables,
        tree,
    )

    number = types.int64
    real = types.float64
    header = numbers = types.Array(types.int64, 1, "C")
    ids = types.Array(types.uint32, 1, "C")
    words = types.Array(types.uint64, 1, "C")
    nodes = types.Array(from_dtype(layout.NODE), 1, "C")
    links = types.Array(from_dtype(layout.LINK), 1, "C")
    suffixes = types.Array(from_dtype(layout.SUFFIX), 1, "C")
    return {
        "cache": {
            "fill_powers": (hashing.fill_powers, (types.uint64, words)),
            "rehash": (tables.rehash, (words, words)),
            "peek": (tree.peek, (header, ids, number)),
            "pin": (tree.pin, (header, ids, ids, number)),
            "lookup": (tree.lookup, (number, ids, ids, number, number, number)),
            "insert": (insertion.insert, (number, ids, ids, ids, ids, number, number)),
            "release": (tree.release, (number, ids, number, number, number)),
            "evict": (eviction.evict, (number, number, ids, ids)),
            "register": (snapshots.register, (header, ids, number, number, number, number)),
            "register_tail": (snapshots.register_tail, (header, ids, number, number, number, numbers, numbers)),
            "evict_lru": (snapshots.evict_lru, (header, real)),
            "evict_to_tier": (snapshots.evict_to_tier, (header, number, real)),
            "evict_slot": (snapshots.evict_slot, (header, number)),
            "promote": (snapshots.promote, (header, number, number, number, number)),
            "forget": (snapshots.forget, (header, number)),
        },
        "adapters": {
            "count_nodes": (eviction.count_nodes, (header, number)),
            "count_missing": (insertion.count_missing, (header, ids, number, number)),
            "guard": (tree.guard, (header, ids, number, number, number)),
            "evict_from": (eviction.evict_from, (header, number, number, number, ids, ids, numbers, words)),
            "drop_forest": (eviction.drop_forest, (header, number, ids, ids, number, number)),
            "count_by_adapter": (eviction.count_by_adapter, (header, numbers, numbers)),
            "drop_adapter": (snapshots.drop_adapter, (header, number, numbers, numbers)),
        },
        "compaction": {
            "number_rows": (compaction.number_rows, (header, ids)),
            "move_rows": (compaction.move_rows, (header, ids, nodes, links, ids, ids, words, suffixes, ids)),
            "exchange_rows": (compaction.exchange_rows, (header, ids, numbers, *(number,) * 5)),
        },
        "integrity": {
            "check_pool": (integrity.check_pool, (header,)),
            "check_heap": (integrity.check_heap, (header, number)),
            "check_index": (integrity.check_index, (header,)),
        },
        "ghosts": {
            "remember": (ghosts.remember, (header, numbers, numbers, header, number)),
            "forget_new": (ghosts.forget_new, (number, ids, number, number, header)),
            "forget_adapter": (ghosts.forget_adapter, (header, number)),
            "find_ghosts": (ghosts.find_ghosts, (header, words, number, numbers)),
            "check_ghosts": (ghosts.check_ghosts, (header, header)),
        },
        "listing": {
            "list_nodes": (listing.list_nodes, (header, number, number, ids, numbers)),
            "hash_prefixes": (listing.hash_prefixes, (words, ids, number, numbers, words)),
        },
        "pools": {
            "take_ids": (pools.take_ids, (header, numbers, ids, ids)),
            "add_references": (pools.add_references, (numbers, ids)),
            "drop_references": (pools.drop_references, (header, numbers, ids, ids)),
            "check_ids": (pools.check_ids, (header, numbers, ids)),
        },
        "policies": {
            "next_uses": (policies.next_uses, (numbers, ids, numbers, numbers)),
            "play_by_rank": (
                policies.play_by_rank,
                (number, number, numbers, ids, ids, numbers, number, numbers, ids),
            ),
            "play_sieve": (policies.play_sieve, (numbers, ids, ids, number, numbers, ids)),
            "play_s3_fifo": (policies.play_s3_fifo, (number, numbers, ids, ids, number, numbers, ids)),
        },
    }


def kernels(group: str) -> Mapping[str, Callable[..., Any]]:
    """The compiled kernels of a group, made or loaded on the first call.

    Parameters
    ----------
    group : {"cache", "adapters", "compaction", "integrity", "pools", "policies"}
        What every cache needs, what single methods do, or what the simulation of eviction policies does.
    """
    ready = _compiled.get(group)
    if ready is not None:
        return ready
    with _lock:
        if group not in _compiled:
            _compiled[group] = _compile(_groups()[group])
        return _compiled[group]


def _compile(group: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[str, Callable[..., Any]]:
    import numba

    from metrale_numba.kernels import counting

    if numba.config.DISABLE_JIT:
        raise RuntimeError("metrale_numba needs its kernels compiled; unset NUMBA_DISABLE_JIT")
    # Kernels that count their work write to an address of this process, so they are of no use to another.
    directory = None if counting.IS_ON else _cache_directory()
    kernel_cache = None if directory is None else _cache_class(directory)
    compiled: dict[str, Callable[..., Any]] = {}
    announced = bool(_compiled)
    for name, (function, arguments) in group.items():
        # Without its runtime, Numba counts no references to arrays inside the loops; without Python's error model, it
        # tests no block size for 0.
        dispatcher = numba.njit(nogil=True, error_model="numpy", _nrt=name in _ALLOCATING)(function)
        if kernel_cache is not None:
            dispatcher._cache = kernel_cache(function)
        if not announced and (kernel_cache is None or not dispatcher._cache.has_files()):
            announced = True
            _announce()
        dispatcher.compile(arguments)
        dispatcher.disable_compile()
        compiled[name] = dispatcher
        if name in _HOT:
            # What the dispatcher calls once it has looked at the types. It lives as long as the dispatcher.
            (overload,) = dispatcher.overloads.values()
            _dispatchers.append(dispatcher)
            compiled[name] = overload.entry_point
    return compiled


def _announce() -> None:
    message = "compiling kernels; this takes up to half a minute and is done once"
    _logger.info(message)
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"metrale_numba: {message}\n")
        sys.stderr.flush()


def _digest() -> str:
    """What the compiled code depends on, in 20 hexadecimal digits."""
    import llvmlite
    import numba

    from metrale_numba.kernels import counting

    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    versions = (platform.python_implementation(), sys.version, numba.__version__, llvmlite.__version__)
    flags = [(flag, getattr(numba.config, flag, None)) for flag in _CODE_FLAGS]
    digest.update(repr((versions, flags, counting.IS_ON)).encode())
    return digest.hexdigest()[:20]


@cache
def _cache_directory() -> Path | None:
    """Give the first writable place for compiled code, or None with a warning; found out once."""
    candidates = [Path(os.environ[name]) for name in CACHE_DIRECTORY_VARIABLES if os.environ.get(name)]
    if os.environ.get("XDG_CACHE_HOME"):
        candidates.append(Path(os.environ["XDG_CACHE_HOME"]))
    try:
        candidates.append(Path.home() / ".cache")
    except RuntimeError as error:
        _logger.debug("no home directory to keep compiled kernels in: %s", error)
    name = f"kernels-{_digest()}"
    for candidate in candidates:
        directory = candidate / "metrale_numba" / name
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                return directory
        except OSError as error:
            _logger.debug("cannot keep compiled kernels in %s: %s", directory, error)
    warnings.warn(
        "no writable directory for compiled kernels, so every process compiles them anew; "
        f"set {CACHE_DIRECTORY_VARIABLES[0]} to one",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _cache_class(directory: Path) -> Any:
    """A Numba cache that keeps its files in a directory of ours."""
    from numba.core.caching import CompileResultCacheImpl, FunctionCache

    class Locator:
        """Where the files of one kernel are. The directory's name already says which sources they were made of."""

        def __init__(self, py_file: str) -> None:
            self._py_file = py_file

        def ensure_cache_path(self) -> None:
            directory.mkdir(parents=True, exist_ok=True)

        def get_cache_path(self) -> str:
            return str(directory)

        def get_source_stamp(self) -> str:
            return directory.name

    class Implementation(CompileResultCacheImpl):  # type: ignore[misc]  # Numba is untyped
        def __init__(self, function: Callable[..., Any]) -> None:
            self._lineno = function.__code__.co_firstlineno
            self._locator = Locator(function.__code__.co_filename)
            self._filename_base = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"

    class KernelCache(FunctionCache):  # type: ignore[misc]  # Numba is untyped
        _impl_class = Implementation

        def has_files(self) -> bool:
            """Whether something was saved for this kernel."""
            return os.path.exists(self._cache_file._index_path)

        def load_overload(self, signature: Any, target_context: Any) -> Any:
            try:
                return super().load_overload(signature, target_context)
            except Exception as error:  # noqa: BLE001 - unpickling a damaged file can raise anything at all
                # It must cost a compilation, not the process: what is compiled now overwrites it.
                _logger.warning("cannot load a compiled kernel, compiling it anew: %s: %s", self._name, error)
                self._cache_file.flush()
                return None

        def save_overload(self, signature: Any, data: Any) -> None:
            try:
                super().save_overload(signature, data)
            except OSError as error:
                _logger.warning("cannot keep a compiled kernel for the next process: %s: %s", self._name, error)

    return KernelCache


def warmup() -> None:
    """Compile every kernel now, or load them from disk, so that no later call has to.

    Takes up to half a minute on a machine's first run and under a second from then on, so an engine calls it when it
    starts, or when its image is built. Calling it again does nothing.
    Creating a :class:`RadixTree` does the same for what its calls need; this also readies
    :meth:`RadixTree.check_integrity`.

    Raises
    ------
    RuntimeError
        If Numba's compiler is switched off (``NUMBA_DISABLE_JIT``).
    """
    for group in _groups():
        kernels(group)
