"""Runs mixed calls of all methods on shared caches for as long as it is told, and looks whether everything adds up.

usage: python tests/soak.py [--seconds S] [--threads N] [--caches N] [--seed N]

It relies on the random calls of :mod:`calls`. After every round all threads pause. Then each cache checks itself, tells
the same as a copy of it, holds exactly the blocks, disk blocks and slots that its answers took and did not give back,
and every few rounds, when all caches have been cleared, the process may be no larger than it was in the beginning. It
promises to end with status 1 if any of that is not so.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from calls import WEIGHTS, Call, Caller, answer_of, told_by
from pair import COPIES, Refusal
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

import metrale_numba
from metrale_numba import Drop, RadixTree, Spill

#: What the caches are like, in turn.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"partial_tail_sharing": True, "quotas": {1: 4_000}, "max_pinned_blocks": 100},
    {"adopt_blocks": True, "evict_alpha": 0.75, "hermetic": True, "tail_lease_ttl": 8},
    {"strict": True, "tail_protect": False, "evict_legacy": True},
)
BLOCK_SIZES = (16, 5)
ADAPTERS = (0, 1, 2**63 + 7)
#: Beyond these, a thread evicts, forgets an adapter's snapshots, or clears.
MAX_BLOCKS = 20_000
MAX_SNAPSHOTS = 2_000
#: Calls between two looks at the clock and at the size of a cache.
STRETCH = 64
ROUND_SECONDS = 2.0
MIN_ROUNDS = 24
#: After so many rounds all caches are cleared, so that what is measured then is comparable.
ROUNDS_A_GENERATION = 4
#: What may grow by how much between the first third of the generations and the last: allocators keep some.
ALLOWED_GROWTH = {"KiB resident": 8 << 10, "KiB in use": 1 << 10, "Python blocks": 10_000}


class Violation(Exception):
    """Something does not add up."""


@dataclass
class Books:
    """What the answers of one cache took, less what they gave back."""

    blocks: Counter[int] = field(default_factory=Counter)
    disks: Counter[int] = field(default_factory=Counter)
    slots: Counter[int] = field(default_factory=Counter)

    def keep(self, call: Call, answer: Any) -> None:
        """Enter an answer."""
        name, arguments = call
        if "snapshot_id" in arguments:
            self.slots[arguments["snapshot_id"]] += 1
        if name == "insert_with_snapshot":
            displaced, acquired = answer
            self._acquire(acquired)
            self._free([] if displaced is None else [displaced])
        elif name == "insert":
            self._acquire(answer)
        elif name in ("evict", "evict_from"):
            self._evict(answer)
        elif name in ("clear", "drop_adapter"):
            self._evict(answer.blocks)
            self._free(answer.snapshot_slots)
        elif name == "insert_tail_snapshot":
            self._free(answer)
        elif name in ("insert_intermediate_snapshot", "insert_tail_sibling_snapshot", "evict_snapshot_lru"):
            self._free([] if answer is None else [answer])
        elif isinstance(answer, (Spill, Drop)):
            self._free([answer.slot])
        elif name == "evict_snapshot_slot" and answer:
            self._free([arguments["slot"]])
        elif name == "promote_snapshot" and answer:
            self.slots[arguments["new_slot"]] += 1

    def add(self, others: Iterable[Books]) -> None:
        """Enter what others have kept, and strike what cancels out."""
        for other in others:
            for mine, theirs in ((self.blocks, other.blocks), (self.disks, other.disks), (self.slots, other.slots)):
                mine.update(theirs)
                for number in theirs:
                    if mine[number] == 0:
                        del mine[number]

    def _acquire(self, acquired: Any) -> None:
        self.blocks.update(acquired.blocks.tolist())
        self.blocks.subtract(acquired.released_blocks.tolist())
        self.disks.update(acquired.disk_block_ids.tolist())
        self.disks.subtract(acquired.released_disk_block_ids.tolist())

    def _evict(self, evicted: Any) -> None:
        self.blocks.subtract(evicted.physical.tolist())
        self.disks.subtract(evicted.disk_block_ids.tolist())

    def _free(self, slots: Iterable[int]) -> None:
        self.slots.subtract(slots)


class Worker:
    """One thread's calls, books and counts.

    Parameters
    ----------
    number, seed : int
        Which of the threads this is, and of all that is random.
    caches : list of RadixTree
        Shared with the others.
    """

    def __init__(self, number: int, seed: int, caches: list[RadixTree]) -> None:
        self.caches = caches
        # A caller for each cache: what one holds in a cache it must release there.
        self.callers = [
            Caller(
                seed + place,
                number,
                block_sizes=BLOCK_SIZES,
                adapters=ADAPTERS,
                vocabulary=50_000,
                num_families=64,
                max_chunks=24,
                quotas=(None, 4_000),
                wild=0.05,
            )
            for place in range(len(caches))
        ]
        self.books = [Books() for _ in caches]
        self.calls: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.most_blocks = 0

    def run_until(self, end: float) -> None:
        """Call one cache after the other until the clock says so."""
        for place in itertools.cycle(range(len(self.caches))):
            if time.monotonic() >= end:
                return
            cache, caller = self.caches[place], self.callers[place]
            for _ in range(STRETCH):
                self.make(place, caller.draw())
            num_blocks, _ = cache.stats()
            self.most_blocks = max(self.most_blocks, num_blocks)
            if num_blocks > MAX_BLOCKS:
                self.make(place, Call("evict", {"num_blocks": MAX_BLOCKS // 4}))
            if cache.stats()[0] > MAX_BLOCKS:
                self.make(place, Call("clear", {}))
            if cache.snapshot_count() > MAX_SNAPSHOTS:
                adapter_id = caller.random.choice(ADAPTERS)
                self.make(place, Call("drop_adapter", {"adapter_id": adapter_id}))

    def make(self, place: int, call: Call) -> None:
        """Make one call and keep its answer."""
        answer = answer_of(self.caches[place], call)
        self.calls[call.name] += 1
        if isinstance(answer, Refusal):
            self.refused[f"{call.name}: {answer.error}"] += 1
            return
        self.callers[place].learn(call, answer)
        self.books[place].keep(call, answer)


class _Mallinfo(ctypes.Structure):
    """What the C library answers to ``mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    )


def measured() -> dict[str, int]:
    """How large the process is: what is resident, and what of that is in use, where the C library tells.

    What is in use grows with the smallest leak. What is resident has ups and downs, since allocators keep memory for
    later; where the C library can be told to give it back, it is told.
    """
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    sizes = {"KiB resident": resident >> 10, "Python blocks": sys.getallocatedblocks()}
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _Mallinfo
        info = library.mallinfo2()
        sizes["KiB in use"] = (info.uordblks + info.hblkhd) >> 10
    return sizes


def check(cache: RadixTree, books: Books, way: str) -> None:
    """Raise Violation or IntegrityError unless a cache, a copy of it and the books agree."""
    cache.check_integrity()
    twin = COPIES[way](cache)
    twin.check_integrity()
    if told_by(twin) != told_by(cache):
        raise Violation(f"a copy by {way} tells {told_by(twin)}, the cache {told_by(cache)}")
    blocks, slots, _ = twin.clear()
    for what, held, kept in (
        ("blocks", blocks.physical.tolist(), books.blocks),
        ("disk blocks", blocks.disk_block_ids.tolist(), books.disks),
        ("slots", slots, books.slots),
    ):
        wrong = Counter(held)
        wrong.subtract(kept)
        if any(wrong.values()):
            some = {number: count for number, count in wrong.items() if count}
            raise Violation(
                f"{len(some)} {what} are held more or less often than the answers said, such as {some!s:.200}"
            )
    twin.check_integrity()


class Soak:
    """The run: caches, workers, rounds and what was measured.

    Parameters
    ----------
    seconds : float
        How long to go on.
    num_threads, num_caches, seed : int
        How many, and of all that is random.
    """

    def __init__(self, seconds: float, num_threads: int, num_caches: int, seed: int) -> None:
        self.seconds = seconds
        self.caches = [RadixTree(**SETTINGS[place % len(SETTINGS)]) for place in range(num_caches)]
        self.workers = [Worker(number, seed, self.caches) for number in range(num_threads)]
        self.books = [Books() for _ in self.caches]
        self.num_rounds = 0
        self.sizes: list[dict[str, int]] = []
        self.elapsed = 0.0
        self._hits_before = metrale_numba.cache_hit_count()

    def run(self, progress: Progress) -> None:
        """Go round after round; raise at the first violation."""
        task = progress.add_task("soaking", total=self.seconds)
        started = time.monotonic()
        round_seconds = min(ROUND_SECONDS, self.seconds / MIN_ROUNDS)
        ways = itertools.cycle(COPIES)
        while self.elapsed < self.seconds:
            self._run_round(time.monotonic() + round_seconds)
            self._close_books()
            for place, cache in enumerate(self.caches):
                check(cache, self.books[place], next(ways))
            self._check_counters()
            self.num_rounds += 1
            if self.num_rounds % ROUNDS_A_GENERATION == 0:
                self._clear()
                self.sizes.append(measured())
            self.elapsed = time.monotonic() - started
            progress.update(task, completed=min(self.elapsed, self.seconds))
        for what, growth in self.growth().items():
            if growth > ALLOWED_GROWTH[what]:
                raise Violation(f"the process has {growth:,} {what} more than in its beginning")

    def _run_round(self, end: float) -> None:
        errors: list[BaseException] = []

        def work(worker: Worker) -> None:
            try:
                worker.run_until(end)
            except BaseException as error:  # noqa: BLE001 - raised again where the others have been waited for
                errors.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error

    def _close_books(self) -> None:
        """Enter what all workers kept."""
        for place, books in enumerate(self.books):
            books.add(worker.books[place] for worker in self.workers)
            for worker in self.workers:
                worker.books[place] = Books()

    def _clear(self) -> None:
        """Clear every cache, which must settle its books."""
        for place in range(len(self.caches)):
            self.workers[0].make(place, Call("clear", {}))
        self._close_books()
        if any(books.blocks or books.disks or books.slots for books in self.books):
            raise Violation("a cleared cache has not given everything back")
        self.books = [Books() for _ in self.caches]

    def _check_counters(self) -> None:
        hits = sum(cache.stats_detail().cache_hits for cache in self.caches)
        counted = metrale_numba.cache_hit_count() - self._hits_before
        if hits != counted:
            raise Violation(f"the process has counted {counted} hits, the caches {hits}")

    def growth(self) -> dict[str, int]:
        """How far the last third of the generations is above the first, both as far as they are alike."""
        third = len(self.sizes) // 3
        if third == 0:
            return {}
        return {
            what: min(size[what] for size in self.sizes[-third:]) - max(size[what] for size in self.sizes[:third])
            for what in self.sizes[0]
        }

    def summary(self) -> Table:
        """What was done and measured."""
        calls = sum((worker.calls for worker in self.workers), Counter[str]())
        refused = sum((worker.refused for worker in self.workers), Counter[str]())
        details = [cache.stats_detail() for cache in self.caches]
        table = Table("what", Column("how much", justify="right"), title="soak")
        rows: dict[str, Any] = {
            "seconds": f"{self.elapsed:.0f}",
            "threads": len(self.workers),
            "caches": len(self.caches),
            "calls": f"{calls.total():,}",
            "calls a second": f"{calls.total() / max(self.elapsed, 1e-9):,.0f}",
            "methods called": f"{len(calls)} of {len(WEIGHTS)}",
            "calls refused": f"{refused.total():,}",
            "look-ups that matched": f"{sum(detail.cache_hits for detail in details):,}",
            "look-ups that did not": f"{sum(detail.cache_misses for detail in details):,}",
            "references dropped too often": f"{sum(detail.over_releases for detail in details):,}",
            "most blocks in a cache": f"{max(worker.most_blocks for worker in self.workers):,}",
            "times cleared": f"{sum(detail.epoch for detail in details):,}",
            "rounds, each with all checks": self.num_rounds,
        }
        for what, growth in self.growth().items():
            rows[f"{what}, all caches empty"] = f"{self.sizes[0][what]:,} to {self.sizes[-1][what]:,}"
            rows[f"{what}, growth"] = f"{growth:+,}"
        for what, value in rows.items():
            table.add_row(what, str(value))
        return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long to run (default: 60)")
    parser.add_argument("--threads", type=int, default=2, help="threads that call at the same time (default: 2)")
    parser.add_argument("--caches", type=int, default=3, help="caches that all threads share (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the random calls (default: 0)")
    arguments = parser.parse_args()
    if arguments.seconds <= 0 or arguments.caches < 1 or not 1 <= arguments.threads <= 64:
        parser.error("seconds and caches must be above 0, and threads 1 to 64")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    console = Console()
    metrale_numba.warmup()
    soak = Soak(arguments.seconds, arguments.threads, arguments.caches, arguments.seed)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    error: Exception | None = None
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        try:
            soak.run(progress)
        except Exception as caught:  # noqa: BLE001 - told after the summary, with the status
            error = caught
    console.print(soak.summary())
    if error is None:
        console.print("everything adds up")
        return 0
    console.print("".join(traceback.format_exception(error)), style="red", markup=False, highlight=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
