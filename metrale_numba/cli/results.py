"""How a command prints its results, whatever standard output leads to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

__all__ = ["printing_results"]


@contextmanager
def printing_results() -> Iterator[None]:
    """Say in one line why results could not be written; end quietly where a reader has seen enough.

    Raises
    ------
    click.ClickException
        If they cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        # click knows what to do when a reader such as head has seen enough.
        raise
    except OSError as error:
        raise click.ClickException(f"the result cannot be written: {error.strerror}") from None
