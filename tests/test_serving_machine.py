"""The serving layer under random traffic: nothing leaks, nothing is freed in use, and what is read is what was written.

It relies on :mod:`serving_model`, where a row of a block and a state in a slot say what they stand for. The machine
keeps no books of its own on what the serving layer should do next; it counts, after every step, who refers to what:
the tables of the sequences that run, and what the cache would return if it were cleared. Tier and mover fail at any
call that Hypothesis picks, and other requests go on in the middle of a tier's call.
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import tier_key
from pair import Clock
from serving_model import (
    SLOT_BYTES,
    BreakdownError,
    FlakyTier,
    Interruption,
    ModelEngine,
    Prefix,
    check_conservation,
    contents_of,
    number_of,
    state_of,
)

from metrale_numba import NONE, NoPrefixCaching, PrefixMatch, RadixTree
from metrale_numba.serving import MemoryTier, OutOfBlocks, SequenceEnded, ServingCache

ADAPTERS = (0, 1, 2)
SESSIONS = (0, 1, 2, 3)
#: 1 and 2 are adapters as well, so that a token can stand where an adapter is folded in.
ALPHABET = (0, 1, 2, 2**32 - 1)
REMEMBERED = 8
MAX_TOKENS = 40
MAX_RUNNING = 6
#: A prompt of nobody.
STRANGE = (77, 78, 79)
#: For a call in the middle of another: as long as it may take to be done or to be found waiting.
PATIENCE_SECONDS = 0.2
DEADLOCK_SECONDS = 60
#: Long enough for the serving layer to try a tier again that has failed.
HEALING_SECONDS = 3600.0

#: What happened how often, in all examples together; printed by ``python tests/test_serving_machine.py``.
SEEN: Counter[str] = Counter()

CACHES = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from((2, 3, 4, 1)),
        "partial_tail_sharing": st.sampled_from((True, True, False)),
        "adopt_blocks": st.sampled_from((False, True)),
        "strict": st.sampled_from((True, False)),
        "hermetic": st.sampled_from((False, False, False, True)),
        "tail_protect": st.sampled_from((True, False)),
        "tail_lease_ttl": st.sampled_from((64, 0, 2)),
        "evict_alpha": st.sampled_from((0.0, 1.0)),
        "evict_legacy": st.sampled_from((False, False, True)),
        "quotas": st.sampled_from((None, None, None, {0: 3}, {1: 2, 2: 0})),
    }
)
MEMORY = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from((16, 6, 10, 24, 40)),
        "num_slots": st.sampled_from((2, 1, 3, 2, 3, 5, 0)),
        "disk_blocks": st.sampled_from((0, 12)),
        # In snapshots; None is no tier, and 1 too little for any but one.
        "tier_size": st.sampled_from((100, 100, 100, 6, 3, 1, None)),
        "spill_min_tokens": st.sampled_from((0, 0, 3)),
        "keep_copies": st.booleans(),
        "is_active": st.sampled_from((True,) * 9 + (False,)),
    }
)

NUMBER = st.integers(0, 23)
PART = st.integers(0, 4)
OPERATIONS = ("heal", "lose", "heal", "lose", "pin", "unpin", "compact", "set_quota")
CUTS = ("whole", "whole", "whole", "aligned", "half", "anywhere", "mutated", "folded", "nothing")


class Recipe(NamedTuple):
    """How to make a prompt from an earlier one."""

    base: int
    cut: str
    letters: list[int]
    home: int


RECIPES = st.builds(
    Recipe,
    base=st.integers(0, REMEMBERED - 1),
    cut=st.sampled_from(CUTS),
    letters=st.lists(st.integers(0, len(ALPHABET) - 1), max_size=7),
    home=st.integers(0, 11),
)

FAILURES = ("error", "late error", "lose", "interrupt")
MEANWHILE = ("begin", "end", "clear", "drop_adapter", "allocate", "snapshot", "tail", "release")
TIER_STEPS = st.one_of(
    st.sampled_from(("ok", "ok", *FAILURES)),
    st.sampled_from(MEANWHILE),
    st.sampled_from(tuple(f"begin, {failure}" for failure in FAILURES)),
    st.sampled_from(tuple(f"{name}, {failure}" for name in MEANWHILE for failure in FAILURES)),
)
MOVER_STEPS = st.sampled_from(("ok", "break", "halfway", "break like a tier", "interrupt", "clear", "begin", "end"))


class Faults(NamedTuple):
    """What goes wrong in one step, in the first calls of the tier and of the mover."""

    tier: list[str]
    mover: list[str]


NO_FAULTS = Faults([], [])
FAULTS = st.one_of(
    st.just(NO_FAULTS),
    st.builds(Faults, st.lists(TIER_STEPS, max_size=4), st.just([])),
    st.builds(Faults, st.just([]), st.lists(MOVER_STEPS, max_size=3)),
    st.builds(Faults, st.lists(TIER_STEPS, max_size=3), st.lists(MOVER_STEPS, max_size=2)),
)
#: Where every second step going wrong would keep anything from happening.
RARE_FAULTS = st.one_of(st.just(NO_FAULTS), st.just(NO_FAULTS), FAULTS)


@dataclass(eq=False)
class Running:
    """A request: what the engine knows of it, beside its sequence."""

    sequence: Any
    adapter: int
    session: int
    generation: int
    tokens: list[int]
    #: Of each beginning of the tokens, the prefix's number; the empty one first.
    numbers: list[int]
    computed: int
    is_busy: bool = False

    def check_ended(self) -> None:
        assert self.sequence.is_ended
        for call in (
            self.sequence.allocate,
            lambda: self.sequence.append([1]),
            lambda: self.sequence.publish(0),
            lambda: self.sequence.snapshot(0, lambda slot: None),
            lambda: self.sequence.tail_snapshot(0, lambda slot: None),
        ):
            with pytest.raises(SequenceEnded):
                call()
        self.sequence.finish()
        self.sequence.abort()


class Forecast(NamedTuple):
    """What a look-up would find, but for spilled snapshots that are not in the tier, which are listed."""

    match: PrefixMatch
    missing: list[int]
    has_free_slot: bool
    can_have_slot: bool
    num_free_blocks: int


class Books(NamedTuple):
    """What is counted before and after a call that is to change nothing."""

    cached: tuple[list[int], ...]
    blocks: list[int]
    slots: list[int]
    disks: list[int]


@dataclass
class Visit:
    """A call in the middle of another, in a thread of its own."""

    name: str
    thread: threading.Thread = field(init=False)
    error: BaseException | None = None


class Machine(RuleBasedStateMachine):
    """Requests of an engine, all of whose memory is small."""

    serving: Any

    @initialize(settings=CACHES, memory=MEMORY)
    def start(self, settings: dict[str, Any], memory: dict[str, Any]) -> None:
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock()
        self.patch.setattr(time, "monotonic", self.clock)
        # A tier fails here more often than anyone wants to read.
        logging.getLogger("metrale_numba").setLevel(logging.CRITICAL)
        self.block_size = settings["block_size"]
        self.is_active = memory["is_active"]
        self.has_quotas = settings["quotas"] is not None
        self.shares_tails = settings["partial_tail_sharing"]
        self.is_hybrid = memory["num_slots"] > 0
        self.cache: Any = RadixTree(**settings) if self.is_active else NoPrefixCaching(block_size=self.block_size)
        self.engine = ModelEngine(
            memory["num_blocks"], self.block_size, memory["num_slots"], memory["disk_blocks"] if self.is_active else 0
        )
        self.prefixes = self.engine.prefixes
        self.tier: FlakyTier | None = None
        if memory["tier_size"] is not None and self.is_hybrid:
            # Whether the tier counts more than the bytes themselves is its own affair.
            self.tier = FlakyTier(MemoryTier(max_bytes=memory["tier_size"] * (SLOT_BYTES + SLOT_BYTES // 2)))
            self.tier.meanwhile = self.visit
        self.serving = ServingCache(
            self.cache,
            memory["num_blocks"],
            self.engine,
            slots=memory["num_slots"],
            disk_blocks=len(self.engine.disk),
            tier=self.tier,
            model="the model",
            dtype="int64",
            rank=1,
            spill_min_tokens=memory["spill_min_tokens"],
            keep_copies=memory["keep_copies"],
        )
        self.engine.serving = self.serving
        assert self.serving.is_hybrid == self.is_hybrid
        self.running: list[Running] = []
        self.prompts: list[tuple[int, int, tuple[int, ...]]] = []
        self.checks: dict[int, Prefix] = {}
        self.visits: list[Visit] = []
        self.num_visits = self.num_steps = 0
        self.is_settled = True
        self.sound = True

    # -------------------------------------------------------------------------------------------------- what is counted

    def books(self) -> Books:
        serving = self.serving
        contents = contents_of(serving)
        cached = (
            sorted(contents.blocks.physical.tolist()),
            sorted(contents.blocks.disk_block_ids.tolist()),
            sorted(contents.snapshot_slots),
            sorted(contents.tier_keys.tolist()),
        )
        return Books(
            cached,
            serving.blocks.ref_counts().tolist(),
            serving.slots.ref_counts().tolist(),
            serving.disk_blocks.ref_counts().tolist() if self.engine.disk.size else [],
        )

    def check_what_runs(self) -> None:
        for running in self.running:
            sequence, adapter = running.sequence, running.adapter
            what = f"a sequence of {running.tokens} under adapter {adapter}"
            assert not sequence.is_ended
            assert sequence.num_tokens == len(running.tokens)
            if self.is_active:
                assert sequence.is_stale == (running.generation != self.generation(adapter))
            table = sequence.block_table.tolist()
            assert len(set(table)) == len(table), f"{what} has a block twice"
            self.engine.check_rows(self.engine.kv, table, running.numbers[1 : running.computed + 1], what)
            disks = sequence.disk_table.tolist()
            for i, disk in enumerate(disks[: running.computed // self.block_size]):
                if disk != NONE:
                    beginning = running.numbers[1 + i * self.block_size : 1 + (i + 1) * self.block_size]
                    self.engine.check_rows(self.engine.disk, [disk], beginning, f"the disk block {i} of {what}")
            if sequence.snapshot_slot is not None:
                state = self.engine.slot_state(sequence.snapshot_slot)
                self.engine.check_state(state, running.numbers[sequence.snapshot_tokens], f"the snapshot of {what}")
            if not sequence.is_stale and self.is_active:
                held = sequence.published - sequence.published % self.block_size
                assert self.cache.peek_matched_tokens(running.tokens[:held], adapter_id=adapter) == held

    def check_what_is_cached(self) -> None:
        """Look everything up in a copy of the cache, and read it."""
        if not self.is_active:
            return
        assert self.cache.stats_detail().over_releases == 0
        copied = copy.deepcopy(self.cache)
        self.check_what_can_be_evicted(copy.deepcopy(self.cache))
        for adapter, session, tokens in self.prompts:
            match = copied.lookup(tokens, session_hash=session, adapter_id=adapter, record=False)
            numbers = self.prefixes.numbers(Prefix(adapter, self.generation(adapter), tokens))
            what = f"what is cached of {tokens} under adapter {adapter}"
            self.engine.check_rows(self.engine.kv, match.matched_blocks, numbers[1 : match.matched_tokens + 1], what)
            whole = match.matched_tokens // self.block_size
            for i, disk in enumerate(match.matched_disk_block_ids[:whole].tolist()):
                if disk != NONE:
                    beginning = numbers[1 + i * self.block_size : 1 + (i + 1) * self.block_size]
                    self.engine.check_rows(self.engine.disk, [disk], beginning, f"the disk block {i} of {what}")
            self.check_snapshot(match, adapter, tokens, numbers, what)

    def check_what_can_be_evicted(self, copied: RadixTree) -> None:
        """Evict all that there is, and find no more held than runs, and no more promised than comes."""
        num_blocks = copied.stats()[0]
        counts = self.serving.blocks.ref_counts()
        free = int(np.count_nonzero(counts == 0))
        np.subtract.at(counts, copied.evict(10**9).physical, 1)
        room = int(np.count_nonzero(counts == 0))
        promised = self.serving.num_free_blocks
        assert free <= promised <= room, f"{promised} blocks are promised, of which {room} can be had"
        if not (self.shares_tails and self.cache.settings.adopt_blocks):
            assert promised == room
        if not self.cache.pins():
            held = {
                (running.adapter, running.numbers[end])
                for running in self.running
                if not running.sequence.is_stale
                for end in range(self.block_size, running.sequence.published + 1, self.block_size)
            }
            left = copied.stats()[0]
            assert left == len(held), f"of {num_blocks} cached blocks, {left} are held, {len(held)} by what runs"

    def check_snapshot(
        self, match: PrefixMatch, adapter: int, tokens: tuple[int, ...], numbers: list[int], what: str
    ) -> None:
        if match.ssm_snapshot is not None:
            depth = match.ssm_snapshot_tokens
            self.engine.check_state(self.engine.slot_state(match.ssm_snapshot), numbers[depth], what)
        if match.ssm_snapshot_tier_key is not None:
            depth = match.ssm_snapshot_tier_tokens
            assert self.tier is not None
            blobs = [key for key in self.tier.inner.keys() if key.check == match.ssm_snapshot_check]  # noqa: SIM118
            lost = [key for key in self.tier.lost if key.check == match.ssm_snapshot_check]
            assert blobs or lost, f"the spilled snapshot of depth {depth} of {what} is nowhere"
            if self.tier.is_ailing:
                # It may still have those of earlier weights, too.
                blobs = [key for key in blobs if self.tier.stored[key] == state_of(numbers[depth])]
                assert blobs or lost, f"the spilled snapshot of depth {depth} of {what} is nowhere"
            for key in blobs:
                self.engine.check_state(self.tier.stored[key], numbers[depth], f"the tier, in {what}")
        if match.ssm_snapshot_check is not None:
            prefix = Prefix(adapter, 0, tokens[:depth])
            assert self.checks.setdefault(match.ssm_snapshot_check, prefix) == prefix

    def check_tier(self, *, is_healed: bool = False) -> None:
        """Every blob has an owner, and every spilled entry its blob."""
        if self.tier is None:
            return
        contents = contents_of(self.serving)
        spilled = set(contents.tier_keys.tolist())
        residents = {self.engine.slot_state(slot) for slot in contents.snapshot_slots}
        keys = self.tier.inner.keys()
        for key in keys:
            state = self.tier.stored[key]
            prefix = self.prefixes.prefix(number_of(state))
            assert "the model" in key.model
            assert (key.dtype, key.rank) == ("int64", 1)
            assert key.adapter == prefix.adapter
            assert key.key == tier_key(prefix.adapter, prefix.tokens)
            if not is_healed and (self.tier.is_ailing or not self.is_settled):
                continue
            shown = self.prefixes.shown(number_of(state))
            assert prefix.generation == self.generation(prefix.adapter), f"the tier still has {shown}"
            assert key.key in spilled or state in residents, f"nobody needs what the tier has of {shown}"
        nowhere = spilled - {key.key for key in keys} - {key.key for key in self.tier.lost}
        assert not nowhere, f"the bytes of the spilled keys {nowhere} are nowhere"

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        self.sound = False
        self.serving.check_integrity()
        check_conservation(self.serving, [running.sequence for running in self.running])
        self.engine.poison_what_is_free()
        self.check_what_runs()
        self.check_what_is_cached()
        self.check_tier()
        self.sound = True

    def teardown(self) -> None:
        if hasattr(self, "serving"):
            try:
                # After a failure there is nothing to learn from it, and its errors would hide the first.
                if self.sound:
                    self.drain()
            finally:
                for running in self.running:
                    with suppress(Exception):
                        running.sequence.abort()
                self.patch.undo()
                logging.getLogger("metrale_numba").setLevel(logging.NOTSET)

    def drain(self) -> None:
        """End everything, forget everything, and find that all came back."""
        for running in self.running:
            running.sequence.abort()
        self.running.clear()
        self.everything_is_where_it_should_be()
        for name in list(self.cache.pins()) if self.is_active else ():
            self.cache.unpin(name)
        self.serving.clear()
        self.heal()
        for pool in (self.serving.blocks, self.serving.slots, self.serving.disk_blocks):
            if pool is not None:
                pool.check_integrity()
                assert pool.num_used == 0
        if self.tier is not None:
            assert self.tier.inner.keys() == []
            assert self.tier.inner.bytes_used == 0
        self.serving.check_integrity()

    # ------------------------------------------------------------------------------------------------------ ingredients

    @contextmanager
    def step(self, faults: Faults = NO_FAULTS, busy: Running | None = None) -> Iterator[None]:
        """Make one step, in which things go wrong as planned; then wait for whoever came in between."""
        self.sound = False
        if busy is not None:
            busy.is_busy = True
        self.engine.plan.set(faults.mover)
        if self.tier is not None:
            self.tier.plan.set(faults.tier)
        self.engine.meanwhile = self.visit
        try:
            yield
        finally:
            was_interrupted = self.was_interrupted()
            self.engine.plan.set(())
            if self.tier is not None:
                for name, count in self.tier.plan.happened.items():
                    self.saw(f"tier: {name}", count)
                self.tier.plan.set(())
            for visit in self.visits:
                visit.thread.join(DEADLOCK_SECONDS)
            if busy is not None:
                busy.is_busy = False
        self.num_steps += 1
        self.is_settled = was_interrupted or self.num_steps % 2 == 0
        if self.is_settled:
            # What was to be written or deleted and was not is so with the next calls.
            self.begin_strange()
        for visit in self.visits:
            assert not visit.thread.is_alive(), f"{visit.name} in the middle of a tier's call never came to its end"
            if visit.error is not None:
                raise visit.error
        self.visits.clear()
        self.sound = True

    def saw(self, what: str, count: int = 1) -> None:
        SEEN[what] += count
        if threading.current_thread() is threading.main_thread():
            event(what)

    def was_interrupted(self) -> bool:
        return self.tier is not None and any("interrupt" in step for step in self.tier.plan.happened)

    def is_undisturbed(self) -> bool:
        """Whether this step went, up to now, without a failure and without anything in between."""
        tier = self.tier is None or not self.tier.plan.happened
        return tier and not self.engine.plan.happened and not self.visits

    @contextmanager
    def breakdowns(self) -> Iterator[None]:
        """Let pass what mover and tier raised because they were told to."""
        try:
            yield
        except (BreakdownError, Interruption) as error:
            self.saw(f"{type(error).__name__} reached the caller")

    def prompt(self, recipe: Recipe) -> tuple[int, int, tuple[int, ...]]:
        """An adapter, a session and tokens, mostly to continue a prompt of before."""
        adapter, session = ADAPTERS[recipe.home % 3], SESSIONS[recipe.home % 4]
        tokens: tuple[int, ...] = ()
        if self.prompts and recipe.cut != "nothing":
            last_adapter, last_session, tokens = self.prompts[recipe.base % len(self.prompts)]
            if recipe.home < 10:
                adapter = last_adapter
            if recipe.home < 8:
                session = last_session
        count = len(tokens)
        if recipe.cut == "aligned":
            tokens = tokens[: count - count % self.block_size]
        elif recipe.cut == "half":
            tokens = tokens[: count // 2]
        elif recipe.cut == "anywhere":
            return adapter, session, tokens[: count * (recipe.base + 1) // REMEMBERED]
        elif recipe.cut == "mutated" and tokens:
            tokens = (*tokens[:-1], tokens[-1] ^ 1)
        elif recipe.cut == "folded":
            # The same tier keys by way of the adapter.
            if adapter:
                adapter, tokens = 0, (adapter, *tokens)
            elif tokens and tokens[0] in (1, 2):
                adapter, tokens = tokens[0], tokens[1:]
        tokens += tuple(ALPHABET[letter] for letter in recipe.letters)
        return adapter, session, tokens[:MAX_TOKENS]

    def remember(self, adapter: int, session: int, tokens: Iterable[int]) -> None:
        prompt = (adapter, session, tuple(tokens))
        if prompt in self.prompts:
            self.prompts.remove(prompt)
        self.prompts.insert(0, prompt)
        del self.prompts[REMEMBERED:]

    def pick(self, which: int) -> Running:
        """One of those that run; if there is none, a new one."""
        if not self.running:
            prompt = self.prompts[which % len(self.prompts)] if self.prompts else (0, 1, (0,) * (which % 8))
            self.begin_one(*prompt)
            self.allocate_one(self.running[0])
            self.compute_one(self.running[0])
        return self.running[which % len(self.running)]

    def generation(self, adapter: int) -> int:
        """How often the weights of an adapter have changed: as often as the cache forgot what it has of them."""
        return int(self.cache.adapter_epoch(adapter)) if self.is_active else 0

    def forecast(self, query: tuple[int, ...], session: int, adapter: int) -> Forecast:
        """What a look-up would find now, with nothing going wrong."""
        pool, free_blocks = self.serving.slots, self.serving.blocks.num_free
        if not self.is_active:
            return Forecast(PrefixMatch.empty(), [], False, False, free_blocks)
        contents, counts = contents_of(self.serving), pool.ref_counts()
        can_have_slot = pool.num_free > 0 or any(counts[slot] == 1 for slot in contents.snapshot_slots)
        copied, missing = copy.deepcopy(self.cache), []
        numbers = self.prefixes.numbers(Prefix(adapter, self.generation(adapter), query))
        while True:
            match = copied.lookup(query, session_hash=session, adapter_id=adapter)
            key = match.ssm_snapshot_tier_key
            if key is None or self.has_blob(match, numbers):
                return Forecast(match, missing, pool.num_free > 0, can_have_slot, free_blocks)
            missing.append(key)
            copied.forget_snapshot_tier_key(key)

    def has_blob(self, match: PrefixMatch, numbers: list[int]) -> bool:
        """Whether the tier has the bytes of a spilled snapshot."""
        assert self.tier is not None
        state = state_of(numbers[match.ssm_snapshot_tier_tokens])
        return any(
            key.check == match.ssm_snapshot_check and self.tier.stored[key] == state
            for key in self.tier.inner.keys()  # noqa: SIM118
        )

    def lookups(self) -> int:
        if not self.is_active:
            return 0
        detail = self.cache.stats_detail()
        return int(detail.cache_hits + detail.cache_misses)

    # ------------------------------------------------------------------------------------------------------------ rules

    @rule(
        recipe=RECIPES,
        min_compute=st.sampled_from((1, 1, 0, 2, 5, 20)),
        retry=st.sampled_from((False, False, False, True)),
        faults=RARE_FAULTS,
    )
    def begin(self, recipe: Recipe, min_compute: int, retry: bool, faults: Faults) -> None:
        adapter, session, tokens = self.prompt(recipe)
        self.make_place()
        with self.step(faults):
            self.begin_one(adapter, session, tokens, min_compute, retry)

    def make_place(self) -> None:
        while len(self.running) >= MAX_RUNNING - 1:
            with self.step():
                self.end_one(self.running[0], by="finish")

    @rule(
        recipe=RECIPES,
        letters=st.lists(st.integers(0, len(ALPHABET) - 1), max_size=3),
        snapshots=st.sampled_from((3, 1, 2, 0)),
        faults=RARE_FAULTS,
    )
    def turn(self, recipe: Recipe, letters: list[int], snapshots: int, faults: Faults) -> None:
        """Serve one turn of a conversation, from beginning to end."""
        adapter, session, tokens = self.prompt(recipe)
        self.make_place()
        with self.step(faults):
            self.serve_one(adapter, session, tokens, letters, snapshots)

    @rule(
        which=NUMBER,
        letters=st.lists(st.integers(0, len(ALPHABET) - 1), min_size=1, max_size=7),
        faults=st.lists(FAULTS, min_size=1, max_size=4),
    )
    def go_on(self, which: int, letters: list[int], faults: list[Faults]) -> None:
        """Serve the next turns of conversations, one after the other."""
        for i, wrong in enumerate(faults):
            adapter, session, tokens = (0, 1, (0,) * (which % 8))
            if self.prompts:
                # Mostly the one that was not heard of for longest.
                adapter, session, tokens = self.prompts[-1 - which * i % len(self.prompts)]
            more = tuple(ALPHABET[letter] for letter in letters)
            self.make_place()
            with self.step(wrong):
                self.serve_one(adapter, session, (tokens + more)[:MAX_TOKENS], letters[:2], snapshots=3 - i % 2)

    @rule(
        recipe=RECIPES,
        steps=st.lists(st.tuples(st.booleans(), PART), min_size=2, max_size=6),
        faults=RARE_FAULTS,
    )
    def race(self, recipe: Recipe, steps: list[tuple[bool, int]], faults: Faults) -> None:
        """Serve two requests for the same prompt side by side, neither of which can use what the other computes."""
        adapter, session, tokens = self.prompt(recipe)
        self.make_place()
        self.make_place()
        with self.step(faults):
            pair = [self.begin_one(adapter, session, tokens) for _ in range(2)]
            running = [one for one in pair if one is not None]
            for one in running:
                one.is_busy = True
                self.allocate_one(one)
                self.compute_one(one)
            for is_first, part in steps:
                if running:
                    one = running[0 if is_first else -1]
                    self.publish_one(one, one.computed * part // 4)
            for one in running:
                self.end_one(one, by="finish")

    def serve_one(
        self, adapter: int, session: int, tokens: tuple[int, ...], letters: list[int], snapshots: int
    ) -> None:
        running = self.begin_one(adapter, session, tokens)
        if running is None:
            return
        running.is_busy = True
        self.allocate_one(running)
        self.compute_one(running)
        self.publish_one(running, running.computed)
        if self.is_hybrid and snapshots & 1:
            self.snapshot_one(running)
        self.decode_one(running, letters)
        self.publish_one(running, running.computed)
        if self.is_hybrid and snapshots & 2:
            self.tail_snapshot_one(running, sibling=4)
        self.end_one(running, by="finish")

    def begin_one(
        self, adapter: int, session: int, tokens: tuple[int, ...], min_compute: int = 1, retry: bool = False
    ) -> Running | None:
        query = tokens[: max(len(tokens) - min_compute, 0)]
        forecast = self.forecast(query, session, adapter)
        generation, lookups = self.generation(adapter), self.lookups()
        sequence = None
        with self.breakdowns():
            sequence = self.serving.begin(
                tokens, session=session, adapter=adapter, min_compute=min_compute, retry=retry
            )
        if sequence is None:
            return None
        if not sequence.is_stale:
            # Whatever came in between, the last look-up was after that.
            generation = self.generation(adapter)
        numbers = self.prefixes.numbers(Prefix(adapter, generation, tokens))
        running = Running(sequence, adapter, session, generation, list(tokens), numbers, sequence.cached_tokens)
        self.running.append(running)
        self.remember(adapter, session, tokens)
        assert sequence.tokens.tolist() == list(tokens)
        assert (sequence.session, sequence.adapter) == (session, adapter)
        assert not sequence.is_ended
        cached, table = sequence.cached_tokens, sequence.block_table.tolist()
        assert 0 <= cached <= len(query)
        assert len(table) == -(-cached // self.block_size)
        assert sequence.published <= cached
        assert len(sequence.disk_table) in (0, len(table))
        if sequence.snapshot_slot is None:
            assert sequence.snapshot_tokens == 0
        assert sequence.snapshot_tokens <= cached
        assert sequence.compute_from == (sequence.snapshot_tokens if self.is_hybrid else cached)
        self.engine.check_rows(self.engine.kv, table, numbers[1 : cached + 1], f"what was matched of {tokens}")
        if cached:
            self.saw("hit of a block" + (" in part" if cached % self.block_size else ""))
        if sequence.snapshot_slot is not None:
            was_spilled = forecast.match.ssm_snapshot is None
            how = ", on its way" if forecast.missing else ", faulted in" if was_spilled else ""
            self.saw(f"hit of a snapshot{how}")
        if self.is_undisturbed():
            self.check_forecast(running, forecast)
            assert self.lookups() - lookups == int(self.is_active and not retry)
        return running

    def check_forecast(self, running: Running, forecast: Forecast) -> None:
        """Fail unless a sequence that nothing came in the way of has all that was cached of it."""
        sequence, cached, match = running.sequence, running.computed, forecast.match
        if cached != match.matched_tokens:
            assert cached % self.block_size == 0
            # The block that was to take a copy had to be made free, and was one of those that would have matched.
            assert forecast.num_free_blocks == 0
            assert match.matched_tokens % self.block_size > 0
            self.saw("a copy that took the place of what it was to be a copy of")
        if not self.is_hybrid or cached != match.matched_tokens:
            return
        depth = match.ssm_snapshot_tier_tokens if match.ssm_snapshot is None else match.ssm_snapshot_tokens
        if match.ssm_snapshot_check is None:
            assert sequence.snapshot_slot is None
        elif forecast.has_free_slot if forecast.missing else (match.ssm_snapshot is not None or forecast.can_have_slot):
            assert sequence.snapshot_slot is not None
            assert sequence.snapshot_tokens == depth
            assert match.ssm_snapshot in (None, sequence.snapshot_slot)
        elif sequence.snapshot_slot is None:
            self.saw("spilled snapshot not had, for want of a slot")
        if forecast.missing and forecast.can_have_slot:
            self.saw("spilled snapshot not had, for want of bytes")
            forgotten = set(forecast.missing) - set(contents_of(self.serving).tier_keys.tolist())
            assert forgotten == set(forecast.missing), "what the tier does not have was not forgotten"

    @rule(which=NUMBER, more=st.sampled_from((None, None, None, 1, 2, 0, 100)))
    def allocate(self, which: int, more: int | None) -> None:
        with self.step():
            self.allocate_one(self.pick(which), more)

    def allocate_one(self, running: Running, more: int | None = None) -> None:
        sequence = running.sequence
        table = sequence.block_table.tolist()
        lacking = more
        if lacking is None:
            lacking = max(-(-len(running.tokens) // self.block_size) - len(table), 0)
        promised = self.serving.num_free_blocks
        before = self.books()
        try:
            blocks = sequence.allocate(more).tolist()
        except OutOfBlocks:
            self.saw("out of blocks")
            if not self.visits:
                assert self.books() == before
                assert lacking > before.blocks.count(0)
                assert lacking > promised
            assert sequence.block_table.tolist() == table
            return
        assert len(blocks) == lacking
        assert sequence.block_table.tolist() == table + blocks
        if not self.visits:
            self.saw("allocated" + (", with evictions" if lacking > before.blocks.count(0) else ""))
            assert lacking <= promised
        # What they held is nobody's.
        self.engine.kv[blocks] = 0

    @rule(
        which=NUMBER,
        part=st.sampled_from((4, 4, 3, 2, 1)),
        publish=st.booleans(),
        allocate=st.sampled_from((True, True, True, False)),
    )
    def compute(self, which: int, part: int, publish: bool, allocate: bool) -> None:
        """Compute a part of what is left, as far as there are blocks for it."""
        with self.step():
            running = self.pick(which)
            if allocate:
                self.allocate_one(running)
            self.compute_one(running, part)
            if publish:
                self.publish_one(running, running.computed)

    def compute_one(self, running: Running, part: int = 4) -> None:
        sequence, size = running.sequence, self.block_size
        table = sequence.block_table.tolist()
        room = min(len(running.tokens), len(table) * size)
        upto = running.computed + (room - running.computed) * part // 4
        if upto <= running.computed:
            return
        written = set(table[running.computed // size : -(-upto // size)])
        for other in self.running:
            if other is not running:
                shared = written & set(other.sequence.block_table.tolist())
                assert not shared, f"blocks {shared} are written to by one sequence and read by another"
        disks = sequence.disk_table.tolist()
        for at in range(running.computed, upto):
            block, row = divmod(at, size)
            self.engine.kv[table[block], row] = running.numbers[at + 1]
            if block < len(disks) and disks[block] != NONE:
                self.engine.disk[disks[block], row] = running.numbers[at + 1]
        running.computed = upto

    @rule(which=NUMBER, part=PART)
    def publish(self, which: int, part: int) -> None:
        with self.step():
            running = self.pick(which)
            self.publish_one(running, running.computed * part // 4)

    def publish_one(self, running: Running, upto: int) -> None:
        sequence = running.sequence
        table, published, before = sequence.block_table.tolist(), sequence.published, self.books()
        answer = sequence.publish(upto)
        assert answer == sequence.published
        assert sequence.block_table.tolist() == table
        if sequence.is_stale or not self.is_active:
            self.saw("publish, stale" if sequence.is_stale else "publish, inactive")
            assert self.visits or self.books() == before
            return
        assert published <= answer <= max(published, upto)
        whole = upto - upto % self.block_size
        if not self.has_quotas:
            assert answer >= whole
        if self.shares_tails and not self.has_quotas and upto >= self.block_size:
            assert self.cache.peek_matched_tokens(running.tokens[:upto], adapter_id=running.adapter) == upto
        self.remember(running.adapter, running.session, running.tokens[: max(upto, published)])

    @rule(which=NUMBER, beyond=st.sampled_from(("tokens", "table")))
    def publish_too_much(self, which: int, beyond: str) -> None:
        with self.step():
            running = self.pick(which)
            upto = len(running.tokens) + 1
            if beyond == "table":
                upto = len(running.sequence.block_table) * self.block_size + 1
            before = self.books()
            with pytest.raises(ValueError, match=r"\S"):
                running.sequence.publish(upto)
            assert self.books() == before

    @rule(
        which=NUMBER,
        letters=st.lists(st.integers(0, len(ALPHABET) - 1), min_size=1, max_size=5),
        publish=st.booleans(),
    )
    def decode(self, which: int, letters: list[int], publish: bool) -> None:
        """Append tokens, and compute them if there is room."""
        with self.step():
            running = self.pick(which)
            self.decode_one(running, letters)
            if publish:
                self.publish_one(running, running.computed)

    def decode_one(self, running: Running, letters: list[int]) -> None:
        if len(running.tokens) < MAX_TOKENS:
            tokens = [ALPHABET[letter] for letter in letters]
            running.sequence.append(tokens if len(tokens) % 2 else np.array(tokens, np.uint32))
            for token in tokens:
                running.tokens.append(token)
                running.numbers.append(self.prefixes.extend(running.numbers[-1], token))
            assert running.sequence.tokens.tolist() == running.tokens
        self.allocate_one(running)
        self.compute_one(running)

    @rule(which=NUMBER, first=PART, count=st.integers(0, 3), wrong=st.sampled_from((False, False, False, True)))
    def set_disk_blocks(self, which: int, first: int, count: int, wrong: bool) -> None:
        if not self.engine.disk.size:
            return
        with self.step():
            running = self.pick(which)
            table = running.sequence.block_table.tolist()
            count = min(count, self.serving.disk_blocks.num_free)
            first = len(table) if wrong else min(first, max(len(table) - count, 0))
            if first + count > len(table) and not wrong:
                return
            has_one_already = any(disk != NONE for disk in running.sequence.disk_table[first : first + count].tolist())
            ids = self.serving.disk_blocks.allocate(count)
            if count and (wrong or has_one_already):
                with pytest.raises(ValueError, match=r"\S"):
                    running.sequence.set_disk_blocks(first, ids)
                self.serving.disk_blocks.dec_ref(ids)
                return
            # What is on disk is what is in the block; a block that is half full is written again as it fills.
            self.engine.disk[ids] = self.engine.kv[table[first : first + count]]
            running.sequence.set_disk_blocks(first, ids)
            assert running.sequence.disk_table.tolist()[first : first + count] == ids.tolist()
            self.saw("disk blocks")

    @rule(which=NUMBER, part=PART, on_grid=st.booleans(), faults=FAULTS)
    def snapshot(self, which: int, part: int, on_grid: bool, faults: Faults) -> None:
        if not self.is_hybrid:
            return
        running = self.pick(which)
        with self.step(faults, busy=running):
            self.snapshot_one(running, part, on_grid)

    def snapshot_one(self, running: Running, part: int = 4, on_grid: bool = True) -> None:
        depth = self.depth(running, part, on_grid)
        before, num_free = self.books(), self.serving.slots.num_free
        with self.breakdowns():
            done = running.sequence.snapshot(depth, self.engine.writer(running.numbers[depth]))
            self.check_registered(running, done, before, num_free)

    def depth(self, running: Running, part: int, on_grid: bool) -> int:
        depth = running.computed * part // 4
        return depth - depth % self.block_size if on_grid else depth

    def check_registered(self, running: Running, done: bool, before: Books, num_free: int) -> None:
        assert type(done) is bool
        self.remember(running.adapter, running.session, running.tokens[: running.computed])
        self.saw(f"snapshot: {done}")
        if not self.is_undisturbed():
            return
        if running.sequence.is_stale or not self.is_active:
            assert not done
        if not done:
            assert running.sequence.is_stale or not self.is_active or num_free == 0
            could_go = [slot for slot in before.cached[2] if before.slots[slot] == 1]
            assert running.sequence.is_stale or not could_go, f"slots {could_go} could have been made free"
        elif num_free == 0:
            self.saw("snapshot that another made room for")
        if not done:
            assert self.books() == before or num_free == 0

    @rule(which=NUMBER, part=st.sampled_from((4, 3)), sibling=st.sampled_from((None, 2, 3, 4)), faults=FAULTS)
    def tail_snapshot(self, which: int, part: int, sibling: int | None, faults: Faults) -> None:
        if not self.is_hybrid:
            return
        running = self.pick(which)
        with self.step(faults, busy=running):
            self.tail_snapshot_one(running, part, sibling)

    def tail_snapshot_one(self, running: Running, part: int = 4, sibling: int | None = None) -> None:
        depth = self.depth(running, part, on_grid=False)
        before, num_free = self.books(), self.serving.slots.num_free
        other = None
        if sibling is not None:
            at = self.depth(running, sibling, on_grid=True)
            other = (at, self.engine.writer(running.numbers[at]))
        with self.breakdowns():
            done = running.sequence.tail_snapshot(depth, self.engine.writer(running.numbers[depth]), sibling=other)
            if running.session == 0:
                assert not done
                assert self.visits or self.books() == before
            else:
                self.check_registered(running, done, before, num_free)

    @rule(which=NUMBER)
    def release_snapshot(self, which: int) -> None:
        with self.step():
            self.release_snapshot_one(which)

    def release_snapshot_one(self, which: int) -> None:
        holders = [running for running in self.running if running.sequence.snapshot_slot is not None]
        if holders:
            sequence = holders[which % len(holders)].sequence
            sequence.release_snapshot()
            assert sequence.snapshot_slot is None
            sequence.release_snapshot()

    @rule(which=NUMBER, publish=st.booleans(), tail=st.booleans(), faults=RARE_FAULTS)
    def finish(self, which: int, publish: bool, tail: bool, faults: Faults) -> None:
        running = self.pick(which)
        with self.step(faults, busy=running):
            if publish:
                self.publish_one(running, running.computed)
            if tail and self.is_hybrid:
                self.tail_snapshot_one(running)
            self.end_one(running, by="finish")

    @rule(which=NUMBER, by=st.sampled_from(("abort", "exit", "exception", "interrupt", "oblivion")), faults=RARE_FAULTS)
    def end(self, which: int, by: str, faults: Faults) -> None:
        running = self.pick(which)
        with self.step(faults, busy=running):
            self.end_one(running, by)

    def end_one(self, running: Running, by: str) -> None:
        """End a sequence in one of many ways."""
        self.running.remove(running)
        sequence, before = running.sequence, self.books()
        is_stale = sequence.is_stale
        self.saw(f"end by {by}" + (", stale" if is_stale else ""))
        if by == "oblivion":
            del running.sequence
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                del sequence
                if not caught:
                    gc.collect()
            assert [warning.category for warning in caught] == [ResourceWarning], caught
            self.serving.check_integrity()
            self.begin_strange()
        elif by == "exit":
            with self.breakdowns(), sequence as entered:
                assert entered is sequence
        elif by in ("exception", "interrupt"):
            error = BreakdownError if by == "exception" else Interruption
            with pytest.raises((error, Interruption)), sequence:
                raise error
        else:
            with self.breakdowns():
                getattr(sequence, by)()
        if by != "oblivion":
            running.check_ended()
        if is_stale and not self.visits and (self.tier is None or not self.tier.plan.happened):
            assert self.books().cached == before.cached

    def begin_strange(self) -> None:
        """Make a call that is nobody's, and leaves nothing."""
        with self.breakdowns():
            self.serving.begin(STRANGE).abort()

    @rule(adapter=st.sampled_from(ADAPTERS), everything=st.sampled_from((False, False, True)), faults=RARE_FAULTS)
    def forget(self, adapter: int, everything: bool, faults: Faults) -> None:
        if self.is_active and len(contents_of(self.serving).blocks) < 6 and not faults.tier:
            # What is hardly anything yet is left to grow.
            return
        with self.step(faults):
            self.forget_one(None if everything else adapter)

    def forget_one(self, adapter: int | None) -> None:
        self.saw("clear" if adapter is None else "drop_adapter")
        with self.breakdowns():
            if adapter is None:
                self.serving.clear()
            else:
                self.serving.drop_adapter(adapter)

    @rule(which=NUMBER, kind=st.sampled_from(OPERATIONS))
    def operate(self, which: int, kind: str) -> None:
        """Let happen what does not come from a request."""
        if kind == "heal":
            self.heal()
        elif kind == "lose":
            self.lose(which)
        elif self.is_active and self.prompts:
            with self.step():
                adapter, _, tokens = self.prompts[which % len(self.prompts)]
                if kind == "pin":
                    self.cache.pin("system", tokens, adapter_id=adapter)
                elif kind == "unpin":
                    self.cache.unpin("system")
                elif kind == "compact":
                    self.cache.compact()
                elif self.has_quotas:
                    self.cache.set_quota(adapter, (None, 0, 4, 10)[which % 4])

    def lose(self, which: int) -> None:
        """Let the tier lose a blob, and mostly somebody look for it at once."""
        key = None if self.tier is None else self.tier.lose(which)
        if key is not None and which % 4:
            for prompt in [prompt for prompt in self.prompts if self.finds(prompt, key.check)][:1]:
                self.make_place()
                with self.step():
                    running = self.begin_one(*prompt, min_compute=0)
                    assert running is not None
                    self.end_one(running, by="abort")

    def heal(self) -> None:
        """After the tier has failed, time passes, and with the next call nothing is left that nobody needs."""
        if self.tier is not None:
            with self.step():
                self.clock.seconds += HEALING_SECONDS
                self.saw("healed" if self.tier.is_ailing else "nothing to heal")
                self.begin_strange()
                self.check_tier(is_healed=True)
                self.tier.is_ailing = False

    # ------------------------------------------------------------------------------ in the middle of a call of the tier

    def visit(self, name: str, key: Any = None) -> None:
        """Let another request come in between, from another thread; one that has to wait does so until the end."""
        visit = Visit(name)
        self.num_visits += 1
        which = self.num_visits
        if threading.current_thread() is not threading.main_thread():
            return

        def work() -> None:
            try:
                self.come_in_between(name, which, key)
            except BaseException as error:  # noqa: BLE001
                visit.error = error

        visit.thread = threading.Thread(target=work, daemon=True)
        self.visits.append(visit)
        visit.thread.start()
        visit.thread.join(PATIENCE_SECONDS)
        if visit.thread.is_alive():
            self.saw("waited for another")

    def finds(self, prompt: tuple[int, int, tuple[int, ...]], check: int) -> bool:
        adapter, session, tokens = prompt
        match = copy.deepcopy(self.cache).lookup(tokens, session_hash=session, adapter_id=adapter)
        return bool(match.ssm_snapshot_check == check)

    def come_in_between(self, name: str, which: int, key: Any) -> None:
        idle = [running for running in self.running if not running.is_busy]
        if name == "begin" and self.prompts:
            # Best what begins with the snapshot that is just being moved.
            wanted = [prompt for prompt in self.prompts if key is not None and self.finds(prompt, key.check)]
            prompts = wanted or self.prompts
            if len(self.running) < MAX_RUNNING:
                self.begin_one(*prompts[which % len(prompts)], min_compute=which % 2)
        elif name == "clear":
            self.forget_one(None)
        elif name == "drop_adapter":
            self.forget_one(self.prompts[0][0] if self.prompts else 0)
        elif name == "release":
            self.release_snapshot_one(which)
        elif idle:
            running = idle[which % len(idle)]
            if name == "end":
                self.end_one(running, by=("abort", "finish")[which % 2])
            elif name == "allocate":
                self.allocate_one(running, which % 4)
            elif name == "snapshot":
                self.snapshot_one(running, which % 4 + 1)
            elif name == "tail":
                self.tail_snapshot_one(running)


class TestServing(Machine.TestCase):  # type: ignore[name-defined, misc]
    """Hypothesis runs the machine as one test."""


if __name__ == "__main__":
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Machine)
    width = max(map(len, SEEN))
    for what, count in sorted(SEEN.items()):
        print(f"{what:{width}}  {count}")  # noqa: T201
