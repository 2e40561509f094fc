"""Hashes that collide, by accident, on purpose or all at once, and the two hashes themselves.

It relies on :mod:`model` for FNV-1a, on :mod:`pair` to forge tokens with a wanted tier key, and computes the check hash
with Python's own integers. A hash that only finds candidates must never show in an answer; a tier key, which anybody
can forge, must never stand for another prefix than its own.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_conformance
from model import NONE, tier_key
from pair import Pair, forge
from state import differences, snapshot_of

from metrale_numba import RadixTree, Spill
from metrale_numba.kernels import layout

SECRET = b"fixed"

# --- every hash that only finds candidates is a constant ----------------------------------------------------------

#: The first slot of a table, the last, from where the search goes round, and one in between.
CONSTANTS = (0, 0xFFFF_FFFF, 0x5555_5555)
ADAPTERS = (0, 1, 2**63 + 5, 2**64 - 1)
SESSIONS = (0, 1, 2, 2**63 + 9)


def force_constant_hashes() -> None:
    """Replace the hash that places things in tables, in every module of kernels and before any is compiled.

    What it gives is a constant of the cache: the upper half of what would otherwise be its secret multiplier.
    """
    import metrale_numba.kernels
    from metrale_numba.kernels import compile as compiler
    from metrale_numba.kernels import hashing

    @hashing.register_jitable
    def constant_hash(value, multiplier):  # type: ignore[no-untyped-def]
        return multiplier >> hashing.HALF_WORD

    assert not compiler._compiled
    original = hashing.table_hash
    names = [found.name for found in pkgutil.iter_modules(metrale_numba.kernels.__path__)]
    modules = {name: importlib.import_module(f"metrale_numba.kernels.{name}") for name in names}
    holders = [(name, held) for name in names for held, value in vars(modules[name]).items() if value is original]
    for name, held in holders:
        setattr(modules[name], held, constant_hash)
    assert {name for name, _ in holders} >= {"hashing", "tree", "eviction", "snapshots", "integrity"}


def crowded(constant: int, **settings: Any) -> RadixTree:
    """A cache in whose tables everything has one home."""
    cache = RadixTree(**settings)
    cache._shared.header[layout.SHARED_MULTIPLIER] = np.uint64(constant << 32).astype(np.int64)
    cache._index.arrays.header[layout.INDEX_MULTIPLIER] = cache._shared.header[layout.SHARED_MULTIPLIER]
    return cache


def hashes_in_tables(cache: RadixTree) -> list[int]:
    """The upper half of every used slot."""
    tables = [cache._index.arrays.table, *(pool.table for pool in cache._pools.values())]
    return [int(slot) >> 32 for table in tables for slot in table if slot != layout.EMPTY_SLOT]


def play_traces(constant: int) -> tuple[int, int]:
    """Play every recorded trace; how many calls, and how many slots were in use."""
    caches: list[RadixTree] = []

    def new_cache(**settings: Any) -> RadixTree:
        caches.append(crowded(constant, **settings))
        return caches[-1]

    calls = slots = 0
    for trace in test_conformance.TRACES:
        test_conformance.test_every_answer_is_the_recorded_one(new_cache, trace)
        calls += sum(1 for _ in test_conformance.read(trace)) - 1
        hashes = hashes_in_tables(caches[-1])
        assert set(hashes) <= {constant}
        slots += len(hashes)
    assert len(caches) == len(test_conformance.TRACES)
    return calls, slots


def play_at_random(constant: int, seed: int, num_steps: int) -> int:
    """Make any calls on a cache and the model, compare all answers, and say how many slots were in use at most."""
    rng = random.Random(seed)
    settings = {
        "partial_tail_sharing": rng.random() < 0.5,
        "adopt_blocks": rng.random() < 0.3,
        "hermetic": rng.random() < 0.2,
        "evict_alpha": rng.choice((0.0, 0.75)),
        "tail_lease_ttl": rng.choice((2, 64)),
        "block_size": 2,
    }
    pair = Pair(lambda **wanted: crowded(constant, **wanted), settings)
    ids = itertools.count(1)
    prompts: list[tuple[int, ...]] = [()]
    most = 0
    for _ in range(num_steps):
        adapter, block_size, session = rng.choice(ADAPTERS), rng.choice((1, 2, 3)), rng.choice(SESSIONS)
        base = rng.choice(prompts)
        tokens = base[: rng.randint(0, len(base))] if rng.random() < 0.4 else base
        tokens += tuple(rng.choice((0, 1, 7, 2**32 - 1)) for _ in range(rng.randint(0, 5)))
        tokens = tokens[:24]
        prompts = [*prompts[-20:], tokens]
        table = tuple(next(ids) for _ in range(-(-len(tokens) // block_size)))
        disks = tuple(next(ids) for _ in table) if rng.random() < 0.3 else ()
        blocks = (tokens, table, disks, block_size)
        what = rng.randrange(12)
        if what < 3:
            pair.insert(*blocks, 0, adapter)
        elif what < 5:
            pair.insert_with_snapshot(*blocks, next(ids), session, 0, adapter)
        elif what == 5:
            pair.insert_tail(tokens, next(ids), session, adapter)
            pair.insert_sibling(tokens[: len(tokens) // 2], next(ids), session, adapter)
        elif what < 8:
            match = pair.lookup(tokens, block_size, session, adapter)
            pair.release_matched(tokens, block_size, match.matched_tokens, adapter)
        elif what == 8:
            for _ in range(3):
                pair.release(tokens, block_size, adapter)
        elif what == 9:
            pair.evict(rng.choice((1, 5, 30)))
        elif what == 10:
            spill = pair.evict_to_tier(rng.choice((0, 3)))
            if spill is not None and hasattr(spill, "key") and rng.random() < 0.3:
                pair.promote(spill.key, next(ids), spill.check)
        elif pair.spilled():
            pair.forget(rng.choice(pair.spilled()).key)
        pair.compare_state()
        hashes = hashes_in_tables(pair.cache)
        assert set(hashes) <= {constant}
        most = max(most, len(hashes))
    pair.drain()
    return most


def play_with_constant_hashes() -> None:
    """What the process of the test below does: play, and write down how much was played."""
    force_constant_hashes()
    report = {}
    for constant in CONSTANTS:
        calls, slots = play_traces(constant)
        most = min(play_at_random(constant, seed, 300) for seed in range(4))
        report[constant] = {"calls": calls, "slots": slots, "most": most}
    json.dump(report, sys.stdout)


def test_every_answer_is_right_if_every_hash_that_finds_candidates_is_the_same(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "METRALE_CACHE_DIR": str(tmp_path),
    }
    played = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import test_hash_collisions as t; t.play_with_constant_hashes()"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert played.returncode == 0, played.stderr
    report = json.loads(played.stdout)
    assert [int(constant) for constant in report] == list(CONSTANTS)
    for counts in report.values():
        assert counts["calls"] > 10_000
        assert counts["slots"] > 1_000
        assert counts["most"] > 50
    assert list(tmp_path.glob("metrale_numba/*/*")), "the process compiled into another directory"
