"""Two threads, each with a cache of its own: kernels run without the interpreter lock, so long prompts overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter_ns

import numpy as np

from benchmarks.bench_lookup import lookup_and_release
from benchmarks.rows import Row, Target
from benchmarks.sizes import Sizes
from benchmarks.stock import LONG, draw, fill
from benchmarks.timing import undisturbed

_THREADS = 2
_ROUNDS = 5
_COMPARISONS = 4
"""Of so many tokens take about as long as a look-up and a release."""
_WORTHWHILE = 1.7
"""A machine on which not even a pure kernel gets that much out of a second thread shows nothing about the cache."""


def _seconds(works: Sequence[Callable[[], object]]) -> float:
    """Run each in a thread of its own, all beginning together, and time the whole."""
    barrier = threading.Barrier(len(works) + 1)

    def run(work: Callable[[], object]) -> None:
        barrier.wait()
        work()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    with undisturbed():
        barrier.wait()
        started = perf_counter_ns()
        for thread in threads:
            thread.join()
        return (perf_counter_ns() - started) / 1e9


def _speed_up(works: Sequence[Callable[[], object]]) -> float:
    """How many times as much the threads get done together as the first alone: the median of some rounds."""
    return float(np.median([len(works) * _seconds(works[:1]) / _seconds(works) for _ in range(_ROUNDS)]))


def test_two_threads(row: Row, sizes: Sizes) -> None:
    stocks = [fill(2 * LONG // 16, seed=31 + number, num_long=1) for number in range(_THREADS)]

    def look_up(number: int) -> Callable[[], None]:
        call = lookup_and_release(stocks[number].cache)
        (prompt,) = stocks[number].sequences[LONG]

        def work() -> None:
            for _ in range(sizes.thread_calls):
                call(prompt)

        return work

    tokens = draw(2 * _THREADS, LONG, 33)
    times = sizes.thread_calls * _COMPARISONS

    def compare(number: int) -> Callable[[], object]:
        mine, copy = tokens[2 * number], tokens[2 * number + 1]
        return lambda: row.yardsticks.differ_often(mine, copy, times)

    def work() -> tuple[float, float]:
        pure = [compare(number) for number in range(_THREADS)]
        caches = [look_up(number) for number in range(_THREADS)]
        before = _speed_up(pure)
        return _speed_up(caches), (before + _speed_up(pure)) / 2

    speed_up, pure = row.run(work)
    if pure < _WORTHWHILE:
        row.leave_out(
            f"two threads: a pure kernel gets {pure:.2f} times as much done with two as with one, which is under "
            f"{_WORTHWHILE}; two caches got {speed_up:.2f}"
        )
    row.report(
        "speed-up of two threads on two caches, 32,768 tokens",
        [speed_up],
        unit="times",
        yardstick=("a pure kernel", pure),
        target=Target(0.8, of="ratio", absolute=False, at_least=True),
    )
