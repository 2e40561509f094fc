"""Evictions: drains of whole sequences and of single leaves, and calls that give up one block in awkward states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.bench_lookup import lookup_and_release
from benchmarks.rows import Row, Target
from benchmarks.sizes import Sizes
from benchmarks.stock import BLOCK_SIZE, SEQUENCE, Stock, draw, fill, leaves, store
from metrale_numba import RadixTree

_SIZES = {"few": "few", "usual": "usual", "many blocks": "many"}
_PER_BLOCK = {"sequences": 130.0, "leaves": 300.0}
_CALLS = {1: 2_000, 64: 200, 4_096: 6}
_SHARE = 4
"""At most one block in this many goes before the cache is measured no further."""
_AWKWARD = Target(100.0, of="max")


def _evict(cache: RadixTree) -> Callable[[int], None]:
    evict = cache.evict

    def call(num_blocks: int) -> None:
        evict(num_blocks=num_blocks)

    return call


def _restamped(stock: Stock) -> Stock:
    """Use every leaf once more, in an order of its own, so that the oldest are not next to each other."""
    call = lookup_and_release(stock.cache)
    (prompts,) = stock.sequences.values()
    for number in np.random.default_rng(8).permutation(len(prompts)):
        call(prompts[number])
    return stock


@pytest.fixture(scope="module", params=["sequences", "leaves"])
def what(request: pytest.FixtureRequest) -> str:
    """What the caches are filled with."""
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=list(_SIZES))
def filled(request: pytest.FixtureRequest, sizes: Sizes, what: str) -> tuple[str, Stock]:
    """A cache, and its size as rows are known by."""
    num_blocks = getattr(sizes, _SIZES[request.param])
    if what == "leaves":
        return request.param, _restamped(leaves(num_blocks, seed=9))
    num_snapshots = min(sizes.some_snapshots, sizes.few // 128)
    return request.param, _restamped(fill(num_blocks, seed=10, num_snapshots=num_snapshots))


@pytest.mark.parametrize("num_blocks", _CALLS)
def test_evict(row: Row, filled: tuple[str, Stock], what: str, num_blocks: int) -> None:
    size, stock = filled
    before = stock.num_blocks
    calls = max(1, min(_CALLS[num_blocks], before // _SHARE // num_blocks))
    times = row.time(_evict(stock.cache), [num_blocks] * calls)
    # A cache that is smaller than one call asks for is drained.
    evicted = (before - stock.num_blocks) // calls
    one = num_blocks == 1
    row.report(
        f"evict({num_blocks:,}){'' if one else ', per block'}, {what}, {before:,} blocks",
        times / evicted,
        key=f"evict {what}, {num_blocks}, {size}",
        unit="us" if one else "ns",
        num_blocks=1,
        target=Target(2.0) if one else Target(_PER_BLOCK[what]) if size == "usual" else None,
    )


def test_evict_one_after_the_release_of_sequences(row: Row, sizes: Sizes) -> None:
    stock = fill(sizes.usual, seed=11)
    cache, prompts = stock.cache, stock.sequences[SEQUENCE]

    def storm(turn: int) -> int:
        for tokens in prompts:
            cache.lookup(tokens=tokens)
        for tokens in prompts:
            cache.release(tokens=tokens)
        return 1

    def restore(num_blocks: int) -> None:
        store(cache, prompts[0])

    times = row.time(_evict(cache), range(sizes.slow_calls), storm, restore)
    row.report(f"evict(1) right after the release of {stock.num_blocks:,} nodes, sequences", times, target=_AWKWARD)


def test_evict_one_after_a_single_release(row: Row, sizes: Sizes) -> None:
    stock = fill(sizes.few, seed=12)
    cache = stock.cache
    (tokens,) = draw(1, sizes.usual * BLOCK_SIZE, 13)
    block_table = np.zeros(sizes.usual, np.uint32)
    cache.insert(tokens=tokens, block_table=block_table)

    def storm(turn: int) -> int:
        cache.release(tokens=tokens)
        return 1

    def hold(num_blocks: int) -> None:
        cache.insert(tokens=tokens, block_table=block_table)

    times = row.time(_evict(cache), range(sizes.slow_calls), storm, hold)
    row.report(f"evict(1) right after one release of {sizes.usual:,} nodes", times, target=_AWKWARD)


def test_evict_one_after_the_release_of_leaves(row: Row, sizes: Sizes) -> None:
    stock = leaves(sizes.usual, seed=14)
    cache = stock.cache
    (prompts,) = stock.sequences.values()
    calls = max(2, sizes.slow_calls // 4)

    def storm(turn: int) -> int:
        for tokens in prompts:
            cache.lookup(tokens=tokens)
        for tokens in prompts:
            cache.release(tokens=tokens)
        return 1

    def restore(num_blocks: int) -> None:
        store(cache, prompts[0])

    times = row.time(_evict(cache), range(calls), storm, restore)
    row.report(f"evict(1) right after the release of {stock.num_blocks:,} nodes, leaves", times, target=_AWKWARD)


@pytest.mark.parametrize("what", ["sequences", "leaves"], scope="function")
def test_evict_one_after_many_stamps(row: Row, sizes: Sizes, what: str) -> None:
    stock = leaves(sizes.usual, seed=15) if what == "leaves" else fill(sizes.usual, seed=15)
    call = lookup_and_release(stock.cache)
    (prompts,) = stock.sequences.values()
    stamps = sizes.many // (prompts[0].size // BLOCK_SIZE)
    rng = np.random.default_rng(16)

    def stamp(turn: int) -> int:
        # The first call comes right after all of them; what they left behind is there for the others as well.
        if turn == 0:
            for number in rng.integers(len(prompts), size=stamps).tolist():
                call(prompts[number])
        return 1

    times = row.time(_evict(stock.cache), range(sizes.slow_calls), stamp)
    row.report(
        f"evict(1) after {sizes.many:,} re-stamps, {what}, {sizes.usual:,} blocks",
        times,
        target=_AWKWARD,
        note=f"right after them {times[0] / 1e3:.3g} us",
    )


def test_evict_one_beside_held_leaves(row: Row, sizes: Sizes) -> None:
    stock = leaves(sizes.usual, seed=17)
    cache = stock.cache
    (prompts,) = stock.sequences.values()
    for tokens in prompts:
        cache.lookup(tokens=tokens)
    free: list[Any] = list(draw(4 * sizes.calls, BLOCK_SIZE, 18))
    for tokens in free:
        store(cache, tokens)
    times = row.time(_evict(cache), [1] * sizes.calls)
    row.report(f"evict(1) beside {len(prompts):,} held leaves that are older", times, target=_AWKWARD)
