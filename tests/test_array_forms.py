"""Arrays of uint32 as calls get them from an engine: with gaps, backwards, read-only, unaligned, of any shape.

The usual call hands its arrays to the kernel as they are, and the kernel looks at their strides. So each form is given
to each call of that way, alone and together with others, and must answer as a list of the same numbers does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from state import differences, snapshot_of

from metrale_numba import NONE, InsertAcquired, PrefixMatch, RadixTree, RefcountError
from metrale_numba.kernels import layout


class Special(np.ndarray):
    """An array type that kernels do not know."""


def unaligned(values: np.ndarray, offset: int) -> np.ndarray:
    room = np.zeros(values.nbytes + 8, np.uint8)
    room[offset : offset + values.nbytes] = np.frombuffer(values.tobytes(), np.uint8)
    return room[offset : offset + values.nbytes].view(np.uint32)


def read_only(values: np.ndarray) -> np.ndarray:
    values.setflags(write=False)
    return values


def between(values: np.ndarray, fill: int) -> np.ndarray:
    """A part of a longer array, so that one who reads too far finds something."""
    return np.concatenate(([fill] * 5, values, [fill] * 5)).astype(np.uint32)[5 : 5 + values.size]


def strided(values: np.ndarray, step: int) -> np.ndarray:
    room = np.full((values.size, abs(step)), 77, np.uint32)
    room[:, 0] = values if step > 0 else values[::-1]
    return room.reshape(-1)[:: abs(step)][:: 1 if step > 0 else -1]


def of_fields(values: np.ndarray) -> np.ndarray:
    """A field of a record array, four bytes into eleven: its stride is no multiple of its size."""
    room = np.zeros(values.size, np.dtype({"names": ["id"], "formats": ["<u4"], "offsets": [4], "itemsize": 11}))
    room["id"] = values
    return room["id"]


def shared_strides(values: np.ndarray) -> np.ndarray:
    """Any stride does where there is no second element."""
    return np.lib.stride_tricks.as_strided(values, strides=(12,)) if values.size <= 1 else values


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "plain": np.copy,
    "part": lambda v: between(v, 0),
    "part among others": lambda v: between(v, NONE),
    "gaps": lambda v: strided(v, 2),
    "wide gaps": lambda v: strided(v, 7),
    "backwards": lambda v: v[::-1].copy()[::-1],
    "backwards with gaps": lambda v: strided(v, -3),
    "column": lambda v: np.stack([v, v + 1, v + 2], axis=1)[:, 0],
    "row of a column-major array": lambda v: np.asfortranarray(np.stack([v, v + 1]))[0],
    "field of records": of_fields,
    "any stride of one": shared_strides,
    "read-only": lambda v: read_only(v.copy()),
    "read-only with gaps": lambda v: read_only(strided(v, 2)),
    "read-only bytes": lambda v: np.frombuffer(v.tobytes(), np.uint32),
    **{f"unaligned by {offset}": lambda v, offset=offset: unaligned(v, offset) for offset in (1, 2, 3)},
    "unaligned with gaps": lambda v: unaligned(np.repeat(v, 2), 1)[::2],
    "subclass": lambda v: v.copy().view(Special),
    "subclass with gaps": lambda v: strided(v, 2).view(Special),
    "big-endian": lambda v: v.astype(">u4"),
    "big-endian with gaps": lambda v: strided(v, 2).astype(">u4")[::1],
    "same type by another name": lambda v: v.copy().view(np.dtype("=u4").newbyteorder("<")),
    "flattened": lambda v: v.reshape(1, -1).reshape(-1),
}
EACH_FORM = pytest.mark.parametrize("form", FORMS)
EACH_SIZE = pytest.mark.parametrize("size", [1, 3, 16])
SETTINGS: list[dict[str, Any]] = [
    {},
    {"partial_tail_sharing": True},
    {"adopt_blocks": True},
    {"strict": True},
    {"quotas": {7: 5}},
]


def words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32 - 1, count, np.uint32)


def played(settings: dict[str, Any], size: int, form: Callable[[np.ndarray], Any]) -> list[Any]:
    """The answers of a new cache to calls on the short way, with every array in a form."""
    cache = RadixTree(block_size=size, check_secret=b"the same in all", **settings)
    said: list[Any] = []
    prompts = [words(40 * size + size // 2), words(size), words(7 * size + 1, 2), words(0), words(size - 1, 3)]
    prompts.append(np.concatenate((prompts[0][: 11 * size], words(9 * size, 4))))
    for turn, (tokens, adapter) in itertools.product(range(2), itertools.product(prompts, (0, 7))):
        table = np.arange(tokens.size // size + 1, dtype=np.uint32) + np.uint32(100 * (turn + 1))
        said.append(cache.lookup(form(tokens), adapter_id=adapter, session_hash=turn))
        matched = said[-1].matched_tokens // size * size
        for blocks in (table[: max(1, table.size // 2)], table[:0], table):
            said.append(cache.insert(form(tokens), form(blocks), (), None, matched, adapter))
            said.append(cache.lookup(form(tokens), None, 0, adapter))
        said.append(cache.insert_tail_sibling_snapshot(form(tokens), 10 * turn, 0, adapter))
        said.append(cache.lookup(form(tokens[:-1]), None, 0, adapter, record=False))
        for _ in range(3):
            try:
                cache.release(form(tokens), None, adapter)
            except RefcountError as error:
                said.append(str(error))
        said += [cache.stats_detail(), cache.snapshot_stats(), cache.peek_matched_tokens(form(tokens))]
        cache.check_integrity()
    cache.clear()
    said.append(cache.stats_detail())
    return said


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "default")
@EACH_SIZE
@EACH_FORM
def test_a_form_answers_as_a_list_does(form: str, size: int, settings: dict[str, Any]) -> None:
    assert played(settings, size, FORMS[form]) == played(settings, size, np.ndarray.tolist)


@EACH_SIZE
@EACH_FORM
def test_an_array_is_left_as_it_was(form: str, size: int) -> None:
    cache = RadixTree(block_size=size)
    tokens, table = FORMS[form](words(5 * size)), FORMS[form](np.arange(5, dtype=np.uint32))
    before = [(ids.tolist(), ids.strides, ids.dtype, ids.flags.writeable, type(ids)) for ids in (tokens, table)]
    cache.insert(tokens, table)
    cache.lookup(tokens)
    cache.release(tokens)
    cache.release(tokens)
    after = [(ids.tolist(), ids.strides, ids.dtype, ids.flags.writeable, type(ids)) for ids in (tokens, table)]
    assert before == after
    assert cache.evict(9).physical.tolist() == [4, 3, 2, 1, 0]


@EACH_SIZE
@pytest.mark.parametrize(
    ("form", "other"), list(itertools.product(["plain", "gaps", "backwards", "read-only"], repeat=2))
)
def test_tokens_and_blocks_of_two_forms_go_together(form: str, other: str, size: int) -> None:
    cache = RadixTree(block_size=size)
    tokens, table = words(9 * size), words(9, 9)
    acquired = cache.insert(FORMS[form](tokens), FORMS[other](table))
    assert acquired == InsertAcquired(blocks=table)
    assert cache.lookup(tokens).matched_blocks.tolist() == table.tolist()
    cache.check_integrity()


@EACH_SIZE
def test_one_element_on_every_place_is_as_many(size: int) -> None:
    cache = RadixTree(block_size=size)
    tokens = np.broadcast_to(np.uint32(5), 6 * size)
    table = np.broadcast_to(np.uint32(9), 6)
    assert tokens.strides == table.strides == (0,)
    assert cache.insert(tokens, table).blocks.tolist() == [9] * 6
    assert cache.lookup(tokens).matched_blocks.tolist() == [9] * 6
    assert cache.lookup([5] * 6 * size).matched_blocks.tolist() == [9] * 6
    for _ in range(3):
        cache.release(tokens)
    assert cache.stats_detail().over_releases == 0
    assert len(cache.evict(9)) == 6
    cache.check_integrity()


NOT_ONE_DIMENSIONAL: dict[str, np.ndarray] = {
    "0-d": np.array(5, np.uint32),
    "2-d": np.ones((2, 16), np.uint32),
    "row": np.ones((1, 16), np.uint32),
    "column": np.ones((16, 1), np.uint32),
    "empty 2-d": np.ones((0, 4), np.uint32),
    "3-d": np.ones((2, 2, 4), np.uint32),
    "column-major 2-d": np.asfortranarray(np.ones((4, 4), np.uint32)),
    "2-d broadcast": np.broadcast_to(np.uint32(1), (4, 4)),
    "2-d subclass": np.ones((2, 16), np.uint32).view(Special),
}


@pytest.mark.parametrize("shape", NOT_ONE_DIMENSIONAL)
@pytest.mark.parametrize("quotas", [None, {0: 100}])
def test_what_is_not_one_dimensional_is_refused_and_changes_nothing(shape: str, quotas: dict[int, int] | None) -> None:
    cache = RadixTree(block_size=4, quotas=quotas)
    tokens, table = words(16), np.arange(4, dtype=np.uint32)
    cache.insert(tokens, table)
    bad = NOT_ONE_DIMENSIONAL[shape]
    before = snapshot_of(cache)
    for name, call in {
        "tokens": lambda: cache.lookup(bad),
        "tokens ": lambda: cache.release(bad),
        "tokens  ": lambda: cache.insert(bad, table),
        "block_table": lambda: cache.insert(tokens, bad),
    }.items():
        with pytest.raises(ValueError, match=f"^{name.strip()} must be one-dimensional"):
            call()
    assert differences(before, snapshot_of(cache)) == []


@pytest.mark.parametrize("dtype", ["i4", ">i4", "u8", "i8", "u2", "u1", ">u4"])
@EACH_SIZE
def test_integers_of_other_types_are_what_they_say(dtype: str, size: int) -> None:
    cache = RadixTree(block_size=size)
    tokens, table = np.arange(100, 100 + 3 * size).astype(dtype), np.arange(3).astype(dtype)
    assert cache.insert(tokens, table).blocks.tolist() == [0, 1, 2]
    assert cache.lookup(tokens).matched_tokens == 3 * size
    assert cache.lookup(range(100, 100 + 3 * size)).matched_tokens == 3 * size
    for _ in range(3):
        cache.release(tokens)
    assert cache.stats_detail().over_releases == 0


@pytest.mark.parametrize("place", range(4))
@EACH_FORM
def test_no_block_in_any_form_is_refused_by_its_place(form: str, place: int) -> None:
    cache = RadixTree(block_size=2)
    cache.insert([1, 2, 3, 4], [5, 6])
    table = np.array([5, 6, 7, 8], np.uint32)
    table[place] = NONE
    before = snapshot_of(cache)
    with pytest.raises(ValueError, match=rf"^block_table\[{place}\] is {NONE}\b"):
        cache.insert(FORMS[form](np.arange(1, 8, dtype=np.uint32)), FORMS[form](table))
    assert differences(before, snapshot_of(cache)) == []


@pytest.mark.parametrize("value", [-1, 2**32, 2**40])
def test_an_array_with_a_number_too_large_is_refused_in_every_call(value: int) -> None:
    cache = RadixTree(block_size=2)
    cache.insert([1, 2, 3, 4], [5, 6])
    before = snapshot_of(cache)
    bad = np.array([1, 2, value, 4])
    for call in (cache.lookup, cache.release, lambda tokens: cache.insert(tokens, [5, 6])):
        with pytest.raises(ValueError, match=rf"^tokens\[2\] is {value}\b"):
            call(bad)
    with pytest.raises(ValueError, match=rf"^block_table\[1\] is {value}\b"):
        cache.insert([1, 2, 3, 4], np.array([5, value]))
    assert differences(before, snapshot_of(cache)) == []


def test_the_kernels_themselves_refuse_gaps_and_change_nothing() -> None:
    cache = RadixTree(block_size=2)
    tokens = np.arange(8, dtype=np.uint32)
    cache.insert(tokens, tokens[:4])
    address, nothing, out = cache._pool.address, np.empty(0, np.uint32), np.empty(8, np.uint32)
    gaps, backwards = np.repeat(tokens, 2)[::2], tokens[::-1].copy()[::-1]
    before = snapshot_of(cache)
    for bad in (gaps, backwards, np.broadcast_to(np.uint32(1), 8)):
        assert set(cache._lookup_kernel(address, bad, out, 0, 0, layout.RECORD)) == {layout.REFUSED}
        assert cache._release_kernel(address, bad, 8, 0, 0) == layout.REFUSED
        assert cache._insert_kernel(address, bad, tokens[:4], nothing, out, 0, 0)[0] == layout.REFUSED
        assert cache._insert_kernel(address, tokens, bad[:4], nothing, out, 0, 0)[0] == layout.REFUSED
    assert differences(before, snapshot_of(cache)) == []
    assert cache._lookup_kernel(address, gaps[:1], out, 0, 0, layout.RECORD)[1] == 0
    assert cache.lookup(gaps) == PrefixMatch(tokens[:4], matched_tokens=8)
