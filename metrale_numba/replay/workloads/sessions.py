"""What the made-up workloads share: drawing that is the same on every machine, new ids, sessions side by side.

Relies on NumPy's PCG64 stream, drawn from by `integers` alone, whose values for a seed are the same on every
machine. Sessions are made as they are needed, so memory depends on how many go on at once and not on the requests.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol

import numpy as np

from metrale_numba.replay.requests import TOKENS_PER_HASH_ID, Request

__all__ = ["Draw", "Ids", "Session", "Text", "popularity", "side_by_side"]

_MILLISECONDS_BETWEEN_REQUESTS = (0, 60)


class Draw:
    """Random choices of one seed.

    Parameters
    ----------
    seed : int
        Of the generator; 0 or more.
    """

    def __init__(self, seed: int) -> None:
        self._integers = np.random.Generator(np.random.PCG64(seed)).integers

    def below(self, end: int) -> int:
        """One of 0..end-1, each as likely."""
        return int(self._integers(end))

    def between(self, bounds: tuple[int, int]) -> int:
        """One of the integers from the first bound to the second, each as likely."""
        return int(self._integers(bounds[0], bounds[1] + 1))

    def ranked(self, sums: list[int]) -> int:
        """One of the ranks of :func:`popularity`, counted from 0."""
        return bisect_right(sums, self.below(sums[-1]))


def popularity(ranks: int) -> list[int]:
    """Sum up Zipf weights: of so many things, the k-th most popular is chosen 1/k as often as the first.

    Parameters
    ----------
    ranks : int
        How many things there are.

    Returns
    -------
    list of int
        For :meth:`Draw.ranked`. In integers, so that no rounding decides what a draw falls on.
    """
    return list(accumulate(1_000_000 // rank for rank in range(1, ranks + 1)))


class Ids:
    """Hash ids that were not handed out before."""

    def __init__(self) -> None:
        self._unused = 0

    def new(self, count: int) -> range:
        """Hand out `count` ids in a row."""
        self._unused += count
        return range(self._unused - count, self._unused)


class Text:
    """What was said so far, as the ids of its full blocks and its length; grows at its end.

    Parameters
    ----------
    ids : Ids
        Where ids of new blocks come from.
    tokens : int, default 0
        Its length.
    hash_ids : sequence of int
        Ids of its full blocks.
    """

    def __init__(self, ids: Ids, tokens: int = 0, hash_ids: tuple[int, ...] | list[int] | range = ()) -> None:
        self._ids = ids
        self.tokens = tokens
        self.hash_ids = list(hash_ids)

    def copy(self) -> Text:
        """Give a text that begins as this one does, and goes on by itself."""
        return Text(self._ids, self.tokens, self.hash_ids)

    def add(self, tokens: int) -> None:
        """Add so many tokens that nobody said before; blocks that get full get new ids."""
        self.tokens += tokens
        self.hash_ids += self._ids.new(self.tokens // TOKENS_PER_HASH_ID - len(self.hash_ids))

    def as_request(self, timestamp: int, answer: int, session: int) -> Request:
        """Ask for an answer of so many tokens to all of it."""
        # A block that is not full yet gets an id of its own: with more tokens in it, it is another block.
        last = self._ids.new(1 if self.tokens % TOKENS_PER_HASH_ID else 0)
        hash_ids = np.array([*self.hash_ids, *last], dtype=np.uint32)
        return Request(timestamp, self.tokens, answer, hash_ids, session=session)


class Session(Protocol):
    """One of the sessions that go on side by side."""

    @property
    def is_over(self) -> bool:
        """Whether it asks for nothing more."""

    def ask(self, timestamp: int) -> Request:
        """Make its next request, at so many milliseconds."""


def side_by_side(
    draw: Draw,
    start: Callable[[int], Session],
    *,
    requests: int,
    sessions: int,
    think_time: int | None = None,
) -> Iterator[Request]:
    """Make the requests of sessions that go on at once, each of which makes room for a new one when it is over.

    Parameters
    ----------
    draw : Draw
        Where choices come from.
    start : callable
        Starts a session, of the number given; they are counted from 1.
    requests : int
        How many requests to make.
    sessions : int
        Sessions going on at any time; 1 or more.
    think_time : int, optional
        Milliseconds between the requests of one session: from half of this to one and a half times as much, each
        as likely. Default: which session asks next is drawn evenly, at most 60 ms after the last request.

    Yields
    ------
    Request
        In order of arrival.
    """
    going_on = [start(number) for number in range(1, sessions + 1)]
    started = sessions
    turns = _drawn_turns(draw, sessions) if think_time is None else _timed_turns(draw, sessions, think_time)
    for _, (timestamp, place) in zip(range(requests), turns, strict=False):
        yield going_on[place].ask(timestamp)
        if going_on[place].is_over:
            started += 1
            going_on[place] = start(started)


def _drawn_turns(draw: Draw, sessions: int) -> Iterator[tuple[int, int]]:
    timestamp = 0
    while True:
        timestamp += draw.between(_MILLISECONDS_BETWEEN_REQUESTS)
        yield timestamp, draw.below(sessions)


def _timed_turns(draw: Draw, sessions: int, think_time: int) -> Iterator[tuple[int, int]]:
    # All of them are in the middle of their thinking when the trace begins.
    turns = [(draw.below(think_time + 1), place) for place in range(sessions)]
    heapq.heapify(turns)
    while True:
        timestamp, place = turns[0]
        yield timestamp, place
        heapq.heapreplace(turns, (timestamp + draw.between((think_time // 2, think_time + think_time // 2)), place))
