"""How large everything is that the benchmarks build: as the targets name it, or small, to see that they run."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["FULL", "SCALE_VARIABLE", "SIZES", "SMALL", "Sizes", "default_scale"]

SCALE_VARIABLE = "METRALE_BENCHMARK_SCALE"
FULL, SMALL = "full", "small"


@dataclass(frozen=True)
class Sizes:
    """Sizes of caches in blocks, and how often things are called."""

    few: int
    usual: int
    many: int
    long_sequences: int
    """Sequences of 32,768 tokens in the usual cache."""
    calls: int
    """Calls of a row whose call takes microseconds."""
    slow_calls: int
    """Calls of a row whose call takes much longer, or has to be prepared at length."""
    residents: int
    """Resident snapshots among which one is evicted."""
    some_snapshots: int
    more_snapshots: int
    spilled_snapshots: int
    adapter_rounds: int
    starts: int
    """Processes started to time an import."""
    thread_calls: int


SIZES = {
    FULL: Sizes(
        few=10_000,
        usual=100_000,
        many=1_000_000,
        long_sequences=8,
        calls=3_000,
        slow_calls=20,
        residents=1_024,
        some_snapshots=64,
        more_snapshots=8_192,
        spilled_snapshots=1_000_000,
        adapter_rounds=100_000,
        starts=5,
        thread_calls=8_000,
    ),
    SMALL: Sizes(
        few=500,
        usual=6_000,
        many=12_000,
        long_sequences=1,
        calls=20,
        slow_calls=2,
        residents=64,
        some_snapshots=8,
        more_snapshots=128,
        spilled_snapshots=2_000,
        adapter_rounds=500,
        starts=1,
        thread_calls=20,
    ),
}


def default_scale() -> str:
    """Give the scale that the environment asks for, or else the full one."""
    return os.environ.get(SCALE_VARIABLE, FULL)
