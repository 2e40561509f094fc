"""Whole requests: the chat simulator beside its own cost, and a recorded trace of conversations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.bench_lookup import SESSION
from benchmarks.rows import Row
from benchmarks.sizes import FULL
from benchmarks.stock import register
from benchmarks.timing import undisturbed
from benchmarks.workload import BLOCK_SIZE, SCALES, ChatRequest, Tokens, chat, filler
from metrale_numba import EvictedBlocks, InsertAcquired, PrefixMatch, RadixTree
from metrale_numba.replay import Replay, ReplayResult, TraceReader

TRACES_VARIABLE = "METRALE_TRACES"
_TRACES = "*conversation*.jsonl*"
_TRACE_CAPACITY = 60_000
_REQUESTS_OF_A_SMALL_TRACE = 500


class _Cache(Protocol):
    """The calls of a request."""

    def lookup(self, tokens: Tokens, *, session_hash: int) -> PrefixMatch: ...

    def evict(self, num_blocks: int) -> EvictedBlocks: ...

    def insert(self, tokens: Tokens, block_table: Tokens, *, matched_tokens: int) -> InsertAcquired: ...

    def release(self, tokens: Tokens) -> None: ...


class _DoesNothing:
    """Answers at once, so that what is left is the cost of the simulator."""

    def __init__(self) -> None:
        self._match, self._evicted, self._acquired = PrefixMatch(), EvictedBlocks(), InsertAcquired()

    def lookup(self, tokens: Tokens, *, session_hash: int) -> PrefixMatch:
        return self._match

    def evict(self, num_blocks: int) -> EvictedBlocks:
        return self._evicted

    def insert(self, tokens: Tokens, block_table: Tokens, *, matched_tokens: int) -> InsertAcquired:
        return self._acquired

    def release(self, tokens: Tokens) -> None:
        return None


def _simulate(cache: _Cache, requests: Sequence[ChatRequest], free: int) -> tuple[npt.NDArray[np.float64], int]:
    """Let every request look up, evict what it lacks, insert and release.

    Returns the nanoseconds of each, and how many blocks were hit by all.
    """
    block_ids = np.arange(max(turn.tokens.size for turn in requests) // BLOCK_SIZE, dtype=np.uint32)
    prompts = [turn.tokens.copy() for turn in requests]
    times, hits = [], 0
    with undisturbed():
        for tokens in prompts:
            started = perf_counter_ns()
            num_blocks = tokens.size // BLOCK_SIZE
            match = cache.lookup(tokens=tokens, session_hash=SESSION)
            matched = match.matched_blocks
            missing = num_blocks - matched.size
            if missing > free:
                free += len(cache.evict(num_blocks=missing - free))
            free -= missing
            block_table = np.concatenate((matched, block_ids[:missing]))
            cache.insert(tokens=tokens, block_table=block_table, matched_tokens=match.matched_tokens)
            cache.release(tokens=tokens)
            times.append(perf_counter_ns() - started)
            hits += matched.size
    return np.array(times, np.float64), hits


def _rate(times: npt.NDArray[np.float64]) -> float:
    """Requests per second."""
    return float(1e9 / np.mean(times))


def test_chat_simulator(row: Row, scale: str) -> None:
    work = SCALES[scale]
    requests = chat(work)
    cache = RadixTree(block_size=BLOCK_SIZE)
    fill_with = filler(work)
    for tokens in fill_with:
        cache.insert(
            tokens=tokens,
            block_table=np.arange(tokens.size // BLOCK_SIZE, dtype=np.uint32),
            matched_tokens=tokens.size,
        )
    for slot, tokens in enumerate(fill_with[-64:]):
        register(cache, tokens[: tokens.size // 2], slot)
    free = work.capacity - cache.stats()[0]
    harness, _ = _simulate(_DoesNothing(), requests, free)
    times, hits = row.run(lambda: _simulate(cache, requests, free))
    expected = sum(turn.num_cached for turn in requests)
    row.report(
        f"chat simulator, a request, {work.capacity:,} blocks",
        times,
        yardstick=("its own cost", float(np.mean(harness))),
        note=f"{_rate(times):,.0f} requests/s, {_rate(times - np.mean(harness)):,.0f} without its own cost; "
        f"{hits / expected:.1%} of the blocks that could be hit were",
    )


def test_conversation_trace(row: Row, scale: str) -> None:
    folder = os.environ.get(TRACES_VARIABLE)
    if folder is None:
        pytest.skip(f"conversation trace: {TRACES_VARIABLE} names no folder that has one")
    traces = sorted(Path(folder).glob(_TRACES))
    if not traces:
        pytest.skip(f"conversation trace: no {_TRACES} in the folder that {TRACES_VARIABLE} names")
    with TraceReader(traces[0]) as reader:
        requests = list(reader)
    if scale != FULL:
        requests = requests[:_REQUESTS_OF_A_SMALL_TRACE]

    def work() -> tuple[ReplayResult, Any]:
        replay = Replay(RadixTree(block_size=BLOCK_SIZE), block_size=BLOCK_SIZE, capacity=_TRACE_CAPACITY)
        times = []
        with undisturbed():
            for request in requests:
                started = perf_counter_ns()
                replay.play(request)
                times.append(perf_counter_ns() - started)
            return replay.result(), np.array(times)

    result, times = row.run(work)
    row.report(
        f"conversation trace, a request, {_TRACE_CAPACITY:,} blocks",
        times,
        yardstick=("calls of the cache, on average", result.cache_seconds * 1e9 / result.requests),
        note=f"{result.requests:,} requests, {result.requests_per_second:,.0f} requests/s, "
        f"{result.requests_per_cache_second:,.0f} counting calls of the cache alone; "
        f"{result.block_hit_rate:.1%} of blocks hit",
    )
