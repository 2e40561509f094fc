"""The recorded traces, played against the cache and against the model.

A trace is a gzipped file of JSON lines. The first holds the constructor's settings; every other one a call, its
keyword arguments and the answer it must get. ``free_last`` marks a look-up whose last block, matched in part, may be
any of several.
"""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from model import Model

from metrale_numba import RadixTree

TRACES = sorted((pathlib.Path(__file__).parent / "data" / "conformance").glob("*.jsonl.gz"))


def read(trace: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The numbered lines of a trace, from 1."""
    with gzip.open(trace, "rt", encoding="ascii") as lines:
        for number, line in enumerate(lines, 1):
            yield number, json.loads(line)


def as_recorded(got: Any, wanted: Any) -> Any:
    """An answer in the form in which the trace holds the wanted one."""
    if isinstance(got, np.ndarray):
        return got.tolist()
    if isinstance(wanted, dict) and got is not None:
        return {
            name: type(got).__name__.lower() if name == "kind" else as_recorded(getattr(got, name, None), value)
            for name, value in wanted.items()
        }
    if isinstance(wanted, list) and isinstance(got, tuple) and len(got) == len(wanted):
        return [as_recorded(part, value) for part, value in zip(got, wanted, strict=True)]
    return got


def without_last_block(answer: dict[str, Any]) -> dict[str, Any]:
    """A look-up's answer without what the lender of the last block decides."""
    return {**answer, "matched_blocks": answer["matched_blocks"][:-1], "matched_disk_block_ids": None}


def differences(got: Any, wanted: Any) -> str:
    """What differs, field by field where the answers have fields."""
    if isinstance(got, dict) and isinstance(wanted, dict):
        return "\n".join(
            f"  {name}: wanted {wanted[name]}, got {got[name]}" for name in wanted if got[name] != wanted[name]
        )
    return f"  wanted {wanted}\n  got    {got}"


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name.removesuffix(".jsonl.gz"))
@pytest.mark.parametrize("cache_class", [RadixTree, Model])
def test_every_answer_is_the_recorded_one(cache_class: type, trace: pathlib.Path) -> None:
    lines = read(trace)
    cache = cache_class(**next(lines)[1]["settings"])
    number = 1
    for number, line in lines:
        call, arguments, wanted = line["call"], line["args"], line["returns"]
        got = as_recorded(getattr(cache, call)(**arguments), wanted)
        if line.get("free_last"):
            got, wanted = without_last_block(got), without_last_block(wanted)
        if got != wanted:
            pytest.fail(f"{trace.name}, line {number}: {call}({arguments})\n{differences(got, wanted)}", pytrace=False)
    assert number > 1, f"{trace.name} holds no call"
    cache.check_integrity()


def test_all_traces_are_here() -> None:
    assert len(TRACES) == 51
