"""Counts the work of all scenarios and shows it beside the committed figures, or writes it as the new ones.

It relies on the source tree it stands in. It promises to end with status 1 if a figure is not the committed one, unless
it was told to write.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).parent
FIGURES = TESTS / "data" / "work.json"
Figures = dict[str, dict[str, int]]


def count(**environment: str) -> Figures:
    """Count everything, in a process of its own whose kernels count."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("METRALE_", "NUMBA_"))}
    ours = {"METRALE_COUNT_WORK": "1", "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, str(TESTS / "work_scenarios.py")]
    result = subprocess.run(command, env={**inherited, **ours, **environment}, stdout=subprocess.PIPE, check=True)
    figures: Figures = json.loads(result.stdout)
    return figures


def committed() -> Figures:
    figures: Figures = json.loads(FIGURES.read_text())
    return figures


def differences(before: Figures, now: Figures) -> list[tuple[str, str, int, int]]:
    """Scenario, kind of work, the figure before and the one now, wherever they differ; no figure is 0."""
    return [
        (scenario, kind, before.get(scenario, {}).get(kind, 0), now.get(scenario, {}).get(kind, 0))
        for scenario in dict.fromkeys([*before, *now])
        for kind in dict.fromkeys([*before.get(scenario, {}), *now.get(scenario, {})])
        if before.get(scenario, {}).get(kind, 0) != now.get(scenario, {}).get(kind, 0)
    ]


def table_of(before: Figures, now: Figures) -> Table:
    table = Table("scenario", "work", title="Work per scenario")
    table.add_column("committed", justify="right")
    table.add_column("counted", justify="right")
    changed = {(scenario, kind) for scenario, kind, _, _ in differences(before, now)}
    for scenario in dict.fromkeys([*before, *now]):
        old, new = before.get(scenario, {}), now.get(scenario, {})
        for i, kind in enumerate(dict.fromkeys([*old, *new])):
            style = "bold red" if (scenario, kind) in changed else None
            table.add_row("" if i else scenario, kind, f"{old.get(kind, 0):,}", f"{new.get(kind, 0):,}", style=style)
        table.add_section()
    return table


@click.command()
@click.option("--write", is_flag=True, help="Write what was counted to tests/data/work.json, to be committed.")
def main(write: bool) -> None:
    """Count the work of calls, which does not depend on the machine, and compare it with the committed figures."""
    now = count()
    before = committed() if FIGURES.exists() else {}
    Console().print(table_of(before, now))
    changed = len(differences(before, now))
    click.echo(f"{changed} figures are not the committed ones")
    if write:
        FIGURES.write_text(json.dumps(now, indent=1) + "\n")
        click.echo(f"wrote {FIGURES}")
    elif changed:
        sys.exit(1)


if __name__ == "__main__":
    main()
