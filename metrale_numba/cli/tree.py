"""``metrale-numba tree``: the hottest part of a cache as a tree; a saved one, or one that requests were played to."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

import metrale_numba
from metrale_numba import CacheFileError, NodeInfo, RadixTree
from metrale_numba.cli.interrupts import CtrlC, exit_interrupted, read_interruptibly
from metrale_numba.cli.kernels import compile_kernels
from metrale_numba.cli.progress import error_console, request_progress
from metrale_numba.cli.results import printing_results
from metrale_numba.cli.sources import BadTrace, ChosenSource, source_options
from metrale_numba.replay import Replay, TraceError
from metrale_numba.replay.hits import HitCountingCache

__all__ = ["tree"]

# As in the command `replay`.
_LARGEST_BLOCK_SIZE = 4_096
_LARGEST_CAPACITY = metrale_numba.NONE

# Characters; no line is longer.
_WIDTH_OF_A_FILE = 100_000

# Of the first tokens of a run, so many are shown.
_TOKENS_SHOWN = 4

# Parameters of the command that go with a saved cache; all others say what to play.
_OF_EVERY_CACHE = ("saved", "num_lines", "max_depth", "as_json")


@dataclass(slots=True)
class _Run:
    """Blocks that follow each other without a fork."""

    number: int
    parent: int | None
    adapter_id: int
    block_size: int
    start: int
    """Tokens before its first block."""
    level: int
    """Runs above it."""
    blocks: int = 0
    blocks_below: int = 0
    hits: int | None = None
    """Of its first block; None where nobody counted."""
    last_hits: int | None = None
    references: int = 0
    age: int = 0
    snapshots: int = 0
    tokens: list[int] = field(default_factory=list)
    children: list[_Run] = field(default_factory=list)

    @property
    def heat(self) -> tuple[int, int, int]:
        """The least of several runs is the hottest: most hits, or, where nobody counted, used last."""
        return -(self.hits or 0), self.age, self.number


@click.command(short_help="Show the hottest part of a cache as a tree.")
@click.option(
    "--saved",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Show this saved cache, in place of one that requests are played to.",
)
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
    help="Tokens per block of the cache, which each hash id is spelled out as.",
)
@click.option(
    "--lines",
    "num_lines",
    metavar="N",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    help="Lines to show, the hottest first.",
)
@click.option(
    "--depth",
    "max_depth",
    metavar="N",
    type=click.IntRange(min=1),
    show_default="no limit",
    help="Forks to follow, at most.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a tree.")
@source_options
@click.pass_context
def tree(
    context: click.Context,
    source: ChosenSource,
    saved: Path | None,
    capacity: int | None,
    block_size: int | None,
    num_lines: int,
    max_depth: int | None,
    as_json: bool,
) -> None:
    """Show the hottest part of what a cache holds: which prefixes, how long, how often hit, by whom held, how old.

    TRACE is as for replay, and so is the built-in workload without it; the cache is shown as it is after the last
    request. With --saved, it is one that RadixTree.save wrote. A line stands for blocks that follow each other
    without a fork. Ctrl-C stops, and shows the cache as it is then.
    """
    if saved is not None:
        _refuse_others(context, source)
    interrupted = False
    with CtrlC() as ctrl_c:
        if saved is not None:
            cache, hits_of = _loaded(saved, ctrl_c), None
        else:
            cache, interrupted = _played(source, ctrl_c, capacity, block_size)
            hits_of = cache.hits_of if isinstance(cache, HitCountingCache) else None
        if cache is None:
            exit_interrupted(context)
        runs = _runs(cache.iter_nodes(), hits_of)
        shown = _hottest(runs, num_lines, max_depth)
        title = source.title if saved is None else click.format_filename(saved)
        with printing_results():
            if as_json:
                click.echo(_as_json({"saved": str(saved)} if saved else source.as_json(), interrupted, runs, shown))
            else:
                _print_tree(Console(highlight=False), title, interrupted, runs, shown)
    if interrupted:
        exit_interrupted(context)


def _refuse_others(context: click.Context, source: ChosenSource) -> None:
    """Refuse what says how to play requests: with a saved cache, none are."""
    if "trace" in source.as_json():
        raise click.UsageError("A saved cache is shown as it is: --saved does not go with a TRACE.", context)
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in _OF_EVERY_CACHE and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(
                f"A saved cache is shown as it is: --saved does not go with {parameter.opts[0]}.", context
            )


def _loaded(path: Path, ctrl_c: CtrlC) -> RadixTree | None:
    """Load a saved cache; None if Ctrl-C came first."""
    try:
        with error_console().status("Loading the cache", spinner="line"), ctrl_c.may_interrupt():
            compile_kernels()
            return RadixTree.load(path)
    except KeyboardInterrupt:
        return None
    except CacheFileError as error:
        raise BadTrace(str(error)) from None
    except OSError as error:
        raise BadTrace(f"{click.format_filename(path)} cannot be read: {error.strerror or error}") from None


def _played(
    chosen: ChosenSource, ctrl_c: CtrlC, capacity: int | None, block_size: int | None
) -> tuple[RadixTree | None, bool]:
    """Play all requests of a source; answers the cache, and whether Ctrl-C ended it early."""
    errors = error_console()
    cache: HitCountingCache | None = None
    try:
        with ExitStack() as stack:
            # Before the kernels are compiled, so that a mistyped name is told of at once.
            with ctrl_c.may_interrupt():
                source = stack.enter_context(chosen.open())
            with errors.status("Loading the kernels", spinner="line"), ctrl_c.may_interrupt():
                compile_kernels()
                cache = HitCountingCache(block_size=block_size or 1)
            player = Replay(cache, block_size=block_size, capacity=capacity)
            with request_progress(errors, source.fraction_done) as show_progress:
                for request in read_interruptibly(source.requests, ctrl_c):
                    player.play(request)
                    show_progress(player.requests)
    except KeyboardInterrupt:
        return cache, True
    except TraceError as error:
        raise BadTrace(str(error)) from None
    return cache, False


def _runs(nodes: Iterable[NodeInfo], hits_of: Callable[[int], int] | None) -> list[_Run]:
    """Join the nodes to runs, parents before children."""
    runs: list[_Run] = []
    run_of: list[_Run] = []
    only_children: set[int] = set()
    for node in nodes:
        above = None if node.parent is None else run_of[node.parent]
        if above is not None and node.parent in only_children:
            run = above
        else:
            run = _Run(
                number=len(runs),
                parent=None if above is None else above.number,
                adapter_id=node.adapter_id,
                block_size=node.block_size,
                start=node.depth - node.block_size,
                level=0 if above is None else above.level + 1,
                hits=None if hits_of is None else hits_of(node.block),
                # The first is never older than those that follow it.
                age=node.age,
            )
            runs.append(run)
            if above is not None:
                above.children.append(run)
        run_of.append(run)
        if node.children == 1:
            only_children.add(node.number)
        run.blocks += 1
        run.last_hits = None if hits_of is None else hits_of(node.block)
        run.references = max(run.references, node.references)
        run.snapshots += len(node.snapshots)
        run.tokens += node.tokens[: _TOKENS_SHOWN - len(run.tokens)].tolist()
    for run in reversed(runs):
        if run.parent is not None:
            runs[run.parent].blocks_below += run.blocks + run.blocks_below
    return runs


def _hottest(runs: list[_Run], num_lines: int, max_depth: int | None) -> set[int]:
    """Choose the runs to show, by number: the hottest, each with all that are above it."""
    waiting = [(run.heat, run) for run in runs if run.parent is None]
    heapq.heapify(waiting)
    shown: set[int] = set()
    while waiting and len(shown) < num_lines:
        _, run = heapq.heappop(waiting)
        shown.add(run.number)
        if max_depth is None or run.level + 1 < max_depth:
            for child in run.children:
                heapq.heappush(waiting, (child.heat, child))
    return shown


def _as_json(origin: Mapping[str, object], interrupted: bool, runs: list[_Run], shown: set[int]) -> str:
    return json.dumps(
        {
            "interrupted": interrupted,
            "source": origin,
            "cached_blocks": sum(run.blocks for run in runs),
            "runs": [
                {
                    "number": run.number,
                    "parent": run.parent,
                    "adapter_id": run.adapter_id,
                    "block_size": run.block_size,
                    "depth": run.start + run.blocks * run.block_size,
                    "blocks": run.blocks,
                    "blocks_below": run.blocks_below,
                    "hits": run.hits,
                    "last_hits": run.last_hits,
                    "references": run.references,
                    "age": run.age,
                    "snapshots": run.snapshots,
                    "tokens": run.tokens,
                }
                for run in runs
                if run.number in shown
            ],
        }
    )


def _print_tree(console: Console, title: str, interrupted: bool, runs: list[_Run], shown: set[int]) -> None:
    # On a terminal a line that is too long ends in dots; in a file it is whole.
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    # A name may hold what the terminal's encoding has no sign for.
    title = title.encode(console.encoding, "replace").decode(console.encoding)
    blocks = sum(run.blocks for run in runs)
    top = Tree(Text(f"The cache of {title}: {blocks:,} blocks", style="bold"), guide_style="dim")
    if interrupted:
        top.add(Text("interrupted: the cache as it was then", style="bold yellow"))
    forests: dict[tuple[int, int], list[_Run]] = {}
    for run in runs:
        if run.parent is None:
            forests.setdefault((run.adapter_id, run.block_size), []).append(run)
    for (adapter_id, block_size), roots in sorted(forests.items(), key=lambda forest: min(forest[1], key=_heat).heat):
        total = sum(run.blocks + run.blocks_below for run in roots)
        size = "1 token" if block_size == 1 else f"{block_size:,} tokens"
        branch = top.add(Text(f"adapter {adapter_id}, {total:,} blocks of {size}"))
        _add_runs(branch, roots, shown)
    console.print(top)


def _heat(run: _Run) -> tuple[int, int, int]:
    return run.heat


def _add_runs(branch: Tree, roots: list[_Run], shown: set[int]) -> None:
    """Add runs with what is shown below them; without recursion, since a tree may be deep."""
    left = [(branch, roots)]
    while left:
        above, siblings = left.pop()
        for run in sorted((run for run in siblings if run.number in shown), key=_heat):
            left.append((above.add(_line(run)), run.children))
        hidden = [run for run in siblings if run.number not in shown]
        if hidden:
            blocks = sum(run.blocks + run.blocks_below for run in hidden)
            above.add(Text(f"{len(hidden):,} more, {_counted(blocks, 'block')}", style="dim"))


def _line(run: _Run) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(_counted(run.blocks, "block"), style="bold")
    line.append(f" from token {run.start:,}")
    line.append("".join(f"  {part}" for part in _facts(run)))
    tokens = " ".join(map(str, run.tokens))
    more = "" if run.blocks * run.block_size <= len(run.tokens) else " ..."
    line.append(f"  [{tokens}{more}]", style="dim")
    return line


def _facts(run: _Run) -> Iterator[str]:
    if run.hits is not None:
        last = "" if run.last_hits == run.hits else f" to {run.last_hits:,}"
        yield f"hits {run.hits:,}{last}"
    if run.references:
        yield f"held by {run.references:,}"
    if run.snapshots:
        yield _counted(run.snapshots, "snapshot")
    yield f"age {run.age:,}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
