"""The cache against the model, driven by Hypothesis: any calls on the tree, any on the snapshot index, lawful callers.

It relies on :mod:`pair` to compare every answer and to keep the books; the machines here decide what to call. After
each step the cache checks its own integrity and tells everything it counts; at the end it is drained. In between it
is copied, and the test goes on with the copy. The machines promise to reach the rare paths: prompts share prefixes,
alphabets are tiny, and tier keys collide on purpose.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model import NONE, Entry, Tokens, tier_key
from pair import COPIES, Clock, Pair, forge

from metrale_numba import RadixTree

BLOCK_SIZES = [(1,), (2,), (3,), (16,), (1, 2), (2, 3, 16), (17,), (256,), (3, 256), (1, 2, 3, 16, 17, 256)]
ADAPTERS = (0, 1, 7, 2**63 + 7, 2**64 - 1)
SESSIONS = (0, 1, 2, 3, 2**63 + 9)
ALPHABETS = ((0, 1, 2), (1, 7, 0), (2**31, 2**32 - 1, 0))
FIRST_BLOCKS = (0, 2**31 - 20, 2**32 - 9000)
FIRST_SLOTS = (0, 2**63 - 9000)
REMEMBERED = 10
MAX_CHUNKS = 9

SETTINGS = st.fixed_dictionaries(
    {
        "partial_tail_sharing": st.sampled_from((True, True, False)),
        "tail_protect": st.sampled_from((True, True, True, False)),
        "tail_lease_ttl": st.sampled_from((64, 0, 1, 2, 3, 4)),
        "evict_alpha": st.sampled_from((0.0, 0.75, 1.0, 8.0)),
        "evict_legacy": st.sampled_from((False, False, True)),
        "hermetic": st.sampled_from((False, False, False, True)),
        "adopt_blocks": st.sampled_from((False, False, True)),
        "check_secret": st.sampled_from((None, b"secret")),
        "strict": st.sampled_from((False, False, True)),
        "max_pinned_blocks": st.sampled_from((None, 0, 3, 8, None)),
        "quotas": st.sampled_from((None, None, None, None, {0: 4, 1: 0}, {1: 9, 7: 3, 2**64 - 1: 1})),
        "reserve": st.sampled_from((0, 0, 0, 1, 5, 100)),
    }
)


class Prompt(NamedTuple):
    adapter: int
    block_size: int
    tokens: Tokens


class Recipe(NamedTuple):
    """How to make a prompt from the earlier ones; small numbers, so that examples shrink and print well."""

    base: int
    cut: str
    letters: list[int]
    tail: int
    home: int


CUTS = ("whole", "whole", "aligned", "half", "anywhere", "anywhere", "one less", "mutated", "nothing", "folded")
RECIPES = st.builds(
    Recipe,
    base=st.integers(0, REMEMBERED - 1),
    cut=st.sampled_from(CUTS),
    letters=st.lists(st.integers(0, 3), max_size=3),
    tail=st.integers(0, 3),
    home=st.integers(0, 11),
)
#: A number that a rule spreads over its choices.
NUMBER = st.integers(0, 23)
SESSION = st.sampled_from(SESSIONS)
RECORD = st.sampled_from((True, True, True, False))
#: Those that come first are taken first when an example shrinks; those that forget much are rare.
OPERATIONS = ("evict_from",) * 6 + ("set_quota",) * 5 + ("take_dead_keys",) * 4 + ("peek_many",) * 3
OPERATIONS += ("compact",) * 6 + ("drop_adapter",) * 5 + ("clear",)
WORTH_FORGETTING = 8
NAMES = ("system", "tools", "", "\u00e9\U0001f600\ud800")
TTLS = (None, None, 0, 0.5, 1, 2.25, 10)


class Machine(RuleBasedStateMachine):
    """What all machines share: the pair, prompts to choose from, ids to hand in."""

    pair: Pair

    @initialize(
        chosen=SETTINGS,
        sizes=st.sampled_from(BLOCK_SIZES),
        alphabet=st.sampled_from(ALPHABETS),
        first_block=st.sampled_from(FIRST_BLOCKS),
        first_slot=st.sampled_from(FIRST_SLOTS),
    )
    def begin(
        self,
        chosen: dict[str, Any],
        sizes: tuple[int, ...],
        alphabet: tuple[int, int, int],
        first_block: int,
        first_slot: int,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock()
        self.patch.setattr(time, "monotonic", self.clock)
        self.pair = Pair(RadixTree, {**chosen, "block_size": sizes[0]})
        self.steps_of_twins = 0
        self.sizes = sizes
        self.alphabet = alphabet
        self.next_block = first_block
        self.next_slot = first_slot
        self.prompts: list[Prompt] = []

    @invariant()
    def cache_and_model_agree_on_their_state(self) -> None:
        self.pair.compare_state()

    def teardown(self) -> None:
        # After a failure there is nothing to learn from draining, and its errors would hide the first.
        if hasattr(self, "pair") and self.pair.sound:
            self.pair.drain()
        if hasattr(self, "patch"):
            self.patch.undo()

    # --------------------------------------------------------------------------------- what an operator asks of a cache

    @rule(kind=st.sampled_from(OPERATIONS), which=NUMBER)
    def operate(self, kind: str, which: int) -> None:
        """Make one of the calls that go to an adapter, or to everything."""
        adapter = self.prompts[which % len(self.prompts)].adapter if self.prompts and which % 4 else ADAPTERS[which % 5]
        if kind == "evict_from":
            if which % 3:
                self.let_go(adapter)
            self.pair.evict_from(adapter, (1, 2, 0, 3, 10**9)[which % 5])
        elif kind == "set_quota":
            self.pair.set_quota(adapter, (None, 5, None, 0, None, 10, 2, None)[which % 8])
        elif kind == "take_dead_keys":
            self.pair.take_dead_keys()
        elif kind == "compact":
            self.pair.compact()
        elif kind == "peek_many":
            prompts = tuple(prompt.tokens for prompt in self.prompts[: which % 5])
            self.pair.peek_many(prompts, self.sizes[which % len(self.sizes)], adapter)
        elif len(self.pair.model.nodes) + len(self.pair.model.entries) < WORTH_FORGETTING and which:
            # What is hardly anything yet is left to grow.
            return
        else:
            for name, prompt in zip(NAMES, self.prompts[: which % 3], strict=False):
                self.pair.pin(name, prompt.tokens, prompt.block_size, prompt.adapter)
            if kind == "drop_adapter":
                self.pair.drop_adapter(adapter)
                self.forgotten(adapter)
            else:
                self.pair.clear()
                self.forgotten(None)

    def forgotten(self, adapter: int | None) -> None:
        """Take note that an adapter's part of the cache was forgotten, or all of it."""

    def let_go(self, adapter: int) -> None:
        """Give up holds of an adapter."""
        for prompt in self.prompts:
            if prompt.adapter == adapter:
                self.pair.release(prompt.tokens, prompt.block_size, adapter)

    @precondition(lambda self: self.prompts)
    @rule(base=NUMBER, let_go=st.booleans(), spare=st.integers(-2, 3), recipe=RECIPES, how=NUMBER)
    def insert_into_a_full_quota(self, base: int, let_go: bool, spare: int, recipe: Recipe, how: int) -> None:
        """Leave an adapter too little room for one more of its prompts, mostly for this one time."""
        adapter = self.prompts[base % len(self.prompts)].adapter
        if let_go:
            self.let_go(adapter)
        num_blocks = sum(node.adapter_id == adapter for node in self.pair.model.nodes.values())
        self.pair.set_quota(adapter, max(num_blocks + spare, 0))
        self.insert_whole(self.prompt(recipe)._replace(adapter=adapter), with_disks=how % 2 == 1)
        if how % 8:
            self.pair.set_quota(adapter, None)

    @rule(recipe=RECIPES, name=st.sampled_from(NAMES), ttl=st.sampled_from(TTLS))
    def pin(self, recipe: Recipe, name: str, ttl: float | None) -> None:
        prompt = self.prompt(recipe)
        self.pair.pin(name, prompt.tokens, prompt.block_size, prompt.adapter, ttl)

    @precondition(lambda self: self.pair.model.holds)
    @rule(name=st.sampled_from(NAMES))
    def unpin(self, name: str) -> None:
        self.pair.unpin(name)

    @precondition(lambda self: self.pair.model.holds)
    @rule(seconds=st.sampled_from((0.25, 0.5, 1, 2, 10)), recipe=RECIPES, how=NUMBER)
    def let_time_pass(self, seconds: float, recipe: Recipe, how: int) -> None:
        """Let pins come to their end, and let one call or another be the first to notice."""
        self.clock.seconds += seconds
        kind = how % 8
        if kind == 0:
            self.pair.evict((1, 3, 10**9)[how // 8])
        elif kind == 1:
            self.pair.evict_from(next(iter(self.pair.model.holds.values())).adapter_id, 10**9)
        elif kind == 2:
            self.pair.pins()
        elif kind == 3:
            self.pair.unpin(NAMES[how // 8])
        elif kind == 4:
            prompt = self.prompt(recipe)
            self.pair.pin(NAMES[how // 8], prompt.tokens, prompt.block_size, prompt.adapter, seconds)
        elif kind == 5:
            # What an ended pin held may make room in a full quota.
            adapter = next(iter(self.pair.model.holds.values())).adapter_id
            num_blocks = sum(node.adapter_id == adapter for node in self.pair.model.nodes.values())
            self.pair.set_quota(adapter, num_blocks)
            self.insert_whole(self.prompt(recipe)._replace(adapter=adapter), with_disks=False)
            self.pair.set_quota(adapter, None)
        elif kind == 6:
            self.pair.copy(list(COPIES)[how // 8])
            self.pair.part(keep_the_copy=how // 8 != 2)

    def insert_whole(self, prompt: Prompt, with_disks: bool) -> None:
        """Insert a prompt in the way that suits the machine."""
        self.insert(prompt, 4 if with_disks else 0)

    @rule(way=st.sampled_from(tuple(COPIES)), keep_the_copy=st.booleans(), steps=st.sampled_from((0, 2, 5)))
    def copy(self, way: str, keep_the_copy: bool, steps: int) -> None:
        """Copy the cache and go on with one of the two, at once or after some steps of both."""
        self.pair.copy(way)
        self.keep_the_copy = keep_the_copy
        self.steps_of_twins = steps

    @invariant()
    def twins_part_after_some_steps(self) -> None:
        if self.pair.twin is not None and self.steps_of_twins == 0:
            self.pair.part(self.keep_the_copy)
        self.steps_of_twins -= 1

    # ---------------------------------------------------------------------------------------------------- ingredients

    def chunk(self, letter: int, block_size: int) -> Tokens:
        """One of a few chunks that differ late, so that the search cannot decide early."""
        fill, last = self.alphabet[letter & 1], self.alphabet[letter >> 1]
        return (self.alphabet[letter % 3],) if block_size == 1 else (fill,) * (block_size - 1) + (last,)

    def prompt(self, recipe: Recipe) -> Prompt:
        """Change and continue an earlier prompt, mostly under its own adapter and block size."""
        adapter, block_size, tokens = (
            self.prompts[recipe.base % len(self.prompts)]
            if self.prompts and recipe.cut != "nothing"
            else Prompt(ADAPTERS[recipe.home % 3], self.sizes[recipe.home % len(self.sizes)], ())
        )
        if recipe.home == 10:
            adapter = ADAPTERS[recipe.tail + 1]
        if recipe.home == 11:
            block_size = self.sizes[recipe.base % len(self.sizes)]
        count = len(tokens)
        if recipe.cut == "aligned":
            tokens = tokens[: count - count % block_size]
        elif recipe.cut == "half":
            tokens = tokens[: count // block_size // 2 * block_size]
        elif recipe.cut == "anywhere":
            return Prompt(adapter, block_size, tokens[: count * (4 * recipe.base + recipe.tail + 1) // 40])
        elif recipe.cut == "one less":
            tokens = tokens[: max(count - 1, 0)]
        elif recipe.cut == "mutated" and tokens:
            tokens = (*tokens[:-1], tokens[-1] ^ 1)
        elif recipe.cut == "folded":
            # The same tier key by way of the adapter, which is folded in like a token.
            if 0 < adapter < 2**32:
                adapter, tokens = 0, (adapter, *tokens)
            elif adapter == 0 and tokens and tokens[0] != 0:
                adapter, tokens = tokens[0], tokens[1:]
        for letter in recipe.letters:
            tokens += self.chunk(letter, block_size)
        tail = (0, 1, block_size // 2, block_size - 1)[recipe.tail]
        tokens += self.chunk(recipe.base & 3, block_size)[:tail]
        return Prompt(adapter, block_size, tokens[: MAX_CHUNKS * block_size + 2])

    def size_for(self, tokens: Tokens) -> int:
        """The smallest block size in use that does not cut the tokens into hundreds of chunks."""
        return min((size for size in self.sizes if size * 4 * MAX_CHUNKS >= len(tokens)), default=max(self.sizes))

    def remember(self, prompt: Prompt) -> None:
        if prompt in self.prompts:
            self.prompts.remove(prompt)
        self.prompts.insert(0, prompt)
        del self.prompts[REMEMBERED:]

    def new_blocks(self, count: int) -> Tokens:
        self.next_block += count
        return tuple(range(self.next_block - count, self.next_block))

    def slot(self, how: int = 0) -> int:
        """Mostly a new slot, or one that came back; now and then one that the index still holds."""
        residents = [entry.slot for entry in self.pair.model.entries if not entry.spilled]
        if how % 8 == 7 and residents:
            return residents[how % len(residents)]
        if how % 2 and self.pair.freed:
            return self.pair.freed.pop()
        self.next_slot += 1
        return self.next_slot - 1

    def table(self, prompt: Prompt, how: int) -> Tokens:
        """A block table: new blocks, the cache's own where it has some, too short, or longer than needed."""
        needed = -(-len(prompt.tokens) // prompt.block_size)
        blocks = self.new_blocks(needed)
        if how % 3 == 1:
            held, _ = self.pair.held_table(prompt.tokens, prompt.block_size, prompt.adapter)
            blocks = (*held, *blocks[len(held) :])[:needed]
        if how % 8 == 6:
            return blocks[:-1]
        if how % 8 == 7:
            return (*blocks, NONE, NONE)
        return blocks

    def disks(self, prompt: Prompt, table: Tokens, how: int) -> Tokens:
        """Disk ids as long as the table: none at all, new ones, some missing, the cache's own, all missing."""
        kind = how % 6
        if kind < 2:
            return ()
        ids = self.new_blocks(len(table))
        if kind == 3:
            return tuple(NONE if (how >> i) & 1 else disk for i, disk in enumerate(ids))
        if kind == 4:
            _, held = self.pair.held_table(prompt.tokens, prompt.block_size, prompt.adapter)
            return (*held, *ids[len(held) :])[: len(table)]
        if kind == 5:
            return (NONE,) * len(table)
        return ids

    def matched(self, prompt: Prompt, how: int) -> int:
        """A `matched_tokens`: often the true one rounded down, and many that are wrong."""
        count, block_size = len(prompt.tokens), prompt.block_size
        found = self.pair.peek(prompt.tokens, block_size, prompt.adapter)
        kinds = (0, found - found % block_size, found, count, count // 2, min(block_size - 1, count), 0)
        return kinds[how % len(kinds)]

    def insert(self, prompt: Prompt, how: int) -> None:
        table = self.table(prompt, how)
        disks = self.disks(prompt, table, how // 2)
        self.pair.insert(prompt.tokens, table, disks, prompt.block_size, self.matched(prompt, how // 3), prompt.adapter)
        self.remember(prompt)


class TreeMachine(Machine):
    """Any calls on the tree in any order, right or wrong; snapshots only as far as they share a call with it."""

    @rule(recipe=RECIPES, session=SESSION, record=RECORD)
    def lookup(self, recipe: Recipe, session: int, record: bool) -> None:
        prompt = self.prompt(recipe)
        self.pair.lookup(prompt.tokens, prompt.block_size, session, prompt.adapter, record)

    @precondition(lambda self: self.prompts)
    @rule(base=NUMBER, parts=st.lists(st.integers(1, 15), min_size=1, max_size=3), letter=st.integers(0, 3))
    def lookup_parts_of_a_prompt(self, base: int, parts: list[int], letter: int) -> None:
        """Look up the beginning of an earlier prompt, and the same with its last block begun in another way."""
        adapter, block_size, tokens = self.prompts[base % len(self.prompts)]
        for part in parts:
            cut = tokens[: len(tokens) * part // 15]
            aligned = cut[: len(cut) - len(cut) % block_size]
            if part % 3:
                self.pair.lookup(cut, block_size, 0, adapter)
            else:
                self.pair.pin_prefix(cut, block_size, adapter)
            self.pair.peek(aligned + self.chunk(letter, block_size)[: part % block_size], block_size, adapter)
            self.pair.release_matched(cut, block_size, len(aligned), adapter)

    @rule(recipe=RECIPES, take=st.booleans())
    def peek_or_pin(self, recipe: Recipe, take: bool) -> None:
        prompt = self.prompt(recipe)
        call = self.pair.pin_prefix if take else self.pair.peek
        call(prompt.tokens, prompt.block_size, prompt.adapter)

    @rule(recipe=RECIPES, how=NUMBER)
    def insert_some_prompt(self, recipe: Recipe, how: int) -> None:
        self.insert(self.prompt(recipe), how)

    @rule(recipe=RECIPES, how=NUMBER)
    def insert_another_prompt(self, recipe: Recipe, how: int) -> None:
        self.insert(self.prompt(recipe), how)

    @precondition(lambda self: self.prompts)
    @rule(base=NUMBER, kind=st.integers(0, 3), letter=st.integers(0, 3), how=NUMBER)
    def rewrite_a_tail(self, base: int, kind: int, letter: int, how: int) -> None:
        """Replace, cut or keep the part of an earlier prompt that is shorter than a block."""
        adapter, block_size, tokens = self.prompts[base % len(self.prompts)]
        aligned = tokens[: len(tokens) - len(tokens) % block_size]
        tail = self.chunk(letter, block_size)[: (1, block_size // 2, block_size - 1, block_size)[kind]]
        self.insert(Prompt(adapter, block_size, aligned + tail), how)

    @rule(recipe=RECIPES, times=st.integers(1, 3))
    def release(self, recipe: Recipe, times: int) -> None:
        prompt = self.prompt(recipe)
        for _ in range(times):
            self.pair.release(prompt.tokens, prompt.block_size, prompt.adapter)

    @precondition(lambda self: self.prompts)
    @rule(base=NUMBER, times=st.integers(1, 3), eighths=st.integers(0, 8))
    def release_part_of_a_prompt(self, base: int, times: int, eighths: int) -> None:
        adapter, block_size, tokens = self.prompts[base % len(self.prompts)]
        for _ in range(times):
            self.pair.release_matched(tokens, block_size, len(tokens) * eighths // 8, adapter)

    @precondition(lambda self: self.prompts)
    @rule(base=NUMBER, times=st.integers(0, 4), insert=st.booleans(), how=NUMBER)
    def make_a_prompt_invisible(self, base: int, times: int, insert: bool, how: int) -> None:
        """Drop references too often, and mostly insert over the nodes that no match sees any more."""
        prompt = self.prompts[base % len(self.prompts)]
        for _ in range(times):
            self.pair.release(prompt.tokens, prompt.block_size, prompt.adapter)
        self.pair.lookup(prompt.tokens, prompt.block_size, 0, prompt.adapter)
        if insert:
            self.insert(prompt, how)

    @rule(num_blocks=st.sampled_from((1, 0, 1, 2, 3, 1, 2, 8, 1, 2, 10**9)))
    def evict(self, num_blocks: int) -> None:
        self.pair.evict(num_blocks)

    @rule(recipe=RECIPES, how=NUMBER, session=SESSION)
    def insert_with_snapshot(self, recipe: Recipe, how: int, session: int) -> None:
        prompt = self.prompt(recipe)
        table = self.table(prompt, how)
        self.pair.insert_with_snapshot(
            prompt.tokens,
            table,
            self.disks(prompt, table, how // 2),
            prompt.block_size,
            self.slot(how),
            session,
            self.matched(prompt, how // 3),
            prompt.adapter,
        )
        self.remember(prompt)

    @rule(spill=st.booleans())
    def evict_a_snapshot(self, spill: bool) -> None:
        if spill:
            self.pair.evict_to_tier(0)
        else:
            self.pair.evict_lru()


class SnapshotMachine(Machine):
    """Any calls on the snapshot index in any order, over prompts that the tree holds or does not."""

    @rule(recipe=RECIPES, session=SESSION, record=RECORD)
    def lookup(self, recipe: Recipe, session: int, record: bool) -> None:
        prompt = self.prompt(recipe)
        self.pair.lookup(prompt.tokens, prompt.block_size, session, prompt.adapter, record)

    @precondition(lambda self: self.prompts)
    @rule(base=NUMBER, letters=st.lists(st.integers(0, 3), max_size=1), session=SESSION, record=RECORD)
    def lookup_an_earlier_prompt(self, base: int, letters: list[int], session: int, record: bool) -> None:
        adapter, block_size, tokens = self.prompts[base % len(self.prompts)]
        for letter in letters:
            tokens += self.chunk(letter, block_size)
        self.pair.lookup(tokens, block_size, session, adapter, record)

    @rule(recipe=RECIPES, how=NUMBER, session=SESSION)
    def register(self, recipe: Recipe, how: int, session: int) -> None:
        """Store a prompt, and a snapshot for the whole of it or a part."""
        prompt = self.prompt(recipe)
        table = self.table(prompt, how)
        disks = self.disks(prompt, table, how // 2)
        matched = self.matched(prompt, how // 3)
        if how % 2:
            self.pair.insert_with_snapshot(
                prompt.tokens, table, disks, prompt.block_size, self.slot(how // 2), session, matched, prompt.adapter
            )
        else:
            self.pair.insert(prompt.tokens, table, disks, prompt.block_size, matched, prompt.adapter)
            depth = len(prompt.tokens) * (4 - how // 2 % 4) // 4
            self.pair.insert_intermediate_snapshot(
                prompt.tokens[:depth],
                table,
                disks,
                prompt.block_size,
                self.slot(how // 2),
                session,
                min(matched, depth),
                prompt.adapter,
            )
        self.remember(prompt)

    @rule(recipe=RECIPES, how=NUMBER, session=SESSION)
    def finish_a_turn(self, recipe: Recipe, how: int, session: int) -> None:
        """Store a prompt, its tail and mostly a sibling, with the same slots again in some cases."""
        prompt = self.prompt(recipe)
        if how % 3:
            self.insert(prompt, how)
        self.pair.insert_tail(prompt.tokens, self.slot(how), session, prompt.adapter)
        if how % 4:
            depth = len(prompt.tokens) * (how % 4) // 4
            self.pair.insert_sibling(prompt.tokens[:depth], self.slot(how // 3), session, prompt.adapter)
        self.remember(prompt)

    @rule(recipe=RECIPES, session=SESSION, sibling=st.booleans(), how=NUMBER)
    def register_a_tail_or_sibling(self, recipe: Recipe, session: int, sibling: bool, how: int) -> None:
        prompt = self.prompt(recipe)
        call = self.pair.insert_sibling if sibling else self.pair.insert_tail
        call(prompt.tokens, self.slot(how), session, prompt.adapter)
        self.remember(prompt)

    @precondition(lambda self: self.pair.model.entries)
    @rule(which=NUMBER, how=NUMBER, session=SESSION)
    def register_again(self, which: int, how: int, session: int) -> None:
        """Overwrite an entry by each kind of call, mostly with its own slot or after a spill."""
        entry = self.entry(which, spilled=how % 2 == 1)
        adapter, tokens = entry.check
        slot = entry.slot if how % 8 == 0 and not entry.spilled else self.slot(how // 2)
        if how < 8:
            self.pair.insert_tail(tokens, slot, session, adapter)
        elif how < 16:
            self.pair.insert_sibling(tokens, slot, session, adapter)
        else:
            self.pair.insert_intermediate_snapshot(tokens, (), (), self.sizes[0], slot, session, 0, adapter)

    @precondition(lambda self: any(entry.tail or entry.sibling for entry in self.pair.model.entries))
    @rule(which=NUMBER, how=NUMBER, letters=st.lists(st.integers(0, 3), max_size=2))
    def move_a_tail(self, which: int, how: int, letters: list[int]) -> None:
        """Replace what a session left, which may have been spilled; half of the time in the same slot."""
        entries = [entry for entry in self.pair.model.entries if entry.tail or entry.sibling]
        entry = entries[which % len(entries)]
        adapter, tokens = entry.check
        for letter in letters:
            tokens += self.chunk(letter, self.size_for(tokens))
        slot = entry.slot if how % 2 and not entry.spilled else self.slot()
        self.pair.insert_tail(tokens, slot, entry.session, adapter)
        if how % 3:
            self.pair.insert_sibling(tokens[: len(tokens) // 2], self.slot(1), entry.session, adapter)

    @precondition(lambda self: self.pair.model.entries)
    @rule(which=NUMBER, kinds=st.lists(st.integers(0, 4), min_size=2, max_size=6))
    def lookup_and_evict(self, which: int, kinds: list[int]) -> None:
        """Lease a session that is due to be evicted, mostly without making it fresh, and evict past the lease's end."""
        entries = [entry for entry in self.pair.model.entries if entry.tail or entry.sibling]
        entries.sort(key=lambda entry: entry.stamp)
        entry = entries[which % min(len(entries), 3)] if entries else self.entry(which, spilled=False)
        adapter, tokens = entry.check
        block_size = self.size_for(tokens)
        prompt = Prompt(adapter, block_size, tokens + self.chunk(which & 3, block_size))
        self.insert(prompt, 0)
        looked_up = prompt.tokens if which % 3 == 0 else prompt.tokens[:block_size]
        self.pair.lookup(looked_up, block_size, entry.session, adapter)
        for kind in kinds:
            self.evict_one(kind, which)
        self.pair.lookup(prompt.tokens, block_size, entry.session if kinds[0] else 0, adapter)

    @rule(
        letter=st.integers(0, 3),
        kinds=st.lists(st.integers(0, 4), min_size=2, max_size=5),
        leased=st.sampled_from(SESSIONS[1:]),
        other=SESSION,
        alone=st.booleans(),
    )
    def let_a_lease_run_out(self, letter: int, kinds: list[int], leased: int, other: int, alone: bool) -> None:
        """Lease the stalest of two sessions, whose entries are not the oldest, and evict in every way."""
        block_size = self.sizes[0]
        tokens = self.chunk(letter, block_size) * 6
        while alone and len(self.pair.spilled()) < len(self.pair.model.entries):
            self.pair.evict_to_tier(0)
        self.insert(Prompt(0, block_size, tokens), 0)
        for depth in (6, 5):
            self.pair.insert_intermediate_snapshot(
                tokens[: depth * block_size], (), (), block_size, self.slot(1), other, 0, 0
            )
        self.pair.insert_tail(tokens[: 4 * block_size], self.slot(1), leased, 0)
        self.pair.insert_sibling(tokens[: 3 * block_size], self.slot(1), leased, 0)
        self.pair.insert_intermediate_snapshot(tokens[: 2 * block_size], (), (), block_size, self.slot(1), other, 0, 0)
        self.pair.lookup(tokens[:block_size], block_size, leased, 0)
        for kind in kinds:
            self.evict_one(kind, letter)

    @rule(times=st.integers(1, 4))
    def evict_lru(self, times: int) -> None:
        for _ in range(times):
            self.pair.evict_lru()

    @rule(times=st.integers(1, 4), min_tokens=st.sampled_from((0, 0, 1, 3, 16, 17, 300)))
    def evict_to_tier(self, times: int, min_tokens: int) -> None:
        for _ in range(times):
            self.pair.evict_to_tier(min_tokens)

    @rule(which=NUMBER)
    def evict_a_slot(self, which: int) -> None:
        """Evict by slot: one that the index holds, or one that it does not."""
        slots = [entry.slot for entry in self.pair.model.entries]
        self.pair.evict_slot(slots[which // 2 % len(slots)] if slots and which % 4 else self.next_slot)

    @rule(which=NUMBER, how=NUMBER)
    def promote(self, which: int, how: int) -> None:
        """Fault in a spilled snapshot, a resident or an unknown one, with the right check, a wrong one or none."""
        if not self.pair.model.entries or which == 0:
            self.pair.promote(how % 2 * (2**64 - 1), self.slot(), (0, ()) if how % 4 < 2 else None)
            return
        if how % 8 and not self.pair.spilled():
            self.pair.evict_to_tier(0)
        entry = self.entry(which, spilled=how % 8 != 0)
        others = [check for check in self.pair.numbers if check != entry.check]
        wrong = others[how % len(others)] if others and how % 2 else (entry.check[0] ^ 1, entry.check[1])
        check = (entry.check, None, wrong, entry.check)[how // 2 % 4]
        slot = self.slot(how // 2)
        if not self.pair.promote(entry.key, slot, check) and self.pair.slots.held[slot] == 0:
            self.pair.freed.append(slot)

    @precondition(lambda self: 0 < len(self.pair.spilled()) < len(self.pair.model.entries))
    @rule(which=NUMBER, times=st.integers(1, 2))
    def promote_into_a_slot_in_use_and_evict_that(self, which: int, times: int) -> None:
        """Two entries hold one slot, and the one that took it last may be the first of them."""
        entry, other = self.entry(which, spilled=True), self.entry(which // 2, spilled=False)
        self.pair.promote(entry.key, other.slot, entry.check)
        for _ in range(times):
            self.pair.evict_slot(other.slot)

    @rule(which=NUMBER, key=st.sampled_from((0, 1, 2**64 - 1)))
    def forget(self, which: int, key: int) -> None:
        if self.pair.model.entries and which % 3:
            key = self.entry(which // 3, spilled=which % 3 > 1).key
        self.pair.forget(key)

    @precondition(lambda self: self.pair.model.entries)
    @rule(which=NUMBER, adapter=st.sampled_from(ADAPTERS), letter=st.integers(0, 3), how=NUMBER, session=SESSION)
    def collide(self, which: int, adapter: int, letter: int, how: int, session: int) -> None:
        """Store another prompt under the tier key of an entry; look it up, register it, or spill the entry first."""
        entry = self.entry(which, spilled=how % 2 == 1)
        block_size = self.size_for(entry.check[1])
        if how % 4 and entry.depth >= 3:
            stem = (self.chunk(letter, block_size) * (entry.depth + 1))[: entry.depth - 3]
        else:
            stem = self.chunk(letter, block_size) * 3
        forged = forge(adapter, stem, entry.key)
        padding = self.chunk(letter, block_size)[: -len(forged) % block_size]
        prompt = Prompt(adapter, block_size, forged + padding)
        self.insert(prompt, 0)
        action = how // 4
        if action == 5:
            while not entry.spilled and entry in self.pair.model.entries:
                self.pair.evict_to_tier(0)
        if action >= 3:
            call = self.pair.insert_sibling if how % 2 else self.pair.insert_tail
            call(forged, self.slot(), session, adapter)
        self.pair.lookup(prompt.tokens, block_size, session, adapter)
        old_adapter, old_tokens = entry.check
        self.remember(Prompt(old_adapter, block_size, old_tokens))
        self.pair.lookup(old_tokens, block_size, session, old_adapter)

    @precondition(lambda self: len({entry.check[0] for entry in self.pair.model.entries}) > 1)
    @rule(which=NUMBER, spills=st.integers(0, 2))
    def drop_the_adapter_of_an_entry(self, which: int, spills: int) -> None:
        """Forget some of several adapters' entries, and let what is left say where it stands."""
        entries = self.pair.model.entries
        adapter = entries[which % len(entries)].check[0]
        for _ in range(spills):
            self.pair.evict_to_tier(0)
        self.pair.drop_adapter(adapter)
        if which % 2:
            self.pair.evict_lru()

    @rule(num_blocks=st.sampled_from((0, 1, 4)))
    def evict(self, num_blocks: int) -> None:
        self.pair.evict(num_blocks)

    def evict_one(self, kind: int, which: int) -> None:
        """Evict a snapshot in one of the ways there are."""
        if kind < 2:
            self.pair.evict_lru()
        elif kind == 2:
            self.pair.evict_to_tier(0)
        elif kind == 3:
            self.pair.evict_to_tier(5)
        else:
            self.pair.evict_slot(self.entry(which, spilled=False).slot if self.pair.model.entries else 0)

    def entry(self, which: int, spilled: bool) -> Entry:
        """Some entry, a spilled or a resident one if there is such a one."""
        entries = self.pair.model.entries
        preferred = [entry for entry in entries if entry.spilled == spilled]
        return (preferred or entries)[which % len(preferred or entries)]


@dataclass(eq=False)
class Sequence:
    """A running request: what it has computed, the blocks that hold it, and how much of it the cache counts as held."""

    adapter: int
    block_size: int
    session: int
    tokens: Tokens
    table: Tokens
    disks: Tokens
    held: int


class ProtocolMachine(Machine):
    """Callers who follow the protocol: nothing they hold is ever evicted, and no reference is dropped too often."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Sequence] = []

    def forgotten(self, adapter: int | None) -> None:
        # What such a sequence held is forgotten, and a release of it would take what somebody else holds by now.
        self.running = [sequence for sequence in self.running if adapter not in (None, sequence.adapter)]

    def let_go(self, adapter: int) -> None:
        for sequence in [sequence for sequence in self.running if sequence.adapter == adapter]:
            self.running.remove(sequence)
            self.end(sequence)

    def insert_whole(self, prompt: Prompt, with_disks: bool) -> None:
        sequence = self.start(prompt, 0, with_disks)
        self.publish(sequence, len(sequence.tokens))
        self.end(sequence)

    @invariant()
    def holds_nest(self) -> None:
        assert self.pair.model.holds_nest()

    @invariant()
    def what_a_sequence_holds_stays_cached(self) -> None:
        for sequence in self.running:
            held = sequence.tokens[: sequence.held]
            assert self.pair.cache.peek_matched_tokens(held, sequence.block_size, sequence.adapter) == sequence.held
        assert self.pair.cache.stats_detail().over_releases == 0

    def teardown(self) -> None:
        if hasattr(self, "pair") and self.pair.sound:
            for sequence in self.running:
                self.end(sequence)
            for name in self.pair.pins():
                self.pair.unpin(name)
            self.pair.evict(10**9)
            assert self.pair.cache.stats() == (0, 0), "a hold was leaked"
        super().teardown()

    def start(self, prompt: Prompt, session: int, with_disks: bool, record: bool = True) -> Sequence:
        """Look a prompt up and lay out its blocks; what was lent for a part of a block is copied to one of its own."""
        adapter, block_size, tokens = prompt
        match = self.pair.lookup(tokens, block_size, session, adapter, record)
        held = match.matched_tokens - match.matched_tokens % block_size
        reused = match.matched_blocks[: held // block_size]
        fresh = self.new_blocks(-(-len(tokens) // block_size) - len(reused))
        disks: Tokens = ()
        if with_disks:
            known = match.matched_disk_block_ids[: len(reused)] or [NONE] * len(reused)
            disks = (*known, *self.new_blocks(len(fresh)))
        return Sequence(adapter, block_size, session, tokens, (*reused, *fresh), disks, held)

    def publish(self, sequence: Sequence, count: int, snapshot: bool = False) -> None:
        """Insert the first `count` tokens, with what is held already as matched."""
        tokens = sequence.tokens[:count]
        size = sequence.block_size
        if snapshot:
            self.pair.insert_with_snapshot(
                tokens,
                sequence.table,
                sequence.disks,
                size,
                self.slot(1),
                sequence.session,
                sequence.held,
                sequence.adapter,
            )
        else:
            self.pair.insert(tokens, sequence.table, sequence.disks, size, sequence.held, sequence.adapter)
        stored = count
        if sequence.adapter in self.pair.model.quotas:
            # A chunk that was there already is not listed, so only the cache can tell how many are stored.
            stored = self.pair.peek(tokens, size, sequence.adapter)
        sequence.held = max(sequence.held, stored - stored % size)
        self.remember(Prompt(sequence.adapter, size, tokens))

    def end(self, sequence: Sequence) -> None:
        held = sequence.tokens[: sequence.held]
        assert self.pair.release(held, sequence.block_size, sequence.adapter) is None, "it was refused"

    @rule(
        recipe=RECIPES,
        session=SESSION,
        with_disks=st.booleans(),
        copies=st.integers(1, 3),
        quarters=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    )
    def admit(self, recipe: Recipe, session: int, with_disks: bool, copies: int, quarters: list[int]) -> None:
        """Start one sequence, or several with the same prompt; publish a part of each, and keep them running."""
        prompt = self.prompt(recipe)
        sequences = [self.start(prompt, session, with_disks) for _ in range(copies)]
        self.running += sequences
        for sequence, part in zip(sequences, quarters, strict=False):
            missing = len(sequence.tokens) - sequence.held
            if part:
                self.publish(sequence, sequence.held + missing * part // 4, snapshot=part == 4)

    @rule(recipe=RECIPES, session=SESSION, with_disks=st.booleans(), record=RECORD)
    def serve_at_once(self, recipe: Recipe, session: int, with_disks: bool, record: bool) -> None:
        sequence = self.start(self.prompt(recipe), session, with_disks, record)
        self.publish(sequence, len(sequence.tokens))
        self.pair.insert_tail(sequence.tokens, self.slot(1), session, sequence.adapter)
        self.end(sequence)

    @rule(recipe=RECIPES, session=SESSION, pin=st.booleans())
    def abort_before_any_insert(self, recipe: Recipe, session: int, pin: bool) -> None:
        adapter, block_size, tokens = self.prompt(recipe)
        if pin:
            matched = self.pair.pin_prefix(tokens, block_size, adapter)
        else:
            matched = self.pair.lookup(tokens, block_size, session, adapter).matched_tokens
        assert self.pair.release_matched(tokens, block_size, matched, adapter) is None, "it was refused"

    @precondition(lambda self: self.running)
    @rule(which=NUMBER, quarters=st.integers(1, 4), snapshot=st.booleans())
    def publish_more(self, which: int, quarters: int, snapshot: bool) -> None:
        sequence = self.running[which % len(self.running)]
        missing = len(sequence.tokens) - sequence.held
        self.publish(sequence, sequence.held + missing * quarters // 4, snapshot)

    @precondition(lambda self: self.running)
    @rule(which=NUMBER, letters=st.lists(st.integers(0, 3), min_size=1, max_size=2), part=st.booleans())
    def decode(self, which: int, letters: list[int], part: bool) -> None:
        """Compute some more tokens, into blocks as they are needed."""
        sequence = self.running[which % len(self.running)]
        size = sequence.block_size
        for letter in letters:
            sequence.tokens += self.chunk(letter, size)[: max(size // 2, 1) if part else size]
        fresh = -(-len(sequence.tokens) // size) - len(sequence.table)
        sequence.table += self.new_blocks(fresh)
        if sequence.disks:
            sequence.disks += self.new_blocks(fresh)

    @precondition(lambda self: self.running)
    @rule(which=NUMBER, publish=st.booleans())
    def finish(self, which: int, publish: bool) -> None:
        sequence = self.running.pop(which % len(self.running))
        if publish:
            self.publish(sequence, len(sequence.tokens))
        self.end(sequence)

    @rule(num_blocks=st.sampled_from((1, 2, 5, 20, 10**9)))
    def evict(self, num_blocks: int) -> None:
        self.pair.evict(num_blocks)

    @rule(min_tokens=st.sampled_from((0, 0, 4, 17)))
    def make_room_for_a_snapshot(self, min_tokens: int) -> None:
        self.pair.evict_to_tier(min_tokens)

    @precondition(lambda self: self.pair.spilled())
    @rule(which=NUMBER)
    def fault_a_snapshot_in(self, which: int) -> None:
        spilled = self.pair.spilled()
        entry = spilled[which % len(spilled)]
        assert self.pair.promote(entry.key, self.slot(1), entry.check)


class TestAnyCallsOnTheTree(TreeMachine.TestCase):  # type: ignore[name-defined, misc]
    """Hypothesis runs the machine as one test."""


class TestAnyCallsOnTheSnapshotIndex(SnapshotMachine.TestCase):  # type: ignore[name-defined, misc]
    """Hypothesis runs the machine as one test."""


class TestLawfulCallers(ProtocolMachine.TestCase):  # type: ignore[name-defined, misc]
    """Hypothesis runs the machine as one test."""


def test_the_deepest_snapshot_is_found_at_any_depth() -> None:
    pair = Pair(RadixTree, {"block_size": 16})
    tokens = tuple(i % 3 for i in range(9000))
    depths = (0, 1, 15, 16, 63, 64, 65, 127, 4095, 4096, 4097, 4160, 8191, 8192, 8193, 8999)
    pair.insert(tokens, tuple(range(562)), (), 16, 0, 0)
    for slot, depth in enumerate(depths):
        pair.insert_intermediate_snapshot(tokens[:depth], (), (), 16, slot, 0, 0, 0)
    for slot in reversed(range(len(depths))):
        for length in (16, 64, 80, 4080, 4096, 4112, 4160, 8176, 8192, 8208, 8992):
            assert pair.lookup(tokens[:length], 16, 0, 0).matched_tokens == length
        pair.evict_slot(slot)
    pair.compare_state()


def test_equal_scores_go_to_the_entry_at_the_lowest_index() -> None:
    pair = Pair(RadixTree, {"evict_alpha": 1.0})
    # With a weight of 1, an older and deeper entry scores as much as a newer and shallower one.
    for slot, depth in enumerate((3, 2, 1)):
        pair.insert_intermediate_snapshot((1,) * depth, (), (), 16, slot, 0, 0, 0)
    # The last entry moves to the place of the first.
    assert [pair.evict_lru() for _ in range(4)] == [0, 2, 1, None]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_forged_prompts_have_the_key_asked_for(adapter: int) -> None:
    key = tier_key(3, (1, 2, 3, 4, 5))
    assert tier_key(adapter, forge(adapter, (9, 9), key)) == key


def test_adapters_that_differ_in_any_half_have_different_check_hashes() -> None:
    pair = Pair(RadixTree, {})
    for adapter in (0, 7, 7 << 32, 2**32 + 7, 2**63 + 7, 2**64 - 1, 2**32 - 1):
        for tokens in ((), (0,), (7,), (0, 7), (7, 0)):
            pair.insert_intermediate_snapshot(tokens, (), (), 16, 1, 0, 0, adapter)
            assert pair.evict_to_tier(0).check == (adapter, tokens)
