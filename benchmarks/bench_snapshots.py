"""What the snapshot index adds to a look-up, by the number of its entries, and what it costs to evict one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.bench_lookup import SESSION
from benchmarks.rows import Row, Target
from benchmarks.sizes import Sizes
from benchmarks.stock import BLOCK_SIZE, SEQUENCE, Stock, Tokens, draw, fill, fresh, register
from metrale_numba import RadixTree

_ENTRIES = {"none": None, "some": "some_snapshots", "more": "more_snapshots", "spilled": "spilled_snapshots"}
_OFF_THE_GRID = 7
"""Tokens that a depth off the grid falls short of a block's end."""
_ON_ONE_SEQUENCE = 128
"""Snapshots on one sequence at most; the others belong to prompts that are not cached."""
_OTHER_PROMPT = 48
_FIRST_FREE_SLOT = 10_000_000


class Indexed(NamedTuple):
    """A cache with snapshots, and prompts that find one at their end, and none."""

    stock: Stock
    entries: str
    num_entries: int
    depths: str
    deepest_hit: list[Tokens]
    complete_miss: list[Tokens]


def _register_many(cache: RadixTree, sequences: list[Tokens], count: int, short: int, *, spill: bool) -> None:
    """Register snapshots, the deepest of every sequence first."""
    slot = 0
    step = SEQUENCE // _ON_ONE_SEQUENCE
    for number in range(min(_ON_ONE_SEQUENCE, -(-count // len(sequences)))):
        for tokens in sequences[: count - slot]:
            register(cache, tokens[: SEQUENCE - number * step - short], slot)
            slot += 1
            if spill:
                cache.evict_snapshot_to_tier(0)
    for tokens in draw(count - slot, _OTHER_PROMPT - short, 20):
        register(cache, tokens, slot)
        slot += 1
        if spill:
            cache.evict_snapshot_to_tier(0)


@pytest.fixture(scope="module", params=["on the grid", "off the grid"])
def depths(request: pytest.FixtureRequest) -> str:
    """Whether snapshots were made at the ends of blocks."""
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=list(_ENTRIES))
def indexed(request: pytest.FixtureRequest, sizes: Sizes, depths: str) -> Indexed:
    """The usual number of blocks, and snapshots on half of the sequences."""
    stock = fill(sizes.usual, seed=19)
    sequences = stock.sequences[SEQUENCE]
    half = len(sequences) // 2
    size = _ENTRIES[request.param]
    num_entries = 0 if size is None else getattr(sizes, size)
    short = 0 if depths == "on the grid" else _OFF_THE_GRID
    _register_many(stock.cache, sequences[:half], num_entries, short, spill=request.param == "spilled")
    # Those that find one are among the first: with few entries, only these have any.
    hits = min(half, sizes.some_snapshots)
    return Indexed(stock, request.param, num_entries, depths, sequences[:hits], sequences[half : half + hits])


@pytest.mark.parametrize("outcome", ["deepest hit", "complete miss"])
def test_lookup(row: Row, sizes: Sizes, indexed: Indexed, outcome: str) -> None:
    some: list[Tokens] = getattr(indexed, outcome.replace(" ", "_"))
    rng = np.random.default_rng(21)
    prompts = [some[number] for number in rng.integers(len(some), size=sizes.calls)]
    cache = indexed.stock.cache
    comparison = row.compare(indexed.stock.pairs(prompts))
    lookup, release = cache.lookup, cache.release
    times = row.time(
        lambda tokens: lookup(tokens=tokens, session_hash=SESSION),
        prompts,
        fresh,
        lambda tokens: release(tokens=tokens),
    )
    match = cache.lookup(tokens=some[0], session_hash=SESSION)
    cache.release(tokens=some[0])
    depth = match.ssm_snapshot_tokens or match.ssm_snapshot_tier_tokens
    row.report(
        f"lookup 2,048 tokens, {indexed.num_entries:,} snapshots {indexed.depths}, {outcome}",
        times,
        key=f"snapshots {indexed.depths}, {outcome}, {indexed.entries}",
        num_blocks=SEQUENCE // BLOCK_SIZE,
        comparison=comparison,
        note=f"snapshot found at {depth:,} tokens" if depth else "no snapshot found",
    )


# Spilled snapshots are all that may matter to an eviction, and those that there are matter alike.
@pytest.mark.parametrize(("depths", "indexed"), [("on the grid", "none"), ("on the grid", "spilled")], indirect=True)
@pytest.mark.parametrize("call", ["evict_snapshot_lru", "evict_snapshot_to_tier"])
def test_evict(row: Row, sizes: Sizes, indexed: Indexed, call: str) -> None:
    cache = indexed.stock.cache
    residents = list(draw(sizes.residents, _OTHER_PROMPT, 22))
    others = list(draw(sizes.calls, _OTHER_PROMPT, 23 if call == "evict_snapshot_lru" else 24))
    for slot, tokens in enumerate(residents, _FIRST_FREE_SLOT):
        register(cache, tokens, slot)
    before = cache.snapshot_count()
    slots = iter(range(_FIRST_FREE_SLOT + sizes.residents, 2 * _FIRST_FREE_SLOT))
    evict_lru, evict_to_tier = cache.evict_snapshot_lru, cache.evict_snapshot_to_tier

    def refill(tokens: Tokens) -> None:
        register(cache, tokens, next(slots))

    times = row.time(
        (lambda tokens: evict_lru()) if call == "evict_snapshot_lru" else (lambda tokens: evict_to_tier(min_tokens=0)),
        others,
        settle=refill,
    )
    row.report(
        f"{call} among {sizes.residents:,} residents, {before - sizes.residents:,} spilled",
        times,
        target=Target(10.0),
    )
    for _ in range(sizes.residents):
        cache.evict_snapshot_lru()
