"""``metrale-numba simulate``: serves requests in simulated time, and prints what the cache saves of it.

Here are its options and how it runs; what it sets up and prints is in :mod:`metrale_numba.cli.simulation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import chain
from typing import TypeVar

import click
from click.core import ParameterSource
from rich.console import Console

from metrale_numba.cli.interrupts import CtrlC, exit_interrupted, read_interruptibly
from metrale_numba.cli.kernels import compile_kernels
from metrale_numba.cli.progress import error_console, request_progress
from metrale_numba.cli.results import printing_results
from metrale_numba.cli.simulation import Engines, Hybrid, Setup, as_json, print_tables
from metrale_numba.cli.sources import BadTrace, ChosenSource, Source, source_options
from metrale_numba.interface import NONE
from metrale_numba.replay import Request, TraceError, default_block_size
from metrale_numba.replay.hybrid import SNAPSHOT_PLACES, SnapshotPlan
from metrale_numba.replay.timed import ServiceModel

__all__ = ["simulate"]

_Amount = TypeVar("_Amount", int, float)

_LARGEST_BLOCK_SIZE = 4_096
_MOST_SLOTS = 10_000_000
# So many engines side by side are a table that can still be read.
_LONGEST_SWEEP = 32
_SERVICE = ServiceModel()


_SLOTS = click.IntRange(0, _MOST_SLOTS)
# Of infinitely many bytes there is no whole number of snapshots.
_GIGABYTES = click.FloatRange(0, 1e9)
# So that no time comes out infinite.
_SPEED = click.FloatRange(0.001, 1e9)
_RATE = click.FloatRange(0.001, 1e12)


def _as_number(context: click.Context, option: click.Parameter, value: float) -> float:
    """Refuse what is no number, which is in every range because it is not outside."""
    if math.isnan(value):
        raise click.BadParameter("nan is no number.")
    return value


def _as_places(context: click.Context, option: click.Parameter, value: str) -> frozenset[str]:
    """Read a set of places for snapshots."""
    if value == "none":
        return frozenset()
    places = [place.strip() for place in value.split(",")]
    for place in places:
        if place not in SNAPSHOT_PLACES:
            raise click.BadParameter(f"{place!r} is none of {', '.join(SNAPSHOT_PLACES)}, and not none.")
    return frozenset(places)


def _as_slots(context: click.Context, option: click.Parameter, value: str | None) -> list[int]:
    """Read numbers of slots: sorted, each once."""
    return _checked({int(_SLOTS(part.strip(), option, context)) for part in _parts(value)})


def _as_gigabytes(context: click.Context, option: click.Parameter, value: str | None) -> list[float]:
    """Read sizes of a tier: sorted, each once."""
    sizes = (float(_GIGABYTES(part.strip(), option, context)) for part in _parts(value))
    return _checked({_as_number(context, option, size) for size in sizes})


def _parts(value: str | None) -> list[str]:
    return [] if value is None else value.split(",")


def _checked(amounts: set[_Amount]) -> list[_Amount]:
    if len(amounts) > _LONGEST_SWEEP:
        raise click.BadParameter(f"these are {len(amounts)} amounts, and at most {_LONGEST_SWEEP} can be tried.")
    return sorted(amounts)


@click.command(short_help="Serve a trace in time: waiting, time to first token, throughput, snapshots.")
@click.option(
    "--blocks",
    metavar="N",
    type=click.IntRange(1, NONE),
    show_default="no limit",
    help="Blocks that the engine has, for running requests and for the cache.",
)
@click.option(
    "--block-size",
    metavar="B",
    type=click.IntRange(1, _LARGEST_BLOCK_SIZE),
    show_default="16",
    help="Tokens per block, for a trace of tokens. A hash id is a block whatever this says.",
)
@click.option(
    "--speed",
    metavar="X",
    type=_SPEED,
    callback=_as_number,
    default=1.0,
    show_default=True,
    help="How much faster than the trace says the requests come.",
)
@click.option(
    "--one-at-a-time", is_flag=True, help="Let each request come when the one before has ended, not at its time."
)
@click.option(
    "--prefill-rate",
    metavar="R",
    type=_RATE,
    callback=_as_number,
    default=_SERVICE.prefill_rate,
    show_default=True,
    help="Tokens of a prompt that are computed per second.",
)
@click.option(
    "--decode-rate",
    metavar="R",
    type=_RATE,
    callback=_as_number,
    default=_SERVICE.decode_rate,
    show_default=True,
    help="Tokens per second of each answer.",
)
@click.option(
    "--at-once",
    metavar="N",
    type=click.IntRange(1, 1_000_000),
    default=_SERVICE.at_once,
    show_default=True,
    help="Requests that may run at once.",
)
@click.option("--slots", metavar="N", type=_SLOTS, help="Snapshot slots; makes the model a hybrid one.")
@click.option(
    "--tier-gb",
    metavar="GB",
    type=_GIGABYTES,
    callback=_as_number,
    default=0.0,
    show_default=True,
    help="Size of the tier to which snapshots are spilled, in GB of 10^9 bytes.",
)
@click.option(
    "--snapshot-bytes",
    metavar="N",
    type=click.IntRange(1, 1 << 50),
    help="Bytes of one snapshot, which say how many a tier has room for.",
)
@click.option(
    "--snapshot-every", metavar="N", type=click.IntRange(1, NONE), help="Take a snapshot every N blocks of a prompt."
)
@click.option(
    "--snapshot-at",
    metavar="PLACES",
    callback=_as_places,
    default="prompt-end",
    show_default=True,
    help="Where else snapshots are taken: prompt-end, tail, fork, some of them divided by commas, or none.",
)
@click.option(
    "--sweep-slots", metavar="N,N,...", callback=_as_slots, help="Say what each of these numbers of slots brings."
)
@click.option(
    "--sweep-tier-gb",
    metavar="GB,GB,...",
    callback=_as_gigabytes,
    help="Say what each of these sizes of the tier brings.",
)
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object instead of tables.")
@source_options
@click.pass_context
def simulate(
    context: click.Context,
    source: ChosenSource,
    blocks: int | None,
    block_size: int | None,
    speed: float,
    one_at_a_time: bool,
    prefill_rate: float,
    decode_rate: float,
    at_once: int,
    slots: int | None,
    tier_gb: float,
    snapshot_bytes: int | None,
    snapshot_every: int | None,
    snapshot_at: frozenset[str],
    sweep_slots: list[int],
    sweep_tier_gb: list[float],
    wants_json: bool,
) -> None:
    """Serve requests in simulated time, and print how long they waited and what the cache saved.

    TRACE and the built-in workloads are those of replay. Requests come at their timestamps and wait, first-come,
    first-served, for an engine that computes one prompt after another and gives each running answer its tokens at a
    fixed rate. They hold their blocks while they run. The same requests are served with the cache, without it, and
    with an endless one.

    With --slots the model is a hybrid one: computing begins at the deepest snapshot that can be restored. Ctrl-C stops,
    and prints what was counted so far.
    """
    hybrid = None
    if slots is not None or sweep_slots:
        if snapshot_bytes is None and (tier_gb or sweep_tier_gb):
            raise click.UsageError("--snapshot-bytes must say how many snapshots the tier has room for.", context)
        hybrid = Hybrid(
            slots=sweep_slots[-1] if slots is None else slots,
            tier_gb=tier_gb,
            snapshot_bytes=snapshot_bytes,
            plan=SnapshotPlan(snapshot_every or 0, snapshot_at),
            sweep_slots=sweep_slots,
            sweep_tier_gb=sweep_tier_gb,
        )
    else:
        for option in ("tier_gb", "snapshot_bytes", "snapshot_every", "snapshot_at", "sweep_tier_gb"):
            if context.get_parameter_source(option) is not ParameterSource.DEFAULT:
                name = option.replace("_", "-")
                raise click.UsageError(f"--{name} is for a hybrid model: say with --slots how many it has.", context)
    setup = Setup(blocks, block_size, ServiceModel(prefill_rate, decode_rate, at_once), speed, one_at_a_time, hybrid)

    with CtrlC() as ctrl_c:
        engines, interrupted = _served(source, ctrl_c, setup)
        try:
            with printing_results():
                if wants_json:
                    click.echo(as_json(source, setup, engines, interrupted))
                else:
                    print_tables(Console(highlight=False), source, setup, engines, interrupted)
        finally:
            engines.close()
    if interrupted:
        exit_interrupted(context)


def _served(source: ChosenSource, ctrl_c: CtrlC, setup: Setup) -> tuple[Engines, bool]:
    """Serve all requests of a source on every engine; answers these, and whether Ctrl-C ended it early."""
    errors = error_console()
    engines: Engines | None = None
    interrupted = False
    try:
        with ExitStack() as stack:
            # Before the kernels are compiled, so that a mistyped name is told of at once.
            with ctrl_c.may_interrupt():
                opened = stack.enter_context(source.open())
            with errors.status("Loading the kernels", spinner="line"), ctrl_c.may_interrupt():
                compile_kernels()
            requests = read_interruptibly(opened.requests, ctrl_c)
            first = next(requests, None)
            if first is not None:
                # However many tokens it stands for, a hash id is one block.
                ids_per_block = default_block_size(first)
                if first.tokens_per_id == 1 and setup.block_size is not None:
                    ids_per_block = setup.block_size
                engines = Engines(setup, ids_per_block)
                _serve(chain([first], requests), engines, ctrl_c, setup, opened, errors)
    except KeyboardInterrupt:
        interrupted = True
    except TraceError as error:
        if engines is not None:
            engines.close()
        raise BadTrace(str(error)) from None
    # Ctrl-C may come before there is anything to serve; then nothing was counted.
    return engines or Engines(setup, 1), interrupted


def _serve(
    requests: Iterable[Request],
    engines: Engines,
    ctrl_c: CtrlC,
    setup: Setup,
    source: Source,
    errors: Console,
) -> None:
    arrived = 0

    def fraction_done(settled: int) -> float | None:
        # Where more come than can be served, most of the work is still to be done when the last one has come.
        fraction = source.fraction_done(arrived)
        return None if fraction is None or arrived == 0 else fraction * settled / arrived

    with request_progress(errors, fraction_done) as show_progress:

        def show() -> None:
            show_progress(sum(replay.settled for replay in engines.all) // len(engines.all))

        for request in requests:
            for replay in engines.all:
                if setup.one_at_a_time:
                    replay.play(request)
                else:
                    replay.arrive(request)
            arrived += 1
            show()
        for replay in engines.all:
            while replay.step():
                with ctrl_c.may_interrupt():
                    show()
