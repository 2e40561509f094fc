"""The engine of the serving page: a hybrid model of one line, and the memory that it keeps its blocks and states in.

It relies on the public interface of :mod:`metrale_numba.serving`, which keeps all the books.
"""

from __future__ import annotations

import numpy as np

from metrale_numba.serving import Sequence, ServingCache


def next_state(state: int, token: int) -> int:
    """Run the model on one token: the new recurrent state, and also the token's KV."""
    return (31 * state + token + 1) % 2**32


class Memory:
    """What the ids stand for: KV blocks and snapshot slots. Also how the serving layer moves them."""

    slot_bytes = 4

    def __init__(self, num_blocks: int, num_slots: int, block_size: int) -> None:
        self.kv = np.zeros((num_blocks, block_size), np.uint32)
        self.states = np.zeros(num_slots, np.uint32)

    def read_slot(self, slot: int, into: memoryview) -> None:
        """Copy a snapshot out of its slot."""
        into[:] = self.states[slot].tobytes()

    def write_slot(self, slot: int, data: memoryview) -> None:
        """Copy a snapshot into a slot."""
        self.states[slot] = np.frombuffer(data, np.uint32)[0]

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the KV of a block's first tokens."""
        self.kv[target, :rows] = self.kv[source, :rows]

    def compute(self, sequence: Sequence, states: dict[int, int], start: int) -> int:
        """Run the model from a token on to the last, and note the state after each block; what is cached stays."""
        block_size = self.kv.shape[1]
        state = states[start]
        for place in range(start, sequence.num_tokens):
            state = next_state(state, int(sequence.tokens[place]))
            if place >= sequence.cached_tokens:
                self.kv[sequence.block_table[place // block_size], place % block_size] = state
            if (place + 1) % block_size == 0 or place + 1 == sequence.num_tokens:
                states[place + 1] = state
        return state


def answer(serving: ServingCache, memory: Memory, prompt: list[int], session: int, length: int) -> list[int]:
    """Serve one request: whatever happens in the middle of it, nothing leaks."""
    with serving.begin(prompt, session=session) as sequence:
        slot = sequence.snapshot_slot
        states = {sequence.compute_from: 0 if slot is None else int(memory.states[slot])}
        sequence.release_snapshot()
        sequence.allocate()
        state = memory.compute(sequence, states, sequence.compute_from)
        sequence.publish(sequence.num_tokens)
        for _ in range(length):
            sequence.append([state % 100])
            sequence.allocate()
            state = memory.compute(sequence, states, sequence.num_tokens - 1)
        depth = sequence.publish(sequence.num_tokens)
        sequence.tail_snapshot(depth, lambda slot: memory.states.__setitem__(slot, states[depth]))
        return sequence.tokens[len(prompt) :].tolist()
