"""Eviction policies over whole traces: each against a naive telling, LRU against the cache, the optimum against all.

It relies on :mod:`naive_policies`. The counts of a published trace are checked where METRALE_TRACES names its folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import naive_policies
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_policies import NAIVE, most_hits_of_any_choice, most_hits_without_a_tree, path_of, replayed

from metrale_numba import NONE, RadixTree
from metrale_numba.replay import Replay, Request, TraceReader, chat_workload
from metrale_numba.replay.policies import OPTIMUM, POLICIES, PolicyResult, play, simulate
from metrale_numba.replay.prefix_nodes import PrefixNodes

TRACE = "mooncake_conversation.jsonl.gz"

Prompts = Sequence[tuple[int, Sequence[int]]]


def request(adapter: int, hash_ids: Sequence[int], input_length: int | None = None) -> Request:
    length = 512 * len(hash_ids) if input_length is None else input_length
    return Request(0, length, 1, np.array(hash_ids, dtype=np.uint32), adapter=adapter)


def nodes_of(prompts: Prompts) -> PrefixNodes:
    return PrefixNodes.of(request(adapter, hash_ids) for adapter, hash_ids in prompts)


def paths_of(prompts: Prompts) -> list[list[naive_policies.Prefix]]:
    return [path_of(adapter, hash_ids) for adapter, hash_ids in prompts]


def grown(seed: int, count: int, longest: int = 9) -> Prompts:
    """Conversations of two adapters that go on, fork from an earlier turn, are asked again, or begin."""
    draw = np.random.default_rng(seed)
    prompts: list[tuple[int, list[int]]] = [(0, [0])]
    for _ in range(count):
        adapter, hash_ids = prompts[draw.integers(len(prompts))]
        kept = draw.integers(len(hash_ids) + 1) if draw.integers(3) == 0 else len(hash_ids)
        more = draw.integers(0, 3, size=draw.integers(4)).tolist()
        prompts.append((adapter if kept else int(draw.integers(2)), [*hash_ids[:kept], *more][:longest]))
    return prompts


def prompts_up_to(count: int, length: int, ids: int) -> st.SearchStrategy[Prompts]:
    hash_ids = st.lists(st.integers(0, ids - 1), max_size=length)
    return st.lists(st.tuples(st.integers(0, 1), hash_ids), max_size=count)


def assert_as_told_naively(prompts: Prompts, capacity: int, policy: str) -> None:
    naive = replayed(paths_of(prompts), capacity, NAIVE[policy])
    numbers = {node: number for number, node in enumerate(dict.fromkeys(n for p in paths_of(prompts) for n in p))}
    played = play(nodes_of(prompts), capacity, policy)
    assert played.hits.tolist() == naive.hits
    assert played.victims.tolist() == [numbers[victim] for victim in naive.victims]
    assert played.cached_blocks == len(naive.resident)


# ------------------------------------------------------------------------------------------------------- prefix nodes


def test_a_node_is_a_block_after_all_blocks_before_it() -> None:
    nodes = nodes_of([(0, [5, 6, 7]), (0, [5, 6]), (0, [6, 7]), (0, [5, 5])])
    assert nodes.paths.tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 5]
    assert nodes.starts.tolist() == [0, 3, 5, 7, 9]
    assert nodes.parents.tolist() == [NONE, 0, 1, NONE, 3, 0]


def test_prompts_of_two_adapters_share_no_node() -> None:
    nodes = nodes_of([(0, [5, 6]), (7, [5, 6]), (0, [5, 6])])
    assert nodes.paths.tolist() == [0, 1, 2, 3, 0, 1]
    assert nodes.parents.tolist() == [NONE, 0, NONE, 2]


def test_ids_with_all_bits_set_are_ids_like_any_other() -> None:
    nodes = nodes_of([(0, [NONE, NONE]), (1, [NONE]), (0, [NONE, NONE])])
    assert nodes.paths.tolist() == [0, 1, 2, 0, 1]


def of_tokens(*tokens: int) -> Request:
    return Request(0, len(tokens), 1, np.array(tokens, dtype=np.uint32), tokens_per_id=1)


def test_blocks_of_tokens_are_told_apart_by_all_of_them_and_a_rest_makes_none() -> None:
    requests = [of_tokens(1, 2, 3, 4, 9), of_tokens(1, 2, 3, 5), of_tokens(3, 4, 1, 2), of_tokens(1, 2, 3)]
    nodes = PrefixNodes.of(requests, block_size=2)
    assert nodes.paths.tolist() == [0, 1, 0, 2, 3, 4, 0]
    assert nodes.parents.tolist() == [NONE, 0, 0, NONE, 3]
    assert nodes.block_tokens.tolist() == [2] * 4


def test_a_block_is_sixteen_tokens_unless_told_otherwise() -> None:
    nodes = PrefixNodes.of([of_tokens(*range(40)), of_tokens(*range(16), *range(16))])
    assert nodes.paths.tolist() == [0, 1, 0, 2]


def test_a_hash_id_is_a_block_whatever_the_block_size() -> None:
    nodes = PrefixNodes.of([request(0, [1, 2, 3])], block_size=2)
    assert (nodes.paths.tolist(), nodes.block_tokens.tolist()) == ([0, 1, 2], [512])


def test_an_empty_prompt_and_an_empty_trace_have_no_node() -> None:
    assert nodes_of([(0, []), (0, [1])]).starts.tolist() == [0, 0, 1]
    nothing = nodes_of([])
    assert (nothing.requests, nothing.paths.size, nothing.parents.size) == (0, 0, 0)


def test_requests_are_read_one_at_a_time() -> None:
    alive = 0

    class Counted(Request):
        def __init__(self, number: int) -> None:
            nonlocal alive
            alive += 1
            super().__init__(0, 512, 1, np.array([number], dtype=np.uint32))

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def requests() -> Iterable[Request]:
        for number in range(10):
            # The one before is still the reader's while it asks for the next.
            assert alive <= 1
            yield Counted(number)

    assert PrefixNodes.of(requests()).requests == 10


# ----------------------------------------------------------------------------------------------- against naive policies


@pytest.mark.parametrize("policy", POLICIES)
@given(prompts=prompts_up_to(count=12, length=6, ids=2), capacity=st.integers(0, 9))
def test_any_small_trace_is_played_as_told_naively(policy: str, prompts: Prompts, capacity: int) -> None:
    assert_as_told_naively(prompts, capacity, policy)


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 5, 8, 13, 21, 34])
@pytest.mark.parametrize("policy", POLICIES)
def test_conversations_that_grow_and_fork_are_played_as_told_naively(policy: str, capacity: int) -> None:
    for seed in range(4):
        assert_as_told_naively(grown(seed, count=120), capacity, policy)


@pytest.mark.parametrize("halving", [1, 3, 10])
def test_lfu_is_played_as_told_naively_however_fast_its_counts_are_halved(halving: int) -> None:
    class Halving(naive_policies.Lfu):
        pass

    Halving.halving = halving
    for capacity in (1, 2, 5, 13):
        prompts = grown(capacity, count=150)
        naive = replayed(paths_of(prompts), capacity, Halving)
        assert play(nodes_of(prompts), capacity, "lfu", halving=halving).hits.tolist() == naive.hits


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_longer_than_the_cache_are_played_as_told_naively(policy: str) -> None:
    prompts = [(0, [1, 2, 3, 4, 5]), (0, [9]), (0, [1, 2, 3, 4, 5, 6]), (1, [1, 2, 3, 4]), (0, [1, 2, 3])] * 3
    for capacity in range(7):
        assert_as_told_naively(prompts, capacity, policy)


# --------------------------------------------------------------------------------------------------- against the cache


def counts_of_the_cache(requests: Iterable[Request], capacity: int) -> tuple[int, ...]:
    replay = Replay(RadixTree(block_size=1), capacity=capacity)
    for each in requests:
        replay.play(each)
    result = replay.result()
    return result.requests, result.blocks, result.hit_blocks, result.evicted_blocks, result.cached_blocks


def counts(result: PolicyResult) -> tuple[int, ...]:
    return result.requests, result.blocks, result.hit_blocks, result.evicted_blocks, result.cached_blocks


@pytest.mark.parametrize("capacity", [1, 10, 100, 500, 2_000, 20_000])
def test_lru_counts_what_the_cache_counts(capacity: int) -> None:
    requests = list(chat_workload(3, requests=1_000, sessions=50))
    result = simulate(PrefixNodes.of(requests), capacity, "lru")
    assert counts(result) == counts_of_the_cache(requests, capacity)


@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_lru_counts_tokens_as_the_cache_does(block_size: int) -> None:
    draw = np.random.default_rng(5)
    requests = [of_tokens(*draw.integers(0, 2, size=draw.integers(25)).tolist()) for _ in range(200)]
    replay = Replay(RadixTree(block_size=block_size), block_size=block_size, capacity=30)
    for each in requests:
        replay.play(each)
    expected = replay.result()
    result = simulate(PrefixNodes.of(requests, block_size=block_size), 30, "lru")
    assert (result.blocks, result.hit_blocks) == (expected.blocks, expected.hit_blocks)
    assert result.token_hit_rate == expected.token_hit_rate


def test_rates_are_those_of_a_replay() -> None:
    requests = list(chat_workload(4, requests=500, sessions=20))
    replay = Replay(RadixTree(block_size=1), capacity=300)
    for each in requests:
        replay.play(each)
    expected = replay.result()
    result = simulate(PrefixNodes.of(requests), 300, "lru")
    assert result.block_hit_rate == expected.block_hit_rate
    assert result.token_hit_rate == expected.token_hit_rate


@pytest.fixture(scope="module")
def conversation() -> PrefixNodes:
    folder = os.environ.get("METRALE_TRACES")
    if not folder:
        pytest.skip("METRALE_TRACES does not name the folder of the traces")
    with TraceReader(Path(folder) / TRACE) as requests:
        return PrefixNodes.of(requests)


@pytest.mark.parametrize(
    ("capacity", "hit_blocks", "evicted_blocks"),
    [
        (1_000, 12_847, 274_653),
        (10_000, 61_046, 217_454),
        (30_000, 93_978, 164_522),
        (50_000, 102_290, 136_210),
        (100_000, 104_924, 83_576),
        (1_000_000, 105_710, 0),
    ],
)
def test_lru_counts_of_the_conversation_trace_are_those_of_its_replay(
    conversation: PrefixNodes, capacity: int, hit_blocks: int, evicted_blocks: int
) -> None:
    result = simulate(conversation, capacity, "lru")
    assert (result.requests, result.blocks) == (12_031, 288_500)
    assert (result.hit_blocks, result.evicted_blocks) == (hit_blocks, evicted_blocks)
    assert result.cached_blocks == 288_500 - hit_blocks - evicted_blocks


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (1_000, {"sieve": 13_250, "s3-fifo": 16_275, "lfu": 12_913, "optimum": 51_705}),
        (10_000, {"sieve": 47_294, "s3-fifo": 56_870, "lfu": 62_640, "optimum": 105_710}),
        (100_000, {"sieve": 102_427, "s3-fifo": 104_755, "lfu": 104_755, "optimum": 105_710}),
    ],
)
def test_hits_of_the_conversation_trace_are_these(
    conversation: PrefixNodes, capacity: int, expected: dict[str, int]
) -> None:
    assert {policy: simulate(conversation, capacity, policy).hit_blocks for policy in expected} == expected


# --------------------------------------------------------------------------------------------------------- the optimum


@given(prompts=prompts_up_to(count=9, length=4, ids=2), capacity=st.integers(0, 5))
def test_no_choice_of_leaves_hits_more_than_the_optimum(prompts: Prompts, capacity: int) -> None:
    best = most_hits_of_any_choice(paths_of(prompts), capacity)
    assert simulate(nodes_of(prompts), capacity, OPTIMUM).hit_blocks == best


@given(prompts=prompts_up_to(count=9, length=4, ids=2), capacity=st.integers(0, 5))
def test_the_optimum_hits_as_much_as_if_any_block_could_go(prompts: Prompts, capacity: int) -> None:
    best = most_hits_without_a_tree(paths_of(prompts), capacity)
    assert simulate(nodes_of(prompts), capacity, OPTIMUM).hit_blocks == best


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_hits_more_than_the_optimum(policy: str) -> None:
    nodes = PrefixNodes.of(chat_workload(1, requests=1_000, sessions=50))
    for capacity in (0, 1, 30, 100, 300, 1_000, 3_000):
        assert simulate(nodes, capacity, policy).hit_blocks <= simulate(nodes, capacity, OPTIMUM).hit_blocks


def test_hits_of_the_optimum_never_fall_with_capacity() -> None:
    nodes = PrefixNodes.of(chat_workload(1, requests=500, sessions=50))
    hits = [simulate(nodes, capacity, OPTIMUM).hit_blocks for capacity in range(0, 1_000, 50)]
    assert hits == sorted(hits)


# ------------------------------------------------------------------------------------------------- what holds for all


@pytest.mark.parametrize("policy", POLICIES)
def test_a_child_is_always_evicted_before_its_parent(policy: str) -> None:
    nodes = nodes_of([(0, [1, 2, 3, 4]), (0, [9, 8, 7, 6])])
    assert play(nodes, 4, policy).victims.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_evicts_none_of_its_own_blocks(policy: str) -> None:
    nodes = nodes_of([(0, [1, 2]), (0, [7]), (0, [1, 2, 3, 4]), (0, [1, 2, 3])])
    assert play(nodes, 3, policy).victims.tolist() == [2]
    assert play(nodes, 3, policy).hits.tolist() == [0, 0, 2, 3]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_without_a_block_hits_and_evicts_nothing(policy: str) -> None:
    result = simulate(nodes_of([(0, [1, 2])] * 3), 0, policy)
    assert counts(result) == (3, 6, 0, 0, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_all_nothing_is_evicted(policy: str) -> None:
    nodes = nodes_of(grown(7, count=200))
    for capacity in (nodes.parents.size, 10**30):
        result = simulate(nodes, capacity, policy)
        assert (result.evicted_blocks, result.capacity) == (0, capacity)
        assert result.cached_blocks == nodes.parents.size == result.blocks - result.hit_blocks


@pytest.mark.parametrize("policy", POLICIES)
def test_a_trace_of_nothing_has_no_rates(policy: str) -> None:
    expected = PolicyResult(policy, 5, 0, 0, 0, 0, 0, None, None)
    assert simulate(nodes_of([]), 5, policy) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_always_gives_the_same_result_and_is_not_changed(policy: str) -> None:
    nodes = nodes_of(grown(9, count=200))
    before = [array.copy() for array in nodes]
    assert simulate(nodes, 10, policy) == simulate(nodes, 10, policy)
    assert all(np.array_equal(array, earlier) for array, earlier in zip(nodes, before, strict=True))


def test_the_last_block_of_a_prompt_counts_for_the_tokens_it_has() -> None:
    requests = [request(0, [1, 2], 600), request(0, [1, 2], 600), request(0, [1, 3], 700)]
    result = simulate(PrefixNodes.of(requests), 9, "lru")
    assert result.block_hit_rate == 3 / 6
    assert result.token_hit_rate == (600 + 512) / 1_900


# --------------------------------------------------------------------------------------------- what sets each one apart


def hit_blocks(policy: str, capacity: int, *prompts: Sequence[int], halving: int = 2) -> list[int]:
    nodes = nodes_of([(0, hash_ids) for hash_ids in prompts])
    return play(nodes, capacity, policy, halving=halving).hits.tolist()


def test_lru_forgets_in_a_scan_what_sieve_remembers() -> None:
    prompts = [[1], [1], [2], [3], [4], [1]]
    assert hit_blocks("lru", 3, *prompts)[-1] == 0
    assert hit_blocks("sieve", 3, *prompts)[-1] == 1


def test_s3_fifo_keeps_what_was_hit_twice_through_a_scan() -> None:
    prompts = [[1], [1], [1], *([block] for block in range(2, 40)), [1]]
    assert hit_blocks("s3-fifo", 10, *prompts)[-1] == 1
    assert hit_blocks("lru", 10, *prompts)[-1] == 0


def test_s3_fifo_takes_what_comes_back_soon_into_the_main_queue() -> None:
    # Block 0 is evicted as new and comes back; a scan later it is still there.
    prompts = [[block] for block in (*range(11), 0, *range(100, 150), 0)]
    assert hit_blocks("s3-fifo", 10, *prompts)[-1] == 1


def test_lfu_keeps_what_is_used_often_until_its_count_is_halved() -> None:
    prompts = [[1], [1], [1], [1], *([block] for block in range(2, 12)), [1]]
    assert hit_blocks("lfu", 2, *prompts, halving=100)[-1] == 1
    assert hit_blocks("lfu", 2, *prompts, halving=2)[-1] == 0


def test_the_optimum_evicts_what_is_never_used_again() -> None:
    assert hit_blocks(OPTIMUM, 2, [1], [2], [3], [1], [4], [1]) == [0, 0, 0, 1, 0, 1]


# ------------------------------------------------------------------------------------------------------------ arguments


def test_an_unknown_policy_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ValueError, match="policy must be one of lru, sieve, s3-fifo, lfu, optimum, and is 'mru'"):
        simulate(nodes_of([]), 5, "mru")


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be 0 or more, and is -1"):
        simulate(nodes_of([]), -1, "lru")


def test_halving_more_often_than_once_a_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="halving must be 1 or more, and is 0"):
        simulate(nodes_of([]), 5, "lfu", halving=0)
