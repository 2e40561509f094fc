"""Sequences of the serving layer, beside the calls of the cache that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.rows import Row
from benchmarks.sizes import Sizes
from benchmarks.stock import BLOCK_SIZE, draw, fresh
from metrale_numba import RadixTree
from metrale_numba.serving import ServingCache

LENGTHS = (256, 2_048, 32_768)


def _filled(sizes: Sizes, length: int) -> tuple[ServingCache, RadixTree, list[Any]]:
    """A serving cache with as many prompts of a length, and one token more, as go into the usual number of blocks."""
    num_prompts = min(max(sizes.usual * BLOCK_SIZE // length, 1), sizes.calls)
    prompts = list(draw(num_prompts, length + 1, 71))
    tree = RadixTree(block_size=BLOCK_SIZE)
    serving = ServingCache(tree, (length // BLOCK_SIZE + 1) * (num_prompts + 1))
    for prompt in prompts:
        with serving.begin(prompt) as sequence:
            sequence.allocate()
            sequence.publish(prompt.size)
    return serving, tree, prompts


def _in_turn(row: Row, name: str, length: int, made_of: str, *calls: Callable[[Any], Any], prompts: list[Any]) -> None:
    times, bare = row.time_in_turn(calls, prompts, fresh, lambda prompt: None)
    row.report(name, times, num_blocks=length // BLOCK_SIZE, yardstick=(made_of, float(np.median(bare))))


@pytest.mark.parametrize("length", LENGTHS)
def test_begin_and_finish(row: Row, sizes: Sizes, length: int) -> None:
    serving, tree, prompts = _filled(sizes, length)

    def bare(prompt: Any) -> None:
        tree.lookup(tokens=prompt[:-1])
        tree.release(tokens=prompt[:-1])

    _in_turn(
        row,
        f"begin + finish {length:,} cached tokens",
        length,
        "look-up and release",
        lambda prompt: serving.begin(prompt).finish(),
        bare,
        prompts=prompts,
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_a_whole_request(row: Row, sizes: Sizes, length: int) -> None:
    serving, tree, prompts = _filled(sizes, length)

    def served(prompt: Any) -> None:
        with serving.begin(prompt) as sequence:
            sequence.allocate()
            sequence.publish(prompt.size)

    def bare(prompt: Any) -> None:
        match = tree.lookup(tokens=prompt[:-1])
        tree.insert(tokens=prompt[:-1], block_table=match.matched_blocks, matched_tokens=match.matched_tokens)
        tree.release(tokens=prompt[:-1])

    _in_turn(
        row,
        f"begin + allocate + publish + finish {length:,} cached tokens",
        length,
        "look-up, insert and release",
        served,
        bare,
        prompts=prompts,
    )
