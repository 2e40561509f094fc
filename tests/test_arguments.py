"""What calls accept and what they refuse, value by value and with the message."""

import collections
import enum
import operator
from array import array, typecodes
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_numba.arguments import (
    MAX_INT64,
    MAX_UINT32,
    MAX_UINT64,
    as_block_size,
    as_block_table,
    as_check,
    as_count,
    as_disk_block_ids,
    as_matched_tokens,
    as_slot,
    as_tokens,
    as_u64,
    check_block_table,
)

BLOCKS = np.arange(3, dtype=np.uint32)
INTEGER_TYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
INTEGER_TYPECODES = "bBhHiIlLqQ"
EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]


def read_only(values):
    values.setflags(write=False)
    return values


def unaligned(values):
    """The same values one byte off the grid, at an address that no kernel may load from."""
    room = np.empty(values.nbytes + 1, dtype=np.uint8)[1:]
    room[:] = np.frombuffer(values.tobytes(), dtype=np.uint8)
    return room.view(values.dtype)


class ByIndex:
    """An integer in all but type."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class ByArray:
    """A sequence of another library that offers itself as an array."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values


class Special(np.ndarray):
    """An array type that kernels do not know."""


class Token(enum.IntEnum):
    END = 2


def assert_kernel_ready(got, want):
    assert type(got) is np.ndarray
    assert got.dtype == np.uint32
    assert got.dtype.isnative
    assert got.ndim == 1
    assert got.flags.carray
    assert got.tolist() == list(want)


# --- sequences that are taken -------------------------------------------------------------------------------------


def test_a_contiguous_uint32_array_passes_as_it_is():
    tokens = np.array(EXTREMES, dtype=np.uint32)
    assert as_tokens(tokens) is tokens
    assert as_block_table(tokens) is tokens
    assert as_disk_block_ids(tokens, tokens) is tokens


def test_a_contiguous_part_of_a_uint32_array_passes_as_it_is():
    part = np.arange(10, dtype=np.uint32)[3:7]
    assert as_tokens(part) is part


TAKEN = {
    "list": [1, 2, 3],
    "tuple": (1, 2, 3),
    "range": range(1, 4),
    "range backwards": range(3, 0, -1),
    "list of extremes": EXTREMES,
    "list with True and False": [True, False, 5],
    "list of NumPy integers": [np.int8(1), np.uint64(2**32 - 1), np.int64(7)],
    "list of mixed integers": [1, np.int16(2), Token.END, ByIndex(9)],
    "deque": collections.deque([1, 2, 3]),
    "UserList": collections.UserList([1, 2, 3]),
    "bytearray": bytearray([0, 127, 255]),
    "memoryview of bytes": memoryview(bytes([0, 127, 255])),
    "memoryview of int64": memoryview(array("q", [1, 2**32 - 1])),
    "strided memoryview": memoryview(array("q", [1, 2, 3, 4]))[::2],
    "strided": np.arange(10, dtype=np.uint32)[::2],
    "reversed": np.arange(10, dtype=np.uint32)[::-1],
    "column": np.arange(12, dtype=np.uint32).reshape(4, 3)[:, 1],
    "broadcast": np.broadcast_to(np.uint32(5), 4),
    "read-only": read_only(np.arange(4, dtype=np.uint32)),
    "unaligned uint32": unaligned(np.array(EXTREMES, dtype=np.uint32)),
    "unaligned int64": unaligned(np.array(EXTREMES, dtype=np.int64)),
    "big-endian uint32": np.array(EXTREMES, dtype=">u4"),
    "big-endian int64": np.array(EXTREMES, dtype=">i8"),
    "big-endian strided read-only uint64": read_only(np.array(EXTREMES, dtype=">u8")[::2]),
    "array subclass": np.arange(4, dtype=np.uint32).view(Special),
    "something with __array__": ByArray(np.array([1, 2**32 - 1], dtype=np.int64)),
    "something with __array__ of uint32": ByArray(np.array([1, 2], dtype=np.uint32)),
}


@pytest.mark.parametrize("values", TAKEN.values(), ids=TAKEN)
def test_integer_sequences_are_taken_with_their_values(values):
    want = [operator.index(value) for value in (values.values if isinstance(values, ByArray) else values)]
    assert_kernel_ready(as_tokens(values), want)
    assert_kernel_ready(as_block_table(values), want)
    assert_kernel_ready(as_disk_block_ids(values, np.zeros(len(want), dtype=np.uint32)), want)


@pytest.mark.parametrize("dtype", INTEGER_TYPES)
@pytest.mark.parametrize("order", "<>")
def test_integer_arrays_of_any_width_and_byte_order_are_taken(dtype, order):
    most = min(int(np.iinfo(dtype).max), MAX_UINT32)
    assert_kernel_ready(as_tokens(np.array([0, 1, most], dtype=order + dtype)), [0, 1, most])


@pytest.mark.parametrize("typecode", INTEGER_TYPECODES)
def test_array_arrays_of_any_integer_type_are_taken(typecode):
    most = min(int(np.iinfo(np.dtype(typecode)).max), MAX_UINT32)
    assert_kernel_ready(as_tokens(array(typecode, [0, 1, most])), [0, 1, most])


@pytest.mark.parametrize("values", [array("I", [1, 2]), np.arange(2, dtype=np.int64), read_only(np.ones(2, np.uint32))])
def test_a_sequence_that_is_not_a_plain_uint32_array_is_copied(values):
    assert not np.shares_memory(as_tokens(values), np.asarray(values))


def test_a_list_may_change_after_it_was_taken():
    values = array("I", [1, 2])
    got = as_tokens(values)
    values.append(3)
    assert got.tolist() == [1, 2]


EMPTY = {
    "list": [],
    "tuple": (),
    "range": range(0),
    "text": "",
    "bytes": b"",
    "bytearray": bytearray(),
    "memoryview": memoryview(b""),
    "deque": collections.deque(),
    "array of integers": array("I"),
    "array of floats": array("d"),
    "uint32": np.array([], dtype=np.uint32),
    "read-only uint32": read_only(np.array([], dtype=np.uint32)),
    "int64": np.array([], dtype=np.int64),
    "float64": np.array([]),
    "bool": np.array([], dtype=bool),
    "object": np.array([], dtype=object),
    "strings": np.array([], dtype="U3"),
}


@pytest.mark.parametrize("values", EMPTY.values(), ids=EMPTY)
def test_an_empty_sequence_of_any_type_is_empty(values):
    assert_kernel_ready(as_tokens(values), [])
    assert_kernel_ready(as_block_table(values), [])
    assert_kernel_ready(as_disk_block_ids(values, BLOCKS), [])


# --- sequences that are refused -----------------------------------------------------------------------------------

NO_INTEGERS = {
    "None": None,
    "int": 5,
    "float": 1.5,
    "bool": True,
    "NumPy integer": np.int64(5),
    "NumPy float": np.float64(5),
    "NumPy bool": np.True_,
    "text": "12",
    "bytes": b"12",
    "NumPy text": np.str_("12"),
    "set": {1, 2},
    "empty set": set(),
    "dict": {1: 2},
    "empty dict": {},
    "generator": (n for n in [1, 2]),
    "iterator": iter([1, 2]),
    "object": object(),
    "type": np.ndarray,
    "float array": np.array([1.0, 2.0]),
    "float32 array": np.array([1.0], dtype=np.float32),
    "0-d float array": np.array(1.0),
    "2-d float array": np.ones((2, 2)),
    "complex array": np.array([1 + 0j]),
    "bool array": np.array([True, False]),
    "object array": np.array([1, 2], dtype=object),
    "text array": np.array(["1"]),
    "bytes array": np.array([b"1"]),
    "time array": np.array([1], dtype="m8[s]"),
    "date array": np.array([1], dtype="M8[s]"),
    "record array": np.array([(1,)], dtype=[("token", np.uint32)]),
    "array of floats": array("d", [1.0]),
    "array of text": array("w" if "w" in typecodes else "u", "12"),
    "memoryview of chars": memoryview(b"12").cast("c"),
    "memoryview of bools": memoryview(b"\0\1").cast("?"),
    "__array__ of floats": ByArray(np.array([1.0])),
}


@pytest.mark.parametrize("values", NO_INTEGERS.values(), ids=NO_INTEGERS)
@pytest.mark.parametrize(
    ("take", "name"),
    [
        (as_tokens, "tokens"),
        (as_block_table, "block_table"),
        (lambda values: as_disk_block_ids(values, BLOCKS), "disk_block_ids"),
    ],
    ids=["tokens", "block_table", "disk_block_ids"],
)
def test_what_is_no_sequence_of_integers_is_a_type_error_naming_the_argument(take, name, values):
    with pytest.raises(TypeError, match=f"^{name} must"):
        take(values)


BAD_ELEMENTS = {
    "float": 2.0,
    "NaN": float("nan"),
    "NumPy float": np.float32(2),
    "complex": 2j,
    "Fraction": Fraction(2),
    "None": None,
    "text": "2",
    "bytes": b"2",
    "set": {2},
    "object": object(),
}


@pytest.mark.parametrize("element", BAD_ELEMENTS.values(), ids=BAD_ELEMENTS)
@pytest.mark.parametrize("kind", [list, tuple, collections.deque])
def test_an_element_that_is_no_integer_is_a_type_error_with_its_position(kind, element):
    with pytest.raises(TypeError, match=r"^tokens must hold integers, but tokens\[2\] is "):
        as_tokens(kind([7, True, element, -1]))


@pytest.mark.parametrize(
    "values",
    [
        np.array(5),
        np.array(5, dtype=np.uint32),
        np.array([[1, 2]], dtype=np.uint32),
        np.ones((2, 2), dtype=np.int64),
        np.empty((0, 3), dtype=np.uint32),
        np.empty((3, 0)),
        memoryview(bytes(4)).cast("B", (2, 2)),
        ByArray(np.array(5)),
        [[1, 2], [3, 4]],
        [1, [2]],
        [[]],
        ([1],),
        [(1, 2)],
        [range(2)],
        [array("I", [1])],
        [np.array([1, 2])],
        [np.array([1])],
    ],
    ids=repr,
)
def test_what_is_not_one_dimensional_is_a_value_error(values):
    for take, name in [(as_tokens, "tokens"), (as_block_table, "block_table")]:
        with pytest.raises(ValueError, match=f"^{name} must be one-dimensional"):
            take(values)
    with pytest.raises(ValueError, match=r"^disk_block_ids must be one-dimensional"):
        as_disk_block_ids(values, BLOCKS)


OUTSIDE = {
    "list, -1": ([0, -1], -1),
    "list, 2**32": ([0, 2**32], 2**32),
    "list, 2**64": ([0, 2**64], 2**64),
    "list, 2**32 + 7, which would wrap to 7": ([0, 2**32 + 7], 2**32 + 7),
    "list, 2**53 + 1, which no float64 holds": ([0, 2**53 + 1], 2**53 + 1),
    "list, NumPy integer": ([0, np.int64(-1)], -1),
    "list, an index": ([0, ByIndex(2**40)], 2**40),
    "tuple": ((0, -(2**70)), -(2**70)),
    "range": (range(0, 2**33, 2**32), 2**32),
    "deque": (collections.deque([0, -1]), -1),
    "array.array q": (array("q", [0, -(2**63)]), -(2**63)),
    "array.array Q": (array("Q", [0, 2**64 - 1]), 2**64 - 1),
    "array.array b": (array("b", [0, -1]), -1),
    "memoryview": (memoryview(array("q", [0, -1])), -1),
    "int8": (np.array([0, -128], dtype=np.int8), -128),
    "int16": (np.array([0, -1], dtype=np.int16), -1),
    "int32": (np.array([0, -(2**31)], dtype=np.int32), -(2**31)),
    "int64, -1": (np.array([0, -1]), -1),
    "int64, 2**32": (np.array([0, 2**32]), 2**32),
    "int64, 2**63 - 1": (np.array([0, 2**63 - 1]), 2**63 - 1),
    "int64, -(2**63)": (np.array([0, -(2**63)]), -(2**63)),
    "uint64, 2**32": (np.array([0, 2**32], dtype=np.uint64), 2**32),
    "uint64, 2**63 + 5": (np.array([0, 2**63 + 5], dtype=np.uint64), 2**63 + 5),
    "uint64, 2**64 - 1": (np.array([0, 2**64 - 1], dtype=np.uint64), 2**64 - 1),
    "big-endian uint64": (np.array([0, 2**63 + 5], dtype=">u8"), 2**63 + 5),
    "big-endian int64": (np.array([0, -2], dtype=">i8"), -2),
    "strided int64": (np.array([0, -5, -1, -5])[::2], -1),
    "read-only int64": (read_only(np.array([0, -1])), -1),
    "unaligned int64": (unaligned(np.array([0, 2**40])), 2**40),
    "array subclass": (np.array([0, -1]).view(Special), -1),
    "__array__": (ByArray(np.array([0, -1])), -1),
}


@pytest.mark.parametrize(("values", "value"), OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize(
    ("take", "name"),
    [
        (as_tokens, "tokens"),
        (as_block_table, "block_table"),
        (lambda values: as_disk_block_ids(values, BLOCKS), "disk_block_ids"),
    ],
    ids=["tokens", "block_table", "disk_block_ids"],
)
def test_a_value_outside_32_bits_is_a_value_error_with_position_and_value(take, name, values, value):
    with pytest.raises(ValueError, match=rf"^{name}\[1\] is {value}, outside 0\.\.4294967295$"):
        take(values)


def test_the_first_of_several_bad_values_is_named():
    with pytest.raises(ValueError, match=r"^tokens\[1\] is -1,"):
        as_tokens([0, -1, 2.5, 2**32])
    with pytest.raises(ValueError, match=r"^tokens\[2\] is 4294967296,"):
        as_tokens(np.array([0, 1, 2**32, -1]))


def test_an_integer_too_long_to_print_is_refused_by_its_size():
    with pytest.raises(ValueError, match=r"^tokens\[0\] is an integer of 20001 bits, outside"):
        as_tokens([2**20000])
    with pytest.raises(ValueError, match=r"^num_blocks is an integer of 20001 bits, outside"):
        as_count(2**20000, "num_blocks")


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, MAX_UINT32)))
def test_a_list_and_an_array_of_the_same_values_get_the_same_answer(values):
    def answer(sequence):
        try:
            return as_tokens(sequence).tolist()
        except ValueError as refusal:
            return str(refusal)

    want = next(
        (f"tokens[{i}] is {v}, outside 0..{MAX_UINT32}" for i, v in enumerate(values) if not 0 <= v <= MAX_UINT32),
        values,
    )
    assert answer(values) == want
    assert answer(tuple(values)) == want
    assert answer(np.array(values, dtype=np.int64)) == want
    assert answer(np.array(values, dtype=">i8")) == want


# --- block tables and disk ids ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 4])
def test_disk_ids_of_another_length_than_the_block_table_are_a_value_error(length):
    with pytest.raises(ValueError, match=f"^disk_block_ids has {length} ids, .* 3 blocks"):
        as_disk_block_ids([9] * length, BLOCKS)


def test_a_disk_id_may_be_the_mark_for_none():
    assert as_disk_block_ids([MAX_UINT32, 1, MAX_UINT32], BLOCKS).tolist() == [MAX_UINT32, 1, MAX_UINT32]


# Tokens, block size, length of the table, and the entries that are used.
USED = [
    (0, 4, 3, 0),
    (3, 4, 3, 0),  # a remainder with no full chunk before it is not kept
    (4, 4, 3, 1),
    (5, 4, 3, 2),  # the remainder takes the next entry
    (7, 4, 3, 2),
    (8, 4, 3, 2),
    (9, 4, 3, 3),
    (12, 4, 3, 3),
    (13, 4, 3, 3),  # no entry is left for the remainder
    (100, 4, 3, 3),
    (1, 1, 3, 1),
    (3, 1, 3, 3),
    (16, 16, 1, 1),
    (17, 16, 1, 1),
    (5, 2**62, 3, 0),
    (5, 4, 0, 0),
]


@pytest.mark.parametrize(("num_tokens", "block_size", "length", "used"), USED)
def test_none_is_refused_in_the_used_part_of_a_block_table_and_nowhere_else(num_tokens, block_size, length, used):
    for position in range(length):
        table = np.arange(length, dtype=np.uint32)
        table[position] = MAX_UINT32
        if position < used:
            with pytest.raises(ValueError, match=rf"^block_table\[{position}\] is 4294967295, which stands for no"):
                check_block_table(table, num_tokens, block_size)
        else:
            check_block_table(table, num_tokens, block_size)


def test_the_first_none_in_a_block_table_is_named():
    with pytest.raises(ValueError, match=r"^block_table\[1\] "):
        check_block_table(np.array([2, MAX_UINT32, MAX_UINT32], dtype=np.uint32), 3, 1)


def test_the_greatest_block_id_is_accepted():
    check_block_table(np.array([MAX_UINT32 - 1, 0], dtype=np.uint32), 2, 1)


# --- scalars ------------------------------------------------------------------------------------------------------

SCALARS = {
    "block_size": (lambda value: as_block_size(value, 16), 1, MAX_INT64),
    "matched_tokens": (lambda value: as_matched_tokens(value, 40), 0, 40),
    "num_blocks": (lambda value: as_count(value, "num_blocks"), 0, MAX_INT64),
    "snapshot_id": (as_slot, 0, MAX_INT64),
    "new_slot": (lambda value: as_slot(value, "new_slot"), 0, MAX_INT64),
    "adapter_id": (lambda value: as_u64(value, "adapter_id"), 0, MAX_UINT64),
    "check": (as_check, 0, MAX_UINT64),
}
MAY_BE_NONE = {"block_size", "check"}
EACH_SCALAR = pytest.mark.parametrize("name", SCALARS)


@EACH_SCALAR
def test_a_scalar_within_its_range_is_taken(name):
    take, least, most = SCALARS[name]
    for value in (least, least + 1, most - 1, most):
        assert take(value) == value


@EACH_SCALAR
@pytest.mark.parametrize("dtype", INTEGER_TYPES)
def test_a_numpy_integer_is_taken_as_an_int(name, dtype):
    value = SCALARS[name][0](np.dtype(dtype).type(7))
    assert type(value) is int
    assert value == 7


@EACH_SCALAR
def test_an_integer_in_all_but_type_is_taken_as_an_int(name):
    for given_value, want in [(ByIndex(7), 7), (Token.END, 2)]:
        value = SCALARS[name][0](given_value)
        assert type(value) is int
        assert value == want


@EACH_SCALAR
def test_a_scalar_outside_its_range_is_a_value_error_with_name_value_and_range(name):
    take, least, most = SCALARS[name]
    for value in (least - 1, -(2**63), most + 1, 2**64, 2**200):
        with pytest.raises(ValueError, match=rf"^{name} is {value}, outside {least}\.\.{most}$"):
            take(value)


@EACH_SCALAR
def test_a_numpy_integer_outside_the_range_is_a_value_error(name):
    with pytest.raises(ValueError, match=f"^{name} is -1, outside"):
        SCALARS[name][0](np.int8(-1))


NO_INTEGER = [
    *(True, False, np.True_, 1.0, 0.0, float("nan"), np.float64(1), np.float32(1), 1j, Fraction(1)),
    *("1", "", b"1", [1], (), {}, np.array(1), np.array([1]), np.array(1.0), object()),
]


@EACH_SCALAR
@pytest.mark.parametrize("value", NO_INTEGER, ids=lambda value: f"{type(value).__name__} {value}"[:40])
def test_what_is_no_integer_is_a_type_error_with_name_and_type(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be an integer, not .* \({type(value).__name__}\)$"):
        SCALARS[name][0](value)


@pytest.mark.parametrize("name", sorted(set(SCALARS) - MAY_BE_NONE))
def test_none_is_no_integer(name):
    with pytest.raises(TypeError, match=rf"^{name} must be an integer, not None \(NoneType\)$"):
        SCALARS[name][0](None)


def test_a_block_size_of_none_is_the_default():
    assert as_block_size(None, 48) == 48


def test_a_check_of_none_is_none():
    assert as_check(None) is None


def test_matched_tokens_of_an_empty_sequence_can_only_be_zero():
    assert as_matched_tokens(0, 0) == 0
    with pytest.raises(ValueError, match=r"^matched_tokens is 1, outside 0\.\.0$"):
        as_matched_tokens(1, 0)


@pytest.mark.parametrize(
    ("tokens", "position", "value"),
    [
        (range(2**32 - 1, 2**40), 1, 2**32),
        (range(1, 2**40, 2**31), 2, 2**32 + 1),
        (range(5, -(2**40), -2), 3, -1),
        (range(2**32, 2**40), 0, 2**32),
        (range(-1, 2**40), 0, -1),
    ],
)
def test_a_long_range_is_refused_by_its_ends_at_its_first_bad_token(tokens, position, value):
    with pytest.raises(ValueError, match=rf"^tokens\[{position}\] is {value}, outside"):
        as_tokens(tokens)
