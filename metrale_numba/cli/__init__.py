"""The command ``metrale-numba``: arguments in, results out as tables or as JSON.

Relies on click for arguments and on rich for what a terminal shows. Results go to standard output, all else to
standard error; the exit status is 0, 1 where nothing could be compiled or written, 2 for bad arguments or a bad
trace, 130 after Ctrl-C. Each command is in a file of its name.
"""

from __future__ import annotations

import click

import metrale_numba
from metrale_numba.cli.curve import curve as curve_command
from metrale_numba.cli.explain import explain as explain_command
from metrale_numba.cli.policies import policies as policies_command
from metrale_numba.cli.replay import replay as replay_command
from metrale_numba.cli.simulate import simulate as simulate_command
from metrale_numba.cli.tree import tree as tree_command

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(metrale_numba.__version__, prog_name="metrale-numba")
def main() -> None:
    """Prefix cache of an LLM serving engine, on NumPy arrays and Numba kernels."""


main.add_command(curve_command)
main.add_command(explain_command)
main.add_command(policies_command)
main.add_command(replay_command)
main.add_command(simulate_command)
main.add_command(tree_command)
