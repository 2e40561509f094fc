"""What growth costs: the longest single call from an empty cache on, and memory, by the cache and by the system."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest

from benchmarks.resident import memory_of_a_fill
from benchmarks.rows import Row, Target
from benchmarks.sizes import Sizes
from benchmarks.stock import BLOCK_IDS, BLOCK_SIZE, SEQUENCE, Tokens, draw
from benchmarks.timing import time_calls
from metrale_numba import RadixTree

_BLOCKS = SEQUENCE // BLOCK_SIZE
_MOST_BLOCKS_OF_A_ROUND = 8


def _resident() -> int:
    gc.collect()
    size: int = psutil.Process().memory_info().rss
    return size


def _bytes(cache: RadixTree) -> int:
    return sum(cache.memory_usage().values())


@pytest.mark.parametrize("reserved", [False, True], ids=["on-demand", "reserved"])
def test_longest_call(row: Row, sizes: Sizes, reserved: bool) -> None:
    sequences = draw(sizes.many // _BLOCKS, SEQUENCE, 25)
    cache = RadixTree(block_size=BLOCK_SIZE, reserve=sizes.many if reserved else 0)
    block_table = BLOCK_IDS[:_BLOCKS]

    def insert(tokens: Tokens) -> None:
        cache.insert(tokens=tokens, block_table=block_table, matched_tokens=SEQUENCE)

    times = row.time(insert, sequences)
    row.report(
        f"insert 2,048 tokens, from 0 to {cache.stats()[0]:,} blocks, {'reserved' if reserved else 'grown on demand'}",
        times,
        num_blocks=_BLOCKS,
        target=Target(1_000.0 if reserved else 50_000.0, of="max"),
    )


@pytest.mark.parametrize("reserved", [False, True], ids=["on-demand", "reserved"])
def test_bytes_per_block(row: Row, sizes: Sizes, reserved: bool) -> None:
    memory = row.run(lambda: memory_of_a_fill(sizes.many, sizes.usual, reserved=reserved))
    row.report(
        f"memory of {memory.num_blocks:,} blocks, {'reserved' if reserved else 'grown on demand'}",
        memory.bytes_per_block[-1:] if reserved else memory.bytes_per_block,
        unit="bytes/block",
        target=Target(160.0 if reserved else 200.0, of="max", absolute=False),
        note=f"resident set size {memory.resident:.0f} bytes/block at the end"
        + ("" if reserved else f"; at all sizes from {sizes.usual:,} on"),
    )


def test_memory_after_many_rounds(row: Row, sizes: Sizes) -> None:
    """Every round has an adapter of its own, whose forest has to be given back in the end."""
    cache = RadixTree(block_size=BLOCK_SIZE)
    sequences = draw(64, _MOST_BLOCKS_OF_A_ROUND * BLOCK_SIZE, 27)
    block_table = BLOCK_IDS[:_MOST_BLOCKS_OF_A_ROUND]

    def play(adapter_id: int) -> None:
        tokens = sequences[adapter_id % len(sequences)][: (1 + adapter_id % _MOST_BLOCKS_OF_A_ROUND) * BLOCK_SIZE]
        cache.insert(tokens=tokens, block_table=block_table, adapter_id=adapter_id)
        cache.release(tokens=tokens, adapter_id=adapter_id)
        cache.evict(num_blocks=_MOST_BLOCKS_OF_A_ROUND)

    time_calls(play, range(1, 1_001))
    bytes_before, resident_before = _bytes(cache), _resident()
    times = row.time(play, range(1_001, 1_001 + sizes.adapter_rounds))
    num_blocks = cache.stats()[0]
    grown = _bytes(cache) - bytes_before
    resident = _resident() - resident_before
    row.report(
        f"growth of arrays, {sizes.adapter_rounds:,} rounds under fresh adapters",
        [grown],
        unit="bytes",
        target=Target(0.0, of="max", absolute=False),
        note=f"resident set size grew by {resident / 1e6:,.1f} MB, {num_blocks} blocks left; "
        f"a round takes {float(np.median(times)) / 1e3:.3g} us",
    )
