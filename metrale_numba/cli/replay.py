"""``metrale-numba replay``: plays requests through the cache, and prints counts and times as tables or as JSON."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack

import click
from click.core import ParameterSource
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import metrale_numba
from metrale_numba.cli.interrupts import INTERRUPTED_STATUS, CtrlC, read_interruptibly
from metrale_numba.cli.kernels import compile_kernels
from metrale_numba.cli.progress import error_console, request_progress
from metrale_numba.cli.sources import BadTrace, Source, built_in_source, trace_source
from metrale_numba.replay import TOKENS_PER_HASH_ID, CallTimes, Replay, ReplayResult, TraceError

__all__ = ["replay"]

# No engine has larger blocks, and a slip of the finger would fill the memory with one long prompt.
_LARGEST_BLOCK_SIZE = 4_096

# As many ids as there are below the one that stands for "no block".
_LARGEST_CAPACITY = metrale_numba.NONE


@click.command(short_help="Play a trace, or a built-in chat workload, through the cache.")
@click.argument("trace", required=False, type=click.Path(allow_dash=True))
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
    default=1,
    show_default=True,
    help="Tokens that each hash id is spelled out as, and tokens per block of the cache. More of them make more "
    "work, but the same counts.",
)
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=1), show_default="no limit", help="Requests to stop after."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the built-in workload.",
)
@click.option(
    "--requests",
    metavar="N",
    type=click.IntRange(1, 100_000_000),
    default=60_000,
    show_default=True,
    help="Requests of the built-in workload.",
)
@click.option(
    "--sessions",
    metavar="N",
    type=click.IntRange(1, 1_000_000),
    default=1_000,
    show_default=True,
    help="Chats that go on side by side in the built-in workload.",
)
@click.pass_context
def replay(
    context: click.Context,
    trace: str | None,
    capacity: int | None,
    block_size: int,
    limit: int | None,
    as_json: bool,
    seed: int,
    requests: int,
    sessions: int,
) -> None:
    """Play requests through the cache, and print what it hit and evicted and how long its calls took.

    TRACE is a file of JSON lines in the Mooncake format, plain or gzip, or - for standard input. Each line is
    a request with its timestamp (ms), input_length and output_length (tokens) and hash_ids (one id per 512
    tokens of the prompt). Without TRACE, the built-in workload is played: multi-turn chats, made up on the
    spot, the same ones for the same seed.

    Requests are played one at a time, as fast as they go: look the whole prompt up, evict what it lacks room
    for, insert it, release it. Ctrl-C stops, and prints what was counted so far.
    """
    for option in ("seed", "requests", "sessions"):
        if trace is not None and context.get_parameter_source(option) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--{option} shapes the built-in workload and does not go with a TRACE.", context)

    opening = built_in_source(seed, requests, sessions, limit) if trace is None else trace_source(trace, limit)
    with CtrlC() as ctrl_c:
        result, interrupted = _played(opening, ctrl_c, capacity, block_size)
        try:
            if as_json:
                source = (
                    {"seed": seed, "requests": requests, "sessions": sessions} if trace is None else {"trace": trace}
                )
                click.echo(_as_json(source, result, interrupted))
            else:
                name = f"the built-in chat workload, seed {seed}" if trace is None else click.format_filename(trace)
                _print_tables(Console(highlight=False), name, result, interrupted)
        except BrokenPipeError:
            # click knows what to do when a reader such as head has seen enough: end quietly.
            raise
        except OSError as error:
            raise click.ClickException(f"the result cannot be written: {error.strerror}") from None
    if interrupted:
        # Who presses Ctrl-C twice must not hit the interpreter while it shuts down.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        context.exit(INTERRUPTED_STATUS)


def _played(
    opening: AbstractContextManager[Source], ctrl_c: CtrlC, capacity: int | None, block_size: int
) -> tuple[ReplayResult, bool]:
    """Play all requests of a source; answers what that came to, and whether Ctrl-C ended it early."""
    errors = error_console()
    player: Replay | None = None
    interrupted = False
    try:
        with ExitStack() as stack:
            # Before the kernels are compiled, so that a mistyped name is told of at once.
            with ctrl_c.may_interrupt():
                source = stack.enter_context(opening)
            with errors.status("Loading the kernels", spinner="line"), ctrl_c.may_interrupt():
                compile_kernels()
                cache = metrale_numba.RadixTree(block_size=block_size)
            player = Replay(cache, block_size=block_size, capacity=capacity)
            with request_progress(errors, source.fraction_done) as show_progress:
                for request in read_interruptibly(source.requests, ctrl_c):
                    player.play(request)
                    show_progress(player.requests)
    except KeyboardInterrupt:
        interrupted = True
    except TraceError as error:
        raise BadTrace(str(error)) from None
    # Ctrl-C may come before there is anything to play requests through; then nothing was counted.
    return player.result() if player else ReplayResult(block_size=block_size, capacity=capacity), interrupted


def _as_json(source: Mapping[str, object], result: ReplayResult, interrupted: bool) -> str:
    fields: dict[str, object] = {"interrupted": interrupted, "source": source, **result._asdict()}
    fields["microseconds_per_call"] = {
        call: times and {"calls": times.calls, "median": round(times.median, 3), "p99": round(times.p99, 3)}
        for call, times in _times(result).items()
    }
    return json.dumps({name: value for name, value in fields.items() if name not in _times(result)})


def _print_tables(console: Console, name: str, result: ReplayResult, interrupted: bool) -> None:
    heading = f"Replay of {name}"
    # A name may hold what the terminal's encoding has no sign for.
    console.print(Text(heading.encode(console.encoding, "replace").decode(console.encoding), style="bold"))
    if interrupted:
        console.print(Text(f"interrupted: counts of the first {result.requests:,} requests", style="bold yellow"))

    counts = Table(box=box.SIMPLE, show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    for label, value in (
        ("requests", f"{result.requests:,}"),
        (f"blocks (hash ids of {TOKENS_PER_HASH_ID} tokens)", f"{result.blocks:,}"),
        ("hit blocks", f"{result.hit_blocks:,}"),
        ("hit rate in blocks", _percent(result.block_hit_rate)),
        ("hit rate in prompt tokens", _percent(result.token_hit_rate)),
        ("evicted blocks", f"{result.evicted_blocks:,}"),
        ("cached blocks", f"{result.cached_blocks:,}"),
        ("capacity in blocks", "no limit" if result.capacity is None else f"{result.capacity:,}"),
        ("tokens spelled per hash id", f"{result.block_size:,}"),
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
