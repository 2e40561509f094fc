"""A recorded replay as one page that needs nothing beside it, or as a picture of its main charts.

Relies on the extra ``report``, Jinja and Matplotlib, which are imported when a report is made. A page has no script,
and asks for nothing from elsewhere. Promises the same file for the same record.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from metrale_numba.errors import MetraleError
from metrale_numba.replay.charts import (
    Drawing,
    draw_first_token,
    draw_hit_curve,
    draw_hits_over_time,
    draw_idle,
    draw_lifetime,
)
from metrale_numba.replay.pictures import PICTURE_FORMATS, picture_style, save_picture
from metrale_numba.replay.recorder import Record
from metrale_numba.replay.report_parts import PERCENT, headline, page_parts, percent, subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ReportError", "check_report", "write_report"]

_PAGE: Final = ".html"
_FORMATS: Final = (_PAGE, *PICTURE_FORMATS)

_INTERRUPTED: Final = "Interrupted: there was more to play, and more to serve."

_INCHES_OF_A_ROW: Final = 3.6
_INCHES_ACROSS: Final = 12.0
_POINTS_OF_A_LINE: Final = 15


class ReportError(MetraleError):
    """A report that cannot be made: by that name, or without the packages it takes."""


def check_report(path: str | os.PathLike[str]) -> None:
    """Make sure that a report can be made, before the work is done that it is to show.

    Parameters
    ----------
    path : str or path
        The file to write it to.

    Raises
    ------
    ReportError
        If the name ends with none of .html, .svg, .png and .pdf, the directory does not exist, or a package of the
        extra ``report`` is not installed.
    """
    if Path(path).suffix.lower() not in _FORMATS:
        raise ReportError(f"{os.fspath(path)}: the name must end with one of {', '.join(_FORMATS)}")
    if not Path(path).parent.is_dir():
        raise ReportError(f"{os.fspath(path)}: there is no such directory")
    try:
        import matplotlib  # noqa: F401, PLC0415 - an extra

        if _is_page(path):
            import jinja2  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise ReportError("a report needs Jinja and Matplotlib: pip install 'metrale-numba[report]'") from None


def write_report(record: Record, path: str | os.PathLike[str], *, title: str, interrupted: bool = False) -> None:
    """Write what a recorded replay came to: as a page if the name ends with .html, or else as a picture.

    Parameters
    ----------
    record : Record
        What to show.
    path : str or path
        The file, which is overwritten; as :func:`check_report` takes it.
    title : str
        What was played.
    interrupted : bool, default False
        Whether there would have been more to play.

    Raises
    ------
    ReportError
        If a picture is asked for and no prompt has a block.
    OSError
        If the file cannot be written.
    """
    # A name of a file may hold what no text can.
    title = title.encode(errors="replace").decode()
    if _is_page(path):
        Path(path).write_text(_page(record, title, interrupted=interrupted), encoding="utf-8")
    else:
        _draw_picture(record, path, title, interrupted=interrupted)


def _is_page(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix.lower() == _PAGE


def _page(record: Record, title: str, *, interrupted: bool) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - an extra

    import metrale_numba  # noqa: PLC0415 - which imports this package

    environment = Environment(
        loader=PackageLoader("metrale_numba.replay"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page: str = environment.get_template("report.html").render(
        heading=f"Replay of {title}",
        subject=subject(record),
        warning=_INTERRUPTED if interrupted else "",
        figures=headline(record),
        parts=page_parts(record),
        version=metrale_numba.__version__,
    )
    return page


def _draw_picture(record: Record, path: str | os.PathLike[str], title: str, *, interrupted: bool) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    result = record.result
    if not result.blocks:
        raise ReportError("there is nothing to draw: the prompts have no block")
    in_time = record.milliseconds > 0
    ages = record.in_milliseconds if in_time else record.in_requests
    waiting = record.waiting
    panels: list[tuple[str, Drawing]] = [
        ("Hit rate by capacity", lambda axes: draw_hit_curve(axes, record.curve, result.capacity, PERCENT))
    ]
    if waiting is not None and waiting.with_cache.result.first_token is not None:
        panels.append(("Time to first token", lambda axes: draw_first_token(axes, waiting)))
    if result.evicted_blocks:
        panels.append(("How long blocks live", lambda axes: draw_lifetime(axes, ages, in_time=in_time)))
    if result.evicted_blocks or result.hit_blocks:
        panels.append(("How long blocks are idle", lambda axes: draw_idle(axes, ages, in_time=in_time)))
    rows = 1 + -(-len(panels) // 2)
    with picture_style():
        figure = Figure(figsize=(_INCHES_ACROSS, _INCHES_OF_A_ROW * rows), layout="constrained", facecolor="white")
        grid = figure.add_gridspec(rows, 2)
        rate = f"Hit rate {percent(result.block_hit_rate)} in blocks, {percent(result.token_hit_rate)} in tokens."
        words = f"{subject(record)} {rate}" + (f"\n{_INTERRUPTED}" if interrupted else "")
        figure.suptitle(
            f"Replay of {title}\n{words}",
            x=0.01,
            ha="left",
            # Names of files may hold a dollar, which would begin a formula.
            parse_math=False,
        )
        places: list[Any] = [grid[0, :], *(grid[1 + place // 2, place % 2] for place in range(len(panels)))]
        panels.insert(0, ("Hit rate over time", lambda axes: draw_hits_over_time(axes, record)))
        drawn = []
        for place, (heading, draw) in zip(places, panels, strict=True):
            axes = figure.add_subplot(place)
            draw(axes)
            drawn.append((axes, heading, place.rowspan.start))
        for axes, heading, row in drawn:
            # Above the legend, at the same height as its neighbour.
            lines = max(_legend_lines(other) for other, _, other_row in drawn if other_row == row)
            axes.set_title(heading, pad=10 + _POINTS_OF_A_LINE * lines)
        save_picture(figure, path)


def _legend_lines(axes: Axes) -> int:
    legend = axes.get_legend()
    if legend is None:
        return 0
    height: float = legend.get_window_extent().height / axes.figure.dpi * 72
    return max(round(height / _POINTS_OF_A_LINE), 1)
