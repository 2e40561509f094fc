"""The nodes of a cache, listed from a copy: what :meth:`RadixTree.iter_nodes` yields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metrale_numba.interface import EMPTY_IDS, NONE, Ids, _Result
from metrale_numba.kernels.arrays import IndexArrays, PoolArrays
from metrale_numba.kernels.layout import (
    CHILDREN,
    INDEX_GRID,
    INDEX_SIZE,
    POOL_DISK_ROWS,
    POOL_NUM_NODES,
)

__all__ = ["NodeInfo", "PoolCopy", "copy_of", "listed", "snapshot_depths"]

# Nodes that are made ready at once.
_CHUNK = 4_096


class _NodeInfoFields(NamedTuple):
    number: int
    parent: int | None
    adapter_id: int
    block_size: int
    depth: int
    tokens: Ids
    block: int
    disk_block_id: int | None
    references: int
    is_hidden: bool
    stamp: int
    age: int
    children: int
    suffix_tokens: Ids
    suffix_block: int | None
    snapshots: tuple[int, ...]


class NodeInfo(_Result, _NodeInfoFields):
    """One cached block, as :meth:`RadixTree.iter_nodes` lists it.

    Immutable, unpackable, equal by value, not hashable. The arrays belong to whoever receives them.

    Attributes
    ----------
    number : int
        Which of the list it is, from 0.
    parent : int or None
        The `number` of the block before it in its prompts, which is a smaller one; None for the first of a prompt.
    adapter_id : int
        The adapter under which it is cached.
    block_size : int
        Tokens per block.
    depth : int
        Tokens from the beginning of the prompt to its end.
    tokens : ndarray of uint32
        Its own tokens, `block_size` of them.
    block : int
        The KV block that it stores.
    disk_block_id : int or None
        The disk block, if it has one.
    references : int
        Sequences and pins that hold it.
    is_hidden : bool
        Whether look-ups pass it by, since it was released more often than it was held.
    stamp : int
        The clock when it was last used.
    age : int
        Ticks of the clock since then.
    children : int
        Blocks that follow it in one prompt or another.
    suffix_tokens : ndarray of uint32
        The partial suffix that it bears, shorter than a block; empty if there is none.
    suffix_block : int or None
        The block of that.
    snapshots : tuple of int
        Depths of the snapshots from its end to before the end of a next block, rising. Always empty for blocks that
        are not of the cache's default size, or larger than 64 tokens.
    """

    __slots__ = ()


class PoolCopy(NamedTuple):
    """The nodes of one block size at one moment; the same place in all arrays but `suffixes` is the same node."""

    block_size: int
    rows: Ids
    depths: npt.NDArray[np.int64]
    nodes: npt.NDArray[Any]
    adapters: npt.NDArray[np.int64]
    tokens: Ids
    disks: Ids
    suffixes: dict[int, tuple[Ids, int]]
    snapshots: dict[int, list[int]]


def snapshot_depths(index: IndexArrays) -> dict[int, list[int]]:
    """List the depths of all snapshots by the check hash of the node that they are on or just below."""
    by_floor: dict[int, list[int]] = {}
    entries = index.entries[: index.header[INDEX_SIZE]]
    entries = entries[entries["floor"] != NONE]
    states = index.floors["state"][entries["floor"]]
    for state, depth in sorted(zip(states.tolist(), entries["depth"].tolist(), strict=True)):
        by_floor.setdefault(state, []).append(depth)
    return by_floor


def copy_of(
    pool: PoolArrays, index: IndexArrays, snapshots: dict[int, list[int]], adapter: int | None, list_nodes: Any
) -> PoolCopy:
    """Copy what is told of the nodes of a pool, all of them or one adapter's."""
    rows: Ids = np.empty(pool.header[POOL_NUM_NODES], np.uint32)
    depths = np.empty(rows.size, np.int64)
    count = list_nodes(pool.header, int(adapter is None), adapter or 0, rows, depths)
    rows, depths = rows[:count], depths[:count]
    nodes, links = pool.nodes[rows], pool.links[rows]
    suffixes = {}
    for place in np.flatnonzero(links["suffix"] != NONE).tolist():
        suffix = pool.suffixes[links["suffix"][place]]
        tokens = pool.suffix_tokens[links["suffix"][place], : suffix["length"]].copy()
        suffixes[place] = tokens, int(suffix["block"])
    return PoolCopy(
        pool.block_size,
        rows,
        depths,
        nodes,
        pool.nodes["stamp"][links["root"]],
        pool.tokens[rows],
        pool.disks[rows] if pool.header[POOL_DISK_ROWS] else np.full(rows.size, NONE, np.uint32),
        suffixes,
        snapshots if pool.block_size == index.header[INDEX_GRID] else {},
    )


def listed(pools: Sequence[PoolCopy], clock: int) -> Iterator[NodeInfo]:
    """Yield the nodes, those used last first and parents before children."""
    if not pools:
        return
    sizes = [pool.rows.size for pool in pools]
    which = np.repeat(np.arange(len(pools)), sizes)
    places = np.concatenate([np.arange(size) for size in sizes])
    nodes = np.concatenate([pool.nodes for pool in pools])
    depths = np.concatenate([pool.depths for pool in pools])
    parents = np.concatenate([_parents(pool) for pool in pools])
    # A parent is stamped whenever its child is, so it is as new, and less deep.
    order = np.lexsort((depths, -nodes["stamp"]))
    numbers = np.empty(order.size, np.int64)
    numbers[order] = np.arange(order.size)
    starts = np.cumsum([0, *sizes])[which]
    columns: list[npt.NDArray[Any]] = [
        which,
        places,
        depths,
        # The root, which is none of the nodes, has no number.
        np.where(parents < 0, -1, numbers[starts + parents]),
        np.concatenate([pool.adapters for pool in pools]),
        np.concatenate([pool.disks for pool in pools]),
        *(nodes[name] for name in ("stamp", "state", "block", "count", "children")),
    ]
    for start in range(0, order.size, _CHUNK):
        chunk = order[start : start + _CHUNK]
        # Plain numbers: to get at a field of one element of an array takes much longer.
        rows = zip(*(column[chunk].tolist() for column in columns), strict=True)
        for number, row in enumerate(rows, start):
            i, place, depth, parent, adapter, disk, stamp, state, block, count, children = row
            pool = pools[i]
            suffix_tokens, suffix_block = pool.suffixes.get(place, (EMPTY_IDS, None))
            yield NodeInfo(
                number=number,
                parent=None if parent < 0 else parent,
                adapter_id=adapter % 2**64,
                block_size=pool.block_size,
                depth=depth * pool.block_size,
                tokens=pool.tokens[place].copy(),
                block=block,
                disk_block_id=None if disk == NONE else disk,
                references=max(0, count - 1),
                is_hidden=count == 0,
                stamp=stamp,
                age=clock - stamp,
                children=children & CHILDREN,
                suffix_tokens=suffix_tokens.copy(),
                suffix_block=suffix_block,
                snapshots=tuple(pool.snapshots.get(state, ())),
            )


def _parents(pool: PoolCopy) -> npt.NDArray[np.int64]:
    """The place of each node's parent, or -1 if that is a root."""
    rows = pool.nodes["parent"]
    place_of = np.full(int(max(rows.max(initial=0), pool.rows.max(initial=0))) + 1, -1)
    place_of[pool.rows] = np.arange(pool.rows.size)
    parents: npt.NDArray[np.int64] = place_of[rows]
    return parents
