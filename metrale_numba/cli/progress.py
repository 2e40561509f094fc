"""The progress bar of a command, on a terminal alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

__all__ = ["error_console", "request_progress"]

# Often enough to look alive, seldom enough not to show in the requests per second.
_SECONDS_BETWEEN_REFRESHES = 0.1


def error_console() -> Console:
    """Give the console of what is no result: nothing moves on it where nobody watches."""
    errors = Console(stderr=True)
    # By itself rich would also animate into a pipe if FORCE_COLOR is set.
    errors.quiet = not errors.file.isatty()
    return errors


@contextmanager
def request_progress(console: Console, fraction_done: Callable[[int], float | None]) -> Iterator[Callable[[int], None]]:
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
