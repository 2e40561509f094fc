"""Where the requests of a command come from: a trace, or a workload that is made up on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

import click

from metrale_numba.replay import Request, TraceReader, chat_workload

__all__ = ["BadTrace", "Source", "built_in_source", "trace_source"]


class BadTrace(click.ClickException):
    """Shown as its message alone, like a bad argument."""

    exit_code = 2


class Source(NamedTuple):
    """Where requests come from."""

    requests: Iterable[Request]
    fraction_done: Callable[[int], float | None]
    """How much of the work is done once so many requests are played, 0 to 1; None if nobody knows."""


@contextmanager
def built_in_source(seed: int, requests: int, sessions: int, limit: int | None) -> Iterator[Source]:
    """Make up the requests of the chat workload."""
    if limit is not None:
        requests = min(requests, limit)
    yield Source(chat_workload(seed, requests=requests, sessions=sessions), lambda played: played / requests)


@contextmanager
def trace_source(trace: str, limit: int | None) -> Iterator[Source]:
    """Open a trace, and close it at the end."""
    with TraceReader(trace) as reader:

        def fraction_done(played: int) -> float | None:
            fractions = [reader.fraction_read, None if limit is None else played / limit]
            return max((fraction for fraction in fractions if fraction is not None), default=None)

        yield Source(islice(reader, limit), fraction_done)
