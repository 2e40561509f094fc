"""Named pins: what they hold, how they end, how many there may be.

It relies on :mod:`pair` for a clock that goes on only when it is told to, and on :mod:`state` to find that a refused
pin changed nothing.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
from pair import Clock
from state import differences, snapshot_of

from metrale_numba import Pin, RadixTree

SYSTEM = [1, 2, 3, 4]
TOOLS = [1, 2, 9, 9, 9, 9]
#: An adapter with a quota, where there is one.
BOUNDED = 7


def make(**settings: object) -> RadixTree:
    """Two prompts of 2 and 3 blocks of 2 tokens that share the first; nobody holds them. SYSTEM is the older one."""
    cache = RadixTree(block_size=2, **settings)  # type: ignore[arg-type]
    cache.insert(SYSTEM, [10, 11])
    cache.release(SYSTEM)
    cache.insert(TOOLS, [10, 12, 13])
    cache.release(TOOLS)
    return cache


def evicted(cache: RadixTree, num_blocks: int = 10**9) -> list[int]:
    return cache.evict(num_blocks).physical.tolist()


# --- what a pin holds ---------------------------------------------------------------------------------------------


def test_evict_passes_a_pin_by_and_takes_it_after_it_was_given_up() -> None:
    cache = make()
    assert cache.pin("system", SYSTEM) == 4
    assert evicted(cache) == [13, 12]
    assert evicted(cache) == []
    assert cache.unpin("system")
    assert evicted(cache) == [11, 10]


def test_a_pin_holds_what_is_cached_of_its_tokens() -> None:
    cache = make()
    assert cache.pin("system", [*SYSTEM, 5, 6, 7]) == 4
    assert cache.pins() == {"system": Pin(4, 2, 2, 0, None)}


def test_a_pin_of_nothing_cached_holds_nothing_and_is_not_listed() -> None:
    cache = make()
    for tokens in ([], [8, 8], [1]):
        assert cache.pin("nothing", tokens) == 0
    assert cache.pin("nothing", SYSTEM, adapter_id=1) == 0
    assert cache.pin("nothing", SYSTEM, 3) == 0
    assert cache.pins() == {}
    assert not cache.unpin("nothing")
    assert cache.num_evictable() == 4


def test_a_block_matched_in_part_counts_in_the_answer_but_is_not_held() -> None:
    cache = RadixTree(block_size=2, partial_tail_sharing=True)
    cache.insert(SYSTEM, [10, 11])
    cache.release(SYSTEM)
    assert cache.pin("system", [1, 2, 3]) == 3
    assert cache.pins() == {"system": Pin(3, 1, 2, 0, None)}
    assert cache.stats_detail().num_pinned_blocks == 1
    assert evicted(cache) == [11]
    assert cache.unpin("system")
    assert evicted(cache) == [10]
    assert cache.stats_detail().over_releases == 0


def test_a_pin_makes_its_prefix_the_newest_and_counts_neither_hit_nor_miss() -> None:
    cache = make()
    before = cache.stats_detail()
    cache.pin("system", SYSTEM)
    after = cache.stats_detail()
    assert after.clock == before.clock + 1
    assert (after.cache_hits, after.cache_misses) == (before.cache_hits, before.cache_misses)
    cache.unpin("system")
    # Without the pin, 11 would be the oldest leaf.
    assert evicted(cache, 1) == [13]


def test_pins_of_one_prefix_under_two_names_are_two_holds() -> None:
    cache = make()
    cache.pin("one", SYSTEM)
    cache.pin("other", SYSTEM)
    assert cache.stats_detail().num_pinned_blocks == 4
    cache.unpin("one")
    assert evicted(cache) == [13, 12]
    cache.unpin("other")
    assert evicted(cache) == [11, 10]


def test_a_pin_is_of_one_adapter_and_one_block_size() -> None:
    cache = make()
    cache.insert(SYSTEM, [20, 21], adapter_id=5)
    cache.insert([*SYSTEM, 5, 6], [30, 31], (), 3)
    cache.release(SYSTEM, adapter_id=5)
    cache.release([*SYSTEM, 5, 6], 3)
    assert cache.pin("adapter", SYSTEM, adapter_id=5) == 4
    assert cache.pin("size", [*SYSTEM, 5, 6], 3) == 6
    assert cache.pins() == {"adapter": Pin(4, 2, 2, 5, None), "size": Pin(6, 2, 3, 0, None)}
    assert sorted(evicted(cache)) == [10, 11, 12, 13]


def test_pins_are_listed_in_the_order_in_which_they_were_set() -> None:
    cache = make()
    for name in ("b", "a", "c", "b"):
        cache.pin(name, SYSTEM)
    assert list(cache.pins()) == ["a", "c", "b"]


def test_the_list_of_pins_is_the_caller_s() -> None:
    cache = make()
    cache.pin("system", SYSTEM)
    cache.pins().clear()
    assert list(cache.pins()) == ["system"]


def test_any_text_can_be_a_name() -> None:
    cache = make()
    names = ["", " ", "system", "System", "é", "e\u0301", "\ud800", "a" * 10_000, "\0", "0"]
    for name in names:
        assert cache.pin(name, SYSTEM) == 4
    assert list(cache.pins()) == names
    assert all(cache.unpin(name) for name in names)
    assert cache.num_evictable() == 4


def test_a_pin_keeps_its_own_copy_of_the_tokens() -> None:
    cache = make()
    tokens = np.array(SYSTEM, np.uint32)
    cache.pin("system", tokens)
    tokens[0] = 77
    cache.unpin("system")
    assert cache.num_evictable() == 4


def test_num_evictable_does_not_count_what_is_pinned() -> None:
    cache = make()
    cache.pin("system", SYSTEM)
    assert cache.num_evictable() == 2
    cache.pin("tools", TOOLS)
    assert cache.num_evictable() == 0


# --- replacing a name ---------------------------------------------------------------------------------------------


def test_a_name_that_is_set_again_holds_the_new_prefix_and_not_the_old() -> None:
    cache = make()
    cache.pin("prompt", SYSTEM)
    assert cache.pin("prompt", TOOLS) == 6
    assert cache.pins() == {"prompt": Pin(6, 3, 2, 0, None)}
    assert evicted(cache) == [11]


def test_a_name_set_again_to_the_same_prefix_holds_it_once() -> None:
    cache = make()
    for _ in range(3):
        cache.pin("system", SYSTEM)
    assert cache.stats_detail().num_pinned_blocks == 2
    assert cache.unpin("system")
    assert cache.num_evictable() == 4
    assert cache.stats_detail().over_releases == 0


def test_a_name_set_again_to_what_is_not_cached_holds_nothing_any_more() -> None:
    cache = make()
    cache.pin("system", SYSTEM)
    assert cache.pin("system", [8, 8]) == 0
    assert cache.pins() == {}
    assert cache.num_evictable() == 4


def test_a_name_set_again_has_the_new_time(clock: Clock) -> None:
    cache = make()
    cache.pin("system", SYSTEM, ttl=10)
    clock.seconds += 4
    cache.pin("system", SYSTEM, ttl=10)
    assert cache.pins()["system"].seconds_left == 10
    cache.pin("system", SYSTEM)
    assert cache.pins()["system"].seconds_left is None


# --- time ---------------------------------------------------------------------------------------------------------


def test_a_pin_lasts_until_its_seconds_are_over_and_no_longer(clock: Clock) -> None:
    cache = make()
    cache.pin("system", SYSTEM, ttl=10)
    clock.seconds += 9.75
    assert cache.pins() == {"system": Pin(4, 2, 2, 0, 0.25)}
    assert evicted(cache) == [13, 12]
    clock.seconds += 0.25
    assert evicted(cache) == [11, 10]
    assert cache.pins() == {}


def test_a_pin_without_seconds_does_not_end(clock: Clock) -> None:
    cache = make()
    cache.pin("system", SYSTEM)
    clock.seconds += 1e12
    assert evicted(cache) == [13, 12]
    assert cache.pins()["system"].seconds_left is None


def test_a_pin_of_no_seconds_ends_when_somebody_looks() -> None:
    cache = make()
    assert cache.pin("system", SYSTEM, ttl=0) == 4
    assert evicted(cache) == [13, 12, 11, 10]


def test_the_wall_clock_is_not_asked(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make()
    cache.pin("system", SYSTEM, ttl=10)
    monkeypatch.setattr("time.time", lambda: 1e15)
    assert list(cache.pins()) == ["system"]


LOOKS = {
    "evict": lambda cache: cache.evict(0),
    "evict_from": lambda cache: cache.evict_from(99, 0),
    "pins": lambda cache: cache.pins(),
    "unpin": lambda cache: cache.unpin("another"),
    "pin": lambda cache: cache.pin("another", []),
    "num_evictable": lambda cache: cache.num_evictable(),
    "stats_detail": lambda cache: cache.stats_detail(),
    "insert under a quota": lambda cache: cache.insert([7, 7], [99], adapter_id=BOUNDED),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whatever_evicts_or_counts_ends_the_pins_whose_time_is_over(look: str, clock: Clock) -> None:
    cache = make(quotas={BOUNDED: 0})
    cache.pin("short", SYSTEM, ttl=1)
    cache.pin("long", TOOLS, ttl=3)
    clock.seconds += 2
    LOOKS[look](cache)
    # With the clock back at the beginning, nobody else can have ended it.
    clock.seconds -= 2
    assert list(cache.pins()) == ["long"]
    assert cache.num_evictable() == 1


def test_num_evictable_counts_what_evict_would_free_after_a_pin_s_time(clock: Clock) -> None:
    # A scheduler that waits for it to rise would wait for ever otherwise, for it never came to call evict.
    cache = make()
    cache.pin("system", SYSTEM, ttl=1)
    cache.pin("tools", TOOLS, ttl=1)
    assert cache.num_evictable() == 0
    clock.seconds += 1
    assert cache.num_evictable() == 4
    assert cache.stats_detail().num_evictable == 4
    assert len(cache.evict(4)) == 4


def test_unpin_of_a_pin_whose_time_is_over_answers_that_it_held_nothing(clock: Clock) -> None:
    cache = make()
    cache.pin("system", SYSTEM, ttl=1)
    clock.seconds += 1
    assert not cache.unpin("system")
    assert cache.num_evictable() == 4


def test_the_longest_time_there_is_can_be_given(clock: Clock) -> None:
    cache = make()
    cache.pin("system", SYSTEM, ttl=1e308)
    clock.seconds += 1e15
    assert list(cache.pins()) == ["system"]


# --- the limit ----------------------------------------------------------------------------------------------------


def test_a_pin_beyond_the_limit_is_refused_and_changes_nothing() -> None:
    cache = make(max_pinned_blocks=4)
    cache.pin("system", SYSTEM)
    before = snapshot_of(cache)
    with pytest.raises(ValueError, match=r"^pin 'tools' of 3 blocks would go 1 beyond max_pinned_blocks, which is 4$"):
        cache.pin("tools", TOOLS)
    assert differences(before, snapshot_of(cache)) == []
    assert list(cache.pins()) == ["system"]


def test_the_limit_itself_can_be_reached() -> None:
    cache = make(max_pinned_blocks=5)
    cache.pin("system", SYSTEM)
    assert cache.pin("tools", TOOLS) == 6
    assert cache.stats_detail().num_pinned_blocks == 5
    with pytest.raises(ValueError, match="max_pinned_blocks"):
        cache.pin("one more", [1, 2])


def test_what_a_name_gives_up_makes_room_for_what_it_is_set_to() -> None:
    cache = make(max_pinned_blocks=3)
    cache.pin("prompt", SYSTEM)
    assert cache.pin("prompt", TOOLS) == 6
    assert cache.pin("prompt", SYSTEM) == 4
    cache.pin("one more", [1, 2])


def test_a_refused_pin_leaves_the_name_with_what_it_holds() -> None:
    cache = make(max_pinned_blocks=2)
    cache.pin("prompt", SYSTEM)
    before = snapshot_of(cache)
    with pytest.raises(ValueError, match="of 3 blocks would go 1 beyond"):
        cache.pin("prompt", TOOLS)
    assert differences(before, snapshot_of(cache)) == []
    assert cache.pins() == {"prompt": Pin(4, 2, 2, 0, None)}


def test_pins_that_ended_make_room(clock: Clock) -> None:
    cache = make(max_pinned_blocks=3)
    cache.pin("system", SYSTEM, ttl=1)
    clock.seconds += 1
    assert cache.pin("tools", TOOLS) == 6


def test_a_limit_of_0_refuses_every_pin_that_would_hold_anything() -> None:
    cache = make(max_pinned_blocks=0)
    with pytest.raises(ValueError, match="of 2 blocks would go 2 beyond"):
        cache.pin("system", SYSTEM)
    assert cache.pin("nothing", [8, 8]) == 0
    # A block matched in part is not held.
    sharing = RadixTree(block_size=2, partial_tail_sharing=True, max_pinned_blocks=0)
    sharing.insert(SYSTEM, [10, 11])
    assert sharing.pin("part", [1]) == 1
    assert sharing.pins() == {"part": Pin(1, 0, 2, 0, None)}


def test_pin_prefix_is_not_bounded() -> None:
    cache = make(max_pinned_blocks=0)
    assert cache.pin_prefix(TOOLS) == 6
    assert cache.stats_detail().num_pinned_blocks == 0


# --- what is forgotten, and what breaks the rules -----------------------------------------------------------------


def test_clear_ends_every_pin() -> None:
    cache = make(max_pinned_blocks=3)
    cache.pin("tools", TOOLS)
    assert sorted(cache.clear().blocks.physical.tolist()) == [10, 11, 12, 13]
    assert cache.pins() == {}
    assert not cache.unpin("tools")
    cache.insert(TOOLS, [20, 21, 22])
    assert cache.stats_detail().over_releases == 0
    assert cache.pin("tools", TOOLS) == 6


def test_drop_adapter_ends_the_pins_of_that_adapter_alone() -> None:
    cache = make(max_pinned_blocks=4)
    cache.insert(SYSTEM, [20, 21], adapter_id=5)
    cache.pin("mine", SYSTEM)
    cache.pin("theirs", SYSTEM, adapter_id=5)
    cache.drop_adapter(5)
    assert list(cache.pins()) == ["mine"]
    assert cache.stats_detail().num_pinned_blocks == 2
    cache.drop_adapter(6)
    assert list(cache.pins()) == ["mine"]
    cache.drop_adapter(0)
    assert cache.pins() == {}


def test_a_pin_ended_by_drop_adapter_takes_nothing_from_the_nodes_that_come_after(clock: Clock) -> None:
    cache = make()
    cache.pin("system", SYSTEM, ttl=1)
    cache.drop_adapter(0)
    cache.insert(SYSTEM, [20, 21])
    clock.seconds += 1
    assert evicted(cache) == []
    assert cache.stats_detail().over_releases == 0


@pytest.mark.parametrize("strict", [False, True])
def test_unpin_counts_what_somebody_else_released_of_the_pin_and_raises_nothing(strict: bool) -> None:
    cache = make(strict=strict)
    cache.pin("system", SYSTEM)
    cache.release(SYSTEM)
    assert cache.stats_detail().over_releases == 0
    assert cache.unpin("system")
    assert cache.stats_detail().over_releases == 2
    cache.check_integrity()


def test_unpin_of_what_was_evicted_under_it_is_no_error() -> None:
    cache = make()
    cache.pin("size", SYSTEM)
    cache.insert([1, 2, 3], [30], (), 3)
    cache.release([1, 2, 3], 3)
    cache.pin("gone", [1, 2, 3], 3)
    cache.release([1, 2, 3], 3)
    assert 30 in evicted(cache)
    assert cache.unpin("gone")
    assert cache.stats_detail().over_releases == 0


# --- copies -------------------------------------------------------------------------------------------------------


def saved_and_loaded(cache: RadixTree, folder: Path, clock: Clock) -> RadixTree:
    cache.save(folder / "cache")
    # The clock of the process that loads may stand anywhere.
    clock.seconds = 17.5
    return RadixTree.load(folder / "cache")


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "file"])
def test_a_copy_has_the_pins_with_the_time_that_is_left(way: str, tmp_path: Path, clock: Clock) -> None:
    cache = make(max_pinned_blocks=6)
    cache.pin("tools", TOOLS, ttl=10)
    cache.pin("system", SYSTEM)
    clock.seconds += 4
    if way == "file":
        twin = saved_and_loaded(cache, tmp_path, clock)
    elif way == "pickle":
        data = pickle.dumps(cache)
        clock.seconds += 1000
        twin = pickle.loads(data)
    else:
        twin = copy.deepcopy(cache)
    assert twin.pins() == {"tools": Pin(6, 3, 2, 0, 6.0), "system": Pin(4, 2, 2, 0, None)}
    assert list(twin.pins()) == ["tools", "system"]
    assert evicted(twin) == []
    with pytest.raises(ValueError, match="max_pinned_blocks"):
        twin.pin("more", TOOLS)
    clock.seconds += 6
    assert evicted(twin) == [13, 12]
    assert twin.unpin("system")
    assert evicted(twin) == [11, 10]


@pytest.mark.parametrize("way", ["pickle", "file"])
def test_a_pin_that_ended_before_the_copy_is_ended_in_it(way: str, tmp_path: Path, clock: Clock) -> None:
    cache = make()
    cache.pin("system", SYSTEM, ttl=1)
    clock.seconds += 5
    twin = pickle.loads(pickle.dumps(cache)) if way == "pickle" else saved_and_loaded(cache, tmp_path, clock)
    assert twin.pins() == {}
    assert len(evicted(twin)) == 4


def test_the_pins_of_a_copy_are_its_own() -> None:
    cache = make()
    cache.pin("system", SYSTEM)
    twin = copy.deepcopy(cache)
    cache.unpin("system")
    assert list(twin.pins()) == ["system"]
    assert twin.num_evictable() == 2
