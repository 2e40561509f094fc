"""Compiles the kernels for a command, or says in one line why that cannot be."""

from __future__ import annotations

import click

import metrale_numba

__all__ = ["compile_kernels"]


def compile_kernels() -> None:
    """Make every kernel ready.

    Raises
    ------
    click.ClickException
        If Numba's compiler is switched off.
    """
    try:
        metrale_numba.warmup()
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
