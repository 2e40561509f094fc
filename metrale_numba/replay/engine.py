"""An engine without a model: it does with a serving cache what an engine does, and moves ids only.

Relies on :mod:`metrale_numba.serving` for blocks, snapshots and their tier. It knows no time: who drives it says when
a request begins, is computed and ends, and is told how many tokens there were to compute. For one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from metrale_numba.kernels.layout import ID_POOL_NUM_FREE
from metrale_numba.no_caching import NoPrefixCaching
from metrale_numba.radix_tree import RadixTree
from metrale_numba.replay.hybrid import HybridCounts, SnapshotRoom, take_snapshots
from metrale_numba.replay.requests import Request
from metrale_numba.serving import (
    BlockPool,
    MemoryTier,
    OutOfBlocks,
    Sequence,
    ServingCache,
    SnapshotMover,
    SnapshotPool,
)

__all__ = ["EngineCounts", "Run", "SimulatedEngine"]

# What one snapshot takes in the simulated tier, whose limit is then a number of snapshots.
_SLOT_BYTES: Final = 1

_FEWEST_ADDED: Final = 1_024

# No model has a context of as many blocks, and a slip in a trace would fill the memory.
_LONGEST_ENDLESS_REQUEST: Final = 1 << 24


class EngineCounts(NamedTuple):
    """What a simulated engine has done. Tokens are the trace's; those of prompts if nothing else is said."""

    requests: int = 0
    """Requests begun."""
    prompt_blocks: int = 0
    """Blocks of their prompts: one per hash id, or of tokens the full ones."""
    hit_blocks: int = 0
    """Blocks among them that were in the cache."""
    prompt_tokens: int = 0
    """Tokens of their prompts."""
    hit_tokens: int = 0
    """Tokens among them that were in the cache."""
    computed_tokens: int = 0
    """Tokens that were computed before the first token of an answer came."""
    evicted_blocks: int = 0
    """Blocks that the cache gave up to make room."""
    cached_blocks: int = 0
    """Blocks in the cache now."""
    most_held_blocks: int = 0
    """The most that running requests held at once, so that nothing could be evicted for others."""
    hybrid: HybridCounts | None = None
    """Of a hybrid model: what its snapshots came to."""


@dataclass(slots=True, eq=False)
class Run:
    """A request that has its blocks."""

    request: Request
    sequence: Sequence
    computed_tokens: int
    """How many tokens of its prompt are to be computed."""


class SimulatedEngine:
    """Serves requests as an engine would, but for the computing.

    A block is `block_size` ids of the trace: one hash id, or so many tokens of a trace of tokens. The last id of a
    prompt counts as a whole block, as in :class:`~metrale_numba.replay.Replay`, and at least one token is computed.
    A request is given blocks for its prompt and its whole answer at once. Answers are not published: a trace says how
    long they are, and not what is in them.

    Parameters
    ----------
    blocks : int or None
        How many blocks there are; None for as many as are needed.
    block_size : int, default 1
        Ids per block.
    caching : bool, default True
        Whether prefixes are shared.
    snapshots : SnapshotRoom, optional
        For a hybrid model, whose computing begins at a snapshot.
    """

    def __init__(
        self,
        blocks: int | None,
        *,
        block_size: int = 1,
        caching: bool = True,
        snapshots: SnapshotRoom | None = None,
    ) -> None:
        # Whatever the environment says: a block that is shared in part would be copied, which the model leaves out.
        cache = RadixTree(block_size=block_size, partial_tail_sharing=False) if caching else None
        room = SnapshotRoom(0) if snapshots is None else snapshots
        tier = MemoryTier(room.tier_snapshots * _SLOT_BYTES) if room.tier_snapshots else None
        # They grow as they are needed, so that a pool that is never full takes no memory for what it might hold.
        self._blocks = BlockPool(0)
        self._slots = SnapshotPool(0)
        self._most_blocks = blocks
        self._most_slots = room.slots
        self._serving = ServingCache(
            cache or NoPrefixCaching(block_size=block_size),
            self._blocks,
            _NoMemory(),
            slots=self._slots,
            tier=tier,
            hybrid=snapshots is not None,
        )
        self._tree = cache
        self._block_size = block_size
        self._plan = None if snapshots is None else snapshots.plan
        # What was tried last without success, so that the serving cache knows the same request when it comes again.
        self._begun_in_vain: tuple[Request, Sequence] | None = None
        self._requests = self._prompt_blocks = self._hit_blocks = 0
        self._prompt_tokens = self._hit_tokens = self._computed_tokens = self._most_held_blocks = 0
        self._usable_tokens = self._snapshot_hits = self._saved_snapshots = self._refused_snapshots = 0

    @property
    def serving(self) -> ServingCache:
        """The serving cache, to ask and not to change."""
        return self._serving

    def blocks_of(self, request: Request) -> int:
        """Count the blocks that a request holds while it runs, for its prompt and its whole answer."""
        return -(-(request.input_length + request.output_length) // (self._block_size * request.tokens_per_id))

    def ever_fits(self, request: Request) -> bool:
        """Tell whether there are as many blocks as a request needs, were it alone; of endless ones, 16,777,216 are."""
        most = _LONGEST_ENDLESS_REQUEST if self._most_blocks is None else self._most_blocks
        return self.blocks_of(request) <= most

    def start(self, request: Request) -> Run | None:
        """Look a prompt up and give the request its blocks, evicting others if it must.

        Parameters
        ----------
        request : Request
            The request, which :meth:`ever_fits`.

        Returns
        -------
        Run or None
            None if running requests hold too many blocks: to be tried again when one has ended.
        """
        wanted = self.blocks_of(request)
        _grow(self._blocks, wanted, self._most_blocks)
        if not self._may_have_room(request, wanted):
            return None
        earlier = self._begun_in_vain
        sequence = self._serving.begin(
            request.hash_ids,
            session=request.session,
            adapter=request.adapter,
            min_compute=0,
            retry=earlier[1] if earlier is not None and earlier[0] is request else False,
        )
        try:
            sequence.allocate(wanted - sequence.block_table.size)
        except OutOfBlocks:
            sequence.abort()
            self._begun_in_vain = request, sequence
            return None
        self._begun_in_vain = None
        run = Run(request, sequence, self._count(request, sequence))
        if self._plan is not None:
            # The state is in the engine's own memory from here on.
            sequence.release_snapshot()
        self._most_held_blocks = max(self._most_held_blocks, self._blocks.num_blocks - self._serving.num_free_blocks)
        return run

    def publish(self, run: Run) -> None:
        """Note that a prompt is computed: others may share it from here on, and its snapshots are taken."""
        sequence = run.sequence
        sequence.publish(sequence.num_tokens)
        if self._plan is None or self._tree is None:
            return
        request = run.request
        planned = self._plan.of_prompt(
            restored=sequence.compute_from // self._block_size,
            matched=sequence.cached_tokens // self._block_size,
            whole=request.input_length // (self._block_size * request.tokens_per_id),
            session=request.session,
        )
        wanted = len(planned.shared) + (planned.tail is not None)
        _grow(self._slots, wanted + (planned.sibling is not None), self._most_slots)
        saved = take_snapshots(sequence, planned, self._block_size)
        self._saved_snapshots += saved
        self._refused_snapshots += wanted - saved

    def end(self, run: Run) -> None:
        """End a request: its blocks may be evicted from here on, and those of its answer are free."""
        run.sequence.finish()

    def abort(self, run: Run) -> None:
        """End a request before its time."""
        run.sequence.abort()

    def counts(self) -> EngineCounts:
        """Sum up what was done so far; changes nothing."""
        stats = self._serving.stats()
        hybrid = None
        if self._plan is not None:
            hybrid = HybridCounts(
                usable_hit_tokens=self._usable_tokens,
                recompute_tokens=self._hit_tokens - self._usable_tokens,
                snapshot_hits=self._snapshot_hits,
                saved_snapshots=self._saved_snapshots,
                refused_snapshots=self._refused_snapshots,
                spills=stats.spills,
                fault_ins=stats.fault_ins,
                tier_hits=0 if self._tree is None else self._tree.snapshot_stats().tier_hits,
                tier_misses=stats.tier_misses,
            )
        return EngineCounts(
            requests=self._requests,
            prompt_blocks=self._prompt_blocks,
            hit_blocks=self._hit_blocks,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=self._hit_tokens,
            computed_tokens=self._computed_tokens,
            evicted_blocks=stats.evicted_blocks,
            cached_blocks=stats.cached_blocks,
            most_held_blocks=self._most_held_blocks,
            hybrid=hybrid,
        )

    def _may_have_room(self, request: Request, wanted: int) -> bool:
        """Rule out, without touching anything, most of the attempts that would fail."""
        free = self._serving.num_free_blocks
        if wanted <= free:
            return True
        if self._tree is None:
            return False
        # An attempt makes its prefix the freshest, and may bring a snapshot back from the tier.
        matched = self._tree.peek_matched_tokens(request.hash_ids, adapter_id=request.adapter)
        return wanted - matched // self._block_size <= free

    def _count(self, request: Request, sequence: Sequence) -> int:
        """Count a request that has begun; answers how many tokens of its prompt are to be computed."""
        length, per_id = request.input_length, request.tokens_per_id
        hit = min(sequence.cached_tokens * per_id, length)
        usable = min(sequence.compute_from * per_id, length)
        computed = max(length - usable, min(1, length))
        self._requests += 1
        self._prompt_blocks += request.hash_ids.size // self._block_size
        self._hit_blocks += sequence.cached_tokens // self._block_size
        self._prompt_tokens += length
        self._hit_tokens += hit
        self._computed_tokens += computed
        if self._plan is not None:
            self._usable_tokens += usable
            self._snapshot_hits += sequence.snapshot_slot is not None
        return computed


class _NoMemory(SnapshotMover):
    """Moves nothing, since there is nothing in a slot."""

    slot_bytes: int = _SLOT_BYTES

    def read_slot(self, slot: int, into: memoryview) -> None:
        pass

    def write_slot(self, slot: int, data: memoryview) -> None:
        pass

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        pass


def _grow(pool: BlockPool | SnapshotPool, num_free: int, most: int | None) -> None:
    """Add ids to a pool until so many are free, or there are `most` of them."""
    size, free = pool._counts.size, pool.num_free
    short = num_free - free
    if most is not None:
        short = min(short, most - size)
    if short <= 0:
        return
    # At least twice as many, so that the copying does not add up.
    added = max(short, size, _FEWEST_ADDED)
    if most is not None:
        added = min(added, most - size)
    new = np.arange(size, size + added, dtype=np.uint32)[::-1]
    pool._counts = np.concatenate([pool._counts, np.zeros(added, np.int64)])
    # Free ids are a stack with its top at the end, and room for the others above that.
    pool._free = np.concatenate([new, pool._free[:free], np.empty(size - free, np.uint32)])
    pool._header[ID_POOL_NUM_FREE] += added
