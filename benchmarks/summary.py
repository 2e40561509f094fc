"""The table at the end of a run, and the targets that are ratios between two rows of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.rows import Figures
from benchmarks.sizes import FULL
from benchmarks.yardsticks import USUAL_EMPTY_KERNEL

__all__ = ["RowRatio", "judge", "print_summary"]

_WIDTH = 240
# Above, below, and how many times the second the first may take.
_RATIOS = [
    *((f"cold {how}, many blocks", f"cold {how}, usual", 2.0) for how in ("in order", "scattered")),
    *(
        (f"snapshots {depths}, {outcome}, {entries}", f"snapshots {depths}, {outcome}, none", limit)
        for depths in ("on the grid", "off the grid")
        for outcome in ("deepest hit", "complete miss")
        for entries, limit in (("some", 1.3), ("more", 1.5), ("spilled", 2.0))
    ),
    *(
        (f"evict {what}, {num_blocks}, many blocks", f"evict {what}, {num_blocks}, usual", 3.0)
        for what in ("sequences", "leaves")
        for num_blocks in (64, 4_096)
    ),
]


class RowRatio(NamedTuple):
    """A target that is a ratio between the medians of two rows of one run."""

    row: str
    to: str
    ratio: float
    target: float
    met: bool


def judge(rows: Sequence[Figures]) -> list[RowRatio]:
    """Compute the targets between rows that were both run.

    Parameters
    ----------
    rows : sequence of Figures
        The rows of the run.

    Returns
    -------
    list of RowRatio
        One for each target.
    """
    by_key = {row.key: row for row in rows if row.key}
    ratios = []
    for above, below, limit in _RATIOS:
        if above in by_key and below in by_key:
            ratio = by_key[above].median / by_key[below].median
            ratios.append(RowRatio(by_key[above].row, by_key[below].row, ratio, limit, ratio <= limit))
    return ratios


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def _verdict(met: bool | None) -> str:
    return "" if met is None else "[green]yes[/]" if met else "[bold red]NO[/]"


def _target(row: Figures) -> str:
    if row.target is None or row.target_here is None:
        return ""
    if row.target == row.target_here:
        return _number(row.target)
    return f"{_number(row.target)} ({_number(row.target_here)})"


def _table(rows: Sequence[Figures]) -> Table:
    table = Table(title="Benchmarks", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("row", no_wrap=True)
    for heading in ("median", "min", "p99", "max"):
        table.add_column(heading, justify="right")
    table.add_column("unit")
    for heading in ("ns per\nblock", "bare\ncompare", "empty\nkernel", "ratio", "target\n(here)"):
        table.add_column(heading, justify="right")
    table.add_column("met")
    table.add_column("other yardstick, notes")
    for group, some in groupby(sorted(rows, key=lambda row: (row.group, row.place)), key=lambda row: row.group):
        table.add_row(f"[bold]{group}[/]")
        for row in some:
            table.add_row(
                row.row,
                *map(_number, (row.median, row.min, row.p99, row.max)),
                row.unit,
                *map(_number, (row.ns_per_block, row.comparison, row.empty_kernel_ns, row.ratio)),
                _target(row),
                _verdict(row.met),
                "; ".join(part for part in (row.yardstick, row.note) if part),
            )
    return table


def _ratio_table(ratios: Sequence[RowRatio]) -> Table:
    table = Table(title="Targets between rows", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("median of", "by that of"):
        table.add_column(heading)
    for heading in ("ratio", "target"):
        table.add_column(heading, justify="right")
    table.add_column("met")
    for ratio in ratios:
        table.add_row(ratio.row, ratio.to, _number(ratio.ratio), _number(ratio.target), _verdict(ratio.met))
    return table


def print_summary(rows: Sequence[Figures], scale: str, measurement: float, skipped: Sequence[str]) -> None:
    """Print everything that was measured.

    Parameters
    ----------
    rows : sequence of Figures
        The rows of the run.
    scale : str
        Caches of other sizes than the full ones are judged by no target.
    measurement : float
        Nanoseconds of a call that does nothing.
    skipped : sequence of str
        What was left out, and why.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print()
    console.print(_table(rows))
    if scale == FULL:
        console.print()
        console.print(_ratio_table(judge(rows)))
    console.print()
    console.print(
        f"Every figure includes the {measurement:.0f} ns that timing a call that does nothing takes. Targets in units "
        f"of time hold where an empty kernel call costs {USUAL_EMPTY_KERNEL:.0f} ns, and are scaled by what it cost "
        "here."
    )
    if scale != FULL:
        console.print(
            f"Scale {scale}: shows that everything runs; the caches are too small for the targets to mean anything."
        )
    for reason in dict.fromkeys(skipped):
        console.print(f"Left out: {reason.removeprefix('Skipped: ')}")
