"""The command ``metrale-numba``: arguments in, replay results out as tables or as JSON.

Relies on click for arguments and on rich for what a terminal shows. Results go to standard output, all else to
standard error; the exit status is 0, 1 where nothing could be compiled or written, 2 for bad arguments or a bad
trace, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from time import monotonic
from types import FrameType, TracebackType
from typing import NamedTuple

import click
from click.core import ParameterSource
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import metrale_numba
from metrale_numba.replay import (
    TOKENS_PER_HASH_ID,
    CallTimes,
    Replay,
    ReplayResult,
    Request,
    TraceError,
    TraceReader,
    chat_workload,
)

_INTERRUPTED_STATUS = 130
"""128 and the number of SIGINT, which is how a shell tells of a command that Ctrl-C ended."""

# Often enough to look alive, seldom enough not to show in the requests per second.
_SECONDS_BETWEEN_REFRESHES = 0.1

# Long enough for the callback in which Ctrl-C was lost to end.
_SECONDS_BEFORE_TRYING_AGAIN = 0.01

# No engine has larger blocks, and a slip of the finger would fill the memory with one long prompt.
_LARGEST_BLOCK_SIZE = 4_096

# As many ids as there are below the one that stands for "no block".
_LARGEST_CAPACITY = metrale_numba.NONE


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(metrale_numba.__version__, prog_name="metrale-numba")
def main() -> None:
    """Prefix cache of an LLM serving engine, on NumPy arrays and Numba kernels."""


@main.command(short_help="Play a trace, or a built-in chat workload, through the cache.")
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

    opening = _built_in_source(seed, requests, sessions, limit) if trace is None else _trace_source(trace, limit)
    with _CtrlC() as ctrl_c:
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
        context.exit(_INTERRUPTED_STATUS)


class _BadTrace(click.ClickException):
    """Shown as its message alone, like a bad argument."""

    exit_code = 2


class _CtrlC:
    """Lets Ctrl-C stop the work only where that leaves no request half played; a context manager.

    Within :meth:`may_interrupt` it raises ``KeyboardInterrupt`` at once, since reading a pipe or compiling may
    take long. Anywhere else it is kept until the next :meth:`may_interrupt`.
    """

    def __init__(self) -> None:
        self._pressed = False
        self._may_interrupt = False

    def __enter__(self) -> _CtrlC:
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
        self._previous_hook = sys.unraisablehook
        # A job that a shell started in the background is to ignore Ctrl-C, and goes on doing so.
        if self._previous[signal.SIGINT] is not signal.SIG_IGN:
            for number in self._previous:
                signal.signal(number, self._on_signal)
            sys.unraisablehook = self._on_swallowed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._previous_hook

    @contextmanager
    def may_interrupt(self) -> Iterator[None]:
        """Raise ``KeyboardInterrupt`` in this block if Ctrl-C comes, or on entry if it has come."""
        try:
            # In this order: the other way round, a Ctrl-C between the two would be kept until the block is over.
            self._may_interrupt = True
            if self._pressed:
                raise KeyboardInterrupt
            yield
        except Exception as error:
            # A callback that Ctrl-C cut short has not done its work, and what called it may stumble over that.
            if self._pressed:
                raise KeyboardInterrupt from error
            raise
        finally:
            self._may_interrupt = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
        if self._may_interrupt:
            raise KeyboardInterrupt

    def _on_swallowed(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Try again a little later where the exception could not get out, as in LLVM's callbacks into Python."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _SECONDS_BEFORE_TRYING_AGAIN)
        else:
            self._previous_hook(unraisable)


class _Source(NamedTuple):
    """Where requests come from."""

    requests: Iterable[Request]
    fraction_done: Callable[[int], float | None]
    """How much of the work is done once so many requests are played, 0 to 1; None if nobody knows."""


@contextmanager
def _built_in_source(seed: int, requests: int, sessions: int, limit: int | None) -> Iterator[_Source]:
    if limit is not None:
        requests = min(requests, limit)
    yield _Source(chat_workload(seed, requests=requests, sessions=sessions), lambda played: played / requests)


@contextmanager
def _trace_source(trace: str, limit: int | None) -> Iterator[_Source]:
    with TraceReader(trace) as reader:

        def fraction_done(played: int) -> float | None:
            fractions = [reader.fraction_read, None if limit is None else played / limit]
            return max((fraction for fraction in fractions if fraction is not None), default=None)

        yield _Source(islice(reader, limit), fraction_done)


def _played(
    opening: AbstractContextManager[_Source], ctrl_c: _CtrlC, capacity: int | None, block_size: int
) -> tuple[ReplayResult, bool]:
    """Play all requests of a source; answers what that came to, and whether Ctrl-C ended it early."""
    errors = Console(stderr=True)
    # Nothing moves where nobody watches; by itself rich would also animate into a pipe if FORCE_COLOR is set.
    errors.quiet = not errors.file.isatty()
    player: Replay | None = None
    interrupted = False
    try:
        with ExitStack() as stack:
            # Before the kernels are compiled, so that a mistyped name is told of at once.
            with ctrl_c.may_interrupt():
                source = stack.enter_context(opening)
            with errors.status("Loading the kernels", spinner="line"), ctrl_c.may_interrupt():
                _compile_kernels()
                cache = metrale_numba.RadixTree(block_size=block_size)
            player = Replay(cache, block_size=block_size, capacity=capacity)
            with _progress(errors, source.fraction_done) as show_progress:
                for request in _read_interruptibly(source.requests, ctrl_c):
                    player.play(request)
                    show_progress(player.requests)
    except KeyboardInterrupt:
        interrupted = True
    except TraceError as error:
        raise _BadTrace(str(error)) from None
    # Ctrl-C may come before there is anything to play requests through; then nothing was counted.
    return player.result() if player else ReplayResult(block_size=block_size, capacity=capacity), interrupted


def _compile_kernels() -> None:
    try:
        metrale_numba.warmup()
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None


def _read_interruptibly(requests: Iterable[Request], ctrl_c: _CtrlC) -> Iterator[Request]:
    iterator = iter(requests)
    while True:
        with ctrl_c.may_interrupt():
            request = next(iterator, None)
        if request is None:
            return
        yield request


@contextmanager
def _progress(console: Console, fraction_done: Callable[[int], float | None]) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on `console`; yields the function to call with the number of requests played."""
    columns = (
        TextColumn("Replaying"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[played]:,} requests"),
        TimeElapsedColumn(),
    )
    # A thread that redraws would take its time out of the calls that are being measured.
    with Progress(*columns, console=console, auto_refresh=False, transient=True, disable=console.quiet) as progress:
        bar = progress.add_task("", total=None, played=0)
        next_refresh = 0.0

        def show(played: int) -> None:
            nonlocal next_refresh
            if console.quiet or monotonic() < next_refresh:
                return
            fraction = fraction_done(played)
            if fraction is not None:
                progress.update(bar, completed=fraction, total=1.0)
            progress.update(bar, played=played, refresh=True)
            next_refresh = monotonic() + _SECONDS_BETWEEN_REFRESHES

        yield show


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
