"""``metrale-numba policies``: what other eviction policies would have hit, as a table, JSON, CSV or a picture.

The whole trace is held as flat arrays, since the optimum needs to know the future.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metrale_numba.cli.interrupts import CtrlC, exit_interrupted, read_interruptibly
from metrale_numba.cli.kernels import compile_kernels
from metrale_numba.cli.progress import error_console, request_progress
from metrale_numba.cli.results import printing_results
from metrale_numba.cli.sources import BadTrace, ChosenSource, Source, source_options
from metrale_numba.interface import NONE
from metrale_numba.replay import Request, TraceError
from metrale_numba.replay.pictures import PICTURE_FORMATS, PictureError, check_picture
from metrale_numba.replay.policies import OPTIMUM, POLICIES, PolicyResult, simulate
from metrale_numba.replay.policy_picture import draw_policies
from metrale_numba.replay.prefix_nodes import PrefixNodes

__all__ = ["policies"]

# No engine has larger blocks.
_LARGEST_BLOCK_SIZE = 4_096
_CAPACITY = click.IntRange(1, NONE)
# So many make a table that can still be read.
_MOST_CAPACITIES = 32
# Of the blocks that differ, in hundredths: a cache that holds all of them evicts nothing.
_DEFAULT_PERCENT = (1, 3, 10, 30)


class _Compared(NamedTuple):
    """What there is to show."""

    nodes: PrefixNodes
    results: list[PolicyResult]
    """By capacity and then policy, the optimum last; only whole capacities."""


def _as_capacities(context: click.Context, option: click.Parameter, value: str | None) -> list[int] | None:
    """Read numbers of blocks: sorted, each once."""
    if value is None:
        return None
    capacities = {int(_CAPACITY(part.strip(), option, context)) for part in value.split(",")}
    if len(capacities) > _MOST_CAPACITIES:
        raise click.BadParameter(f"these are {len(capacities)}, and at most {_MOST_CAPACITIES} can be compared.")
    return sorted(capacities)


def _as_picture(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """See that a picture can be drawn, before any work is done for it."""
    if value is not None:
        try:
            check_picture(value)
        except PictureError as error:
            raise click.BadParameter(str(error)) from None
    return value


@click.command(short_help="Compare eviction policies on a trace, or on a built-in workload.")
@click.option(
    "--blocks",
    "capacities",
    metavar="N,N,...",
    callback=_as_capacities,
    show_default="1, 3, 10 and 30 % of the blocks that differ",
    help="Blocks the cache may hold.",
)
@click.option(
    "--block-size",
    metavar="B",
    type=click.IntRange(1, _LARGEST_BLOCK_SIZE),
    show_default="16",
    help="Tokens per block of a trace of tokens. Any other has a hash id per block.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values instead of a table.")
@click.option(
    "--plot",
    "picture",
    metavar="FILE",
    callback=_as_picture,
    help=f"Draw the hit rates into a file as well, whose name ends with one of {', '.join(PICTURE_FORMATS)}.",
)
@source_options
@click.pass_context
def policies(
    context: click.Context,
    source: ChosenSource,
    capacities: list[int] | None,
    block_size: int | None,
    as_json: bool,
    as_csv: bool,
    picture: str | None,
) -> None:
    """Play requests through caches that evict by other policies than ours, and print what each would have hit.

    The policies are LRU, which is ours, SIEVE, S3-FIFO, LFU with counts that decay, and the optimum, which knows
    the future and which no policy can beat. All of them evict leaves only: no block goes before those that build
    on it.

    TRACE is a file of JSON lines, plain or packed with gzip or zstd, or - for standard input; without it, a
    built-in workload is made up. Unlike a replay, this holds the whole trace in memory, four bytes for each block
    of each prompt and more for each block that differs. Ctrl-C stops, and prints what is done.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv do not go together.", context)
    with CtrlC() as ctrl_c:
        compared, interrupted = _compared(source, ctrl_c, capacities, block_size)
        # Neither of the two outputs is lost because the other cannot be written.
        unwritten: click.ClickException | None = None
        if picture is not None and not interrupted:
            try:
                _draw(compared, picture, f"Eviction policies: {Path(source.title).name}")
            except click.ClickException as error:
                unwritten = error
        with printing_results():
            if as_json:
                click.echo(_as_json(source, compared, interrupted))
            elif as_csv:
                click.echo(_as_csv(compared), nl=False)
            else:
                _print_table(Console(highlight=False), source, compared, interrupted)
    if unwritten is not None:
        raise unwritten
    if interrupted:
        exit_interrupted(context)


def _compared(
    chosen: ChosenSource, ctrl_c: CtrlC, capacities: list[int] | None, block_size: int | None
) -> tuple[_Compared, bool]:
    """Play all requests of a source under all policies; answers also whether Ctrl-C ended it early."""
    errors = error_console()
    nodes = PrefixNodes.of(())
    results: list[PolicyResult] = []
    try:
        with ExitStack() as stack:
            # Before the kernels are compiled, so that a mistyped name is told of at once.
            with ctrl_c.may_interrupt():
                source = stack.enter_context(chosen.open())
            with errors.status("Loading the kernels", spinner="line"), ctrl_c.may_interrupt():
                compile_kernels()
            with request_progress(errors, source.fraction_done) as show_progress:
                nodes = PrefixNodes.of(_shown(source, ctrl_c, show_progress), block_size=block_size)
        for capacity in _default_capacities(nodes) if capacities is None else capacities:
            finished = []
            with errors.status(f"Simulating caches of {capacity:,} blocks", spinner="line"):
                for policy in POLICIES:
                    with ctrl_c.may_interrupt():
                        finished.append(simulate(nodes, capacity, policy))
            results += finished
    except KeyboardInterrupt:
        return _Compared(nodes, results), True
    except TraceError as error:
        raise BadTrace(str(error)) from None
    return _Compared(nodes, results), False


def _shown(source: Source, ctrl_c: CtrlC, show_progress: Callable[[int], None]) -> Iterator[Request]:
    for played, request in enumerate(read_interruptibly(source.requests, ctrl_c)):
        yield request
        show_progress(played + 1)


def _default_capacities(nodes: PrefixNodes) -> list[int]:
    return sorted({max(1, nodes.parents.size * percent // 100) for percent in _DEFAULT_PERCENT})


def _of_optimum(compared: _Compared) -> list[float | None]:
    """Divide the hits of each result by those of the optimum at its capacity; None if these are none."""
    best = {each.capacity: each.hit_blocks for each in compared.results if each.policy == OPTIMUM}
    return [result.hit_blocks / best[result.capacity] if best[result.capacity] else None for result in compared.results]


def _rows(compared: _Compared) -> list[dict[str, object]]:
    return [
        {
            "capacity": result.capacity,
            "policy": result.policy,
            "hit_blocks": result.hit_blocks,
            "evicted_blocks": result.evicted_blocks,
            "cached_blocks": result.cached_blocks,
            "block_hit_rate": result.block_hit_rate,
            "token_hit_rate": result.token_hit_rate,
            "of_optimum": of_optimum,
        }
        for result, of_optimum in zip(compared.results, _of_optimum(compared), strict=True)
    ]


def _as_json(source: ChosenSource, compared: _Compared, interrupted: bool) -> str:
    fields = {
        "interrupted": interrupted,
        "source": source.as_json(),
        "requests": compared.nodes.requests,
        "blocks": compared.nodes.paths.size,
        "distinct_blocks": compared.nodes.parents.size,
        "results": _rows(compared),
    }
    return json.dumps(fields)


def _as_csv(compared: _Compared) -> str:
    text = io.StringIO()
    fields = ("capacity", "policy", "hit_blocks", "evicted_blocks", "cached_blocks")
    rates = ("block_hit_rate", "token_hit_rate", "of_optimum")
    table = csv.DictWriter(text, (*fields, *rates), lineterminator="\n")
    table.writeheader()
    table.writerows(_rows(compared))
    return text.getvalue()


def _print_table(console: Console, source: ChosenSource, compared: _Compared, interrupted: bool) -> None:
    nodes = compared.nodes
    heading = f"Eviction policies on {source.title}"
    # A name may hold what the terminal's encoding has no sign for.
    console.print(Text(heading.encode(console.encoding, "replace").decode(console.encoding), style="bold"))
    if interrupted:
        console.print(Text("interrupted: only the capacities that were done", style="bold yellow"))
    console.print(f"{nodes.requests:,} requests, {nodes.paths.size:,} blocks, {nodes.parents.size:,} of which differ")
    table = Table("capacity", "policy", box=box.SIMPLE)
    table.columns[0].justify = "right"
    for column in ("hits", "evicted", "of blocks", "of tokens", "of optimum"):
        table.add_column(column, justify="right")
    for result, of_optimum in zip(compared.results, _of_optimum(compared), strict=True):
        table.add_row(
            f"{result.capacity:,}" if result.policy == POLICIES[0] else "",
            result.policy,
            f"{result.hit_blocks:,}",
            f"{result.evicted_blocks:,}",
            _percent(result.block_hit_rate),
            _percent(result.token_hit_rate),
            _percent(of_optimum),
            end_section=result.policy == POLICIES[-1],
        )
    console.print(table)


def _draw(compared: _Compared, picture: str, title: str) -> None:
    try:
        draw_policies(compared.results, picture, title=title)
    except OSError as error:
        raise click.ClickException(f"the picture {picture} cannot be written: {error.strerror or error}") from None


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2%}"
