"""The tensor side of a request: what is cached comes back, chunks are computed, and what came of them is shared.

It follows the order that the serving layer asks for: keys and values are written to their blocks, then published; a
state is snapshot at the end of a chunk, when its blocks are published.
"""

from __future__ import annotations

from functools import partial

from metrale_numba.engines.transformers.block_store import BlockStore
from metrale_numba.engines.transformers.imports import Tensor
from metrale_numba.engines.transformers.model_runner import ModelRunner
from metrale_numba.engines.transformers.requests import Progress, Request
from metrale_numba.engines.transformers.state_store import StateStore
from metrale_numba.serving import Sequence, ServingCache

__all__ = ["EngineMemory", "Execution"]


class EngineMemory:
    """The tensors behind the ids: a :class:`~metrale_numba.serving.SnapshotMover`.

    Attributes
    ----------
    blocks : BlockStore
        What blocks hold.
    states : StateStore
        What slots hold.
    slot_bytes : int
        Bytes of a slot.
    """

    def __init__(self, blocks: BlockStore, states: StateStore) -> None:
        self.blocks = blocks
        self.states = states
        self.slot_bytes = states.slot_bytes

    def read_slot(self, slot: int, into: memoryview) -> None:
        """Copy a slot's bytes out."""
        self.states.read_slot(slot, into)

    def write_slot(self, slot: int, data: memoryview) -> None:
        """Copy bytes into a slot."""
        self.states.write_slot(slot, data)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of a block to another."""
        self.blocks.copy_rows(source, target, rows)


class Execution:
    """Computes requests, one chunk at a time.

    Parameters
    ----------
    runner : ModelRunner
        The model.
    memory : EngineMemory
        The tensors.
    serving : ServingCache
        The books.
    chunk_tokens : int
        The most tokens that are computed at once.
    snapshot_every : int
        Tokens between two snapshots, a multiple of the block size; 0 for none but those that a request names.
    """

    def __init__(
        self, runner: ModelRunner, memory: EngineMemory, serving: ServingCache, chunk_tokens: int, snapshot_every: int
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._serving = serving
        self._chunk_tokens = chunk_tokens
        self._snapshot_every = snapshot_every

    def begin(self, request: Request) -> Progress:
        """Take blocks for a request, and bring back what is cached of it.

        Raises
        ------
        OutOfBlocks
            If there are not enough now; the request holds nothing then.
        """
        sequence = self._serving.begin(
            request.prompt + request.generated,
            session=request.session,
            adapter=request.adapter,
            retry=request.earlier or False,
        )
        request.earlier = sequence
        try:
            sequence.allocate()
            return self._restored(request, sequence)
        except BaseException:
            sequence.abort()
            raise

    def compute(self, progress: Progress) -> Tensor:
        """Compute the next chunk, and share what came of it.

        Returns
        -------
        tensor, shape (vocab_size,)
            The logits after its last token.
        """
        sequence, start = progress.sequence, progress.computed
        stop = self._chunk_end(progress)
        logits = self._runner.run(progress.cache, sequence.tokens[start:stop], start, sequence.adapter)
        # What was cached is there already, and others read it.
        first = max(start, sequence.cached_tokens)
        self._memory.blocks.write(progress.cache, sequence.block_table, first, stop)
        progress.computed = stop
        sequence.publish(stop)
        if self._memory.slot_bytes and stop % self._serving.block_size == 0:
            is_of_use = stop in progress.snapshot_depths or (self._snapshot_every and stop % self._snapshot_every == 0)
            if is_of_use or sequence.session:
                self._memory.states.save(progress.cache, progress.row)
                self._note_state(progress)
            if is_of_use:
                sequence.snapshot(stop, partial(self._write, progress.row))
        return logits

    def finish(self, progress: Progress) -> None:
        """End a request that is done.

        Its conversation's next turn finds the state at the end of this one, and beside it the one at the end of the
        prompt, for the case that the answer does not come back as it was.
        """
        if progress.sequence.session and progress.row_depth > progress.prompt_depth:
            sibling = None
            if progress.prompt_row is not None:
                sibling = (progress.prompt_depth, partial(self._write, progress.prompt_row))
            # The state itself is beyond the last block; only where that ends can a match end.
            progress.sequence.tail_snapshot(progress.row_depth, partial(self._write, progress.row), sibling)
        progress.sequence.finish()

    def _restored(self, request: Request, sequence: Sequence) -> Progress:
        block_size, states = self._serving.block_size, self._memory.states
        prompt_depth = (sequence.num_tokens - 1) // block_size * block_size
        # Where the cached part ends, this prompt has parted from another, and a third may part from both.
        parting = sequence.cached_tokens // block_size * block_size
        progress = Progress(
            request=request,
            sequence=sequence,
            cache=self._runner.new_cache(),
            computed=sequence.compute_from,
            prompt_depth=prompt_depth,
            snapshot_depths=frozenset((parting, prompt_depth)),
            row=states.new_row(),
        )
        self._memory.blocks.restore(progress.cache, sequence.block_table, sequence.compute_from)
        if sequence.snapshot_slot is not None:
            progress.row.copy_(states.memory[sequence.snapshot_slot])
            sequence.release_snapshot()
            states.restore(progress.row, progress.cache)
            self._note_state(progress)
        return progress

    def _chunk_end(self, progress: Progress) -> int:
        start, end = progress.computed, progress.sequence.num_tokens
        if not self._runner.continues_in_chunks:
            # From the beginning, any number of tokens can be computed at once; from there on it is one by one.
            return start + 1 if start else progress.prompt_depth or end
        end = min(end, start + self._chunk_tokens)
        if self._memory.slot_bytes:
            depths = {depth for depth in progress.snapshot_depths if depth > start}
            if self._snapshot_every:
                depths.add((start // self._snapshot_every + 1) * self._snapshot_every)
            end = min(depths | {end})
        return end

    def _note_state(self, progress: Progress) -> None:
        progress.row_depth = progress.computed
        if progress.computed == progress.prompt_depth and progress.sequence.session:
            progress.prompt_row = progress.row.clone()

    def _write(self, row: Tensor, slot: int) -> None:
        self._memory.states.memory[slot].copy_(row)
