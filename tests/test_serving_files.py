"""Warm restarts: what comes back of a serving cache, in this process and in another, and after a kill."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from serving_model import FlakyTier, ModelEngine, check_conservation

from metrale_numba import CacheFileError, NoPrefixCaching, RadixTree
from metrale_numba.serving import BlockPool, DirectoryTier, MemoryTier, Sequence, ServingCache, StoreKey, TierStore

TOKENS = list(range(100, 120))
OTHER = list(range(200, 209))


def make(tier: TierStore | None, num_slots: int = 2, **settings: Any) -> tuple[ServingCache, ModelEngine]:
    engine = ModelEngine(16, 4, num_slots, 8)
    settings = {"check_secret": b"the same each time", **settings}
    cache = RadixTree(block_size=4, **settings)
    serving = ServingCache(cache, 16, engine, slots=num_slots, tier=tier, disk_blocks=8, model="m")
    engine.serving = serving
    return serving, engine


def loaded(path: Path, tier: TierStore | None, **keywords: Any) -> tuple[ServingCache, ModelEngine]:
    engine = ModelEngine(16, 4, 2, 8)
    arguments: dict[str, Any] = {"blocks": 16, "slots": 2, "disk_blocks": 8, "model": "m", **keywords}
    serving = ServingCache.load(path, mover=engine, tier=tier, **arguments)
    engine.serving = serving
    return serving, engine


def served(serving: ServingCache, engine: ModelEngine, tokens: list[int], *depths: int, **keywords: Any) -> Sequence:
    sequence = serving.begin(tokens, **keywords)
    sequence.allocate()
    sequence.publish(len(tokens))
    for depth in depths:
        assert sequence.snapshot(depth, engine.writer(depth))
    return sequence


def test_index_counts_and_snapshots_come_back(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path / "tier", 10_000)
    serving, engine = make(tier)
    assert serving.disk_blocks is not None
    first = serving.begin(TOKENS)
    first.allocate()
    first.set_disk_blocks(0, serving.disk_blocks.allocate(2))
    first.publish(20)
    # One is spilled, two are resident.
    for depth in (4, 8, 12):
        first.snapshot(depth, engine.writer(depth))
    first.finish()
    served(serving, engine, OTHER, adapter=3).finish()
    before = [pool.ref_counts().tolist() for pool in (serving.blocks, serving.disk_blocks)]
    serving.save(tmp_path / "index")
    serving.check_integrity()
    tier.close()

    reopened = DirectoryTier(tmp_path / "tier", 10_000)
    again, memory = loaded(tmp_path / "index", reopened)
    again.check_integrity()
    assert again.disk_blocks is not None
    assert [pool.ref_counts().tolist() for pool in (again.blocks, again.disk_blocks)] == before
    assert again.blocks.high_water == serving.blocks.high_water
    assert again.slots.num_used == 0
    for min_compute, depth in ((1, 12), (9, 8), (16, 4)):
        with again.begin(TOKENS, min_compute=min_compute) as sequence:
            assert sequence.compute_from == depth
            assert sequence.snapshot_slot is not None
            memory.check_state(memory.slot_state(sequence.snapshot_slot), depth, "the slot")
    with again.begin(OTHER, adapter=3) as sequence:
        assert sequence.cached_tokens == 8
    again.check_integrity()


def test_saving_disturbs_nothing_that_goes_on(tmp_path: Path) -> None:
    tier = FlakyTier(DirectoryTier(tmp_path / "tier", 10_000))
    serving, engine = make(tier)
    running = served(serving, engine, TOKENS, 4, 8)
    stats = serving.stats()
    serving.save(tmp_path / "index")
    assert serving.stats() == stats
    serving.check_integrity()
    check_conservation(serving, [running])
    with serving.begin(TOKENS) as sequence:
        assert sequence.compute_from == 8
    assert tier.calls["get"] == 0
    # What was written for the file need not be written for a spill.
    assert tier.calls["put"] == 2
    served(serving, engine, OTHER, 4, 8).finish()
    assert tier.calls["put"] == 2
    running.finish()
    serving.check_integrity()


def test_a_running_sequence_has_ended_in_the_saved_index(tmp_path: Path) -> None:
    serving, engine = make(None)
    running = served(serving, engine, TOKENS)
    served(serving, engine, OTHER).finish()
    serving.save(tmp_path / "index")
    running.finish()
    again, _ = loaded(tmp_path / "index", None)
    again.check_integrity()
    assert again.num_free_blocks == 16
    assert again.stats().cached_blocks == 7


def test_a_pin_is_still_there(tmp_path: Path) -> None:
    serving, engine = make(None)
    served(serving, engine, TOKENS).finish()
    assert isinstance(serving.cache, RadixTree)
    serving.cache.pin("system", TOKENS)
    serving.save(tmp_path / "index")
    again, _ = loaded(tmp_path / "index", None)
    assert again.num_free_blocks == 11
    again.check_integrity()


@pytest.mark.parametrize("tier", [None, MemoryTier(10_000)], ids=["no tier", "memory"])
def test_snapshots_that_do_not_outlive_the_process_are_left_out(tmp_path: Path, tier: TierStore | None) -> None:
    serving, engine = make(tier)
    served(serving, engine, TOKENS, 4, 8, 12).finish()
    serving.save(tmp_path / "index")
    again, _ = loaded(tmp_path / "index", None)
    again.check_integrity()
    assert again.stats().snapshots == 0
    with again.begin(TOKENS) as sequence:
        assert (sequence.cached_tokens, sequence.compute_from) == (16, 0)


def test_a_snapshot_that_the_tier_no_longer_has_is_left_out(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path / "tier", 10_000)
    serving, engine = make(tier)
    served(serving, engine, TOKENS, 4, 8).finish()
    serving.save(tmp_path / "index")
    tier.delete(tier.keys()[0])
    again, _ = loaded(tmp_path / "index", tier)
    assert again.stats().snapshots == 1
    again.check_integrity()


def test_a_tier_that_does_not_answer_may_still_have_it(tmp_path: Path) -> None:
    tier = FlakyTier(DirectoryTier(tmp_path / "tier", 10_000))
    serving, engine = make(tier)
    served(serving, engine, TOKENS, 4, 8).finish()
    serving.save(tmp_path / "index")
    tier.plan.set(["error", "error"])
    again, memory = loaded(tmp_path / "index", tier)
    assert again.stats().snapshots == 2
    with again.begin(TOKENS) as sequence:
        assert sequence.snapshot_slot is not None
        memory.check_state(memory.slot_state(sequence.snapshot_slot), 8, "the slot")
    again.check_integrity()


def test_what_was_written_after_the_save_is_deleted_and_what_others_wrote_is_not(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path / "tier", 10_000)
    serving, engine = make(tier)
    served(serving, engine, TOKENS, 8).finish()
    serving.save(tmp_path / "index")
    others = [StoreKey(model, "", rank, 0, 1, 1) for model, rank in (("0#m", 1), ("0#mm", 0), ("x#m", 0), ("m", 0))]
    ours = [StoreKey(model, "", 0, 0, 1, 1) for model in ("0#m", "1#m", "12#m")]
    for key in (*others, *ours):
        tier.put(key, b"something")
    again, _ = loaded(tmp_path / "index", tier)
    assert set(tier.keys()) == {*others, *again._store._stored.values()}
    assert len(tier.keys()) == 5
    again.check_integrity()


def test_bytes_of_later_weights_are_never_taken_for_saved_ones(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path / "tier", 10_000)
    serving, engine = make(tier)
    served(serving, engine, TOKENS, 8).finish()
    serving.save(tmp_path / "index")
    serving.clear()
    served(serving, engine, TOKENS).finish()
    with serving.begin(TOKENS) as sequence:
        for depth, number in ((8, 88), (12, 120), (16, 160)):
            sequence.snapshot(depth, engine.writer(number))
    again, memory = loaded(tmp_path / "index", tier)
    with again.begin(TOKENS) as sequence:
        assert sequence.compute_from == 0
    again.check_integrity()
    assert memory.calls["write_slot"] == 0


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"model": "n"}, ValueError, r"was saved for Identity\(model='m'"),
        ({"rank": 1}, ValueError, "rank=0"),
        ({"blocks": 4}, ValueError, "blocks are 4, but the saved cache has block 4"),
        ({"disk_blocks": None}, ValueError, "disk_blocks are none, but the saved cache has block 0"),
        ({"blocks": -1}, ValueError, "blocks is -1"),
        ({"reserve": -1}, ValueError, "reserve is -1"),
    ],
)
def test_what_does_not_go_with_the_file_is_refused(
    tmp_path: Path, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    serving, _ = make(None)
    assert serving.disk_blocks is not None
    with serving.begin(TOKENS) as sequence:
        sequence.allocate()
        sequence.set_disk_blocks(0, serving.disk_blocks.allocate(1))
        sequence.publish(20)
    serving.save(tmp_path / "index")
    with pytest.raises(error, match=message):
        loaded(tmp_path / "index", None, **keywords)


def test_a_pool_in_use_is_refused(tmp_path: Path) -> None:
    serving, _ = make(None)
    serving.save(tmp_path / "index")
    pool = BlockPool(16)
    pool.allocate(1)
    with pytest.raises(ValueError, match="blocks must be unused: <BlockPool: 1 of 16 blocks in use>"):
        loaded(tmp_path / "index", None, blocks=pool)


def test_a_refused_load_leaves_the_pools_unused(tmp_path: Path) -> None:
    serving, engine = make(None)
    served(serving, engine, TOKENS).finish()
    serving.save(tmp_path / "index")
    pool, used = BlockPool(16), BlockPool(8)
    used.allocate(1)
    with pytest.raises(ValueError, match="disk_blocks must be unused"):
        loaded(tmp_path / "index", None, blocks=pool, disk_blocks=used)
    loaded(tmp_path / "index", None, blocks=pool)


@pytest.mark.parametrize(("model", "other"), [("m", "m#1"), ("m", "0#m"), ("", "#")])
def test_no_two_names_of_a_model_meet_in_a_tier(tmp_path: Path, model: str, other: str) -> None:
    tier = DirectoryTier(tmp_path / "tier", 10_000)
    found = []
    for name, number in ((model, 1), (other, 2)):
        engine = ModelEngine(16, 4, 1, 0)
        cache = RadixTree(block_size=4, check_secret=b"the same each time")
        serving = ServingCache(cache, 16, engine, slots=1, tier=tier, model=name)
        engine.serving = serving
        for _ in range(number):
            # The second one is in its second epoch.
            serving.clear()
        served(serving, engine, TOKENS).finish()
        with serving.begin(TOKENS) as sequence:
            sequence.snapshot(8, engine.writer(number))
            sequence.snapshot(4, engine.writer(9))
        found.append((serving, engine, number))
    for serving, engine, number in found:
        with serving.begin(TOKENS) as sequence:
            assert sequence.snapshot_tokens == 8
            assert sequence.snapshot_slot is not None
            engine.check_state(engine.slot_state(sequence.snapshot_slot), number, "the slot")


def test_an_index_alone_is_no_serving_cache_but_a_serving_cache_is_an_index(tmp_path: Path) -> None:
    RadixTree().save(tmp_path / "alone")
    with pytest.raises(CacheFileError, match="is an index alone, not a serving cache"):
        loaded(tmp_path / "alone", None)
    serving, engine = make(None)
    served(serving, engine, TOKENS).finish()
    serving.save(tmp_path / "index")
    assert RadixTree.load(tmp_path / "index").stats() == (5, 5)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    serving, _ = make(None)
    path = tmp_path / "index"
    serving.save(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CacheFileError, match="damaged"):
        loaded(path, None)


def test_with_caching_off_there_is_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="nothing to save"):
        ServingCache(NoPrefixCaching(), 4).save(tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    serving, engine = make(DirectoryTier(tmp_path / "tier", 10_000))
    served(serving, engine, TOKENS, 8).finish()
    with pytest.raises(OSError, match="nowhere"):
        serving.save(tmp_path / "nowhere" / "index")
    serving.check_integrity()


#: Serves, spills and saves without end, and says so; every state is a number made of the prefix.
SERVER = """
import sys
from pathlib import Path
from test_serving_files import *
folder = Path(sys.argv[1])
tier = DirectoryTier(folder / "tier", 3_000)
serving, engine = make(tier, num_slots=3)
print("ready", flush=True)
for turn in range(10**9):
    tokens = [turn % 7, *range(100, 112)]
    with serving.begin(tokens) as sequence:
        sequence.allocate()
        sequence.publish(len(tokens))
        for depth in (4, 8, 12):
            sequence.snapshot(depth, engine.writer(1000 * (turn % 7) + depth))
    serving.save(folder / "index")
    print(turn, flush=True)
"""


@pytest.mark.slow
def test_after_a_kill_in_the_middle_of_saving_an_earlier_save_is_whole(tmp_path: Path) -> None:
    rng = random.Random(5)
    found = 0
    for _ in range(12):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert server.stdout is not None
        for _ in range(rng.randrange(2, 12)):
            assert server.stdout.readline()
        # Not a wait for anything: the moment of the kill.
        time.sleep(rng.random() / 100)
        server.send_signal(signal.SIGKILL)
        server.communicate()
        assert server.returncode == -signal.SIGKILL
        with contextlib.closing(DirectoryTier(tmp_path / "tier", 3_000)) as tier:
            serving, engine = loaded(tmp_path / "index", tier)
            serving.check_integrity()
            for first in range(7):
                tokens = [first, *range(100, 112)]
                with serving.begin(tokens) as sequence:
                    if sequence.snapshot_slot is not None:
                        found += 1
                        wanted = 1000 * first + sequence.snapshot_tokens
                        engine.check_state(engine.slot_state(sequence.snapshot_slot), wanted, "the slot")
                serving.check_integrity()
    assert found > 12
