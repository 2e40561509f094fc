"""Threads: whatever they call at the same time, the answers are those of the same calls one after the other.

It relies on the cache's lock being entered once for each call, and finds out: the lock is put inside one that writes
down who entered it when. In that order the calls are made again, on another cache and on the model.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import pytest
from calls import Call, Caller, answer_of, same
from pair import Pair

import metrale_numba
from metrale_numba import RadixTree

NUM_THREADS = 4
CALLS_A_THREAD = 50_000
SETTINGS: dict[str, Any] = {
    "partial_tail_sharing": True,
    "adopt_blocks": True,
    "tail_lease_ttl": 4,
    "evict_alpha": 0.75,
    "block_size": 2,
    "check_secret": b"replayed",
    "max_pinned_blocks": 8,
    "quotas": {1: 9},
}
#: What the model has no say in: how large arrays are, and copies.
NOT_IN_THE_MODEL = ("memory_usage", "compact", "copy")


class RecordingLock:
    """A lock that writes down, while it is held, which call entered it."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.order: list[int] = []
        self.current = threading.local()

    def __enter__(self) -> None:
        self.lock.acquire()
        self.order.append(self.current.call)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lock.release()


class Made(NamedTuple):
    call: Call
    answer: Any


@pytest.fixture(scope="module")
def switching_often() -> Iterator[None]:
    """Threads take turns a hundred times as often as they do by default, in the middle of calls above all."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module")
def history(switching_often: None) -> tuple[RadixTree, list[int], dict[int, Made]]:
    """A cache that many threads called at once, the order in which the calls took place, and all calls."""
    cache = RadixTree(**SETTINGS)
    lock = RecordingLock(cache._lock)
    cache._lock = lock  # type: ignore[assignment]
    made: dict[int, Made] = {}
    begin = threading.Barrier(NUM_THREADS)

    def work(thread: int) -> None:
        caller = Caller(seed=1, number=thread)
        mine: dict[int, Made] = {}
        begin.wait()
        for i in range(CALLS_A_THREAD):
            call = caller.draw()
            lock.current.call = thread * CALLS_A_THREAD + i
            answer = answer_of(cache, call)
            caller.learn(call, answer)
            mine[lock.current.call] = Made(call, answer)
        made.update(mine)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache._lock = lock.lock
    return cache, lock.order, made


def test_every_call_is_one_step_under_the_lock(history: tuple[RadixTree, list[int], dict[int, Made]]) -> None:
    _, order, made = history
    assert len(made) == NUM_THREADS * CALLS_A_THREAD
    assert sorted(order) == list(range(len(made)))
    turns = sum(before // CALLS_A_THREAD != after // CALLS_A_THREAD for before, after in itertools.pairwise(order))
    # Or the threads would have run one after the other.
    assert turns > 200


def test_answers_to_threads_are_those_of_the_same_calls_in_their_order(
    history: tuple[RadixTree, list[int], dict[int, Made]],
) -> None:
    cache, order, made = history
    again = RadixTree(**SETTINGS)
    for place, number in enumerate(order):
        call, answer = made[number]
        repeated = answer_of(again, call)
        assert same(repeated, answer), f"call {place}, {call}: {answer} to a thread, {repeated} in order"
    for name in ("stats_detail", "snapshot_stats", "snapshot_count", "pins", "memory_usage"):
        assert getattr(again, name)() == getattr(cache, name)()


class Replay(Pair):
    """The model, called in the recorded order, beside the recorded answers of the cache."""

    def repeat(self, call: Call, answer: Any) -> None:
        arguments = dict(call.arguments)
        if arguments.get("check") is not None:
            # The model's checks are the prefixes themselves; one that stands for none stands for a prefix of nobody.
            arguments["check"] = self.identities.get(arguments["check"], (-1, ()))
        wanted = answer_of(self.model, Call(call.name, arguments))
        if call.name == "num_evictable" or call.name == "stats_detail":
            answer, wanted = self._bounded(call.name, answer, wanted)
        self._agree(answer, wanted, call.name)
        self._keep_books(call.name, arguments, answer)
        if call.name == "promote_snapshot" and answer:
            self.slots.take([arguments["new_slot"]])
            self.stored_keys.remove(arguments["key"])

    def _bounded(self, name: str, answer: Any, wanted: Any) -> tuple[Any, Any]:
        """Of holds that do not nest, the count of evictable blocks is an upper bound."""
        if self.model.holds_nest():
            return answer, wanted
        if name == "num_evictable":
            assert answer >= wanted
            return answer, answer
        assert answer.num_evictable >= wanted.num_evictable
        return answer, wanted._replace(num_evictable=answer.num_evictable)


def test_answers_to_threads_are_the_models_and_nothing_is_lost(
    history: tuple[RadixTree, list[int], dict[int, Made]],
) -> None:
    cache, order, made = history
    replay = Replay(RadixTree, SETTINGS)
    for number in order:
        call, answer = made[number]
        if call.name not in NOT_IN_THE_MODEL:
            replay.repeat(call, answer)
    replay.cache = cache
    replay.compare_state()
    replay.drain()


def test_caches_made_and_dropped_by_threads_leave_their_counts_to_the_process(switching_often: None) -> None:
    def counts() -> tuple[int, int, int]:
        return (
            metrale_numba.cache_hit_count(),
            metrale_numba.cache_miss_count(),
            metrale_numba.cache_hit_tokens_total(),
        )

    num_caches, num_lookups = 50, 20
    seen: list[tuple[int, int, int]] = []

    def work() -> None:
        for _ in range(num_caches):
            cache = RadixTree(block_size=2)
            cache.insert([1, 2, 3, 4], [7, 8])
            for _ in range(num_lookups):
                cache.lookup([1, 2, 3, 4])
                cache.lookup([9, 9])
            del cache
            seen.append(counts())

    before = counts()
    threads = [threading.Thread(target=work) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lookups = NUM_THREADS * num_caches * num_lookups
    assert [after - old for after, old in zip(counts(), before, strict=True)] == [lookups, lookups, 4 * lookups]
    # A cache between life and death is never counted twice, or it would be missed when it is settled.
    assert max(seen) <= counts()


def test_threads_that_make_the_first_caches_of_a_process_all_get_one() -> None:
    code = """
import threading
from metrale_numba import RadixTree
begin = threading.Barrier(8)
matched = []
def work(first):
    begin.wait()
    cache = RadixTree(block_size=2)
    cache.insert([first, 2, 3, 4], [7, 8])
    cache.check_integrity()
    matched.append(cache.lookup([first, 2, 3, 4]).matched_tokens)
threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(matched)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(metrale_numba.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == f"{[4] * 8}\n", done.stderr


def test_a_save_is_of_one_moment_while_threads_go_on(tmp_path: Path, switching_often: None) -> None:
    cache = RadixTree(**SETTINGS)
    stop = threading.Event()

    def work(number: int) -> None:
        caller = Caller(seed=2, number=number)
        while not stop.is_set():
            call = caller.draw()
            caller.learn(call, answer_of(cache, call))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            cache.save(tmp_path / "cache")
            RadixTree.load(tmp_path / "cache").check_integrity()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    cache.check_integrity()


def test_arrays_of_an_answer_belong_to_the_thread_that_asked(switching_often: None) -> None:
    cache = RadixTree(block_size=1)
    tokens = np.arange(64, dtype=np.uint32)
    cache.insert(tokens, tokens)
    wrong: list[np.ndarray] = []

    def work(mark: int) -> None:
        for _ in range(2000):
            blocks = cache.lookup(tokens).matched_blocks
            if blocks.tolist() != tokens.tolist():
                wrong.append(blocks)
            blocks[:] = mark

    threads = [threading.Thread(target=work, args=(1000 + number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
