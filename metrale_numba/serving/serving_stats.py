"""What operators see of a serving cache: counters from its beginning on, and figures of one moment."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ServingStats"]


class ServingStats(NamedTuple):
    """What a serving cache has done, and what is where now.

    Attributes
    ----------
    requests : int
        Requests that got their blocks, each counted once, whatever came before and after.
    queried_tokens, hit_tokens : int
        Tokens of their prompts, and how many of these had their KV in the cache when they got their blocks.
    recompute_tokens : int
        Of a hybrid model: hit tokens behind the snapshot that was used, whose state is computed again.
    snapshot_hits : int
        Sequences that began with a snapshot.
    finished, aborted, refused, forgotten : int
        How sequences ended: at their end, before it, before they had got any blocks, or lost without an end.
    running : int
        Sequences that have not ended.
    evicted_blocks : int
        Blocks that the cache gave up to make room.
    blocks, free_blocks, evictable_blocks, cached_blocks, most_blocks : int
        Of the block pool: the size, what is free, what could be evicted now, what the cache stores in full blocks, and
        the most that were ever in use.
    slots, free_slots, snapshots : int
        Of the slots: how many there are, how many are free; and the snapshots there are, spilled ones included.
    spills, clean_spills : int
        Snapshots that gave up their slots to the tier; how many of them were in the tier already.
    fault_ins : int
        Snapshots that came back.
    lost_writes, tier_misses, tier_errors : int
        Spilled snapshots that the tier did not take; those that it no longer had; calls of the tier that failed.
    """

    requests: int
    queried_tokens: int
    hit_tokens: int
    recompute_tokens: int
    snapshot_hits: int
    finished: int
    aborted: int
    refused: int
    forgotten: int
    running: int
    evicted_blocks: int
    blocks: int
    free_blocks: int
    evictable_blocks: int
    cached_blocks: int
    most_blocks: int
    slots: int
    free_slots: int
    snapshots: int
    spills: int
    clean_spills: int
    fault_ins: int
    lost_writes: int
    tier_misses: int
    tier_errors: int
