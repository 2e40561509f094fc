"""Explanations, ghosts and lists of nodes are what a model says that looks at everything, and change nothing.

It relies on random calls of every method, made to a cache and to the model of the tests in turn.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call, Caller, answer_of, same
from ghost_model import GhostModel
from pair import COPIES, Refusal
from state import differences, snapshot_of

from metrale_numba import EvictedPrefix, Explanation, RadixTree, SnapshotExplanation, Spill
from metrale_numba.kernels.compile import kernels

#: Calls that the model has no need of.
NOT_MODELLED = ("memory_usage", "compact", "check_integrity", "copy", "take_dead_tier_keys")
SETTINGS: list[dict[str, Any]] = [
    {"ghosts": 12},
    {"ghosts": 100_000, "partial_tail_sharing": True},
    {"ghosts": 40, "hermetic": True, "quotas": {1: 6}},
    {"ghosts": 1, "evict_legacy": True, "adopt_blocks": True},
]
IDS = ["few", "all", "hermetic", "one"]


def tell_the_model(model: GhostModel, call: Call, answer: Any) -> None:
    """Make a call that was made to the cache to the model as well."""
    name, arguments = call
    if name in NOT_MODELLED or isinstance(answer, Refusal):
        return
    if name == "promote_snapshot":
        # The model has no check hashes; what the cache accepted was right.
        if answer:
            model.promote_snapshot(arguments["key"], arguments["new_slot"])
        return
    getattr(model, name)(**arguments)


def played(
    seed: int, settings: dict[str, Any], count: int = 1500, every: int = 5
) -> Iterator[tuple[RadixTree, GhostModel, Caller]]:
    """A cache and its model after some random calls, and again after some more."""
    settings = {"block_size": 2, "tail_lease_ttl": 4, **settings}
    cache, model = RadixTree(**settings), GhostModel(**settings)
    caller = Caller(seed)
    for number in range(count):
        call = caller.draw()
        if call.name == "copy":
            cache = copy.deepcopy(cache)
            continue
        answer = answer_of(cache, call)
        caller.learn(call, answer)
        tell_the_model(model, call, answer)
        if number % every == 0:
            yield cache, model, caller


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_an_explanation_is_what_the_model_says(settings: dict[str, Any], seed: int) -> None:
    reasons, snapshot_reasons = set(), set()
    for cache, model, caller in played(seed, settings):
        for _ in range(4):
            prompt = caller._prompt()
            session = caller.random.choice((0, 1, 2, 2**63 + 9))
            explanation = cache.explain(session_hash=session, **prompt)
            assert explanation.as_dict() == model.explain(session_hash=session, **prompt)
            assert json.loads(explanation.as_json()) == explanation.as_dict()
            assert explanation.words() == str(explanation)
            reasons.add(explanation.reason)
            snapshot_reasons.add(explanation.snapshot.reason)
    assert reasons >= {"whole_prompt", "evicted", "other_adapter", "hidden"}
    assert snapshot_reasons >= {"found", "no_match", "none", "other_session", "lost", "beyond_match"}


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_the_ghosts_are_those_of_the_model(settings: dict[str, Any]) -> None:
    num_ghosts = 0
    for cache, model, _ in played(9, settings):
        cache.check_integrity()
        assert cache._ghosts is not None
        rows = cache._ghosts.rows
        rows = np.sort(rows[rows["number"] >= 0], order="number")
        wanted = sorted((ghost.number, place, ghost) for place, ghost in model.ghosts.items())
        assert rows["number"].tolist() == [number for number, _, _ in wanted]
        assert rows["adapter"].tolist() == [place[0] for _, place, _ in wanted]
        assert rows["block_size"].tolist() == [place[1] for _, place, _ in wanted]
        assert rows["tick"].tolist() == [ghost.tick for _, _, ghost in wanted]
        assert rows["stamp"].tolist() == [ghost.stamp for _, _, ghost in wanted]
        assert rows["by_adapter"].tolist() == [ghost.by_adapter for _, _, ghost in wanted]
        num_ghosts = max(num_ghosts, rows.size)
    assert num_ghosts == settings["ghosts"] or num_ghosts > 30


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_the_list_of_nodes_is_that_of_the_model(settings: dict[str, Any]) -> None:
    seen = 0
    for cache, model, caller in played(5, settings, every=25):
        adapter, size = caller.random.choice((None, 0, 1, 5)), caller.random.choice((None, 2, 3, 4))
        nodes = list(cache.iter_nodes(adapter, size))
        wanted = model.list_nodes(adapter, size)
        assert [node.number for node in nodes] == list(range(len(wanted)))
        prefixes: list[list[int]] = []
        for node, expected in zip(nodes, wanted, strict=True):
            got = node._asdict()
            assert got.pop("number") == len(prefixes)
            parent = got.pop("parent")
            assert parent is None or parent < node.number
            prefixes.append([*(prefixes[parent] if parent is not None else []), *node.tokens.tolist()])
            for field in ("tokens", "suffix_tokens"):
                assert got[field].dtype == np.uint32
                got[field] = got[field].tolist()
            assert {"prefix": tuple(prefixes[-1]), **got} == expected
        seen = max(seen, len(nodes))
    assert seen > 10


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_with_ghosts_every_other_answer_is_what_it_is_without(settings: dict[str, Any]) -> None:
    settings = {"block_size": 2, "check_secret": b"the same in both", **settings}
    cache, other = RadixTree(**settings), RadixTree(**{**settings, "ghosts": 0})
    caller = Caller(3)
    for _ in range(3000):
        call = caller.draw()
        answer = answer_of(cache, call)
        if call.name not in ("memory_usage", "pins"):
            assert same(answer_of(other, call), answer), call
        caller.learn(call, answer)


def test_without_ghosts_the_kernels_are_called_as_ever() -> None:
    cache = RadixTree()
    assert cache._insert_kernel is kernels("cache")["insert"]
    assert cache._evict_kernel is kernels("cache")["evict"]
    assert not any(name.startswith("ghosts") for name in cache.memory_usage())


def test_looking_changes_nothing() -> None:
    for cache, _, caller in played(7, {"ghosts": 50}, count=600, every=50):
        prompt = caller._prompt()
        before = snapshot_of(cache)
        cache.explain(session_hash=1, **prompt)
        for _ in cache.iter_nodes():
            pass
        assert differences(before, snapshot_of(cache)) == []


# ----------------------------------------------------------------------------------------------- how much more would do


def served(cache: RadixTree, prompts: list[list[int]], capacity: int) -> None:
    """Serve prompts one after another as an engine with so many blocks does; each fits into them."""
    used = cache.stats()[0]
    for tokens in prompts:
        held = cache.lookup(tokens).matched_tokens
        lacking = used + len(tokens) - held - capacity
        if lacking > 0:
            used -= len(cache.evict(lacking).physical)
        cache.insert(tokens, range(len(tokens)), matched_tokens=held)
        used += len(tokens) - held
        cache.release(tokens)


@pytest.mark.parametrize("seed", range(20))
def test_with_so_many_blocks_more_it_would_have_been_kept_and_with_one_less_not(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.randint(5, 12)
    prompts = [[rng.randint(0, 2) for _ in range(rng.randint(1, 5))] for _ in range(60)]
    explained = 0
    for number in range(10, 60):
        cache = RadixTree(block_size=1, ghosts=1000)
        served(cache, prompts[:number], capacity)
        explanation = cache.explain(prompts[number])
        if explanation.evicted is None:
            continue
        explained += 1
        whole_run = explanation.matched_tokens + explanation.evicted.blocks
        for more, least in (
            (explanation.evicted.more_blocks, explanation.matched_tokens + 1),
            (explanation.evicted.more_blocks_for_all, whole_run),
        ):
            with_more, with_less = RadixTree(block_size=1), RadixTree(block_size=1)
            served(with_more, prompts[:number], capacity + more)
            assert with_more.peek_matched_tokens(prompts[number]) >= least
            served(with_less, prompts[:number], capacity + more - 1)
            assert with_less.peek_matched_tokens(prompts[number]) < least
    assert explained > 3


# ----------------------------------------------------------------------------------------------------- one thing a test


def cache_of_four_blocks(**settings: Any) -> RadixTree:
    """Two prompts of two blocks each, [1, 1, 2, 2] and [3, 3, 4, 4], of which nobody holds anything."""
    cache = RadixTree(block_size=2, **settings)
    for tokens in ([1, 1, 2, 2], [3, 3, 4, 4]):
        cache.insert(tokens, tokens[::2])
        cache.release(tokens)
    return cache


def test_a_block_that_was_evicted_is_told_of_with_its_time_and_what_was_short() -> None:
    cache = cache_of_four_blocks(ghosts=8)
    cache.evict(3)
    cache.lookup([3, 3])
    explanation = cache.explain([1, 1, 2, 2, 5, 5])
    assert explanation.reason == "evicted"
    assert explanation.evicted == EvictedPrefix(
        blocks=2,
        evictions_ago=1,
        ticks_ago=1,
        idle_ticks=1,
        more_blocks=2,
        more_blocks_for_all=3,
        by_adapter=False,
    )
    assert explanation.words().splitlines() == [
        "0 of 6 tokens match: 0 full blocks of 2.",
        "The next block was cached and evicted 1 tick of the clock ago, 1 after its last use; 1 block went after it.",
        "The cache would have had to hold 2 blocks more to keep it, and 3 to keep the 2 that follow each other.",
        "Without a match no snapshot is looked for.",
    ]


def test_a_block_that_is_inserted_again_has_no_ghost() -> None:
    cache = cache_of_four_blocks(ghosts=8)
    cache.evict(4)
    cache.insert([1, 1], [9])
    assert cache.explain([1, 1, 2, 2]).matched_tokens == 2
    cache.release([1, 1])
    explanation = cache.explain([3, 3, 4, 4])
    # Of the four that were evicted, [1, 1] is cached again.
    assert explanation.evicted is not None
    assert explanation.evicted.more_blocks == 1
    assert explanation.evicted.more_blocks_for_all == 2
    cache.check_integrity()


def test_what_was_evicted_longer_ago_than_there_are_ghosts_is_not_remembered() -> None:
    cache = cache_of_four_blocks(ghosts=2)
    cache.evict(2)
    assert cache.explain([1, 1, 2, 2]).reason == "evicted"
    assert cache.explain([8, 8]).reason == "never_seen"
    cache.evict(2)
    assert cache.explain([1, 1, 2, 2]).reason == "not_cached"
    assert cache.explain([3, 3]).reason == "evicted"
    assert "gone for longer" in cache.explain([8, 8]).words()


def test_more_evictions_at_once_than_there_are_ghosts_leave_the_last() -> None:
    cache = cache_of_four_blocks(ghosts=3)
    cache.evict(4)
    cache.check_integrity()
    assert cache.explain([1, 1, 2, 2]).evicted == EvictedPrefix(1, 2, 0, 1, 3, 3, False)
    assert cache.explain([8, 8]).reason == "not_cached"


def test_without_ghosts_it_is_said_that_they_could_tell() -> None:
    cache = cache_of_four_blocks()
    cache.evict(4)
    explanation = cache.explain([1, 1])
    assert (explanation.reason, explanation.evicted, explanation.ghosts) == ("not_cached", None, 0)
    assert "ghosts= could tell" in explanation.words()


def test_a_block_of_another_adapter_is_told_of_with_its_depth() -> None:
    cache = cache_of_four_blocks()
    cache.insert([1, 1, 2, 2, 5, 5], [10, 11, 12], adapter_id=2**64 - 1)
    explanation = cache.explain([1, 1, 2, 2, 5, 5, 6])
    assert (explanation.reason, explanation.matched_tokens) == ("other_adapter", 4)
    assert (explanation.other_adapter, explanation.other_adapter_tokens) == (2**64 - 1, 6)
    assert f"Adapter {2**64 - 1} has 6 tokens of this prompt." in explanation.words()


def test_what_is_left_and_fills_no_block_is_told_of() -> None:
    assert cache_of_four_blocks().explain([1, 1, 2]).reason == "partial_block"
    sharing = cache_of_four_blocks(partial_tail_sharing=True)
    assert sharing.explain([1, 1, 2]).reason == "whole_prompt"
    assert "and a part of the next" in sharing.explain([1, 1, 2]).words()
    assert sharing.explain([1, 1, 7]).reason == "tail_not_cached"


def test_a_prompt_without_tokens_matches_as_a_whole() -> None:
    assert cache_of_four_blocks().explain([]).reason == "whole_prompt"


def test_a_block_that_was_released_too_often_is_hidden() -> None:
    cache = cache_of_four_blocks(ghosts=3)
    cache.release([1, 1])
    explanation = cache.explain([1, 1, 2, 2])
    assert (explanation.reason, explanation.matched_tokens) == ("hidden", 0)
    assert "look-ups pass it by" in explanation.words()


def test_a_block_that_went_for_its_adapters_quota_is_told_of_as_that() -> None:
    cache = RadixTree(block_size=2, ghosts=8, quotas={7: 2})
    cache.insert([9, 9], [0])
    cache.release([9, 9])
    for tokens in ([1, 1, 2, 2], [3, 3, 4, 4]):
        cache.insert(tokens, tokens[::2], adapter_id=7)
        cache.release(tokens, adapter_id=7)
    cache.evict(1)
    explanation = cache.explain([1, 1, 2, 2], adapter_id=7)
    assert explanation.evicted == EvictedPrefix(2, 1, 1, 0, 1, 2, True)
    assert "Adapter 7 would have had to be allowed 1 block more" in explanation.words()


@pytest.mark.parametrize("forget", [RadixTree.clear, lambda cache: cache.drop_adapter(0)], ids=["clear", "drop"])
def test_what_is_forgotten_leaves_no_ghosts(forget: Callable[[RadixTree], Any]) -> None:
    cache = cache_of_four_blocks(ghosts=8)
    cache.evict(2)
    cache.insert_tail_snapshot([3, 3], 5, session_hash=1)
    cache.evict_snapshot_lru()
    forget(cache)
    cache.check_integrity()
    cache.insert([3, 3], [1])
    explanation = cache.explain([1, 1], session_hash=1)
    assert (explanation.reason, explanation.evicted) == ("not_cached", None)
    assert cache.explain([3, 3], session_hash=1).snapshot == SnapshotExplanation("none")


def test_dropping_one_adapter_leaves_the_ghosts_of_others() -> None:
    cache = cache_of_four_blocks(ghosts=8)
    cache.evict(2)
    cache.drop_adapter(4)
    assert cache.explain([1, 1, 2, 2]).reason == "evicted"


def test_compacting_leaves_the_ghosts() -> None:
    cache = cache_of_four_blocks(ghosts=8)
    cache.evict(3)
    before = cache.explain([1, 1, 2, 2, 3, 3])
    cache.compact()
    cache.check_integrity()
    assert cache.explain([1, 1, 2, 2, 3, 3]) == before


@pytest.mark.parametrize("way", [way for way in COPIES if way != "file"])
def test_a_copy_has_the_ghosts_and_makes_its_own_from_there(way: str) -> None:
    cache = cache_of_four_blocks(ghosts=4)
    cache.insert_tail_snapshot([3, 3], 5, session_hash=1)
    cache.evict_snapshot_lru()
    cache.evict(1)
    twin = COPIES[way](cache)
    twin.evict(1)
    twin.check_integrity()
    cache.check_integrity()
    assert twin.explain([1, 1, 2, 2]).evicted == EvictedPrefix(2, 0, 0, 1, 1, 2, False)
    assert cache.explain([1, 1, 2, 2]).evicted == EvictedPrefix(1, 0, 0, 1, 1, 1, False)
    assert twin.explain([3, 3], session_hash=1) == cache.explain([3, 3], session_hash=1)


def test_a_file_has_no_ghosts_and_who_loads_it_says_how_many_there_will_be(tmp_path: Path) -> None:
    cache = cache_of_four_blocks(ghosts=4)
    cache.evict(2)
    cache.save(tmp_path / "cache")
    assert RadixTree.load(tmp_path / "cache").settings.ghosts == 0
    loaded = RadixTree.load(tmp_path / "cache", ghosts=2)
    assert loaded.settings.ghosts == 2
    # It was evicted before the file was written, and nobody can tell now.
    assert loaded.explain([1, 1]).reason == "not_cached"
    loaded.evict(1)
    assert loaded.explain([3, 3, 4, 4]).reason == "evicted"


def test_the_memory_of_ghosts_is_counted() -> None:
    cache = RadixTree(ghosts=1000)
    usage = cache.memory_usage()
    assert usage["ghosts.rows"] + usage["ghosts.table"] <= 73_000


# ------------------------------------------------------------------------------------------------------------ snapshots


def test_a_tail_of_another_session_is_passed_over() -> None:
    cache = cache_of_four_blocks()
    cache.insert_tail_snapshot([1, 1, 2], 5, session_hash=1)
    cache.insert_intermediate_snapshot([1], [], (), None, 6)
    explanation = cache.explain([1, 1, 2, 2], session_hash=2)
    assert explanation.snapshot.reason == "found"
    assert explanation.snapshot.depth == 1
    assert explanation.snapshot.recompute_tokens == 3
    assert explanation.snapshot.passed == ((3, False, True),)
    assert "One of 3 tokens was passed over: it is the tail of another session." in explanation.words()
    assert cache.explain([1, 1, 2, 2], session_hash=1).snapshot.depth == 3


def test_a_hermetic_cache_says_that_a_snapshot_is_anothers() -> None:
    cache = cache_of_four_blocks(hermetic=True)
    cache.insert_intermediate_snapshot([1, 1], [], (), None, 6, session_hash=1)
    snapshot = cache.explain([1, 1, 2, 2], session_hash=2).snapshot
    assert (snapshot.reason, snapshot.passed) == ("hermetic", ((2, False, False),))


def test_a_spilled_snapshot_that_was_given_up_is_lost() -> None:
    cache = cache_of_four_blocks(ghosts=3)
    cache.insert_intermediate_snapshot([1, 1, 2], [], (), None, 6)
    spill = cache.evict_snapshot_to_tier(0)
    assert isinstance(spill, Spill)
    assert cache.explain([1, 1, 2, 2]).snapshot.is_spilled
    cache.forget_snapshot_tier_key(spill.key)
    explanation = cache.explain([1, 1, 2, 2])
    assert (explanation.snapshot.reason, explanation.snapshot.lost) == ("lost", ((3, "forgotten", 0),))
    assert "One of 3 tokens was spilled, and its stored bytes were given up" in explanation.words()
    cache.insert_intermediate_snapshot([1, 1, 2], [], (), None, 6)
    assert cache.explain([1, 1, 2, 2]).snapshot.lost == ()


def test_a_snapshot_whose_blocks_are_gone_lies_beyond_the_match() -> None:
    cache = cache_of_four_blocks(ghosts=3)
    cache.insert_intermediate_snapshot([1, 1, 2, 2], [], (), None, 6)
    cache.evict(1)
    explanation = cache.explain([1, 1, 2, 2])
    assert (explanation.matched_tokens, explanation.reason) == (2, "evicted")
    assert explanation.snapshot == SnapshotExplanation("beyond_match", beyond_match=4)


# ---------------------------------------------------------------------------------------------------------------- nodes


def test_nodes_are_those_of_the_moment_of_the_call() -> None:
    cache = cache_of_four_blocks()
    nodes = cache.iter_nodes()
    cache.clear()
    assert [node.block for node in nodes] == [3, 4, 1, 2]
    assert list(cache.iter_nodes()) == []


def test_the_first_nodes_are_those_that_would_be_evicted_last() -> None:
    rng = random.Random(4)
    cache = RadixTree(block_size=1)
    served(cache, [[rng.randint(0, 3) for _ in range(rng.randint(1, 6))] for _ in range(40)], 10**6)
    order = [node.depth for node in cache.iter_nodes()]
    stamps = [node.stamp for node in cache.iter_nodes()]
    twin = copy.deepcopy(cache)
    for left in range(len(order) - 1, -1, -1):
        assert len(twin.evict(1)) == 1
        assert [node.stamp for node in twin.iter_nodes()] == stamps[:left]


def test_nodes_of_several_sizes_and_adapters_stand_in_one_order() -> None:
    cache = RadixTree(block_size=2)
    for number, (adapter, size) in enumerate(itertools.product((0, 5), (2, 3))):
        cache.insert([number] * 6, range(6 // size), block_size=size, adapter_id=adapter)
    assert [(node.adapter_id, node.block_size) for node in cache.iter_nodes()] == [
        *[(5, 3)] * 2,
        *[(5, 2)] * 3,
        *[(0, 3)] * 2,
        *[(0, 2)] * 3,
    ]
    assert [node.depth for node in cache.iter_nodes(adapter_id=5, block_size=2)] == [2, 4, 6]
    assert list(cache.iter_nodes(adapter_id=6)) == list(cache.iter_nodes(block_size=9)) == []


def test_a_node_has_arrays_of_its_own_and_equals_itself() -> None:
    cache = cache_of_four_blocks()
    (first, *_), (again, *_) = cache.iter_nodes(), cache.iter_nodes()
    assert first == again
    first.tokens[:] = 77
    assert first != again
    cache.check_integrity()
    assert isinstance(cache.explain([1]), Explanation)


def test_what_is_answered_survives_pickling() -> None:
    cache = cache_of_four_blocks(ghosts=8)
    cache.evict(1)
    for answer in (cache.explain([1, 1, 2, 2]), next(cache.iter_nodes())):
        back = pickle.loads(pickle.dumps(answer))
        assert type(back) is type(answer)
        assert back == answer
