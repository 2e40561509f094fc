"""Inserts, of new sequences into a full cache that has just made room for them, and of sequences that are cached."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rows import Row
from benchmarks.sizes import Sizes
from benchmarks.stock import BLOCK_IDS, BLOCK_SIZE, LENGTHS, SEQUENCE, Stock, draw, fill, fresh


def _block_table(length: int) -> Any:
    return BLOCK_IDS[: length // BLOCK_SIZE]


@pytest.fixture(scope="module", params=["few", "usual"])
def full(request: pytest.FixtureRequest, sizes: Sizes) -> Stock:
    """A cache of its own, which each row leaves as full as it was."""
    return fill(getattr(sizes, request.param), seed=4, num_snapshots=min(sizes.some_snapshots, sizes.few // 128))


@pytest.mark.parametrize("length", LENGTHS)
def test_insert_new(row: Row, sizes: Sizes, full: Stock, length: int) -> None:
    cache = full.cache
    block_table = _block_table(length)
    num_blocks = cache.stats()[0]
    # At most half of the cache is replaced.
    count = max(1, min(sizes.calls, num_blocks * BLOCK_SIZE // length // 2))
    # Once around, so that the arrays have grown to what they need, and their free rows are those of evicted blocks.
    for tokens in draw(count, length, 5):
        cache.insert(tokens=tokens, block_table=block_table)
        cache.release(tokens=tokens)
    cache.evict(count * len(block_table))
    prompts = list(draw(count, length, 6))
    comparison = row.compare(full.pairs(prompts))
    times = row.time(
        lambda tokens: cache.insert(tokens=tokens, block_table=block_table),
        prompts,
        fresh,
        lambda tokens: cache.release(tokens=tokens),
    )
    cache.evict(count * len(block_table))
    row.report(
        f"insert {length:,} new tokens, {num_blocks:,} blocks",
        times,
        num_blocks=length // BLOCK_SIZE,
        comparison=comparison,
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_insert_again(row: Row, sizes: Sizes, in_order: Stock, length: int) -> None:
    cache = in_order.cache
    block_table = _block_table(length)

    def hold(tokens: Any) -> Any:
        cache.lookup(tokens=tokens)
        return tokens.copy()

    prompts = in_order.hot(length, max(sizes.calls * SEQUENCE // max(length, SEQUENCE), sizes.slow_calls))
    comparison = row.compare(in_order.pairs(prompts))
    times = row.time(
        lambda tokens: cache.insert(tokens=tokens, block_table=block_table, matched_tokens=length),
        prompts,
        hold,
        lambda tokens: cache.release(tokens=tokens),
    )
    row.report(f"insert {length:,} tokens again, hot", times, num_blocks=length // BLOCK_SIZE, comparison=comparison)
