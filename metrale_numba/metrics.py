"""Hits and misses of all caches in this process, living and gone.

Each cache counts in an array of its own, under its own lock; this module adds the arrays up when somebody asks, and
keeps what a collected cache has counted. Any thread may call anything here, and so may a finalizer.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from metrale_numba.arguments import as_count

__all__ = [
    "HITS",
    "HIT_TOKENS",
    "MISSES",
    "NUM_COUNTERS",
    "cache_hit_count",
    "cache_hit_tokens_total",
    "cache_miss_count",
    "record_cache_hit",
    "record_cache_miss",
    "register",
]

HITS: Final = 0
MISSES: Final = 1
HIT_TOKENS: Final = 2
NUM_COUNTERS: Final = 3
"""A cache's counters are an array of this many; the other constants say which is which."""


class _Share:
    """What one cache has added to the process's counters since it was registered."""

    __slots__ = ("_at_registration", "_counters")

    def __init__(self, counters: npt.NDArray[np.int64]) -> None:
        self._counters = counters
        self._at_registration: list[int] = counters.tolist()

    def __getitem__(self, counter: int) -> int:
        return int(self._counters[counter]) - self._at_registration[counter]


# Guards the three below. Reentrant, since the garbage collector may run a finalizer that counts while it is held.
_lock = threading.RLock()
# What was recorded here by hand, and what collected caches left.
_settled = [0] * NUM_COUNTERS
_living: set[_Share] = set()
# The shares of collected caches until they are settled. A finalizer runs at any point of any thread, so it takes no
# lock and touches nothing else: an append is one atomic step.
_left: deque[_Share] = deque()

# A fork while another thread holds the lock would leave the child with a lock that nobody opens and with counts half
# moved; so the forking thread takes it first.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def record_cache_hit(matched_tokens: int) -> None:
    """Count one look-up that matched, for a cache that keeps no counters of its own.

    Changes the process's counters only. A registered cache must not call this for what its own counters have.

    Parameters
    ----------
    matched_tokens : int
        Tokens matched, at least 0.

    Raises
    ------
    TypeError, ValueError
        If `matched_tokens` is not what it should be; nothing has been counted then.
    """
    matched_tokens = as_count(matched_tokens, "matched_tokens")
    with _lock:
        _settled[HITS] += 1
        _settled[HIT_TOKENS] += matched_tokens


def record_cache_miss() -> None:
    """Count one look-up that matched nothing, for a cache that keeps no counters of its own.

    Changes the process's counters only.
    """
    with _lock:
        _settled[MISSES] += 1


def cache_hit_count() -> int:
    """Count the look-ups that matched, in all caches of this process so far. Changes nothing.

    Returns
    -------
    int
        Look-ups.
    """
    return _total(HITS)


def cache_miss_count() -> int:
    """Count the look-ups that matched nothing, in all caches of this process so far. Changes nothing.

    Returns
    -------
    int
        Look-ups.
    """
    return _total(MISSES)


def cache_hit_tokens_total() -> int:
    """Count the tokens matched, in all caches of this process so far. Changes nothing.

    Returns
    -------
    int
        Tokens.
    """
    return _total(HIT_TOKENS)


def register(cache: object, counters: npt.NDArray[np.int64]) -> None:
    """Let `counters` take part in the process's counters, also after `cache` is gone.

    What the counters show already is not counted: a copy of a cache starts with a share of 0.

    Parameters
    ----------
    cache : object
        Whoever writes the counters. Only a weak reference is kept.
    counters : ndarray of int64, shape (3,)
        Indexed by :data:`HITS`, :data:`MISSES` and :data:`HIT_TOKENS`, and only ever going up. It is read while the
        cache may be writing, without the cache's lock, and kept for as long as the cache lives, so it must stay the
        array that the cache writes to.
    """
    share = _Share(counters)
    # At exit nobody asks any more.
    weakref.finalize(cache, _left.append, share).atexit = False
    with _lock:
        # Here too, so that shares of collected caches do not pile up where nobody ever asks for a total.
        _settle()
        _living.add(share)


def _settle() -> None:
    """Move what collected caches have left to the settled counts. The caller holds the lock."""
    while _left:
        share = _left.popleft()
        _living.remove(share)
        for counter in range(NUM_COUNTERS):
            _settled[counter] += share[counter]


def _total(counter: int) -> int:
    with _lock:
        _settle()
        return _settled[counter] + sum(share[counter] for share in tuple(_living))
