"""Snapshots of hybrid models in a replay: where they are taken, and what they came to, against a slow model."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
from model import Check, Model

from metrale_numba.replay import Request, workload
from metrale_numba.replay.engine import SimulatedEngine
from metrale_numba.replay.hybrid import HybridCounts, PlannedSnapshots, SnapshotPlan, SnapshotRoom, gains
from metrale_numba.replay.timed import ServiceModel, TimedReplay

SERVICE = ServiceModel(prefill_rate=1_000, decode_rate=10, at_once=8)
AT_END = SnapshotPlan()
NOWHERE = SnapshotPlan(at=frozenset())


def prompt(ids: list[int], *, session: int = 0, tokens: int | None = None, adapter: int = 0) -> Request:
    """A prompt of so many blocks of 100 tokens, or of fewer tokens in the last, and an answer of none."""
    length = 100 * len(ids) if tokens is None else tokens
    return Request(0, length, 0, np.array(ids, np.uint32), 100, session=session, adapter=adapter)


def at(*places: str, every: int = 0) -> SnapshotPlan:
    return SnapshotPlan(every, frozenset(places))


def played(requests: list[Request], room: SnapshotRoom, blocks: int | None = None) -> TimedReplay:
    replay = TimedReplay(SimulatedEngine(blocks, snapshots=room), SERVICE)
    for each in requests:
        replay.play(each)
        replay.engine.serving.check_integrity()
    return replay


def counted(requests: list[Request], room: SnapshotRoom, blocks: int | None = None) -> HybridCounts:
    counts = played(requests, room, blocks).result().engine.hybrid
    assert counts is not None
    return counts


# Where snapshots are taken


@pytest.mark.parametrize(
    ("plan", "restored", "matched", "whole", "session", "expected"),
    [
        (NOWHERE, 0, 4, 10, 1, PlannedSnapshots([])),
        (at("prompt-end"), 0, 0, 10, 0, PlannedSnapshots([10])),
        (at("prompt-end"), 10, 10, 10, 0, PlannedSnapshots([])),
        (at("prompt-end"), 0, 0, 0, 0, PlannedSnapshots([])),
        (at(every=4), 0, 0, 10, 0, PlannedSnapshots([4, 8])),
        (at(every=4), 4, 4, 12, 0, PlannedSnapshots([8, 12])),
        (at(every=4), 5, 6, 12, 0, PlannedSnapshots([8, 12])),
        (at("prompt-end", every=4), 0, 0, 8, 0, PlannedSnapshots([4, 8])),
        (at("fork"), 0, 0, 10, 0, PlannedSnapshots([])),
        (at("fork"), 0, 6, 10, 0, PlannedSnapshots([6])),
        (at("fork"), 6, 6, 10, 0, PlannedSnapshots([])),
        (at("fork"), 0, 11, 10, 0, PlannedSnapshots([10])),
        (at("fork", "prompt-end", every=3), 2, 5, 7, 0, PlannedSnapshots([3, 5, 6, 7])),
        (at("tail"), 0, 0, 10, 0, PlannedSnapshots([])),
        (at("tail"), 0, 0, 10, 1, PlannedSnapshots([], 10, 9)),
        (at("tail"), 9, 9, 10, 1, PlannedSnapshots([], 10)),
        (at("tail"), 10, 10, 10, 1, PlannedSnapshots([])),
        (at("tail"), 0, 0, 1, 1, PlannedSnapshots([], 1)),
        (at("tail", "prompt-end"), 0, 0, 10, 1, PlannedSnapshots([], 10, 9)),
        (at("tail", "prompt-end"), 0, 0, 10, 0, PlannedSnapshots([10])),
        (at("tail", every=5), 0, 0, 10, 1, PlannedSnapshots([5, 10])),
        (at("tail", every=3), 0, 0, 10, 1, PlannedSnapshots([3, 6, 9], 10)),
        (at("tail", "fork"), 0, 9, 10, 1, PlannedSnapshots([9], 10)),
    ],
)
def test_a_plan_says_where_a_prompt_has_its_snapshots(
    plan: SnapshotPlan, restored: int, matched: int, whole: int, session: int, expected: PlannedSnapshots
) -> None:
    assert plan.of_prompt(restored, matched, whole, session) == expected


# Examples by hand


def test_without_a_snapshot_all_that_hit_is_computed_again() -> None:
    replay = played([prompt([1, 2, 3]), prompt([1, 2, 3, 4])], SnapshotRoom(8, plan=NOWHERE))
    engine = replay.result().engine
    assert (engine.hit_tokens, engine.computed_tokens) == (300, 700)
    assert engine.hybrid == HybridCounts(recompute_tokens=300)
    assert replay.first_token_seconds.tolist() == pytest.approx([0.3, 0.4])


def test_computing_begins_at_the_end_of_an_earlier_prompt() -> None:
    replay = played([prompt([1, 2, 3]), prompt([1, 2, 3, 4])], SnapshotRoom(8))
    engine = replay.result().engine
    assert (engine.hit_tokens, engine.computed_tokens) == (300, 400)
    assert engine.hybrid == HybridCounts(usable_hit_tokens=300, snapshot_hits=1, saved_snapshots=2)
    assert replay.first_token_seconds.tolist() == pytest.approx([0.3, 0.1])


def test_a_snapshot_is_taken_at_the_end_of_a_block_and_not_inside_it() -> None:
    # The first prompt ends in the middle of its third block, which is found again as it is.
    counts = counted([prompt([1, 2, 3], tokens=250), prompt([1, 2, 3], tokens=250)], SnapshotRoom(8))
    assert (counts.usable_hit_tokens, counts.recompute_tokens) == (200, 50)


def test_a_prompt_that_is_restored_whole_computes_one_token() -> None:
    engine = played([prompt([1, 2])] * 2, SnapshotRoom(8)).result().engine
    assert engine.computed_tokens == 201


def test_a_match_that_ends_between_two_snapshots_computes_from_the_one_before() -> None:
    plan = at(every=2)
    counts = counted([prompt([1, 2, 3, 4, 5]), prompt([1, 2, 3, 9])], SnapshotRoom(8, plan=plan))
    assert (counts.usable_hit_tokens, counts.recompute_tokens, counts.saved_snapshots) == (200, 100, 3)


def test_a_prefix_that_two_prompts_share_has_a_snapshot_for_the_third() -> None:
    prompts = [prompt([1, 2, 3, 4]), prompt([1, 2, 8]), prompt([1, 2, 9])]
    counts = counted(prompts, SnapshotRoom(8, plan=at("fork")))
    assert (counts.usable_hit_tokens, counts.recompute_tokens, counts.saved_snapshots) == (200, 200, 1)


def test_a_tail_is_for_its_session_and_its_sibling_for_everybody() -> None:
    first = prompt([1, 2, 3], session=1)
    room = SnapshotRoom(8, plan=at("tail"))
    assert counted([first, prompt([1, 2, 3, 4], session=1)], room).usable_hit_tokens == 300
    assert counted([first, prompt([1, 2, 3, 4], session=2)], room).usable_hit_tokens == 200
    assert counted([first, prompt([1, 2, 3, 4])], room).usable_hit_tokens == 200


def test_a_session_has_one_tail_and_one_sibling_however_many_turns() -> None:
    turns = [prompt(list(range(2 * turn)), session=1) for turn in range(1, 9)]
    replay = played(turns, SnapshotRoom(8, plan=at("tail")))
    assert replay.engine.serving.stats().snapshots == 2


def test_where_slots_are_short_the_snapshot_goes_that_was_not_used_for_longest() -> None:
    prompts = [prompt([1, 2]), prompt([3, 4]), prompt([1, 2, 5]), prompt([3, 4, 6]), prompt([7])]
    counts = counted(prompts, SnapshotRoom(2))
    # [1 2] is restored, then its end displaces that of [3 4].
    assert (counts.usable_hit_tokens, counts.recompute_tokens) == (200, 200)


def test_without_slots_no_snapshot_is_ever_taken() -> None:
    counts = counted([prompt([1, 2]), prompt([1, 2, 3])], SnapshotRoom(0))
    assert counts == HybridCounts(recompute_tokens=200, refused_snapshots=2)


def test_a_spilled_snapshot_comes_back_from_the_tier() -> None:
    prompts = [prompt([1, 2]), prompt([3, 4]), prompt([1, 2, 5])]
    counts = counted(prompts, SnapshotRoom(1, 4))
    # The third spills the end of [3 4] for what it fetches, and then that for its own end.
    assert counts == HybridCounts(200, 0, 1, 3, 0, spills=3, fault_ins=1, tier_hits=1)


def test_a_tier_has_room_for_so_many_snapshots_and_no_more() -> None:
    prompts = [prompt([1, 2]), prompt([3, 4]), prompt([5, 6]), prompt([7, 8]), prompt([1, 2, 9])]
    assert counted(prompts, SnapshotRoom(1, 3)).usable_hit_tokens == 200
    small = counted(prompts, SnapshotRoom(1, 2))
    # Each of the last two spills is one too many, and finds out which snapshot has gone for it.
    assert (small.usable_hit_tokens, small.tier_hits, small.tier_misses) == (0, 0, 2)


def test_endless_slots_keep_every_snapshot() -> None:
    prompts = [prompt([number, number + 1]) for number in range(0, 6_000, 2)]
    replay = played_without_checks([*prompts, prompt([0, 1, 9])], SnapshotRoom(None))
    counts = replay.result().engine.hybrid
    assert counts is not None
    assert (counts.saved_snapshots, counts.usable_hit_tokens) == (3_001, 200)


def test_endless_slots_keep_every_tail_and_its_sibling() -> None:
    # The first has no sibling, so that a tail takes the last slot before there are more.
    prompts = [prompt([0], session=1)]
    prompts += [prompt([number, number, number], session=number) for number in range(2, 602)]
    replay = played_without_checks(prompts, SnapshotRoom(None, plan=at("tail")))
    assert replay.engine.serving.stats().snapshots == 1_201


def played_without_checks(requests: list[Request], room: SnapshotRoom) -> TimedReplay:
    replay = TimedReplay(SimulatedEngine(None, snapshots=room), SERVICE)
    for each in requests:
        replay.play(each)
    replay.engine.serving.check_integrity()
    return replay


def test_snapshots_are_of_one_adapter() -> None:
    counts = counted([prompt([1, 2]), prompt([1, 2, 3], adapter=1), prompt([1, 2, 3])], SnapshotRoom(8))
    assert counts.usable_hit_tokens == 200


def test_a_model_without_state_has_no_such_counts() -> None:
    replay = TimedReplay(SimulatedEngine(None), SERVICE)
    assert replay.result().engine.hybrid is None


def test_without_caching_a_hybrid_model_saves_nothing() -> None:
    replay = TimedReplay(SimulatedEngine(None, caching=False, snapshots=SnapshotRoom(4)), SERVICE)
    for each in (prompt([1, 2]), prompt([1, 2])):
        replay.play(each)
    engine = replay.result().engine
    assert (engine.computed_tokens, engine.hybrid) == (400, HybridCounts())


def test_gains_are_per_unit_since_the_amount_before() -> None:
    assert gains([0, 4, 16], [0, 100, 400]) == [None, 25.0, 25.0]
    assert gains([3], [7]) == [None]
    assert gains([1.0, 1.5], [10, 5]) == [None, -10.0]


# Against a slow model


class Figures(NamedTuple):
    hit_blocks: int
    usable_tokens: int
    evicted_blocks: int
    snapshot_hits: int
    saved: int
    spills: int
    fault_ins: int
    tier_misses: int


# So many snapshots that have gone one request finds out about, and each write.
MOST_MISSES = 8
PROBES = 2


class SlowEngine:
    """What an engine does, one request at a time, on the slow model of the cache, with sets for its pools.

    Tokens are blocks here. Of the tier it knows which snapshots are in it, and in which order they were used; and it
    remembers which ones it believes to be there, in the order in which it will ask for them.
    """

    def __init__(self, blocks: int, slots: int, in_tier: int, every: int, places: set[str]) -> None:
        self.cache = Model(block_size=1)
        self.free_blocks = list(range(blocks))
        self.free_slots = list(range(slots))
        self.in_tier, self.every, self.places = in_tier, every, places
        self.tier: OrderedDict[Check, None] = OrderedDict()
        self.staged: list[Check] = []
        self.believed: list[Check] = []
        self.garbage: set[Check] = set()
        self.copied: set[Check] = set()
        self.states: dict[int, Check] = {}
        self.counts: Counter[str] = Counter()

    def figures(self) -> Figures:
        return Figures(*(self.counts[name] for name in Figures._fields))

    def serve(self, request: Request) -> None:
        ids = tuple(request.hash_ids.tolist())
        whole = request.input_length // request.tokens_per_id
        matched, restored, table = self._look_up(ids, request.session)
        lacking = -(-(request.input_length + request.output_length) // request.tokens_per_id) - len(table)
        short = lacking - len(self.free_blocks)
        if short > 0:
            gone = self.cache.evict(short).physical
            assert len(gone) == short
            self.free_blocks += gone
            self.counts["evicted_blocks"] += short
        own = [self.free_blocks.pop() for _ in range(lacking)]
        acquired = self.cache.insert(ids, [*table, *own][: len(ids)], matched_tokens=matched)
        self._save(ids, matched, restored, whole, request.session)
        self.cache.release(ids)
        self._settle()
        self.free_blocks += set(own) - set(acquired.blocks)
        self.counts["hit_blocks"] += matched
        # The last block of a prompt may be full in another one.
        self.counts["usable_tokens"] += min(restored * request.tokens_per_id, request.input_length)
        self.counts["snapshot_hits"] += restored > 0

    def _look_up(self, ids: tuple[int, ...], session: int) -> tuple[int, int, list[int]]:
        """Begin a request: what matched, how much of it is restored, and the blocks of the match."""
        misses = 0
        while True:
            match = self.cache.lookup(ids, session_hash=session, record=misses == 0)
            if match.ssm_snapshot is not None or match.ssm_snapshot_tier_key is None:
                self._write_staged()
                return match.matched_tokens, match.ssm_snapshot_tokens, match.matched_blocks
            if misses == MOST_MISSES:
                self.counts["given_up"] += 1
                self._write_staged()
                return match.matched_tokens, 0, match.matched_blocks
            check = match.ssm_snapshot_check
            slot = self._take_slot()
            assert slot is not None
            assert check is not None
            if check in self.staged or check in self.tier:
                if check not in self.staged:
                    self.tier.move_to_end(check)
                    self.believed.remove(check)
                    self.copied.add(check)
                assert self.cache.promote_snapshot(match.ssm_snapshot_tier_key, slot, check)
                self.states[slot] = check
                self.counts["fault_ins"] += 1
                self._write_staged()
                return match.matched_tokens, match.ssm_snapshot_tier_tokens, match.matched_blocks
            misses += 1
            self.counts["tier_misses"] += 1
            assert self.cache.forget_snapshot_tier_key(match.ssm_snapshot_tier_key)
            self._forget_spilled(check)
            self.free_slots.append(slot)
            self.cache.release(ids[: match.matched_tokens])

    def _take_slot(self) -> int | None:
        """Take a slot from a snapshot if none is free; what goes to the tier is written by :meth:`_write_staged`."""
        if self.free_slots:
            return self.free_slots.pop()
        if self.in_tier == 0:
            slot = self.cache.evict_snapshot_lru()
            if slot is not None:
                del self.states[slot]
            return slot
        gone = self.cache.evict_snapshot_to_tier(0)
        if gone is None:
            return None
        self.staged.append(self.states.pop(gone.slot))
        self.counts["spills"] += 1
        return gone.slot

    def _settle(self) -> None:
        """What ends each call but the look-up."""
        self._delete_garbage()
        self._write_staged()
        self._delete_garbage()

    def _delete_garbage(self) -> None:
        # One call makes 32 deletions at most, but from one to the next there are never as many.
        assert len(self.garbage) <= 32
        for check in self.garbage:
            self.tier.pop(check, None)
        self.garbage.clear()

    def _write_staged(self) -> None:
        while self.staged:
            check = self.staged.pop(0)
            # What came from the tier may be there still, and then it is not written again.
            if check not in self.copied or check not in self.tier:
                self.tier.pop(check, None)
                self.tier[check] = None
                while len(self.tier) > self.in_tier:
                    self.tier.popitem(last=False)
            if check in self.states.values():
                # It was wanted again before it was written.
                self.copied.add(check)
            else:
                self.copied.discard(check)
                self.believed.append(check)
            self._probe()

    def _probe(self) -> None:
        """Ask the tier for the two that were not asked for longest."""
        for check in self.believed[:PROBES]:
            self.believed.remove(check)
            if check in self.tier:
                self.believed.append(check)
            else:
                self.counts["tier_misses"] += 1
                (key,) = (entry.key for entry in self.cache.entries if entry.spilled and entry.check == check)
                assert self.cache.forget_snapshot_tier_key(key)

    def _forget_spilled(self, check: Check) -> None:
        """Of a spilled snapshot that is no more, the tier keeps nothing."""
        if check in self.staged:
            self.staged.remove(check)
            self._forget_copy(check)
        else:
            self.believed.remove(check)
            self.garbage.add(check)

    def _forget_copy(self, check: Check) -> None:
        """Nor of one that came back from there."""
        if check in self.copied:
            self.copied.remove(check)
            self.garbage.add(check)

    def _save(self, ids: tuple[int, ...], matched: int, restored: int, whole: int, session: int) -> None:
        depths = {depth for depth in range(restored + 1, whole + 1) if self.every and depth % self.every == 0}
        if "fork" in self.places and min(matched, whole) > restored:
            depths.add(min(matched, whole))
        has_tail = "tail" in self.places and session != 0 and whole > restored
        if "prompt-end" in self.places and not has_tail and whole > restored:
            depths.add(whole)
        has_tail = has_tail and whole not in depths
        for depth in sorted(depths):
            self._register(session, [("shared", ids[:depth])])
        if has_tail:
            sibling = whole - 1
            has_sibling = sibling > restored and sibling not in depths
            self._register(session, [("tail", ids[:whole]), *[("sibling", ids[:sibling])] * has_sibling])

    def _register(self, session: int, planned: list[tuple[str, tuple[int, ...]]]) -> None:
        """Save as many of these as there are slots for; they count as one."""
        taken: list[int] = []
        while len(taken) < len(planned) and (slot := self._take_slot()) is not None:
            taken.append(slot)
        self.counts["saved"] += bool(taken)
        before = self._spilled()
        all_freed = []
        for slot, (kind, ids) in zip(taken, planned, strict=False):
            if kind == "tail":
                freed = self.cache.insert_tail_snapshot(ids, slot, session_hash=session)
            elif kind == "sibling":
                freed = [self.cache.insert_tail_sibling_snapshot(ids, slot, session_hash=session)]
            else:
                freed = [self.cache.insert_intermediate_snapshot(ids, [], (), None, slot, session_hash=session)]
            all_freed.append([old for old in freed if old is not None])
        for slot, (_, ids), freed in zip(taken, planned, all_freed, strict=False):
            for old in freed:
                self._forget_copy(self.states.pop(old))
                self.free_slots.append(old)
            self.states[slot] = (0, ids)
        # Overwritten, or gone with its tail.
        for check in before - self._spilled():
            self._forget_spilled(check)
        self._settle()

    def _spilled(self) -> set[Check]:
        return {entry.check for entry in self.cache.entries if entry.spilled}


def tangled(seed: int, requests: int) -> list[Request]:
    """Prompts that share prefixes, branch, go on and come again, under a few sessions and without one."""
    draw = np.random.default_rng(seed)
    prompts: list[tuple[int, ...]] = [()]
    made = []
    for _ in range(requests):
        base = prompts[int(draw.integers(len(prompts)))]
        kept = base[: int(draw.integers(len(base) + 1))] if draw.integers(3) == 0 else base
        ids = (*kept, *(int(each) for each in draw.integers(5, size=draw.integers(1, 5))))[:12]
        prompts.append(ids)
        tokens = 100 * len(ids) - int(draw.integers(0, 60))
        answer = int(draw.integers(0, 150))
        session = int(draw.integers(0, 5))
        made.append(Request(0, tokens, answer, np.array(ids, np.uint32), 100, session=session))
    return made


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("slots", "in_tier"), [(1, 0), (3, 0), (8, 0), (1, 3), (2, 3), (5, 10), (60, 0)])
@pytest.mark.parametrize(
    "plan",
    [at("prompt-end"), at("tail"), at("fork"), at(every=3), at("prompt-end", "tail", "fork", every=2)],
    ids=["prompt-end", "tail", "fork", "every", "all"],
)
@pytest.mark.parametrize("blocks", [30, 1_000])
def test_counts_are_those_of_a_slow_engine(
    seed: int, slots: int, in_tier: int, plan: SnapshotPlan, blocks: int
) -> None:
    compare_with_slow(tangled(seed, 80), SnapshotRoom(slots, in_tier, plan), blocks)


def test_a_request_gives_up_looking_for_a_snapshot_as_in_a_slow_engine() -> None:
    # Every block has a snapshot, and the tier discards them faster than anybody finds out.
    draw = np.random.default_rng(0)
    requests = [prompt(list(range(start, start + 30))) for start in (100 * draw.integers(6, size=60)).tolist()]
    slow = compare_with_slow(requests, SnapshotRoom(2, 80, at(every=1)), 1_000)
    assert slow.counts["given_up"] > 0


def compare_with_slow(requests: list[Request], room: SnapshotRoom, blocks: int) -> SlowEngine:
    """Serve the requests twice, and compare the counts after each."""
    assert room.slots is not None
    slow = SlowEngine(blocks, room.slots, room.tier_snapshots, room.plan.every, set(room.plan.at))
    replay = TimedReplay(SimulatedEngine(blocks, snapshots=room), SERVICE)
    for number, each in enumerate(requests):
        slow.serve(each)
        replay.play(each)
        if number % 20 == 0:
            replay.engine.serving.check_integrity()
        engine = replay.engine.counts()
        counts = engine.hybrid
        assert counts is not None
        assert slow.figures() == Figures(
            hit_blocks=engine.hit_blocks,
            usable_tokens=counts.usable_hit_tokens,
            evicted_blocks=engine.evicted_blocks,
            snapshot_hits=counts.snapshot_hits,
            saved=counts.saved_snapshots,
            spills=counts.spills,
            fault_ins=counts.fault_ins,
            tier_misses=counts.tier_misses,
        ), number
    return slow


@pytest.mark.parametrize("slots", [4, 40, None])
def test_in_time_everything_is_accounted_for_at_every_event(slots: int | None) -> None:
    class Checked(TimedReplay):
        def step(self) -> bool:
            happened = super().step()
            self.engine.serving.check_integrity()
            return happened

    room = SnapshotRoom(slots, 20, at("prompt-end", "tail", "fork", every=4))
    replay = Checked(SimulatedEngine(300, snapshots=room), ServiceModel(20_000, 50, 16))
    for each in workload("chat", 3, 200, 12):
        replay.arrive(each)
    replay.drain()
    counts = replay.result().engine.hybrid
    assert counts is not None
    serving = replay.engine.serving
    assert serving.stats().running == 0
    assert serving.slots.num_used <= (slots or serving.slots.num_slots)
    assert counts.usable_hit_tokens + counts.recompute_tokens == replay.result().engine.hit_tokens


def test_more_slots_with_snapshots_at_fixed_places_are_worth_more() -> None:
    requests = list(workload("chat", 3, 400, 30))
    usable = []
    for slots in (0, 4, 16, 64, None):
        usable.append(played_without_checks(requests, SnapshotRoom(slots)).result().engine.hybrid)
    figures = [counts.usable_hit_tokens for counts in usable if counts is not None]
    assert figures == sorted(figures)
    assert figures[0] == 0 < figures[-1]
