"""`reserve=`: memory that is taken when a cache is made, stays where it is while the cache fills, and stays reserved.

It relies on :mod:`state` to see every array that a cache has, and where.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pair import COPIES
from state import arrays_of, sizes_of

import metrale_numba
from metrale_numba import RadixTree
from metrale_numba.kernels import layout

NUM_BLOCKS = 5000
BYTES_PER_BLOCK = 160
#: The arrays that are reserved and serve no other block size.
THE_TREE = (".nodes", ".links", ".tokens", ".table")


def places(cache: RadixTree) -> dict[str, tuple[int, int]]:
    """Where every array of the tree is, and how large; the snapshot index has none of the reserve."""
    return {
        name: (array.ctypes.data, array.nbytes) for name, array in arrays_of(cache).items() if "._index." not in name
    }


def used_rows(cache: RadixTree) -> int:
    return int(cache._pool.header[layout.POOL_USED])


def one_long_path(cache: RadixTree) -> None:
    tokens = np.arange(NUM_BLOCKS * cache.block_size, dtype=np.uint32)
    cache.insert(tokens, np.arange(NUM_BLOCKS, dtype=np.uint32))


def block_by_block(cache: RadixTree) -> None:
    for block in range(NUM_BLOCKS):
        cache.insert([block] * cache.block_size, [block])


def many_adapters(cache: RadixTree) -> None:
    """As many adapters as the reserve has rows to spare for: one in a thousand blocks, and sixteen."""
    num_adapters = 16 + NUM_BLOCKS // 1024
    shares = np.array_split(np.arange(NUM_BLOCKS, dtype=np.uint32), num_adapters)
    for adapter, share in enumerate(shares):
        tokens = np.repeat(share, cache.block_size)
        cache.insert(tokens, share, adapter_id=2**63 + adapter)


def with_churn(cache: RadixTree) -> None:
    """More is stored in all than there is room for, but never at once."""
    half = NUM_BLOCKS // 2
    for turn in range(6):
        tokens = np.arange(half * cache.block_size, dtype=np.uint32) + np.uint32(turn)
        cache.insert(tokens, np.arange(half, dtype=np.uint32))
        cache.release(tokens)
        if turn % 2:
            cache.evict(half + 7)
        while cache.stats()[0] > NUM_BLOCKS - half:
            cache.evict(NUM_BLOCKS)
    cache.evict(NUM_BLOCKS)
    one_long_path(cache)


WAYS_TO_FILL: list[Callable[[RadixTree], None]] = [one_long_path, block_by_block, many_adapters, with_churn]


@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("fill", WAYS_TO_FILL)
def test_no_array_moves_or_grows_up_to_the_reserve(fill: Callable[[RadixTree], None], block_size: int) -> None:
    cache = RadixTree(block_size=block_size, reserve=NUM_BLOCKS)
    before = places(cache)
    fill(cache)
    assert cache.stats()[0] == NUM_BLOCKS
    assert places(cache) == before
    cache.check_integrity()


def test_a_cache_without_a_reserve_does_move_its_arrays() -> None:
    cache = RadixTree()
    before = places(cache)
    one_long_path(cache)
    assert places(cache) != before


@pytest.mark.parametrize("fill", [one_long_path, block_by_block, many_adapters])
@pytest.mark.parametrize("reserve", [NUM_BLOCKS, 20 * NUM_BLOCKS])
def test_a_reserved_block_takes_no_more_than_its_share(fill: Callable[[RadixTree], None], reserve: int) -> None:
    cache = RadixTree(reserve=reserve)
    fill(cache)
    headers = sum(size for name, size in cache.memory_usage().items() if name.startswith("snapshots."))
    # What a cache of any size has: the filter of snapshot depths, the headers, the hash keys.
    assert headers < 20_000
    assert (sum(cache.memory_usage().values()) - headers - 2000) / reserve <= BYTES_PER_BLOCK


def test_beyond_the_reserve_a_cache_grows_as_any_other() -> None:
    cache = RadixTree(block_size=2, reserve=10)
    tokens = np.arange(20_000, dtype=np.uint32)
    assert cache.insert(tokens, np.arange(10_000)).blocks.tolist() == list(range(10_000))
    assert cache.lookup(tokens).matched_tokens == 20_000
    cache.check_integrity()


def test_disk_ids_and_other_block_sizes_are_beside_the_reserve() -> None:
    cache = RadixTree(block_size=2, reserve=NUM_BLOCKS)
    before = places(cache)
    cache.insert([1, 2, 3, 4], [5, 6], [7, 8])
    assert cache._pool.disks.size == cache._pool.rows
    cache.insert(range(300), range(100), (), 3)
    one_long_path(cache)
    after = places(cache)
    assert [name for name in before if name.endswith(THE_TREE) and after[name] != before[name]] == []
    cache.check_integrity()


def test_clear_keeps_the_reserve_where_it_is() -> None:
    cache = RadixTree(block_size=2, reserve=NUM_BLOCKS)
    before = places(cache)
    for _ in range(3):
        one_long_path(cache)
        cache.insert(range(9), range(3), (), 3)
        assert len(cache.clear().blocks.physical) == NUM_BLOCKS + 3
        cache.check_integrity()
        block_by_block(cache)
        cache.clear()
    after = places(cache)
    assert [name for name in before if name.endswith(THE_TREE) and after[name] != before[name]] == []


def test_an_emptied_cache_keeps_the_reserve_where_it_is() -> None:
    cache = RadixTree(block_size=2, reserve=NUM_BLOCKS)
    before = places(cache)
    for adapter in (0, 3):
        tokens = np.arange(2 * NUM_BLOCKS, dtype=np.uint32)
        cache.insert(tokens, np.arange(NUM_BLOCKS), adapter_id=adapter)
        cache.release(tokens, adapter_id=adapter)
        assert len(cache.evict(10**9)) == NUM_BLOCKS
        cache.insert(tokens, np.arange(NUM_BLOCKS), adapter_id=adapter)
        cache.drop_adapter(adapter)
    assert places(cache) == before
    cache.check_integrity()


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("stored", [0, 100, NUM_BLOCKS])
def test_a_copy_has_the_reserve(way: str, stored: int) -> None:
    cache = RadixTree(block_size=2, reserve=NUM_BLOCKS)
    cache.insert(np.arange(2 * stored, dtype=np.uint32), np.arange(stored))
    twin = COPIES[way](cache)
    assert twin.settings.reserve == NUM_BLOCKS
    before = places(twin)
    one_long_path(twin)
    assert twin.stats()[0] == NUM_BLOCKS
    assert places(twin) == before
    twin.check_integrity()


def test_a_file_asks_for_no_reserve(tmp_path: Path) -> None:
    # Whoever can write a file must not decide how much memory its reader takes.
    RadixTree(block_size=2, reserve=NUM_BLOCKS).save(tmp_path / "cache")
    cache = RadixTree.load(tmp_path / "cache")
    assert cache.settings.reserve == 0
    # The hash table is as large as it was saved.
    assert sum(cache.memory_usage().values()) < 30 * NUM_BLOCKS


@pytest.mark.parametrize(("reserve", "error"), [(-1, ValueError), (2**31 + 1, ValueError), (True, TypeError)])
def test_a_load_refuses_a_reserve_as_the_constructor_does(tmp_path: Path, reserve: int, error: type[Exception]) -> None:
    RadixTree().save(tmp_path / "cache")
    with pytest.raises(error, match="reserve"):
        RadixTree.load(tmp_path / "cache", reserve=reserve)


@pytest.mark.parametrize("stored", [0, 100, NUM_BLOCKS])
def test_compacting_keeps_the_reserve(stored: int) -> None:
    cache = RadixTree(block_size=2, reserve=NUM_BLOCKS)
    cache.insert(np.arange(2 * stored, dtype=np.uint32), np.arange(stored))
    cache.compact()
    before = places(cache)
    one_long_path(cache)
    assert places(cache) == before
    assert cache.compact() == 0
    cache.check_integrity()


def test_compacting_gives_back_what_is_beyond_the_reserve() -> None:
    cache = RadixTree(block_size=2, reserve=NUM_BLOCKS)
    fresh = sizes_of(cache)
    tokens = np.arange(20 * NUM_BLOCKS, dtype=np.uint32)
    cache.insert(tokens, np.arange(10 * NUM_BLOCKS))
    cache.release(tokens)
    cache.evict(10**9)
    assert cache.compact() > 0
    assert sizes_of(cache) == fresh


def test_the_array_of_a_block_that_is_not_of_the_default_size_is_not_reserved() -> None:
    with_reserve, without = RadixTree(block_size=2, reserve=NUM_BLOCKS), RadixTree(block_size=2)
    for cache in (with_reserve, without):
        cache.insert(range(9), range(3), (), 3)
    assert with_reserve._pools[3].rows == without._pools[3].rows


def test_no_reserve_is_what_a_cache_has_without_the_keyword() -> None:
    assert sizes_of(RadixTree(reserve=0)) == sizes_of(RadixTree())
    assert RadixTree().settings.reserve == 0


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "reserve must be an integer, not None"),
        (True, TypeError, "reserve must be an integer, not True"),
        (1.0, TypeError, "reserve must be an integer, not 1.0"),
        ("1", TypeError, "reserve must be an integer, not '1'"),
        (-1, ValueError, "reserve is -1, outside 0.."),
        (2**31 + 1, ValueError, "reserve is 2147483649, outside 0..2147483648"),
        (2**63, ValueError, "reserve is 9223372036854775808, outside 0.."),
    ],
)
def test_what_is_no_number_of_blocks_is_refused(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refusal:
        RadixTree(reserve=value)  # type: ignore[arg-type]
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("number", [np.uint8(200), np.int64(200)])
def test_a_number_of_any_integer_type_is_taken(number: int) -> None:
    assert sizes_of(RadixTree(reserve=number)) == sizes_of(RadixTree(reserve=200))


# --- more than there is -------------------------------------------------------------------------------------------

#: Runs in a process that may have little memory, so that no machine is large enough for what is asked.
HUGE = """
import gc
import metrale_numba
from metrale_numba import RadixTree
from metrale_numba.kernels.arrays import PoolArrays

RadixTree(block_size=2).insert([1, 2], [3])
small = RadixTree(block_size=2)
counted = metrale_numba.cache_hit_count()
def pages():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0])

def attempt(block_size, reserve):
    try:
        RadixTree(block_size=block_size, reserve=reserve)
    except MemoryError:
        return True
for block_size, reserve in ((16, 2**31), (1, 2**31), (10**6, 2**31), (10**6, 10**5), (2**40, 1000)):
    # What the first attempts leave is what allocators keep for later.
    for _ in range(3):
        attempt(block_size, reserve)
    gc.collect()
    before = pages(), sum(type(thing) in (RadixTree, PoolArrays) for thing in gc.get_objects())
    for _ in range(10):
        assert attempt(block_size, reserve), (block_size, reserve)
    gc.collect()
    after = pages(), sum(type(thing) in (RadixTree, PoolArrays) for thing in gc.get_objects())
    assert after[0] <= before[0] + 4000 and after[1] == before[1], (block_size, reserve, before, after)
assert metrale_numba.cache_hit_count() == counted
small.insert([1, 2, 3, 4], [3, 4])
assert small.lookup([1, 2, 3, 4]).matched_tokens == 4
small.check_integrity()
print("all refused")
"""


def test_a_reserve_beyond_the_memory_is_a_memory_error_and_leaves_nothing_behind() -> None:
    limit = 3 * 2**30

    def with_little_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", HUGE],
        cwd=Path(metrale_numba.__file__).parent.parent,
        preexec_fn=with_little_memory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "all refused\n", done.stderr


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_reserve_takes_its_memory_when_the_cache_is_made() -> None:
    # Memory that is only promised is taken when it is first touched, and that call waits for it.
    RadixTree()
    many = 300_000
    before = resident_bytes()
    cache = RadixTree(reserve=many)
    assert resident_bytes() - before > 100 * many
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    one_long_path(cache)
    # The call's own arrays, of 400 KB, are all that may have to be touched.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 400
