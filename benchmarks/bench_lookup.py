"""Look-ups and what goes with them, in a cache of the usual size: by length, hot and cold, in order and scattered."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.rows import Row, Target
from benchmarks.sizes import Sizes
from benchmarks.stock import BLOCK_SIZE, LENGTHS, SEQUENCE, SHORT, Stock, draw, fill, fresh
from metrale_numba import RadixTree

# Any will do; it is passed because an engine passes one.
SESSION = 1


def lookup_and_release(cache: RadixTree) -> Callable[[Any], None]:
    """Make the call that most rows time: look a prompt up that is fully cached, and release it."""
    lookup, release = cache.lookup, cache.release

    def call(tokens: Any) -> None:
        lookup(tokens=tokens, session_hash=SESSION)
        release(tokens=tokens)

    return call


def _calls(sizes: Sizes, length: int) -> int:
    return max(sizes.calls * SEQUENCE // max(length, SEQUENCE), sizes.slow_calls)


@pytest.fixture(params=["in order", "scattered"])
def filled(request: pytest.FixtureRequest) -> tuple[str, Stock]:
    """The usual cache, filled either way."""
    name: str = request.param
    stock: Stock = request.getfixturevalue(name.replace(" ", "_"))
    return name, stock


@pytest.mark.parametrize("warmth", ["hot", "cold"])
@pytest.mark.parametrize("length", LENGTHS)
def test_lookup_and_release(row: Row, sizes: Sizes, filled: tuple[str, Stock], length: int, warmth: str) -> None:
    how, stock = filled
    prompts = getattr(stock, warmth)(length, _calls(sizes, length))
    times = row.time(lookup_and_release(stock.cache), prompts, fresh)
    comparison = row.compare(stock.pairs(prompts))
    row.report(
        f"lookup + release {length:,} tokens, {how}, {warmth}, {stock.num_blocks:,} blocks",
        times,
        num_blocks=length // BLOCK_SIZE,
        comparison=comparison,
    )


@pytest.mark.parametrize("length", [SHORT, SEQUENCE])
def test_lookup_and_release_in_a_small_cache(row: Row, sizes: Sizes, length: int) -> None:
    stock = fill(
        sizes.few, seed=2, num_short=sizes.few // 320, num_snapshots=min(sizes.some_snapshots, sizes.few // 128)
    )
    prompts = stock.cold(length, sizes.calls)
    times = row.time(lookup_and_release(stock.cache), prompts, fresh)
    comparison = row.compare(stock.pairs(prompts))
    row.report(
        f"lookup + release {length:,} tokens, in order, cold, {stock.num_blocks:,} blocks",
        times,
        num_blocks=length // BLOCK_SIZE,
        comparison=comparison,
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_lookup(row: Row, sizes: Sizes, in_order: Stock, length: int) -> None:
    lookup, release = in_order.cache.lookup, in_order.cache.release
    prompts = in_order.hot(length, _calls(sizes, length))
    comparison = row.compare(in_order.pairs(prompts))
    times = row.time(
        lambda tokens: lookup(tokens=tokens, session_hash=SESSION),
        prompts,
        fresh,
        lambda tokens: release(tokens=tokens),
    )
    row.report(f"lookup {length:,} tokens, hot", times, num_blocks=length // BLOCK_SIZE, comparison=comparison)


@pytest.mark.parametrize("length", LENGTHS)
def test_release(row: Row, sizes: Sizes, in_order: Stock, length: int) -> None:
    lookup, release = in_order.cache.lookup, in_order.cache.release

    def hold(tokens: Any) -> Any:
        lookup(tokens=tokens)
        return tokens.copy()

    prompts = in_order.hot(length, _calls(sizes, length))
    comparison = row.compare(in_order.pairs(prompts))
    times = row.time(lambda tokens: release(tokens=tokens), prompts, hold)
    row.report(f"release {length:,} tokens, hot", times, num_blocks=length // BLOCK_SIZE, comparison=comparison)


@pytest.mark.parametrize("length", LENGTHS)
def test_peek(row: Row, sizes: Sizes, in_order: Stock, length: int) -> None:
    peek = in_order.cache.peek_matched_tokens
    prompts = in_order.hot(length, _calls(sizes, length))
    comparison = row.compare(in_order.pairs(prompts))
    times = row.time(lambda tokens: peek(tokens=tokens), prompts, fresh)
    row.report(f"peek {length:,} tokens, hot", times, num_blocks=length // BLOCK_SIZE, comparison=comparison)


@pytest.mark.parametrize("length", LENGTHS)
def test_pin(row: Row, sizes: Sizes, in_order: Stock, length: int) -> None:
    pin, release = in_order.cache.pin_prefix, in_order.cache.release
    prompts = in_order.hot(length, _calls(sizes, length))
    comparison = row.compare(in_order.pairs(prompts))
    times = row.time(lambda tokens: pin(tokens=tokens), prompts, fresh, lambda tokens: release(tokens=tokens))
    row.report(f"pin {length:,} tokens, hot", times, num_blocks=length // BLOCK_SIZE, comparison=comparison)


@pytest.mark.parametrize("length", LENGTHS)
def test_complete_miss(row: Row, sizes: Sizes, in_order: Stock, length: int) -> None:
    prompts = list(draw(_calls(sizes, length), length, 3))
    lookup = in_order.cache.lookup
    times = row.time(lambda tokens: lookup(tokens=tokens, session_hash=SESSION), prompts, fresh)
    row.report(f"lookup {length:,} tokens, complete miss", times)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("both", [False, True], ids=["lookup", "lookup-release"])
def test_list(row: Row, sizes: Sizes, in_order: Stock, length: int, both: bool) -> None:
    lookup, release = in_order.cache.lookup, in_order.cache.release
    prompts = in_order.hot(length, _calls(sizes, length))

    def call(tokens: Any) -> None:
        lookup(tokens=tokens, session_hash=SESSION)
        if both:
            release(tokens=tokens)

    def by_way_of_an_array(tokens: list[int]) -> None:
        lookup(tokens=np.frombuffer(array("I", tokens), np.uint32), session_hash=SESSION)
        if both:
            release(tokens=np.frombuffer(array("I", tokens), np.uint32))

    def settle(tokens: list[int]) -> None:
        if not both:
            release(tokens=tokens)

    def listed(tokens: Any) -> list[int]:
        some: list[int] = tokens.tolist()
        return some

    times, yardstick = row.time_in_turn((call, by_way_of_an_array), prompts, listed, settle)
    row.report(
        f"lookup {'+ release ' if both else ''}{length:,} tokens from a list, hot",
        times,
        num_blocks=length // BLOCK_SIZE,
        yardstick=("array('I', list) and the array call", float(np.median(yardstick))),
        target=Target(1.3, of="ratio", absolute=False),
    )
