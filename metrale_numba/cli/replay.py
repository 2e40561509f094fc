"""``metrale-numba replay``: plays requests through the cache, and prints counts and times as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import metrale_numba
from metrale_numba.cli.interrupts import CtrlC, exit_interrupted, read_interruptibly
from metrale_numba.cli.kernels import compile_kernels
from metrale_numba.cli.progress import error_console, request_progress
from metrale_numba.cli.results import printing_results
from metrale_numba.cli.sources import BadTrace, ChosenSource, source_options
from metrale_numba.replay import CallTimes, Replay, ReplayResult, TraceError
from metrale_numba.replay.hybrid import SnapshotRoom
from metrale_numba.replay.recorder import Recorder
from metrale_numba.replay.report import ReportError, check_report, write_report

__all__ = ["replay"]

# No engine has larger blocks, and a slip of the finger would fill the memory with one long prompt.
_LARGEST_BLOCK_SIZE = 4_096

# As many ids as there are below the one that stands for "no block".
_LARGEST_CAPACITY = metrale_numba.NONE

_MOST_SLOTS = 10_000_000


@click.command(short_help="Play a trace, or a built-in workload, through the cache.")
@click.option(
    "--blocks",
    "capacity",
    metavar="N",
    type=click.IntRange(1, _LARGEST_CAPACITY),
    show_default="no limit",
    help="Blocks the cache may hold.",
)
@click.option(
    "--block-size",
    metavar="B",
    type=click.IntRange(1, _LARGEST_BLOCK_SIZE),
    show_default="1, or 16 for a trace of tokens",
    help="Tokens per block of the cache, which each hash id is spelled out as. Of hash ids, more of them make more "
    "work, but the same counts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Make a report as well: a page if the name ends with .html, a picture with .svg, .png or .pdf.",
)
@click.option(
    "--slots",
    metavar="N",
    type=click.IntRange(0, _MOST_SLOTS),
    help="Snapshot slots of a hybrid model, whose use the report is to show; simulate has more options for that.",
)
@click.option(
    "--tier-snapshots",
    metavar="N",
    type=click.IntRange(0, _MOST_SLOTS),
    show_default="no tier",
    help="Snapshots that their tier has room for.",
)
@source_options
@click.pass_context
def replay(
    context: click.Context,
    source: ChosenSource,
    capacity: int | None,
    block_size: int | None,
    as_json: bool,
    report: Path | None,
    slots: int | None,
    tier_snapshots: int | None,
) -> None:
    """Play requests through the cache, and print what it hit and evicted and how long its calls took.

    TRACE is a file of JSON lines, plain or packed with gzip or zstd, or - for standard input. Each line is a
    request: in the format of the Mooncake traces, with its timestamp (ms), input_length and output_length
    (tokens) and hash_ids (one id per 512 tokens of the prompt); in that of the Qwen-Bailian traces; or with its
    tokens. Without TRACE, a built-in workload is made up on the spot, the same one for the same seed: chats of
    many turns, agents with tools, retrieval of documents, or few-shot prompts.

    Requests are played one at a time, as fast as they go: look the whole prompt up, evict what it lacks room
    for, insert it, release it. Ctrl-C stops, and prints what was counted so far.
    """
    if slots is None and tier_snapshots is not None:
        raise click.UsageError("--tier-snapshots is for a hybrid model: say with --slots how many it has.", context)
    if slots is not None and report is None:
        raise click.UsageError("--slots is for a report: say with --report where to.", context)
    if report is not None:
        try:
            check_report(report)
        except ReportError as error:
            raise click.BadParameter(str(error), context, param_hint="--report") from None

    with CtrlC() as ctrl_c:
        snapshots = None if slots is None else SnapshotRoom(slots, tier_snapshots or 0)

        def recorder() -> Recorder:
            return Recorder(block_size=block_size, capacity=capacity, snapshots=snapshots)

        def plain() -> Replay:
            cache = metrale_numba.RadixTree(block_size=block_size or 1)
            return Replay(cache, block_size=block_size, capacity=capacity)

        player, interrupted = _played(source, ctrl_c, plain if report is None else recorder)
        # Ctrl-C may come before there is anything to play requests through; then nothing was counted.
        result = player.result() if player else ReplayResult(block_size=block_size or 1, capacity=capacity)
        # Neither of the two outputs is lost because the other cannot be written.
        unwritten: click.ClickException | None = None
        if report is not None and isinstance(player, Recorder):
            try:
                _write_report(player, report, source, interrupted=interrupted)
            except click.ClickException as error:
                unwritten = error
        with printing_results():
            if as_json:
                click.echo(_as_json(source, result, interrupted))
            else:
                _print_tables(Console(highlight=False), source, result, interrupted)
    if unwritten is not None:
        raise unwritten
    if interrupted:
        exit_interrupted(context)


def _played(
    chosen: ChosenSource, ctrl_c: CtrlC, new_player: Callable[[], Replay | Recorder]
) -> tuple[Replay | Recorder | None, bool]:
    """Play all requests of a source; answers what they were played with, and whether Ctrl-C ended it early."""
    errors = error_console()
    player: Replay | Recorder | None = None
    interrupted = False
    try:
        with ExitStack() as stack:
            # Before the kernels are compiled, so that a mistyped name is told of at once.
            with ctrl_c.may_interrupt():
                source = stack.enter_context(chosen.open())
            with errors.status("Loading the kernels", spinner="line"), ctrl_c.may_interrupt():
                compile_kernels()
                player = new_player()
            with request_progress(errors, source.fraction_done) as show_progress:
                for request in read_interruptibly(source.requests, ctrl_c):
                    player.play(request)
                    show_progress(player.requests)
            if isinstance(player, Recorder):
                with errors.status("Serving those that wait", spinner="line"):
                    while player.step():
                        with ctrl_c.may_interrupt():
                            pass
    except KeyboardInterrupt:
        interrupted = True
    except TraceError as error:
        if isinstance(player, Recorder):
            player.close()
        raise BadTrace(str(error)) from None
    return player, interrupted


def _write_report(player: Recorder, path: Path, source: ChosenSource, *, interrupted: bool) -> None:
    try:
        write_report(player.record(), path, title=source.title, interrupted=interrupted)
    except ReportError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"the report {path} cannot be written: {error.strerror}") from None
    finally:
        player.close()


def _as_json(source: ChosenSource, result: ReplayResult, interrupted: bool) -> str:
    fields: dict[str, object] = {"interrupted": interrupted, "source": source.as_json(), **result._asdict()}
    fields["microseconds_per_call"] = {
        call: times and {"calls": times.calls, "median": round(times.median, 3), "p99": round(times.p99, 3)}
        for call, times in _times(result).items()
    }
    return json.dumps({name: value for name, value in fields.items() if name not in _times(result)})


def _print_tables(console: Console, source: ChosenSource, result: ReplayResult, interrupted: bool) -> None:
    heading = f"Replay of {source.title}"
    # A name may hold what the terminal's encoding has no sign for.
    console.print(Text(heading.encode(console.encoding, "replace").decode(console.encoding), style="bold"))
    if interrupted:
        console.print(Text(f"interrupted: counts of the first {result.requests:,} requests", style="bold yellow"))

    holds_tokens = source.tokens_per_id == 1
    block = f"{result.block_size} tokens" if holds_tokens else f"hash ids of {source.tokens_per_id} tokens"
    counts = Table(box=box.SIMPLE, show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    for label, value in (
        ("requests", f"{result.requests:,}"),
        (f"blocks ({block})", f"{result.blocks:,}"),
        ("hit blocks", f"{result.hit_blocks:,}"),
        ("hit rate in blocks", _percent(result.block_hit_rate)),
        ("hit rate in prompt tokens", _percent(result.token_hit_rate)),
        ("evicted blocks", f"{result.evicted_blocks:,}"),
        ("cached blocks", f"{result.cached_blocks:,}"),
        ("capacity in blocks", "no limit" if result.capacity is None else f"{result.capacity:,}"),
        ("tokens per block" if holds_tokens else "tokens spelled per hash id", f"{result.block_size:,}"),
        ("seconds", f"{result.seconds:,.2f}"),
        ("seconds in the cache", f"{result.cache_seconds:,.2f}"),
        ("requests per second", _rounded(result.requests_per_second)),
        ("requests per second in the cache", _rounded(result.requests_per_cache_second)),
    ):
        counts.add_row(label, value)
    console.print(counts)

    calls = Table("time per call", box=box.SIMPLE)
    for column in ("calls", "median us", "p99 us"):
        calls.add_column(column, justify="right")
    for call, times in _times(result).items():
        row = ("0", "-", "-") if times is None else (f"{times.calls:,}", f"{times.median:,.1f}", f"{times.p99:,.1f}")
        calls.add_row(call, *row)
    console.print(calls)
    # For who tries the command out; in a file it would be one more line to skip.
    if result.capacity is None and console.file.isatty():
        console.print(Text("Without a limit nothing is evicted; --blocks N sets one.", style="dim"))


def _times(result: ReplayResult) -> dict[str, CallTimes | None]:
    return {"lookup": result.lookup, "insert": result.insert, "evict": result.evict, "release": result.release}


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2%}"


def _rounded(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"
