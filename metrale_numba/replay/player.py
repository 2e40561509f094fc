"""Play requests through a prefix cache, one after another, the way an engine would, and count and time it.

Relies on the :class:`~metrale_numba.interface.PrefixCache` contract and keeps the pool of block ids that a
cache's caller has to keep. Counts depend on requests and capacity alone, never on the clock; nor on the block size,
unless the requests hold tokens and not hash ids.
"""

from __future__ import annotations

from array import array
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from metrale_numba.interface import Ids, PrefixCache
from metrale_numba.replay.requests import Request

__all__ = ["CallTimes", "Replay", "ReplayResult", "default_block_size", "prompt_tokens", "spell", "tokens_per_block"]

# Odd, so that multiplying by either loses no bit; otherwise without meaning.
_POSITION_STEP = np.uint32(0x9E37_79B9)
_SCATTER = np.uint32(0x85EB_CA6B)

_DEFAULT_BLOCK_SIZE = 16
"""Of traces that hold the tokens themselves; what most engines have."""

# Of this many calls every time is kept, in 2 MB; of more, an even sample that is no smaller than half of it.
_MOST_TIMES = 262_144


class CallTimes(NamedTuple):
    """How long the calls of one method took, as seen by the caller.

    Median and percentile are exact up to 262,144 calls; beyond, they are those of every second call, every fourth and
    so on, so that a long trace takes no more memory than a short one.
    """

    calls: int
    """How many were made."""
    median: float
    """Microseconds."""
    p99: float
    """Microseconds that 99 in 100 calls stayed below."""


class ReplayResult(NamedTuple):
    """What a replay came to. By default, that nothing was played; a rate of nothing is None."""

    requests: int = 0
    """Requests played."""
    blocks: int = 0
    """Blocks of all their prompts: one per hash id, or of tokens the full ones."""
    hit_blocks: int = 0
    """Blocks among them that the cache held already."""
    evicted_blocks: int = 0
    """Blocks the cache gave up to make room."""
    cached_blocks: int = 0
    """Blocks in the cache at the end."""
    block_hit_rate: float | None = None
    """`hit_blocks` in `blocks`."""
    token_hit_rate: float | None = None
    """The same in tokens of all prompts, where the last block of a prompt counts for the tokens it has."""
    requests_per_second: float | None = None
    """Over `seconds`."""
    requests_per_cache_second: float | None = None
    """Over `cache_seconds`."""
    seconds: float = 0.0
    """From the start of the replay to this result, reading or making up the requests included."""
    cache_seconds: float = 0.0
    """The part of it spent in calls of the cache."""
    block_size: int = 1
    """Tokens per block of the cache, which each hash id was spelled out as."""
    capacity: int | None = None
    """Blocks the cache was let hold; None without limit."""
    lookup: CallTimes | None = None
    """One call a request; None, as for the others, where none was made."""
    insert: CallTimes | None = None
    """One call a request."""
    evict: CallTimes | None = None
    """Calls made, which is only where room was lacking."""
    release: CallTimes | None = None
    """One call a request."""


def spell(hash_ids: Ids, block_size: int) -> Ids:
    """Spell every hash id out as one full block of tokens.

    Parameters
    ----------
    hash_ids : array of uint32, shape (n,)
        The ids, in the order of the prompt.
    block_size : int
        Tokens to make of each; 1 or more.

    Returns
    -------
    array of uint32, shape (n * block_size,)
        The same for the same arguments. The first token of a block is the id itself, so distinct ids make
        distinct blocks; the others are a mix of id and position. `hash_ids` itself if `block_size` is 1.
    """
    if block_size == 1:
        return hash_ids
    tokens = np.empty((hash_ids.size, block_size), dtype=np.uint32)
    np.bitwise_xor(hash_ids[:, np.newaxis], np.arange(block_size, dtype=np.uint32) * _POSITION_STEP, out=tokens)
    tokens *= _SCATTER
    tokens[:, 0] = hash_ids
    return tokens.reshape(-1)


def default_block_size(request: Request) -> int:
    """Say how many tokens a block has where nobody says: 1 if it stands for a hash id, 16 if it holds real tokens.

    Parameters
    ----------
    request : Request
        Any of the trace.

    Returns
    -------
    int
        For :class:`Replay`, :func:`prompt_tokens` and :func:`tokens_per_block`.
    """
    return _DEFAULT_BLOCK_SIZE if request.tokens_per_id == 1 else 1


def prompt_tokens(request: Request, block_size: int) -> Ids:
    """Give the full blocks of a prompt as the tokens that a cache is shown.

    Parameters
    ----------
    request : Request
        Hash ids are spelled out, each as one block; of tokens, the last ones are left out if they fill no block.
    block_size : int
        Tokens per block; 1 or more.

    Returns
    -------
    array of uint32, shape (blocks * block_size,)
        Not to be written to.
    """
    if request.tokens_per_id == 1:
        return request.hash_ids[: request.hash_ids.size // block_size * block_size]
    return spell(request.hash_ids, block_size)


def tokens_per_block(request: Request, block_size: int) -> int:
    """Say how many tokens of its prompt a block of a request stands for.

    Parameters
    ----------
    request : Request
        A block is one of its hash ids, or `block_size` of its tokens.
    block_size : int
        Tokens per block of the cache.

    Returns
    -------
    int
        The last block of a prompt may stand for fewer.
    """
    return block_size if request.tokens_per_id == 1 else request.tokens_per_id


class Replay:
    """Plays requests through one cache and keeps count; its clock runs from construction.

    For one thread, and the only caller of its cache: it assumes that no one else holds or evicts blocks.

    Parameters
    ----------
    cache : PrefixCache
        The cache to play through, with nothing in it.
    block_size : int, optional
        Tokens to spell each hash id out as, and the block size of every call. Default: that of
        :func:`default_block_size`.
    capacity : int, optional
        Blocks there are. Default: as many as are needed.
    """

    def __init__(self, cache: PrefixCache, *, block_size: int | None = None, capacity: int | None = None) -> None:
        self._cache = cache
        self._block_size = block_size
        self._capacity = capacity
        self._pool = _BlockPool()
        self._requests = 0
        self._blocks = 0
        self._hit_blocks = 0
        self._evicted_blocks = 0
        self._tokens = 0
        self._hit_tokens = 0
        self._lookup_times = _Times()
        self._insert_times = _Times()
        self._evict_times = _Times()
        self._release_times = _Times()
        self._started = perf_counter_ns()

    @property
    def requests(self) -> int:
        """How many requests were played."""
        return self._requests

    def play(self, request: Request) -> None:
        """Play one request: look its prompt up, evict what it lacks room for, insert it and release it.

        A prompt for which even an empty cache has no room is stored as far as there is. Changes the cache; holds
        no reference in it afterwards.

        Parameters
        ----------
        request : Request
            The request, all of whose hash ids count as full blocks; of tokens, those that fill none are not cached.
        """
        if self._block_size is None:
            self._block_size = default_block_size(request)
        block_size = self._block_size
        adapter = request.adapter
        tokens = prompt_tokens(request, block_size)
        prompt_blocks = tokens.size // block_size

        start = perf_counter_ns()
        match = self._cache.lookup(tokens, block_size=block_size, adapter_id=adapter)
        self._lookup_times.add(perf_counter_ns() - start)
        hit_blocks = len(match.matched_blocks)

        own_blocks = self._make_room(prompt_blocks - hit_blocks)
        own = self._pool.take(own_blocks)
        held = tokens[: (hit_blocks + own_blocks) * block_size]
        block_table = np.concatenate((match.matched_blocks, own))

        start = perf_counter_ns()
        acquired = self._cache.insert(
            held, block_table, block_size=block_size, adapter_id=adapter, matched_tokens=hit_blocks * block_size
        )
        self._insert_times.add(perf_counter_ns() - start)

        start = perf_counter_ns()
        self._cache.release(held, block_size=block_size, adapter_id=adapter)
        self._release_times.add(perf_counter_ns() - start)

        # The sequence is over, and what the cache did not take over is free again.
        if len(acquired.blocks) < own_blocks:
            self._pool.give_back(np.setdiff1d(own, acquired.blocks, assume_unique=True))
        self._requests += 1
        self._blocks += prompt_blocks
        self._hit_blocks += hit_blocks
        self._tokens += request.input_length
        self._hit_tokens += min(hit_blocks * tokens_per_block(request, block_size), request.input_length)

    def result(self) -> ReplayResult:
        """Sum up what was played so far; changes nothing, and more may be played after it.

        Returns
        -------
        ReplayResult
            Over all requests whose :meth:`play` is done.
        """
        seconds = (perf_counter_ns() - self._started) / 1e9
        times = (self._lookup_times, self._insert_times, self._evict_times, self._release_times)
        cache_seconds = sum(each.total for each in times) / 1e9
        return ReplayResult(
            requests=self._requests,
            blocks=self._blocks,
            hit_blocks=self._hit_blocks,
            evicted_blocks=self._evicted_blocks,
            cached_blocks=self._cache.stats()[1],
            block_hit_rate=_ratio(self._hit_blocks, self._blocks),
            token_hit_rate=_ratio(self._hit_tokens, self._tokens),
            requests_per_second=_ratio(self._requests, seconds) if self._requests else None,
            requests_per_cache_second=_ratio(self._requests, cache_seconds),
            seconds=seconds,
            cache_seconds=cache_seconds,
            block_size=self._block_size or 1,
            capacity=self._capacity,
            lookup=self._lookup_times.summary(),
            insert=self._insert_times.summary(),
            evict=self._evict_times.summary(),
            release=self._release_times.summary(),
        )

    def _make_room(self, wanted: int) -> int:
        """Evict what `wanted` blocks lack room for; answers how many of them there is room for then."""
        if self._capacity is None:
            return wanted
        lacking = wanted - (self._capacity - self._pool.taken)
        if lacking > 0:
            start = perf_counter_ns()
            evicted = self._cache.evict(lacking)
            self._evict_times.add(perf_counter_ns() - start)
            self._evicted_blocks += len(evicted.physical)
            self._pool.give_back(evicted.physical)
        return min(wanted, self._capacity - self._pool.taken)


class _BlockPool:
    """Ids for blocks: those that came back, the last first, and new ones counted up when there are none."""

    def __init__(self) -> None:
        self._returned = np.empty(1_024, dtype=np.uint32)
        self._num_returned = 0
        self._unused = 0

    @property
    def taken(self) -> int:
        """How many ids are out."""
        return self._unused - self._num_returned

    def take(self, count: int) -> Ids:
        """Hand out `count` ids."""
        ids = np.empty(count, dtype=np.uint32)
        again = min(count, self._num_returned)
        self._num_returned -= again
        ids[:again] = self._returned[self._num_returned : self._num_returned + again][::-1]
        ids[again:] = np.arange(self._unused, self._unused + count - again)
        self._unused += count - again
        return ids

    def give_back(self, ids: Ids) -> None:
        """Take back `ids`, each of which is out."""
        end = self._num_returned + len(ids)
        if end > self._returned.size:
            self._returned = np.concatenate((self._returned, np.empty(end, dtype=np.uint32)))
        self._returned[self._num_returned : end] = ids
        self._num_returned = end


class _Times:
    """How long the calls of one method took, in nanoseconds; bounded, and exact as long as it may be."""

    def __init__(self) -> None:
        self.total = 0
        self._calls = 0
        self._every = 1
        self._kept = array("Q")

    def add(self, nanoseconds: int) -> None:
        """Note one call."""
        self.total += nanoseconds
        if self._calls % self._every == 0:
            self._kept.append(nanoseconds)
            if len(self._kept) == _MOST_TIMES:
                self._kept = self._kept[::2]
                self._every *= 2
        self._calls += 1

    def summary(self) -> CallTimes | None:
        """Sum up what was noted; None if that is nothing."""
        if not self._calls:
            return None
        median, p99 = np.percentile(np.frombuffer(self._kept, dtype=np.uint64), (50, 99)) / 1e3
        return CallTimes(self._calls, float(median), float(p99))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
