"""Shows a comparison on the terminal: a table, what each column timed, and how to get the peers that are missing."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.comparison import Comparison
from benchmarks.peers import PEERS

__all__ = ["notes", "print_report"]

# Wide enough for a column of every peer, where there is no terminal to fit.
_WIDTH_IN_A_PIPE = 200


def notes(comparison: Comparison) -> list[str]:
    """Say how a comparison was made, in sentences that the terminal and the documentation share."""
    machine = comparison.machine
    rounds = len(comparison.rounds[comparison.names[0]])
    warning = [] if comparison.scale == "full" else ["At a small scale, to see that it runs: the figures say nothing."]
    return [
        *warning,
        f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, {machine['system']}. "
        f"Medians over {rounds} {'round' if rounds == 1 else 'rounds'}, each of which ran every peer once, in a "
        "process of its own.",
        "In parentheses: the peer's figure divided by ours. A dash: the peer has no such operation.",
        "The garbage collector was run before every timed loop and off in it, for all alike. The simulator's figures "
        "contain what the simulator itself costs, which is in a row of its own.",
    ]


def print_report(comparison: Comparison) -> None:
    """Print the table and everything that belongs to it to standard output."""
    terminal = Console().is_terminal
    console = Console(width=None if terminal else _WIDTH_IN_A_PIPE, highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("unit")
    for name in comparison.names:
        table.add_column(PEERS[name].label, justify="right")
    for row in comparison.rows:
        table.add_row(row.title, row.unit, *(comparison.cell(name, row.key) for name in comparison.names))
    console.print(table)
    for note in notes(comparison):
        console.print(Text(note))
    console.print()
    for name in comparison.names:
        versions = ", ".join(f"{package} {version}" for package, version in comparison.versions[name].items())
        console.print(Text(f"{PEERS[name].label} ({versions}): {comparison.calls[name]}."))
    # Several peers may come by the same commands.
    for recipe in dict.fromkeys(missing.recipe for missing in comparison.missing):
        console.print()
        for missing in comparison.missing:
            if missing.recipe == recipe:
                console.print(Text(f"{missing.label} ({missing.name}) was not measured, {missing.reason}."))
        console.print("To get it:")
        for command in recipe:
            console.print(Text(f"    {command}"))
