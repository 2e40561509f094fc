"""The pools of blocks and slots: exact ids, counts, refusals that change nothing; a plain list of counts beside."""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from metrale_numba import IntegrityError, MetraleError, RefcountError
from metrale_numba.serving import BlockPool, OutOfBlocks, OutOfSlots, SnapshotPool
from metrale_numba.serving.block_pool import _IdPool


def state_of(pool: _IdPool) -> tuple[Any, ...]:
    return pool._header.tolist(), pool._counts.tolist(), pool._free[: pool.num_free].tolist()


def test_ids_come_in_order_from_0_on() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    assert pool.allocate(1).tolist() == [3]


def test_allocated_ids_are_a_fresh_uint32_array_with_one_reference_each() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(2)
    assert ids.dtype == np.uint32
    assert pool.ref_counts().tolist() == [1, 1, 0, 0]
    ids[:] = 3
    assert pool.ref_counts().tolist() == [1, 1, 0, 0]


def test_what_was_given_back_last_comes_out_first_and_in_the_same_order() -> None:
    pool = BlockPool(6)
    pool.allocate(6)
    assert pool.dec_ref([0, 1, 2]) == 3
    assert pool.dec_ref([5, 4]) == 2
    assert pool.allocate(5).tolist() == [5, 4, 0, 1, 2]


def test_a_block_is_free_when_its_last_reference_is_dropped() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.inc_ref([block, block])
    assert pool.ref_count(block) == 3
    assert pool.dec_ref([block, block]) == 0
    assert pool.dec_ref([block]) == 1
    assert pool.num_free == 2


def test_an_id_listed_twice_counts_twice() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.inc_ref([1, 1, 1])
    assert pool.dec_ref([1, 0, 1, 1, 1]) == 2
    assert pool.ref_counts().tolist() == [0, 0]
    pool.check_integrity()


def test_the_high_water_mark_is_the_most_that_were_in_use_at_once() -> None:
    pool = BlockPool(5)
    pool.allocate(3)
    pool.dec_ref([0, 1, 2])
    pool.allocate(1)
    assert (pool.high_water, pool.num_used, pool.num_free) == (3, 1, 4)


def test_nothing_is_taken_if_not_all_can_be() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    before = state_of(pool)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 of 3 free"):
        pool.allocate(3)
    assert state_of(pool) == before


def test_slots_are_short_under_their_own_name() -> None:
    pool = SnapshotPool(1)
    with pytest.raises(OutOfSlots, match="2 slots wanted, 1 of 1 free"):
        pool.allocate(2)
    assert issubclass(OutOfSlots, MetraleError)
    assert pool.num_slots == 1


REFUSED: list[tuple[str, object, type[Exception], str]] = [
    ("dec_ref", [3], RefcountError, r"ids\[0\] is block 3, which is free, so there is no reference to drop"),
    ("dec_ref", [0, 1, 0], RefcountError, r"ids\[2\] is block 0, which is free after the 1 before it"),
    ("dec_ref", [0, 5], ValueError, r"ids\[1\] is 5, outside 0..4"),
    ("inc_ref", [0, 4], RefcountError, r"ids\[1\] is block 4, which is free, so no reference can be added"),
    ("inc_ref", [2**32 - 1], ValueError, r"ids\[0\] is 4294967295, outside 0..4"),
    ("inc_ref", [-1], ValueError, r"ids\[0\] is -1"),
    ("dec_ref", [0.5], TypeError, "ids"),
    ("dec_ref", "0", TypeError, "ids"),
    ("dec_ref", None, TypeError, "ids"),
    ("inc_ref", [[0]], ValueError, "one-dimensional"),
    ("allocate", -1, ValueError, "n is -1"),
    ("allocate", True, TypeError, "n must be an integer"),
    ("allocate", 1.0, TypeError, "n must be an integer"),
    ("ref_count", 5, ValueError, "number is 5"),
    ("ref_count", None, TypeError, "number"),
]


@pytest.mark.parametrize(("method", "argument", "error", "message"), REFUSED)
def test_a_refused_call_names_the_id_and_changes_nothing(
    method: str, argument: object, error: type[Exception], message: str
) -> None:
    pool = BlockPool(5)
    pool.allocate(3)
    pool.inc_ref([1])
    before = state_of(pool)
    with pytest.raises(error, match=message):
        getattr(pool, method)(argument)
    assert state_of(pool) == before
    pool.check_integrity()


@pytest.mark.parametrize("size", [-1, 2**32, True, 1.5, None, "3"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="num_blocks"):
        BlockPool(size)


def test_an_empty_pool_has_nothing_to_give() -> None:
    pool = BlockPool(0)
    assert pool.allocate(0).tolist() == []
    assert pool.dec_ref([]) == 0
    pool.check_integrity()
    with pytest.raises(ValueError, match="the pool is empty"):
        pool.inc_ref([0])


@pytest.mark.parametrize("method", ["inc_ref", "dec_ref"])
def test_the_array_of_a_caller_is_copied_since_others_may_write_to_it(method: str) -> None:
    pool = BlockPool(4)
    ids = pool.allocate(2)
    given = []
    kernels = dict(pool._kernels)
    name = {"inc_ref": "add_references", "dec_ref": "drop_references"}[method]
    pool._kernels = {**kernels, name: lambda *arguments: given.append(arguments[-1]) or kernels[name](*arguments)}
    getattr(pool, method)(ids)
    assert not np.shares_memory(given[0], ids)


@pytest.mark.parametrize("form", [np.int64, np.uint8, ">u4"])
def test_ids_of_any_integer_type_are_taken(form: Any) -> None:
    pool = BlockPool(300)
    pool.allocate(255)
    pool.inc_ref(np.array([7, 250], form))
    assert pool.ref_count(250) == 2


def test_a_pool_agrees_with_a_list_of_counts() -> None:
    size = 40
    pool = BlockPool(size)
    counts = [0] * size
    rng = random.Random(3)
    for _ in range(3000):
        step = rng.randrange(3)
        if step == 0:
            wanted = rng.randrange(6)
            if wanted > counts.count(0):
                with pytest.raises(OutOfBlocks):
                    pool.allocate(wanted)
                continue
            for number in pool.allocate(wanted).tolist():
                assert counts[number] == 0
                counts[number] = 1
        else:
            ids = [rng.randrange(size) for _ in range(rng.randrange(8))]
            listed = Counter(ids)
            if step == 1 and all(counts[number] for number in ids):
                pool.inc_ref(ids)
                for number in ids:
                    counts[number] += 1
            elif step == 2 and all(counts[number] >= times for number, times in listed.items()):
                freed = pool.dec_ref(ids)
                assert freed == sum(counts[number] == times for number, times in listed.items())
                for number in ids:
                    counts[number] -= 1
            else:
                with pytest.raises(RefcountError):
                    (pool.inc_ref if step == 1 else pool.dec_ref)(ids)
        pool.check_integrity()
        assert pool.ref_counts().tolist() == counts
        assert pool.num_free == counts.count(0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._counts.__setitem__(0, 0),
        lambda pool: pool._counts.__setitem__(4, 1),
        lambda pool: pool._counts.__setitem__(0, -1),
        lambda pool: pool._free.__setitem__(0, pool._free[1]),
        lambda pool: pool._free.__setitem__(0, 77),
        lambda pool: pool._header.__setitem__(0, 1),
        lambda pool: pool._header.__setitem__(0, 9),
        lambda pool: pool._header.__setitem__(1, 0),
    ],
)
def test_damage_is_found(damage: Any) -> None:
    pool = BlockPool(5)
    pool.allocate(3)
    damage(pool)
    with pytest.raises(IntegrityError, match="free blocks of the pool"):
        pool.check_integrity()


def test_threads_lose_no_reference() -> None:
    pool = BlockPool(64)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(500):
            ids = pool.allocate(rng.randrange(9))
            pool.inc_ref(ids)
            pool.dec_ref(ids)
            assert pool.dec_ref(ids) == ids.size

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert pool.num_free == 64
    pool.check_integrity()


def test_a_forked_child_goes_on_with_its_own_counts() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    child = os.fork()
    if child == 0:
        is_well = pool.allocate(1).tolist() == [1] and pool.num_free == 2
        os._exit(0 if is_well else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.num_free == 3


def test_a_pool_prints_how_much_is_in_use() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    assert repr(pool) == "<BlockPool: 1 of 4 blocks in use>"
