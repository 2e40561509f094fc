"""The cache that stores nothing: it answers empty, keeps no slot, and still refuses bad input."""

import pickle

import numpy as np
import pytest

from metrale_numba import metrics
from metrale_numba.interface import NONE, EvictedBlocks, InsertAcquired, PrefixCache, PrefixMatch
from metrale_numba.no_caching import NoPrefixCaching

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
TABLE = [0, 1]

GOOD = {
    "lookup": {"tokens": TOKENS, "block_size": 4, "session_hash": 1, "adapter_id": 2},
    "peek_matched_tokens": {"tokens": TOKENS, "block_size": 4, "adapter_id": 2},
    "pin_prefix": {"tokens": TOKENS, "block_size": 4, "adapter_id": 2},
    "insert": {
        "tokens": TOKENS,
        "block_table": TABLE,
        "disk_block_ids": [7, NONE],
        "block_size": 4,
        "matched_tokens": 4,
        "adapter_id": 2,
    },
    "insert_with_snapshot": {
        "tokens": TOKENS,
        "block_table": TABLE,
        "disk_block_ids": [7, NONE],
        "block_size": 4,
        "snapshot_id": 3,
        "session_hash": 1,
        "matched_tokens": 4,
        "adapter_id": 2,
    },
    "insert_intermediate_snapshot": {
        "tokens": TOKENS,
        "block_table": TABLE,
        "disk_block_ids": [7, NONE],
        "block_size": 4,
        "snapshot_id": 3,
        "session_hash": 1,
        "matched_tokens": 4,
        "adapter_id": 2,
    },
    "insert_tail_snapshot": {"tokens": TOKENS, "snapshot_id": 3, "session_hash": 1, "adapter_id": 2},
    "insert_tail_sibling_snapshot": {"tokens": TOKENS, "snapshot_id": 3, "session_hash": 1, "adapter_id": 2},
    "release": {"tokens": TOKENS, "block_size": 4, "adapter_id": 2},
    "release_matched": {"tokens": TOKENS, "block_size": 4, "matched_tokens": 4, "adapter_id": 2},
    "evict": {"num_blocks": 10},
    "evict_snapshot_lru": {},
    "evict_snapshot_to_tier": {"min_tokens": 0},
    "promote_snapshot": {"key": 1, "new_slot": 3, "check": 5},
    "forget_snapshot_tier_key": {"key": 1},
    "snapshot_count": {},
    "stats": {},
}
ANSWERS = {
    "lookup": PrefixMatch.empty(),
    "peek_matched_tokens": 0,
    "pin_prefix": 0,
    "insert": InsertAcquired(),
    "insert_with_snapshot": (None, InsertAcquired()),
    "insert_intermediate_snapshot": None,
    "insert_tail_snapshot": [],
    "insert_tail_sibling_snapshot": None,
    "release": None,
    "release_matched": None,
    "evict": EvictedBlocks(),
    "evict_snapshot_lru": None,
    "evict_snapshot_to_tier": None,
    "promote_snapshot": False,
    "forget_snapshot_tier_key": False,
    "snapshot_count": 0,
    "stats": (0, 0),
}


@pytest.fixture
def cache():
    return NoPrefixCaching()


def test_it_is_a_prefix_cache_that_is_not_active(cache):
    assert isinstance(cache, PrefixCache)
    assert cache.is_active() is False


def test_a_sequence_passes_through_without_a_trace(cache):
    assert cache.lookup(TOKENS, 4, 0, 0).is_empty()
    acquired = cache.insert(TOKENS, TABLE, [], 4, 0, 0)
    assert acquired.disk_block_ids.size == 0
    assert acquired.blocks.size == 0
    cache.release(TOKENS, 4, 0)
    assert cache.evict(10).is_empty()
    assert cache.evict_snapshot_lru() is None
    assert cache.snapshot_count() == 0
    assert cache.stats() == (0, 0)


def test_what_was_inserted_is_not_found(cache):
    cache.insert(TOKENS, TABLE, block_size=4)
    cache.insert_with_snapshot(TOKENS, TABLE, (), 4, snapshot_id=3)
    assert cache.lookup(TOKENS, 4) == PrefixMatch.empty()
    assert cache.peek_matched_tokens(TOKENS, 4) == 0
    assert cache.pin_prefix(TOKENS, 4) == 0


@pytest.mark.parametrize("method", GOOD)
def test_every_call_answers_that_there_is_nothing(cache, method):
    assert getattr(cache, method)(**GOOD[method]) == ANSWERS[method]
    assert type(getattr(cache, method)(**GOOD[method])) is type(ANSWERS[method])


def test_every_method_of_the_contract_has_an_answer_here():
    methods = {name for name in vars(PrefixCache) if not name.startswith("_")}
    assert methods - {"is_active"} == set(ANSWERS)


def test_no_call_hands_an_offered_slot_back(cache):
    for _ in range(2):
        displaced, _ = cache.insert_with_snapshot(TOKENS, TABLE, (), 4, snapshot_id=3, session_hash=1)
        assert displaced is None
        assert cache.insert_intermediate_snapshot(TOKENS, TABLE, (), 4, snapshot_id=4, session_hash=1) is None
        assert cache.insert_tail_snapshot(TOKENS, snapshot_id=5, session_hash=1) == []
        assert cache.insert_tail_sibling_snapshot(TOKENS, snapshot_id=6, session_hash=1) is None
    assert cache.evict_snapshot_lru() is None


def test_a_lookup_counts_neither_a_hit_nor_a_miss(cache):
    before = metrics.cache_hit_count(), metrics.cache_miss_count(), metrics.cache_hit_tokens_total()
    cache.lookup(TOKENS, 4)
    assert (metrics.cache_hit_count(), metrics.cache_miss_count(), metrics.cache_hit_tokens_total()) == before


def test_the_default_block_size_is_the_constructor_s():
    table = [0, NONE]  # used by eight tokens at block size 4, not at 16
    NoPrefixCaching().insert(TOKENS, table)
    with pytest.raises(ValueError, match=r"^block_table\[1\] "):
        NoPrefixCaching(block_size=4).insert(TOKENS, table)
    assert NoPrefixCaching(block_size=4).block_size == 4


@pytest.mark.parametrize(
    ("block_size", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("4", TypeError)]
)
def test_an_impossible_default_block_size_is_refused(block_size, error):
    with pytest.raises(error, match=r"^block_size "):
        NoPrefixCaching(block_size=block_size)


def test_it_survives_pickling():
    assert pickle.loads(pickle.dumps(NoPrefixCaching(block_size=4))).block_size == 4


BAD = {
    "tokens": [
        (None, TypeError),
        ("abc", TypeError),
        ([1.5], TypeError),
        (np.ones(3), TypeError),
        (np.ones((2, 2), dtype=np.uint32), ValueError),
        ([-1], ValueError),
        ([2**32], ValueError),
    ],
    "block_table": [
        (None, TypeError),
        ([1.5], TypeError),
        ([[1]], ValueError),
        ([-1, 0], ValueError),
        ([0, NONE], ValueError),
    ],
    "disk_block_ids": [(None, TypeError), ([1.5, 2], TypeError), ([1], ValueError), ([0, 2**32], ValueError)],
    "block_size": [(0, ValueError), (-4, ValueError), (4.0, TypeError), (True, TypeError)],
    "matched_tokens": [(-1, ValueError), (9, ValueError), (4.0, TypeError), (None, TypeError)],
    "snapshot_id": [(-1, ValueError), (2**63, ValueError), (True, TypeError), (None, TypeError)],
    "new_slot": [(-1, ValueError), (2**63, ValueError), (1.0, TypeError), (None, TypeError)],
    "session_hash": [(-1, ValueError), (2**64, ValueError), (1.0, TypeError), (None, TypeError)],
    "adapter_id": [(-1, ValueError), (2**64, ValueError), (1.0, TypeError), (None, TypeError)],
    "key": [(-1, ValueError), (2**64, ValueError), (1.0, TypeError), (None, TypeError)],
    "check": [(-1, ValueError), (2**64, ValueError), (1.0, TypeError), ("5", TypeError)],
    "num_blocks": [(-1, ValueError), (2**63, ValueError), (1.0, TypeError), (None, TypeError)],
    "min_tokens": [(-1, ValueError), (2**63, ValueError), (1.0, TypeError), (None, TypeError)],
}


@pytest.mark.parametrize(
    ("method", "argument"), [(method, argument) for method, arguments in GOOD.items() for argument in arguments]
)
def test_every_bad_argument_is_refused_by_name(cache, method, argument):
    for value, error in BAD[argument]:
        with pytest.raises(error, match=rf"^{argument}\b"):
            getattr(cache, method)(**GOOD[method] | {argument: value})


@pytest.mark.parametrize("method", [method for method, arguments in GOOD.items() if len(arguments) > 1])
def test_of_several_bad_arguments_the_first_is_named(cache, method):
    arguments = list(GOOD[method])
    for first in range(len(arguments)):
        bad = {argument: BAD[argument][0][0] for argument in arguments[first:]}
        with pytest.raises((TypeError, ValueError), match=rf"^{arguments[first]}\b"):
            getattr(cache, method)(**GOOD[method] | bad)
