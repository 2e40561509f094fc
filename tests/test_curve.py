"""Curves: equal to a replay at every capacity, and kept on disk so that damage and change cost no more than a pass."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import metrale_numba
from metrale_numba import RadixTree
from metrale_numba.replay import WORKLOADS, Replay, Request, TraceReader, workload
from metrale_numba.replay.curve import CurveCounter, CurvePoint, HitCurve, default_capacities
from metrale_numba.replay.curve_cache import CurveCache, file_digest

TOKENS_PER_ID = 4
#: What a point has in common with the result of a replay.
COMMON = [name for name in CurvePoint._fields if name != "capacity"]


def hash_ids(ids: Sequence[int], *, lacking: int = 0, adapter: int = 0) -> Request:
    """A prompt in hash ids, the last of which stands for so many tokens fewer."""
    length = max(len(ids) * TOKENS_PER_ID - lacking, 0)
    return Request(0, length, 1, np.array(ids, dtype=np.uint32), TOKENS_PER_ID, adapter=adapter)


def tokens(ids: Sequence[int], *, adapter: int = 0) -> Request:
    return Request(0, len(ids), 1, np.array(ids, dtype=np.uint32), 1, adapter=adapter)


def curve_of(requests: Iterable[Request], block_size: int | None = None) -> HitCurve:
    counter = CurveCounter(RadixTree(block_size=1), block_size=block_size)
    for request in requests:
        counter.play(request)
    return counter.curve()


def replayed(requests: Iterable[Request], capacity: int | None, block_size: int | None = None) -> list[object]:
    """What a replay comes to, as far as a point tells of it."""
    replay = Replay(RadixTree(block_size=1), capacity=capacity, block_size=block_size)
    for request in requests:
        replay.play(request)
    result = replay.result()
    return [getattr(result, name) for name in COMMON]


def common(point: CurvePoint) -> list[object]:
    return [getattr(point, name) for name in COMMON]


def equal(one: HitCurve, other: HitCurve) -> bool:
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(HitCurve)
    )


few_ids = st.lists(st.integers(0, 2), max_size=7)
some_adapter = st.integers(0, 1)
loads_of_hash_ids = st.lists(st.builds(hash_ids, few_ids, lacking=st.integers(0, 3), adapter=some_adapter), max_size=12)
loads_of_tokens = st.lists(st.builds(tokens, few_ids, adapter=some_adapter), max_size=12)


@given(loads_of_hash_ids)
def test_a_point_is_what_a_replay_with_that_capacity_comes_to(requests: list[Request]) -> None:
    curve = curve_of(requests)
    for capacity in range(1, curve.distinct_blocks + 2):
        assert common(curve.point(capacity)) == replayed(requests, capacity)


@given(loads_of_tokens, st.integers(1, 3))
def test_a_point_of_a_load_of_tokens_is_what_a_replay_with_that_capacity_comes_to(
    requests: list[Request], block_size: int
) -> None:
    curve = curve_of(requests, block_size)
    for capacity in range(1, curve.distinct_blocks + 2):
        assert common(curve.point(capacity)) == replayed(requests, capacity, block_size)


@pytest.mark.parametrize("name", WORKLOADS)
def test_points_of_a_workload_are_what_replays_come_to(name: str) -> None:
    requests = list(workload(name, 1, 400, 20))
    curve = curve_of(requests)
    longest = max(request.hash_ids.size for request in requests)
    for capacity in (1, longest - 1, longest, *default_capacities(curve)[::3], curve.distinct_blocks - 1):
        assert common(curve.point(capacity)) == replayed(requests, capacity)
    assert common(curve.point(curve.distinct_blocks)) == replayed(requests, None)


@pytest.mark.parametrize(
    ("capacity", "hit_blocks", "evicted_blocks"),
    [
        (1_000, 12_847, 274_653),
        (10_000, 61_046, 217_454),
        (30_000, 93_978, 164_522),
        (50_000, 102_290, 136_210),
        (100_000, 104_924, 83_576),
        (182_790, 105_710, 0),
    ],
)
def test_points_of_the_conversation_trace_are_the_counts_of_its_replays(
    conversation: HitCurve, capacity: int, hit_blocks: int, evicted_blocks: int
) -> None:
    point = conversation.point(capacity)
    assert (point.hit_blocks, point.evicted_blocks, point.cached_blocks) == (hit_blocks, evicted_blocks, capacity)


@pytest.fixture(scope="module")
def conversation() -> HitCurve:
    folder = os.environ.get("METRALE_TRACES")
    if not folder:
        pytest.skip("METRALE_TRACES does not name the folder of the traces")
    with TraceReader(Path(folder) / "mooncake_conversation.jsonl.gz") as requests:
        return curve_of(requests)


def test_nine_tenths_of_the_conversation_traces_hits_take_this_many_blocks(conversation: HitCurve) -> None:
    assert conversation.smallest_capacity(90) == 31_435


def test_an_id_has_its_tokens_wherever_a_prompt_ends_in_it() -> None:
    curve = curve_of([hash_ids([1, 2]), hash_ids([1, 2], lacking=3), hash_ids([1], lacking=1)])
    # Of 8, 5 and 3 tokens, the last two prompts are hit whole.
    assert curve.point(2).token_hit_rate == 8 / 16
    assert curve.tokens == 16


@pytest.mark.parametrize(("block_size", "tokens_per_block"), [(None, 16), (4, 4)])
def test_a_block_of_tokens_is_of_the_block_size(block_size: int | None, tokens_per_block: int) -> None:
    curve = curve_of([tokens(range(35))], block_size)
    assert (curve.tokens_per_block, curve.blocks) == (tokens_per_block, 35 // tokens_per_block)


@pytest.mark.parametrize("block_size", [None, 16])
def test_a_hash_id_is_a_block_whatever_the_block_size_is(block_size: int | None) -> None:
    curve = curve_of([hash_ids([1, 2, 3])], block_size)
    assert (curve.tokens_per_block, curve.blocks) == (TOKENS_PER_ID, 3)


def test_a_cache_of_no_blocks_hits_nothing() -> None:
    assert curve_of([hash_ids([1]), hash_ids([1])]).point(0) == (0, 0, 0, 0, 0.0, 0.0)


def test_a_cache_larger_than_all_blocks_holds_all_of_them() -> None:
    assert curve_of([hash_ids([1, 2]), hash_ids([1])]).point(100) == (100, 1, 0, 2, 1 / 3, 1 / 3)


def test_more_may_be_played_after_a_curve_was_given() -> None:
    counter = CurveCounter(RadixTree(block_size=1))
    counter.play(hash_ids([1, 2]))
    first = counter.curve()
    counter.play(hash_ids([1, 2]))
    assert (counter.requests, first.requests) == (2, 1)
    assert (first.point(2).hit_blocks, counter.curve().point(2).hit_blocks) == (0, 2)


def test_no_reference_is_held_after_a_request_was_played() -> None:
    cache = RadixTree(block_size=1)
    counter = CurveCounter(cache)
    for prompt in ([1, 2, 3], [1, 2, 4], [1, 2, 3]):
        counter.play(hash_ids(prompt))
    assert len(cache.evict(100).physical) == 4


def test_a_curve_of_nothing_has_no_rates_and_no_capacities() -> None:
    for curve in (HitCurve(), curve_of([])):
        assert curve.point(5) == (5, 0, 0, 0, None, None)
        assert curve.smallest_capacity(90) is None
        assert default_capacities(curve) == []


@given(loads_of_hash_ids, st.integers(1, 100))
def test_the_smallest_capacity_is_the_first_that_hits_as_much(requests: list[Request], percent: int) -> None:
    curve = curve_of(requests)
    hits = [curve.point(capacity).hit_blocks for capacity in range(curve.distinct_blocks + 1)]
    enough = [capacity for capacity, hit in enumerate(hits) if hit * 100 >= percent * hits[-1]]
    assert curve.smallest_capacity(percent) == (enough[0] if hits[-1] else None)


@pytest.mark.parametrize(
    ("distinct_blocks", "capacities"),
    [
        (1, [1]),
        (2, [1, 2]),
        (7, [1, 2, 5, 7]),
        (10, [1, 2, 5, 10]),
        (2_000, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000]),
        (182_790, [100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 182_790]),
    ],
)
def test_the_default_capacities_end_with_all_blocks(distinct_blocks: int, capacities: list[int]) -> None:
    zeros = np.zeros(distinct_blocks + 1, dtype=np.int64)
    assert default_capacities(HitCurve(1, distinct_blocks, 1, 1, zeros, zeros, zeros)) == capacities


# ------------------------------------------------------------------------------------------------------------- on disk


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where curves are kept for the time of a test. The kernels are ready, and not looked for there."""
    metrale_numba.warmup()
    monkeypatch.setenv("METRALE_CACHE_DIR", str(tmp_path))
    return tmp_path / "metrale_numba" / "curves"


@pytest.fixture
def curve() -> HitCurve:
    return curve_of([hash_ids([1, 2, 3]), hash_ids([1, 2], lacking=1), hash_ids([4])])


def test_a_curve_that_was_stored_is_loaded_again(directory: Path, curve: HitCurve) -> None:
    CurveCache({"trace": "a"}).store(curve)
    loaded = CurveCache({"trace": "a"}).load()
    assert loaded is not None
    assert equal(loaded, curve)
    assert len(list(directory.iterdir())) == 1


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("identity", [{"trace": "b"}, {"load": "a"}, {"trace": "a", "limit": 1}, {"trace": None}])
def test_a_curve_of_something_else_is_not_found(curve: HitCurve, identity: dict[str, object]) -> None:
    CurveCache({"trace": "a"}).store(curve)
    assert CurveCache(identity).load() is None


@pytest.mark.usefixtures("directory")
def test_a_curve_of_other_sources_is_not_found(curve: HitCurve, monkeypatch: pytest.MonkeyPatch) -> None:
    CurveCache({"trace": "a"}).store(curve)
    monkeypatch.setattr("metrale_numba.replay.curve_cache._sources_digest", lambda: "changed")
    assert CurveCache({"trace": "a"}).load() is None


@pytest.mark.parametrize(
    "damage",
    [lambda content: b"", lambda content: content[: len(content) // 2], lambda content: b"no archive"],
    ids=["emptied", "cut short", "overwritten"],
)
def test_a_damaged_file_counts_as_none_and_is_told_of(
    directory: Path, curve: HitCurve, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    CurveCache({"trace": "a"}).store(curve)
    (path,) = directory.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert CurveCache({"trace": "a"}).load() is None
    assert str(path) in caplog.text


def test_a_damaged_file_is_overwritten(directory: Path, curve: HitCurve) -> None:
    CurveCache({"trace": "a"}).store(curve)
    (path,) = directory.iterdir()
    path.write_bytes(b"damaged")
    CurveCache({"trace": "a"}).store(curve)
    loaded = CurveCache({"trace": "a"}).load()
    assert loaded is not None
    assert equal(loaded, curve)


def test_nothing_is_left_of_a_file_that_could_not_be_finished(
    directory: Path, curve: HitCurve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("metrale_numba.replay.curve_cache.os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        CurveCache({"trace": "a"}).store(curve)
    assert list(directory.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_passed_over(
    tmp_path: Path, curve: HitCurve, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrale_numba.warmup()
    (tmp_path / "a file").touch()
    monkeypatch.setenv("METRALE_CACHE_DIR", str(tmp_path / "a file"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    CurveCache({"trace": "a"}).store(curve)
    assert len(list((tmp_path / "cache" / "metrale_numba" / "curves").iterdir())) == 1
    assert CurveCache({"trace": "a"}).load() is not None


def test_a_digest_is_of_the_content_and_not_of_the_name(tmp_path: Path) -> None:
    for name, content in (("one", b"a"), ("same", b"a"), ("other", b"b")):
        (tmp_path / name).write_bytes(content)
    assert file_digest(tmp_path / "one") == file_digest(tmp_path / "same") != file_digest(tmp_path / "other")


def test_what_cannot_be_read_twice_has_no_digest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert [file_digest(path) for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing")] == [None] * 3
