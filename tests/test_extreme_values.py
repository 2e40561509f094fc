"""Values at the ends of their ranges, and caches that are very deep, very wide or spread over very many pools.

It relies on :mod:`pair` for prompts with a wanted tier key. Numbers must come back exactly, as plain ints, and a cache
that has been emptied must own no more memory than before.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from model import tier_key
from pair import COPIES, forge
from state import differences, sizes_of, snapshot_of

from metrale_numba import NONE, Drop, InsertAcquired, PrefixMatch, RadixTree, Spill
from metrale_numba.kernels import layout

MAX_BLOCK = 2**32 - 2
MAX_SLOT = 2**63 - 1
ALL_AT_ONCE = 2**63 - 1
EXTREME_TOKENS = (0, 2**31, 2**32 - 1)
EXTREME_WORDS = (0, 2**63 - 1, 2**63, 2**64 - 1)
SECRET = b"fixed"


def uint32s(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def assert_is(got: Any, want: int) -> None:
    assert type(got) is int
    assert got == want


def drain(cache: RadixTree) -> list[int]:
    """Evict everything, and find that nothing is left."""
    blocks = cache.evict(ALL_AT_ONCE).physical.tolist()
    assert cache.stats() == (0, 0)
    cache.check_integrity()
    return blocks


# --- ends of ranges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 17])
def test_prompts_of_extreme_tokens_are_told_apart(block_size: int) -> None:
    cache = RadixTree(block_size=block_size, partial_tail_sharing=True)
    blocks = itertools.count()
    prompts = {}
    for chunks in itertools.product(EXTREME_TOKENS, repeat=3):
        # Differing from each other in the last token of a block only.
        tokens = [token for last in chunks for token in (*[0] * (block_size - 1), last)]
        prompts[tuple(tokens)] = list(itertools.islice(blocks, 3))
        cache.insert(tokens, prompts[tuple(tokens)])
    cache.check_integrity()
    assert cache.stats() == (3 + 9 + 27, 3 + 9 + 27)
    last_blocks = [cache.lookup(tokens).matched_blocks.tolist()[-1] for tokens in prompts]
    assert last_blocks == [table[-1] for table in prompts.values()]
    for token in (1, 2**31 - 1, 2**31 + 1, 2**32 - 2):
        assert cache.peek_matched_tokens([*[0] * (block_size - 1), token]) == 0


def test_a_partial_suffix_of_extreme_tokens_is_matched_token_by_token() -> None:
    cache = RadixTree(block_size=4, partial_tail_sharing=True)
    cache.insert([1, 2, 3, 4, *EXTREME_TOKENS], [10, 11])
    assert cache.lookup([1, 2, 3, 4, *EXTREME_TOKENS]).matched_blocks.tolist() == [10, 11]
    for i, token in itertools.product(range(3), (0, 2**31, 2**32 - 1, 1)):
        tail = [*EXTREME_TOKENS[:i], token]
        matched = 4 + len(tail) if token == EXTREME_TOKENS[i] else 4
        assert cache.peek_matched_tokens([1, 2, 3, 4, *tail]) == matched


@pytest.mark.parametrize("adopt_blocks", [False, True])
def test_extreme_block_ids_come_back_as_they_went_in(adopt_blocks: bool) -> None:
    cache = RadixTree(block_size=2, partial_tail_sharing=True, adopt_blocks=adopt_blocks)
    table = [0, MAX_BLOCK, MAX_BLOCK - 1, 2**31]
    assert cache.insert(range(7), table).blocks.tolist() == table
    assert cache.lookup(range(7)).matched_blocks.tolist() == table
    adopted = cache.insert(range(6), [MAX_BLOCK, 0, MAX_BLOCK - 1])
    assert adopted.blocks.tolist() == ([MAX_BLOCK, 0] if adopt_blocks else [])
    assert adopted.released_blocks.tolist() == ([0, MAX_BLOCK] if adopt_blocks else [])
    # A longer prompt takes the place of the suffix.
    assert cache.insert(range(8), table, matched_tokens=6).released_blocks.tolist() == [2**31]
    for _ in range(3):
        cache.release(range(8))
    assert drain(cache) == ([2**31, MAX_BLOCK - 1, 0, MAX_BLOCK] if adopt_blocks else table[::-1])


def test_extreme_disk_ids_come_back_as_they_went_in() -> None:
    cache = RadixTree(block_size=2, partial_tail_sharing=True)
    disks = [0, NONE, MAX_BLOCK, 2**31]
    acquired = cache.insert(range(7), [1, 2, 3, 4], disks)
    assert acquired.disk_block_ids.tolist() == [0, MAX_BLOCK, 2**31]
    assert cache.lookup(range(7)).matched_disk_block_ids.tolist() == disks
    assert cache.insert(range(7), [1, 2, 3, 4], [5, MAX_BLOCK - 1, 6, 0]).disk_block_ids.tolist() == [MAX_BLOCK - 1, 0]
    assert cache.insert(range(7), [1, 2, 3, 4]).released_disk_block_ids.tolist() == [0]
    for _ in range(4):
        cache.release(range(7))
    assert cache.evict(ALL_AT_ONCE).disk_block_ids.tolist() == [MAX_BLOCK, MAX_BLOCK - 1, 0]


def test_extreme_adapters_have_forests_of_their_own() -> None:
    cache = RadixTree(block_size=1)
    adapters = [*EXTREME_WORDS, 1, 2**32 - 1, 2**32, 2**63 + 1, 2**64 - 2]
    for i, adapter in enumerate(adapters):
        assert cache.peek_matched_tokens([1, 2], adapter_id=adapter) == 0
        cache.insert([1, 2], [2 * i, 2 * i + 1], adapter_id=adapter)
        cache.insert_with_snapshot([1, 2, 3], [2 * i, 2 * i + 1, 100 + i], (), 1, i, adapter_id=adapter)
    cache.check_integrity()
    for i, adapter in enumerate(adapters):
        match = cache.lookup([1, 2, 3], adapter_id=adapter)
        assert match.matched_blocks.tolist() == [2 * i, 2 * i + 1, 100 + i]
        assert match.ssm_snapshot == i
    assert len({cache.lookup([1, 2, 3], adapter_id=adapter).ssm_snapshot_check for adapter in adapters}) == 9


def test_extreme_sessions_have_tails_of_their_own() -> None:
    cache = RadixTree(block_size=1)
    sessions = [*EXTREME_WORDS[1:], 1, 2**32, 2**64 - 2]
    cache.insert(range(10), range(10))
    for i, session in enumerate(sessions):
        cache.insert_tail_snapshot(range(i + 1), i, session)
    for i, session in enumerate(sessions):
        match = cache.lookup(range(10), session_hash=session)
        assert (match.ssm_snapshot, match.ssm_snapshot_tokens, match.ssm_snapshot_is_tail) == (i, i + 1, True)
    assert cache.lookup(range(10), session_hash=0).ssm_snapshot is None
    assert cache.lookup(range(10), session_hash=2).ssm_snapshot is None
    for i, session in enumerate(sessions):
        assert cache.insert_tail_snapshot([50], 100 + i, session)[0] == i


@pytest.mark.parametrize("session", EXTREME_WORDS[1:])
def test_the_tail_of_an_extreme_session_is_leased(session: int) -> None:
    cache = RadixTree(block_size=1)
    cache.insert(range(10), range(10))
    cache.insert_tail_snapshot(range(5), 1, session)
    cache.insert_tail_snapshot(range(6), 2, session ^ 2**63 or 5)
    cache.lookup(range(4), session_hash=session)
    assert cache.evict_snapshot_lru() == 2
    assert cache.evict_snapshot_lru() == 1


@pytest.mark.parametrize("key", EXTREME_WORDS)
@pytest.mark.parametrize("adapter", [0, 2**63])
def test_an_extreme_tier_key_comes_back_as_it_is(key: int, adapter: int) -> None:
    cache = RadixTree(block_size=1)
    tokens = forge(adapter, (1, 2, 3), key)
    assert tier_key(adapter, tokens) == key
    cache.insert_with_snapshot(tokens, range(6), (), None, 7, adapter_id=adapter)
    for other in EXTREME_WORDS:
        assert not cache.promote_snapshot(other, 5)
        assert not cache.forget_snapshot_tier_key(other)
    spill = cache.evict_snapshot_to_tier(6)
    assert type(spill) is Spill
    assert_is(spill.key, key)
    match = cache.lookup(tokens, adapter_id=adapter)
    assert_is(match.ssm_snapshot_tier_key, key)
    assert_is(match.ssm_snapshot_check, spill.check)
    for other in set(EXTREME_WORDS) - {key}:
        assert not cache.promote_snapshot(other, 5)
        assert not cache.forget_snapshot_tier_key(other)
    assert cache.promote_snapshot(key, 5, spill.check)
    cache.check_integrity()
    assert cache.lookup(tokens, adapter_id=adapter).ssm_snapshot == 5
    assert cache.evict_snapshot_to_tier(0) == spill._replace(slot=5)
    assert cache.forget_snapshot_tier_key(key)
    assert cache.snapshot_count() == 0


def test_extreme_tier_keys_stand_side_by_side() -> None:
    cache = RadixTree(block_size=1, partial_tail_sharing=True)
    for slot, key in enumerate(EXTREME_WORDS):
        cache.insert_with_snapshot(forge(0, (slot,), key), range(4), (), None, slot)
    assert sorted(cache.evict_snapshot_to_tier(0).key for _ in EXTREME_WORDS) == sorted(EXTREME_WORDS)
    for slot, key in enumerate(EXTREME_WORDS):
        assert cache.lookup(forge(0, (slot,), key)).ssm_snapshot_tier_key == key
        assert cache.forget_snapshot_tier_key(key)
        cache.check_integrity()


CHECK_PRIME = 2**64 - 59
EXTREME_CHECKS = (0, 1, 2**63 - 1, 2**63, CHECK_PRIME - 1)


def tokens_with_check(base: int, check: int) -> list[int]:
    """Find three tokens of the base model whose check hash is `check`, knowing the secret base.

    The last two tokens are the coordinates of a point near the origin of a lattice, found by way of its shortest basis;
    about every other first token has one in the range of tokens.
    """
    short, long = (CHECK_PRIME, 0), (-base, 1)
    while True:
        times = round((short[0] * long[0] + short[1] * long[1]) / (short[0] ** 2 + short[1] ** 2))
        long = (long[0] - times * short[0], long[1] - times * short[1])
        if long[0] ** 2 + long[1] ** 2 >= short[0] ** 2 + short[1] ** 2:
            break
        short, long = long, short
    determinant = short[0] * long[1] - short[1] * long[0]
    for first in range(1000):
        rest = (check - (pow(base, 5, CHECK_PRIME) + first * base**2)) % CHECK_PRIME
        # The point (last, second to last) is one of the lattice, shifted by (rest, 0); wanted is one near the middle.
        x, y = 2**31 - rest, 2**31
        i = round((x * long[1] - y * long[0]) / determinant)
        j = round((short[0] * y - short[1] * x) / determinant)
        for a, b in itertools.product(range(i - 2, i + 3), range(j - 2, j + 3)):
            last = rest + a * short[0] + b * long[0]
            before = a * short[1] + b * long[1]
            if 0 <= last < 2**32 and 0 <= before < 2**32:
                return [first, before, last]
    raise AssertionError(f"no three tokens have the check hash {check}")


@pytest.mark.parametrize("check", EXTREME_CHECKS)
def test_an_extreme_check_hash_comes_back_as_it_is(check: int) -> None:
    cache = RadixTree(block_size=1, check_secret=SECRET)
    tokens = tokens_with_check(int(cache._shared.powers[1]), check)
    cache.insert_with_snapshot(tokens, range(3), (), None, 7)
    assert_is(cache.lookup(tokens).ssm_snapshot_check, check)
    spill = cache.evict_snapshot_to_tier(0)
    assert_is(spill.check, check)
    assert_is(cache.lookup(tokens).ssm_snapshot_check, check)
    cache.check_integrity()
    before = snapshot_of(cache)
    for other in {*EXTREME_CHECKS, *EXTREME_WORDS, check ^ 1, check ^ 2**63, (check + 1) % 2**64} - {check}:
        assert not cache.promote_snapshot(spill.key, 5, other)
    assert differences(before, snapshot_of(cache)) == []
    assert cache.promote_snapshot(spill.key, 5, check)


@pytest.mark.parametrize("slot", [0, MAX_SLOT])
def test_an_extreme_slot_comes_back_as_it_is(slot: int) -> None:
    cache = RadixTree(block_size=1)
    displaced, _ = cache.insert_with_snapshot([1, 2], [1, 2], (), None, slot)
    assert displaced is None
    assert_is(cache.lookup([1, 2]).ssm_snapshot, slot)
    assert_is(cache.insert_with_snapshot([1, 2], [1, 2], (), None, 5)[0], slot)
    assert cache.insert_intermediate_snapshot([1, 2], [1, 2], (), None, slot) == 5
    assert_is(cache.insert_intermediate_snapshot([1, 2], [1, 2], (), None, 6), slot)
    assert cache.insert_tail_snapshot([1, 2], slot, 1) == [6]
    swept = cache.insert_tail_snapshot([1], 7, 1)
    assert swept == [slot]
    assert_is(swept[0], slot)
    assert cache.insert_tail_sibling_snapshot([1], slot, 1) == 7
    assert_is(cache.insert_tail_sibling_snapshot([1], 8, 1), slot)
    assert not cache.evict_snapshot_slot(slot)
    assert cache.insert_tail_sibling_snapshot([1], slot, 1) == 8
    assert cache.evict_snapshot_slot(slot)
    cache.insert_tail_snapshot([3], slot)
    assert_is(cache.evict_snapshot_lru(), slot)
    cache.insert_tail_snapshot([3], slot)
    assert_is(cache.evict_snapshot_to_tier(2).slot, slot)
    cache.insert_tail_snapshot([3], slot)
    spill = cache.evict_snapshot_to_tier(0)
    assert_is(spill.slot, slot)
    assert cache.promote_snapshot(spill.key, slot, spill.check)
    assert_is(cache.evict_snapshot_lru(), slot)
    cache.check_integrity()


@pytest.mark.parametrize("slot", [0, MAX_SLOT])
def test_an_extreme_slot_is_not_handed_back_while_it_is_in_use(slot: int) -> None:
    cache = RadixTree(block_size=1)
    cache.insert([1, 2], [1, 2])
    for _ in range(2):
        assert cache.insert_intermediate_snapshot([1], [1], (), None, slot) is None
        assert cache.insert_tail_snapshot([1], slot, 5) == []
        assert cache.insert_tail_sibling_snapshot([1], slot, 5) is None
    assert cache.lookup([1, 2], session_hash=5).ssm_snapshot == slot


def test_a_number_of_tokens_beyond_any_prompt_drops_the_snapshot() -> None:
    cache = RadixTree(block_size=1)
    cache.insert_tail_snapshot(range(1000), 4)
    assert cache.evict_snapshot_to_tier(2**63 - 1) == Drop(4, 1000)


@pytest.mark.parametrize(("ttl", "holds"), [(0, False), (2**63 - 1, True)])
def test_a_lease_holds_for_as_many_evictions_as_there_could_ever_be(ttl: int, holds: bool) -> None:
    cache = RadixTree(block_size=1, tail_lease_ttl=ttl)
    cache.insert(range(10), range(10))
    cache.insert_tail_snapshot(range(3), 0, 1)
    cache.lookup(range(2), session_hash=1)
    for slot in range(1, 501):
        cache.insert_intermediate_snapshot([slot], [0], (), None, slot, session_hash=slot + 1)
    evicted = [cache.evict_snapshot_lru() for _ in range(501)]
    assert evicted.index(0) == (500 if holds else 0)


# --- ends of lengths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 10])
def test_a_sequence_that_holds_all_its_tokens_already_gets_no_reference(length: int) -> None:
    cache = RadixTree(block_size=4)
    cache.insert(range(length), [1, 2, 3], matched_tokens=length)
    assert cache.evict(0).is_empty()
    assert len(cache.evict(ALL_AT_ONCE)) == -(-length // 4)
    cache.insert(range(length), [1, 2, 3], matched_tokens=length)
    cache.release(range(length))
    assert cache.stats_detail().over_releases == 2


def test_all_tokens_can_be_released_as_matched() -> None:
    cache = RadixTree(block_size=4)
    cache.insert(range(10), [1, 2, 3])
    cache.release_matched(range(10), None, 10)
    assert cache.stats_detail().over_releases == 0
    assert len(drain(cache)) == 3


@pytest.mark.parametrize("block_size", [1, 4, 2**62])
def test_no_tokens_match_nothing_and_store_nothing(block_size: int) -> None:
    cache = RadixTree(block_size=block_size, partial_tail_sharing=True)
    for stored in (False, True):
        if stored:
            cache.insert([1, 2, 3, 4, 5], [10, 11, 12, 13, 14], block_size=1)
            cache.insert([1, 2, 3, 4, 5], [10, 11], block_size=4)
        clock = cache.stats_detail().clock
        stats = cache.stats()
        assert cache.lookup([], block_size) == PrefixMatch()
        assert cache.peek_matched_tokens([], block_size) == 0
        assert cache.pin_prefix([], block_size) == 0
        assert cache.insert([], [], (), block_size) == InsertAcquired()
        assert cache.insert([], [7, NONE], [8, 9], block_size) == InsertAcquired()
        cache.release([], block_size)
        cache.release_matched([], block_size, 0)
        assert cache.stats() == stats
        # Two inserts, and nothing else that takes references.
        assert cache.stats_detail().clock == clock + 2
        assert cache.stats_detail().over_releases == 0
    assert cache.stats_detail().cache_misses == 2
    assert cache.snapshot_stats().lookups == 0
    cache.check_integrity()


def test_the_snapshot_of_no_tokens_is_found_under_every_match() -> None:
    cache = RadixTree(block_size=2)
    cache.insert([1, 2, 3, 4], [10, 11])
    assert cache.insert_with_snapshot([], [], (), None, 5) == (None, InsertAcquired())
    assert cache.lookup([]).ssm_snapshot is None
    assert cache.lookup([9, 9]).ssm_snapshot is None
    match = cache.lookup([1, 2, 9, 9])
    assert (match.ssm_snapshot, match.ssm_snapshot_tokens) == (5, 0)
    assert cache.insert_intermediate_snapshot([], [], (), None, 6) == 5
    assert cache.insert_tail_snapshot([], 7, 1) == [6]
    assert cache.lookup([1, 2]).ssm_snapshot is None
    assert cache.lookup([1, 2], session_hash=1).ssm_snapshot == 7
    assert cache.insert_tail_sibling_snapshot([], 8, 1) == 7
    spill = cache.evict_snapshot_to_tier(0)
    assert (spill.slot, spill.key, spill.depth) == (8, 0xCBF2_9CE4_8422_2325, 0)
    assert cache.lookup([1, 2]).ssm_snapshot_tier_key == spill.key
    assert cache.promote_snapshot(spill.key, 9, spill.check)
    assert cache.evict_snapshot_to_tier(1) == Drop(9, 0)
    cache.check_integrity()


def test_the_snapshot_of_no_tokens_is_the_adapters_own() -> None:
    cache = RadixTree(block_size=1)
    for slot, adapter in enumerate(EXTREME_WORDS):
        cache.insert([1], [slot], adapter_id=adapter)
        assert cache.insert_tail_sibling_snapshot([], slot, adapter_id=adapter) is None
    for slot, adapter in enumerate(EXTREME_WORDS):
        assert cache.lookup([1], adapter_id=adapter).ssm_snapshot == slot


# --- block sizes --------------------------------------------------------------------------------------------------

CALLS: list[Callable[[RadixTree, np.ndarray, int], Any]] = [
    lambda cache, tokens, size: cache.lookup(tokens, size),
    lambda cache, tokens, size: cache.peek_matched_tokens(tokens, size),
    lambda cache, tokens, size: cache.pin_prefix(tokens, size),
    lambda cache, tokens, size: cache.insert(tokens, [1, 2], [3, 4], size),
    lambda cache, tokens, size: cache.insert_with_snapshot(tokens, [1, NONE][::-1], (), size, 5),
    lambda cache, tokens, size: cache.insert_intermediate_snapshot(tokens, [NONE, NONE], (), size, 6),
    lambda cache, tokens, size: cache.release(tokens, size),
    lambda cache, tokens, size: cache.release_matched(tokens, size, tokens.size),
]


@pytest.mark.parametrize("block_size", [10**6, 2**31, 2**32, 2**62, 2**63 - 1])
@pytest.mark.parametrize("partial_tail_sharing", [False, True])
def test_a_block_far_larger_than_the_prompt_takes_no_memory(block_size: int, partial_tail_sharing: bool) -> None:
    cache = RadixTree(block_size=block_size, partial_tail_sharing=partial_tail_sharing)
    tokens = np.arange(1000, dtype=np.uint32)
    cache.insert_tail_snapshot(tokens, 1)
    sizes = sizes_of(cache)
    for call in CALLS:
        tracemalloc.start()
        try:
            call(cache, tokens, block_size)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 100_000
    assert cache.stats() == (0, 0)
    assert cache.snapshot_count() == 1
    assert differences(sizes, sizes_of(cache)) == []
    cache.check_integrity()


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("block_size", [2**31, 2**60, 2**61, 2**62, 2**63 - 1])
def test_a_cache_whose_blocks_no_prompt_fills_can_be_copied_and_compacted(block_size: int, way: str) -> None:
    cache = RadixTree(block_size=block_size, partial_tail_sharing=True)
    cache.insert([1, 2, 3], [1])
    cache.insert([1, 2, 3], [1, 2, 3], (), 1)
    cache.insert_tail_snapshot([1, 2], 4, 5)
    for made in (cache, COPIES[way](cache)):
        made.compact()
        assert made.lookup([1, 2, 3]) == PrefixMatch()
        match = made.lookup([1, 2, 3], 1, 5)
        assert (match.matched_blocks.tolist(), match.ssm_snapshot) == ([1, 2, 3], 4)
        made.check_integrity()
        assert sorted(made.clear().blocks.physical.tolist()) == [1, 2, 3]
        made.check_integrity()


def test_a_block_of_a_million_tokens_is_stored_and_matched_to_the_last_token() -> None:
    size = 10**6
    cache = RadixTree(block_size=size, partial_tail_sharing=True)
    tokens = np.arange(2 * size + 3, dtype=np.uint32)
    assert cache.insert(tokens, [1, 2, 3]).blocks.tolist() == [1, 2, 3]
    assert cache.lookup(tokens).matched_blocks.tolist() == [1, 2, 3]
    assert cache.lookup(tokens[: size + 7]).matched_blocks.tolist() == [1, 2]
    other = tokens.copy()
    other[2 * size - 1] += 1
    assert cache.peek_matched_tokens(other) == size
    cache.check_integrity()
    for _ in range(3):
        cache.release(tokens)
    assert drain(cache) == [2, 3, 1]


def test_pools_of_block_sizes_no_longer_used_are_given_back() -> None:
    cache = RadixTree(block_size=16)
    tokens = np.arange(5000, dtype=np.uint32)
    for block_size in range(1, 5001):
        cache.insert(tokens[:block_size], [block_size], (), block_size)
        cache.release(tokens[:block_size], block_size)
    assert cache.stats() == (5000, 5000)
    cache.check_integrity()
    assert cache.evict(2500).physical.tolist() == list(range(1, 2501))
    cache.check_integrity()
    assert cache.evict(ALL_AT_ONCE).physical.tolist() == list(range(2501, 5001))
    assert set(cache._pools) <= {16}
    cache.check_integrity()
    before = sizes_of(cache)
    for block_size in range(1, 5001):
        cache.insert(tokens[:block_size], [block_size], (), block_size, matched_tokens=block_size)
        assert cache.evict(1).physical.tolist() == [block_size]
        assert set(cache._pools) <= {16}
    assert differences(before, sizes_of(cache)) == []
    cache.check_integrity()


# --- depth, width and churn ---------------------------------------------------------------------------------------

MANY = 100_000


@pytest.fixture(scope="module")
def long_prompt() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 3, MANY).astype(np.uint32)


def test_a_chain_of_a_hundred_thousand_nodes_is_matched_held_and_evicted_one_by_one(long_prompt: np.ndarray) -> None:
    cache = RadixTree(block_size=1)
    table = np.arange(MANY, dtype=np.uint32)
    assert np.array_equal(cache.insert(long_prompt, table, table[::-1]).blocks, table)
    cache.check_integrity()
    match = cache.lookup(long_prompt)
    assert match.matched_tokens == MANY
    assert np.array_equal(match.matched_blocks, table)
    assert np.array_equal(match.matched_disk_block_ids, table[::-1])
    assert cache.pin_prefix(long_prompt[: MANY // 2]) == MANY // 2
    cache.release(long_prompt)
    assert cache.evict(ALL_AT_ONCE).is_empty()
    cache.release_matched(long_prompt, None, MANY)
    assert len(cache.evict(MANY // 4)) == MANY // 4
    assert cache.peek_matched_tokens(long_prompt) == MANY - MANY // 4
    assert len(cache.evict(ALL_AT_ONCE)) == MANY // 4
    cache.check_integrity()
    cache.release(long_prompt[: MANY // 2])
    assert [cache.evict(1).physical.tolist() for _ in range(MANY // 2)] == [[n] for n in range(MANY // 2 - 1, -1, -1)]
    assert cache.stats() == (0, 0)
    assert cache.stats_detail().over_releases == 0
    cache.check_integrity()


def test_a_chain_of_a_hundred_thousand_nodes_is_evicted_at_once(long_prompt: np.ndarray) -> None:
    cache = RadixTree(block_size=1)
    table = np.arange(MANY, dtype=np.uint32)
    cache.insert_with_snapshot(long_prompt, table, (), None, 3, matched_tokens=MANY)
    assert cache.lookup(long_prompt).ssm_snapshot_tokens == MANY
    cache.release(long_prompt)
    assert np.array_equal(cache.evict(ALL_AT_ONCE).physical, table[::-1])
    assert cache.snapshot_count() == 1
    cache.check_integrity()


def test_snapshots_all_along_a_chain_of_a_hundred_thousand_nodes_are_found(long_prompt: np.ndarray) -> None:
    cache = RadixTree(block_size=1)
    cache.insert(long_prompt, np.arange(MANY, dtype=np.uint32))
    depths = range(1, MANY, 5000)
    for depth in depths:
        cache.insert_intermediate_snapshot(long_prompt[:depth], np.arange(depth), (), None, depth)
    for depth in depths:
        for tokens in (depth, depth + 4999):
            match = cache.lookup(long_prompt[:tokens])
            assert (match.ssm_snapshot, match.ssm_snapshot_tokens) == (depth, depth)


@pytest.mark.parametrize("partial_tail_sharing", [False, True])
def test_a_hundred_thousand_children_of_one_root_are_found_and_evicted_oldest_first(partial_tail_sharing: bool) -> None:
    cache = RadixTree(block_size=2, partial_tail_sharing=partial_tail_sharing)
    prompts = uint32s([[n // 2, n] for n in range(MANY)])
    order = random.Random(1).sample(range(MANY), MANY)
    for n in order:
        cache.insert(prompts[n], [n])
    for n in order[: MANY // 2]:
        cache.release(prompts[n])
    cache.check_integrity()
    assert cache.stats() == (MANY, MANY)
    for n in order[:20]:
        assert cache.lookup(prompts[n]).matched_blocks.tolist() == [n]
    if partial_tail_sharing:
        # Of the two children that begin so, the one used last lends its block.
        place = {n: i if i >= 20 else MANY + i for i, n in enumerate(order)}
        for first in (0, order[0] // 2, order[-1] // 2, MANY // 2 - 1):
            newest = max(2 * first, 2 * first + 1, key=place.__getitem__)
            assert cache.lookup([first]).matched_blocks.tolist() == [newest]
    assert [cache.evict(1).physical.tolist() for _ in range(1000)] == [[n] for n in order[20:1020]]
    assert cache.evict(ALL_AT_ONCE).physical.tolist() == order[1020 : MANY // 2]
    cache.check_integrity()
    for n in order[:20]:
        cache.release(prompts[n])
    for n in order[MANY // 2 :]:
        cache.release(prompts[n])
    assert drain(cache) == order[MANY // 2 :] + order[:20]


def test_short_lived_adapters_leave_no_root_and_no_memory() -> None:
    cache = RadixTree(block_size=2)
    tokens = np.arange(5, dtype=np.uint32)
    table = np.arange(3, dtype=np.uint32)
    sizes: dict[str, int] = {}
    for n in range(50_000):
        adapter = n * 0x9E37_79B9_7F4A_7C15 % 2**64
        cache.insert_with_snapshot(tokens, table, table, None, n, adapter_id=adapter)
        cache.release(tokens, adapter_id=adapter)
        assert len(cache.evict(3)) == 3
        assert cache.evict_snapshot_lru() == n
        if n == 10:
            sizes = sizes_of(cache)
    assert differences(sizes, sizes_of(cache)) == []
    assert cache._pools[2].header[layout.POOL_NUM_ROOTS] == 0
    cache.check_integrity()


def test_to_evict_more_than_there_could_be_takes_no_more_memory_than_there_is() -> None:
    cache = RadixTree(block_size=1)
    assert cache.evict(ALL_AT_ONCE).is_empty()
    cache.insert([1, 2, 3], [4, 5, 6], matched_tokens=3)
    tracemalloc.start()
    try:
        assert cache.evict(ALL_AT_ONCE).physical.tolist() == [6, 5, 4]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000
