"""Where the requests of a command come from: a trace, or a workload that is made up on the spot.

Every command that plays requests takes the same argument and options for that: :func:`source_options`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from typing import NamedTuple

import click
from click.core import ParameterSource

from metrale_numba.replay import TOKENS_PER_HASH_ID, WORKLOADS, Request, TraceReader, open_trace, workload

__all__ = ["BadTrace", "ChosenSource", "Source", "source_options"]

_DEFAULT_WORKLOAD = "chat"


class BadTrace(click.ClickException):
    """Shown as its message alone, like a bad argument."""

    exit_code = 2


class Source(NamedTuple):
    """Where requests come from, opened."""

    requests: Iterable[Request]
    fraction_done: Callable[[int], float | None]
    """How much of the work is done once so many requests are played, 0 to 1; None if nobody knows."""


class ChosenSource:
    """What the arguments of a command say about where its requests come from.

    Parameters
    ----------
    trace : str or None
        The trace; None for a workload.
    name : str
        The workload.
    seed, requests, sessions : int
        What shapes it.
    think_time : int or None
        What else shapes the chat workload.
    limit : int or None
        Requests to stop after.
    """

    def __init__(
        self,
        trace: str | None,
        *,
        name: str = _DEFAULT_WORKLOAD,
        seed: int,
        requests: int,
        sessions: int,
        think_time: int | None = None,
        limit: int | None = None,
    ) -> None:
        self._trace = trace
        self._workload = name
        self._seed = seed
        self._requests = requests
        self._sessions = sessions
        self._shape = {} if think_time is None else {"think_time": think_time}
        self._limit = limit
        self._reader: TraceReader | None = None

    @contextmanager
    def open(self) -> Iterator[Source]:
        """Open the trace, and close it at the end; or begin to make up the workload.

        Raises
        ------
        TraceError
            If the trace cannot be opened. Iterating over the requests raises it for the first line that is none.
        """
        if self._trace is None:
            requests = self._requests if self._limit is None else min(self._requests, self._limit)
            made = workload(self._workload, self._seed, requests, self._sessions, **self._shape)
            yield Source(made, lambda played: played / requests)
            return
        with open_trace(self._trace) as reader:
            self._reader = reader
            yield Source(islice(reader, self._limit), self._fraction_done)

    @property
    def title(self) -> str:
        """What is played, for the heading of a table."""
        if self._trace is None:
            return f"the built-in {self._workload} workload, seed {self._seed}"
        return click.format_filename(self._trace)

    @property
    def tokens_per_id(self) -> int:
        """Tokens that a hash id of the requests stands for, or 1 if they hold the tokens; known once one was read."""
        known = None if self._reader is None else self._reader.tokens_per_id
        return known or TOKENS_PER_HASH_ID

    def as_json(self) -> dict[str, object]:
        """What is played, for the field `source` of a JSON object; complete once a request was read."""
        if self._trace is None:
            shape = {"seed": self._seed, "requests": self._requests, "sessions": self._sessions, **self._shape}
            return {"workload": self._workload, **shape}
        return {"trace": self._trace, "format": None if self._reader is None else self._reader.format}

    def _fraction_done(self, played: int) -> float | None:
        fractions = (
            None if self._reader is None else self._reader.fraction_read,
            None if self._limit is None else played / self._limit,
        )
        return max((fraction for fraction in fractions if fraction is not None), default=None)


# By the names of their parameters.
_WORKLOAD_OPTIONS = ("name", "seed", "requests", "sessions", "think_time")

_OPTIONS = (
    click.argument("trace", required=False, type=click.Path(allow_dash=True)),
    click.option(
        "--limit", metavar="N", type=click.IntRange(min=1), show_default="no limit", help="Requests to stop after."
    ),
    click.option(
        "--workload",
        "name",
        type=click.Choice(list(WORKLOADS)),
        default=_DEFAULT_WORKLOAD,
        show_default=True,
        help="The built-in workload to make up where there is no TRACE.",
    ),
    click.option(
        "--seed",
        metavar="N",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Seed of the built-in workload.",
    ),
    click.option(
        "--requests",
        metavar="N",
        type=click.IntRange(1, 100_000_000),
        default=60_000,
        show_default=True,
        help="Requests of the built-in workload.",
    ),
    click.option(
        "--sessions",
        metavar="N",
        type=click.IntRange(1, 1_000_000),
        default=1_000,
        show_default=True,
        help="Sessions that go on side by side in the built-in workload.",
    ),
    click.option(
        "--think-time",
        metavar="MS",
        type=click.IntRange(1, 86_400_000),
        show_default="chats take turns at random",
        help="Milliseconds from one turn of a chat to its next, half as many to one and a half times as many.",
    ),
)


def source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the argument TRACE and the options of a workload; it gets them as one, `source`.

    Parameters
    ----------
    command : callable
        The command, which takes a :class:`ChosenSource` as its keyword `source`. The decorator stands below those of
        its own options, and above :func:`click.pass_context`.

    Returns
    -------
    callable
        The command with these options. It refuses those that do not go together before anything is done.
    """

    @wraps(command)
    def with_source(
        *arguments: object,
        trace: str | None,
        limit: int | None,
        name: str,
        seed: int,
        requests: int,
        sessions: int,
        think_time: int | None,
        **others: object,
    ) -> None:
        context = click.get_current_context()
        if trace is not None:
            for option in _WORKLOAD_OPTIONS:
                if context.get_parameter_source(option) is not ParameterSource.DEFAULT:
                    flag = _flag(context, option)
                    raise click.UsageError(
                        f"{flag} shapes the built-in workload and does not go with a TRACE.", context
                    )
        if think_time is not None and name != _DEFAULT_WORKLOAD:
            raise click.UsageError(f"--think-time is of the chat workload, and not of {name}.", context)
        source = ChosenSource(
            trace,
            name=name,
            seed=seed,
            requests=requests,
            sessions=sessions,
            think_time=think_time,
            limit=limit,
        )
        command(*arguments, source=source, **others)

    decorated: Callable[..., None] = with_source
    for add in reversed(_OPTIONS):
        decorated = add(decorated)
    return decorated


def _flag(context: click.Context, parameter: str) -> str:
    return next(each.opts[0] for each in context.command.params if each.name == parameter)
