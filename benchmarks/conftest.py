"""Fixtures of the benchmarks and the table at the end of their run.

The package's kernels are compiled before anything is timed, and pytest-benchmark's own table, which would show rounds
and not calls, is left out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

# Last, so that an installed package goes before the one of the checkout.
sys.path.append(str(Path(__file__).parent.parent))

import metrale_numba
from benchmarks.rows import Figures, Row
from benchmarks.sizes import FULL, SCALE_VARIABLE, SIZES, Sizes, default_scale
from benchmarks.stock import Stock, fill
from benchmarks.summary import judge, print_summary
from benchmarks.yardsticks import Yardsticks

_ROWS: pytest.StashKey[list[Figures]] = pytest.StashKey()
# Settings of the cache that would change what is measured.
_CACHE_VARIABLES = (
    "METRALE_PREFIX_SUBBLOCK",
    "METRALE_DISABLE_SSM_TAIL_PROTECT",
    "METRALE_SSM_TAIL_LEASE_TTL",
    "METRALE_SNAP_EVICT_ALPHA",
    "METRALE_SNAP_EVICT_LEGACY",
    "METRALE_HERMETIC",
    "METRALE_ADOPT_BLOCKS",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the scale be chosen."""
    parser.addoption(
        "--scale",
        choices=list(SIZES),
        default=default_scale(),
        help=f"how much is measured [{SCALE_VARIABLE}, or full]",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make room for the rows, and leave pytest-benchmark's table out."""
    config.stash[_ROWS] = []
    config.option.benchmark_quiet = True
    for name in _CACHE_VARIABLES:
        os.environ.pop(name, None)


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Add the targets that are ratios between rows."""
    rows: list[Figures] = config.stash[_ROWS]
    output_json["targets"] = [target._asdict() for target in judge(rows)]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print every row beside its yardsticks and targets."""
    rows: list[Figures] = config.stash[_ROWS]
    if rows:
        skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
        print_summary(rows, config.getoption("--scale"), Yardsticks.measurement(), skipped)


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> str:
    """The name of the scale."""
    name: str = request.config.getoption("--scale")
    return name


@pytest.fixture(scope="session")
def sizes(scale: str) -> Sizes:
    """How large everything is."""
    return SIZES[scale]


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    metrale_numba.warmup()


@pytest.fixture(scope="session")
def yardsticks() -> Yardsticks:
    """The compiled yardsticks."""
    return Yardsticks()


def _place(node: pytest.Function) -> tuple[int, ...]:
    """Where the row stands in its file, which is not when it runs: pytest puts together what shares a fixture."""
    indices = node.callspec.indices.values() if hasattr(node, "callspec") else ()
    return (node.function.__code__.co_firstlineno, *indices)


@pytest.fixture
def row(benchmark: BenchmarkFixture, yardsticks: Yardsticks, scale: str, request: pytest.FixtureRequest) -> Row:
    """A row of the report."""
    node = request.node
    return Row(
        benchmark, yardsticks, request.config.stash[_ROWS], scale == FULL, group=node.path.stem, place=_place(node)
    )


def _usual(sizes: Sizes, *, scattered: bool) -> Stock:
    return fill(
        sizes.usual,
        seed=1,
        num_long=sizes.long_sequences,
        num_short=min(64, sizes.few // 64),
        scattered=scattered,
        num_snapshots=sizes.some_snapshots,
    )


@pytest.fixture(scope="session")
def in_order(sizes: Sizes) -> Stock:
    """The usual cache: 100,000 blocks, filled in order, 64 snapshots. No benchmark leaves it changed."""
    return _usual(sizes, scattered=False)


@pytest.fixture(scope="session")
def scattered(sizes: Sizes) -> Stock:
    """The same blocks, scattered."""
    return _usual(sizes, scattered=True)
