"""Hashes that collide, by accident, on purpose or all at once, and the two hashes themselves.

It relies on :mod:`model` for FNV-1a, on :mod:`pair` to forge tokens with a wanted tier key, and computes the check hash
with Python's own integers. A hash that only finds candidates must never show in an answer; a tier key, which anybody
can forge, must never stand for another prefix than its own.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_conformance
from model import tier_key
from pair import Pair, forge
from state import differences, snapshot_of

import metrale_numba.kernels
from metrale_numba import RadixTree, Spill
from metrale_numba.kernels import compile as compiler
from metrale_numba.kernels import hashing, layout

SECRET = b"fixed"

# --- every hash that only finds candidates is a constant ----------------------------------------------------------

#: The first slot of a table, the last, from where the search goes round, and one in between.
CONSTANTS = (0, 0xFFFF_FFFF, 0x5555_5555)
ADAPTERS = (0, 1, 2**63 + 5, 2**64 - 1)
SESSIONS = (0, 1, 2, 2**63 + 9)


def force_constant_hashes() -> None:
    """Replace the hash that places things in tables, in every module of kernels and before any is compiled.

    What it gives is a constant of the cache: the upper half of what would otherwise be its secret multiplier.
    """

    @hashing.register_jitable
    def constant_hash(value, multiplier):  # type: ignore[no-untyped-def]
        return multiplier >> hashing.HALF_WORD

    assert not compiler._compiled
    original = hashing.table_hash
    names = [found.name for found in pkgutil.iter_modules(metrale_numba.kernels.__path__)]
    modules = {name: importlib.import_module(f"metrale_numba.kernels.{name}") for name in names}
    holders = [(name, held) for name in names for held, value in vars(modules[name]).items() if value is original]
    for name, held in holders:
        setattr(modules[name], held, constant_hash)
    assert {name for name, _ in holders} >= {
        "hashing",
        "walk",
        "insertion",
        "removal",
        "entries",
        "victims",
        "compaction",
    }


def crowded(constant: int, **settings: Any) -> RadixTree:
    """A cache in whose tables everything has one home."""
    cache = RadixTree(**settings)
    cache._shared.header[layout.SHARED_MULTIPLIER] = np.uint64(constant << 32).astype(np.int64)
    cache._index.arrays.header[layout.INDEX_MULTIPLIER] = cache._shared.header[layout.SHARED_MULTIPLIER]
    return cache


def hashes_in_tables(cache: RadixTree) -> list[int]:
    """The upper half of every used slot."""
    index = cache._index.arrays
    tables = [index.keys, index.checks, index.sessions, index.floor_table]
    tables += [pool.table for pool in cache._pools.values()]
    return [int(slot) >> 32 for table in tables for slot in table if slot != layout.EMPTY_SLOT]


def play_traces(constant: int) -> tuple[int, int]:
    """Play every recorded trace; how many calls, and how many slots were in use."""
    caches: list[RadixTree] = []

    def new_cache(**settings: Any) -> RadixTree:
        caches.append(crowded(constant, **settings))
        return caches[-1]

    calls = slots = 0
    for trace in test_conformance.TRACES:
        test_conformance.test_every_answer_is_the_recorded_one(new_cache, trace)
        calls += sum(1 for _ in test_conformance.read(trace)) - 1
        hashes = hashes_in_tables(caches[-1])
        assert set(hashes) <= {constant}
        slots += len(hashes)
    assert len(caches) == len(test_conformance.TRACES)
    return calls, slots


def play_at_random(constant: int, seed: int, num_steps: int) -> int:
    """Make any calls on a cache and the model, compare all answers, and say how many slots were in use at most."""
    rng = random.Random(seed)
    settings = {
        "partial_tail_sharing": rng.random() < 0.5,
        "adopt_blocks": rng.random() < 0.3,
        "hermetic": rng.random() < 0.2,
        "evict_alpha": rng.choice((0.0, 0.75)),
        "tail_lease_ttl": rng.choice((2, 64)),
        "block_size": 2,
    }
    pair = Pair(lambda **wanted: crowded(constant, **wanted), settings)
    ids = itertools.count(1)
    prompts: list[tuple[int, ...]] = [()]
    most = 0
    for _ in range(num_steps):
        adapter, block_size, session = rng.choice(ADAPTERS), rng.choice((1, 2, 3)), rng.choice(SESSIONS)
        base = rng.choice(prompts)
        tokens = base[: rng.randint(0, len(base))] if rng.random() < 0.4 else base
        tokens += tuple(rng.choice((0, 1, 7, 2**32 - 1)) for _ in range(rng.randint(0, 5)))
        tokens = tokens[:24]
        prompts = [*prompts[-20:], tokens]
        table = tuple(next(ids) for _ in range(-(-len(tokens) // block_size)))
        disks = tuple(next(ids) for _ in table) if rng.random() < 0.3 else ()
        blocks = (tokens, table, disks, block_size)
        what = rng.randrange(12)
        if rng.random() < 0.05:
            pair.compact()
        if what < 3:
            pair.insert(*blocks, 0, adapter)
        elif what < 5:
            pair.insert_with_snapshot(*blocks, next(ids), session, 0, adapter)
        elif what == 5:
            pair.insert_tail(tokens, next(ids), session, adapter)
            pair.insert_sibling(tokens[: len(tokens) // 2], next(ids), session, adapter)
        elif what < 8:
            match = pair.lookup(tokens, block_size, session, adapter)
            pair.release_matched(tokens, block_size, match.matched_tokens, adapter)
        elif what == 8:
            for _ in range(3):
                pair.release(tokens, block_size, adapter)
        elif what == 9:
            pair.evict(rng.choice((1, 5, 30)))
        elif what == 10:
            spill = pair.evict_to_tier(rng.choice((0, 3)))
            if spill is not None and hasattr(spill, "key") and rng.random() < 0.3:
                pair.promote(spill.key, next(ids), spill.check)
        elif pair.spilled():
            pair.forget(rng.choice(pair.spilled()).key)
        pair.compare_state()
        hashes = hashes_in_tables(pair.cache)
        assert set(hashes) <= {constant}
        most = max(most, len(hashes))
    pair.drain()
    return most


def play_with_constant_hashes() -> None:
    """What the process of the test below does: play, and write down how much was played."""
    force_constant_hashes()
    report = {}
    for constant in CONSTANTS:
        calls, slots = play_traces(constant)
        most = min(play_at_random(constant, seed, 300) for seed in range(4))
        report[constant] = {"calls": calls, "slots": slots, "most": most}
    json.dump(report, sys.stdout)


def test_every_answer_is_right_if_every_hash_that_finds_candidates_is_the_same(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "METRALE_CACHE_DIR": str(tmp_path),
    }
    played = subprocess.run(
        [sys.executable, "-c", "import test_hash_collisions as t; t.play_with_constant_hashes()"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert played.returncode == 0, played.stderr
    report = json.loads(played.stdout)
    assert [int(constant) for constant in report] == list(CONSTANTS)
    for counts in report.values():
        assert counts["calls"] > 10_000
        assert counts["slots"] > 1_000
        assert counts["most"] > 300
    assert list(tmp_path.glob("metrale_numba/*/*")), "the process compiled into another directory"


# --- two prefixes with one tier key -------------------------------------------------------------------------------

Prefix = tuple[int, tuple[int, ...]]

PLAIN: Prefix = (0, (3, 1, 4, 1))
#: Pairs of prefixes with the same tier key; none begins with the other.
COLLISIONS: dict[str, tuple[Prefix, Prefix]] = {
    "adapter folded in": ((0, (1, 7)), (1, (7,))),
    "equal lengths": (PLAIN, (0, forge(0, (2,), tier_key(*PLAIN)))),
    "other lengths": (PLAIN, (0, forge(0, (2, 7, 1), tier_key(*PLAIN)))),
    "other adapters": (PLAIN, (2**64 - 1, forge(2**64 - 1, (2,), tier_key(*PLAIN)))),
    "same adapter": ((9, PLAIN[1]), (9, forge(9, (2,), tier_key(9, PLAIN[1])))),
    "no tokens": ((0, ()), (9, forge(9, (), tier_key(0, ())))),
}
COLLISIONS |= {f"{label}, the other way round": pair[::-1] for label, pair in COLLISIONS.items()}

EACH_COLLISION = pytest.mark.parametrize(("mine", "forged"), COLLISIONS.values(), ids=COLLISIONS)
PADDING = (10, 11, 12)


def store(cache: RadixTree, *prefixes: Prefix) -> None:
    """Store the blocks of each prefix and some more, so that it matches whole, by itself and as the beginning."""
    blocks = itertools.count(100)
    for adapter, tokens in prefixes:
        prompt = (*tokens, *PADDING)
        cache.insert(prompt, [next(blocks) for _ in prompt], (), 1, 0, adapter)


def find(cache: RadixTree, prefix: Prefix, session: int = 5) -> tuple[int | None, int | None, int | None]:
    """The slot, tier key and check hash that a look-up of the prefix and some more finds."""
    adapter, tokens = prefix
    match = cache.lookup((*tokens, *PADDING), 1, session, adapter)
    assert match.matched_tokens == len(tokens) + len(PADDING)
    cache.release((*tokens, *PADDING), 1, adapter)
    return match.ssm_snapshot, match.ssm_snapshot_tier_key, match.ssm_snapshot_check


NOTHING = (None, None, None)
REGISTERING: dict[str, Callable[[RadixTree, Prefix, int], int | None]] = {
    "insert_with_snapshot": lambda cache, prefix, slot: cache.insert_with_snapshot(
        prefix[1], range(len(prefix[1])), (), 1, slot, 5, 0, prefix[0]
    )[0],
    "insert_intermediate_snapshot": lambda cache, prefix, slot: cache.insert_intermediate_snapshot(
        prefix[1], range(len(prefix[1])), (), 1, slot, 5, 0, prefix[0]
    ),
    "insert_tail_snapshot": lambda cache, prefix, slot: next(
        iter(cache.insert_tail_snapshot(prefix[1], slot, 5, prefix[0])), None
    ),
    "insert_tail_sibling_snapshot": lambda cache, prefix, slot: cache.insert_tail_sibling_snapshot(
        prefix[1], slot, 5, prefix[0]
    ),
}
EACH_WAY_TO_REGISTER = pytest.mark.parametrize("register", REGISTERING.values(), ids=REGISTERING)


@EACH_COLLISION
def test_the_prefixes_do_collide_and_do_differ(mine: Prefix, forged: Prefix) -> None:
    assert tier_key(*mine) == tier_key(*forged)
    assert mine != forged


@pytest.mark.parametrize("hermetic", [False, True])
@EACH_WAY_TO_REGISTER
@EACH_COLLISION
def test_a_lookup_never_finds_the_snapshot_of_a_prefix_with_the_same_key(
    mine: Prefix, forged: Prefix, register: Callable[..., Any], hermetic: bool
) -> None:
    cache = RadixTree(hermetic=hermetic)
    store(cache, mine, forged)
    register(cache, mine, 1)
    slot, key, check = find(cache, mine)
    assert (slot, key) == (1, None)
    assert find(cache, forged) == NOTHING
    spill = cache.evict_snapshot_to_tier(0)
    assert spill == Spill(1, tier_key(*mine), len(mine[1]), check)
    assert find(cache, mine) == (None, tier_key(*mine), check)
    assert find(cache, forged) == NOTHING
    cache.promote_snapshot(spill.key, 2, spill.check)
    assert find(cache, mine) == (2, None, check)
    assert find(cache, forged) == NOTHING
    cache.check_integrity()


@EACH_COLLISION
def test_a_lookup_passes_a_collision_by_and_finds_a_shallower_snapshot(mine: Prefix, forged: Prefix) -> None:
    cache = RadixTree()
    store(cache, mine, forged)
    adapter, tokens = forged
    if tokens:
        shallower = (adapter, tokens[:-1])
        REGISTERING["insert_tail_sibling_snapshot"](cache, shallower, 3)
    REGISTERING["insert_tail_sibling_snapshot"](cache, mine, 1)
    before = cache.snapshot_stats()
    assert find(cache, forged)[0] == (3 if tokens else None)
    after = cache.snapshot_stats()
    assert after.hits - before.hits == (1 if tokens else 0)
    assert after.anchor_depth_sum - before.anchor_depth_sum == max(len(tokens) - 1, 0)


@EACH_WAY_TO_REGISTER
@EACH_COLLISION
def test_a_snapshot_with_the_same_key_takes_the_place_of_the_other(
    mine: Prefix, forged: Prefix, register: Callable[..., Any]
) -> None:
    cache = RadixTree()
    store(cache, mine, forged)
    REGISTERING["insert_intermediate_snapshot"](cache, mine, 1)
    saves = cache.snapshot_stats().saves
    _, _, check = find(cache, mine)
    assert register(cache, forged, 2) == 1
    assert cache.snapshot_count() == 1
    assert cache.snapshot_stats().saves == saves
    assert find(cache, mine) == NOTHING
    slot, key, other_check = find(cache, forged)
    assert (slot, key) == (2, None)
    assert other_check != check
    cache.check_integrity()


@EACH_WAY_TO_REGISTER
@EACH_COLLISION
def test_a_snapshot_takes_the_place_of_a_spilled_one_with_the_same_key(
    mine: Prefix, forged: Prefix, register: Callable[..., Any]
) -> None:
    cache = RadixTree()
    store(cache, mine, forged)
    REGISTERING["insert_intermediate_snapshot"](cache, mine, 1)
    spill = cache.evict_snapshot_to_tier(0)
    # The slot that was spilled from is free, so nothing is handed back.
    assert register(cache, forged, 1) is None
    assert find(cache, mine) == NOTHING
    assert find(cache, forged)[:2] == (1, None)
    assert not cache.forget_snapshot_tier_key(spill.key)
    assert not cache.promote_snapshot(spill.key, 3, spill.check)
    assert not cache.promote_snapshot(spill.key, 3)
    assert cache.evict_snapshot_lru() == 1
    cache.check_integrity()


@EACH_COLLISION
def test_bytes_read_for_one_prefix_are_not_promoted_for_another_with_the_same_key(mine: Prefix, forged: Prefix) -> None:
    cache = RadixTree()
    store(cache, mine, forged)
    REGISTERING["insert_intermediate_snapshot"](cache, mine, 1)
    spill = cache.evict_snapshot_to_tier(0)
    # While the bytes are read, the other prefix is registered and spilled under the key.
    REGISTERING["insert_intermediate_snapshot"](cache, forged, 2)
    other_spill = cache.evict_snapshot_to_tier(0)
    assert other_spill.key == spill.key
    before = snapshot_of(cache)
    assert not cache.promote_snapshot(spill.key, 3, spill.check)
    assert differences(before, snapshot_of(cache)) == []
    assert find(cache, mine) == NOTHING
    assert find(cache, forged) == (None, spill.key, other_spill.check)
    assert cache.promote_snapshot(spill.key, 3, other_spill.check)
    assert find(cache, mine) == NOTHING
    assert find(cache, forged) == (3, None, other_spill.check)


@EACH_COLLISION
def test_forgetting_a_key_forgets_the_prefix_that_has_it_now(mine: Prefix, forged: Prefix) -> None:
    cache = RadixTree()
    store(cache, mine, forged)
    REGISTERING["insert_intermediate_snapshot"](cache, mine, 1)
    REGISTERING["insert_intermediate_snapshot"](cache, forged, 2)
    assert not cache.forget_snapshot_tier_key(tier_key(*mine))
    cache.evict_snapshot_to_tier(0)
    assert cache.forget_snapshot_tier_key(tier_key(*mine))
    assert cache.snapshot_count() == 0
    assert find(cache, forged) == NOTHING
    cache.check_integrity()


@EACH_COLLISION
def test_a_tail_sweep_leaves_the_snapshot_that_overwrote_the_tail(mine: Prefix, forged: Prefix) -> None:
    cache = RadixTree()
    store(cache, mine, forged)
    cache.insert_tail_snapshot(mine[1], 1, 5, mine[0])
    assert cache.insert_intermediate_snapshot(forged[1], range(len(forged[1])), (), 1, 2, 6, 0, forged[0]) == 1
    assert cache.insert_tail_snapshot((99,), 3, 5) == []
    assert find(cache, forged)[0] == 2


# --- the hashes themselves ----------------------------------------------------------------------------------------

CHECK_PRIME = 2**64 - 59


def secret_base(secret: bytes) -> int:
    """The base of the check hash, as it must come out of a secret in every release, so that replicas agree."""
    digest = hashlib.blake2b(secret, digest_size=24, person=b"metrale.check.v1").digest()
    return 2 + int.from_bytes(digest[:16], "little") % (CHECK_PRIME - 2)


def check_hash(base: int, adapter: int, tokens: Iterable[int]) -> int:
    """A polynomial in the base: 1, the halves of the adapter, then the tokens, highest power first."""
    check = 1
    for word in (adapter >> 32, adapter % 2**32, *tokens):
        check = (check * base + word) % CHECK_PRIME
    return check


def hashes_of(cache: RadixTree, prefix: Prefix) -> tuple[int, int]:
    """The tier key and the check hash that the cache has for a prefix."""
    adapter, tokens = prefix
    assert cache.insert_tail_sibling_snapshot(tokens, 0, 0, adapter) is None
    spill = cache.evict_snapshot_to_tier(0)
    assert spill.depth == len(tokens)
    return spill.key, spill.check


def some_prefixes() -> Iterator[Prefix]:
    """Prefixes of lengths around those at which a kernel goes over to its next step, of ordinary and extreme tokens."""
    rng = np.random.default_rng(3)
    for length in (0, 1, 2, 3, 14, 15, 16, 17, 18, 31, 32, 33, 47, 48, 49, 64, 100, 257, 1000):
        for adapter in (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1):
            yield adapter, tuple(rng.integers(0, 2**32, length).tolist())
            yield adapter, (2**32 - 1,) * length
            yield adapter, (0,) * length


@pytest.mark.parametrize("secret", [b"", b"fixed", bytes(range(256))])
def test_both_hashes_are_what_exact_arithmetic_gives(secret: bytes) -> None:
    cache = RadixTree(check_secret=secret)
    base = secret_base(secret)
    for prefix in some_prefixes():
        assert hashes_of(cache, prefix) == (tier_key(*prefix), check_hash(base, *prefix))


@pytest.mark.parametrize("base", [2, 3, 2**32, 2**63, 2**64 - 2**32, CHECK_PRIME - 2, CHECK_PRIME - 1])
def test_the_check_hash_is_exact_for_the_most_awkward_bases(base: int) -> None:
    cache = RadixTree()
    powers = cache._shared.powers
    cache._kernels["fill_powers"](np.uint64(base), powers)
    # From 0 to that of a whole step, then those of a step's tokens, of which the first has the highest.
    exponents = [*range(hashing.CHECK_GROUP + 1), *reversed(range(hashing.CHECK_GROUP))]
    assert powers.tolist() == [pow(base, exponent, CHECK_PRIME) for exponent in exponents]
    for prefix in some_prefixes():
        assert hashes_of(cache, prefix)[1] == check_hash(base, *prefix)


def test_the_tier_key_is_the_published_fnv_1a_for_tokens_below_256() -> None:
    cache = RadixTree()
    published = {b"": 0xCBF29CE484222325, b"a": 0xAF63DC4C8601EC8C, b"foobar": 0x85944171F73967E8}
    for text, key in published.items():
        assert hashes_of(cache, (0, tuple(text)))[0] == key


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_lookup_knows_the_same_hashes_as_a_registration(block_size: int) -> None:
    cache = RadixTree(check_secret=SECRET, block_size=block_size, partial_tail_sharing=True)
    base = secret_base(SECRET)
    tokens = tuple(np.random.default_rng(5).integers(0, 2**32, 100).tolist())
    for adapter in (0, 2**64 - 1):
        cache.insert(tokens, range(100), adapter_id=adapter)
        for depth in range(101):
            cache.insert_tail_sibling_snapshot(tokens[:depth], depth, 0, adapter)
            cache.evict_snapshot_to_tier(0)
            match = cache.lookup(tokens, adapter_id=adapter)
            assert match.ssm_snapshot_tier_key == tier_key(adapter, tokens[:depth])
            assert match.ssm_snapshot_check == check_hash(base, adapter, tokens[:depth])
            cache.forget_snapshot_tier_key(match.ssm_snapshot_tier_key)


def checks(cache: RadixTree) -> list[int]:
    return [hashes_of(cache, prefix)[1] for prefix in itertools.islice(some_prefixes(), 100)]


def test_caches_with_the_same_secret_have_the_same_check_hashes() -> None:
    assert checks(RadixTree(check_secret=SECRET)) == checks(RadixTree(check_secret=SECRET, hermetic=True, block_size=7))


def test_caches_with_different_secrets_or_none_have_different_check_hashes() -> None:
    caches = [RadixTree(check_secret=b"fixed"), RadixTree(check_secret=b"fixed "), RadixTree(), RadixTree()]
    columns = list(zip(*map(checks, caches), strict=True))
    # One that all caches share would be a constant in the polynomial.
    assert all(len(set(column)) == len(caches) for column in columns)


BASE = tuple(range(1000, 1050))
NEIGHBOURS: dict[str, list[Prefix]] = {
    "one token": [(0, (*BASE[:i], BASE[i] ^ 1 << bit, *BASE[i + 1 :])) for i in range(50) for bit in range(32)],
    "two tokens exchanged": [
        (0, (*BASE[:i], BASE[j], *BASE[i + 1 : j], BASE[i], *BASE[j + 1 :]))
        for i, j in itertools.combinations(range(50), 2)
    ],
    "leading zeros": [(0, (0,) * n + BASE) for n in range(1, 100)],
    "zeros after": [(0, BASE + (0,) * n) for n in range(1, 100)],
    "nothing but zeros": [(0, (0,) * n) for n in range(100)],
    "length": [(0, BASE[:n]) for n in range(50)],
    "adapter": [(adapter, BASE) for adapter in (*range(1, 100), *(1 << bit for bit in range(7, 64)))],
    "adapter in place of tokens": [(0, (0, 9, *BASE)), (9, BASE), (0, (9, *BASE)), (9 << 32, BASE), (0, (9, 0, *BASE))],
}


@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_prefixes_that_differ_in_little_have_different_check_hashes(neighbours: list[Prefix]) -> None:
    cache = RadixTree()
    found = {hashes_of(cache, prefix)[1] for prefix in neighbours}
    assert len(found) == len(set(neighbours)) == len(neighbours)
    assert hashes_of(cache, (0, BASE))[1] not in found


def many_prefixes() -> Iterator[Prefix]:
    """Two hundred thousand prefixes of such structure that a weak hash would show it."""
    for token in range(50_000):
        yield 0, (token,)
    for pair in itertools.product(range(224), repeat=2):
        yield 0, pair
    for adapter in range(1, 50_000):
        yield adapter << 20, (1, 2, 3)
    for bits in itertools.product((0, 2**31), repeat=14):
        yield 1, bits
    for number in range(34_000):
        yield 2, (7,) * 20 + (number % 17 << 27, number // 17)


def test_two_hundred_thousand_structured_prefixes_have_as_many_check_hashes() -> None:
    cache = RadixTree()
    found = np.array([hashes_of(cache, prefix)[1] for prefix in many_prefixes()], np.uint64)
    assert found.size > 200_000
    assert np.unique(found).size == found.size
