"""The counts of a published trace. Where the trace is, the variable METRALE_TRACES tells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from metrale_numba import RadixTree
from metrale_numba.replay import Replay, TraceReader

TRACE = "mooncake_conversation.jsonl.gz"


@pytest.fixture(scope="module")
def trace() -> Path:
    folder = os.environ.get("METRALE_TRACES")
    if not folder:
        pytest.skip("METRALE_TRACES does not name the folder of the traces")
    return Path(folder) / TRACE


@pytest.mark.parametrize(
    ("capacity", "hit_blocks", "evicted_blocks"),
    [
        (1_000, 12_847, 274_653),
        (10_000, 61_046, 217_454),
        (30_000, 93_978, 164_522),
        (50_000, 102_290, 136_210),
        (100_000, 104_924, 83_576),
        (None, 105_710, 0),
    ],
)
def test_counts_of_the_conversation_trace_are_exact(
    trace: Path, capacity: int | None, hit_blocks: int, evicted_blocks: int
) -> None:
    replay = Replay(RadixTree(block_size=1), capacity=capacity)
    with TraceReader(trace) as requests:
        for request in requests:
            replay.play(request)
    result = replay.result()
    assert (result.requests, result.blocks) == (12_031, 288_500)
    assert (result.hit_blocks, result.evicted_blocks) == (hit_blocks, evicted_blocks)
    assert result.cached_blocks == 288_500 - hit_blocks - evicted_blocks
    assert result.block_hit_rate == hit_blocks / 288_500
