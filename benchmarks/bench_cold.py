"""Look-ups of sequences in an order that no processor cache can foresee, by the size of the cache."""

from __future__ import annotations

import pytest

from benchmarks.bench_lookup import lookup_and_release
from benchmarks.rows import Row
from benchmarks.sizes import Sizes
from benchmarks.stock import BLOCK_SIZE, SEQUENCE, Stock, fill, fresh

_SIZES = {"few": "few", "usual": "usual", "many blocks": "many"}


@pytest.fixture(scope="module", params=["in order", "scattered"])
def how(request: pytest.FixtureRequest) -> str:
    """How the caches are filled."""
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=list(_SIZES))
def filled(request: pytest.FixtureRequest, sizes: Sizes, how: str) -> tuple[str, Stock]:
    """A cache of sequences of 2,048 tokens, and what its row is known by."""
    num_blocks = getattr(sizes, _SIZES[request.param])
    num_snapshots = min(sizes.some_snapshots, sizes.few // 128)
    stock = fill(num_blocks, seed=7, scattered=how == "scattered", num_snapshots=num_snapshots)
    return f"cold {how}, {request.param}", stock


def test_cold_lookup(row: Row, sizes: Sizes, filled: tuple[str, Stock], how: str) -> None:
    key, stock = filled
    prompts = stock.cold(SEQUENCE, sizes.calls)
    times = row.time(lookup_and_release(stock.cache), prompts, fresh)
    comparison = row.compare(stock.pairs(prompts))
    row.report(
        f"cold lookup + release 2,048 tokens, {how}, {stock.num_blocks:,} blocks",
        times,
        key=key,
        num_blocks=SEQUENCE // BLOCK_SIZE,
        comparison=comparison,
    )


def test_cold_peek(row: Row, sizes: Sizes, filled: tuple[str, Stock], how: str) -> None:
    stock = filled[1]
    prompts = stock.cold(SEQUENCE, sizes.calls)
    peek = stock.cache.peek_matched_tokens
    times = row.time(lambda tokens: peek(tokens=tokens), prompts, fresh)
    comparison = row.compare(stock.pairs(prompts))
    row.report(
        f"cold peek 2,048 tokens, {how}, {stock.num_blocks:,} blocks",
        times,
        num_blocks=SEQUENCE // BLOCK_SIZE,
        comparison=comparison,
    )
