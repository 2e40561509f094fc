"""The process's counters: by hand, from living caches, from collected ones, with threads and after a fork."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import metrale_numba
from metrale_numba import metrics
from metrale_numba.metrics import (
    HIT_TOKENS,
    HITS,
    MISSES,
    NUM_COUNTERS,
    cache_hit_count,
    cache_hit_tokens_total,
    cache_miss_count,
    record_cache_hit,
    record_cache_miss,
    register,
)


class Counting:
    """As much of a cache as the process's counters see of it."""

    def __init__(self, hits=0, misses=0, hit_tokens=0):
        self.counters = np.zeros(NUM_COUNTERS, dtype=np.int64)
        self.count(hits, misses, hit_tokens)
        register(self, self.counters)

    def count(self, hits, misses, hit_tokens):
        self.counters[HITS] += hits
        self.counters[MISSES] += misses
        self.counters[HIT_TOKENS] += hit_tokens


def totals():
    return cache_hit_count(), cache_miss_count(), cache_hit_tokens_total()


@pytest.fixture
def grown():
    """How much the process's counters have grown since the test began."""
    before = totals()
    return lambda: tuple(now - then for now, then in zip(totals(), before, strict=True))


def test_the_package_offers_the_counters_under_their_names():
    for name in ["record_cache_hit", "record_cache_miss"]:
        assert getattr(metrale_numba, name) is getattr(metrics, name)
    for name in ["cache_hit_count", "cache_miss_count", "cache_hit_tokens_total"]:
        assert getattr(metrale_numba, name) is getattr(metrics, name)


def test_a_recorded_hit_counts_once_and_with_its_tokens(grown):
    record_cache_hit(48)
    record_cache_hit(matched_tokens=0)
    assert grown() == (2, 0, 48)


def test_a_recorded_miss_counts_once(grown):
    record_cache_miss()
    assert grown() == (0, 1, 0)


@pytest.mark.parametrize(
    ("tokens", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)]
)
def test_a_hit_of_impossible_tokens_is_refused_and_not_counted(grown, tokens, error):
    with pytest.raises(error, match=r"^matched_tokens "):
        record_cache_hit(tokens)
    assert grown() == (0, 0, 0)


def test_counts_are_plain_ints():
    cache = Counting()
    cache.count(1, 1, 1)
    assert [type(total) for total in totals()] == [int, int, int]


def test_living_caches_count_as_they_go(grown):
    one, other = Counting(), Counting()
    one.count(1, 2, 30)
    other.count(5, 0, 700)
    assert grown() == (6, 2, 730)
    one.count(1, 0, 1)
    assert grown() == (7, 2, 731)


def test_what_a_cache_had_counted_before_it_was_registered_is_left_out(grown):
    copied = Counting(hits=100, misses=50, hit_tokens=10_000)
    assert grown() == (0, 0, 0)
    copied.count(1, 1, 16)
    assert grown() == (1, 1, 16)


def test_a_collected_cache_leaves_its_share(grown):
    copied = Counting(hits=100, misses=50, hit_tokens=10_000)
    copied.count(3, 4, 60)
    gone = weakref.ref(copied)
    del copied
    assert gone() is None
    assert grown() == (3, 4, 60)


def test_a_cache_in_a_reference_cycle_leaves_its_share_when_it_is_collected(grown):
    cache = Counting()
    cache.itself = cache
    cache.count(3, 4, 60)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert grown() == (3, 4, 60)


def test_caches_collected_together_all_leave_their_share(grown):
    caches = [Counting() for _ in range(5)]
    for cache in caches:
        cache.count(1, 2, 3)
    del cache, caches
    assert grown() == (5, 10, 15)


def test_a_share_is_left_once(grown):
    Counting().count(1, 1, 1)
    assert [grown(), grown()] == [(1, 1, 1)] * 2


def test_registering_does_not_keep_a_cache_alive():
    cache = Counting()
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


def test_a_collected_cache_gives_its_counters_back():
    cache = Counting()
    counters = weakref.ref(cache.counters)
    del cache
    totals()
    assert counters() is None


def test_short_lived_caches_pile_nothing_up_where_nobody_asks(grown):
    totals()
    before = len(metrics._living)
    for _ in range(1000):
        Counting().count(1, 0, 2)
        # The latest one waits for whoever comes next.
        assert len(metrics._living) <= before + 1
        assert len(metrics._left) <= 1
    assert grown() == (1000, 0, 2000)


def test_what_cannot_be_watched_is_refused_and_not_kept():
    living = set(metrics._living)
    with pytest.raises(TypeError, match="weak reference"):
        register(5, np.zeros(NUM_COUNTERS, dtype=np.int64))
    assert metrics._living <= living


def test_a_cache_collected_while_the_lock_is_held_leaves_its_share(grown):
    cache = Counting()
    cache.count(1, 2, 3)
    with metrics._lock:
        del cache
    assert grown() == (1, 2, 3)


def in_threads(*jobs):
    """Run the jobs at once and hand on what any of them raised."""
    raised = []

    def guarded(job):
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - handed on below
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


@pytest.fixture
def eager_switching():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
def test_threads_lose_no_recorded_count(grown):
    def record():
        for _ in range(2000):
            record_cache_hit(3)
            record_cache_miss()

    in_threads(*[record] * 4)
    assert grown() == (8000, 8000, 24_000)


@pytest.mark.usefixtures("eager_switching")
def test_totals_never_go_back_while_caches_come_and_go(grown):
    finished = threading.Event()

    def come_and_go():
        try:
            for _ in range(1000):
                Counting().count(1, 1, 1)
        finally:
            finished.set()

    def watch():
        latest = (0, 0, 0)
        while not finished.is_set():
            now = grown()
            assert all(a >= b for a, b in zip(now, latest, strict=True))
            latest = now

    in_threads(come_and_go, come_and_go, watch, watch)
    assert grown() == (2000, 2000, 2000)


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


# NumPy's own threads are enough for this warning; no thread here holds anything while the fork happens.
MORE_THREADS_THAN_ONE = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def in_a_fork(job):
    """What `job` returns in a forked child, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing of the test run may go on in here, whatever happens, and no lock may keep it here.
        signal.alarm(30)
        try:
            os.write(writing, repr(job()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


@FORKS
@MORE_THREADS_THAN_ONE
def test_after_a_fork_both_sides_count_from_where_they_were(grown):
    cache = Counting()
    cache.count(1, 1, 10)

    def child():
        cache.count(1, 0, 5)
        record_cache_miss()
        return grown()

    assert in_a_fork(child) == "(2, 2, 15)"
    assert grown() == (1, 1, 10)
    cache.count(2, 0, 0)
    assert grown() == (3, 1, 10)


@FORKS
@MORE_THREADS_THAN_ONE
def test_a_finalizer_may_record_while_the_lock_is_held(grown):
    class Recording:
        def __del__(self):
            record_cache_hit(7)

    # In a child, which ends by itself should the two wait for each other.
    def child():
        recording = Recording()
        with metrics._lock:
            del recording
        return grown()

    assert in_a_fork(child) == "(1, 0, 7)"


FORK_UNDER_A_HELD_LOCK = """
import os, signal, threading
from metrale_numba import metrics

held, forked = threading.Event(), threading.Event()

def hold():
    with metrics._lock:
        held.set()
        # The fork has to wait for the lock, so this one runs out.
        forked.wait(0.2)

holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    metrics.record_cache_hit(5)
    os._exit(metrics.cache_hit_tokens_total())
forked.set()
holder.join()
metrics.record_cache_hit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), metrics.cache_hit_tokens_total())
"""


@FORKS
def test_a_fork_while_another_thread_holds_the_lock_leaves_it_open_on_both_sides():
    # In a process of its own, since this one has more threads than the test knows of.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK_UNDER_A_HELD_LOCK]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["5", "7"]
