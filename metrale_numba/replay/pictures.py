"""Pictures of what replays come to, all in one style: light, few lines, each named where it runs.

Relies on Matplotlib, which the extra ``plots`` brings and which is imported when something is drawn, and on no
display. Promises the same file for the same figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from metrale_numba.errors import MetraleError
from metrale_numba.replay.curve import HitCurve, default_capacities

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = [
    "BYTES_PER_GIGABYTE",
    "FAINT",
    "GRID",
    "INK",
    "PALETTE",
    "PICTURE_FORMATS",
    "PictureError",
    "check_picture",
    "draw_curve",
    "new_axes",
    "picture_style",
    "save_picture",
]

PICTURE_FORMATS: Final = (".svg", ".png", ".pdf")
"""What a picture's file name may end with."""

PALETTE: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of lines, told apart by the colour-blind as well: those of Okabe and Ito that show on white."""

BYTES_PER_GIGABYTE: Final = 1_000_000_000

INK: Final = "#262626"
"""Colour of what is to be read."""
FAINT: Final = "#8a8a8a"
"""Colour of axes and of what is there to compare with."""
GRID: Final = "#e6e6e6"
"""Colour of lines behind the others."""

_SIZE_IN_INCHES = (8.0, 4.6)
_DOTS_PER_INCH = 160
# Points of a curve, more than a line of this size shows.
_POINTS = 400
# Times that an axis of capacities goes up at least: one without any length has no scale.
_NARROWEST = 10
# For the line of the endless cache and the words above it.
_HEADROOM = 1.15
# Parts of the axes that the words at a mark take.
_WIDTH_OF_WORDS = 0.4
_HEIGHT_OF_WORDS = 0.14
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlepad": 12,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    # Text stays text, and names within the file do not change from run to run.
    "svg.fonttype": "none",
    "svg.hashsalt": "metrale_numba",
    "pdf.fonttype": 42,
}


class PictureError(MetraleError):
    """A picture that cannot be drawn: by that name, or without Matplotlib."""


def check_picture(path: str | os.PathLike[str]) -> None:
    """Make sure that a picture can be drawn, before the work is done that it is to show.

    Parameters
    ----------
    path : str or path
        The file to write it to.

    Raises
    ------
    PictureError
        If the name ends with none of `PICTURE_FORMATS`, the directory does not exist, or Matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in PICTURE_FORMATS:
        raise PictureError(f"{os.fspath(path)}: the name must end with one of {', '.join(PICTURE_FORMATS)}")
    if not Path(path).parent.is_dir():
        raise PictureError(f"{os.fspath(path)}: there is no such directory")
    try:
        import matplotlib  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise PictureError("drawing needs Matplotlib: pip install 'metrale-numba[plots]'") from None


@contextmanager
def picture_style(*, font_size: float = 10) -> Iterator[None]:
    """Have everything that is drawn meanwhile look like all pictures, whatever the user has configured.

    Parameters
    ----------
    font_size : float, default 10
        Of most letters, in points.
    """
    import matplotlib as mpl  # noqa: PLC0415 - an extra

    with mpl.rc_context():
        mpl.rcdefaults()
        # Typed in newest releases only, and by a list of all names.
        settings: Any = mpl.rcParams
        settings.update(_STYLE, **{"font.size": font_size})
        yield


@contextmanager
def new_axes() -> Iterator[tuple[Figure, Axes]]:
    """Make a figure with one pair of axes, in the style of all pictures; it holds, too, for what is drawn meanwhile.

    Yields
    ------
    figure : matplotlib.figure.Figure
        To be saved with :func:`save_picture` before the block ends.
    axes : matplotlib.axes.Axes
        With a grid of level lines and nothing else.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    with picture_style():
        figure = Figure(figsize=_SIZE_IN_INCHES, layout="constrained", facecolor="white")
        axes = figure.subplots()
        axes.grid(axis="y", color=GRID)
        axes.set_axisbelow(True)
        yield figure, axes


def save_picture(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, in the format that its name ends with.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure, drawn within :func:`new_axes`.
    path : str or path
        The file, which is overwritten.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    dates: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    suffix = Path(path).suffix.lower()
    figure.savefig(os.fspath(path), dpi=_DOTS_PER_INCH, metadata=dates.get(suffix, {}))


def draw_curve(
    curve: HitCurve,
    path: str | os.PathLike[str],
    *,
    title: str,
    percent: int = 90,
    bytes_per_block: float | None = None,
    devices: int = 1,
) -> None:
    """Draw how the hit rate goes with the capacity.

    Parameters
    ----------
    curve : HitCurve
        What to draw.
    path : str or path
        The file, as :func:`save_picture` takes it.
    title : str
        What was played.
    percent : int, default 90
        The part of an endless cache's hits at which a mark is set.
    bytes_per_block : float, optional
        For a second scale, in GB.
    devices : int, default 1
        Devices on each of which a block takes so many bytes.

    Raises
    ------
    PictureError
        If there is no block in the curve.
    OSError
        If the file cannot be written.
    """
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415 - an extra

    if curve.blocks == 0:
        raise PictureError("there is nothing to draw: the prompts have no block")
    target = curve.smallest_capacity(percent)
    largest = curve.distinct_blocks
    smallest = default_capacities(curve)[0]
    capacities = np.unique(np.geomspace(smallest, largest, _POINTS).round().astype(np.int64))
    rates = curve.hit_blocks[capacities] / curve.blocks
    with new_axes() as (figure, axes):
        axes.set_title(title)
        axes.set_xscale("log")
        axes.set_xlim(smallest, max(largest, _NARROWEST * smallest))
        axes.set_ylim(0, max(float(rates[-1]) * _HEADROOM, 0.01))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g}%" if rate <= 1 else ""))
        _tick(axes.xaxis)
        axes.set_xlabel("capacity in blocks")
        axes.set_ylabel("hit rate in blocks")
        axes.plot(capacities, rates, color=PALETTE[0], clip_on=False)

        axes.axhline(float(rates[-1]), color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"endless cache: {rates[-1]:.1%} with {largest:,} blocks",
            (0, float(rates[-1])),
            xycoords=axes.get_yaxis_transform(),
            xytext=(6, 5),
            textcoords="offset points",
        )
        if target is not None:
            _mark(axes, curve, target, percent, bytes_per_block)
        if bytes_per_block:
            _add_gigabytes(axes, bytes_per_block / BYTES_PER_GIGABYTE, devices)
        save_picture(figure, path)


def _mark(axes: Axes, curve: HitCurve, target: int, percent: int, bytes_per_block: float | None) -> None:
    """Mark where the curve reaches its target, in words and with lines to both axes."""
    rate = float(curve.hit_blocks[target] / curve.blocks)
    size = "" if bytes_per_block is None else f" = {target * bytes_per_block / BYTES_PER_GIGABYTE:,.4g} GB"
    left, right = axes.get_xlim()
    axes.plot([target, target, left], [0, rate, rate], color=PALETTE[1], linewidth=1, linestyle=":")
    axes.plot([target], [rate], color=PALETTE[1], marker="o", clip_on=False)

    # The words go where no curve can run, as it never falls: below it on the right, or else on the left, under the
    # line to its height, or at the bottom if the curve is as high by there.
    words_end = min(int(left * (right / left) ** _WIDTH_OF_WORDS), curve.distinct_blocks)
    if target < left * (right / left) ** (1 - _WIDTH_OF_WORDS):
        place: dict[str, Any] = {"xy": (target, rate), "xytext": (10, -6), "ha": "left", "va": "top"}
    elif curve.hit_blocks[words_end] / curve.blocks < rate - _HEIGHT_OF_WORDS * axes.get_ylim()[1]:
        place = {"xy": (left, rate), "xytext": (6, -5), "ha": "left", "va": "top"}
    else:
        place = {"xy": (target, 0), "xytext": (-8, 6), "ha": "right", "va": "bottom"}
    words = f"{percent}% of its hits: {rate:.1%}\nwith {target:,} blocks{size}"
    axes.annotate(words, **place, textcoords="offset points", color=PALETTE[1])


def _add_gigabytes(axes: Axes, gigabytes_per_block: float, devices: int) -> None:
    """Put a second scale on top of an axis of blocks."""

    def gigabytes(blocks: Any) -> Any:
        return blocks * gigabytes_per_block

    def blocks(gigabytes: Any) -> Any:
        return gigabytes / gigabytes_per_block

    upper = axes.secondary_xaxis("top", functions=(gigabytes, blocks))
    upper.set_xlabel("capacity in GB of KV" if devices == 1 else f"capacity in GB of KV on each of {devices} devices")
    _tick(upper.xaxis)


def _tick(axis: Axis) -> None:
    """Write round numbers on a logarithmic axis, in full."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415 - an extra

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())
