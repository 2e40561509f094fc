"""Times calls one by one, each with arguments of its own that are made outside the timed part.

A call of 2 us is shorter than what pytest-benchmark does around a round. So a round is a whole series of calls, and
``perf_counter_ns`` is read right before and after each of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Nanoseconds", "nothing", "time_calls", "time_in_turn", "undisturbed"]

Nanoseconds = npt.NDArray[np.int64]
"""What each call of a series took."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the garbage collector from running inside, after it has run before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def nothing(argument: Any) -> None:
    """Do nothing: what a call costs that does nothing is what the measurement itself costs."""


def time_calls(
    call: Callable[[Any], Any],
    arguments: Iterable[Any],
    prepare: Callable[[Any], Any] | None = None,
    settle: Callable[[Any], object] | None = None,
) -> Nanoseconds:
    """Time a call for each argument.

    Parameters
    ----------
    call : callable
        What is timed, with one argument.
    arguments : iterable
        What it is called for, one after the other.
    prepare : callable, optional
        Makes of each what `call` gets, right before it and not timed.
    settle : callable, optional
        Takes the same right after the call and not timed, to undo what it did.

    Returns
    -------
    array of int64
        Nanoseconds of each call.
    """
    times = []
    now = perf_counter_ns
    with undisturbed():
        for item in arguments:
            argument = item if prepare is None else prepare(item)
            started = now()
            call(argument)
            times.append(now() - started)
            if settle is not None:
                settle(argument)
    return np.array(times, np.int64)


def time_in_turn(
    calls: Sequence[Callable[[Any], Any]],
    arguments: Iterable[Any],
    prepare: Callable[[Any], Any],
    settle: Callable[[Any], object],
) -> list[Nanoseconds]:
    """Time several calls for each argument, one after the other, so that a slow moment falls on all of them.

    Parameters
    ----------
    calls : sequence of callable
        What is timed, each with one argument.
    arguments : iterable
        What they are called for.
    prepare, settle : callable
        As in :func:`time_calls`, around each call.

    Returns
    -------
    list of array of int64
        Nanoseconds, by call.
    """
    times: list[list[int]] = [[] for _ in calls]
    now = perf_counter_ns
    with undisturbed():
        for item in arguments:
            for call, taken in zip(calls, times, strict=True):
                argument = prepare(item)
                started = now()
                call(argument)
                taken.append(now() - started)
                settle(argument)
    return [np.array(taken, np.int64) for taken in times]
