"""What is counted: one call, or a series of the same, in caches that are filled the same way each time.

Each function here takes a :class:`~work_meter.Meter` and measures some calls under names that say what they are. It
relies on nothing but seeds and a fixed secret, so that tokens, hashes and thereby places in tables are the same always.
Run by itself, with ``METRALE_COUNT_WORK=1``, it gives out what all of them take as JSON; see :mod:`count_work`.
"""

from __future__ import annotations

import array
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from work_meter import Meter

from metrale_numba import RadixTree

Tokens = npt.NDArray[np.uint32]

BLOCK_SIZE = 16
LENGTHS = (256, 2_048, 32_768)
SEQUENCE = 2_048
OTHERS = 40
VOCABULARY = 128_000
NUM_SNAPSHOTS = (0, 64, 8_192)
NUM_LEAVES = 4_096
NUM_RELEASED = 1_000
NUM_SESSIONS = 4_000
RESIDENTS = 1_024
SPILLED = (0, 10_000)
GROWN_BLOCKS = 20_000
SECRET = b"the work of a call is the same each time"


class Draw:
    """Random tokens. RandomState, since NumPy keeps its stream the same from version to version."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.RandomState(seed)

    def tokens(self, length: int) -> Tokens:
        return self._random.randint(0, VOCABULARY, length).astype(np.uint32)

    def order(self, length: int) -> list[int]:
        return self._random.permutation(length).tolist()


def new_cache(*, reserve: int = 0, **settings: Any) -> RadixTree:
    return RadixTree(block_size=BLOCK_SIZE, check_secret=SECRET, reserve=reserve, **settings)


def blocks_of(tokens: Tokens) -> Tokens:
    return np.arange(-(-tokens.size // BLOCK_SIZE), dtype=np.uint32)


def store(cache: RadixTree, sequences: Iterable[Tokens]) -> None:
    """Insert sequences that nobody holds."""
    for tokens in sequences:
        cache.insert(tokens, blocks_of(tokens), matched_tokens=tokens.size)


def store_scattered(cache: RadixTree, sequences: Sequence[Tokens]) -> None:
    """The same, a block of each in turn, so that no block of a sequence lies beside the one before it."""
    for stop in range(BLOCK_SIZE, sequences[0].size + 1, BLOCK_SIZE):
        store(cache, [tokens[:stop] for tokens in sequences])


def in_turn(calls: Iterable[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def fans(draw: Draw, prefix_tokens: int, leaves: int) -> tuple[Tokens, list[Tokens]]:
    """A prefix, and sequences of one block more that differ in that block."""
    prefix = draw.tokens(prefix_tokens)
    return prefix, [np.concatenate([prefix, draw.tokens(BLOCK_SIZE)]) for _ in range(leaves)]


def lookups(measure: Meter) -> None:
    for layout, fill in (("in order", store), ("scattered", store_scattered)):
        draw = Draw(1)
        cache = new_cache(reserve=20_000)
        store(cache, [draw.tokens(SEQUENCE) for _ in range(OTHERS)])
        for length in LENGTHS:
            tokens = draw.tokens(length)
            fill(cache, [tokens, draw.tokens(length)])
            what = f"{length:,} tokens {layout}"
            measure(f"peek {what}", cache.peek_matched_tokens, tokens)
            match = measure(f"look up {what}", cache.lookup, tokens)
            assert match.matched_tokens == length
            measure(f"release {what}", cache.release, tokens)


def misses(measure: Meter) -> None:
    draw = Draw(2)
    cache = new_cache(reserve=20_000)
    others = [draw.tokens(SEQUENCE) for _ in range(OTHERS)]
    store(cache, others)
    tokens = draw.tokens(SEQUENCE)
    assert measure("look up tokens of which none is cached", cache.lookup, tokens).is_empty()
    measure("look up tokens of an unknown adapter", cache.lookup, tokens, adapter_id=1)
    tokens[: SEQUENCE // 2] = others[7][: SEQUENCE // 2]
    match = measure("look up tokens of which half are cached", cache.lookup, tokens)
    assert match.matched_tokens == SEQUENCE // 2
    measure("release tokens of which half are cached", cache.release, tokens)


def kinds_of_tokens(measure: Meter) -> None:
    draw = Draw(3)
    cache = new_cache(reserve=1_000)
    tokens = draw.tokens(SEQUENCE)
    store(cache, [tokens])
    for kind, same in (
        ("a list", tokens.tolist()),
        ("an array.array", array.array("I", tokens.tolist())),
        ("an array with gaps", np.repeat(tokens, 2)[::2]),
        ("an array of int64", tokens.astype(np.int64)),
    ):
        match = measure(f"look up {kind} of 2,048 tokens", cache.lookup, same)
        assert match.matched_tokens == SEQUENCE
        measure(f"release {kind} of 2,048 tokens", cache.release, same)


def other_block_sizes(measure: Meter) -> None:
    draw = Draw(4)
    cache = RadixTree(block_size=5, check_secret=SECRET, reserve=10_000)
    tokens = draw.tokens(2_000)
    measure("insert 2,000 new tokens, blocks of 5", cache.insert, tokens, np.arange(400, dtype=np.uint32))
    measure("look up 2,000 tokens, blocks of 5", cache.lookup, tokens)
    measure("release 2,000 tokens, blocks of 5", cache.release, tokens)


def inserts(measure: Meter) -> None:
    draw = Draw(5)
    cache = new_cache(reserve=20_000)
    store(cache, [draw.tokens(SEQUENCE) for _ in range(OTHERS)])
    tokens = draw.tokens(SEQUENCE)
    measure("insert 2,048 new tokens", cache.insert, tokens, blocks_of(tokens))
    measure("insert 2,048 cached tokens", cache.insert, tokens, blocks_of(tokens), matched_tokens=SEQUENCE)
    longer = np.concatenate([tokens, draw.tokens(BLOCK_SIZE + 8)])
    measure(
        "insert 24 new tokens behind 2,048 cached ones",
        cache.insert,
        longer,
        blocks_of(longer),
        matched_tokens=SEQUENCE,
    )
    # Into rows that evictions left behind, in the order in which they left them.
    cache.evict(1_000)
    tokens = draw.tokens(SEQUENCE)
    measure("insert 2,048 new tokens after evictions", cache.insert, tokens, blocks_of(tokens))
    measure("look up 2,048 tokens inserted after evictions", cache.lookup, tokens)


def growth(measure: Meter) -> None:
    draw = Draw(6)
    cache = new_cache()
    sequences = [draw.tokens(SEQUENCE) for _ in range(GROWN_BLOCKS * BLOCK_SIZE // SEQUENCE)]
    measure("grow from 0 to 20,000 blocks", store, cache, sequences)


def drains(measure: Meter) -> None:
    draw = Draw(7)
    cache = new_cache(reserve=20_000)
    store(cache, [draw.tokens(SEQUENCE) for _ in range(2 * OTHERS)])
    measure("evict 1 block of a sequence", cache.evict, 1)
    measure("evict the 127 blocks that are left of a sequence", cache.evict, 127)
    measure("evict 64 blocks of a sequence", cache.evict, 64)
    measure("evict 4,096 blocks of sequences", cache.evict, 4_096)


def leaves(measure: Meter) -> None:
    draw = Draw(8)
    cache = new_cache(reserve=20_000)
    _, sequences = fans(draw, BLOCK_SIZE, NUM_LEAVES)
    store(cache, sequences)
    for i in draw.order(NUM_LEAVES):
        cache.lookup(sequences[i])
        cache.release(sequences[i])
    for number in (1, 64, 1_024):
        evicted = measure(f"evict {number:,} of 4,096 single leaves", cache.evict, number)
        assert evicted.physical.size == number


def releases(measure: Meter) -> None:
    draw = Draw(9)
    cache = new_cache(reserve=20_000)
    sequences = [draw.tokens(4 * BLOCK_SIZE) for _ in range(NUM_RELEASED)]
    for tokens in sequences:
        cache.insert(tokens, blocks_of(tokens))
    order = draw.order(NUM_RELEASED)
    measure(
        "release 1,000 sequences of 4 blocks",
        in_turn,
        [lambda tokens=sequences[i]: cache.release(tokens) for i in order],
    )
    measure("evict 1 block after a release of 1,000 sequences", cache.evict, 1)


def stamps(measure: Meter) -> None:
    draw = Draw(10)
    cache = new_cache(reserve=20_000)
    _, sequences = fans(draw, BLOCK_SIZE, NUM_RELEASED)
    store(cache, sequences)
    order = [i for _ in range(10) for i in draw.order(NUM_RELEASED)]

    def stamp(tokens: Tokens) -> None:
        cache.lookup(tokens)
        cache.release(tokens)

    measure(
        "look up and release 10,000 times among 1,000 leaves",
        in_turn,
        [lambda tokens=sequences[i]: stamp(tokens) for i in order],
    )
    measure("evict 1 block after 10,000 stamps", cache.evict, 1)


def snapshots(measure: Meter) -> None:
    for number in NUM_SNAPSHOTS:
        draw = Draw(11)
        cache = new_cache(reserve=20_000)
        tokens = draw.tokens(SEQUENCE)
        store(cache, [tokens, *(draw.tokens(SEQUENCE) for _ in range(OTHERS))])
        elsewhere = [draw.tokens(2 * BLOCK_SIZE + i % BLOCK_SIZE) for i in range(number)]
        for slot, prefix in enumerate(elsewhere):
            cache.insert_intermediate_snapshot(prefix, blocks_of(prefix), (), None, slot, slot + 1)
        beside = f"with {number:,} snapshots elsewhere"
        match = measure(f"look up, no snapshot, {beside}", cache.lookup, tokens)
        assert match.ssm_snapshot is None
        for place, depth in (("on the grid", SEQUENCE // 2), ("off the grid", SEQUENCE - 7), ("at the end", SEQUENCE)):
            prefix = tokens[:depth].copy()
            measure(
                f"register a snapshot {place}, {beside}",
                cache.insert_intermediate_snapshot,
                prefix,
                blocks_of(prefix),
                (),
                None,
                100_000 + depth,
            )
            match = measure(f"look up, snapshot {place}, {beside}", cache.lookup, tokens)
            assert match.ssm_snapshot == 100_000 + depth
        new = draw.tokens(SEQUENCE)
        measure(f"insert 2,048 new tokens {beside}", cache.insert, new, blocks_of(new))


def foreign_snapshots(measure: Meter) -> None:
    """Snapshots that another session's tail keeps from being used: each is looked at and passed over."""
    draw = Draw(12)
    cache = new_cache(reserve=1_000)
    tokens = draw.tokens(SEQUENCE)
    store(cache, [tokens])
    for session in range(1, 9):
        cache.insert_tail_snapshot(tokens[: session * 200].copy(), session, session)
    match = measure("look up, 8 tails of other sessions on the way", cache.lookup, tokens, session_hash=99)
    assert match.ssm_snapshot is None


def tails(measure: Meter) -> None:
    draw = Draw(13)
    cache = new_cache(reserve=1_000)
    for session in range(1, NUM_SESSIONS + 1):
        cache.insert_tail_snapshot(draw.tokens(20), session, session)
    session = NUM_SESSIONS + 1
    measure("register a first tail among 4,000 sessions", cache.insert_tail_snapshot, draw.tokens(512), 9_000, session)
    given_up = measure(
        "register a later tail among 4,000 sessions", cache.insert_tail_snapshot, draw.tokens(512), 9_001, session
    )
    assert given_up == [9_000]


def residents(measure: Meter) -> None:
    for number in SPILLED:
        draw = Draw(14)
        cache = new_cache(reserve=1_000)

        def register(slot: int, cache: RadixTree = cache, draw: Draw = draw) -> None:
            tokens = draw.tokens(20 + slot % 8)
            cache.insert_intermediate_snapshot(tokens, blocks_of(tokens), (), None, slot, 1 + slot % 100)

        for slot in range(number):
            register(slot)
            assert cache.evict_snapshot_to_tier(0) is not None
        for slot in range(RESIDENTS):
            register(slot)
        beside = f"of 1,024 resident snapshots beside {number:,} spilled ones"
        assert measure(f"evict one {beside}", cache.evict_snapshot_lru) is not None
        assert measure(f"spill one {beside}", cache.evict_snapshot_to_tier, 0) is not None
        assert measure(f"evict the one in a slot {beside}", cache.evict_snapshot_slot, RESIDENTS // 2)


def partial_tails(measure: Meter) -> None:
    draw = Draw(15)
    cache = new_cache(reserve=20_000, partial_tail_sharing=True)
    _, sequences = fans(draw, BLOCK_SIZE, NUM_LEAVES)
    store(cache, sequences)
    for which, tokens in (("newest", sequences[-1]), ("oldest", sequences[0])):
        match = measure(f"look up half a block, the {which} of 4,096 children", cache.lookup, tokens[:24].copy())
        assert match.matched_tokens == 24
        cache.release_matched(tokens[:24].copy(), None, 24)
    none = np.concatenate([sequences[0][:BLOCK_SIZE], draw.tokens(8)])
    match = measure("look up half a block, none of 4,096 children", cache.lookup, none)
    assert match.matched_tokens == BLOCK_SIZE
    measure("look up whole blocks, the oldest of 4,096 children", cache.lookup, sequences[0])


SCENARIOS: tuple[Callable[[Meter], None], ...] = (
    lookups,
    misses,
    kinds_of_tokens,
    other_block_sizes,
    inserts,
    growth,
    drains,
    leaves,
    releases,
    stamps,
    snapshots,
    foreign_snapshots,
    tails,
    residents,
    partial_tails,
)


if __name__ == "__main__":
    meter = Meter()
    for scenario in SCENARIOS:
        scenario(meter)
    click.echo(json.dumps(meter.work))
