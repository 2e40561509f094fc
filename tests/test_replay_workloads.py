"""The built-in chat workload: the same for a seed, of the form a trace has, and like chats in what it repeats."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from metrale_numba.replay import TOKENS_PER_HASH_ID, Request, chat_workload


def requests_of(seed: int = 0, requests: int = 3_000, sessions: int = 40) -> list[Request]:
    return list(chat_workload(seed, requests=requests, sessions=sessions))


def as_values(requests: list[Request]) -> list[tuple[float, int, int, list[int]]]:
    return [(each.timestamp, each.input_length, each.output_length, each.hash_ids.tolist()) for each in requests]


def test_one_seed_makes_one_workload() -> None:
    assert as_values(requests_of(seed=5)) == as_values(requests_of(seed=5))


def test_another_seed_makes_another_workload() -> None:
    assert as_values(requests_of(seed=5)) != as_values(requests_of(seed=6))


def test_a_shorter_workload_is_the_start_of_a_longer_one() -> None:
    assert as_values(requests_of(requests=100)) == as_values(requests_of(requests=200))[:100]


def test_as_many_requests_are_made_as_asked_for() -> None:
    assert len(requests_of(requests=17)) == 17


def test_the_first_requests_of_seed_0_never_change() -> None:
    assert as_values(requests_of(requests=3, sessions=2)) == [
        (51, 1_131, 470, [20, 241, 242]),
        (80, 9_779, 574, [20, 241, *range(243, 261)]),
        (101, 10_653, 373, [20, 241, *range(243, 260), 261, 262]),
    ]


def test_every_prompt_has_one_id_per_512_tokens() -> None:
    for request in requests_of():
        assert len(request.hash_ids) == -(-request.input_length // TOKENS_PER_HASH_ID)


def test_requests_arrive_in_order() -> None:
    timestamps = [request.timestamp for request in requests_of()]
    assert timestamps == sorted(timestamps)


def test_equal_ids_mean_equal_prefixes() -> None:
    prefixes: dict[int, list[int]] = {}
    for request in requests_of():
        ids = request.hash_ids.tolist()
        for place, hash_id in enumerate(ids):
            assert prefixes.setdefault(hash_id, ids[:place]) == ids[:place]


def test_a_turn_repeats_the_full_blocks_of_the_turn_before_and_adds_its_answer() -> None:
    turns = 0
    for earlier, later in pairwise(requests_of(requests=300, sessions=1)):
        full_blocks = earlier.input_length // TOKENS_PER_HASH_ID
        if later.hash_ids[:full_blocks].tolist() == earlier.hash_ids[:full_blocks].tolist() and full_blocks > 8:
            assert later.input_length > earlier.input_length + earlier.output_length
            turns += 1
    assert turns > 100


def test_a_block_that_is_not_full_is_shared_with_no_one() -> None:
    requests = requests_of()
    seen = Counter(hash_id for request in requests for hash_id in request.hash_ids.tolist())
    for request in requests:
        if request.input_length % TOKENS_PER_HASH_ID:
            assert seen[int(request.hash_ids[-1])] == 1


def test_chats_go_on_side_by_side() -> None:
    firsts = [tuple(request.hash_ids[:12].tolist()) for request in requests_of() if len(request.hash_ids) > 20]
    changes = sum(earlier != later for earlier, later in pairwise(firsts))
    assert changes > 0.8 * len(firsts)


def test_few_system_prompts_open_most_chats() -> None:
    requests = requests_of(requests=20_000, sessions=200)
    first_ids = Counter(int(request.hash_ids[0]) for request in requests)
    shared = [count for hash_id, count in first_ids.most_common(64) if count > 12]
    assert 30 <= len(shared) <= 64
    assert sum(shared[:8]) > 0.4 * len(requests)
