"""Writes a comparison into the documentation: a page with the table, and a plot of grouped bars on a log scale.

Relies on Matplotlib, which nothing else here needs.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.comparison import DASH, Comparison
from benchmarks.comparison_table import notes
from benchmarks.peers import PEERS

__all__ = ["write_docs"]

# By row: the label of the group of bars.
_BARS = {
    "lookup_256": "look-up\n256",
    "lookup_2048": "look-up\n2,048",
    "again_2048": "again\n2,048",
    "lookup_32768": "look-up\n32,768",
    "miss_2048": "miss\n2,048",
    "insert_2048": "insert\n2,048",
    "evict_1": "evict\n1 block",
    "evict_64": "evict\n64 blocks",
    "evict_4096": "evict\n4,096 blocks",
    "simulator": "chat\nrequest",
}
_US_PER_S = 1_000_000
_GROUP_WIDTH = 0.85
_SIZE_IN_INCHES = (12.0, 5.0)
_DOTS_PER_INCH = 150


def write_docs(comparison: Comparison, docs: Path) -> None:
    """Write ``comparison.rst``, ``comparison.svg`` and ``comparison.png``.

    Parameters
    ----------
    comparison : Comparison
        What was measured.
    docs : Path
        The directory to write them to.
    """
    (docs / "comparison.rst").write_text(_page(comparison))
    # Fixed, so that the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "comparison", "svg.fonttype": "none"}):
        figure = _plot(comparison)
        figure.savefig(docs / "comparison.svg", metadata={"Date": None})
        figure.savefig(docs / "comparison.png", dpi=_DOTS_PER_INCH)


def _page(comparison: Comparison) -> str:
    labels = [PEERS[name].label for name in comparison.names]
    lines = [
        ".. Written by benchmarks/compare.py --write-docs: run that instead of editing this page.",
        "",
        ".. _comparison:",
        "",
        "Comparison",
        "==========",
        "",
        "Prefix caches of other projects and this one, given identical work: sequences of 2,048 tokens in blocks of",
        "16, half of which begin with one of 16 system prompts of 1,024 tokens. This page was made by",
        "``python -m benchmarks.compare --write-docs``.",
        "",
        ".. image:: comparison.svg",
        "   :alt: Microseconds of each operation, by peer, on a log scale",
        "",
        ".. csv-table::",
        f"   :header: {_as_csv(['', 'unit', *labels])}",
        "",
    ]
    for row in comparison.rows:
        cells = [comparison.cell(name, row.key) for name in comparison.names]
        lines.append(f"   {_as_csv([row.title, row.unit, *cells])}")
    lines += ["", *(f"* {note}" for note in notes(comparison)), "", "What was timed:", ""]
    for name in comparison.names:
        versions = ", ".join(f"{package} {version}" for package, version in comparison.versions[name].items())
        lines.append(f"* {PEERS[name].label} ({versions}): {comparison.calls[name]}.")
    if comparison.missing:
        lines += ["", "Not measured:", ""]
        for missing in comparison.missing:
            commands = ", then ".join(f"``{command}``" for command in missing.recipe)
            lines.append(f"* {missing.label}, {_in_one_line(missing.reason)}. To get it: {commands}.")
    return "\n".join(lines) + "\n"


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def _as_csv(cells: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="").writerow(cells)
    return text.getvalue()


def _bar(comparison: Comparison, name: str, key: str) -> float:
    """Give what a bar shows, in microseconds, so that less is better throughout."""
    value = comparison.figure(name, key)
    if value is None:
        return float("nan")
    return _US_PER_S / value if key == "simulator" else value


def _plot(comparison: Comparison) -> Figure:
    keys = [row.key for row in comparison.rows if row.key in _BARS]
    figure = Figure(figsize=_SIZE_IN_INCHES, layout="constrained")
    axes = figure.subplots()
    width = _GROUP_WIDTH / len(comparison.names)
    middles = np.arange(len(keys))
    for number, name in enumerate(comparison.names):
        offset = (number - (len(comparison.names) - 1) / 2) * width
        heights = [_bar(comparison, name, key) for key in keys]
        axes.bar(middles + offset, heights, width, label=PEERS[name].label)
        for middle in middles[np.isnan(heights)]:
            # On the axis itself, which has no 0 where the scale is a logarithm.
            axes.annotate(DASH, (middle + offset, 0), xycoords=axes.get_xaxis_transform(), ha="center", va="bottom")
    axes.set_yscale("log")
    axes.set_ylabel("microseconds (less is better)")
    axes.set_xticks(middles, [_BARS[key] for key in keys])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=len(comparison.names), fontsize="small")
    return figure
