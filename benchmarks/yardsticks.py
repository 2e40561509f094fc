"""What every row is measured against: a kernel call that does nothing, and a bare comparison of the same tokens.

No look-up that compares all tokens in one thread can be faster than the second. Relies on Numba alone, not on the
kernels of the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter_ns
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from benchmarks.timing import Nanoseconds, nothing, time_calls, undisturbed

__all__ = ["USUAL_EMPTY_KERNEL", "Comparison", "Yardsticks"]

Tokens = npt.NDArray[np.uint32]

USUAL_EMPTY_KERNEL = 60.0
"""Nanoseconds of an empty kernel call on the machine that absolute targets were set for."""
_SERIES, _CALLS, _FIRST = 25, 1_000, 9


def _do_nothing() -> None:
    return


def _differ(tokens: Tokens, copy: Tokens) -> Any:
    difference = np.uint32(0)
    for place in range(tokens.size):
        difference |= tokens[place] ^ copy[place]
    return difference


def _differ_often(tokens: Tokens, copy: Tokens, times: int) -> Any:
    difference = np.uint32(0)
    for turn in range(times):
        # Depends on the turn, or the compiler would make one of all.
        salt = np.uint32(turn)
        for place in range(tokens.size):
            difference |= (tokens[place] + salt) ^ copy[place]
    return difference


class Comparison(NamedTuple):
    """A prompt, and another copy of the same tokens to compare it with."""

    tokens: Tokens
    copy: Tokens


class Yardsticks:
    """The compiled yardsticks."""

    def __init__(self) -> None:
        signature = "uint32(uint32[::1], uint32[::1])"
        self._empty_kernel = numba.njit("void()", nogil=True, _nrt=False)(_do_nothing)
        self._differ = numba.njit(signature, nogil=True, _nrt=False)(_differ)
        self.differ_often = numba.njit("uint32(uint32[::1], uint32[::1], int64)", nogil=True, _nrt=False)(_differ_often)
        """A pure kernel without the interpreter lock that runs as long as it is told to."""
        self._seen: list[float] = []

    def empty_kernel(self) -> float:
        """Time an empty kernel call, in nanoseconds.

        The best of several series, so that a hiccup of the machine makes no target easier to meet.
        """
        empty = self._empty_kernel
        series = []
        with undisturbed():
            for _ in range(_SERIES):
                started = perf_counter_ns()
                for _ in range(_CALLS):
                    empty()
                series.append((perf_counter_ns() - started) / _CALLS)
        self._seen.append(min(series))
        return self._seen[-1]

    def scale(self) -> float:
        """Say how many times as long as on the usual machine an empty kernel call takes in this run.

        The median of all that was measured until now: a slow moment must not make the target of one row easier.
        """
        while len(self._seen) < _FIRST:
            self.empty_kernel()
        return float(np.median(self._seen)) / USUAL_EMPTY_KERNEL

    def comparison(self, pairs: Iterable[Comparison]) -> Nanoseconds:
        """Time bare comparisons the way look-ups are timed: with a fresh array each.

        Parameters
        ----------
        pairs : iterable of Comparison
            What is compared.

        Returns
        -------
        array of int64
            Nanoseconds of each.
        """
        differ = self._differ

        def compare(pair: tuple[Tokens, Tokens]) -> None:
            differ(*pair)

        def fresh(pair: Comparison) -> Any:
            return pair.tokens.copy(), pair.copy

        return time_calls(compare, pairs, fresh)

    @staticmethod
    def measurement() -> float:
        """Time a call that does nothing at all, in nanoseconds: that much of every figure is the measurement."""
        return float(np.median(time_calls(nothing, range(_CALLS))))
