"""The result types as values, and the contract as a class to build on."""

import ast
import copy
import inspect
import operator
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import metrale_numba
from metrale_numba import RadixTree, interface
from metrale_numba.interface import (
    EMPTY_IDS,
    NONE,
    Cleared,
    Drop,
    EvictedBlocks,
    InsertAcquired,
    PrefixCache,
    PrefixMatch,
    SnapshotStats,
    Spill,
    StatsDetail,
)


def ids(*values):
    return np.array(values, dtype=np.uint32)


def match():
    return PrefixMatch(ids(7, 8), ids(NONE, 3), 32, None, 0, 2**64 - 1, 16, True, 2**63)


def acquired():
    return InsertAcquired(ids(1), ids(2, 3), ids(4), ids(5, 6))


def evicted():
    return EvictedBlocks(ids(4, 5, 6), ids(9))


def spill():
    return Spill(slot=3, key=2**64 - 1, depth=512, check=2**63)


def drop():
    return Drop(slot=3, depth=16)


def cleared():
    return Cleared(evicted(), [3, 2**63 - 1], np.array([0, 2**64 - 1], dtype=np.uint64))


ALL_RESULTS = [match, acquired, evicted, spill, drop, cleared]


def test_none_is_the_greatest_id():
    assert NONE == 2**32 - 1


def test_empty_ids_is_a_read_only_uint32_array_without_elements():
    assert (EMPTY_IDS.shape, EMPTY_IDS.dtype, EMPTY_IDS.flags.writeable) == ((0,), np.uint32, False)


def test_the_empty_match_has_no_tokens_and_no_blocks():
    empty = PrefixMatch.empty()
    assert empty.is_empty()
    assert empty.matched_tokens == 0
    assert len(empty.matched_blocks) == 0
    assert len(empty.matched_disk_block_ids) == 0


def test_the_empty_match_has_no_snapshot():
    empty = PrefixMatch.empty()
    assert empty.ssm_snapshot is None
    assert empty.ssm_snapshot_tokens == 0
    assert empty.ssm_snapshot_tier_key is None
    assert empty.ssm_snapshot_tier_tokens == 0
    assert empty.ssm_snapshot_is_tail is False
    assert empty.ssm_snapshot_check is None


def test_a_match_of_tokens_is_not_empty():
    assert not match().is_empty()


def test_acquired_is_empty_in_every_field_by_default():
    assert [field.size for field in InsertAcquired()] == [0, 0, 0, 0]


def test_evicted_is_empty_by_default():
    assert EvictedBlocks().is_empty()
    assert len(EvictedBlocks()) == 0


def test_the_length_of_evicted_is_its_number_of_blocks():
    assert len(evicted()) == 3
    assert not evicted().is_empty()


@pytest.mark.parametrize(
    ("result", "fields"),
    [
        (
            PrefixMatch,
            (
                "matched_blocks",
                "matched_disk_block_ids",
                "matched_tokens",
                "ssm_snapshot",
                "ssm_snapshot_tokens",
                "ssm_snapshot_tier_key",
                "ssm_snapshot_tier_tokens",
                "ssm_snapshot_is_tail",
                "ssm_snapshot_check",
            ),
        ),
        (InsertAcquired, ("disk_block_ids", "blocks", "released_blocks", "released_disk_block_ids")),
        (EvictedBlocks, ("physical", "disk_block_ids")),
        (Cleared, ("blocks", "snapshot_slots", "tier_keys")),
        (Spill, ("slot", "key", "depth", "check")),
        (Drop, ("slot", "depth")),
    ],
)
def test_fields_stand_in_the_order_of_the_interface(result, fields):
    assert result._fields == fields


def test_snapshot_stats_has_every_counter_of_the_index():
    assert SnapshotStats._fields == (
        "saves",
        "lookups",
        "hits",
        "anchor_depth_sum",
        "recompute_tokens_on_hit",
        "recompute_tokens_on_miss",
        "evictions",
        "tier_spills",
        "tier_hits",
        "tier_fault_ins",
        "tier_reaps",
    )


def test_stats_detail_has_every_counter_and_size_of_the_tree():
    assert StatsDetail._fields == (
        *("cache_hits", "cache_misses", "cache_hit_tokens", "over_releases"),
        *("num_blocks", "num_suffix_blocks", "clock", "num_evictable"),
        *("epoch", "num_pinned_blocks", "blocks_by_adapter"),
    )


@pytest.mark.parametrize("make", ALL_RESULTS)
def test_results_with_equal_values_are_equal(make):
    assert make() == make()
    assert not make() != make()  # noqa: SIM202 - != has code of its own


@pytest.mark.parametrize("make", ALL_RESULTS)
def test_results_that_differ_in_any_one_field_are_not_equal(make):
    for field in make()._fields:
        value = getattr(make(), field)
        if isinstance(value, np.ndarray):
            others = [value + value.dtype.type(1), value[:-1], np.append(value, value[:1])]
        elif isinstance(value, EvictedBlocks):
            others = [EvictedBlocks(), value._replace(physical=ids(4, 5)), value._replace(disk_block_ids=ids())]
        elif isinstance(value, list):
            others = [value[::-1], value[:-1], [*value, 0], []]
        elif value is None:
            others = [0]
        else:
            others = [not value] if isinstance(value, bool) else [value + 1, None]
        for other in others:
            changed = make()._replace(**{field: other})
            assert changed != make()
            assert not changed == make()  # noqa: SIM201 - == has code of its own


@pytest.mark.parametrize("make", ALL_RESULTS)
def test_a_result_equals_a_plain_tuple_of_its_values_from_either_side(make):
    assert make() == tuple(make())
    assert tuple(make()) == make()
    assert make() != (*make(), 0)


@pytest.mark.parametrize("make", ALL_RESULTS)
@pytest.mark.parametrize("other", [None, 0, "match", [1, 2]])
def test_a_result_is_not_equal_to_something_else(make, other):
    assert make() != other
    assert not make() == other  # noqa: SIM201 - == has code of its own


@pytest.mark.parametrize("make", ALL_RESULTS)
def test_results_are_not_hashable(make):
    with pytest.raises(TypeError, match="unhashable"):
        hash(make())


@pytest.mark.parametrize("make", ALL_RESULTS)
def test_results_cannot_be_changed(make):
    for field in make()._fields:
        with pytest.raises(AttributeError):
            setattr(make(), field, 0)
    with pytest.raises(AttributeError):
        make().something_new = 0


@pytest.mark.parametrize("make", ALL_RESULTS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_results_survive_pickling(make, protocol):
    back = pickle.loads(pickle.dumps(make(), protocol))
    assert type(back) is type(make())
    assert back == make()


@pytest.mark.parametrize("make", ALL_RESULTS)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_results_survive_copying(make, duplicate):
    back = duplicate(make())
    assert type(back) is type(make())
    assert back == make()


def test_a_deep_copy_has_arrays_of_its_own():
    original = evicted()
    copy.deepcopy(original).physical[0] = 77
    assert original == evicted()


@pytest.mark.parametrize("make", ALL_RESULTS)
def test_results_unpack_into_their_fields_in_order(make):
    first, *rest = make()
    same = np.array_equal if isinstance(first, np.ndarray) else operator.eq
    assert same(first, getattr(make(), make()._fields[0]))
    assert len(rest) == len(make()._fields) - 1


@pytest.mark.parametrize("make", ALL_RESULTS)
def test_results_can_be_made_from_an_iterable_and_replaced_in_part(make):
    assert type(make())._make(iter(make())) == make()
    first = make()._fields[0]
    replaced = make()._replace(**{first: getattr(make(), first)})
    assert type(replaced) is type(make())
    assert replaced == make()


def test_evicted_cannot_be_made_from_too_few_or_too_many_values():
    for values in [(), (ids(1),), (ids(1), ids(2), ids(3))]:
        with pytest.raises(ValueError, match="unpack"):
            EvictedBlocks._make(values)


def test_evicted_reversed_gives_its_fields_from_the_last_on():
    last, first = reversed(evicted())
    assert (last.tolist(), first.tolist()) == ([9], [4, 5, 6])


def test_results_can_be_made_the_short_way_round_their_constructor():
    assert tuple.__new__(PrefixMatch, tuple(match())) == match()


def test_a_short_result_prints_all_its_ids():
    assert repr(evicted()) == "EvictedBlocks(physical=[4, 5, 6], disk_block_ids=[9])"


def test_a_result_of_results_prints_all_of_them():
    assert repr(cleared()) == (
        "Cleared(blocks=EvictedBlocks(physical=[4, 5, 6], disk_block_ids=[9]), "
        "snapshot_slots=[3, 9223372036854775807], tier_keys=[0, 18446744073709551615])"
    )


def test_a_long_result_prints_the_ends_and_the_number_of_its_ids():
    long = EvictedBlocks(np.arange(4096, dtype=np.uint32))
    assert repr(long) == "EvictedBlocks(physical=[0, 1, 2, 3, ..., 4094, 4095] (4096 ids), disk_block_ids=[])"


def test_a_result_of_numbers_prints_like_its_constructor():
    assert eval(repr(spill())) == spill()
    assert eval(repr(drop())) == drop()


SIGNATURES = {
    "is_active": (),
    "lookup": ("tokens", "block_size", "session_hash", "adapter_id"),
    "peek_matched_tokens": ("tokens", "block_size", "adapter_id"),
    "pin_prefix": ("tokens", "block_size", "adapter_id"),
    "insert": ("tokens", "block_table", "disk_block_ids", "block_size", "matched_tokens", "adapter_id"),
    "insert_with_snapshot": (
        *("tokens", "block_table", "disk_block_ids", "block_size"),
        *("snapshot_id", "session_hash", "matched_tokens", "adapter_id"),
    ),
    "insert_intermediate_snapshot": (
        *("tokens", "block_table", "disk_block_ids", "block_size"),
        *("snapshot_id", "session_hash", "matched_tokens", "adapter_id"),
    ),
    "insert_tail_snapshot": ("tokens", "snapshot_id", "session_hash", "adapter_id"),
    "insert_tail_sibling_snapshot": ("tokens", "snapshot_id", "session_hash", "adapter_id"),
    "release": ("tokens", "block_size", "adapter_id"),
    "release_matched": ("tokens", "block_size", "matched_tokens", "adapter_id"),
    "evict": ("num_blocks",),
    "evict_snapshot_lru": (),
    "evict_snapshot_to_tier": ("min_tokens",),
    "promote_snapshot": ("key", "new_slot", "check"),
    "forget_snapshot_tier_key": ("key",),
    "snapshot_count": (),
    "stats": (),
}
WITH_DEFAULTS = {"is_active", "peek_matched_tokens", "pin_prefix"} | {
    "evict_snapshot_to_tier",
    "promote_snapshot",
    "forget_snapshot_tier_key",
}


def is_extra(parameter):
    """Whether an argument is one that the interface does not have, which only a keyword gives."""
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY


IMPLEMENTATIONS = [
    PrefixCache,
    *(thing for thing in vars(metrale_numba).values() if inspect.isclass(thing) and PrefixCache in thing.__mro__[1:]),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("method", SIGNATURES)
def test_arguments_have_the_names_and_the_order_of_the_interface(implementation, method):
    parameters = inspect.signature(getattr(implementation, method)).parameters.values()
    own = [parameter for parameter in parameters if parameter.name != "self" and not is_extra(parameter)]
    assert tuple(parameter.name for parameter in own) == SIGNATURES[method]
    assert all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in own)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("method", SIGNATURES)
def test_arguments_have_the_same_defaults_in_every_implementation(implementation, method):
    def defaults(cls):
        parameters = inspect.signature(getattr(cls, method)).parameters
        return {name: parameter.default for name, parameter in parameters.items() if not is_extra(parameter)}

    assert defaults(implementation) == defaults(PrefixCache)


def test_what_an_implementation_takes_beyond_the_interface_can_be_left_out():
    extra = {
        (implementation.__name__, method, parameter.name): parameter.default
        for implementation in IMPLEMENTATIONS
        for method in SIGNATURES
        for parameter in inspect.signature(getattr(implementation, method)).parameters.values()
        if is_extra(parameter)
    }
    assert extra == {("RadixTree", "lookup", "record"): True}


#: What RadixTree can do beyond the interface; every argument in order, with its default if it has one.
BEYOND = {
    "clear": {},
    "contents": {},
    "drop_adapter": {"adapter_id": ...},
    "adapter_epoch": {"adapter_id": ...},
    "take_dead_tier_keys": {},
    "evict_snapshot_slot": {"slot": ...},
    "pin": {"name": ..., "tokens": ..., "block_size": None, "adapter_id": 0, "ttl": None},
    "unpin": {"name": ...},
    "pins": {},
    "set_quota": {"adapter_id": ..., "blocks": ...},
    "evict_from": {"adapter_id": ..., "num_blocks": ...},
    "num_evictable": {},
    "peek_many": {"prompts": ..., "block_size": None, "adapter_id": 0},
    "stats_detail": {},
    "snapshot_stats": {},
    "memory_usage": {},
    "compact": {},
    "check_integrity": {},
    "explain": {"tokens": ..., "block_size": None, "session_hash": 0, "adapter_id": 0},
    "iter_nodes": {"adapter_id": None, "block_size": None},
    "save": {"path": ...},
    "load": {"path": ..., "reserve": 0, "ghosts": 0},
}


@pytest.mark.parametrize("method", BEYOND)
def test_calls_beyond_the_interface_have_these_arguments(method):
    parameters = inspect.signature(getattr(RadixTree, method)).parameters.values()
    given = {
        parameter.name: ... if parameter.default is inspect.Parameter.empty else parameter.default
        for parameter in parameters
        if parameter.name != "self"
    }
    assert list(given.items()) == list(BEYOND[method].items())
    assert all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)


def test_there_is_no_public_call_beside_those_of_the_interface_and_those_above():
    public = {name for name, value in inspect.getmembers(RadixTree, callable) if not name.startswith("_")}
    assert public == SIGNATURES.keys() | BEYOND.keys()


def test_lookup_needs_nothing_but_tokens():
    defaults = {name: p.default for name, p in inspect.signature(PrefixCache.lookup).parameters.items()}
    assert (defaults["block_size"], defaults["session_hash"], defaults["adapter_id"]) == (None, 0, 0)


def test_insert_needs_nothing_but_tokens_and_blocks():
    defaults = {name: p.default for name, p in inspect.signature(PrefixCache.insert).parameters.items()}
    assert (defaults["disk_block_ids"], defaults["block_size"], defaults["matched_tokens"]) == ((), None, 0)
    assert defaults["block_table"] is inspect.Parameter.empty


def test_every_method_without_a_default_is_abstract():
    assert set(SIGNATURES) - WITH_DEFAULTS == PrefixCache.__abstractmethods__


def test_a_cache_that_leaves_a_method_out_cannot_be_built():
    class Unfinished(PrefixCache):
        def evict(self, num_blocks):
            raise NotImplementedError

    with pytest.raises(TypeError, match="abstract"):
        Unfinished()


class Smallest(PrefixCache):
    """A cache with nothing but what it must have, to see what it gets for free."""

    lookup = insert = insert_with_snapshot = insert_intermediate_snapshot = insert_tail_snapshot = None
    insert_tail_sibling_snapshot = release = release_matched = evict = evict_snapshot_lru = None
    snapshot_count = stats = None


def test_a_cache_is_active_by_default():
    assert Smallest().is_active() is True


def test_a_cache_peeks_and_pins_nothing_by_default():
    assert Smallest().peek_matched_tokens([1, 2, 3, 4], 4) == 0
    assert Smallest().pin_prefix([1, 2, 3, 4], 4) == 0


def test_a_cache_knows_no_tier_by_default():
    assert Smallest().evict_snapshot_to_tier(0) is None
    assert Smallest().promote_snapshot(1, 2) is False
    assert Smallest().promote_snapshot(1, 2, check=3) is False
    assert Smallest().forget_snapshot_tier_key(1) is False


@pytest.mark.parametrize("method", SIGNATURES)
def test_every_method_of_the_contract_is_described(method):
    assert inspect.getdoc(getattr(PrefixCache, method))


def test_the_contract_imports_nothing_of_this_package():
    tree = ast.parse(Path(interface.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." * node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "numpy" in imported
    assert not [name for name in imported if name.startswith(("metrale_numba", "."))]


def test_importing_the_package_loads_neither_a_compiler_nor_the_command_line():
    program = "import sys, metrale_numba; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "metrale_numba" in loaded
    assert {"numba", "llvmlite", "click", "rich"}.isdisjoint(loaded)


def test_every_public_name_of_the_package_exists():
    assert sorted(set(metrale_numba.__all__)) == sorted(metrale_numba.__all__)
    assert all(hasattr(metrale_numba, name) for name in metrale_numba.__all__)
