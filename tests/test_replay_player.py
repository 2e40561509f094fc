"""The player: exact counts, whatever the block size, and a cache that is left as the protocol asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from metrale_numba import NoPrefixCaching, RadixTree
from metrale_numba.replay import (
    Replay,
    ReplayResult,
    Request,
    chat_workload,
    default_block_size,
    player,
    prompt_tokens,
    spell,
    tokens_per_block,
    workload,
)
from metrale_numba.replay.player import _BlockPool, _Times


class NaiveReplay:
    """What a replay must count, told in the plainest way: prefixes in a dict, full scans, no block and no reference.

    A prefix begins with its adapter, and goes on with its blocks.
    """

    def __init__(self, capacity: int | None, block_size: int = 1) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.last_used: dict[tuple[object, ...], int] = {}
        self.requests = self.blocks = self.hits = self.evicted = 0

    def play(self, request: Request) -> None:
        blocks: list[object] = request.hash_ids.tolist()
        if request.tokens_per_id == 1:
            starts = range(0, len(blocks) // self.block_size * self.block_size, self.block_size)
            blocks = [tuple(blocks[start : start + self.block_size]) for start in starts]
        ids = (("adapter", request.adapter), *blocks)
        hits = 0
        while hits < len(blocks) and ids[: hits + 2] in self.last_used:
            hits += 1
        wanted = len(blocks)
        if self.capacity is not None:
            while len(self.last_used) + wanted - hits > self.capacity and self._evict(held=ids[: hits + 1]):
                self.evicted += 1
            wanted = min(wanted, hits + self.capacity - len(self.last_used))
        for end in range(1, wanted + 1):
            self.last_used[ids[: end + 1]] = self.requests
        self.requests += 1
        self.blocks += len(blocks)
        self.hits += hits

    def _evict(self, held: tuple[object, ...]) -> bool:
        parents = {prefix[:-1] for prefix in self.last_used}
        leaves = [p for p in self.last_used if p not in parents and p != held[: len(p)]]
        if leaves:
            del self.last_used[min(leaves, key=lambda prefix: self.last_used[prefix])]
        return bool(leaves)

    def counts(self) -> tuple[int, int, int, int, int]:
        return self.requests, self.blocks, self.hits, self.evicted, len(self.last_used)


def counts(result: ReplayResult) -> tuple[int, int, int, int, int]:
    return result.requests, result.blocks, result.hit_blocks, result.evicted_blocks, result.cached_blocks


def played(requests: Iterable[Request], block_size: int | None = 1, capacity: int | None = None) -> ReplayResult:
    replay = Replay(RadixTree(block_size=1), block_size=block_size, capacity=capacity)
    for request in requests:
        replay.play(request)
    return replay.result()


def prompt(*hash_ids: int, input_length: int | None = None) -> Request:
    length = 512 * len(hash_ids) if input_length is None else input_length
    return Request(0, length, 1, np.array(hash_ids, dtype=np.uint32))


def random_prompts(seed: int, count: int = 120) -> list[Request]:
    """Prompts of up to 9 blocks over few ids, so that they share, branch, repeat ids and crowd each other out."""
    draw = np.random.default_rng(seed)
    return [prompt(*draw.integers(0, 3, size=draw.integers(0, 10)).tolist()) for _ in range(count)]


def of_tokens(*tokens: int, adapter: int = 0) -> Request:
    return Request(0, len(tokens), 1, np.array(tokens, dtype=np.uint32), tokens_per_id=1, adapter=adapter)


def under_adapters(requests: list[Request], adapters: int = 3) -> list[Request]:
    """The same prompts, each under one of several adapters."""
    draw = np.random.default_rng(len(requests))
    return [replace(request, adapter=int(draw.integers(adapters))) for request in requests]


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 13, 40, 10_000, None])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_counts_are_those_of_a_naive_replay(block_size: int, capacity: int | None) -> None:
    for seed in range(5):
        requests = random_prompts(seed)
        naive = NaiveReplay(capacity)
        for request in requests:
            naive.play(request)
        assert counts(played(requests, block_size, capacity)) == naive.counts()


@pytest.mark.parametrize("capacity", [1, 3, 8, 40, None])
@pytest.mark.parametrize("block_size", [1, 4])
def test_counts_under_adapters_are_those_of_a_naive_replay(block_size: int, capacity: int | None) -> None:
    for seed in range(5):
        requests = under_adapters(random_prompts(seed))
        naive = NaiveReplay(capacity)
        for request in requests:
            naive.play(request)
        assert counts(played(requests, block_size, capacity)) == naive.counts()


@pytest.mark.parametrize("capacity", [1, 3, 8, 40, None])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_counts_of_tokens_are_those_of_a_naive_replay(block_size: int, capacity: int | None) -> None:
    for seed in range(5):
        requests = under_adapters([of_tokens(*each.hash_ids.tolist()) for each in random_prompts(seed)], adapters=2)
        naive = NaiveReplay(capacity, block_size)
        for request in requests:
            naive.play(request)
        assert counts(played(requests, block_size, capacity)) == naive.counts()


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (500, (3_000, 48_411, 17_726, 30_185, 500)),
        (1_000, (3_000, 48_411, 26_111, 21_300, 1_000)),
        (2_000, (3_000, 48_411, 35_686, 10_725, 2_000)),
        (4_000, (3_000, 48_411, 37_303, 7_108, 4_000)),
        (None, (3_000, 48_411, 37_362, 0, 11_049)),
    ],
)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_counts_of_the_built_in_workload_are_these(
    block_size: int, capacity: int | None, expected: tuple[int, ...]
) -> None:
    requests = chat_workload(0, requests=3_000, sessions=100)
    assert counts(played(requests, block_size, capacity)) == expected


@pytest.mark.parametrize(
    ("name", "capacity", "expected"),
    [
        ("agent", 300, (1_000, 29_793, 14_339, 15_154, 300)),
        ("agent", None, (1_000, 29_793, 26_664, 0, 3_129)),
        ("retrieval", 300, (1_000, 20_481, 8_904, 11_277, 300)),
        ("retrieval", None, (1_000, 20_481, 13_701, 0, 6_780)),
        ("few-shot", 300, (1_000, 13_163, 9_117, 3_746, 300)),
        ("few-shot", None, (1_000, 13_163, 10_782, 0, 2_381)),
    ],
)
def test_counts_of_the_other_workloads_are_these(name: str, capacity: int | None, expected: tuple[int, ...]) -> None:
    assert counts(played(workload(name, 0, requests=1_000, sessions=30), capacity=capacity)) == expected


def test_an_id_with_all_bits_set_is_a_token_like_any_other() -> None:
    requests = [prompt(0, 0xFFFF_FFFF), prompt(0xFFFF_FFFF, 0), prompt(0, 0xFFFF_FFFF)]
    assert played(requests, block_size=4).hit_blocks == 2


def test_a_prompt_larger_than_the_cache_is_stored_as_far_as_it_fits() -> None:
    result = played([prompt(1, 2, 3, 4, 5), prompt(1, 2, 3, 4, 5)], capacity=3)
    assert counts(result) == (2, 10, 3, 0, 3)


def test_a_prompt_keeps_what_it_hit_and_evicts_only_the_rest() -> None:
    result = played([prompt(1, 2), prompt(7), prompt(1, 2, 3, 4), prompt(1, 2, 3)], capacity=3)
    assert counts(result) == (4, 10, 5, 1, 3)


def test_a_prompt_in_the_cache_evicts_nothing() -> None:
    result = played([prompt(1, 2, 3)] * 5, capacity=3)
    assert counts(result) == (5, 15, 12, 0, 3)
    assert result.evict is None


def test_an_empty_prompt_is_a_request_without_blocks() -> None:
    assert counts(played([prompt(), prompt(1)])) == (2, 1, 0, 0, 1)


def test_the_last_block_of_a_prompt_counts_for_the_tokens_it_has() -> None:
    result = played([prompt(1, 2, input_length=600), prompt(1, 2, input_length=600), prompt(1, 3, input_length=700)])
    assert result.block_hit_rate == 3 / 6
    assert result.token_hit_rate == (600 + 512) / 1_900


def test_the_cache_never_holds_more_than_the_capacity() -> None:
    cache = RadixTree(block_size=1)
    replay = Replay(cache, capacity=20)
    for request in random_prompts(seed=1, count=300):
        replay.play(request)
        assert cache.stats()[1] <= 20
    assert replay.result().evicted_blocks > 100


def test_no_block_is_in_the_cache_twice_and_none_is_held_at_the_end() -> None:
    cache = RadixTree(block_size=1)
    replay = Replay(cache, capacity=500)
    for request in chat_workload(2, requests=500, sessions=20):
        replay.play(request)
    evicted = cache.evict(10_000).physical
    assert len(evicted) == len(set(evicted.tolist())) == 500
    assert evicted.max() < 500


def test_evicted_blocks_are_handed_out_again() -> None:
    cache = RadixTree(block_size=1)
    replay = Replay(cache, capacity=3_000)
    for first in (0, 3_000, 6_000):
        replay.play(prompt(*range(first, first + 3_000)))
    assert sorted(cache.evict(3_000).physical.tolist()) == list(range(3_000))


def test_ids_come_back_from_the_pool_once_each_however_they_were_returned() -> None:
    pool = _BlockPool()
    ids = pool.take(5_000)
    for first in range(0, 5_000, 500):
        pool.give_back(ids[first : first + 500])
    assert pool.taken == 0
    assert sorted(pool.take(5_000).tolist()) == list(range(5_000))


def test_a_cache_that_stores_nothing_hits_nothing_and_keeps_no_block() -> None:
    replay = Replay(NoPrefixCaching(), capacity=10)
    for request in random_prompts(seed=3):
        replay.play(request)
    result = replay.result()
    assert result.evict is None
    assert result.requests == 120
    assert (result.hit_blocks, result.evicted_blocks, result.cached_blocks) == (0, 0, 0)


def test_every_call_is_timed_once() -> None:
    result = played(random_prompts(seed=4), capacity=8)
    assert result.lookup is not None
    assert result.insert is not None
    assert result.release is not None
    assert result.evict is not None
    assert result.lookup.calls == result.insert.calls == result.release.calls == 120
    assert 0 < result.evict.calls < 120
    for times in (result.lookup, result.insert, result.evict, result.release):
        assert 0 < times.median <= times.p99


def test_time_in_the_cache_is_part_of_the_time() -> None:
    result = played(random_prompts(seed=5))
    assert 0 < result.cache_seconds < result.seconds
    assert result.requests_per_second == result.requests / result.seconds
    assert result.requests_per_cache_second == result.requests / result.cache_seconds


def test_a_replay_of_nothing_has_no_rates_and_no_times() -> None:
    result = Replay(RadixTree(block_size=1), block_size=3, capacity=9).result()
    assert result._replace(seconds=0.0) == ReplayResult(block_size=3, capacity=9)


def test_a_result_may_be_taken_half_way() -> None:
    replay = Replay(RadixTree(block_size=1))
    replay.play(prompt(1, 2))
    assert counts(replay.result()) == (1, 2, 0, 0, 2)
    replay.play(prompt(1, 2))
    assert counts(replay.result()) == (2, 4, 2, 0, 2)


def test_an_id_is_the_first_token_of_its_block() -> None:
    hash_ids = np.array([5, 0, 0xFFFF_FFFF, 5], dtype=np.uint32)
    tokens = spell(hash_ids, 16)
    assert tokens.dtype == np.uint32
    assert tokens.shape == (64,)
    assert tokens[::16].tolist() == hash_ids.tolist()


def test_equal_ids_are_spelled_alike_wherever_they_stand() -> None:
    blocks = spell(np.array([5, 9, 5], dtype=np.uint32), 16).reshape(3, 16)
    assert blocks[0].tolist() == blocks[2].tolist()
    assert not np.any(blocks[0] == blocks[1])


def test_a_block_is_spelled_without_repeating_a_token() -> None:
    assert len(set(spell(np.array([77], dtype=np.uint32), 512).tolist())) == 512


def test_at_block_size_1_an_id_is_its_own_token() -> None:
    assert spell(np.array([5, 9], dtype=np.uint32), 1).tolist() == [5, 9]


def test_prompts_of_two_adapters_share_nothing() -> None:
    requests = [replace(prompt(1, 2, 3), adapter=adapter) for adapter in (0, 7, 2**64 - 1, 7)]
    assert counts(played(requests)) == (4, 12, 3, 0, 9)


def test_room_is_made_in_the_blocks_of_every_adapter() -> None:
    requests = [replace(prompt(1, 2, 3), adapter=adapter) for adapter in (0, 7, 0)]
    assert counts(played(requests, capacity=3)) == (3, 9, 0, 6, 3)


def test_no_adapter_is_held_at_the_end() -> None:
    cache = RadixTree(block_size=1)
    replay = Replay(cache)
    for request in under_adapters(random_prompts(seed=1)):
        replay.play(request)
    cached_blocks = replay.result().cached_blocks
    assert len(cache.evict(100_000).physical) == cached_blocks > 200
    assert cache.stats()[1] == 0


def test_a_block_of_tokens_that_is_not_full_is_not_cached() -> None:
    result = played([of_tokens(*range(10))] * 2, block_size=4)
    assert counts(result) == (2, 4, 2, 0, 2)
    assert result.token_hit_rate == 8 / 20


def test_tokens_make_blocks_of_16_by_default() -> None:
    result = played([of_tokens(*range(40))] * 2, block_size=None)
    assert counts(result) == (2, 4, 2, 0, 2)
    assert result.block_size == 16


def test_hash_ids_make_blocks_of_one_token_by_default() -> None:
    result = played([prompt(1, 2, 3)] * 2, block_size=None)
    assert counts(result) == (2, 6, 3, 0, 3)
    assert result.block_size == 1


def test_a_hit_of_a_hash_id_counts_for_the_tokens_that_it_stands_for() -> None:
    request = Request(0, 40, 1, np.array([1, 2, 3], dtype=np.uint32), tokens_per_id=16)
    longer = Request(0, 48, 1, np.array([1, 2, 9], dtype=np.uint32), tokens_per_id=16)
    assert played([request, longer, request], block_size=4).token_hit_rate == (32 + 40) / 128


def test_a_prompt_of_hash_ids_is_all_of_them_spelled_out() -> None:
    request = prompt(5, 9, input_length=600)
    assert prompt_tokens(request, 4).tolist() == spell(request.hash_ids, 4).tolist()
    assert (default_block_size(request), tokens_per_block(request, 4)) == (1, 512)


def test_a_prompt_of_tokens_is_its_full_blocks() -> None:
    request = of_tokens(5, 9, 5, 7, 7)
    assert prompt_tokens(request, 2).tolist() == [5, 9, 5, 7]
    assert prompt_tokens(request, 6).tolist() == []
    assert (default_block_size(request), tokens_per_block(request, 2)) == (16, 2)


def test_times_of_many_calls_are_an_even_sample_and_their_number_and_sum_are_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(player, "_MOST_TIMES", 64)
    times = _Times()
    for nanoseconds in range(10_000):
        times.add(nanoseconds)
        assert len(times._kept) < 64
    assert times.total == sum(range(10_000))
    assert times._kept.tolist() == list(range(0, 10_000, 256))
    summary = times.summary()
    assert summary is not None
    assert summary.calls == 10_000
    assert abs(summary.median - 5.0) < 0.3


def test_times_of_few_calls_are_exact() -> None:
    times = _Times()
    for nanoseconds in (1_000, 3_000, 2_000):
        times.add(nanoseconds)
    summary = times.summary()
    assert summary is not None
    assert (summary.calls, summary.median) == (3, 2.0)
