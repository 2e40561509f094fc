"""Measures one peer in this process and writes its figures to a file, as JSON.

``python -m benchmarks.compare`` starts one such process for each peer and round. The figures go to a file because
some peers print on standard output.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from benchmarks.measure import measure
from benchmarks.peers import PEERS
from benchmarks.peers.peer import SECTIONS
from benchmarks.workload import SCALES


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", type=click.Choice(list(PEERS)))
@click.option(
    "--section",
    "sections",
    multiple=True,
    type=click.Choice(SECTIONS),
    help="Measure this; repeatable.  [default: all]",
)
@click.option("--scale", type=click.Choice(list(SCALES)), default="full", show_default=True, help="How much work.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures, not the terminal.")
def main(name: str, sections: tuple[str, ...], scale: str, out: Path | None) -> None:
    """Measure the peer NAME, of which this interpreter must have the packages."""
    peer = PEERS[name].load()
    text = json.dumps({"calls": peer.calls, "figures": measure(peer, SCALES[scale], sections or SECTIONS)}, indent=2)
    if out is None:
        click.echo(text)
    else:
        out.write_text(text)


if __name__ == "__main__":
    main()
