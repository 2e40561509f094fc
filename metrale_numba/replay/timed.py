"""Requests in time: they arrive when the trace says, wait for their turn, and are served at given rates.

A simulation from event to event, which reads no clock: the same requests always give the same times. The model of the
service is told in :class:`ServiceModel`. Relies on a :class:`~metrale_numba.replay.engine.SimulatedEngine`.
"""

from __future__ import annotations

from array import array
from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from metrale_numba.replay.engine import EngineCounts, Run, SimulatedEngine
from metrale_numba.replay.requests import Request

__all__ = ["ServiceModel", "Spread", "TimedReplay", "TimedResult"]


class ServiceModel(NamedTuple):
    """How fast requests are served.

    Requests are begun in the order in which they came. The next one begins as soon as no prompt is being computed,
    fewer than `at_once` are running, and there are blocks for its prompt and its answer; it is looked up at that
    moment. Its prompt is computed at `prefill_rate`, by itself, and is in the cache for others when that is done,
    which is when the first token of the answer comes. Each of the others takes ``1 / decode_rate`` seconds, however
    many answers are under way and whether a prompt is computed meanwhile. The last one ends the request. Tokens that
    are cached take no time, and neither does moving a snapshot.
    """

    prefill_rate: float = 20_000.0
    """Tokens of a prompt per second."""
    decode_rate: float = 50.0
    """Tokens per second of each answer."""
    at_once: int = 256
    """Requests that may run at once, the one whose prompt is computed included."""


class Spread(NamedTuple):
    """How a figure is spread over the requests."""

    mean: float
    p50: float
    p90: float
    p99: float


class TimedResult(NamedTuple):
    """What a timed replay came to; times in seconds. Rates and spreads of nothing are None."""

    arrived: int
    """Requests that have come."""
    finished: int
    """Requests that have ended."""
    refused: int
    """Requests that can never fit, which were sent away."""
    first_token: Spread | None
    """From the arrival to the first token."""
    waiting: Spread | None
    """The part of it before the prompt began to be computed."""
    most_waiting: int
    """The most requests that waited at once."""
    most_running: int
    """The most that ran at once."""
    seconds: float
    """From the first arrival to the latest event."""
    requests_per_second: float | None
    """Of `finished`."""
    prompt_tokens_per_second: float | None
    """Of `finished`, hits included."""
    output_tokens_per_second: float | None
    """Of `finished`."""
    prefill_busy: float | None
    """The part of `seconds` in which a prompt was computed, 0 to 1."""
    engine: EngineCounts
    """What was cached, computed and evicted."""


class TimedReplay:
    """Plays requests through one simulated engine in simulated time. For one thread.

    Parameters
    ----------
    engine : SimulatedEngine
        The engine, which nobody else drives.
    service : ServiceModel
        How fast requests are served.
    speed : float, default 1.0
        By how much faster than the trace says the requests come; more than 0.
    """

    def __init__(self, engine: SimulatedEngine, service: ServiceModel, *, speed: float = 1.0) -> None:
        self._engine = engine
        self._service = service
        self._milliseconds_per_second = 1_000.0 * speed
        self._now = 0.0
        self._first_arrival: float | None = None
        # The ends of prompts and of answers. The number is the order of entry, which decides between equal times.
        self._events: list[tuple[float, int, Run, float]] = []
        self._num_events = 0
        self._waiting: deque[tuple[Request, float]] = deque()
        self._prefilling: Run | None = None
        self._num_running = 0
        self._lacks_blocks = False
        self._arrived = self._finished = self._refused = 0
        self._most_waiting = self._most_running = 0
        self._finished_prompt_tokens = self._finished_output_tokens = 0
        self._busy_seconds = 0.0
        self._first_token_seconds = array("d")
        self._waiting_seconds = array("d")

    @property
    def engine(self) -> SimulatedEngine:
        """The engine."""
        return self._engine

    @property
    def now(self) -> float:
        """The time of the latest event, in seconds of the trace's clock."""
        return self._now

    @property
    def settled(self) -> int:
        """How many requests have ended or were refused."""
        return self._finished + self._refused

    @property
    def first_token_seconds(self) -> npt.NDArray[np.float64]:
        """From its arrival to its first token, of each request that has one, in the order of arrival: a copy."""
        return np.array(self._first_token_seconds)

    @property
    def waiting_seconds(self) -> npt.NDArray[np.float64]:
        """How long each request waited that has begun, in the order of arrival: a copy."""
        return np.array(self._waiting_seconds)

    def arrive(self, request: Request) -> None:
        """Let a request come when its timestamp says, after everything that happens up to then.

        A timestamp before that of an earlier request counts as the same moment.

        Parameters
        ----------
        request : Request
            The request.
        """
        at = max(request.timestamp / self._milliseconds_per_second, self._now)
        while self._events and self._events[0][0] <= at:
            self.step()
        self._now = at
        self._enter(request)

    def play(self, request: Request) -> None:
        """Let a request come when all before it have ended, whatever its timestamp; it has ended afterwards.

        Parameters
        ----------
        request : Request
            The request.
        """
        self.drain()
        self._enter(request)
        self.drain()

    def step(self) -> bool:
        """Let the next event happen.

        Returns
        -------
        bool
            False if there is none: all requests that have come are at their end.
        """
        if not self._events:
            return False
        self._now, _, run, arrived = heappop(self._events)
        if run is self._prefilling:
            self._give_first_token(run, arrived)
        else:
            self._end(run)
        self._begin_next()
        return True

    def drain(self) -> None:
        """Let everything happen that is still to come."""
        while self.step():
            pass

    def close(self) -> None:
        """Give back what requests under way hold, which do not count as finished, and forget those that wait."""
        for _, _, run, _ in self._events:
            self._engine.abort(run)
        self._events.clear()
        self._waiting.clear()

    def result(self) -> TimedResult:
        """Sum up what has happened so far; changes nothing, and more requests may come.

        Returns
        -------
        TimedResult
            Spreads are over the requests that have their first token.
        """
        seconds = 0.0 if self._first_arrival is None else self._now - self._first_arrival
        return TimedResult(
            arrived=self._arrived,
            finished=self._finished,
            refused=self._refused,
            first_token=_spread(self._first_token_seconds),
            waiting=_spread(self._waiting_seconds),
            most_waiting=self._most_waiting,
            most_running=self._most_running,
            seconds=seconds,
            requests_per_second=_ratio(self._finished, seconds),
            prompt_tokens_per_second=_ratio(self._finished_prompt_tokens, seconds),
            output_tokens_per_second=_ratio(self._finished_output_tokens, seconds),
            prefill_busy=_ratio(self._busy_seconds, seconds),
            engine=self._engine.counts(),
        )

    def _enter(self, request: Request) -> None:
        if self._first_arrival is None:
            self._first_arrival = self._now
        self._arrived += 1
        if not self._engine.ever_fits(request):
            self._refused += 1
            return
        self._waiting.append((request, self._now))
        self._begin_next()
        self._most_waiting = max(self._most_waiting, len(self._waiting))

    def _begin_next(self) -> None:
        """Begin the request that has waited for longest, if it may."""
        # Blocks come back when a request ends, and not before.
        if not self._waiting or self._prefilling is not None or self._lacks_blocks:
            return
        if self._num_running >= self._service.at_once:
            return
        request, arrived = self._waiting[0]
        run = self._engine.start(request)
        if run is None:
            self._lacks_blocks = True
            return
        self._waiting.popleft()
        self._prefilling = run
        self._num_running += 1
        self._most_running = max(self._most_running, self._num_running)
        self._waiting_seconds.append(self._now - arrived)
        self._happen(self._now + run.computed_tokens / self._service.prefill_rate, run, arrived)

    def _give_first_token(self, run: Run, arrived: float) -> None:
        self._engine.publish(run)
        self._prefilling = None
        self._busy_seconds += run.computed_tokens / self._service.prefill_rate
        self._first_token_seconds.append(self._now - arrived)
        more = run.request.output_length - 1
        if more > 0:
            self._happen(self._now + more / self._service.decode_rate, run, arrived)
        else:
            self._end(run)

    def _end(self, run: Run) -> None:
        self._engine.end(run)
        self._num_running -= 1
        self._lacks_blocks = False
        self._finished += 1
        self._finished_prompt_tokens += run.request.input_length
        self._finished_output_tokens += run.request.output_length

    def _happen(self, at: float, run: Run, arrived: float) -> None:
        heappush(self._events, (at, self._num_events, run, arrived))
        self._num_events += 1


def _spread(seconds: array[float]) -> Spread | None:
    if not seconds:
        return None
    values = np.frombuffer(seconds)
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return Spread(float(values.mean()), float(p50), float(p90), float(p99))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
