"""``metrale-numba explain``: plays requests up to one of them, and says why it hits what it hits."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from contextlib import ExitStack
from typing import NamedTuple

import click
from rich.console import Console
from rich.text import Text

import metrale_numba
from metrale_numba.cli.interrupts import CtrlC, exit_interrupted, read_interruptibly
from metrale_numba.cli.kernels import compile_kernels
from metrale_numba.cli.progress import error_console, request_progress
from metrale_numba.cli.results import printing_results
from metrale_numba.cli.sources import BadTrace, ChosenSource, source_options
from metrale_numba.replay import Replay, Request, TraceError, default_block_size, prompt_tokens, tokens_per_block

__all__ = ["explain"]

# As in the command `replay`.
_LARGEST_BLOCK_SIZE = 4_096
_LARGEST_CAPACITY = metrale_numba.NONE

# What fits into 7 GB. Nobody means more.
_MOST_GHOSTS = 100_000_000


class _Explained(NamedTuple):
    """A request and what the cache says of it, just before it is played."""

    request: Request
    explanation: metrale_numba.Explanation
    tokens_per_block: int
    cached_blocks: int
    evicted_for: int | None
    """The number of the request for which the first missing block was evicted."""
    last_used_by: int | None
    """The number of the request that used it last."""


@click.command(short_help="Say why a request of a trace hits what it hits.")
@click.option(
    "--request",
    "number",
    metavar="N",
    type=click.IntRange(min=1),
    required=True,
    help="The request to explain, counted from 1. Those before it are played first.",
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
    "--ghosts",
    metavar="N",
    type=click.IntRange(1, _MOST_GHOSTS),
    default=1_000_000,
    show_default=True,
    help="Evictions that the cache remembers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of sentences.")
@source_options
@click.pass_context
def explain(
    context: click.Context,
    source: ChosenSource,
    number: int,
    capacity: int | None,
    block_size: int | None,
    ghosts: int,
    as_json: bool,
) -> None:
    """Play requests up to number N, and say how much of that one is cached, and why not more.

    What comes after the match was never seen, or evicted: then it is said for which request, and how many blocks
    more the cache would have had to hold to keep it. Or it is cached under another adapter, or fills no block.

    TRACE is as for replay; without it, a built-in workload is made up.
    """
    with CtrlC() as ctrl_c:
        explained = _explained(source, ctrl_c, number, capacity, block_size, ghosts)
        if explained is None:
            exit_interrupted(context)
        with printing_results():
            if as_json:
                click.echo(_as_json(source, number, capacity, explained))
            else:
                _print_words(Console(highlight=False, soft_wrap=True), source, number, explained)


def _explained(
    chosen: ChosenSource, ctrl_c: CtrlC, number: int, capacity: int | None, block_size: int | None, ghosts: int
) -> _Explained | None:
    """Play what comes before a request and explain that one; None if Ctrl-C came first."""
    errors = error_console()
    # The clock after each request, by which the ticks of an explanation are told as requests.
    clocks: list[int] = []
    try:
        with ExitStack() as stack:
            # Before the kernels are compiled, so that a mistyped name is told of at once.
            with ctrl_c.may_interrupt():
                source = stack.enter_context(chosen.open())
            with errors.status("Loading the kernels", spinner="line"), ctrl_c.may_interrupt():
                compile_kernels()
                cache = metrale_numba.RadixTree(block_size=block_size or 1, ghosts=ghosts)
            player = Replay(cache, block_size=block_size, capacity=capacity)
            with request_progress(errors, source.fraction_done) as show_progress:
                for request in read_interruptibly(source.requests, ctrl_c):
                    if player.requests == number - 1:
                        return _explain(cache, request, block_size or default_block_size(request), clocks)
                    player.play(request)
                    clocks.append(cache.stats_detail().clock)
                    show_progress(player.requests)
    except KeyboardInterrupt:
        return None
    except TraceError as error:
        raise BadTrace(str(error)) from None
    raise BadTrace(f"there is no request {number:,}: {chosen.title} has {player.requests:,}")


def _explain(cache: metrale_numba.RadixTree, request: Request, block_size: int, clocks: list[int]) -> _Explained:
    # Of tokens, those that fill no block are a reason, too.
    tokens = request.hash_ids if request.tokens_per_id == 1 else prompt_tokens(request, block_size)
    explanation = cache.explain(tokens, block_size, request.session, request.adapter)
    evicted_for = last_used_by = None
    if explanation.evicted is not None:
        evicted_at = clocks[-1] - explanation.evicted.ticks_ago
        # A request evicts before it inserts, which is its last tick; its own look-up may have been one before.
        evicted_for = bisect_right(clocks, evicted_at) + 1
        last_used_by = bisect_left(clocks, evicted_at - explanation.evicted.idle_ticks) + 1
    num_blocks, _ = cache.stats()
    return _Explained(
        request, explanation, tokens_per_block(request, block_size), num_blocks, evicted_for, last_used_by
    )


def _as_json(source: ChosenSource, number: int, capacity: int | None, explained: _Explained) -> str:
    return json.dumps(
        {
            "source": source.as_json(),
            "request": number,
            "timestamp": explained.request.timestamp,
            "input_length": explained.request.input_length,
            "capacity": capacity,
            "cached_blocks": explained.cached_blocks,
            "tokens_per_block": explained.tokens_per_block,
            "evicted_for_request": explained.evicted_for,
            "last_used_by_request": explained.last_used_by,
            "explanation": explained.explanation.as_dict(),
            "words": explained.explanation.words().splitlines(),
        }
    )


def _print_words(console: Console, source: ChosenSource, number: int, explained: _Explained) -> None:
    request, explanation = explained.request, explained.explanation
    heading = f"Request {number:,} of {source.title}"
    # A name may hold what the terminal's encoding has no sign for.
    console.print(Text(heading.encode(console.encoding, "replace").decode(console.encoding), style="bold"))
    lines = [
        f"{request.input_length:,} tokens at {request.timestamp:,.0f} ms; "
        f"{explained.cached_blocks:,} blocks are cached before it is played."
    ]
    if request.tokens_per_id != 1:
        lines.append(
            f"A block is a hash id of {request.tokens_per_id:,} tokens here, "
            f"and has {explanation.block_size:,} in what follows."
        )
    lines += ["", *explanation.words().splitlines()]
    if explained.evicted_for is not None:
        lines.append(
            f"It was used last by request {explained.last_used_by:,}, and evicted for request "
            f"{explained.evicted_for:,}, {number - explained.evicted_for:,} before this one."
        )
    for line in lines:
        console.print(Text(line))
