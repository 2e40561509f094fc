"""The picture of a comparison of eviction policies: hit rate by capacity, a line for each.

Relies on :mod:`metrale_numba.replay.pictures` for the style, and with it on Matplotlib when something is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from metrale_numba.replay.pictures import FAINT, INK, PALETTE, new_axes, save_picture
from metrale_numba.replay.policies import OPTIMUM, POLICIES, PolicyResult

__all__ = ["draw_policies"]

_COLORS: Final = dict(zip(POLICIES, (*PALETTE[: len(POLICIES) - 1], FAINT), strict=True))
# Marks tell lines apart that lie on one another, and those without colours.
_MARKERS: Final = dict(zip(POLICIES, "osD^.", strict=True))


def draw_policies(results: Sequence[PolicyResult], path: str | os.PathLike[str], *, title: str) -> None:
    """Draw the hit rates of policies over capacities.

    Parameters
    ----------
    results : sequence of PolicyResult
        Of one trace, each policy at the same capacities; at least one. A rate of nothing is drawn as 0.
    path : str or path
        The file, as :func:`~metrale_numba.replay.pictures.save_picture` takes it.
    title : str
        What was played.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter  # noqa: PLC0415 - an extra

    capacities = sorted({result.capacity for result in results})
    with new_axes() as (figure, axes):
        # What is played may be named like a formula.
        axes.set_title(title, parse_math=False)
        axes.set_xscale("log")
        axes.set_xticks(capacities)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda capacity, _: f"{capacity:,.0f}"))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.set_xlabel("capacity in blocks")
        axes.set_ylabel("hit rate in blocks")
        for policy in dict.fromkeys(result.policy for result in results):
            rates = {each.capacity: each.block_hit_rate or 0.0 for each in results if each.policy == policy}
            axes.plot(
                capacities,
                [rates[capacity] for capacity in capacities],
                color=_COLORS[policy],
                marker=_MARKERS[policy],
                linestyle=(0, (4, 3)) if policy == OPTIMUM else "-",
                label=policy,
                clip_on=False,
            )
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, labelcolor=INK)
        save_picture(figure, path)
