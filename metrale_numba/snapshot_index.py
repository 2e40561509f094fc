"""The snapshot index of one cache: which prefix has a recurrent state, and in which slot or under which key.

:class:`SnapshotIndex` is called by :class:`~metrale_numba.radix_tree.RadixTree` alone, with arguments that were
checked and under the cache's lock. It calls one kernel for each step and builds the result; it chooses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from metrale_numba.errors import IntegrityError
from metrale_numba.interface import Drop, Ids, SnapshotStats, Spill, TierEvict
from metrale_numba.kernels.arrays import IndexArrays, UInt64Array
from metrale_numba.kernels.layout import (
    FAULTS,
    INDEX_NUM_RESIDENTS,
    INDEX_ROWS,
    INDEX_SIZE,
    INDEX_STATS,
    SIBLING,
    SPILLED,
)
from metrale_numba.settings import Settings

_SIGN_BIT = 1 << 63
_TWO_TO_64 = 1 << 64


def to_signed(value: int) -> int:
    """The int64 with the bits of a uint64: what kernels take, so that no call mixes the two types."""
    return value if value < _SIGN_BIT else value - _TWO_TO_64


def to_unsigned(value: int) -> int:
    """The uint64 with the bits of an int64."""
    return value if value >= 0 else value + _TWO_TO_64


class SnapshotIndex:
    """Entries in order of insertion, found by tier key and check hash.

    Parameters
    ----------
    settings : Settings
        Of the cache.
    powers : array of uint64
        Powers of the check hash's secret base.
    multiplier : int
        Secret odd number that places keys in the table.
    kernels : mapping
        The compiled kernels.
    """

    __slots__ = ("_alpha", "_kernels", "arrays", "dead_keys")

    def __init__(
        self, settings: Settings, powers: UInt64Array, multiplier: int, kernels: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._kernels = kernels
        self._alpha = settings.evict_alpha
        # Keys whose stored bytes are garbage, oldest first: a dict, for its order and for taking keys off again.
        self.dead_keys: dict[int, None] = {}
        self.arrays = IndexArrays(
            powers,
            multiplier,
            block_size=settings.block_size,
            tail_protect=settings.tail_protect,
            tail_lease_ttl=settings.tail_lease_ttl,
            evict_legacy=settings.evict_legacy,
            hermetic=settings.hermetic,
        )

    def use(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        """Call other kernels from now on."""
        self._kernels = kernels

    def __len__(self) -> int:
        return int(self.arrays.header[INDEX_SIZE])

    def reserve_entry(self) -> None:
        """Make room for one more entry, so that the next registration cannot fail half-way."""
        header = self.arrays.header
        if header[INDEX_SIZE] == header[INDEX_ROWS]:
            self.arrays.grow(self._kernels["rehash"])

    def register(self, tokens: Ids, slot: int, session: int, adapter: int, *, sibling: bool) -> int | None:
        """Write the resident entry of a prefix and return the slot it displaces."""
        self.reserve_entry()
        flags = SIBLING if sibling else 0
        displaced, was_spilled, key = self._kernels["register"](
            self.arrays.header, tokens, adapter, slot, session, flags
        )
        if was_spilled:
            self.dead_keys[to_unsigned(key)] = None
        return displaced if displaced >= 0 else None

    def register_tail(self, tokens: Ids, slot: int, session: int, adapter: int) -> list[int]:
        """Write a session's tail in place of its earlier tail and siblings, and return the slots they give up."""
        self.reserve_entry()
        slots = np.empty(len(self) + 1, np.int64)
        keys = np.empty(len(self) + 1, np.int64)
        num_slots, num_keys = self._kernels["register_tail"](
            self.arrays.header, tokens, adapter, slot, session, slots, keys
        )
        for key in keys[:num_keys].tolist():
            self.dead_keys[to_unsigned(key)] = None
        displaced: list[int] = slots[:num_slots].tolist()
        return displaced

    def drop_adapter(self, adapter: int, drop: Callable[..., Any]) -> tuple[list[int], list[int]]:
        """Remove every entry of an adapter and return the slots and the spilled keys."""
        slots = np.empty(len(self), np.int64)
        keys = np.empty(len(self), np.int64)
        num_slots, num_keys = drop(self.arrays.header, adapter, slots, keys)
        return slots[:num_slots].tolist(), [to_unsigned(key) for key in keys[:num_keys].tolist()]

    def contents(self) -> tuple[list[int], list[int]]:
        """List the slots and the spilled keys of all entries."""
        entries = self.arrays.entries[: len(self)]
        is_spilled = entries["flags"] & SPILLED != 0
        slots: list[int] = entries["slot"][~is_spilled].tolist()
        keys: list[int] = entries["key"][is_spilled].tolist()
        return slots, keys

    def evict_lru(self) -> int | None:
        """Remove the victim and return its slot."""
        slot = self._kernels["evict_lru"](self.arrays.header, self._alpha)
        return slot if slot >= 0 else None

    def evict_to_tier(self, min_tokens: int) -> TierEvict | None:
        """Spill the victim, or drop it if it is shallower than `min_tokens`."""
        slot, spilled, depth, key, check = self._kernels["evict_to_tier"](self.arrays.header, min_tokens, self._alpha)
        if slot < 0:
            return None
        if spilled:
            # What is stored under the key from now on is alive again.
            self.dead_keys.pop(to_unsigned(key), None)
            return Spill(slot, to_unsigned(key), depth, to_unsigned(check))
        return Drop(slot, depth)

    def evict_slot(self, slot: int) -> bool:
        """Remove the resident entry that holds a slot."""
        return bool(self._kernels["evict_slot"](self.arrays.header, slot))

    def promote(self, key: int, slot: int, check: int | None) -> bool:
        """Make a spilled entry resident."""
        has_check = check is not None
        check_bits = to_signed(check) if check is not None else 0
        return bool(self._kernels["promote"](self.arrays.header, to_signed(key), slot, int(has_check), check_bits))

    def forget(self, key: int) -> bool:
        """Remove a spilled entry."""
        return bool(self._kernels["forget"](self.arrays.header, to_signed(key)))

    def stats(self) -> SnapshotStats:
        """The counters, from the index's beginning on."""
        return SnapshotStats(*self.arrays.header[INDEX_STATS:].tolist())

    def check_integrity(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        """Raise IntegrityError if a table, list or count is not what the entries say."""
        fault, where = kernels["check_index"](self.arrays.header)
        if fault:
            residents = int(self.arrays.header[INDEX_NUM_RESIDENTS])
            raise IntegrityError(
                f"snapshot index with {len(self)} entries, {residents} of them resident: {FAULTS[fault]} (at {where})"
            )
