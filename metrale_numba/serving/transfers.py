"""Records of the snapshot store: whose snapshots they are, what is in a slot, and what is moving."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from metrale_numba.serving.tier import StoreKey

__all__ = ["FaultIn", "Identity", "Load", "Resident", "StoreCounts", "Write"]


@dataclass(frozen=True)
class Identity:
    """Whose snapshots these are: what a key of the tier says beside the prefix."""

    model: str
    dtype: str
    rank: int

    def store_key(self, epoch: int, adapter: int, key: int, check: int) -> StoreKey:
        """Where the tier has the bytes of a snapshot."""
        # The epoch tells other weights under the same name, so that a saved index never finds their bytes under its
        # keys. It stands first: whatever the name is, what is before the first mark is the epoch.
        return StoreKey(f"{epoch}#{self.model}", self.dtype, self.rank, adapter, key, check)

    def owns(self, store_key: StoreKey) -> bool:
        """Whether this is a place of ours, in any epoch."""
        epoch, mark, model = store_key.model.partition("#")
        is_of_this_layer = mark == "#" and epoch.isdecimal()
        return is_of_this_layer and (model, store_key.dtype, store_key.rank) == (self.model, self.dtype, self.rank)


@dataclass(eq=False)
class Write:
    """The bytes of a spilled snapshot, on their way to the tier."""

    store_key: StoreKey
    data: bytearray
    slot: int | None = None
    """Where the snapshot is resident again, if it was wanted before it was written."""
    is_dead: bool = False
    """Whether its entry is gone, so that what is written is garbage."""
    is_asked_for: bool = False
    """Whether it is kept in any case, since a saved index will name it."""
    is_copied: bool = False
    """Whether the tier had the same bytes, and may still have them."""
    thread: int = field(default_factory=threading.get_ident)
    """Who staged it, and so writes it."""
    is_over: threading.Event = field(default_factory=threading.Event)
    """Set when it is written, or will not be."""


@dataclass
class Resident:
    """What is known of the snapshot in a slot."""

    adapter: int
    copy: StoreKey | None = None
    """Where the tier has the same bytes."""
    write: Write | None = None
    """Or is about to have them."""


@dataclass(eq=False)
class Load:
    """Bytes on their way from the tier into a slot, and the sequences that wait for them."""

    process: int
    ready: threading.Event = field(default_factory=threading.Event)
    num_waiting: int = 0
    slot: int | None = None
    is_over: bool = False
    ask_again: bool = False


@dataclass(eq=False)
class FaultIn:
    """One sequence's part in fetching a spilled snapshot: it fetches, or waits for the one who does."""

    key: int
    check: int
    adapter: int
    epoch: int
    load: Load
    slot: int | None
    """The slot to fetch into; None for one who waits."""
    store_key: StoreKey
    data: bytearray | None
    """The bytes, if they are still in host memory."""


@dataclass
class StoreCounts:
    """What has happened so far."""

    spills: int = 0
    clean_spills: int = 0
    fault_ins: int = 0
    lost_writes: int = 0
    tier_misses: int = 0
    tier_errors: int = 0
