"""What came of a comparison: the rows, the median of each figure over the rounds, and the ratio of peer to ours.

Everything that is shown, as a table, as JSON or in the documentation, is taken from one :class:`Comparison`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from benchmarks.peers import OURS, PEERS

__all__ = ["DASH", "ROWS", "Comparison", "Missing", "Row", "show"]

DASH = "-"


class Row(NamedTuple):
    """One figure of each peer."""

    key: str
    title: str
    unit: str


ROWS = (
    Row("lookup_256", "look-up and release, 256 tokens", "us"),
    Row("lookup_2048", "look-up and release, 2,048 tokens", "us"),
    Row("again_2048", "the same for prompts that were asked just before", "us"),
    Row("lookup_32768", "look-up and release, 32,768 tokens", "us"),
    Row("miss_2048", "miss, 2,048 tokens", "us"),
    Row("insert_2048", "insert, 2,048 new tokens", "us"),
    Row("evict_1", "evict 1 block, a call", "us"),
    Row("evict_1_per_block", "evict 1 block, each that went", "ns"),
    Row("evict_64", "evict 64 blocks, a call", "us"),
    Row("evict_64_per_block", "evict 64 blocks, each that went", "ns"),
    Row("evict_4096", "evict 4,096 blocks, a call", "us"),
    Row("evict_4096_per_block", "evict 4,096 blocks, each that went", "ns"),
    Row("simulator", "chat simulator (more is better)", "requests/s"),
    Row("harness", "the simulator with a cache that does nothing", "requests/s"),
    Row("bytes_per_block", "memory for each block", "bytes"),
)


class Missing(NamedTuple):
    """A peer that could not be measured."""

    name: str
    label: str
    reason: str
    recipe: tuple[str, ...]


def show(value: float | None) -> str:
    """Write a figure with three digits that count, and thousands separated; a dash for None."""
    if value is None:
        return DASH
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


@dataclass
class Comparison:
    """Figures of several rounds, one dictionary by row for each round and peer."""

    machine: Mapping[str, str | int]
    scale: str
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Versions of packages, and of Python, by peer."""
    calls: dict[str, str] = field(default_factory=dict)
    """What was timed, by peer."""
    rounds: dict[str, list[Mapping[str, float]]] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The peers that were measured, ours first."""
        return [name for name in PEERS if self.rounds.get(name)]

    @property
    def rows(self) -> list[Row]:
        """The rows that anyone has a figure for."""
        return [row for row in ROWS if any(self.figure(name, row.key) is not None for name in self.names)]

    def figure(self, name: str, key: str) -> float | None:
        """Take the median over the rounds of one peer; None if it lacks the row."""
        values = [figures[key] for figures in self.rounds[name] if key in figures]
        return median(values) if values else None

    def ratio(self, name: str, key: str) -> float | None:
        """Divide a peer's figure by ours; None if either lacks the row."""
        theirs, ours = self.figure(name, key), self.figure(OURS, key)
        return None if theirs is None or not ours else theirs / ours

    def cell(self, name: str, key: str) -> str:
        """Write one peer's figure, and what it is times ours."""
        ratio = self.ratio(name, key)
        shown = show(self.figure(name, key))
        return shown if name == OURS or ratio is None else f"{shown} ({show(ratio)}x)"

    def as_json(self) -> dict[str, Any]:
        """Put everything into one object: each round, medians, ratios, and who is missing."""
        return {
            "machine": dict(self.machine),
            "scale": self.scale,
            "peers": {
                name: {
                    "label": PEERS[name].label,
                    "versions": dict(self.versions[name]),
                    "calls": self.calls[name],
                    "rounds": [dict(figures) for figures in self.rounds[name]],
                }
                for name in self.names
            },
            "rows": [
                {
                    "key": row.key,
                    "title": row.title,
                    "unit": row.unit,
                    "figures": {name: self.figure(name, row.key) for name in self.names},
                    "ratios": {name: self.ratio(name, row.key) for name in self.names if name != OURS},
                }
                for row in self.rows
            ],
            "missing": [missing._asdict() for missing in self.missing],
        }
