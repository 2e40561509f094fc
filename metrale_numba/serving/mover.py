"""What an engine gives the serving layer: the three ways in which the memory behind the ids is touched."""

from __future__ import annotations

from typing import Protocol

__all__ = ["SnapshotMover"]


class SnapshotMover(Protocol):
    """Moves the bytes of snapshots, and the rows of a block, in the engine's memory.

    The serving layer calls it from whatever thread needs it, `read_slot` and `copy_rows` under its own lock,
    `write_slot` while others may wait for the same snapshot: none of them may call the :class:`ServingCache` back. Each
    returns when the bytes are where they should be. What they raise reaches the caller of the serving layer, after
    everything that was taken has been given back.

    Attributes
    ----------
    slot_bytes : int
        Bytes of one snapshot, the same for every slot.
    """

    slot_bytes: int

    def read_slot(self, slot: int, into: memoryview) -> None:
        """Copy a snapshot out of its slot, for the tier.

        Parameters
        ----------
        slot : int
            The slot.
        into : memoryview of bytes, shape (slot_bytes,)
            Where to.
        """

    def write_slot(self, slot: int, data: memoryview) -> None:
        """Copy a snapshot that came from the tier into a slot.

        Parameters
        ----------
        slot : int
            The slot, which nobody else reads.
        data : memoryview of bytes, shape (slot_bytes,)
            What `read_slot` gave, in this process or an earlier one.
        """

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the KV of a block's first tokens into another block, in every layer.

        Called with partial-tail sharing only.

        Parameters
        ----------
        source : int
            The block that was matched in part.
        target : int
            A new block.
        rows : int
            How many tokens, at least 1 and fewer than a block has.
        """
