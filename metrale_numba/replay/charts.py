"""The charts of a report, each drawn on axes that are given to it, so that a page and a picture show the same.

Relies on Matplotlib, as :mod:`~metrale_numba.replay.pictures` does, and draws in its style. Every chart can be drawn
wide or narrow; a narrow one has fewer marks on its axes, in letters as large.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from metrale_numba.replay.ages import Ages, BlockAges
from metrale_numba.replay.curve import HitCurve, default_capacities
from metrale_numba.replay.pictures import FAINT, GRID, INK, PALETTE, picture_style
from metrale_numba.replay.recorder import Record, Waiting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "COLOUR_NAMES",
    "Drawing",
    "as_svg",
    "draw_first_token",
    "draw_hit_curve",
    "draw_hits_over_time",
    "draw_idle",
    "draw_lifetime",
    "duration",
]

Drawing = Callable[["Axes"], None]

# Values, the part that is at or below each, a name and a colour.
_Line = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], str, str]

COLOUR_NAMES: Final = {
    INK: "--ink",
    FAINT: "--faint",
    GRID: "--grid",
    PALETTE[0]: "--blue",
    PALETTE[1]: "--red",
    PALETTE[2]: "--green",
}
"""What a style sheet calls the colours of a chart."""

_DOTS_PER_INCH = 72.0
# Inches of axes below which there is room for few marks only.
_NARROW = 5.0
_MARKS, _MARKS_IF_NARROW = 10, 5
_PIXELS_OF_LETTERS = 13
# Inches per letter, by the size of letters; and in letters, what a sample of a legend takes with its margins.
_INCHES_PER_LETTER = 0.0085
_LETTERS_PER_SAMPLE = 7
# Inches that the marks on the other axis take.
_INCHES_BESIDE = 0.8
# Points of a line, more than its size shows.
_POINTS = 240
_UNITS = ((1.0, "s"), (60.0, "min"), (3_600.0, "h"), (86_400.0, "days"))
_UNITS_IN_FULL = {"s": "seconds", "min": "minutes", "h": "hours", "days": "days"}
# Seconds that are round in one unit or another.
_ROUND_SECONDS = (
    *(0.000_1, 0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0),
    *(3_600.0, 36_000.0, 86_400.0, 864_000.0, 8_640_000.0, 86_400_000.0),
)


def duration(seconds: float) -> str:
    """Put a time into words, with three digits.

    Parameters
    ----------
    seconds : float
        The time; 0 or more.

    Returns
    -------
    str
        As a number and a unit from milliseconds to days.
    """
    if seconds < 1:
        return f"{_digits(1_000 * seconds)} ms"
    size, unit = next((each for each in reversed(_UNITS) if seconds >= each[0]), _UNITS[0])
    number = _digits(seconds / size)
    return f"{number} day" if (number, unit) == ("1", "days") else f"{number} {unit}"


def draw_hits_over_time(axes: Axes, record: Record) -> None:
    """Draw the hit rate of each interval, by time of the trace; by request if it has no times, or few requests."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter  # noqa: PLC0415 - an extra

    intervals = [each for each in record.intervals if each.blocks]
    seconds = record.milliseconds / 1_000
    size, unit = next((each for each in reversed(_UNITS) if seconds >= 2 * each[0]), _UNITS[0])
    # Some of so few would come at the same moment as the next, or be the last, and have no width.
    by_time = seconds > 0 and intervals[0].requests > 1
    if by_time:
        scale = 1 / (1_000 * size)
        origin = record.intervals[0].begins
        edges = [(each.begins - origin) * scale for each in intervals] + [(intervals[-1].ends - origin) * scale]
        axes.set_xlabel(f"time of the trace in {_UNITS_IN_FULL[unit]}")
        full = record.first_eviction and (record.first_eviction.begins - origin) * scale
    else:
        edges = [float(each.first_request) for each in intervals] + [
            intervals[-1].first_request + intervals[-1].requests
        ]
        axes.set_xlabel("request")
        full = record.first_eviction and record.first_eviction.first_request
    rates = [each.hit_blocks / each.blocks for each in intervals]
    axes.stairs(rates, edges, color=PALETTE[0], linewidth=1.5, baseline=None)
    axes.stairs(rates, edges, color=PALETTE[0], alpha=0.14, fill=True)
    if full is not None:
        axes.axvline(
            full, color=PALETTE[1], linewidth=1.5, linestyle=(0, (1, 2)), label="first eviction: the cache is full"
        )
    overall = record.result.block_hit_rate or 0.0
    axes.axhline(overall, color=FAINT, linewidth=1.5, linestyle=(0, (4, 3)), label=f"all requests: {overall:.1%}")
    axes.set_xlim(edges[0], edges[-1] if edges[-1] > edges[0] else edges[0] + 1)
    axes.set_ylim(0, _ceiling(max(rates)))
    axes.set_ylabel("hit rate in blocks")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(_marks(axes), steps=[1, 2, 5, 10], integer=not by_time))
    _finish(axes)


def draw_hit_curve(axes: Axes, curve: HitCurve, capacity: int | None, percent: int) -> None:
    """Draw the hit rate by capacity; mark the replay's, and the one that so much of an endless cache's hits take."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter  # noqa: PLC0415 - an extra

    largest = curve.distinct_blocks
    target = curve.smallest_capacity(percent)
    smallest = min([default_capacities(curve)[0], largest, *filter(None, (capacity, target))])
    right = max(largest, capacity or 0, 10 * smallest)
    capacities = np.unique(np.geomspace(smallest, largest, _POINTS).round().astype(np.int64))
    rates = curve.hit_blocks[capacities] / curve.blocks
    endless = float(rates[-1])
    axes.set_xscale("log")
    axes.plot([*capacities, right], [*rates, endless], color=PALETTE[0], clip_on=False)
    axes.axhline(
        endless,
        color=FAINT,
        linewidth=1.5,
        linestyle=(0, (4, 3)),
        label=f"endless cache: {endless:.1%}, {largest:,} blocks",
    )
    if target is not None:
        rate = float(curve.hit_blocks[target] / curve.blocks)
        label = f"{percent}% of its hits: {rate:.1%}, {target:,} blocks"
        _mark(axes, target, rate, PALETTE[1], "D", label)
    if capacity is not None:
        rate = float(curve.hit_blocks[min(capacity, largest)] / curve.blocks)
        _mark(axes, capacity, rate, PALETTE[0], "o", f"this replay: {rate:.1%}, {capacity:,} blocks")
    axes.set_xlim(smallest, right)
    axes.set_ylim(0, _ceiling(endless))
    axes.set_xlabel("capacity in blocks")
    axes.set_ylabel("hit rate in blocks")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    _mark_round_numbers(axes)
    _finish(axes)


def draw_lifetime(axes: Axes, ages: BlockAges, *, in_time: bool) -> None:
    """Draw how many of the evicted blocks lived no longer than so many requests, or than so much time of the trace."""
    _draw_ages(axes, [(ages.lifetime, "evicted blocks", PALETTE[1])], in_time=in_time)
    axes.set_xlabel("time from insert to eviction" if in_time else "requests from insert to eviction")
    axes.set_ylabel("part of the blocks")
    _finish(axes)


def draw_idle(axes: Axes, ages: BlockAges, *, in_time: bool) -> None:
    """Draw how long blocks had not been used when they were evicted, and when they were hit."""
    lines = [
        (ages.idle_at_eviction, "evicted blocks", PALETTE[1]),
        (ages.idle_at_hit, "hit blocks", PALETTE[0]),
    ]
    _draw_ages(axes, lines, in_time=in_time)
    axes.set_xlabel("time since the block's last use" if in_time else "requests since the block's last use")
    axes.set_ylabel("part of the blocks")
    _finish(axes)


def draw_first_token(axes: Axes, waiting: Waiting) -> None:
    """Draw how many requests have their first token within so much time, with and without caches."""
    lines: list[_Line] = []
    for name, served, colour in (
        ("with the cache", waiting.with_cache, PALETTE[0]),
        ("with an endless one", waiting.endless, PALETTE[2]),
        ("without a cache", waiting.without_cache, PALETTE[1]),
    ):
        seconds = served.first_token_seconds
        # Without a limit of blocks, the cache is the endless one.
        if seconds.size and not (lines and served is waiting.with_cache):
            values, counts = np.unique(seconds, return_counts=True)
            lines.append((values, np.cumsum(counts) / seconds.size, name, colour))
    _draw_shares(axes, lines)
    _mark_round_times(axes, 1.0)
    axes.set_xlabel("time from arrival to first token")
    axes.set_ylabel("part of the requests")
    _finish(axes)


def as_svg(draw: Drawing, width: int, height: int, prefix: str) -> str:
    """Draw a chart as an element of a page, whose style sheet says what its colours are.

    Parameters
    ----------
    draw : callable
        Draws on axes.
    width, height : int
        In pixels.
    prefix : str
        Put before every name in it, so that names are different from chart to chart.

    Returns
    -------
    str
        Inside of an ``svg`` element of that size: without that element, and without anything from elsewhere.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    with picture_style(font_size=_PIXELS_OF_LETTERS):
        figure = Figure(figsize=(width / _DOTS_PER_INCH, height / _DOTS_PER_INCH), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", dpi=_DOTS_PER_INCH, metadata={"Date": None})
    inside = re.sub(r"^.*?<svg[^>]*>|<metadata>.*?</metadata>|</svg>\s*$", "", file.getvalue(), flags=re.DOTALL)
    # A style sheet in an element of a page is one of the whole page.
    inside = re.sub(r"<style.*?</style>", "", inside, flags=re.DOTALL)
    # The page's own font takes up no more room than the one that was measured.
    inside = re.sub(r" font-family: [^;\"]*;?", "", inside)
    used = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", inside))
    inside = re.sub(r' id="([^"]+)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "", inside)
    inside = re.sub(r"(url\(|href=\")#", rf"\1#{prefix}-", inside)
    inside = re.sub(r"\n\s*", "\n", inside).replace(' transform="rotate(-0 ', ' transform="rotate(0 ')
    for colour, name in COLOUR_NAMES.items():
        inside = inside.replace(colour, f"var({name})")
    return inside


def _draw_ages(axes: Axes, lines: Iterable[tuple[Ages, str, str]], *, in_time: bool) -> None:
    shares = []
    for ages, name, colour in lines:
        if ages.total:
            shares.append((ages.values.astype(np.float64), np.cumsum(ages.counts) / ages.total, name, colour))
    _draw_shares(axes, shares)
    if in_time:
        _mark_round_times(axes, 0.001)
    else:
        _mark_round_numbers(axes)


def _draw_shares(axes: Axes, lines: Sequence[_Line]) -> None:
    """Draw for each value the part that is at or below it, on a logarithmic scale."""
    from matplotlib.ticker import PercentFormatter  # noqa: PLC0415 - an extra

    axes.set_xscale("log")
    # What comes before the first percent would stretch the axis for a line that lies on the ground; and nothing at all
    # has no place on it, so that a line may begin above the ground.
    first = [
        values[max(np.searchsorted(shares, 0.01), np.searchsorted(values, 0, "right"))]
        for values, shares, *_ in lines
        if values[-1]
    ]
    left, right = (float(min(first)), max(float(values[-1]) for values, *_ in lines)) if first else (1.0, 1.0)
    margin = max((right / left) ** 0.03, 1.02) if right > left else 3.0
    left, right = left / margin, right * margin
    for values, shares, name, colour in lines:
        shown = np.arange(values.size)
        if values.size > _POINTS:
            shown = np.unique(np.searchsorted(shares, np.linspace(float(shares[0]), 1, _POINTS) - 1e-12))
        shown = shown[values[shown] > left]
        before = float(shares[np.searchsorted(values, left, "right") - 1]) if values[0] <= left else 0.0
        x = [left, *values[shown], right]
        y = [before, *shares[shown], 1.0]
        axes.plot(x, y, color=colour, drawstyle="steps-post", label=name)
    axes.set_xlim(left, right)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_ticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _finish(axes: Axes) -> None:
    """Add what every chart has: level lines, and above it what its lines are if they are several."""
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    if not handles or (len(handles) == 1 and len(axes.lines) == 1 and axes.get_xscale() == "log"):
        return
    letters = sum(_LETTERS_PER_SAMPLE + len(label) for label in labels)
    in_one_row = letters * _INCHES_PER_LETTER * _letter_size() < _width(axes) - _INCHES_BESIDE
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.01),
        ncols=len(labels) if in_one_row else 1,
        frameon=False,
        borderaxespad=0,
        borderpad=0.1,
        handlelength=1.6,
        columnspacing=1.6,
        numpoints=1,
    )


def _mark(axes: Axes, x: float, y: float, colour: str, marker: str, label: str) -> None:
    line: dict[str, Any] = {"linestyle": "none", "clip_on": False, "zorder": 5, "markersize": 8}
    axes.plot([x], [y], color=colour, marker=marker, label=label, **line)
    axes.plot([x, x], [0, y], color=colour, linewidth=1, linestyle=":")


def _mark_round_numbers(axes: Axes) -> None:
    """Mark powers of ten on a logarithmic axis, and 2 and 5 times as much where there is room."""
    left, right = axes.get_xlim()
    first, last = int(np.floor(np.log10(left))), int(np.ceil(np.log10(right)))
    # Blocks and requests are whole.
    groups = [[step * 10.0**power for power in range(max(first, 0), last + 1)] for step in (1, 2, 5)]
    # Either all of the halves of a decade, or none.
    _mark_logarithmic(
        axes, [[number] for number in groups[0]] + [groups[1] + groups[2]], lambda number: f"{number:,.6g}"
    )


def _mark_round_times(axes: Axes, seconds_per_unit: float) -> None:
    """Mark what is round in one unit of time or another on a logarithmic axis."""
    times = [[step * seconds / seconds_per_unit] for step in (1, 2, 5, 3) for seconds in _ROUND_SECONDS]
    _mark_logarithmic(axes, times, lambda value: duration(value * seconds_per_unit))


def _mark_logarithmic(axes: Axes, groups: Iterable[Sequence[float]], name: Callable[[float], str]) -> None:
    """Mark those groups of values, as far as they are on the axis, that leave room for the ones before them."""
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415 - an extra

    left, right = axes.get_xlim()
    inches_per_power = max(_width(axes) - _INCHES_BESIDE, 1.0) / np.log10(right / left)
    inches_per_letter = _INCHES_PER_LETTER * _letter_size()
    # Where each word begins and ends, half of a space included.
    taken: list[tuple[float, float]] = []
    marked: list[float] = []
    for group in groups:
        values = sorted(value for value in group if left <= value <= right)
        centres = [float(np.log10(value / left)) * inches_per_power for value in values]
        halves = [(len(name(value)) + 2) / 2 * inches_per_letter for value in values]
        words = [(centre - half, centre + half) for centre, half in zip(centres, halves, strict=True)]
        ends = sorted([*taken, *words])
        if all(end <= begin for (_, end), (begin, _) in pairwise(ends)):
            taken = ends
            marked += values
    axes.xaxis.set_ticks(marked or [(left * right) ** 0.5])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: name(value)))
    axes.xaxis.set_ticks([], minor=True)


def _ceiling(rate: float) -> float:
    """Give the end of an axis of rates, in steps of a tenth or a hundredth: a rate of 30% does not fill the axis."""
    step = 0.1 if rate > 0.1 else 0.01
    return float(min(max(np.ceil(rate * 1.02 / step) * step, step), 1.0))


def _marks(axes: Axes) -> int:
    return _MARKS if _width(axes) > _NARROW else _MARKS_IF_NARROW


def _width(axes: Axes) -> float:
    """Inches that axes take of their figure with what belongs to them."""
    grid = axes.get_subplotspec()
    columns = 1 if grid is None else grid.get_gridspec().ncols / len(grid.colspan)
    return float(axes.figure.bbox.width / axes.figure.dpi) / columns


def _letter_size() -> float:
    """Points that letters are high."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra

    return float(mpl.rcParams["font.size"])


def _digits(number: float) -> str:
    """Write a number with three digits and no powers of ten."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
