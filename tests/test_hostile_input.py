"""What callers may hand in, for every argument of every call: refused by name and without a trace, or taken as it is.

The table of refusals is made from the signatures, so that no call and no argument is left out. It relies on
:mod:`state` to find that a refused call changed nothing.
"""

from __future__ import annotations

import collections
import decimal
import functools
import inspect
import itertools
import re
import tempfile
from array import array
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from state import arrays_of, differences, snapshot_of

from metrale_numba import NONE, Cleared, EvictedBlocks, InsertAcquired, NoPrefixCaching, PrefixCache, RadixTree

MAX_UINT32 = 2**32 - 1
MAX_INT64 = 2**63 - 1
MAX_UINT64 = 2**64 - 1
SECRET = b"the same in all caches"

# Valid arguments of every call. The blocks are counted in fours: two full ones, a remainder of two tokens, and one
# block more than is needed. Consecutive and small, so that a range and an array of bytes can hold them.
TOKENS = list(range(5, 15))
BLOCKS = [40, 41, 42, 43]
DISKS = [70, 71, 72, 73]
GOOD: dict[str, Any] = {
    "tokens": TOKENS,
    "block_table": BLOCKS,
    "disk_block_ids": DISKS,
    "block_size": 4,
    "session_hash": 2**63 + 1,
    "adapter_id": 2**63 + 5,
    "matched_tokens": 4,
    "snapshot_id": 31,
    "num_blocks": 1,
    "min_tokens": 1,
    "slot": 11,
    "key": 12,
    "new_slot": 32,
    "check": 13,
    "record": False,
    "name": "system",
    "ttl": 2.5,
    "blocks": 1,
    "prompts": [TOKENS, TOKENS[:4]],
}

#: The least and the greatest value of every number that a call takes; those of `matched_tokens` go by TOKENS.
RANGES = {
    "block_size": (1, MAX_INT64),
    "session_hash": (0, MAX_UINT64),
    "adapter_id": (0, MAX_UINT64),
    "matched_tokens": (0, len(TOKENS)),
    "snapshot_id": (0, MAX_INT64),
    "num_blocks": (0, MAX_INT64),
    "min_tokens": (0, MAX_INT64),
    "slot": (0, MAX_INT64),
    "key": (0, MAX_UINT64),
    "new_slot": (0, MAX_INT64),
    "check": (0, MAX_UINT64),
    "blocks": (0, MAX_INT64),
}
SEQUENCES = ("tokens", "block_table", "disk_block_ids")
MAY_BE_NONE = ("block_size", "check", "blocks", "ttl")
#: Those that may be None in one call alone.
MAY_BE_NONE_HERE = {("iter_nodes", "adapter_id")}
KEYWORD_ONLY = ("record",)
#: Those of which every value of the right type is taken.
NEVER_OUT_OF_RANGE = ("record", "name")


def signatures(kind: type) -> dict[str, list[str]]:
    """The arguments, in order, of every public method; that of `save`, which writes a file, has tests of its own."""
    return {
        name: list(inspect.signature(method).parameters)[1:]
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name != "save"
    }


METHODS = signatures(RadixTree)
BLOCK_METHODS = [name for name, arguments in METHODS.items() if "block_table" in arguments]
SEQUENCE_METHODS = [name for name, arguments in METHODS.items() if "tokens" in arguments]


def good(method: str) -> dict[str, Any]:
    return {argument: GOOD[argument] for argument in METHODS[method]}


def call(cache: PrefixCache, method: str, arguments: dict[str, Any], by_name: bool = True) -> Any:
    """Make a call, by name or by position; a cache that stores nothing has only the arguments of the interface."""
    if isinstance(cache, NoPrefixCaching):
        arguments = {key: value for key, value in arguments.items() if key not in KEYWORD_ONLY}
    named = arguments if by_name else {key: value for key, value in arguments.items() if key in KEYWORD_ONLY}
    return getattr(cache, method)(*[value for key, value in arguments.items() if key not in named], **named)


def populated(**settings: Any) -> RadixTree:
    """A cache with something of everything, in which every valid call of the tables below would change something."""
    cache = RadixTree(**{"block_size": 4, "partial_tail_sharing": True, "check_secret": SECRET, **settings})
    slots = itertools.count(10)
    blocks = itertools.count(100)
    for adapter, (block_size, length) in itertools.product((0, GOOD["adapter_id"]), ((1, 33), (4, 34), (16, 35))):
        for first in (5, 500):
            tokens = list(range(first, first + length))
            table = [next(blocks) for _ in range(-(-length // block_size))]
            disks = [block + 1000 if block % 3 else NONE for block in table] if first == 5 else []
            cache.insert_with_snapshot(tokens, table, disks, block_size, next(slots), first, 0, adapter)
            if first == 5:
                cache.release(tokens, block_size, adapter)
    for session in (1, 2**63 + 1):
        cache.insert_tail_snapshot(TOKENS[: session % 16 + 8], next(slots), session, GOOD["adapter_id"])
        cache.insert_tail_sibling_snapshot(TOKENS[: session % 16 + 3], next(slots), session)
    for _ in range(3):
        cache.evict_snapshot_to_tier(0)
    # The prefix that was spilled first, and whose key is dead now.
    cache.insert_tail_sibling_snapshot(list(range(5, 38)), next(slots))
    cache.pin(GOOD["name"], TOKENS, 1, ttl=1e9)
    cache.set_quota(5, 7)
    cache.lookup(TOKENS, 4, 2**63 + 1, GOOD["adapter_id"])
    cache.lookup([1, 2, 3], 4)
    cache.evict(2)
    return cache


# --- refusals, one argument at a time -----------------------------------------------------------------------------


class ByArray:
    """A sequence of another library that offers itself as an array."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values


class ByIndex:
    """An integer in all but type."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class ByBytes:
    """A path, but not of text."""

    def __fspath__(self) -> bytes:
        return b"bytes"


class Special(np.ndarray):
    """An array type that kernels do not know."""


class Bad(NamedTuple):
    """A value that is refused, and what the message must say after the argument's name."""

    label: str
    value: Any
    error: type[Exception]
    says: str = " "


def strided(values: np.ndarray) -> np.ndarray:
    return np.repeat(values, 3)[::3]


def backwards(values: np.ndarray) -> np.ndarray:
    return values[::-1].copy()[::-1]


def read_only(values: np.ndarray) -> np.ndarray:
    values.setflags(write=False)
    return values


def unaligned(values: np.ndarray) -> np.ndarray:
    room = np.empty(values.nbytes + 1, np.uint8)[1:]
    room[:] = np.frombuffer(values.tobytes(), np.uint8)
    return room.view(values.dtype)


def mapped(values: np.ndarray) -> np.memmap:
    with tempfile.TemporaryFile() as file:
        file.write(values.tobytes())
        file.flush()
        return np.memmap(file, values.dtype, "r+", shape=values.shape)


NO_SEQUENCES = {
    "None": None,
    "int": 5,
    "float": 1.5,
    "bool": True,
    "text": "12",
    "set": {1, 2},
    "dict": {1: 2},
    "generator": (n for n in (1, 2)),
    "object": object(),
    "NumPy integer": np.int64(5),
    "NumPy bool": np.True_,
}
NO_INTEGER_ARRAYS = {
    "float64": "f8",
    "float32": "f4",
    "float16": "f2",
    "big-endian float64": ">f8",
    "complex": "c16",
    "bool": "?",
    "object": "O",
    "text": "U4",
    "bytes": "S4",
    "time": "m8[s]",
    "date": "M8[s]",
    "record": [("token", "u4")],
}
NO_INTEGERS = (2.0, float("nan"), np.float32(2), np.True_, 2j, Fraction(2), decimal.Decimal(2), None, "2", b"2")
HOLDERS: dict[str, tuple[Callable[[list[int]], Any], tuple[int, ...]]] = {
    "list": (list, (-1, -(2**31), 2**32, 2**63, 2**64, -(2**64), 10**40)),
    "tuple": (tuple, (-1, 2**64)),
    "deque": (collections.deque, (-1, 2**32)),
    "array.array of long long": (lambda v: array("q", v), (-1, 2**32)),
    "array.array of unsigned long long": (lambda v: array("Q", v), (2**32, 2**64 - 1)),
    "memoryview": (lambda v: memoryview(array("q", v)), (-1, 2**32)),
    "int8": (lambda v: np.array(v, "i1"), (-1, -128)),
    "int16": (lambda v: np.array(v, "i2"), (-1,)),
    "int32": (lambda v: np.array(v, "i4"), (-1, -(2**31))),
    "int64": (lambda v: np.array(v, "i8"), (-1, 2**32, 2**53 + 1, 2**63 - 1, -(2**63))),
    "uint64": (lambda v: np.array(v, "u8"), (2**32, 2**53 + 1, 2**63, 2**64 - 1)),
    "big-endian int32": (lambda v: np.array(v, ">i4"), (-1,)),
    "big-endian int64": (lambda v: np.array(v, ">i8"), (-1, 2**32)),
    "big-endian uint64": (lambda v: np.array(v, ">u8"), (2**32, 2**64 - 1)),
    "strided int64": (lambda v: strided(np.array(v)), (-1, 2**32)),
    "backward int64": (lambda v: backwards(np.array(v)), (-1, 2**32)),
    "read-only int64": (lambda v: read_only(np.array(v)), (-1, 2**32)),
    "array subclass": (lambda v: np.array(v).view(Special), (-1, 2**32)),
    "mapped int64": (lambda v: mapped(np.array(v)), (-1, 2**32)),
    "something with __array__": (lambda v: ByArray(np.array(v)), (-1, 2**32)),
}


def bad_sequences(values: list[int]) -> Iterator[Bad]:
    """What no sequence argument takes, most of it made from the valid `values` by spoiling one of them."""
    for label, value in NO_SEQUENCES.items():
        yield Bad(label, value, TypeError)
    for label, dtype in NO_INTEGER_ARRAYS.items():
        yield Bad(f"{label} array", np.array(values).astype(dtype), TypeError)
    yield Bad("array.array of floats", array("d", values), TypeError)
    yield Bad("0-d float array", np.array(1.0), TypeError)

    places = itertools.cycle((0, len(values) // 2, len(values) - 1))
    holders = itertools.cycle((list, tuple, collections.deque, list))
    for value in NO_INTEGERS:
        place, holder = next(places), next(holders)
        spoilt = [*values[:place], value, *values[place + 1 :]]
        label = f"{holder.__name__} with {type(value).__name__} {value} at {place}"
        yield Bad(label, holder(spoilt), TypeError, rf" .*\[{place}\] is .*\({type(value).__name__}\)")
    for form, (make, wrong) in HOLDERS.items():
        for value in wrong:
            place = next(places)
            spoilt = [*values[:place], value, *values[place + 1 :]]
            yield Bad(f"{form} with {value} at {place}", make(spoilt), ValueError, rf"\[{place}\] is {value}\b")
    yield Bad("range from -1", range(-1, len(values) - 1), ValueError, r"\[0\] is -1\b")
    yield Bad("range to 2**32", range(2**32 - 2, 2**32 + 1), ValueError, r"\[2\] is 4294967296\b")

    flat = np.array(values, np.uint32)
    for label, value in {
        "0-d uint32": np.array(5, np.uint32),
        "0-d int64": np.array(5),
        "row": flat[np.newaxis],
        "column": flat[:, np.newaxis],
        "2-d int64": np.ones((2, 2), int),
        "3-d": flat.reshape(1, 1, -1),
        "empty 2-d": np.empty((0, 3), np.uint32),
        "2-d memoryview": memoryview(bytes(4)).cast("B", (2, 2)),
        "2-d array subclass": flat[np.newaxis].view(Special),
        "lists in a list": [values, values],
        "a tuple in a list": [values[0], tuple(values)],
        "a range in a list": [range(3)],
        "arrays in a list": [flat, flat],
    }.items():
        yield Bad(label, value, ValueError, " must be one-dimensional")


def bad_numbers(least: int, most: int, may_be_none: bool) -> Iterator[Bad]:
    """What no number takes that goes from `least` to `most`."""
    wrong: list[Any] = [True, False, np.True_, 1.0, 0.0, float("nan"), float("inf"), np.float64(1), np.float32(1)]
    wrong += [1j, Fraction(1), decimal.Decimal(1), "1", "", b"1", [1], (), {}, np.array(1), np.array([1]), object()]
    for value in wrong if may_be_none else [None, *wrong]:
        label = f"{type(value).__name__} {value}" if type(value) is not object else "object"
        yield Bad(label, value, TypeError, rf" must be an integer, not .*\({type(value).__name__}\)")
    for value in (least - 1, -1, -(2**63), -(2**64), most + 1, 2**64, 10**40):
        if not least <= value <= most:
            yield Bad(str(value), value, ValueError, f" is {value}, outside {least}")
    yield Bad("int8 -1", np.int8(-1), ValueError, " is -1, outside")
    yield Bad("int64 -1", np.int64(-1), ValueError, " is -1, outside")
    if most < MAX_UINT64:
        yield Bad("uint64 2**64-1", np.uint64(MAX_UINT64), ValueError, f" is {MAX_UINT64}, outside")


def bad_flags() -> Iterator[Bad]:
    for value in (None, 0, 1, 1.0, "", "on", np.True_, [], object()):
        yield Bad(
            f"{type(value).__name__} {value}"[:20], value, TypeError, rf" must be a bool, not .*{type(value).__name__}"
        )


def bad_names() -> Iterator[Bad]:
    for value in (None, 0, True, 1.5, b"system", bytearray(b"system"), ["system"], np.array("system"), object()):
        yield Bad(
            f"{type(value).__name__} {value}"[:20],
            value,
            TypeError,
            rf" must be a str, not .*\({type(value).__name__}\)",
        )


def bad_seconds() -> Iterator[Bad]:
    """What no length of time takes; None is one without an end."""
    for value in (True, np.True_, "1", b"1", 1j, Fraction(1), decimal.Decimal(1), [1], np.array(1.0), object()):
        yield Bad(f"{type(value).__name__} {value}"[:20], value, TypeError, " must be a number of seconds, not ")
    for value in (-1, -0.5, -5e-324, float("nan"), float("inf"), float("-inf"), np.float32("nan"), np.int8(-1)):
        yield Bad(
            repr(value), value, ValueError, rf" is {re.escape(repr(value))}, but must be a finite number of seconds"
        )
    yield Bad("an int beyond every float", 10**400, ValueError, " is an integer of 1329 bits, but must be a finite")


def bad_prompts() -> Iterator[Bad]:
    """What no list of prompts takes: what is none, and one with any prompt that is none."""
    values = {**NO_SEQUENCES, "bytes": b"12", "array": np.ones((2, 2), np.uint32)}
    for label, value in values.items():
        yield Bad(label, value, TypeError, " must be a sequence of token sequences, not ")
    yield Bad("one prompt", TOKENS, TypeError, r"\[0\] must be a sequence of integers, not 5 ")
    holders = itertools.cycle((list, tuple, collections.deque))
    for bad in bad_sequences(TOKENS):
        yield Bad(f"with {bad.label}", next(holders)([TOKENS, bad.value, [-1]]), bad.error, rf"\[1\]{bad.says}")


def bad_values(argument: str) -> Iterator[Bad]:
    if argument in SEQUENCES:
        return bad_sequences(GOOD[argument])
    special = {"record": bad_flags, "name": bad_names, "ttl": bad_seconds, "prompts": bad_prompts}
    if argument in special:
        return special[argument]()
    return bad_numbers(*RANGES[argument], argument in MAY_BE_NONE)


REFUSALS = [
    pytest.param(method, argument, bad, id=f"{method}-{argument}-{bad.label}")
    for method, arguments in METHODS.items()
    for argument in arguments
    for bad in bad_values(argument)
    if not (bad.value is None and (method, argument) in MAY_BE_NONE_HERE)
]


@pytest.fixture(scope="module")
def cache() -> RadixTree:
    return populated()


@pytest.fixture(scope="module")
def nothing() -> NoPrefixCaching:
    return NoPrefixCaching(block_size=4)


def assert_refused(
    cache: PrefixCache, method: str, arguments: dict[str, Any], error: type[Exception], pattern: str
) -> str:
    """Make one call, twice; it must raise `error`, say what matches, and leave no trace. Returns the message."""
    before = snapshot_of(cache)
    with pytest.raises(error) as refusal:
        call(cache, method, arguments)
    with pytest.raises(error) as again:
        call(cache, method, arguments, by_name=False)
    assert differences(before, snapshot_of(cache)) == []
    assert type(refusal.value) is type(again.value) is error
    assert str(refusal.value) == str(again.value)
    assert re.match(pattern, str(refusal.value)), f"{refusal.value!s} does not match {pattern}"
    return str(refusal.value)


@pytest.mark.parametrize(("method", "argument", "bad"), REFUSALS)
def test_a_bad_argument_is_refused_by_name_and_changes_nothing(
    cache: RadixTree, nothing: NoPrefixCaching, method: str, argument: str, bad: Bad
) -> None:
    arguments = {**good(method), argument: bad.value}
    message = assert_refused(cache, method, arguments, bad.error, f"{argument}{bad.says}")
    if hasattr(nothing, method) and argument not in KEYWORD_ONLY:
        assert assert_refused(nothing, method, arguments, bad.error, "") == message


@pytest.mark.parametrize("argument", SEQUENCES)
def test_a_buffer_that_numpy_cannot_read_is_refused_by_name(
    cache: RadixTree, nothing: NoPrefixCaching, argument: str
) -> None:
    pointers = memoryview(bytes(4 * 8)).cast("P")
    released = memoryview(bytes(4))
    released.release()
    for value, error in ((pointers, TypeError), (released, ValueError)):
        arguments = {**good("insert"), argument: value}
        assert_refused(cache, "insert", arguments, error, f"{argument} ")
        assert_refused(nothing, "insert", arguments, error, f"{argument} ")


def test_every_argument_of_every_call_is_in_the_table() -> None:
    listed = {tuple(case.values[:2]) for case in REFUSALS}
    assert listed == {(method, argument) for method, arguments in METHODS.items() for argument in arguments}
    assert set(METHODS) > {"lookup", "insert", "release", "evict", "promote_snapshot", "check_integrity", "stats"}
    for method, arguments in signatures(NoPrefixCaching).items():
        assert arguments == [argument for argument in METHODS[method] if argument not in KEYWORD_ONLY]
    for method, argument in listed:
        errors = {case.values[2].error for case in REFUSALS if tuple(case.values[:2]) == (method, argument)}
        assert errors == ({TypeError} if argument in NEVER_OUT_OF_RANGE else {TypeError, ValueError})


@pytest.mark.parametrize("method", [method for method, arguments in METHODS.items() if arguments])
def test_the_arguments_that_the_table_spoils_are_taken_otherwise(method: str) -> None:
    for by_name in (True, False):
        call(populated(), method, good(method), by_name)
        if hasattr(NoPrefixCaching, method):
            call(NoPrefixCaching(), method, good(method), by_name)


@pytest.mark.parametrize("argument", MAY_BE_NONE)
def test_what_may_be_left_out_may_be_none(argument: str) -> None:
    for method in [method for method in METHODS if argument in METHODS[method]]:
        call(populated(), method, {**good(method), argument: None})


def test_an_adapter_may_be_none_where_all_are_meant() -> None:
    for method, argument in MAY_BE_NONE_HERE:
        call(populated(), method, {**good(method), argument: None})


CHANGING = ["lookup", "pin_prefix", "insert", "insert_with_snapshot", "insert_intermediate_snapshot"]
CHANGING += ["insert_tail_snapshot", "insert_tail_sibling_snapshot", "release", "release_matched", "evict"]
CHANGING += ["evict_snapshot_to_tier", "evict_snapshot_slot", "evict_snapshot_lru"]
CHANGING += ["clear", "drop_adapter", "take_dead_tier_keys", "pin", "unpin", "set_quota", "evict_from"]


@pytest.mark.parametrize("method", CHANGING)
def test_the_state_that_the_table_compares_shows_what_a_call_changes(method: str) -> None:
    cache = populated()
    before = snapshot_of(cache)
    getattr(cache, method)(**good(method))
    assert differences(before, snapshot_of(cache)) != []


# --- refusals that take two arguments to see ----------------------------------------------------------------------

#: One value of the wrong kind and one out of range, for every argument that has a range.
SPOILERS = {
    argument: (
        next(bad for bad in bad_values(argument) if type(bad.value) is object),
        next(bad for bad in bad_values(argument) if bad.error is ValueError or argument in NEVER_OUT_OF_RANGE),
    )
    for argument in GOOD
}
PAIRS = [(method, *pair) for method, arguments in METHODS.items() for pair in itertools.combinations(arguments, 2)]


@pytest.mark.parametrize(("method", "first", "second"), PAIRS)
def test_of_two_bad_arguments_the_earlier_is_named(
    cache: RadixTree, nothing: NoPrefixCaching, method: str, first: str, second: str
) -> None:
    for which in (0, 1):
        spoiler = SPOILERS[first][which]
        arguments = {**good(method), first: spoiler.value, second: SPOILERS[second][1 - which].value}
        error = spoiler.error
        assert_refused(cache, method, arguments, error, rf"{first}\b")
        if hasattr(nothing, method):
            assert_refused(nothing, method, arguments, error, rf"{first}\b")


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_disk_ids_not_as_many_as_the_blocks_are_refused(
    cache: RadixTree, nothing: NoPrefixCaching, method: str, length: int
) -> None:
    for adapter in (0, GOOD["adapter_id"], 99):
        arguments = {**good(method), "disk_block_ids": list(range(length)), "adapter_id": adapter}
        pattern = rf"disk_block_ids has {length} ids\b.*\b4 blocks"
        assert assert_refused(cache, method, arguments, ValueError, pattern) == assert_refused(
            nothing, method, arguments, ValueError, pattern
        )


def spoilt_table(place: int) -> list[int]:
    return [*BLOCKS[:place], NONE, *BLOCKS[place + 1 :]]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("block_size", [4, 3, 5])
@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_no_block_where_one_is_needed_is_refused_by_its_position(
    cache: RadixTree, nothing: NoPrefixCaching, method: str, block_size: int, place: int
) -> None:
    # Ten tokens: two blocks and two tokens, three and one, or two and nothing. At 4, some of the nodes are there and
    # would keep their blocks, under the adapter 99 none is; at 3 and 5 there is no block at all.
    used = -(-len(TOKENS) // block_size)
    for adapter, disks in itertools.product((0, GOOD["adapter_id"], 99), (DISKS, [])):
        arguments = {**good(method), "block_table": spoilt_table(place), "block_size": block_size}
        arguments |= {"adapter_id": adapter, "disk_block_ids": disks}
        if place < used:
            pattern = rf"block_table\[{place}\] is {NONE}\b"
            assert assert_refused(cache, method, arguments, ValueError, pattern) == assert_refused(
                nothing, method, arguments, ValueError, pattern
            )


@pytest.mark.parametrize("length", [0, 3, 8, 9, 10])
@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_the_part_of_a_block_table_that_is_not_needed_is_not_looked_at(method: str, length: int) -> None:
    # Of a remainder without a full block before it, nothing is kept either.
    used = {0: 0, 3: 0, 8: 2, 9: 3, 10: 3}[length]
    for adapter in (GOOD["adapter_id"], 99):
        arguments = {**good(method), "tokens": TOKENS[:length], "matched_tokens": 0, "adapter_id": adapter}
        table = [*BLOCKS[:used], *[NONE] * (len(BLOCKS) - used)]
        one, other = populated(), populated()
        got = getattr(one, method)(**{**arguments, "block_table": table})
        assert got == getattr(other, method)(**arguments)
        assert farewell(one) == farewell(other)
        getattr(NoPrefixCaching(), method)(**{**arguments, "block_table": table})


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_no_block_at_a_needed_place_is_named_before_what_is_wrong_further_on(
    cache: RadixTree, nothing: NoPrefixCaching, method: str
) -> None:
    # The block size says what is needed, so the block table is checked as soon as that is known.
    later = METHODS[method][METHODS[method].index("block_size") + 1 :]
    assert len(later) >= 2
    for argument in later:
        for spoiler in SPOILERS[argument]:
            arguments = {**good(method), "block_table": spoilt_table(1), argument: spoiler.value}
            assert_refused(nothing, method, arguments, ValueError, r"block_table\[1\]")
            assert_refused(cache, method, arguments, ValueError, r"block_table\[1\]")


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_a_wrong_number_of_disk_ids_is_named_before_what_is_wrong_further_on(
    cache: RadixTree, nothing: NoPrefixCaching, method: str
) -> None:
    for argument in METHODS[method][METHODS[method].index("disk_block_ids") + 1 :]:
        for spoiler in SPOILERS[argument]:
            arguments = {**good(method), "disk_block_ids": [1], argument: spoiler.value}
            assert_refused(cache, method, arguments, ValueError, "disk_block_ids has 1 ids")
            assert_refused(nothing, method, arguments, ValueError, "disk_block_ids has 1 ids")


@pytest.mark.parametrize("method", [method for method in METHODS if "matched_tokens" in METHODS[method]])
def test_more_matched_tokens_than_tokens_are_refused(cache: RadixTree, nothing: NoPrefixCaching, method: str) -> None:
    for length in (0, 1, 9):
        arguments = {**good(method), "tokens": TOKENS[:length], "matched_tokens": length + 1}
        for which in (cache, nothing):
            assert_refused(
                which, method, arguments, ValueError, rf"matched_tokens is {length + 1}, outside 0\.\.{length}"
            )
        getattr(populated(), method)(**{**arguments, "matched_tokens": length})


def test_a_refused_insert_does_not_make_room_in_a_full_snapshot_index() -> None:
    cache = populated()
    entries = cache._index.arrays.entries
    slots = itertools.count(1000)
    while cache.snapshot_count() < entries.size or entries.size == 0:
        cache.insert_tail_sibling_snapshot([next(slots)], next(slots))
        entries = cache._index.arrays.entries
    for block_size in (3, 4):
        arguments = {**good("insert_with_snapshot"), "block_table": spoilt_table(1), "block_size": block_size}
        assert_refused(cache, "insert_with_snapshot", arguments, ValueError, r"block_table\[1\]")


def test_a_refused_insert_does_not_make_room_in_the_tree() -> None:
    cache = RadixTree(block_size=4)
    cache.insert(TOKENS, BLOCKS)
    rows = cache._pools[4].rows
    tokens = np.arange(4 * rows + 4)
    table = np.arange(rows + 1)
    table[rows] = NONE
    assert_refused(cache, "insert", {"tokens": tokens, "block_table": table}, ValueError, rf"block_table\[{rows}\]")


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [None, 5, True, 1.5, b"bytes", ["list"], object(), ByBytes()])
def test_what_is_no_path_is_refused_by_name(cache: RadixTree, path: Any) -> None:
    before = snapshot_of(cache)
    for refused in (cache.save, RadixTree.load):
        with pytest.raises(TypeError, match=rf"^path must be a str or a path, not .*\({type(path).__name__}\)$"):
            refused(path)
    assert differences(before, snapshot_of(cache)) == []


def test_a_path_with_a_null_character_is_refused_by_name(cache: RadixTree, tmp_path: Path) -> None:
    before = snapshot_of(cache)
    for path in (f"{tmp_path}/a\0b", Path(f"{tmp_path}/a\0b")):
        for refused in (cache.save, RadixTree.load):
            with pytest.raises(ValueError, match=r"^path is .*a\\x00b', but cannot have a null character$"):
                refused(path)
    assert differences(before, snapshot_of(cache)) == []
    assert list(tmp_path.iterdir()) == []


# --- settings -----------------------------------------------------------------------------------------------------

FLAGS = ("partial_tail_sharing", "tail_protect", "evict_legacy", "hermetic", "adopt_blocks")
NO_FLAGS = [0, 1, 1.0, "1", "on", np.True_, [], object()]
BAD_SETTINGS = [
    *[(flag, Bad(f"{type(value).__name__} {value}"[:20], value, TypeError)) for flag in FLAGS for value in NO_FLAGS],
    *[("tail_lease_ttl", bad) for bad in bad_numbers(0, MAX_INT64, may_be_none=True)],
    *[("block_size", bad) for bad in bad_numbers(1, MAX_INT64, may_be_none=True)],
    *[
        ("evict_alpha", Bad(f"{type(value).__name__} {value}"[:20], value, TypeError))
        for value in (True, np.True_, "1", b"1", 1j, [], np.array(1.0), object())
    ],
    *[
        ("evict_alpha", Bad(repr(value), value, ValueError, rf" is {re.escape(repr(value))}"))
        for value in (-1, -1e-300, -0.5, 8.000000000000002, 9, float("nan"), float("inf"), float("-inf"), 10**40)
    ],
    *[
        ("check_secret", Bad(type(value).__name__, value, TypeError))
        for value in ("text", bytearray(b"secret"), memoryview(b"secret"), 5, True, [1], np.zeros(4, np.uint8))
    ],
    *[("strict", bad) for bad in bad_flags()],
    *[("max_pinned_blocks", bad) for bad in bad_numbers(0, MAX_INT64, may_be_none=True)],
    *[("reserve", bad) for bad in bad_numbers(0, 2**31, may_be_none=False)],
    *[("ghosts", bad) for bad in bad_numbers(0, 2**31, may_be_none=False)],
    *[
        ("quotas", Bad(label, value, TypeError, " must be a mapping of adapter ids to blocks, not "))
        for label, value in {**NO_SEQUENCES, "list": [(1, 2)], "items": {1: 2}.items()}.items()
        if value is not None and not isinstance(value, dict)
    ],
    *[
        ("quotas", Bad(f"of {bad.label}", {0: 1, bad.value: 1}, bad.error, f"' adapter_id{bad.says}"))
        for bad in bad_numbers(0, MAX_UINT64, may_be_none=False)
        if isinstance(bad.value, collections.abc.Hashable) and bad.value not in (0, 1)
    ],
    *[
        ("quotas", Bad(f"to {bad.label}", {0: 1, 5: bad.value}, bad.error, rf"\[5\]{bad.says}"))
        for bad in bad_numbers(0, MAX_INT64, may_be_none=False)
    ],
]


@pytest.mark.parametrize(
    ("setting", "bad"), [pytest.param(*case, id=f"{case[0]}-{case[1].label}") for case in BAD_SETTINGS]
)
def test_a_bad_setting_is_refused_by_name(cache: RadixTree, setting: str, bad: Bad) -> None:
    before = snapshot_of(cache)
    with pytest.raises(bad.error, match=f"^{setting}{bad.says}"):
        RadixTree(**{setting: bad.value})
    assert differences(before, snapshot_of(cache)) == []
    if setting == "block_size":
        with pytest.raises(bad.error, match=f"^{setting}{bad.says}"):
            NoPrefixCaching(block_size=bad.value)


def test_every_setting_is_in_the_table_and_is_a_keyword() -> None:
    parameters = inspect.signature(RadixTree).parameters
    assert {setting for setting, _ in BAD_SETTINGS} == set(parameters)
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError):
        RadixTree(True)  # type: ignore[call-arg]


def test_a_secret_is_not_in_the_message_that_refuses_it() -> None:
    with pytest.raises(TypeError) as refusal:
        RadixTree(check_secret="hunter2")  # type: ignore[arg-type]
    assert "hunter2" not in str(refusal.value)


# --- sequences that are taken -------------------------------------------------------------------------------------


class MyList(list):
    """A list of another type."""


def farewell(cache: RadixTree) -> list[Any]:
    """Everything that a cache will still say: its counters, what it holds, and in which order it lets go."""
    said: list[Any] = [cache.stats_detail(), cache.snapshot_stats(), cache.stats(), cache.snapshot_count()]
    prompts = [np.array(LARGE["tokens"], np.uint32), *(np.arange(n, n + 35, dtype=np.uint32) for n in (5, 500))]
    paths = list(itertools.product(prompts, (1, 4, 16), (0, GOOD["adapter_id"], 99)))
    for tokens, block_size, adapter in paths:
        for session in (0, 5, 2**63 + 1):
            said.append(cache.lookup(tokens, block_size, session, adapter))
    cache.check_integrity()
    while said[-1] is not None:
        said.append(cache.evict_snapshot_to_tier(0))
    for num_holds in (0, 1, 10):
        for tokens, block_size, adapter in paths:
            for _ in range(num_holds):
                cache.release(tokens, block_size, adapter)
        said.append(cache.evict(1))
        while not said[-1].is_empty():
            said.append(cache.evict(1))
    assert cache.stats() == (0, 0)
    return said


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "list subclass": MyList,
    "tuple": tuple,
    "range": lambda v: range(v[0], v[-1] + 1),
    "range backwards": lambda v: range(v[-1], v[0] - 1, -1)[::-1],
    "deque": collections.deque,
    "UserList": collections.UserList,
    "list of NumPy integers": lambda v: [np.uint64(x) if x % 2 else np.int8(x) for x in v],
    **{
        f"{order}{kind}{width}": lambda v, dtype=f"{order}{kind}{width}": np.array(v, dtype)
        for order, kind, width in itertools.product("<>", "iu", (1, 2, 4, 8))
    },
    **{f"array.array {code}": lambda v, code=code: array(code, v) for code in "bBhHiIlLqQ"},
    **{f"memoryview {code}": lambda v, code=code: memoryview(array(code, v)) for code in "bIQ"},
    "bytearray": bytearray,
    "strided memoryview": lambda v: memoryview(array("q", [x for x in v for _ in "ab"]))[::2],
    "read-only memoryview": lambda v: memoryview(bytes(v)),
    "strided uint32": lambda v: strided(np.array(v, np.uint32)),
    "strided int64": lambda v: strided(np.array(v)),
    "backward uint32": lambda v: backwards(np.array(v, np.uint32)),
    "column": lambda v: np.array([v, v, v], np.uint32).T[:, 1],
    "part of an array": lambda v: np.array([1, 2, *v, 3], np.uint32)[2:-1],
    "read-only uint32": lambda v: read_only(np.array(v, np.uint32)),
    "read-only int64": lambda v: read_only(np.array(v)),
    "unaligned uint32": lambda v: unaligned(np.array(v, np.uint32)),
    "unaligned big-endian uint64": lambda v: unaligned(np.array(v, ">u8")),
    "strided read-only big-endian int64": lambda v: read_only(strided(np.array(v, ">i8"))),
    "array subclass": lambda v: np.array(v, np.uint32).view(Special),
    "mapped uint32": lambda v: mapped(np.array(v, np.uint32)),
    "mapped big-endian int64": lambda v: mapped(np.array(v, ">i8")),
    "something with __array__": lambda v: ByArray(np.array(v)),
    "something with __array__ of uint32": lambda v: ByArray(np.array(v, np.uint32)),
}
#: Those that hold ids of 32 bits.
WIDE = ["list", "tuple", "deque", "<u4", ">u4", "<i8", ">i8", "<u8", ">u8", "array.array I", "array.array q"]
WIDE += ["memoryview Q", "strided uint32", "backward uint32", "read-only uint32", "unaligned uint32"]
WIDE += ["strided read-only big-endian int64", "mapped uint32", "something with __array__"]
LARGE = {
    "tokens": [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2, 2**31, 0, 0, 2**32 - 1, 2**31],
    "block_table": [0, 2**31, 2**32 - 2, 2**32 - 1],
    "disk_block_ids": [2**32 - 1, 0, 2**31, 2**32 - 2],
}


def described(values: Any) -> Any:
    """The content of a sequence and how it is held."""
    if isinstance(values, ByArray):
        values = values.values
    how = (values.dtype, values.shape, values.strides, values.flags.writeable) if hasattr(values, "flags") else ()
    return type(values), how, [int(value) for value in values]


@functools.cache
def answer_to_plain_arrays(method: str, large: bool) -> Any:
    """What a new cache answers, and what it has to say afterwards."""
    arguments = good(method)
    ids = LARGE if large else GOOD
    arguments |= {argument: np.array(ids[argument], np.uint32) for argument in SEQUENCES if argument in arguments}
    cache = populated()
    answer = getattr(cache, method)(**arguments)
    for argument in SEQUENCES:
        assert argument not in arguments or arguments[argument].tolist() == ids[argument]
    return answer, farewell(cache)


@pytest.mark.parametrize("method", SEQUENCE_METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_ids_in_any_form_are_what_they_are_in_a_plain_array(form: str, method: str) -> None:
    for large in (False, True) if form in WIDE else (False,):
        ids = LARGE if large else GOOD
        given = {argument: FORMS[form](ids[argument]) for argument in SEQUENCES if argument in METHODS[method]}
        before = [described(sequence) for sequence in given.values()]
        cache = populated()
        answer = getattr(cache, method)(**good(method) | given)
        assert [described(sequence) for sequence in given.values()] == before
        assert (answer, farewell(cache)) == answer_to_plain_arrays(method, large)


EMPTY: dict[str, Callable[[], Any]] = {
    "list": list,
    "tuple": tuple,
    "range": lambda: range(0),
    "deque": collections.deque,
    "text": str,
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": lambda: memoryview(b""),
    "array.array of integers": lambda: array("I"),
    "array.array of floats": lambda: array("d"),
    "uint32": lambda: np.empty(0, np.uint32),
    "read-only uint32": lambda: read_only(np.empty(0, np.uint32)),
    "big-endian int64": lambda: np.empty(0, ">i8"),
    "float": lambda: np.empty(0),
    "bool": lambda: np.empty(0, bool),
    "object": lambda: np.empty(0, object),
    "text array": lambda: np.empty(0, "U3"),
    "strided": lambda: np.arange(6, dtype=np.uint32)[3:0:2],
    "array subclass": lambda: np.empty(0, np.uint32).view(Special),
}


def answer_with_some_empty(method: str, some: tuple[str, ...], make: Callable[[], Any]) -> Any:
    """What a new cache answers if `some` arguments are empty, and what it has to say afterwards."""
    arguments = good(method) | {argument: make() for argument in some}
    if "matched_tokens" in arguments and "tokens" in some:
        arguments["matched_tokens"] = 0
    if "block_table" in some and "disk_block_ids" not in some:
        arguments["disk_block_ids"] = []
    cache = populated()
    return getattr(cache, method)(**arguments), farewell(cache)


@functools.cache
def answer_with_some_empty_lists(method: str, some: tuple[str, ...]) -> Any:
    return answer_with_some_empty(method, some, list)


@pytest.mark.parametrize("method", SEQUENCE_METHODS)
@pytest.mark.parametrize("form", EMPTY)
def test_an_empty_sequence_of_any_type_is_empty(form: str, method: str) -> None:
    sequences = tuple(argument for argument in SEQUENCES if argument in METHODS[method])
    for some in {sequences, sequences[:1], sequences[1:], sequences[2:]} - {()}:
        assert answer_with_some_empty(method, some, EMPTY[form]) == answer_with_some_empty_lists(method, some)


@pytest.mark.parametrize("form", FORMS)
def test_prompts_in_any_form_are_what_they_are_in_plain_arrays(form: str) -> None:
    cache = populated()
    prompts = [TOKENS, TOKENS[:4], TOKENS[1:], TOKENS[:9]]
    wanted = [cache.peek_matched_tokens(tokens, 4, GOOD["adapter_id"]) for tokens in prompts]
    assert len(set(wanted)) > 2
    before = snapshot_of(cache)
    for holder in (list, tuple, collections.deque, collections.UserList):
        given = holder([FORMS[form](tokens) for tokens in prompts])
        assert cache.peek_many(given, 4, GOOD["adapter_id"]) == wanted
    assert cache.peek_many([]) == cache.peek_many((), 4) == []
    assert cache.peek_many([[], TOKENS], 1000) == [0, 0]
    assert differences(before, snapshot_of(cache)) == []


# --- numbers that are taken ---------------------------------------------------------------------------------------

NUMBER_TYPES = [ByIndex, np.uint64, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32]


@pytest.mark.parametrize("method", [method for method in METHODS if set(METHODS[method]) & set(RANGES)])
@pytest.mark.parametrize("number_type", NUMBER_TYPES)
def test_a_number_of_any_integer_type_is_what_it_is_as_an_int(number_type: Callable[[int], Any], method: str) -> None:
    wide = number_type in (ByIndex, np.uint64)
    numbers = {name: GOOD[name] if wide else min(GOOD[name], 99) for name in METHODS[method] if name in RANGES}
    one, other = populated(), populated()
    given = {name: number_type(value) for name, value in numbers.items()}
    answers = [getattr(one, method)(**good(method) | given), getattr(other, method)(**good(method) | numbers)]
    answer, expected = (list(answer) if isinstance(answer, Iterator) else answer for answer in answers)
    assert answer == expected
    assert farewell(one) == farewell(other)


# --- who owns which memory ----------------------------------------------------------------------------------------


def arrays_in(answer: Any) -> list[np.ndarray]:
    if isinstance(answer, np.ndarray):
        return [answer]
    return [found for part in tuple(answer) for found in arrays_in(part)] if isinstance(answer, tuple) else []


def some_calls(cache: RadixTree) -> Iterator[tuple[list[np.ndarray], Any]]:
    """Calls that answer with arrays of every field, the arrays that went in, and the answer."""
    for first, adapter in itertools.product((5, 500, 900), (GOOD["adapter_id"], 99)):
        tokens = np.arange(first, first + 10, dtype=np.uint32)
        for base in (2000, 3000):
            table = np.arange(base, base + 4, dtype=np.uint32)
            disks = np.array([NONE, base + 500, base + 501, NONE], np.uint32)
            yield [tokens, table, disks], cache.insert(tokens, table, disks, 4, 0, adapter)
            yield [tokens, table], cache.insert(tokens, table, (), 4, 0, adapter)
            yield [tokens, table, disks], cache.insert_with_snapshot(tokens, table, disks, 4, first, 5, 0, adapter)
            yield [tokens], cache.lookup(tokens, 4, 5, adapter)
        yield [tokens], cache.lookup(tokens[:7], 4, 5, adapter)
        for _ in range(7):
            cache.release(tokens, 4, adapter)
    for num_blocks in (1, 3, 10**6):
        yield [], cache.evict(num_blocks)
    yield [], cache.take_dead_tier_keys()
    for adapter in (99, GOOD["adapter_id"], 0):
        tokens, table = np.arange(10, dtype=np.uint32), np.arange(4000, 4004, dtype=np.uint32)
        cache.insert(tokens, table, table, 4, 0, adapter)
        yield [tokens, table], cache.evict_from(adapter, 1)
        cache.release(tokens, 4, adapter)
        yield [tokens, table], cache.evict_from(adapter, 1)
        cache.insert(tokens, table, table, 4, 0, adapter)
        yield [tokens, table], cache.clear() if adapter == 0 else cache.drop_adapter(adapter)


def test_arrays_in_answers_share_memory_with_nothing() -> None:
    cache = populated(adopt_blocks=True)
    answered: list[np.ndarray] = []
    for given, answer in some_calls(cache):
        arrays = arrays_in(answer)
        keys = [answer] if isinstance(answer, np.ndarray) else [answer.tier_keys] if isinstance(answer, Cleared) else []
        assert all(ids.dtype == (np.uint64 if any(ids is key for key in keys) else np.uint32) for ids in arrays)
        assert all(ids.ndim == 1 for ids in arrays)
        for mine, other in itertools.product(arrays, [*given, *answered, *arrays_of(cache).values()]):
            assert not np.shares_memory(mine, other)
        for mine, other in itertools.combinations(arrays, 2):
            assert not np.shares_memory(mine, other)
        answered += arrays
    for mine, other in itertools.product(answered, arrays_of(cache).values()):
        assert not np.shares_memory(mine, other)
    assert sum(ids.size > 0 for ids in answered) > 50


def test_the_calls_above_fill_every_field_that_an_answer_has() -> None:
    filled: set[str] = set()
    for _, answer in some_calls(populated(adopt_blocks=True)):
        for part in answer if isinstance(answer, tuple) and not hasattr(answer, "_fields") else (answer,):
            if isinstance(part, np.ndarray):
                filled |= {"take_dead_tier_keys"} if part.size else set()
            elif part is not None:
                fields = part._asdict().items()
                filled |= {
                    f"{type(part).__name__}.{name}" for name, ids in fields if hasattr(ids, "__len__") and len(ids)
                }
    assert filled >= {
        "take_dead_tier_keys",
        *(f"Cleared.{name}" for name in Cleared._fields),
        "PrefixMatch.matched_blocks",
        "PrefixMatch.matched_disk_block_ids",
        *(f"InsertAcquired.{name}" for name in InsertAcquired._fields),
        *(f"EvictedBlocks.{name}" for name in EvictedBlocks._fields),
    }


def test_writing_to_an_answer_or_to_an_argument_changes_nothing() -> None:
    cache, untouched = populated(adopt_blocks=True), populated(adopt_blocks=True)
    for (given, answer), (_, expected) in zip(some_calls(cache), some_calls(untouched), strict=True):
        assert answer == expected
        before = snapshot_of(cache)
        mine = [ids for ids in [*given, *arrays_in(answer)] if ids.size]
        for ids in mine:
            np.invert(ids, out=ids)
        assert differences(before, snapshot_of(cache)) == []
        # The next calls are made with the same arrays.
        for ids in mine:
            np.invert(ids, out=ids)
