"""The work of calls is what it was, to the last node, and what the design promises, whatever the machine's mood.

It relies on a process of its own, in which kernels are compiled so that they count; see :mod:`work_meter`. A figure
that is not the committed one is a call that got slower, or faster, or one that has to do something else now.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numba
import pytest
from count_work import Figures, committed, count, differences
from work_meter import ARRAYS_MADE, FUNCTIONS_CALLED
from work_scenarios import BLOCK_SIZE, LENGTHS, NUM_LEAVES, NUM_SNAPSHOTS, OTHERS, RESIDENTS, SEQUENCE, SPILLED

from metrale_numba import RadixTree
from metrale_numba.kernels import compile as compiling
from metrale_numba.kernels import counting, tables

SEQUENCE_BLOCKS = SEQUENCE // BLOCK_SIZE
#: Places that a candidate passes at most, one way, in a heap of four children per node: the levels of 20,000.
LEVELS = 9
#: Looks into a table for one search, on average: it is half full at most.
PROBES = 2.5

NUMBERS = (numba.types.int64,) * 3
WORDS = numba.types.Array(numba.types.uint64, 1, "C")


class Work(dict[str, int]):
    """What one scenario took; what is not named did not happen."""

    def __missing__(self, kind: str) -> int:
        assert kind in (*counting.KINDS, ARRAYS_MADE, FUNCTIONS_CALLED), kind
        return 0


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """What all scenarios take, counted in a process that may keep compiled code, and must not."""
    kept = tmp_path_factory.mktemp("kernels")
    counted = count(METRALE_CACHE_DIR=str(kept))
    assert list(kept.iterdir()) == [], "kernels that count were kept on disk"
    return counted


@pytest.fixture(scope="module")
def work(figures: Figures) -> dict[str, Work]:
    return {scenario: Work(kinds) for scenario, kinds in figures.items()}


def test_every_call_takes_the_work_that_is_committed(figures: Figures) -> None:
    changed = [
        f"{scenario}: {kind}: {before:,} committed, {now:,} counted"
        for scenario, kind, before, now in differences(committed(), figures)
    ]
    assert not changed, "\n".join(
        ["the work of calls has changed:", *changed, "to accept it: python tests/count_work.py --write"]
    )


def test_every_kind_of_work_is_counted_somewhere(figures: Figures) -> None:
    assert set(counting.KINDS) <= {kind for kinds in figures.values() for kind in kinds}


@pytest.mark.parametrize("length", LENGTHS)
def test_a_walk_in_order_visits_its_blocks_and_hashes_hardly_any(work: dict[str, Work], length: int) -> None:
    for call in ("peek", "look up", "release"):
        taken = work[f"{call} {length:,} tokens in order"]
        assert taken["nodes visited"] <= length // BLOCK_SIZE + 2
        # One run, and one search for where it begins.
        assert taken["searches by hash"] <= 1
        assert taken["tokens hashed"] <= BLOCK_SIZE
        assert taken["hashes made ahead"] == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_a_scattered_walk_searches_once_a_block_and_hashes_no_token_twice(work: dict[str, Work], length: int) -> None:
    blocks = length // BLOCK_SIZE
    for call in ("peek", "look up", "release"):
        taken = work[f"{call} {length:,} tokens scattered"]
        assert taken["nodes visited"] <= 2 * blocks
        assert taken["searches by hash"] <= blocks
        assert taken["tokens hashed"] <= length
        # Ahead, and when the walk gets there.
        assert taken["slots probed"] <= 2 * PROBES * blocks


def test_a_walk_at_another_block_size_visits_its_blocks(work: dict[str, Work]) -> None:
    for call in ("look up", "release"):
        taken = work[f"{call} 2,000 tokens, blocks of 5"]
        assert taken["nodes visited"] <= 400 + 2
        assert taken["searches by hash"] <= 1


def test_a_miss_costs_the_same_whatever_is_cached(work: dict[str, Work]) -> None:
    for what in ("tokens of which none is cached", "tokens of an unknown adapter"):
        taken = work[f"look up {what}"]
        assert taken["nodes visited"] <= 2
        assert taken["searches by hash"] <= 1
        assert taken["slots probed"] <= 4
        assert taken["tokens hashed"] <= BLOCK_SIZE


def test_the_usual_calls_make_one_array_and_call_no_other_function(work: dict[str, Work]) -> None:
    for call, arrays in (
        ("look up 2,048 tokens in order", 1),
        ("release 2,048 tokens in order", 0),
        ("insert 2,048 new tokens", 1),
        ("insert 2,048 cached tokens", 1),
    ):
        assert work[call][ARRAYS_MADE] == arrays
        assert work[call][FUNCTIONS_CALLED] == 1
    for evicted in ("1 block of a sequence", "4,096 blocks of sequences", "64 of 4,096 single leaves"):
        assert work[f"evict {evicted}"][ARRAYS_MADE] == 1


def test_an_insert_hashes_and_copies_each_new_token_once(work: dict[str, Work]) -> None:
    for which in ("", " after evictions"):
        taken = work[f"insert 2,048 new tokens{which}"]
        assert taken["nodes added"] == SEQUENCE_BLOCKS
        assert taken["tokens copied"] == SEQUENCE
        # And the first block, to find that it is not there.
        assert taken["tokens hashed"] <= SEQUENCE + BLOCK_SIZE
        assert taken["slots probed"] <= PROBES * SEQUENCE_BLOCKS
    again = work["insert 2,048 cached tokens"]
    assert again["nodes added"] == again["tokens copied"] == 0
    assert again["nodes visited"] <= SEQUENCE_BLOCKS + 2
    assert again["tokens hashed"] <= BLOCK_SIZE


def test_growth_takes_each_block_a_few_steps(work: dict[str, Work]) -> None:
    taken = work["grow from 0 to 20,000 blocks"]
    added = taken["nodes added"]
    assert taken["tokens copied"] == (added - 1) * BLOCK_SIZE
    assert taken["slots probed"] <= 20 * added
    assert taken["nodes visited"] <= 2 * added // SEQUENCE_BLOCKS


def test_an_eviction_moves_no_more_candidates_than_the_heap_has_levels(work: dict[str, Work]) -> None:
    for number in (1, 64, 1_024):
        taken = work[f"evict {number:,} of {NUM_LEAVES:,} single leaves"]
        assert taken["nodes removed"] == number
        assert taken["candidates moved"] <= LEVELS * number
    for what in ("a release of 1,000 sequences", "10,000 stamps"):
        one_after = "evict 1 block after " + what
        assert work[one_after]["candidates moved"] <= 2 * LEVELS
        assert work[one_after]["nodes removed"] == 1
    # A sequence that drains is in the heap with one node.
    drained = work["evict 4,096 blocks of sequences"]
    assert drained["nodes removed"] == 4_096
    assert drained["candidates moved"] <= (4_096 / SEQUENCE_BLOCKS + 2) * LEVELS < 2 * OTHERS * LEVELS
    assert drained["slots probed"] <= 2 * PROBES * 4_096


def test_a_stamp_moves_no_more_candidates_than_the_heap_has_levels(work: dict[str, Work]) -> None:
    stamped = work["look up and release 10,000 times among 1,000 leaves"]
    assert stamped["candidates moved"] <= 2 * 10_000 * LEVELS
    assert stamped["nodes visited"] <= 2 * 10_000 * 4


def test_a_look_up_does_not_feel_snapshots_elsewhere(work: dict[str, Work]) -> None:
    without = work["look up, no snapshot, with 0 snapshots elsewhere"]
    for number in NUM_SNAPSHOTS:
        beside = f"with {number:,} snapshots elsewhere"
        assert work[f"look up, no snapshot, {beside}"] == without
        for place in ("on the grid", "off the grid", "at the end"):
            taken = work[f"look up, snapshot {place}, {beside}"]
            assert taken["nodes visited"] == without["nodes visited"]
            assert taken["nodes climbed"] == 0
            assert taken["entries looked at"] == 1
            # Of the floor and of the entry: two tables.
            assert taken["slots probed"] <= without["slots probed"] + 8
            assert taken["tokens hashed"] < BLOCK_SIZE
        assert work[f"insert 2,048 new tokens {beside}"]["entries looked at"] == 0


def test_snapshots_that_may_not_be_used_cost_one_step_a_block_and_one_look_each(work: dict[str, Work]) -> None:
    taken = work["look up, 8 tails of other sessions on the way"]
    assert taken["entries looked at"] <= 8
    assert taken["nodes climbed"] <= SEQUENCE_BLOCKS
    assert taken["tokens hashed"] <= 8 * (BLOCK_SIZE - 1)


def test_registering_a_tail_does_not_feel_other_sessions(work: dict[str, Work]) -> None:
    for which in ("first", "later"):
        taken = work[f"register a {which} tail among 4,000 sessions"]
        assert taken["entries looked at"] <= 2
        assert taken["slots probed"] <= 40
        assert taken["tokens hashed"] == taken["tokens keyed"] == 512


def test_choosing_a_snapshot_to_evict_does_not_feel_spilled_ones(work: dict[str, Work]) -> None:
    for number in SPILLED:
        for call in ("evict", "spill"):
            taken = work[f"{call} one of {RESIDENTS:,} resident snapshots beside {number:,} spilled ones"]
            assert taken["entries looked at"] <= 3 * RESIDENTS
            assert taken["slots probed"] <= PROBES * RESIDENTS


def test_a_partial_tail_looks_at_each_child_once_at_most(work: dict[str, Work]) -> None:
    for which, most in (("the newest", 3), ("the oldest", NUM_LEAVES + 2), ("none", NUM_LEAVES + 2)):
        assert work[f"look up half a block, {which} of 4,096 children"]["nodes visited"] <= most


def _compiled(function: Callable[..., Any], *types: Any) -> tuple[Callable[..., Any], str]:
    """A function as kernels are compiled, and LLVM's code for it without the names of its values."""
    dispatcher = numba.njit(nogil=True, error_model="numpy", _nrt=False)(function)
    dispatcher.compile(types)
    (code,) = dispatcher.inspect_llvm().values()
    body = re.search(r"^define [^\n]*\{\n(.*?)^\}", code, re.DOTALL | re.MULTILINE)
    assert body is not None, code
    return dispatcher, re.sub(r"%\.\d+", "%.", body[1])


def _names_a_count(code: str) -> bool:
    begin = counting.counts.ctypes.data
    return any(begin <= int(number) < begin + counting.counts.nbytes for number in re.findall(r"\d+", code))


def _counted(first, number, step):  # type: ignore[no-untyped-def]
    counting.tally(counting.NODES_VISITED, number * step)
    counting.tally(counting.ENTRIES_LOOKED_AT, 1)
    return first ^ step


def _plain(first, number, step):  # type: ignore[no-untyped-def]
    return first ^ step


def test_the_counting_build_adds_to_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "IS_ON", True)
    function, code = _compiled(_counted, *NUMBERS)
    assert _names_a_count(code)
    try:
        function(1, 2, 3)
        function(1, 2, 3)
        assert counting.counts[counting.NODES_VISITED] == 12
        assert counting.counts[counting.ENTRIES_LOOKED_AT] == 2
        assert counting.counts.sum() == 14
    finally:
        counting.counts[:] = 0


def test_the_normal_build_has_nothing_of_the_counts_in_its_code() -> None:
    assert not counting.IS_ON
    assert _compiled(_counted, *NUMBERS)[1] == _compiled(_plain, *NUMBERS)[1]
    _, code = _compiled(tables.rehash, WORDS, WORDS)
    assert not _names_a_count(code)


def test_the_normal_build_counts_nothing() -> None:
    cache = RadixTree()
    cache.insert(range(64), range(4))
    assert cache.lookup(range(64)).matched_tokens == 64
    assert not counting.counts.any()


def test_the_counting_build_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiling._digest()
    monkeypatch.setattr(counting, "IS_ON", True)
    assert compiling._digest() != before


def test_kernels_that_count_are_not_looked_for_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("asked where compiled kernels are kept")

    monkeypatch.setattr(counting, "IS_ON", True)
    monkeypatch.setattr(compiling, "_cache_directory", refuse)
    compiled = compiling._compile({"plain": (lambda table: table.size, (WORDS,))})
    assert set(compiled) == {"plain"}
