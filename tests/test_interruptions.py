"""A signal's handler that raises in the middle of a call, as Ctrl-C does, leaves a cache that is whole.

Each round is a forked child, which a crash would end, with many calls that grow, compact and clear a cache and evict
from it, and a timer that goes off in any of them. What was asked may have been done or not; nothing in between.
"""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest

import metrale_numba
from metrale_numba import RadixTree

ROUNDS = 60


class Interruption(BaseException):
    """As KeyboardInterrupt is, but nobody else's."""


def interrupt(*_: Any) -> None:
    raise Interruption


def step(cache: RadixTree, number: int) -> None:
    tokens = np.arange(640 * number, 640 * number + 645, dtype=np.uint32)
    disks = np.arange(41, dtype=np.uint32) if number % 3 == 0 else ()
    cache.insert(tokens, np.arange(41, dtype=np.uint32), disks)
    cache.insert_tail_snapshot(tokens[:100], number, session_hash=number + 1)
    if number % 7 == 0:
        cache.compact()
    if number % 11 == 0:
        cache.clear()
    if number % 5 == 0:
        cache.release(tokens[:640])
        cache.evict(30)
    if number % 13 == 0:
        cache.insert(tokens, np.arange(60), block_size=12)


def live_through(seed: int) -> int:
    """How many of a cache's calls were interrupted; it checks itself all the while."""
    rng = random.Random(seed)
    cache = RadixTree(partial_tail_sharing=seed % 2 == 0, ghosts=100 if seed % 3 == 0 else 0)
    interrupted = 0
    for number in range(200):
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(20e-6, 400e-6))
            step(cache, number)
        except Interruption:
            interrupted += 1
        finally:
            # The timer may go off in the very call that stops it.
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interruption:
                interrupted += 1
        if number % 10 == 0:
            cache.check_integrity()
    cache.evict(10**9)
    cache.check_integrity()
    return interrupted


def in_a_child(seed: int) -> int:
    """What :func:`live_through` answers, or a status of its own for what went wrong."""
    child = os.fork()
    if child == 0:
        status = 255
        try:
            signal.signal(signal.SIGALRM, interrupt)
            status = min(live_through(seed), 200)
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert os.WIFEXITED(ended), f"round {seed} was ended by signal {os.WTERMSIG(ended)}"
    return os.waitstatus_to_exitcode(ended)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_cache_that_was_interrupted_anywhere_is_whole() -> None:
    # Before, since what is compiled or loaded in a child is so in that child alone.
    metrale_numba.warmup()
    statuses = [in_a_child(seed) for seed in range(ROUNDS)]
    assert 255 not in statuses, [seed for seed, status in enumerate(statuses) if status == 255]
    assert sum(statuses) > ROUNDS
