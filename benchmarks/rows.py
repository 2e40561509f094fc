"""A row of the report: times one thing, sets it beside its yardsticks and its target, and keeps the figures.

The figures go into the ``extra_info`` of pytest-benchmark, so ``--benchmark-json`` has them, and into the list that
the summary prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.timing import Nanoseconds, time_calls, time_in_turn
from benchmarks.yardsticks import Comparison, Yardsticks

__all__ = ["Figures", "Row", "Target"]

_PER_UNIT = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


@dataclass(frozen=True)
class Target:
    """What a row must not exceed."""

    limit: float
    """In the unit of the row, unless it is a ratio."""
    of: str = "median"
    """Which figure of the row: ``median``, ``min``, ``max`` or ``ratio``."""
    absolute: bool = True
    """Whether it is a time on the usual machine, to be scaled by what an empty kernel call costs here."""
    at_least: bool = False
    """Whether it must not fall short of the limit instead."""


@dataclass
class Figures:
    """The figures of one row; times are in `unit`."""

    group: str
    """The file of the benchmark."""
    place: tuple[int, ...]
    """Where it stands there."""
    key: str
    """What targets between rows know it by; the same whatever the scale."""
    row: str
    unit: str
    calls: int
    median: float
    min: float
    p99: float
    max: float
    empty_kernel_ns: float
    us_per_call: float | None = None
    ns_per_block: float | None = None
    comparison: float | None = None
    """The bare comparison of the same tokens."""
    yardstick: str | None = None
    """Another yardstick, in words with its figure."""
    ratio: float | None = None
    """The median by that of the yardstick, or of the bare comparison."""
    target: float | None = None
    """As it was set; `target_here` is scaled to this machine."""
    target_here: float | None = None
    met: bool | None = None
    note: str | None = None


class Row:
    """One row of the report, and the benchmark it belongs to.

    Parameters
    ----------
    benchmark : BenchmarkFixture
        pytest-benchmark's fixture.
    yardsticks : Yardsticks
        What to compare with.
    collected : list of Figures
        Where finished rows go.
    judged : bool
        Whether targets hold, which they do not for caches of other sizes.
    group : str
        The file of the benchmark.
    place : tuple of int
        Where the row stands among those of its file.
    """

    def __init__(
        self,
        benchmark: BenchmarkFixture,
        yardsticks: Yardsticks,
        collected: list[Figures],
        judged: bool,
        *,
        group: str,
        place: tuple[int, ...],
    ) -> None:
        self._group = group
        self._place = place
        self._benchmark = benchmark
        self._collected = collected
        self._judged = judged
        self.yardsticks = yardsticks

    def run(self, work: Callable[[], Any]) -> Any:
        """Run something as the one round of the benchmark, and return what it returns."""
        results = []
        self._benchmark.pedantic(lambda: results.append(work()), rounds=1, iterations=1)
        return results[0]

    def time(
        self,
        call: Callable[[Any], Any],
        arguments: Iterable[Any],
        prepare: Callable[[Any], Any] | None = None,
        settle: Callable[[Any], object] | None = None,
    ) -> Nanoseconds:
        """Time a call for each argument, all of them as one round; see :func:`benchmarks.timing.time_calls`."""
        times: Nanoseconds = self.run(lambda: time_calls(call, arguments, prepare, settle))
        return times

    def time_in_turn(
        self,
        calls: Sequence[Callable[[Any], Any]],
        arguments: Iterable[Any],
        prepare: Callable[[Any], Any],
        settle: Callable[[Any], object],
    ) -> list[Nanoseconds]:
        """Time several calls in turn, all of them as one round; see :func:`benchmarks.timing.time_in_turn`."""
        times: list[Nanoseconds] = self.run(lambda: time_in_turn(calls, arguments, prepare, settle))
        return times

    def compare(self, pairs: Sequence[Comparison]) -> float:
        """Time bare comparisons, in nanoseconds: their median."""
        return float(np.median(self.yardsticks.comparison(pairs)))

    def leave_out(self, reason: str) -> NoReturn:
        """Give the row up: what was measured says nothing here."""
        self._benchmark.extra_info["left_out"] = reason
        pytest.skip(reason)

    def report(
        self,
        name: str,
        values: npt.ArrayLike,
        *,
        key: str = "",
        unit: str = "us",
        num_blocks: int | None = None,
        comparison: float | None = None,
        yardstick: tuple[str, float] | None = None,
        target: Target | None = None,
        note: str | None = None,
    ) -> Figures:
        """Finish the row.

        Parameters
        ----------
        name : str
            What was measured.
        values : array_like
            A figure for each call: nanoseconds where `unit` is one of time, else in `unit`.
        key : str
            What targets between rows know this one by.
        unit : str
            What to report in.
        num_blocks : int, optional
            Blocks that one call handles.
        comparison : float, optional
            Nanoseconds of the bare comparison.
        yardstick : tuple of str and float, optional
            Another yardstick, which then is what the ratio is to: what it is, and its figure, as `values` are.
        target : Target, optional
            What to stay below.
        note : str, optional
            What else is to be said.

        Returns
        -------
        Figures
            The row.
        """
        nanoseconds = np.asarray(values, np.float64)
        scale = _PER_UNIT.get(unit, 1.0)
        median, lowest, p99, highest = (float(value) / scale for value in np.percentile(nanoseconds, (50, 0, 99, 100)))
        figures = Figures(
            group=self._group,
            place=self._place,
            key=key,
            row=name,
            unit=unit,
            calls=nanoseconds.size,
            median=median,
            min=lowest,
            p99=p99,
            max=highest,
            empty_kernel_ns=self.yardsticks.empty_kernel(),
        )
        if unit in _PER_UNIT:
            figures.us_per_call = median * scale / 1e3
            figures.ns_per_block = median * scale / num_blocks if num_blocks else None
        if comparison is not None:
            figures.comparison = comparison / scale
            figures.ratio = median / figures.comparison
        if yardstick is not None:
            figures.yardstick = f"{yardstick[0]} {yardstick[1] / scale:,.4g} {unit}"
            figures.ratio = median / (yardstick[1] / scale)
        figures.note = note
        if target is not None and self._judged:
            figures.target = figures.target_here = target.limit
            if target.absolute:
                figures.target_here = target.limit * self.yardsticks.scale()
            value = {"median": median, "min": lowest, "max": highest, "ratio": figures.ratio}[target.of]
            if value is None:
                raise ValueError(f"the row {name} has no ratio to judge")
            figures.met = bool(value >= figures.target_here if target.at_least else value <= figures.target_here)
            if target.of != "median":
                figures.note = ", ".join(part for part in (note, f"the {target.of} is judged") if part)
        self._benchmark.extra_info.update(asdict(figures))
        self._collected.append(figures)
        return figures
