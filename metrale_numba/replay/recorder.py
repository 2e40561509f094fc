"""Plays requests and notes what a report of them shows: hits over time, ages of blocks, shared prefixes, waiting.

Relies on :class:`~metrale_numba.replay.player.Replay` for the counts, whose cache it watches from outside. What is
noted is worked out between the calls that are timed. It takes some 100 bytes a request; for each distinct block of all
prompts some 50 bytes, and what it takes in two endless caches; and the requests that wait in simulated time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from metrale_numba.interface import EMPTY_IDS, EvictedBlocks, Ids, IdSequence, InsertAcquired, PrefixMatch, Tokens
from metrale_numba.radix_tree import RadixTree
from metrale_numba.replay.ages import BlockAges, BlockClock
from metrale_numba.replay.curve import CurveCounter, HitCurve
from metrale_numba.replay.engine import SimulatedEngine
from metrale_numba.replay.hybrid import SnapshotRoom
from metrale_numba.replay.player import Replay, ReplayResult, default_block_size
from metrale_numba.replay.requests import Request
from metrale_numba.replay.shared_prefixes import PrefixTree, SharedPrefix
from metrale_numba.replay.timed import ServiceModel, TimedReplay, TimedResult

__all__ = ["Interval", "Record", "Recorder", "Served", "Waiting"]

# Steps of a line over time that can be told apart on a page; from half as many on, there are never fewer.
_MOST_INTERVALS: Final = 120

# Requests that wait are held. Where they are more, the service is too slow for the load and there is nothing to learn.
_MOST_WAITING: Final = 100_000

# Prefixes that a table shows.
_MOST_PREFIXES: Final = 12

# Milliseconds beyond which floats leave out integers; longer than any trace.
_LATEST: Final = 2.0**52


class Interval(NamedTuple):
    """What a number of requests came to that were played one after another."""

    first_request: int
    """The first of them, counted from 1."""
    requests: int
    """How many they are."""
    begins: float
    """When the first of them came, in milliseconds of the trace."""
    ends: float
    """When the last of them came."""
    blocks: int
    """Blocks of their prompts."""
    hit_blocks: int
    """Blocks among them that were cached."""
    evicted_blocks: int
    """Blocks that were evicted for them."""


class Served(NamedTuple):
    """What serving the requests in time came to on one engine."""

    result: TimedResult
    first_token_seconds: npt.NDArray[np.float64]
    """From its arrival to its first token, of each request that has one."""


class Waiting(NamedTuple):
    """What serving the requests in time comes to."""

    service: ServiceModel
    with_cache: Served
    without_cache: Served
    endless: Served
    """With as many blocks as it takes; without a limit of blocks, that is `with_cache`."""
    snapshots: SnapshotRoom | None
    """Of a hybrid model."""


@dataclass(frozen=True, eq=False)
class Record:
    """What a recorded replay came to.

    Attributes
    ----------
    result : ReplayResult
        The counts and times of the replay itself.
    curve : HitCurve
        What it would come to at every capacity.
    intervals : list of Interval
        Its requests from the first to the last, in pieces that are equally long but for the last.
    first_eviction : Interval or None
        Of one request: the first for which blocks were evicted.
    in_requests, in_milliseconds : BlockAges
        Ages of its blocks.
    never_hit_blocks : int
        Evicted blocks that nobody hit between insert and eviction.
    prefixes : list of SharedPrefix
        Those that brought the most hit blocks, the first of them the most.
    waiting : Waiting or None
        What serving the requests in time comes to; None if so many waited that it was given up.
    """

    result: ReplayResult
    curve: HitCurve
    intervals: list[Interval]
    first_eviction: Interval | None
    in_requests: BlockAges
    in_milliseconds: BlockAges
    never_hit_blocks: int
    prefixes: list[SharedPrefix]
    waiting: Waiting | None

    @property
    def milliseconds(self) -> float:
        """From the first arrival to the last; 0 if the trace has no times."""
        return self.intervals[-1].ends - self.intervals[0].begins if self.intervals else 0.0

    @property
    def hit_tokens(self) -> int:
        """Tokens of prompts that were cached."""
        capacity = self.result.capacity
        return int(self.curve.hit_tokens[-1 if capacity is None else min(capacity, self.curve.distinct_blocks)])


class Recorder:
    """Plays requests through a cache of its own as a :class:`Replay` does, and keeps a record; for one thread.

    Beside the replay it plays each request into an endless cache, for the curve, and serves it on two or three
    simulated engines. All in all that takes several times as long as the replay alone.

    Parameters
    ----------
    block_size : int, optional
        As for :class:`Replay`.
    capacity : int, optional
        Blocks there are. Default: as many as are needed.
    service : ServiceModel, optional
        How fast requests are served.
    snapshots : SnapshotRoom, optional
        For a hybrid model: where the simulated engines keep snapshots.
    """

    def __init__(
        self,
        *,
        block_size: int | None = None,
        capacity: int | None = None,
        service: ServiceModel | None = None,
        snapshots: SnapshotRoom | None = None,
    ) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._service = service or ServiceModel()
        self._snapshots = snapshots
        self._cache = _WatchedTree(block_size=block_size or 1)
        self._replay = Replay(self._cache, block_size=block_size, capacity=capacity)
        self._endless_cache = _WatchedTree(block_size=block_size or 1)
        self._counter = CurveCounter(self._endless_cache, block_size=block_size)
        self._engines: _Engines | None = None
        self._timeline = _Timeline()
        self._first_eviction: Interval | None = None
        self._blocks = BlockClock()
        self._tree = PrefixTree()
        self._now = 0.0

    @property
    def requests(self) -> int:
        """How many requests were played."""
        return self._replay.requests

    def play(self, request: Request) -> None:
        """Play one request, and note what happens. Changes the caches; holds no reference in them afterwards.

        Parameters
        ----------
        request : Request
            The request. A timestamp before that of an earlier one counts as the same moment.
        """
        first = self.requests == 0
        self._cache.forget()
        self._replay.play(request)
        self._counter.play(request)

        at = min(request.timestamp, _LATEST)
        self._now = at if first else max(self._now, at)
        hit, evicted = self._cache.matched, self._cache.evicted
        # One block of the counter is one of the replay.
        path = self._endless_cache.table
        interval = Interval(self.requests, 1, self._now, self._now, path.size, hit.size, evicted.size)
        self._timeline.add(interval)
        if evicted.size and self._first_eviction is None:
            self._first_eviction = interval
        self._blocks.note(self.requests, int(self._now), hit, evicted, self._cache.acquired)
        self._tree.note(path, hit.size)
        self._serve(request, first)

    def step(self) -> bool:
        """Go on serving what still waits when all requests have come.

        Returns
        -------
        bool
            False if there is nothing left to do.
        """
        if self._engines is None:
            return False
        more = False
        for replay in self._engines.different():
            more |= replay.step()
        return more

    def result(self) -> ReplayResult:
        """Sum up the replay, as :meth:`Replay.result` does."""
        return self._replay.result()

    def record(self) -> Record:
        """Sum up what was noted so far; changes nothing, and more may be played after it.

        Returns
        -------
        Record
            Over all requests whose :meth:`play` is done. Of the serving in time, what has happened.
        """
        return Record(
            result=self.result(),
            curve=self._counter.curve(),
            intervals=self._timeline.intervals(),
            first_eviction=self._first_eviction,
            in_requests=self._blocks.in_requests.ages(),
            in_milliseconds=self._blocks.in_milliseconds.ages(),
            never_hit_blocks=self._blocks.never_hit_blocks,
            prefixes=self._tree.hottest(_MOST_PREFIXES),
            waiting=None if self._engines is None else self._engines.waiting(self._service, self._snapshots),
        )

    def close(self) -> None:
        """Give back what simulated requests under way hold."""
        if self._engines is not None:
            for replay in self._engines.different():
                replay.close()

    def _serve(self, request: Request, first: bool) -> None:
        if first:
            ids_per_block = 1 if request.tokens_per_id > 1 else self._block_size or default_block_size(request)
            self._engines = _Engines(self._capacity, ids_per_block, self._service, self._snapshots)
        if self._engines is None:
            return
        for replay in self._engines.different():
            replay.arrive(request)
            if self.requests - replay.settled > _MOST_WAITING:
                self.close()
                self._engines = None
                return


class _WatchedTree(RadixTree):
    """A tree that remembers what its latest calls answered, so that it can be looked at when no call is timed."""

    matched: Ids = EMPTY_IDS
    evicted: Ids = EMPTY_IDS
    acquired: Ids = EMPTY_IDS
    table: Ids = EMPTY_IDS

    def forget(self) -> None:
        """Forget the calls before, not all of which come with every request."""
        self.evicted = EMPTY_IDS

    def lookup(
        self,
        tokens: Tokens,
        block_size: int | None = None,
        session_hash: int = 0,
        adapter_id: int = 0,
        *,
        record: bool = True,
    ) -> PrefixMatch:
        """Look up, and remember the blocks that matched."""
        match = super().lookup(tokens, block_size, session_hash, adapter_id, record=record)
        self.matched = match.matched_blocks
        return match

    def insert(
        self,
        tokens: Tokens,
        block_table: IdSequence,
        disk_block_ids: IdSequence = (),
        block_size: int | None = None,
        matched_tokens: int = 0,
        adapter_id: int = 0,
    ) -> InsertAcquired:
        """Insert, and remember the blocks of the prompt and which of them are new."""
        acquired = super().insert(tokens, block_table, disk_block_ids, block_size, matched_tokens, adapter_id)
        self.table = np.asarray(block_table, dtype=np.uint32)
        self.acquired = acquired.blocks
        return acquired

    def evict(self, num_blocks: int) -> EvictedBlocks:
        """Evict, and remember what."""
        evicted = super().evict(num_blocks)
        self.evicted = evicted.physical
        return evicted


class _Engines:
    """The engines that serve the requests in time, side by side."""

    def __init__(
        self, blocks: int | None, ids_per_block: int, service: ServiceModel, snapshots: SnapshotRoom | None
    ) -> None:
        def replay(blocks: int | None, *, caching: bool = True, room: SnapshotRoom | None = None) -> TimedReplay:
            engine = SimulatedEngine(blocks, block_size=ids_per_block, caching=caching, snapshots=room)
            return TimedReplay(engine, service)

        self._with_cache = replay(blocks, room=snapshots)
        self._without_cache = replay(blocks, caching=False)
        self._endless = self._with_cache
        if snapshots is not None:
            self._endless = replay(None, room=SnapshotRoom(None, plan=snapshots.plan))
        elif blocks is not None:
            self._endless = replay(None)

    def different(self) -> list[TimedReplay]:
        """Give each of them once."""
        return list(dict.fromkeys([self._with_cache, self._without_cache, self._endless]))

    def waiting(self, service: ServiceModel, snapshots: SnapshotRoom | None) -> Waiting:
        """Sum up what has happened."""
        served = {replay: Served(replay.result(), replay.first_token_seconds) for replay in self.different()}
        return Waiting(service, served[self._with_cache], served[self._without_cache], served[self._endless], snapshots)


class _Timeline:
    """Requests in intervals, as many of which are put together as it takes to keep their number small."""

    def __init__(self) -> None:
        self._intervals: list[Interval] = []
        self._length = 1

    def add(self, request: Interval) -> None:
        """Add an interval of one request."""
        if self._intervals and self._intervals[-1].requests < self._length:
            self._intervals[-1] = _joined(self._intervals[-1], request)
            return
        if len(self._intervals) == _MOST_INTERVALS:
            self._intervals = [_joined(*self._intervals[at : at + 2]) for at in range(0, _MOST_INTERVALS, 2)]
            self._length *= 2
        self._intervals.append(request)

    def intervals(self) -> list[Interval]:
        """Give all of them; the last has no less than half the requests of another, as a rate of a few is noise."""
        intervals = self._intervals.copy()
        if len(intervals) > 1 and intervals[-1].requests * 2 < self._length:
            last = intervals.pop()
            intervals[-1] = _joined(intervals[-1], last)
        return intervals


def _joined(before: Interval, after: Interval) -> Interval:
    return Interval(
        before.first_request,
        before.requests + after.requests,
        before.begins,
        after.ends,
        before.blocks + after.blocks,
        before.hit_blocks + after.hit_blocks,
        before.evicted_blocks + after.evicted_blocks,
    )
