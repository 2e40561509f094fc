"""Copies of a cache: its whole state as plain arrays and numbers, and as a file that holds nothing executable.

A file is a short header (magic, format version, length, checksum), a description in JSON, and the arrays' bytes. It
is written beside its goal and moved there when it is whole. Reading trusts nothing: length, checksum, names,
shapes and every index are checked before a cache is built on them, and the cache then checks its integrity.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from metrale_numba.arguments import as_count, as_name, as_path
from metrale_numba.errors import CacheFileError
from metrale_numba.kernels import layout
from metrale_numba.kernels.arrays import row_shapes, table_size

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
_Parts: TypeAlias = list[bytes | memoryview]
_Types: TypeAlias = dict[str, np.dtype[Any]]

FORMAT_VERSION: Final = 2
_MAGIC: Final = b"METRALE\0"
# Magic, format version, length of the content, BLAKE2b of version, length and content.
_HEADER: Final = struct.Struct("<8sIQ32s")
# The content begins with the length of the description.
_LENGTH: Final = struct.Struct("<Q")
# No cache lives to see its clock here; from here on it could come to its end.
_MAX_CLOCK: Final = 2**62

_POOL_TYPES: Final[_Types] = {
    "header": np.dtype(np.int64),
    "nodes": layout.NODE,
    "links": layout.LINK,
    "tokens": np.dtype(np.uint32),
    "disks": np.dtype(np.uint32),
    "table": np.dtype(np.uint64),
    "suffixes": layout.SUFFIX,
    "suffix_tokens": np.dtype(np.uint32),
}
_SHARED_TYPES: Final[_Types] = {
    "header": np.dtype(np.int64),
    "heap_stamps": np.dtype(np.int64),
    "heap_nodes": np.dtype(np.uint64),
}
_INDEX_TABLES: Final = ("keys", "checks", "sessions", "floor_table")
_INDEX_TYPES: Final[_Types] = {
    "header": np.dtype(np.int64),
    "entries": layout.ENTRY,
    "residents": np.dtype(np.uint32),
    "floors": layout.FLOOR,
    **dict.fromkeys(_INDEX_TABLES, np.dtype(np.uint64)),
    "depth_counts": np.dtype(np.uint32),
    "depth_bits": np.dtype(np.uint64),
}
_PIN_TYPE: Final = np.dtype(np.uint32)
_GROUPS: Final[dict[str, _Types]] = {"shared": _SHARED_TYPES, "index": _INDEX_TYPES, "pool": _POOL_TYPES}


def _checksum(version: int, parts: _Parts) -> bytes:
    digest = hashlib.blake2b(struct.pack("<IQ", version, sum(map(len, parts))), digest_size=32)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def write_file(path: str | os.PathLike[str], meta: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a file in one step: whoever reads `path`, at any moment, finds the earlier file or this one, whole.

    Raises
    ------
    OSError
        If it cannot be written; the earlier file is untouched then.
    """
    target = as_path(path)
    shapes = [[name, *array.shape] for name, array in arrays.items()]
    text = json.dumps({**meta, "byte_order": sys.byteorder, "arrays": shapes}).encode()
    parts: _Parts = [_LENGTH.pack(len(text)), text, *(_bytes_of(array) for array in arrays.values())]
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, sum(map(len, parts)), _checksum(FORMAT_VERSION, parts))
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(header)
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
    # The file's content is on the disk; let its name be there, too.
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Arrays]:
    """Read what :func:`write_file` wrote. The arrays are views of what was read.

    Raises
    ------
    OSError
        If it cannot be read.
    CacheFileError
        If it is foreign, of another format, shorter or longer than it says, or damaged.
    """
    with as_path(path).open("rb") as file:
        # Of what is not ours no more is read than this: it may have no end.
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise CacheFileError(f"{os.fspath(path)} is not a saved cache")
        _, version, length, checksum = _HEADER.unpack(header)
        if version != FORMAT_VERSION:
            age = "newer" if version > FORMAT_VERSION else "older"
            raise CacheFileError(
                f"{os.fspath(path)} is of format {version}, {age} than {FORMAT_VERSION}, the one that is known here"
            )
        content = file.read()
    if len(content) != length:
        raise CacheFileError(f"{os.fspath(path)} has {len(content)} bytes of content where {length} were written")
    if _checksum(version, [content]) != checksum:
        raise CacheFileError(f"{os.fspath(path)} is damaged: its checksum is not that of its content")
    try:
        return _taken_apart(content)
    except (LookupError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise CacheFileError(f"{os.fspath(path)} cannot be read as a saved cache: {error}") from error


def _taken_apart(content: bytes) -> tuple[dict[str, Any], Arrays]:
    """Split a file's content into the description and the arrays, each of the type that its name asks for."""
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    if start > len(content):
        raise ValueError(f"its description ends at byte {start} of {len(content)}")
    meta = json.loads(content[_LENGTH.size : start])
    if not isinstance(meta, dict):
        raise TypeError("its description is no object")
    if meta["byte_order"] != sys.byteorder:
        raise ValueError(f"it was written on a machine of another byte order than {sys.byteorder}-endian")
    arrays = {}
    for name, *lengths in meta["arrays"]:
        dtype = _type_of(as_name(name))
        shape = [as_count(length, f"a length of {name}") for length in lengths]
        arrays[name] = np.ndarray(shape, dtype, content, start)
        start += math.prod(shape) * dtype.itemsize
    if start != len(content):
        raise ValueError(f"its arrays end at byte {start} of {len(content)}")
    return meta, arrays


def _type_of(name: str) -> np.dtype[Any]:
    group, _, rest = name.partition("/")
    if group == "pin":
        return _PIN_TYPE
    return _GROUPS[group][rest.rpartition("/")[2]]


def flatten(state: Mapping[str, Any]) -> Arrays:
    """Put the arrays of a state under one name each."""
    arrays = {f"shared/{name}": array for name, array in state["shared"].items()}
    arrays |= {f"index/{name}": array for name, array in state["index"].items()}
    for block_size, pool in state["pools"].items():
        arrays |= {f"pool/{block_size}/{name}": array for name, array in pool.items()}
    return arrays


def unflatten(arrays: Arrays, block_sizes: list[int]) -> dict[str, Any]:
    """Take the arrays of a state apart, with types, shapes and every index checked.

    Raises
    ------
    CacheFileError
        If an array is missing, of another type or shape, or points outside another.
    """
    shared = _take(arrays, "shared/", _SHARED_TYPES)
    index = _take(arrays, "index/", _INDEX_TYPES)
    pools = {block_size: _take(arrays, f"pool/{block_size}/", _POOL_TYPES) for block_size in block_sizes}
    _require(shared["header"].shape == (layout.SHARED_FIELDS,), "shared/header")
    _require(0 <= shared["header"][layout.SHARED_CLOCK] < _MAX_CLOCK, "clock")
    _require(shared["heap_stamps"].ndim == 1, "shared/heap_stamps")
    _require(shared["heap_stamps"].shape == shared["heap_nodes"].shape, "shared/heap_nodes")
    numbers = []
    for block_size, pool in pools.items():
        _check_pool(pool, block_size)
        numbers.append(int(pool["header"][layout.POOL_NUMBER]))
    _require(len(set(numbers)) == len(numbers) and all(0 <= number < 2**20 for number in numbers), "pool numbers")
    _check_heap(shared, pools)
    _check_index(index)
    return {"shared": shared, "index": index, "pools": pools}


def _take(arrays: Arrays, prefix: str, types: Mapping[str, np.dtype[Any]]) -> Arrays:
    taken = {}
    for name, dtype in types.items():
        array = arrays.get(prefix + name)
        _require(array is not None and array.dtype == dtype and array.flags.c_contiguous, prefix + name)
        taken[name] = array
    return taken  # type: ignore[return-value]  # none of them is None by now


def _require(holds: object, what: str) -> None:
    if not holds:
        raise CacheFileError(f"the saved cache's {what} cannot be right")


def _rows_or_none(rows: npt.NDArray[Any], size: int) -> bool:
    """Whether each is a row below `size` or NONE."""
    return bool(((rows < size) | (rows == layout.NONE)).all())


def _table_rows(table: npt.NDArray[np.uint64], size: int) -> bool:
    """Whether a table has slots enough for so many rows, one of them free, and each used one names such a row."""
    used = table[table != layout.EMPTY_SLOT]
    is_large_enough = used.size < table.size >= table_size(size)
    return is_large_enough and bool(((used & np.uint64(layout.NONE)) < size).all())


def _check_pool(pool: Arrays, block_size: int) -> None:
    header, nodes, links, suffixes = pool["header"], pool["nodes"], pool["links"], pool["suffixes"]
    what = f"blocks of {block_size} tokens"
    _require(header.shape == (layout.POOL_FIELDS,), what)
    rows, suffix_rows = nodes.size, suffixes.size
    width, suffix_width = row_shapes(block_size)
    _require(nodes.shape == links.shape == (rows,) and pool["tokens"].shape == (rows, width), what)
    _require(suffixes.shape == (suffix_rows,), what)
    _require(pool["suffix_tokens"].shape == (suffix_rows, suffix_width), what)
    _require(pool["disks"].shape in ((0,), (rows,)) and pool["table"].ndim == 1, what)
    parents = nodes["parent"]
    _require(((parents < rows) | (parents >= layout.ROOT)).all(), what)
    _require(_rows_or_none(nodes["block"][parents == layout.NONE], rows), what)
    for field in ("first_child", "next_sibling", "previous_sibling"):
        _require(_rows_or_none(links[field][parents != layout.NONE], rows), what)
    _require((links["root"][parents != layout.NONE] < rows).all(), what)
    _require(_rows_or_none(links["suffix"][parents < layout.ROOT], suffix_rows), what)
    _require(_rows_or_none(suffixes["node"], rows), what)
    _require(_rows_or_none(suffixes["block"][suffixes["node"] == layout.NONE], suffix_rows), what)
    _require((suffixes["length"][suffixes["node"] != layout.NONE] < block_size).all(), what)
    _require(_table_rows(pool["table"], rows), what)
    _require(-1 <= header[layout.POOL_FREE] < rows and -1 <= header[layout.POOL_SUFFIX_FREE] < suffix_rows, what)
    first_root = header[layout.POOL_FIRST_ROOT]
    _require(first_root == layout.NONE or 0 <= first_root < rows, what)


def has_disk_ids(pools: Mapping[int, Arrays]) -> bool:
    """Whether a disk id is stored: a call that takes blocks out must make room for it, then."""
    return any(
        (pool["disks"] != layout.NONE).any()
        or (pool["suffixes"]["disk"][pool["suffixes"]["node"] != layout.NONE] != layout.NONE).any()
        for pool in pools.values()
    )


def _check_heap(shared: Arrays, pools: Mapping[int, Arrays]) -> None:
    rows = {int(pool["header"][layout.POOL_NUMBER]): pool["nodes"].size for pool in pools.values()}
    numbers = shared["heap_nodes"] >> np.uint64(32)
    members = shared["heap_nodes"] & np.uint64(layout.NONE)
    _require(np.isin(numbers, list(rows)).all() if numbers.size else True, "order of eviction")
    for number, size in rows.items():
        _require((members[numbers == number] < size).all(), "order of eviction")
    _require(numbers.size <= sum(rows.values()), "order of eviction")
    _require(shared["header"][layout.SHARED_HEAP_SIZE] == numbers.size, "order of eviction")


def _check_index(index: Arrays) -> None:
    entries, residents, floors = index["entries"], index["residents"], index["floors"]
    what = "snapshot index"
    header = index["header"]
    _require(header.shape == (layout.INDEX_FIELDS,), what)
    _require(entries.ndim == residents.ndim == floors.ndim == 1 and residents.size <= entries.size, what)
    _require((residents < entries.size).all() and (entries["depth"] >= 0).all(), what)
    _require((entries["slot"] >= 0).all() and 0 <= header[layout.INDEX_CLOCK] < _MAX_CLOCK, what)
    _require(_rows_or_none(entries["floor"], floors.size), what)
    _require(_rows_or_none(floors["next_free"][floors["count"] == 0], floors.size), what)
    _require(-1 <= header[layout.INDEX_FLOORS_FREE] < floors.size, what)
    for name in _INDEX_TABLES:
        rows = floors.size if name == "floor_table" else entries.size
        table = index[name]
        is_as_large = name == "floor_table" or table.shape == index["keys"].shape
        _require(is_as_large and table.ndim == 1 and _table_rows(table, rows), what)
    _require(index["depth_counts"].shape == (layout.DEPTH_CLASSES,), what)
    _require(index["depth_bits"].shape == (layout.DEPTH_CLASSES // 64,), what)
