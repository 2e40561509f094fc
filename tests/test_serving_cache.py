"""The serving cache by example: exact tables, exact counts, and what each call leaves as it was when it is refused."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest
from serving_model import FlakyTier, ModelEngine, check_conservation, contents_of

from metrale_numba import NONE, IntegrityError, MetraleError, NoPrefixCaching, RadixTree, RefcountError
from metrale_numba.serving import (
    BlockPool,
    MemoryTier,
    OutOfBlocks,
    Sequence,
    SequenceEnded,
    ServingCache,
    SnapshotPool,
    TierStore,
)

TOKENS = list(range(100, 120))


def make(
    num_blocks: int = 16,
    num_slots: int = 0,
    tier: TierStore | None = None,
    num_disk_blocks: int | None = None,
    keep_copies: bool = True,
    spill_min_tokens: int = 0,
    **settings: Any,
) -> tuple[ServingCache, ModelEngine]:
    engine = ModelEngine(num_blocks, 4, num_slots, num_disk_blocks or 0)
    serving = ServingCache(
        RadixTree(block_size=4, **settings),
        num_blocks,
        engine,
        slots=num_slots,
        tier=tier,
        disk_blocks=num_disk_blocks,
        keep_copies=keep_copies,
        spill_min_tokens=spill_min_tokens,
    )
    engine.serving = serving
    return serving, engine


def state_of(serving: ServingCache) -> bytes:
    """All there is to change, but for clocks and counters of look-ups."""
    contents = contents_of(serving)
    pools = [pool and pool.ref_counts().tolist() for pool in (serving.blocks, serving.slots, serving.disk_blocks)]
    return pickle.dumps((list(contents.blocks), contents.snapshot_slots, contents.tier_keys.tolist(), pools))


def served(serving: ServingCache, tokens: Any = TOKENS, **keywords: Any) -> Sequence:
    """A sequence that has computed and published its whole prompt."""
    sequence = serving.begin(tokens, **keywords)
    sequence.allocate()
    sequence.publish(sequence.num_tokens)
    return sequence


def saved(sequence: Sequence, depth: int) -> bool:
    return sequence.snapshot(depth, lambda slot: None)


# ---------------------------------------------------------------------------------------------------------- beginnings


def test_a_first_request_finds_nothing_and_computes_everything() -> None:
    serving, _ = make()
    with serving.begin(TOKENS) as sequence:
        assert (sequence.cached_tokens, sequence.compute_from, sequence.published) == (0, 0, 0)
        assert sequence.allocate().tolist() == [0, 1, 2, 3, 4]
        assert sequence.block_table.tolist() == [0, 1, 2, 3, 4]
        assert sequence.publish(20) == 20
    assert serving.blocks.ref_counts().tolist()[:6] == [1, 1, 1, 1, 1, 0]
    serving.check_integrity()


def test_a_second_request_shares_whole_blocks_and_leaves_one_token() -> None:
    serving, _ = make()
    served(serving).finish()
    with serving.begin(TOKENS) as sequence:
        assert (sequence.cached_tokens, sequence.compute_from) == (16, 16)
        assert sequence.block_table.tolist() == [0, 1, 2, 3]
        assert serving.blocks.ref_counts().tolist()[:6] == [2, 2, 2, 2, 1, 0]


@pytest.mark.parametrize(("min_compute", "cached"), [(0, 20), (1, 16), (4, 16), (5, 12), (20, 0), (21, 0), (10**9, 0)])
def test_as_many_tokens_as_wanted_are_left_to_compute(min_compute: int, cached: int) -> None:
    serving, _ = make()
    served(serving).finish()
    with serving.begin(TOKENS, min_compute=min_compute) as sequence:
        assert (sequence.cached_tokens, sequence.compute_from) == (cached, cached)


def test_an_empty_prompt_is_a_sequence_like_any_other() -> None:
    serving, _ = make()
    with serving.begin([]) as sequence:
        assert sequence.allocate().tolist() == []
        assert sequence.publish(0) == 0
        sequence.append(TOKENS[:4])
        sequence.allocate()
        assert sequence.publish(4) == 4
    serving.check_integrity()


def test_the_prompt_is_copied() -> None:
    serving, _ = make()
    prompt = np.array(TOKENS, np.uint32)
    with serving.begin(prompt) as sequence:
        prompt[:] = 0
        assert sequence.tokens.tolist() == TOKENS


def test_a_block_that_matched_in_part_is_copied() -> None:
    serving, engine = make(partial_tail_sharing=True)
    first = served(serving, TOKENS[:18])
    engine.kv[first.block_table[-1]] = [1, 2, 3, 4]
    with serving.begin(TOKENS[:19]) as second:
        assert second.cached_tokens == 18
        assert second.block_table.tolist() == [0, 1, 2, 3, 5]
        assert engine.kv[5, :2].tolist() == [1, 2]
        assert serving.blocks.ref_count(4) == 2
    first.finish()
    serving.check_integrity()


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_a_copy_that_fails_gives_its_block_back(error: type[BaseException]) -> None:
    serving, engine = make(partial_tail_sharing=True)

    def fail(source: int, target: int, rows: int) -> None:
        raise error("in the middle of a copy")

    with served(serving, TOKENS[:18]):
        engine.copy_rows = fail  # type: ignore[method-assign]
        with pytest.raises(error, match="in the middle of a copy"):
            serving.begin(TOKENS[:19])
        serving.check_integrity()
    assert serving.num_free_blocks == 16


def test_without_room_for_the_copy_only_whole_blocks_are_shared() -> None:
    serving, engine = make(num_blocks=5, partial_tail_sharing=True)
    first = served(serving, TOKENS[:18])
    with serving.begin(TOKENS[:19]) as second:
        assert second.cached_tokens == 16
        assert engine.calls["copy_rows"] == 0
    first.finish()
    serving.check_integrity()


def test_adapters_share_nothing() -> None:
    serving, _ = make()
    served(serving, adapter=1).finish()
    with serving.begin(TOKENS, adapter=2) as sequence:
        assert sequence.cached_tokens == 0
        assert sequence.adapter == 2


# -------------------------------------------------------------------------------------------------------------- blocks


def test_allocate_extends_the_table_by_what_the_tokens_lack() -> None:
    serving, _ = make()
    with serving.begin(TOKENS[:5]) as sequence:
        assert sequence.allocate().tolist() == [0, 1]
        assert sequence.allocate().tolist() == []
        sequence.append(TOKENS[5:9])
        assert sequence.allocate().tolist() == [2]
        assert sequence.allocate(2).tolist() == [3, 4]
        assert sequence.block_table.tolist() == [0, 1, 2, 3, 4]


def test_allocate_evicts_what_nobody_holds_oldest_first() -> None:
    serving, _ = make(num_blocks=6)
    served(serving, [1, 2, 3, 4]).finish()
    served(serving, [5, 6, 7, 8]).finish()
    with serving.begin(TOKENS) as sequence:
        assert sequence.allocate().tolist() == [0, 2, 3, 4, 5]
    assert serving.stats().evicted_blocks == 1
    with serving.begin([5, 6, 7, 8, 9]) as sequence:
        assert sequence.cached_tokens == 4
    serving.check_integrity()


def test_out_of_blocks_changes_nothing_and_says_what_there_is() -> None:
    serving, _ = make(num_blocks=6)
    served(serving, [1, 2, 3, 4]).finish()
    running = served(serving, [5, 6, 7, 8])
    sequence = serving.begin(TOKENS + TOKENS)
    before = state_of(serving)
    message = (
        "10 blocks wanted, 4 of 6 free and 1 evictable; with the 0 that it has, the sequence needs more than there"
    )
    with pytest.raises(OutOfBlocks, match=message) as caught:
        sequence.allocate()
    assert (caught.value.wanted, caught.value.free, caught.value.total) == (10, 5, 6)
    assert pickle.loads(pickle.dumps(caught.value)).total == 6
    with pytest.raises(OutOfBlocks, match="6 blocks wanted, 4 of 6 free and 1 evictable; running sequences and pins"):
        sequence.allocate(6)
    assert state_of(serving) == before
    assert sequence.block_table.tolist() == []
    assert sequence.allocate(5).tolist() == [0, 2, 3, 4, 5]
    sequence.abort()
    running.finish()
    serving.check_integrity()


def test_a_block_that_the_cache_stores_twice_is_promised_once() -> None:
    serving, _ = make(num_blocks=4, adopt_blocks=True, partial_tail_sharing=True)
    first, second = serving.begin(range(8)), serving.begin(range(8))
    first.allocate()
    second.allocate()
    second.publish(8)
    first.publish(6)
    first.publish(8)
    first.finish()
    second.finish()
    assert sorted(contents_of(serving).blocks.physical.tolist()) == [0, 1, 1]
    assert (serving.blocks.num_free, serving.num_free_blocks) == (2, 4)
    before = state_of(serving)
    with serving.begin([9] * 20) as third:
        with pytest.raises(OutOfBlocks, match="5 blocks wanted, 2 of 4 free and 2 evictable"):
            third.allocate()
        assert state_of(serving) == before
        third.allocate(4)
    serving.check_integrity()


def test_a_view_of_the_table_stays_what_it_was_and_cannot_be_written_to() -> None:
    serving, _ = make()
    with serving.begin(TOKENS) as sequence:
        sequence.allocate(1)
        view, tokens = sequence.block_table, sequence.tokens
        sequence.append([1])
        sequence.allocate()
        assert view.tolist() == [0]
        assert tokens.tolist() == TOKENS
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 5
        with pytest.raises(ValueError, match="read-only"):
            tokens[0] = 5


# ----------------------------------------------------------------------------------------------------------- publishing


def test_publishing_in_pieces_holds_whole_blocks_once() -> None:
    serving, _ = make()
    sequence = serving.begin(TOKENS)
    sequence.allocate()
    assert [sequence.publish(upto) for upto in (3, 4, 11, 11, 7, 20)] == [0, 4, 8, 8, 8, 20]
    serving.check_integrity()
    sequence.finish()
    assert serving.cache.stats() == (5, 5)
    assert serving.num_free_blocks == 16


def test_a_prefix_that_another_published_first_keeps_its_blocks() -> None:
    serving, _ = make()
    first, second = serving.begin(TOKENS), serving.begin(TOKENS)
    first.allocate()
    second.allocate()
    assert first.publish(20) == second.publish(20) == 20
    serving.check_integrity()
    second.finish()
    assert serving.blocks.num_used == 5
    first.finish()
    with serving.begin(TOKENS) as third:
        assert third.block_table.tolist() == [0, 1, 2, 3]
    serving.check_integrity()


def test_with_adoption_the_later_block_replaces_the_earlier() -> None:
    serving, _ = make(adopt_blocks=True)
    first, second = serving.begin(TOKENS), serving.begin(TOKENS)
    first.allocate()
    second.allocate()
    first.publish(20)
    second.publish(20)
    first.finish()
    assert serving.blocks.ref_counts().tolist()[:10] == [0] * 5 + [2] * 5
    second.finish()
    serving.check_integrity()


def test_what_a_quota_cuts_off_is_not_held() -> None:
    serving, _ = make(quotas={0: 3})
    first = served(serving)
    assert first.published == 12
    served(serving, TOKENS[:12]).finish()
    serving.cache.set_quota(0, None)  # type: ignore[union-attr]
    second = served(serving)
    assert second.published == 20
    serving.check_integrity()
    # It must not take the second one's reference on the blocks that it never held.
    first.finish()
    serving.check_integrity()
    assert serving.cache.evict(16).is_empty()
    second.finish()
    serving.check_integrity()


@pytest.mark.parametrize("upto", [21, -1, 1.0, True, None])
def test_no_more_can_be_published_than_there_is(upto: Any) -> None:
    serving, _ = make()
    sequence = serving.begin(TOKENS)
    sequence.allocate()
    before = state_of(serving)
    with pytest.raises((TypeError, ValueError), match="upto"):
        sequence.publish(upto)
    assert state_of(serving) == before
    sequence.abort()


def test_no_more_can_be_published_than_the_table_has_room_for() -> None:
    serving, _ = make()
    with serving.begin(TOKENS) as sequence:
        sequence.allocate(2)
        with pytest.raises(ValueError, match="upto is 9, but the block table has room for 8 tokens: allocate first"):
            sequence.publish(9)


# ---------------------------------------------------------------------------------------------------------- disk blocks


def test_disk_blocks_are_counted_as_blocks_are() -> None:
    serving, _ = make(num_disk_blocks=8)
    assert serving.disk_blocks is not None
    sequence = serving.begin(TOKENS)
    sequence.allocate()
    ids = serving.disk_blocks.allocate(2)
    serving.check_integrity(disk_blocks=ids)
    sequence.set_disk_blocks(1, ids)
    serving.check_integrity()
    sequence.publish(20)
    assert serving.disk_blocks.ref_counts().tolist()[:3] == [2, 2, 0]
    sequence.finish()
    with serving.begin(TOKENS) as second:
        assert second.disk_table.tolist() == [NONE, 0, 1, NONE]
        serving.check_integrity()
    serving.clear()
    assert serving.disk_blocks.num_used == 0


@pytest.mark.parametrize(
    ("first", "ids", "error", "message"),
    [
        (4, [0, 1], ValueError, "first is 4, and with 2 ids that ends behind the table's 5"),
        (0, [0], ValueError, "block 0 of the table has a disk block already"),
        (1, [7], RefcountError, r"ids\[0\] is disk block 7, which is free"),
        (1, [9], ValueError, r"ids\[0\] is 9, outside 0..7"),
        (-1, [0], ValueError, "first is -1"),
        (1, [1, 1], ValueError, r"ids\[1\] is 1, which is listed before"),
        (1, [0.5], TypeError, "ids"),
    ],
)
def test_refused_disk_blocks_stay_the_callers(first: int, ids: Any, error: type[Exception], message: str) -> None:
    serving, _ = make(num_disk_blocks=8)
    assert serving.disk_blocks is not None
    sequence = serving.begin(TOKENS)
    sequence.allocate()
    sequence.set_disk_blocks(0, serving.disk_blocks.allocate(1))
    extra = serving.disk_blocks.allocate(2)
    before = state_of(serving)
    with pytest.raises(error, match=message):
        sequence.set_disk_blocks(first, ids)
    assert state_of(serving) == before
    serving.check_integrity(disk_blocks=extra)
    sequence.abort()


# ------------------------------------------------------------------------------------------------------------ snapshots


def test_a_hybrid_model_computes_from_the_snapshot_on() -> None:
    serving, engine = make(num_slots=2)
    first = served(serving)
    state = engine.prefixes.start(0, 0)
    assert first.snapshot(8, engine.writer(state))
    first.finish()
    with serving.begin(TOKENS) as second:
        assert (second.cached_tokens, second.compute_from, second.snapshot_tokens) == (16, 8, 8)
        assert second.snapshot_slot is not None
        engine.check_state(engine.slot_state(second.snapshot_slot), state, "the slot")
        assert serving.slots.ref_count(second.snapshot_slot) == 2
        second.release_snapshot()
        assert second.snapshot_slot is None
        assert second.compute_from == 8
        second.release_snapshot()
    stats = serving.stats()
    assert (stats.snapshot_hits, stats.hit_tokens, stats.recompute_tokens) == (1, 16, 8)
    serving.check_integrity()


def test_a_hybrid_model_without_a_snapshot_computes_everything() -> None:
    serving, _ = make(num_slots=2)
    served(serving).finish()
    with serving.begin(TOKENS) as second:
        assert (second.cached_tokens, second.compute_from, second.snapshot_slot) == (16, 0, None)


def test_a_snapshot_is_for_its_adapter_alone() -> None:
    serving, _ = make(num_slots=2)
    with served(serving, adapter=3) as sequence:
        saved(sequence, 8)
    served(serving, adapter=0).finish()
    for adapter, depth in ((3, 8), (0, 0)):
        with serving.begin(TOKENS, adapter=adapter) as second:
            assert second.snapshot_tokens == depth


def test_without_a_tier_the_oldest_snapshot_is_dropped_for_a_new_one() -> None:
    serving, _ = make(num_slots=1)
    sequence = served(serving)
    assert saved(sequence, 8)
    assert saved(sequence, 12)
    assert serving.stats().snapshots == 1
    sequence.finish()
    with serving.begin(TOKENS) as second:
        assert second.snapshot_tokens == 12
    serving.check_integrity()


def test_no_slot_is_to_be_had_while_sequences_read_them_all() -> None:
    serving, _ = make(num_slots=1)
    sequence = served(serving)
    saved(sequence, 8)
    reader = serving.begin(TOKENS)
    assert reader.snapshot_slot == 0
    assert not saved(sequence, 12)
    serving.check_integrity()
    reader.finish()
    assert saved(sequence, 12)
    sequence.finish()
    serving.check_integrity()


def test_the_slot_of_a_failed_write_is_free_again() -> None:
    serving, engine = make(num_slots=1)
    sequence = served(serving)
    engine.plan.set(["halfway"])
    with pytest.raises(Exception, match="in the middle of a state"):
        sequence.snapshot(8, engine.writer(1))
    assert serving.slots.num_free == 1
    assert serving.stats().snapshots == 0
    assert saved(sequence, 8)
    sequence.finish()
    serving.check_integrity()


def test_a_tail_is_for_its_session_alone_and_its_sibling_for_all() -> None:
    serving, _ = make(num_slots=3)
    sequence = served(serving, session=7)
    assert sequence.tail_snapshot(15, lambda slot: None, sibling=(12, lambda slot: None))
    sequence.finish()
    for session, depth in ((7, 15), (8, 12), (0, 12)):
        with serving.begin(TOKENS, session=session) as second:
            assert second.snapshot_tokens == depth
    serving.check_integrity()


def test_without_a_session_no_tail_is_saved_since_nobody_would_find_it() -> None:
    serving, _ = make(num_slots=1)
    sequence = served(serving)
    assert saved(sequence, 8)
    assert not sequence.tail_snapshot(16, lambda slot: None, sibling=(12, lambda slot: None))
    sequence.finish()
    with serving.begin(TOKENS) as second:
        assert second.snapshot_tokens == 8


def test_a_new_tail_replaces_the_tail_and_the_sibling_of_its_session() -> None:
    serving, _ = make(num_slots=4)
    sequence = served(serving, session=7)
    sequence.tail_snapshot(8, lambda slot: None, sibling=(4, lambda slot: None))
    sequence.tail_snapshot(16, lambda slot: None)
    assert serving.stats().snapshots == 1
    assert serving.slots.num_free == 3
    sequence.finish()
    serving.check_integrity()


def test_a_failed_sibling_leaves_the_earlier_tail_in_its_place() -> None:
    serving, engine = make(num_slots=3)
    sequence = served(serving, session=7)
    sequence.tail_snapshot(8, engine.writer(1))
    engine.plan.set(["ok", "break"])
    with pytest.raises(Exception, match="told to"):
        sequence.tail_snapshot(16, engine.writer(1), sibling=(12, engine.writer(1)))
    assert serving.stats().snapshots == 1
    assert serving.slots.num_free == 2
    with serving.begin(TOKENS, session=7) as second:
        assert second.snapshot_tokens == 8
    sequence.finish()
    serving.check_integrity()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((21, print), "depth is 21, outside 0..20"),
        ((-1, print), "depth is -1"),
        ((True, print), "depth must be an integer"),
        ((4, None), "write must be callable"),
    ],
)
def test_a_snapshot_of_what_is_not_there_is_refused(arguments: Any, message: str) -> None:
    serving, _ = make(num_slots=1)
    sequence = served(serving)
    before = state_of(serving)
    for method in (sequence.snapshot, sequence.tail_snapshot):
        with pytest.raises((TypeError, ValueError), match=message):
            method(*arguments)
    assert state_of(serving) == before
    sequence.finish()


@pytest.mark.parametrize("sibling", [3, (3,), (3, None), (21, print), [3, print], (1.5, print)])
def test_a_sibling_that_is_none_is_refused(sibling: Any) -> None:
    serving, _ = make(num_slots=2)
    sequence = served(serving)
    before = state_of(serving)
    with pytest.raises((TypeError, ValueError), match="sibling"):
        sequence.tail_snapshot(4, lambda slot: None, sibling=sibling)
    assert state_of(serving) == before
    sequence.finish()


# ---------------------------------------------------------------------------------------------------- spills, fault-ins


def spilling(**keywords: Any) -> tuple[ServingCache, ModelEngine, FlakyTier]:
    """One slot; the snapshot of TOKENS[:8] is spilled, that of [1, 2, 3, 4] is in the slot."""
    tier = FlakyTier(MemoryTier(10_000))
    serving, engine = make(num_slots=1, tier=tier, **keywords)
    for tokens, depth in ((TOKENS, 8), ([1, 2, 3, 4, 5], 4)):
        with served(serving, tokens) as sequence:
            assert sequence.snapshot(depth, engine.writer(depth))
    assert tier.calls["put"] == 1
    return serving, engine, tier


def test_a_spilled_snapshot_comes_back_with_its_bytes() -> None:
    serving, engine, _ = spilling()
    with serving.begin(TOKENS) as sequence:
        assert (sequence.compute_from, sequence.snapshot_slot) == (8, 0)
        engine.check_state(engine.slot_state(0), 8, "the slot")
    assert serving.stats().fault_ins == 1
    assert serving.stats().spills == 2
    serving.check_integrity()


def test_a_clean_copy_is_not_written_again() -> None:
    serving, engine, tier = spilling()
    for _ in range(3):
        for tokens, depth in ((TOKENS, 8), ([1, 2, 3, 4, 5], 4)):
            with serving.begin(tokens) as sequence:
                assert sequence.snapshot_tokens == depth
                assert sequence.snapshot_slot is not None
                engine.check_state(engine.slot_state(sequence.snapshot_slot), depth, "the slot")
    stats = serving.stats()
    assert (stats.spills, stats.clean_spills, tier.calls["put"]) == (7, 5, 2)
    serving.check_integrity()


def test_without_copies_the_tier_has_only_what_is_spilled() -> None:
    serving, _, tier = spilling(keep_copies=False)
    for tokens in (TOKENS, [1, 2, 3, 4, 5]):
        serving.begin(tokens).finish()
        assert len(tier.keys()) == 1
    assert tier.calls["put"] == 3
    serving.check_integrity()


def test_a_snapshot_that_the_tier_lost_is_forgotten_and_the_next_best_is_used() -> None:
    tier = FlakyTier(MemoryTier(10_000))
    serving, engine = make(num_slots=2, tier=tier)
    sequence = served(serving)
    for depth in (4, 8):
        assert sequence.snapshot(depth, engine.writer(depth))
    sequence.finish()
    with served(serving, [1, 2, 3, 4, 5]) as other:
        saved(other, 4)
        saved(other, 3)
    tier.plan.set(["lose"])
    with serving.begin(TOKENS) as second:
        assert second.compute_from == 4
    assert serving.stats().tier_misses == 1
    assert serving.stats().snapshots == 3
    assert serving.stats().requests == 3
    serving.check_integrity()


def test_a_tier_that_fails_costs_a_computation_and_not_the_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    serving, _, tier = spilling()
    # To make room, the slot's snapshot is spilled, and cannot be written either.
    for steps in (["error", "error", "error"], ["error"]):
        tier.plan.set(steps)
        with serving.begin(TOKENS) as sequence:
            assert (sequence.compute_from, sequence.snapshot_slot) == (0, None)
        serving.check_integrity()
    # Each kind of failure is logged once in a row.
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        f"the snapshot tier cannot be {what}" for what in ("read", "written", "deleted from")
    ]
    assert serving.stats().tier_errors >= 2
    assert serving.slots.num_free == 1
    tier.plan.set([])
    with serving.begin(TOKENS) as sequence:
        assert sequence.compute_from == 8
    serving.check_integrity()


@pytest.mark.parametrize("step", ["error", "late error", "lose"])
def test_a_snapshot_that_could_not_be_written_is_forgotten(step: str) -> None:
    tier = FlakyTier(MemoryTier(10_000))
    serving, engine = make(num_slots=1, tier=tier)
    with served(serving) as sequence:
        sequence.snapshot(8, engine.writer(8))
        tier.plan.set([step])
        sequence.snapshot(12, engine.writer(12))
    stats = serving.stats()
    assert (stats.snapshots, stats.lost_writes) == (1, 1)
    serving.check_integrity()
    assert tier.keys() == []


def test_a_mover_that_fails_on_the_way_in_leaves_the_snapshot_in_the_tier() -> None:
    serving, engine, _ = spilling()
    engine.plan.set(["ok", "halfway"])
    with pytest.raises(Exception, match="in the middle of a state"):
        serving.begin(TOKENS)
    serving.check_integrity()
    check_conservation(serving, [])
    with serving.begin(TOKENS) as sequence:
        assert sequence.compute_from == 8
    serving.check_integrity()


def test_a_mover_that_fails_on_the_way_out_loses_that_snapshot_alone() -> None:
    serving, engine, _ = spilling()
    engine.plan.set(["break like a tier"])
    with pytest.raises(Exception, match="told to"):
        serving.begin(TOKENS)
    serving.check_integrity()
    check_conservation(serving, [])
    assert serving.stats().snapshots == 1
    with serving.begin(TOKENS) as sequence:
        assert sequence.compute_from == 8


def test_a_state_that_is_overwritten_while_spilled_is_deleted_from_the_tier() -> None:
    serving, engine, tier = spilling()
    with served(serving) as sequence:
        sequence.release_snapshot()
        assert sequence.snapshot(8, engine.writer(9))
    assert len(tier.keys()) == 1
    serving.check_integrity()


def test_a_full_tier_loses_what_is_garbage_before_anything_that_is_wanted() -> None:
    tier = FlakyTier(MemoryTier(2 * ModelEngine.slot_bytes))
    serving, engine = make(num_slots=1, tier=tier)
    with served(serving, session=7) as sequence:
        sequence.snapshot(4, engine.writer(4))
        sequence.tail_snapshot(8, engine.writer(8))
        sequence.snapshot(12, engine.writer(12))
        assert len(tier.keys()) == 2
        # The earlier tail is garbage now, and the snapshot at 12 is spilled for the new one.
        sequence.tail_snapshot(16, engine.writer(16))
    with serving.begin(TOKENS, min_compute=16) as second:
        assert second.snapshot_tokens == 4
    serving.check_integrity()


def test_what_a_tier_has_discarded_goes_from_the_index() -> None:
    tier = MemoryTier(5 * ModelEngine.slot_bytes)
    serving, engine = make(num_slots=1, tier=tier)
    for first in range(100):
        with served(serving, [first, 1, 2, 3, 4]) as sequence:
            sequence.snapshot(4, engine.writer(4))
    assert serving.stats().snapshots <= 16
    serving.check_integrity()


def test_a_copy_that_the_tier_has_discarded_is_written_again() -> None:
    serving, engine, tier = spilling()
    with serving.begin(TOKENS) as sequence:
        assert sequence.snapshot_tokens == 8
    tier.lose_all()
    with served(serving, [5, 6, 7, 8, 9]) as other:
        other.snapshot(4, engine.writer(44))
    with serving.begin(TOKENS) as sequence:
        assert sequence.snapshot_tokens == 8
        engine.check_state(engine.slot_state(0), 8, "the slot")


@pytest.mark.parametrize("has_tier", [False, True])
def test_nothing_is_evicted_for_a_slot_while_every_one_is_read(has_tier: bool) -> None:
    serving, engine = make(num_slots=2, tier=MemoryTier(10_000) if has_tier else None)
    sequence = served(serving)
    for depth in (4, 8):
        sequence.snapshot(depth, engine.writer(depth))
    readers = [serving.begin(TOKENS), serving.begin(TOKENS, min_compute=16)]
    assert [reader.snapshot_tokens for reader in readers] == [8, 4]
    assert not saved(sequence, 12)
    assert serving.stats().snapshots == 2
    assert serving.stats().spills == 0
    for reader in readers:
        reader.finish()
    sequence.finish()
    serving.check_integrity()


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_sibling_is_left_out_rather_than_put_in_the_place_of_its_tail(has_tier: bool) -> None:
    serving, engine = make(num_slots=1, tier=MemoryTier(10_000) if has_tier else None)
    with served(serving, session=7) as sequence:
        assert sequence.tail_snapshot(16, engine.writer(16), sibling=(12, engine.writer(12)))
    with serving.begin(TOKENS, session=7) as second:
        assert second.snapshot_tokens == 16
    serving.check_integrity()


def test_one_call_pays_for_a_few_deletions_alone() -> None:
    tier = FlakyTier(MemoryTier(100_000))
    serving, engine = make(num_slots=1, tier=tier)
    for first in range(100):
        with served(serving, [first, 1, 2, 3, 4], session=first + 1) as sequence:
            sequence.tail_snapshot(4, engine.writer(4))
    serving._store.forgotten([], [])
    with serving._lock:
        cleared = serving.cache.drop_adapter(0)  # type: ignore[union-attr]
        serving._drop_blocks(cleared.blocks)
        serving._store.forgotten(cleared.snapshot_slots, cleared.tier_keys.tolist())
    before = tier.calls["delete"]
    sequence = serving.begin(TOKENS)
    assert tier.calls["delete"] == before
    sequence.finish()
    assert before < tier.calls["delete"] <= before + 64
    serving.check_integrity()


def test_a_request_finds_out_about_a_few_lost_snapshots_and_then_computes() -> None:
    tier = FlakyTier(MemoryTier(100_000))
    serving, engine = make(num_blocks=40, num_slots=1, tier=tier)
    tokens = list(range(100, 200))
    with served(serving, tokens) as sequence:
        for depth in range(4, 84, 4):
            sequence.snapshot(depth, engine.writer(depth))
    tier.lose_all()
    before = tier.calls["get"]
    serving.begin(tokens, min_compute=20).finish()
    assert tier.calls["get"] <= before + 8
    serving.check_integrity()


def test_shallow_snapshots_are_dropped_and_not_spilled() -> None:
    tier = MemoryTier(10_000)
    serving, engine = make(num_slots=1, tier=tier, spill_min_tokens=9)
    with served(serving) as sequence:
        for depth in (8, 12, 16):
            sequence.snapshot(depth, engine.writer(depth))
    assert serving.stats().spills == 1
    assert len(tier.keys()) == 1
    serving.check_integrity()


def test_what_could_not_be_deleted_is_deleted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr("metrale_numba.serving.snapshot_store.time.monotonic", lambda: seconds[0])
    serving, _, tier = spilling()
    tier.plan.set(["error"])
    serving.clear()
    serving.begin([1]).finish()
    assert len(tier.keys()) == 1
    seconds[0] = 10.0
    serving.begin([1]).finish()
    assert tier.keys() == []
    serving.check_integrity()


# ----------------------------------------------------------------------------------------------------------------- ends


def test_an_exception_aborts_and_gives_everything_back() -> None:
    serving, _ = make()
    sequence = serving.begin(TOKENS)

    def serve() -> None:
        with sequence:
            sequence.allocate()
            raise KeyError

    with pytest.raises(KeyError):
        serve()
    assert sequence.is_ended
    stats = serving.stats()
    assert (stats.aborted, stats.finished, stats.running, stats.free_blocks) == (1, 0, 0, 16)


def test_ending_twice_gives_back_once() -> None:
    serving, _ = make()
    sequence = served(serving)
    sequence.finish()
    before = state_of(serving)
    sequence.finish()
    sequence.abort()
    assert state_of(serving) == before
    assert serving.stats().finished == 1
    serving.check_integrity()


def test_nothing_can_be_asked_of_a_sequence_after_its_end() -> None:
    serving, _ = make(num_slots=1, num_disk_blocks=2)
    sequence = served(serving)
    sequence.finish()
    before = state_of(serving)
    calls: dict[str, tuple[Any, ...]] = {
        "append": ([1],),
        "allocate": (1,),
        "publish": (0,),
        "snapshot": (4, print),
        "tail_snapshot": (4, print),
        "release_snapshot": (),
        "set_disk_blocks": (0, []),
    }
    for name, arguments in calls.items():
        with pytest.raises(SequenceEnded, match="has come to its end"):
            getattr(sequence, name)(*arguments)
    assert state_of(serving) == before
    assert issubclass(SequenceEnded, MetraleError)
    assert sequence.block_table.tolist() == []


def test_a_forgotten_sequence_is_given_back_with_a_warning() -> None:
    serving, _ = make()
    served(serving).finish()

    def lose() -> None:
        serving.begin(TOKENS).allocate()
        gc.collect()

    with pytest.warns(ResourceWarning, match="a sequence of 20 tokens was lost without an end"):
        lose()
    assert serving.stats().forgotten == 1
    assert serving.num_free_blocks == 16
    serving.check_integrity()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_sequence_cannot_be_copied(copied: Any) -> None:
    serving, _ = make()
    with served(serving) as sequence, pytest.raises(TypeError, match="a Sequence cannot be copied"):
        copied(sequence)
    serving.check_integrity()


def test_a_retry_of_another_serving_cache_is_refused() -> None:
    (serving, _), (other, _) = make(), make()
    with other.begin(TOKENS) as sequence, pytest.raises(ValueError, match="retry is a sequence of another"):
        serving.begin(TOKENS, retry=sequence)


def test_a_cache_is_served_once() -> None:
    tree = RadixTree(block_size=4)
    ServingCache(tree, 4)
    with pytest.raises(ValueError, match="cache has a serving cache already"):
        ServingCache(tree, 4)


def test_a_retried_request_is_counted_once() -> None:
    serving, _ = make()
    served(serving).finish()
    refused = serving.begin(TOKENS)
    refused.abort()
    preempted = serving.begin(TOKENS, retry=refused)
    preempted.allocate()
    preempted.abort()
    serving.begin(TOKENS, retry=preempted).finish()
    serving.begin(TOKENS, retry=True).finish()
    stats = serving.stats()
    assert (stats.requests, stats.queried_tokens, stats.hit_tokens) == (2, 40, 16)
    assert (stats.finished, stats.aborted, stats.refused) == (3, 1, 1)
    assert serving.cache.stats_detail().cache_hits == 1  # type: ignore[union-attr]


# -------------------------------------------------------------------------------------------------- clear and adapters


@pytest.mark.parametrize("forget", [lambda serving: serving.clear(), lambda serving: serving.drop_adapter(0)])
def test_a_sequence_that_outlives_its_epoch_touches_nothing_of_the_new_one(forget: Any) -> None:
    serving, engine = make(num_slots=2)
    old = served(serving)
    saved(old, 8)
    forget(serving)
    assert old.is_stale
    serving.check_integrity()
    new = served(serving)
    assert saved(new, 8)
    old.append([5, 6, 7, 8])
    old.allocate()
    assert old.publish(24) == 20
    assert not saved(old, 12)
    assert not old.tail_snapshot(12, lambda slot: None)
    serving.check_integrity()
    old.finish()
    serving.check_integrity()
    with serving.begin(TOKENS) as third:
        assert third.block_table.tolist() == new.block_table[:4].tolist()
    new.finish()
    serving.clear()
    assert (serving.blocks.num_used, serving.slots.num_used) == (0, 0)
    assert engine.calls["read_slot"] == 0


def test_dropping_an_adapter_leaves_the_others() -> None:
    serving, _ = make(num_slots=2)
    for adapter in (1, 2):
        with served(serving, adapter=adapter) as sequence:
            saved(sequence, 8)
    with serving.begin(TOKENS, adapter=2) as running:
        serving.drop_adapter(1)
        assert not running.is_stale
    assert serving.slots.num_used == 1
    with serving.begin(TOKENS, adapter=1) as sequence:
        assert sequence.cached_tokens == 0
    serving.check_integrity()


def test_after_clear_old_bytes_in_the_tier_are_never_read() -> None:
    serving, engine, tier = spilling()
    tier.plan.set(["error"])
    serving.clear()
    # The old bytes are still there; the same prefix is spilled anew, and cannot be written.
    with served(serving) as sequence:
        sequence.snapshot(8, engine.writer(88))
        tier.plan.set(["error"])
        sequence.snapshot(12, engine.writer(120))
    with serving.begin(TOKENS) as sequence:
        assert sequence.snapshot_tokens == 12
    assert tier.calls["get"] == 0
    serving.check_integrity()


# -------------------------------------------------------------------------------------------------- without any caching


def test_with_caching_off_everything_works_and_nothing_is_shared() -> None:
    serving = ServingCache(NoPrefixCaching(block_size=4), 16, slots=2)
    for _ in range(2):
        with served(serving) as sequence:
            assert sequence.cached_tokens == sequence.published == 0
            assert not saved(sequence, 8)
            assert not sequence.is_stale
        serving.check_integrity()
    serving.clear()
    serving.drop_adapter(3)
    assert serving.blocks.num_free == serving.num_free_blocks == 16
    assert serving.stats().hit_tokens == 0
    with serving.begin(range(100)) as sequence, pytest.raises(OutOfBlocks):
        sequence.allocate()


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tokens": "abc"}, "tokens"),
        ({"tokens": [2**32]}, r"tokens\[0\] is 4294967296"),
        ({"session": -1}, "session is -1"),
        ({"session": 2**64}, "session is"),
        ({"adapter": 1.5}, "adapter must be an integer"),
        ({"min_compute": -1}, "min_compute is -1"),
        ({"min_compute": True}, "min_compute must be an integer"),
        ({"retry": 1}, "retry must be a bool"),
    ],
)
def test_a_refused_begin_changes_nothing(keywords: dict[str, Any], message: str) -> None:
    serving, _ = make()
    served(serving).finish()
    before, stats = state_of(serving), serving.stats()
    with pytest.raises((TypeError, ValueError), match=message):
        serving.begin(**{"tokens": TOKENS, **keywords})
    assert state_of(serving) == before
    assert serving.stats() == stats


class Lacking:
    persistent = False
    put = get = delete = contains = keys = close = print


def filled() -> RadixTree:
    cache = RadixTree()
    cache.insert(range(16), [0])
    return cache


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"cache": None}, "cache must be a RadixTree or a NoPrefixCaching, not NoneType"),
        ({"cache": filled()}, "cache must be empty"),
        ({"blocks": -1}, "blocks is -1"),
        ({"blocks": 2.0}, "blocks must be an integer"),
        ({"blocks": SnapshotPool(3)}, "blocks must be an integer"),
        ({"slots": BlockPool(3)}, "slots must be an integer"),
        ({"disk_blocks": "4"}, "disk_blocks must be an integer"),
        ({"mover": object()}, "mover must have a method read_slot, which object lacks"),
        ({"tier": object()}, "tier must have a method put, which object lacks"),
        ({"tier": Lacking()}, "tier must have bytes_used, which Lacking lacks"),
        ({"tier": MemoryTier(1)}, "mover must be given with a tier"),
        ({"cache": RadixTree(partial_tail_sharing=True)}, "mover must be given with partial-tail sharing"),
        ({"model": b"x"}, "model must be a str"),
        ({"dtype": None}, "dtype must be a str"),
        ({"rank": -1}, "rank is -1"),
        ({"spill_min_tokens": -1}, "spill_min_tokens is -1"),
        ({"keep_copies": 1}, "keep_copies must be a bool"),
        ({"hybrid": 1}, "hybrid must be a bool"),
    ],
)
def test_what_does_not_fit_together_is_refused(keywords: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"cache": RadixTree(), "blocks": 4, **keywords}
    with pytest.raises((TypeError, ValueError), match=message):
        ServingCache(**arguments)


# ----------------------------------------------------------------------------------------------------------- integrity


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda serving: serving.blocks.inc_ref([0]), "block 0 has 3 references, but 2 owners"),
        (lambda serving: serving.blocks.allocate(1), "block 5 has 1 references, but 0 owners"),
        (lambda serving: serving.blocks.dec_ref([1]), "block 1 has 1 references, but 2 owners"),
        (lambda serving: serving.slots.allocate(1), "slot 1 has 1 references, but 0 owners"),
        (lambda serving: serving.disk_blocks.allocate(1), "disk block 0 has 1 references, but 0 owners"),
        (lambda serving: serving.cache.evict_snapshot_to_tier(0), "slot 0 has 1 references, but 0 owners"),
        (lambda serving: serving._store._stored.update({5: None}), "spilled keys"),
        (lambda serving: serving.cache.release(TOKENS) or serving.cache.evict(1), "block 4 has 2 references, but 1"),
    ],
)
def test_a_wrong_book_is_named(damage: Any, message: str) -> None:
    serving, _ = make(num_slots=2, num_disk_blocks=2)
    sequence = served(serving)
    saved(sequence, 8)
    serving.check_integrity()
    damage(serving)
    with pytest.raises(IntegrityError, match=message):
        serving.check_integrity()
    sequence._holdings.is_ended = True


def test_a_lost_hold_in_the_cache_is_named() -> None:
    serving, _ = make()
    sequence = served(serving)
    serving.cache.release(TOKENS)
    evicted = serving.cache.evict(1)
    serving.blocks.dec_ref(evicted.physical)
    with pytest.raises(IntegrityError, match="a sequence holds 20 tokens, but the cache has 16 of them"):
        serving.check_integrity()
    sequence._holdings.is_ended = True


def test_a_hold_that_no_sequence_has_is_named() -> None:
    serving, _ = make()
    served(serving).finish()
    assert isinstance(serving.cache, RadixTree)
    serving.cache.pin("system", TOKENS[:8])
    serving.check_integrity()
    serving.cache.lookup(TOKENS)
    message = "nodes of the cache are held 7 times, by sequences 0 times and by pins 2 times"
    with pytest.raises(IntegrityError, match=message):
        serving.check_integrity()


# ------------------------------------------------------------------------------------------------------ interruptions


class Interrupted(BaseException):
    """What a signal handler raises."""


def interrupt(monkeypatch: pytest.MonkeyPatch, pool: Any, method: str) -> None:
    """Let the next call of a pool's method end before it has done anything."""

    def once(ids: Any) -> None:
        monkeypatch.undo()
        raise Interrupted

    monkeypatch.setattr(pool, method, once)


def test_blocks_of_an_interrupted_publish_are_not_given_to_anybody_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving, _ = make(num_blocks=5)
    sequence = serving.begin(TOKENS)
    sequence.allocate()
    interrupt(monkeypatch, serving.blocks, "inc_ref")
    with pytest.raises(Interrupted):
        sequence.publish(20)
    sequence.abort()
    assert "an exception cut a call short" in caplog.text
    assert serving.blocks.ref_counts().tolist() == [1] * 5
    with serving.begin(TOKENS) as second:
        assert second.block_table.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["inc_ref", "dec_ref", "allocate"])
@pytest.mark.parametrize("pool", ["blocks", "slots"])
def test_after_an_interruption_anywhere_no_block_or_slot_is_lost(
    method: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, engine = make(num_slots=2, tier=MemoryTier(10_000))
    for first in range(6):
        # Once in each of what a request does, one after the other.
        interrupt(monkeypatch, getattr(serving, pool), method)
        try:
            with serving.begin([first, *TOKENS], session=1) as sequence:
                sequence.allocate()
                sequence.publish(20)
                sequence.snapshot(8, engine.writer(1))
                sequence.tail_snapshot(16, engine.writer(1))
        except Interrupted:
            pass
        monkeypatch.undo()
    serving.begin([1]).finish()
    serving.clear()
    assert (serving.blocks.num_used, serving.slots.num_used) == (0, 0)
    serving.check_integrity()


def test_it_prints_what_is_in_use() -> None:
    serving, _ = make(num_slots=2)
    with served(serving) as sequence:
        assert repr(serving) == "<ServingCache: 1 sequences, 5 of 16 blocks, 0 of 2 slots in use>"
        assert repr(sequence) == "<Sequence: 20 tokens, 0 cached, 5 blocks, running>"
        serving.clear()
        assert repr(sequence).endswith("stale>")
    assert repr(sequence).endswith("ended>")
