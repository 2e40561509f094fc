"""What a process pays before its first look-up: the import, and the kernels, from the disk or compiled."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import metrale_numba
from benchmarks.rows import Row, Target
from benchmarks.sizes import FULL, Sizes

_PACKAGES = str(Path(metrale_numba.__file__).parent.parent)


def _nanoseconds(before: str, timed: str, **environment: str) -> list[int]:
    """Time a statement in a process of its own; what it prints comes before the time of the whole."""
    code = "\n".join(
        (
            before,
            "from time import perf_counter_ns",
            "started = perf_counter_ns()",
            timed,
            "print(perf_counter_ns() - started)",
        )
    )
    path = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH"), _PACKAGES) if part)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path} | environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [int(line) for line in done.stdout.split()]


def test_import(row: Row, sizes: Sizes) -> None:
    def work() -> list[tuple[list[int], list[int]]]:
        # In turn, so that a slow moment falls on both.
        return [
            (_nanoseconds("", "import numba"), _nanoseconds("", "import metrale_numba, numba"))
            for _ in range(sizes.starts)
        ]

    numba_alone, both = np.concatenate(row.run(work), axis=1)
    row.report(
        "import metrale_numba, beyond import numba",
        both - numba_alone,
        unit="s",
        target=Target(0.15),
        note=f"import numba takes {np.median(numba_alone) / 1e9:.3g} s",
    )


def test_import_alone(row: Row, sizes: Sizes) -> None:
    times = row.run(lambda: [_nanoseconds("", "import metrale_numba") for _ in range(sizes.starts)])
    row.report("import metrale_numba", times, unit="s")


def test_kernels_from_disk(row: Row, sizes: Sizes) -> None:
    times = row.run(
        lambda: [_nanoseconds("import metrale_numba, numba", "metrale_numba.RadixTree()") for _ in range(sizes.starts)]
    )
    row.report("first RadixTree(), kernels from disk", times, unit="s", target=Target(0.5))


def test_warmup_from_disk(row: Row, sizes: Sizes) -> None:
    times = row.run(
        lambda: [_nanoseconds("import metrale_numba, numba", "metrale_numba.warmup()") for _ in range(sizes.starts)]
    )
    row.report("warmup(), kernels from disk", times, unit="s", target=Target(0.5))


def test_kernels_compiled(row: Row, scale: str) -> None:
    if scale != FULL:
        pytest.skip("kernels are compiled anew only at full scale: it takes most of a minute")
    with tempfile.TemporaryDirectory() as directory:
        timed = "metrale_numba.RadixTree()\nfirst = perf_counter_ns()\nmetrale_numba.warmup()\nprint(first - started)"
        code, environment = "import metrale_numba, numba", {"METRALE_CACHE_DIR": directory}
        cache, everything = row.run(lambda: _nanoseconds(code, timed, **environment))
    row.report(
        "first RadixTree(), kernels compiled",
        [cache],
        unit="s",
        target=Target(20.0),
        note=f"all that warmup() compiles takes {everything / 1e9:.3g} s",
    )
