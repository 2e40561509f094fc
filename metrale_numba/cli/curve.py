"""``metrale-numba curve``: the hit rate of a load at every capacity, as a table, as JSON, as CSV or as a picture."""

from __future__ import annotations

import csv
import io
import json
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import metrale_numba
from metrale_numba.cli.interrupts import CtrlC, exit_interrupted, read_interruptibly
from metrale_numba.cli.kernels import compile_kernels
from metrale_numba.cli.memory import Memory, memory_options
from metrale_numba.cli.progress import error_console, request_progress
from metrale_numba.cli.results import printing_results
from metrale_numba.cli.sources import BadTrace, ChosenSource, source_options
from metrale_numba.replay import TraceError
from metrale_numba.replay.curve import CurveCounter, CurvePoint, HitCurve, default_capacities
from metrale_numba.replay.curve_cache import CurveCache, file_digest
from metrale_numba.replay.pictures import BYTES_PER_GIGABYTE, PictureError, check_picture, draw_curve

__all__ = ["curve"]

_LARGEST_BLOCK_SIZE = 4_096
_LARGEST_CAPACITY = metrale_numba.NONE

# GB from which on the second digit behind the point says nothing any more.
_LARGE = 100


class _Result(NamedTuple):
    """The curve of what was played, and how it was come by."""

    curve: HitCurve
    from_cache: bool
    interrupted: bool


def _in_order(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int] | None:
    """Read numbers of blocks, with commas between them."""
    if text is None:
        return None
    one = click.IntRange(1, _LARGEST_CAPACITY)
    capacities: set[int] = {one(number.strip(), parameter, context) for number in text.split(",")}
    return sorted(capacities)


@click.command(short_help="Tell the hit rate of a trace, or of a built-in workload, at every capacity.")
@click.option(
    "--capacities",
    metavar="N,N,...",
    callback=_in_order,
    show_default="1, 2, 5, 10, 20, ... up to what an endless cache holds",
    help="Blocks the cache may hold, for each of which to print a row.",
)
@click.option(
    "--target",
    "percent",
    metavar="PERCENT",
    type=click.IntRange(1, 100),
    default=90,
    show_default=True,
    help="Find the smallest cache that hits so much of what an endless one does.",
)
@click.option(
    "--block-size",
    metavar="B",
    type=click.IntRange(1, _LARGEST_BLOCK_SIZE),
    show_default="16",
    help="Tokens per block, if the trace holds tokens. A hash id is a block, whatever this says.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV instead of tables.")
@click.option(
    "--plot",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Draw the curve as well, into a file whose name ends with .svg, .png or .pdf.",
)
@click.option("--no-cache", is_flag=True, help="Neither look for a curve that was kept on disk, nor keep this one.")
@memory_options
@source_options
@click.pass_context
def curve(
    context: click.Context,
    source: ChosenSource,
    capacities: list[int] | None,
    percent: int,
    block_size: int | None,
    memory: Memory,
    as_json: bool,
    as_csv: bool,
    plot: Path | None,
    no_cache: bool,
) -> None:
    """Print the hit rate at every capacity, and the smallest that hits 90% of what an endless cache does.

    TRACE, or the built-in workload in its place, is what replay takes. Each row is, to the block, what replay
    with so many --blocks comes to. All of them take one pass, the result of which is kept on disk: asked again
    for the same requests, the command answers at once. Ctrl-C stops, and prints what was counted so far.
    """
    if as_json and as_csv:
        raise click.UsageError("--json does not go with --csv.", context)
    if plot is not None:
        try:
            check_picture(plot)
        except PictureError as error:
            raise click.BadParameter(str(error), context, param_hint="--plot") from None

    with CtrlC() as ctrl_c:
        result = _counted(context, source, ctrl_c, block_size, use_cache=not no_cache)
        points = [result.curve.point(each) for each in capacities or default_capacities(result.curve)]
        # Neither of the two outputs is lost because the other cannot be written.
        unwritten: click.ClickException | None = None
        if plot is not None and not (result.interrupted and result.curve.blocks == 0):
            try:
                _draw(plot, source, result.curve, percent, memory)
            except click.ClickException as error:
                unwritten = error
        with printing_results():
            if as_json:
                click.echo(_as_json(source, result, points, percent, memory))
            elif as_csv:
                click.echo(_as_csv(result.curve, points, memory), nl=False)
            else:
                _print_tables(Console(highlight=False), source, result, points, percent, memory)
    if unwritten is not None:
        raise unwritten
    if result.interrupted:
        exit_interrupted(context)


def _counted(
    context: click.Context, chosen: ChosenSource, ctrl_c: CtrlC, block_size: int | None, *, use_cache: bool
) -> _Result:
    """Take the curve of a source from disk, or play all its requests once."""
    errors = error_console()
    counter: CurveCounter | None = None
    try:
        with ExitStack() as stack:
            # Before the kernels are compiled, so that a mistyped name is told of at once.
            with ctrl_c.may_interrupt():
                source = stack.enter_context(chosen.open())
                identity = _identity(context, chosen, block_size) if use_cache else None
                cache = None if identity is None else CurveCache(identity)
                kept = None if cache is None else cache.load()
                if kept is not None:
                    # What format a trace is in shows in its first request.
                    next(iter(source.requests))
                    return _Result(kept, from_cache=True, interrupted=False)
            with errors.status("Loading the kernels", spinner="line"), ctrl_c.may_interrupt():
                compile_kernels()
                tree = metrale_numba.RadixTree(block_size=block_size or 1)
            counter = CurveCounter(tree, block_size=block_size)
            with request_progress(errors, source.fraction_done) as show_progress:
                for request in read_interruptibly(source.requests, ctrl_c):
                    counter.play(request)
                    show_progress(counter.requests)
            counted = counter.curve()
            with ctrl_c.may_interrupt():
                # A trace that somebody still writes to is another one by now.
                if cache is not None and _identity(context, chosen, block_size) == identity:
                    cache.store(counted)
            return _Result(counted, from_cache=False, interrupted=False)
    except KeyboardInterrupt:
        # Ctrl-C may come before there is anything to count with.
        return _Result(counter.curve() if counter else HitCurve(), from_cache=False, interrupted=True)
    except TraceError as error:
        raise BadTrace(str(error)) from None


def _identity(context: click.Context, chosen: ChosenSource, block_size: int | None) -> dict[str, object] | None:
    """Tell what a curve depends on; None if that cannot be known before it is played."""
    trace = context.params["trace"]
    played: object = chosen.as_json()
    if trace is not None:
        played = None if trace == "-" else file_digest(trace)
        if played is None:
            return None
    return {"played": played, "limit": context.params["limit"], "block_size": block_size}


def _row(curve: HitCurve, point: CurvePoint, memory: Memory) -> dict[str, object]:
    """Give all that is to be told of one capacity."""
    endless = int(curve.hit_blocks[-1])
    return {
        **point._asdict(),
        "endless_share": point.hit_blocks / endless if endless else None,
        "gigabytes": _gigabytes(memory, curve, point.capacity),
    }


def _as_json(source: ChosenSource, result: _Result, points: list[CurvePoint], percent: int, memory: Memory) -> str:
    curve = result.curve
    target = curve.smallest_capacity(percent)
    fields: dict[str, object] = {
        "interrupted": result.interrupted,
        "source": source.as_json(),
        "from_cache": result.from_cache,
        "requests": curve.requests,
        "blocks": curve.blocks,
        "tokens_per_block": curve.tokens_per_block,
        "distinct_blocks": curve.distinct_blocks,
        "kv_bytes_per_token": memory.bytes_per_token,
        "model": memory.model and memory.model._asdict(),
        "points": [_row(curve, point, memory) for point in points],
        "endless": _row(curve, curve.point(curve.distinct_blocks), memory),
        "target": None if target is None else {"percent": percent, **_row(curve, curve.point(target), memory)},
    }
    return json.dumps(fields)


def _as_csv(curve: HitCurve, points: list[CurvePoint], memory: Memory) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _row(curve, curve.point(0), memory), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(curve, point, memory) for point in points)
    return text.getvalue()


def _print_tables(
    console: Console, source: ChosenSource, result: _Result, points: list[CurvePoint], percent: int, memory: Memory
) -> None:
    curve = result.curve
    heading = f"Hit-rate curve of {source.title}"
    # A name may hold what the terminal's encoding has no sign for.
    console.print(Text(heading.encode(console.encoding, "replace").decode(console.encoding), style="bold"))
    if result.interrupted:
        console.print(Text(f"interrupted: counts of the first {curve.requests:,} requests", style="bold yellow"))

    counts = Table(box=box.SIMPLE, show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    block = f"{curve.tokens_per_block:,} tokens"
    counts.add_row("requests", f"{curve.requests:,}")
    counts.add_row(f"blocks ({block})", f"{curve.blocks:,}")
    counts.add_row("distinct blocks", f"{curve.distinct_blocks:,}")
    for label, value in memory.rows():
        counts.add_row(label, value)
    console.print(counts)

    rows = Table("blocks", box=box.SIMPLE)
    rows.columns[0].justify = "right"
    with_gigabytes = memory.bytes_per_token is not None
    columns = ["GB"] if with_gigabytes else []
    for column in (*columns, "hits", "hit rate", "in tokens", "of endless", "evicted"):
        rows.add_column(column, justify="right")
    endless = int(curve.hit_blocks[-1])
    for point in points:
        size = [_size(memory, curve, point.capacity)] if with_gigabytes else []
        rows.add_row(
            f"{point.capacity:,}",
            *size,
            f"{point.hit_blocks:,}",
            _percent(point.block_hit_rate),
            _percent(point.token_hit_rate),
            _percent(point.hit_blocks / endless if endless else None),
            f"{point.evicted_blocks:,}",
        )
    console.print(rows)

    target = curve.smallest_capacity(percent)
    if target is None:
        console.print(Text("An endless cache hits nothing."))
    else:
        size_of_target = f", {_size(memory, curve, target)} GB{memory.on_each_device}" if with_gigabytes else ""
        line = f"{percent}% of what an endless cache hits: {target:,} blocks{size_of_target}"
        console.print(Text(line, style="bold"))


def _gigabytes(memory: Memory, curve: HitCurve, capacity: int) -> float | None:
    bytes_per_block = memory.bytes_per_block(curve.tokens_per_block)
    return None if bytes_per_block is None else capacity * bytes_per_block / BYTES_PER_GIGABYTE


def _size(memory: Memory, curve: HitCurve, capacity: int) -> str:
    """Write a size as precisely as all others of the table."""
    gigabytes, largest = _gigabytes(memory, curve, capacity), _gigabytes(memory, curve, curve.distinct_blocks)
    if gigabytes is None or largest is None:
        return "-"
    return f"{gigabytes:,.{1 if largest >= _LARGE else 2 if largest >= 1 else 4}f}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2%}"


def _draw(plot: Path, source: ChosenSource, curve: HitCurve, percent: int, memory: Memory) -> None:
    try:
        draw_curve(
            curve,
            plot,
            title=f"Hit rate by capacity: {Path(source.title).name}",
            percent=percent,
            bytes_per_block=memory.bytes_per_block(curve.tokens_per_block),
            devices=memory.devices,
        )
    except PictureError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"the picture {plot} cannot be written: {error.strerror or error}") from None
