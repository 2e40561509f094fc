"""``python -m benchmarks.compare``: measures the peers that are installed against this project, on identical work.

Each peer runs in a process of its own, with the same seeded workload. The processes take turns: every round runs every
peer once, so that a slow minute of the machine does not fall on one of them alone. The report gives medians over the
rounds, ratios, and how to get what is missing. The exit status is 0, 1 where a peer that is installed failed, 2 for
bad arguments.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Also runs as a script, where only its own folder is looked for modules in.
if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.comparison import Comparison, Missing
from benchmarks.comparison_table import print_report
from benchmarks.machine import describe_machine
from benchmarks.peers import OURS, PEERS, Entry
from benchmarks.peers.peer import SECTIONS
from benchmarks.workload import SCALES

_ROOT = Path(__file__).resolve().parent.parent
# Of a traceback, for whoever reads the log; the report has the last of them alone.
_LINES_OF_ERROR = 10

_log = logging.getLogger("benchmarks.compare")


class Interpreter(NamedTuple):
    """A Python, and what it has of the packages that peers need."""

    path: str
    python: str
    packages: Mapping[str, str]

    def lacks(self, entry: Entry) -> list[str]:
        """Name the packages of a peer that are not installed."""
        return [package for package in entry.packages if package not in self.packages]


class FailedError(Exception):
    """A process ended without figures."""


def _run(interpreter: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [interpreter, *arguments], cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"ended with status {done.returncode}"]
        _log.error("%s failed:\n%s", " ".join(arguments), "\n".join(lines[-_LINES_OF_ERROR:]))
        raise FailedError(lines[-1])
    return done.stdout


def _probe(path: str) -> Interpreter:
    packages = {package for entry in PEERS.values() for package in entry.packages}
    try:
        found = json.loads(_run(path, "-m", "benchmarks.peers.probe", *sorted(packages)))
    except (OSError, FailedError, ValueError) as error:
        raise click.BadParameter(f"{path} is no Python that can be used: {error}", param_hint="--python") from error
    return Interpreter(path, found["python"], found["packages"])


def _interpreters(names: Iterable[str], given: Sequence[str]) -> dict[str, Interpreter]:
    """Choose an interpreter for each peer: its own, or else the one for all if it has what is needed, or else this."""
    own: dict[str, str] = {}
    for_all = sys.executable
    for value in given:
        name, separator, path = value.partition("=")
        if not separator:
            for_all = value
        elif name in PEERS:
            own[name] = path
        else:
            raise click.BadParameter(f"{name} is no peer: {', '.join(PEERS)}", param_hint="--python")
    probed: dict[str, Interpreter] = {}
    chosen = {}
    for name in names:
        for path in (own.get(name, for_all), sys.executable):
            if path not in probed:
                probed[path] = _probe(path)
        chosen[name] = probed[own.get(name, for_all)]
        if name not in own and chosen[name].lacks(PEERS[name]) and not probed[sys.executable].lacks(PEERS[name]):
            chosen[name] = probed[sys.executable]
    return chosen


def _measure(interpreter: Interpreter, name: str, sections: Sequence[str], scale: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "figures.json")
        chosen = [argument for section in sections for argument in ("--section", section)]
        _run(interpreter.path, "-m", "benchmarks.peers.run", name, "--scale", scale, "--out", str(out), *chosen)
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def _turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Let every peer have its turn in every round, and begin each round with another."""
    for number in range(rounds):
        first = number % len(names)
        yield from (*names[first:], *names[:first])


def compare(
    names: Sequence[str], pythons: Sequence[str], rounds: int, sections: Sequence[str], scale: str
) -> Comparison:
    """Measure peers in turn.

    Parameters
    ----------
    names : sequence of str
        The peers, ours among them.
    pythons : sequence of str
        Interpreters, as the command takes them.
    rounds : int
        How often each peer is run.
    sections : sequence of str
        What to measure.
    scale : str
        How much work there is.

    Returns
    -------
    Comparison
        Everything that was measured, and who is missing.
    """
    comparison = Comparison(describe_machine(), scale)
    interpreters = _interpreters(names, pythons)
    for name, interpreter in interpreters.items():
        entry = PEERS[name]
        if lacking := interpreter.lacks(entry):
            comparison.missing.append(Missing(name, entry.label, f"not installed: {', '.join(lacking)}", entry.recipe))
    absent = {missing.name for missing in comparison.missing}
    present = [name for name in names if name not in absent]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=rounds * len(present))
        for name in _turns(present, rounds):
            progress.update(task, description=PEERS[name].label)
            if name not in absent:
                try:
                    measured = _measure(interpreters[name], name, sections, scale)
                except FailedError as error:
                    comparison.missing.append(Missing(name, PEERS[name].label, f"failed: {error}", PEERS[name].recipe))
                    absent.add(name)
                    # Figures of fewer rounds than the others' would look like theirs.
                    comparison.rounds.pop(name, None)
                else:
                    packages = interpreters[name].packages
                    comparison.versions[name] = {"python": interpreters[name].python} | {
                        package: packages[package] for package in PEERS[name].packages
                    }
                    comparison.calls[name] = measured["calls"]
                    comparison.rounds.setdefault(name, []).append(measured["figures"])
            progress.advance(task)
    return comparison


def _as_names(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str]:
    names = list(PEERS) if value is None else [name.strip() for name in value.split(",")]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(PEERS)}")
    # Ours always, for every ratio is to ours; and once each.
    return [name for name in PEERS if name == OURS or name in names]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--peers",
    "names",
    metavar="A,B",
    callback=_as_names,
    help=f"Peers to measure, of {', '.join(PEERS)}.  [default: all]",
)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="[NAME=]PATH",
    help="Interpreter that has the packages of the peer NAME, or of all; repeatable.  [default: this one]",
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="How often each peer is run.")
@click.option(
    "--section",
    "sections",
    multiple=True,
    type=click.Choice(SECTIONS),
    help="Measure this; repeatable.  [default: all]",
)
@click.option("--scale", type=click.Choice(list(SCALES)), default="full", show_default=True, help="How much work.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write everything to a file."
)
@click.option(
    "--write-docs",
    "docs",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    is_flag=False,
    flag_value=str(_ROOT / "docs"),
    help="Write comparison.rst, .svg and .png, by default into docs/; needs Matplotlib.",
)
def main(
    names: list[str],
    pythons: tuple[str, ...],
    rounds: int,
    sections: tuple[str, ...],
    scale: str,
    json_path: Path | None,
    docs: Path | None,
) -> None:
    """Measure prefix caches of other projects against this one, on identical work."""
    logging.basicConfig(format="%(message)s", handlers=[RichHandler(console=Console(stderr=True), show_path=False)])
    comparison = compare(names, pythons, rounds, sections or SECTIONS, scale)
    if json_path is not None:
        json_path.write_text(json.dumps(comparison.as_json(), indent=2) + "\n")
    if OURS not in comparison.names:
        reason = next(missing.reason for missing in comparison.missing if missing.name == OURS)
        raise click.ClickException(f"nothing can be compared without {PEERS[OURS].label}, {reason}")
    print_report(comparison)
    if docs is not None:
        # Matplotlib is wanted here alone.
        from benchmarks.comparison_docs import write_docs  # noqa: PLC0415

        write_docs(comparison, docs)
    if any(missing.reason.startswith("failed") for missing in comparison.missing):
        sys.exit(1)


if __name__ == "__main__":
    main()
