"""The engine of the protocol page: every reference that an engine takes and drops, around a model of one line.

It relies on the public interface of :mod:`metrale_numba` and nothing else. It is for one thread; with several, each
method but ``compute`` would hold the engine's lock from its first line to its last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from metrale_numba import NoPrefixCaching, PrefixMatch, RadixTree, Spill


def next_state(state: int, token: int) -> int:
    """Run the model on one token: the new recurrent state, and also the token's KV."""
    return (31 * state + token + 1) % 2**32


class Pool:
    """Blocks or slots, with a count of references on each; free while it is 0."""

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self._free = list(range(size))

    @property
    def num_free(self) -> int:
        """How many places are free."""
        return len(self._free)

    def take(self) -> int:
        """Hand out the lowest free place, with one reference on it."""
        place = heappop(self._free)
        self.counts[place] = 1
        return place

    def hold(self, places: Iterable[int]) -> None:
        """Take one reference on each of `places`."""
        for place in places:
            if self.counts[place] == 0:
                raise RuntimeError(f"{place} is free, so there is nothing to hold")
            self.counts[place] += 1

    def drop(self, places: Iterable[int]) -> None:
        """Drop one reference on each of `places`."""
        for place in places:
            if self.counts[place] == 0:
                raise RuntimeError(f"{place} is free already")
            self.counts[place] -= 1
            if self.counts[place] == 0:
                heappush(self._free, int(place))


@dataclass
class Sequence:
    """One request: its tokens, the blocks of their KV, and what it holds in the cache."""

    tokens: list[int]
    session: int
    adapter: int
    """What it is computed under, and so what all its calls on the cache name."""
    state: int
    """The recurrent state after the computed tokens."""
    table: list[int] = field(default_factory=list)
    """A block for each `block_size` tokens, with a pool reference on each."""
    held: int = 0
    """Tokens whose nodes it holds in the cache, always whole blocks."""
    computed: int = 0
    """Tokens whose KV is there."""
    state_at_block_end: int = 0
    """The recurrent state after the last whole block of these."""


class Engine:
    """Blocks, slots, a tier for snapshots, and the cache that knows what is in them."""

    def __init__(
        self,
        cache: RadixTree | NoPrefixCaching,
        num_blocks: int,
        num_slots: int,
        tier_size: int,
    ) -> None:
        self.cache = cache
        self.block_size = cache.block_size
        # Without sharing no look-up could match a partial suffix, and it would keep a block in vain.
        self.publishes_suffixes = isinstance(cache, RadixTree) and cache.settings.partial_tail_sharing
        self.blocks = Pool(num_blocks)
        self.kv = np.zeros((num_blocks, self.block_size), np.uint32)
        self.slots = Pool(num_slots)
        self.states = np.zeros(num_slots, np.uint32)
        self.tier: dict[int, tuple[int, int]] = {}
        self.tier_size = tier_size

    def admit(self, tokens: Iterable[int], session: int = 0, adapter: int = 0) -> Sequence | None:
        """Begin a sequence with what is cached of its prompt; None if memory is short."""
        sequence = Sequence(list(tokens), session, adapter, state=adapter)
        # Room for a copy, since nothing may be evicted between look-up and copy.
        if not self.make_room(1):
            return None
        prompt = sequence.tokens[:-1]
        match = self.cache.lookup(prompt, session_hash=session, adapter_id=adapter)
        sequence.table = match.matched_blocks.tolist()
        self.blocks.hold(sequence.table)
        if match.ssm_snapshot is not None:
            self.slots.hold([match.ssm_snapshot])
        sequence.held = match.matched_tokens // self.block_size * self.block_size
        if match.matched_tokens > sequence.held:
            self.copy_last_block(sequence)
        self.restore(sequence, match)
        lacking = -(-len(sequence.tokens) // self.block_size) - len(sequence.table)
        if not self.make_room(lacking):
            self.cache.release_matched(prompt, None, match.matched_tokens, adapter_id=adapter)
            self.blocks.drop(sequence.table)
            return None
        sequence.table += [self.blocks.take() for _ in range(lacking)]
        return sequence

    def copy_last_block(self, sequence: Sequence) -> None:
        """Put a copy of the lent block into the table, and give the lent one back."""
        lent = sequence.table[-1]
        copy = self.blocks.take()
        self.kv[copy] = self.kv[lent]
        sequence.table[-1] = copy
        self.blocks.drop([lent])

    def restore(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Bring the recurrent state to the end of the match, from a snapshot if any."""
        if match.ssm_snapshot is not None:
            sequence.state = int(self.states[match.ssm_snapshot])
            sequence.computed = match.ssm_snapshot_tokens
            self.slots.drop([match.ssm_snapshot])
        elif match.ssm_snapshot_tier_key is not None:
            self.fault_in(sequence, match, match.ssm_snapshot_tier_key)
        sequence.state_at_block_end = sequence.state
        self.compute(sequence, match.matched_tokens - sequence.computed, writes=False)

    def fault_in(self, sequence: Sequence, match: PrefixMatch, key: int) -> None:
        """Restore a spilled snapshot, and make it resident again if there is a slot."""
        check, state = self.tier.get(key, (None, 0))
        if check is None or check != match.ssm_snapshot_check:
            self.cache.forget_snapshot_tier_key(key)
            return
        sequence.state = state
        sequence.computed = match.ssm_snapshot_tier_tokens
        slot = self.take_slot()
        if slot is None:
            return
        self.states[slot] = state
        if self.cache.promote_snapshot(key, slot, check):
            del self.tier[key]
        else:
            self.slots.drop([slot])

    def make_room(self, wanted: int) -> bool:
        """Evict until so many blocks are free; False if that cannot be."""
        while self.blocks.num_free < wanted:
            evicted = self.cache.evict(wanted - self.blocks.num_free)
            if evicted.is_empty():
                return False
            self.blocks.drop(evicted.physical)
        return True

    def compute(self, sequence: Sequence, count: int, *, writes: bool = True) -> None:
        """Run the model over the next tokens; without `writes` for its state alone."""
        for _ in range(count):
            block, place = divmod(sequence.computed, self.block_size)
            sequence.state = next_state(sequence.state, sequence.tokens[sequence.computed])
            if writes:
                self.kv[sequence.table[block], place] = sequence.state
            sequence.computed += 1
            if sequence.computed % self.block_size == 0:
                sequence.state_at_block_end = sequence.state

    def decode(self, sequence: Sequence, token: int) -> bool:
        """Append a token and compute it; False, and nothing is done, if memory is short."""
        if len(sequence.tokens) == len(sequence.table) * self.block_size:
            if not self.make_room(1):
                return False
            sequence.table.append(self.blocks.take())
        sequence.tokens.append(token)
        self.compute(sequence, 1)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Let the cache have everything that is computed so far, and that it can share."""
        whole = sequence.computed - sequence.computed % self.block_size
        done = sequence.tokens[: sequence.computed if self.publishes_suffixes else whole]
        acquired = self.cache.insert(done, sequence.table, matched_tokens=sequence.held, adapter_id=sequence.adapter)
        self.blocks.hold(acquired.blocks)
        self.blocks.drop(acquired.released_blocks)
        sequence.held = whole

    def take_slot(self) -> int | None:
        """Hand out a slot, spilling snapshots until one is free; None if none will be."""
        while self.slots.num_free == 0:
            gone = self.cache.evict_snapshot_to_tier(self.block_size)
            if gone is None:
                return None
            if isinstance(gone, Spill):
                self.store(gone)
            self.slots.drop([gone.slot])
        return self.slots.take()

    def store(self, spill: Spill) -> None:
        """Write a snapshot to the tier, and tell the cache what the tier discards."""
        self.tier.pop(spill.key, None)
        self.tier[spill.key] = (spill.check, int(self.states[spill.slot]))
        if len(self.tier) > self.tier_size:
            oldest = next(iter(self.tier))
            del self.tier[oldest]
            self.cache.forget_snapshot_tier_key(oldest)

    def save_snapshot(self, sequence: Sequence, *, tail: bool = False) -> None:
        """Register the state after the last whole block, as a tail or for everyone."""
        # A cache that stores nothing leaves the slot to the engine, which has no use for it either.
        if not self.cache.is_active():
            return
        done = sequence.tokens[: sequence.computed - sequence.computed % self.block_size]
        slot = self.take_slot() if done else None
        if slot is None:
            return
        self.states[slot] = sequence.state_at_block_end
        if tail:
            displaced = self.cache.insert_tail_snapshot(done, slot, sequence.session, adapter_id=sequence.adapter)
        else:
            overwritten = self.cache.insert_intermediate_snapshot(
                tokens=done,
                block_table=sequence.table,
                disk_block_ids=(),
                block_size=None,
                snapshot_id=slot,
                session_hash=sequence.session,
                adapter_id=sequence.adapter,
            )
            displaced = [] if overwritten is None else [overwritten]
        self.slots.drop(displaced)

    def end(self, sequence: Sequence) -> None:
        """End or abort a sequence: drop what it holds, in the cache and in the pool."""
        self.cache.release(sequence.tokens[: sequence.held], adapter_id=sequence.adapter)
        self.blocks.drop(sequence.table)

    def kv_of(self, sequence: Sequence) -> list[int]:
        """Read the KV of every computed token, by way of the table."""
        kv: list[int] = self.kv[sequence.table].flatten()[: sequence.computed].tolist()
        return kv
