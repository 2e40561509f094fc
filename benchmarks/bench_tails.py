"""Look-ups that end inside a block, where very many blocks follow the same one."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rows import Row
from benchmarks.sizes import Sizes
from benchmarks.stock import BLOCK_SIZE, Stock, Tokens, draw, fresh, leaves

_PARTIAL = BLOCK_SIZE // 2


@pytest.fixture(scope="module")
def wide(sizes: Sizes) -> Stock:
    """A cache in which every block but one follows that one."""
    return leaves(sizes.usual, seed=28, below=draw(1, BLOCK_SIZE, 29)[0], partial_tail_sharing=True)


@pytest.mark.parametrize("which", ["newest", "any", "none"])
def test_partial_tail(row: Row, sizes: Sizes, wide: Stock, which: str) -> None:
    prompts = wide.sequences[2 * BLOCK_SIZE]
    calls = sizes.slow_calls * 5
    lookup, release = wide.cache.lookup, wide.cache.release
    if which == "newest":
        chosen: list[Tokens] = prompts[-1:] * calls
    else:
        chosen = [prompts[number] for number in np.random.default_rng(30).integers(len(prompts), size=calls)]

    def partial(tokens: Tokens) -> Tokens:
        prompt = fresh(tokens[: BLOCK_SIZE + _PARTIAL])
        if which == "none":
            # No such token is drawn.
            prompt[-1] = np.iinfo(np.uint32).max
            prompt[BLOCK_SIZE] = prompt[-1]
        return prompt

    times = row.time(lambda tokens: lookup(tokens=tokens), chosen, partial, lambda tokens: release(tokens=tokens))
    row.report(f"lookup of a partial tail, {which} of {len(prompts):,} children", times)
