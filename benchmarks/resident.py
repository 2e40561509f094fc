"""Fills a cache in a process of its own, and tells what it takes: by its own account, and by the system's.

In a process that has measured other things before, freed memory is used again and the resident set size would say
too little. ``python -m benchmarks.resident`` is that process, and :func:`memory_of_a_fill` starts it.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
import psutil

from benchmarks.stock import BLOCK_SIZE, SEQUENCE, draw, store
from metrale_numba import RadixTree

__all__ = ["Memory", "memory_of_a_fill"]

_ROOT = Path(__file__).resolve().parent.parent


class Memory(NamedTuple):
    """What a filled cache takes."""

    num_blocks: int
    bytes_per_block: list[float]
    """All arrays, after each sequence from a certain size on."""
    resident: float
    """Bytes per block by which the resident set size grew."""


def memory_of_a_fill(num_blocks: int, counted_from: int, *, reserved: bool) -> Memory:
    """Fill a cache in another process.

    Parameters
    ----------
    num_blocks : int
        Blocks to store.
    counted_from : int
        Blocks from which on memory is looked at.
    reserved : bool
        Whether the room for all of them is taken beforehand.

    Returns
    -------
    Memory
        What it took.
    """
    arguments = ["--reserve"] if reserved else []
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.resident", str(num_blocks), str(counted_from), *arguments],
        cwd=_ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Memory(*json.loads(done.stdout))


@click.command()
@click.argument("num_blocks", type=int)
@click.argument("counted_from", type=int)
@click.option("--reserve", is_flag=True, help="Take the room for all blocks beforehand.")
def main(num_blocks: int, counted_from: int, reserve: bool) -> None:
    """Fill a cache with NUM_BLOCKS blocks, and print what it takes, per block, as JSON."""
    sequences = draw(num_blocks * BLOCK_SIZE // SEQUENCE, SEQUENCE, 26)
    # Loads the kernels, which are not the cache's memory.
    store(RadixTree(block_size=BLOCK_SIZE), sequences[0])
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    cache = RadixTree(block_size=BLOCK_SIZE, reserve=num_blocks if reserve else 0)
    sizes = []
    for tokens in sequences:
        store(cache, tokens)
        stored = cache.stats()[0]
        if stored >= counted_from:
            sizes.append(sum(cache.memory_usage().values()) / stored)
    gc.collect()
    stored = cache.stats()[0]
    click.echo(json.dumps(Memory(stored, sizes, (process.memory_info().rss - before) / stored)))


if __name__ == "__main__":
    main()
