"""Snapshots of hybrid models in a replay: when they are taken, how many there is room for, what they came to.

Relies on a sequence of the serving layer. Depths are counted in blocks, since a trace tells prompts apart no finer. A
state can be saved only where it is computed, which is behind the snapshot that a request began with.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Final, NamedTuple

from metrale_numba.serving import Sequence

__all__ = [
    "SNAPSHOT_PLACES",
    "HybridCounts",
    "PlannedSnapshots",
    "SnapshotPlan",
    "SnapshotRoom",
    "gains",
    "take_snapshots",
]

SNAPSHOT_PLACES: Final = ("prompt-end", "tail", "fork")
"""Names of the places of a prompt at which snapshots can be taken."""


class PlannedSnapshots(NamedTuple):
    """The snapshots that one prompt leaves behind; depths in blocks."""

    shared: list[int]
    """For everybody, in the order in which they are computed."""
    tail: int | None = None
    """For the session's next turn alone, in place of its earlier tail."""
    sibling: int | None = None
    """Goes with the tail, but is for everybody."""


class SnapshotPlan(NamedTuple):
    """When snapshots are taken. By default, at the end of every prompt."""

    every: int = 0
    """After every so many blocks of a prompt; 0 for none of these."""
    at: frozenset[str] = frozenset({"prompt-end"})
    """Of `SNAPSHOT_PLACES`: at the last whole block of a prompt, there as a session's tail, and where a match ended."""

    def of_prompt(self, restored: int, matched: int, whole: int, session: int) -> PlannedSnapshots:
        """Say where one prompt has its snapshots taken.

        Parameters
        ----------
        restored : int
            Depth of the snapshot it began with, or 0.
        matched : int
            Blocks of it that were in the cache.
        whole : int
            Blocks of it that are full.
        session : int
            The conversation, or 0: without one there is no tail.

        Returns
        -------
        PlannedSnapshots
            All deeper than `restored` and at most `whole`; none twice.
        """
        shared: set[int] = set()
        if self.every:
            first = (restored // self.every + 1) * self.every
            shared.update(range(first, whole + 1, self.every))
        if "fork" in self.at and restored < min(matched, whole):
            shared.add(min(matched, whole))
        tail = sibling = None
        if whole > restored:
            if "tail" in self.at and session:
                # A tail in its place would take the shared snapshot from everybody else.
                tail = None if whole in shared else whole
                if tail is not None and whole - 1 > restored and whole - 1 not in shared:
                    sibling = whole - 1
            elif "prompt-end" in self.at:
                shared.add(whole)
        return PlannedSnapshots(sorted(shared), tail, sibling)


class SnapshotRoom(NamedTuple):
    """How many snapshots there is room for, and when they are taken."""

    slots: int | None
    """Slots of the engine; None for as many as are needed."""
    tier_snapshots: int = 0
    """Snapshots that the tier has room for; without any there is no tier."""
    plan: SnapshotPlan = SnapshotPlan()


class HybridCounts(NamedTuple):
    """What snapshots came to. Tokens are summed over the prompts of all requests that were begun."""

    usable_hit_tokens: int = 0
    """Hit tokens that need not be computed again: those up to the deepest snapshot that could be restored."""
    recompute_tokens: int = 0
    """The other hit tokens: their KV was cached, but not the state behind them."""
    snapshot_hits: int = 0
    """Requests that began with a snapshot."""
    saved_snapshots: int = 0
    """Snapshots that were taken."""
    refused_snapshots: int = 0
    """Snapshots for which there was no slot."""
    spills: int = 0
    """Snapshots that gave up their slot to the tier."""
    fault_ins: int = 0
    """Snapshots that came back from it."""
    tier_hits: int = 0
    """Requests whose deepest snapshot was a spilled one."""
    tier_misses: int = 0
    """Spilled snapshots that turned out to be discarded: when one was wanted, or when room was made for others."""


def take_snapshots(sequence: Sequence, planned: PlannedSnapshots, block_size: int) -> int:
    """Take the snapshots of one prompt; a tail is the last, so that it is the freshest.

    Parameters
    ----------
    sequence : Sequence
        The request, all of whose prompt is computed. Takes slots, evicting other snapshots if none is free.
    planned : PlannedSnapshots
        Where.
    block_size : int
        Tokens of the sequence per block.

    Returns
    -------
    int
        How many were saved. A sibling counts with its tail.
    """
    saved = 0
    for depth in planned.shared:
        saved += sequence.snapshot(depth * block_size, _write_nothing)
    if planned.tail is not None:
        sibling = None if planned.sibling is None else (planned.sibling * block_size, _write_nothing)
        saved += sequence.tail_snapshot(planned.tail * block_size, _write_nothing, sibling)
    return saved


def gains(amounts: Items[float], usable_tokens: Items[int]) -> list[float | None]:
    """Say what each step of a sweep buys.

    Parameters
    ----------
    amounts : sequence of float
        How much there was of something, each more than the one before.
    usable_tokens : sequence of int
        The usable hit tokens that came of it.

    Returns
    -------
    list of float or None
        The usable hit tokens that one unit more brought, on average since the amount before; None for the first.
    """
    steps: list[float | None] = [None]
    for place in range(1, len(amounts)):
        gained = usable_tokens[place] - usable_tokens[place - 1]
        steps.append(gained / (amounts[place] - amounts[place - 1]))
    return steps


def _write_nothing(slot: int) -> None:
    """Stand in for the copying of a state: there is none."""
