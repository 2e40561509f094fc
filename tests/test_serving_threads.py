"""The serving layer under many threads: what is under way is neither lost, nor done twice, nor waited for in vain.

It relies on tiers that stop in the middle of a call and wait for the test, so that what comes between comes every time.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_model import SLOT_BYTES, BreakdownError, ModelEngine, Prefix, check_conservation, state_of
from test_processes import forking, output_of, start, warm_environment

from metrale_numba import RadixTree
from metrale_numba.serving import MemoryTier, OutOfBlocks, ServingCache
from metrale_numba.serving.snapshot_store import SnapshotStore

DEADLINE_SECONDS = 60
NUM_THREADS = 4
REQUESTS_A_THREAD = 300
BLOCK_SIZE = 2


class Gate:
    """A place where a thread stops until it is let through."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._opened.wait(DEADLINE_SECONDS), "nobody opened the gate"

    def wait_until_reached(self) -> None:
        assert self.reached.wait(DEADLINE_SECONDS), "nobody came to the gate"

    def open(self) -> None:
        self._opened.set()


class Miss(Exception):
    """Lets a call of the tier find nothing."""


class GatedTier(MemoryTier):
    """A tier whose next call of a kind does something first, or last; the calls after it are as usual."""

    def __init__(self) -> None:
        super().__init__(10**6)
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.before.pop(name, lambda: None)()

    def put(self, key: Any, data: Any) -> bool:
        self._call("put")
        return super().put(key, data)

    def get(self, key: Any, into: Any) -> bool:
        try:
            self._call("get")
        except Miss:
            return False
        found = super().get(key, into)
        self.after.pop("get", lambda: None)()
        return found

    def delete(self, key: Any) -> bool:
        self._call("delete")
        return super().delete(key)


class Worker(threading.Thread):
    """A thread whose answer, or error, is asked for at its end."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._answer: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._work()
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def answer(self) -> Any:
        self.join(DEADLINE_SECONDS)
        assert not self.is_alive(), "a thread never came to its end"
        if self._error is not None:
            raise self._error
        return self._answer


class Setup:
    """A serving cache with three slots, an engine that knows what it wrote, and a tier with gates."""

    def __init__(self, num_slots: int = 3, keep_copies: bool = True) -> None:
        self.cache = RadixTree(block_size=BLOCK_SIZE)
        self.engine = ModelEngine(40, BLOCK_SIZE, num_slots, 0)
        self.tier = GatedTier()
        self.serving = ServingCache(
            self.cache, 40, self.engine, slots=num_slots, tier=self.tier, keep_copies=keep_copies
        )
        self.engine.serving = self.serving

    def number(self, tokens: tuple[int, ...], adapter: int = 0) -> int:
        generation = self.cache.adapter_epoch(adapter)
        return self.engine.prefixes.numbers(Prefix(adapter, generation, tokens))[-1]

    def serve(self, first: int, adapter: int = 0) -> None:
        """Publish a prompt, with a snapshot of its first block."""
        tokens = prompt(first)
        with self.serving.begin(tokens, adapter=adapter) as sequence:
            sequence.allocate()
            sequence.publish(len(tokens))
            assert sequence.snapshot(BLOCK_SIZE, self.engine.writer(self.number(tokens[:BLOCK_SIZE], adapter)))

    def begin(self, first: int, adapter: int = 0) -> Any:
        """Begin with a prompt that was served, and find in the slot what belongs there."""
        sequence = self.serving.begin(prompt(first), adapter=adapter)
        if sequence.snapshot_slot is not None:
            state = self.engine.slot_state(sequence.snapshot_slot)
            assert state == state_of(self.number(prompt(first)[: sequence.snapshot_tokens], adapter))
        return sequence

    def spill(self, *firsts: int) -> None:
        """Serve prompts, and as many others as it takes to spill their snapshots."""
        for first in firsts:
            self.serve(first)
        for other in range(self.serving.slots.num_slots):
            self.serve(1000 + other)

    def check(self, *running: Any) -> None:
        self.serving.check_integrity()
        check_conservation(self.serving, running)

    def end(self, *running: Any) -> None:
        """End what runs, forget everything, and find that all came back."""
        self.check(*running)
        for sequence in running:
            sequence.finish()
        self.check()
        self.serving.clear()
        self.check()
        assert self.serving.blocks.num_used == 0
        assert self.serving.slots.num_used == 0
        assert self.tier.keys() == []


def prompt(first: int) -> tuple[int, ...]:
    return (first, 1, 2, 3, 4)


@pytest.fixture(autouse=True)
def _a_lock_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys share a few locks, by their hashes: a call that waits for another one's would stop a test now and then."""
    locks: defaultdict[Any, threading.Lock] = defaultdict(threading.Lock)
    monkeypatch.setattr(SnapshotStore, "_stripe_of", lambda self, key: locks[key])


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts the threads that begin to wait for what another one fetches."""
    arrived = threading.Semaphore(0)
    wait = SnapshotStore._wait

    def announce(self: SnapshotStore, load: Any) -> bool:
        arrived.release()
        return wait(self, load)

    monkeypatch.setattr(SnapshotStore, "_wait", announce)
    return arrived


# ------------------------------------------------------------------------------------------------------- during a spill


def gated_spill(setup: Setup) -> tuple[Gate, Worker]:
    """Let a thread spill the snapshot of prompt 0, and stop before its bytes are in the tier."""
    for first in range(3):
        setup.serve(first)
    gate = Gate()
    setup.tier.before["put"] = gate
    worker = Worker(lambda: setup.serve(3))
    gate.wait_until_reached()
    return gate, worker


def test_a_look_up_during_a_spill_takes_the_bytes_that_are_on_their_way() -> None:
    setup = Setup()
    gate, worker = gated_spill(setup)
    sequence = setup.begin(0)
    assert sequence.snapshot_tokens == BLOCK_SIZE
    assert "get" not in setup.tier.calls
    gate.open()
    worker.answer()
    assert setup.cache.snapshot_stats().tier_reaps == 0
    setup.end(sequence)


def test_a_snapshot_that_was_wanted_again_during_its_spill_is_found_in_the_tier_by_the_next_spill() -> None:
    setup = Setup()
    gate, worker = gated_spill(setup)
    setup.begin(0).finish()
    gate.open()
    worker.answer()
    setup.spill()
    sequence = setup.begin(0)
    assert sequence.snapshot_tokens == BLOCK_SIZE
    setup.end(sequence)


def test_without_copies_a_snapshot_that_was_wanted_again_during_its_spill_leaves_nothing_in_the_tier() -> None:
    setup = Setup(keep_copies=False)
    gate, worker = gated_spill(setup)
    sequence = setup.begin(0)
    gate.open()
    worker.answer()
    setup.serving.begin([77]).abort()
    setup.check(sequence)
    keys = {key.key for key in setup.tier.keys()}  # noqa: SIM118
    assert keys == set(setup.cache.contents().tier_keys.tolist())
    setup.end(sequence)


def test_a_spilled_snapshot_that_is_spilled_again_before_it_was_written_is_written_once() -> None:
    setup = Setup()
    gate, worker = gated_spill(setup)
    setup.begin(0).finish()
    # These take the slots of all three that are resident, of which one waits for its bytes to be written.
    for first in (4, 5, 6):
        setup.serve(first)
    gate.open()
    worker.answer()
    setup.check()
    keys = setup.tier.keys()
    assert len({key.key for key in keys}) == len(keys)
    assert setup.tier.calls.count("put") == len(keys)
    sequence = setup.begin(0)
    assert sequence.snapshot_tokens == BLOCK_SIZE
    setup.end(sequence)


def test_bytes_of_a_spill_that_the_cache_was_cleared_during_are_deleted() -> None:
    setup = Setup()
    gate, worker = gated_spill(setup)
    setup.serving.clear()
    gate.open()
    worker.answer()
    setup.serving.begin([77]).abort()
    assert setup.tier.keys() == []
    setup.end()


def test_a_write_that_fails_takes_nothing_from_a_snapshot_that_is_resident_again() -> None:
    setup = Setup()
    gate, worker = gated_spill(setup)
    sequence = setup.begin(0)
    setup.tier.max_bytes = SLOT_BYTES - 1
    gate.open()
    worker.answer()
    setup.check(sequence)
    again = setup.begin(0)
    assert again.snapshot_slot == sequence.snapshot_slot
    setup.end(sequence, again)


def test_the_slot_of_a_snapshot_that_is_being_spilled_can_be_used_at_once() -> None:
    setup = Setup()
    for first in range(3):
        setup.serve(first)
    gate = Gate()
    setup.tier.before["put"] = gate
    with setup.serving.begin(prompt(3)) as sequence:
        sequence.allocate()
        sequence.publish(4)
        number = setup.number(prompt(3)[:2])
        worker = Worker(lambda: sequence.snapshot(2, setup.engine.writer(number)))
        gate.wait_until_reached()
        # It would not be found that the slot is not to be had, if this took another's place.
        others = [setup.begin(first) for first in (1, 2)]
        gate.open()
        assert worker.answer()
        setup.check(sequence, *others)
    setup.end(*others)


# ---------------------------------------------------------------------------------------------------- during a fault-in


def test_of_requests_for_one_spilled_snapshot_one_reads_and_all_have_it(waiting: threading.Semaphore) -> None:
    setup = Setup()
    setup.spill(0)
    gate = Gate()
    setup.tier.before["get"] = gate
    workers = [Worker(lambda: setup.begin(0)) for _ in range(3)]
    gate.wait_until_reached()
    for _ in range(2):
        assert waiting.acquire(timeout=DEADLINE_SECONDS)
    gate.open()
    sequences = [worker.answer() for worker in workers]
    assert setup.tier.calls.count("get") == 1
    assert len({sequence.snapshot_slot for sequence in sequences}) == 1
    assert sequences[0].snapshot_slot is not None
    assert setup.cache.snapshot_stats().tier_fault_ins == 1
    setup.end(*sequences)


def test_requests_that_wait_for_a_read_that_fails_compute(waiting: threading.Semaphore) -> None:
    setup = Setup()
    setup.spill(0)
    gate = Gate()

    def fail() -> None:
        gate()
        raise OSError("the tier is away")

    setup.tier.before["get"] = fail
    workers = [Worker(lambda: setup.begin(0)) for _ in range(2)]
    gate.wait_until_reached()
    assert waiting.acquire(timeout=DEADLINE_SECONDS)
    gate.open()
    sequences = [worker.answer() for worker in workers]
    assert [sequence.snapshot_slot for sequence in sequences] == [None, None]
    again = setup.begin(0)
    assert again.snapshot_tokens == BLOCK_SIZE
    setup.end(*sequences, again)


def test_requests_that_wait_for_a_snapshot_that_the_tier_has_lost_look_up_again(waiting: threading.Semaphore) -> None:
    setup = Setup()
    setup.spill(0)
    gate = Gate()

    def lose() -> None:
        gate()
        for key in MemoryTier.keys(setup.tier):
            MemoryTier.delete(setup.tier, key)

    setup.tier.before["get"] = lose
    workers = [Worker(lambda: setup.begin(0)) for _ in range(2)]
    gate.wait_until_reached()
    assert waiting.acquire(timeout=DEADLINE_SECONDS)
    gate.open()
    sequences = [worker.answer() for worker in workers]
    assert [(sequence.snapshot_slot, sequence.cached_tokens) for sequence in sequences] == [(None, 4)] * 2
    assert setup.cache.snapshot_stats().tier_reaps == 1
    setup.end(*sequences)


def test_a_miss_during_which_the_snapshot_was_written_anew_forgets_nothing() -> None:
    setup = Setup()
    setup.serve(0)
    other = setup.begin(0)
    other.release_snapshot()
    setup.spill()
    gate = Gate()

    def miss() -> None:
        gate()
        raise Miss

    setup.tier.before["get"] = miss
    worker = Worker(lambda: setup.begin(0))
    gate.wait_until_reached()
    assert other.snapshot(BLOCK_SIZE, setup.engine.writer(setup.number(prompt(0)[:BLOCK_SIZE])))
    setup.spill()
    gate.open()
    sequence = worker.answer()
    assert sequence.snapshot_tokens == BLOCK_SIZE
    assert setup.cache.snapshot_stats().tier_reaps == 0
    setup.end(sequence, other)


def test_a_mover_that_fails_is_told_to_its_own_request_and_others_go_on(waiting: threading.Semaphore) -> None:
    setup = Setup()
    setup.spill(0)
    gate = Gate()
    setup.tier.before["get"] = gate
    first = Worker(lambda: setup.begin(0))
    gate.wait_until_reached()
    second = Worker(lambda: setup.begin(0))
    assert waiting.acquire(timeout=DEADLINE_SECONDS)
    setup.engine.plan.set(["halfway"])
    gate.open()
    with pytest.raises(BreakdownError):
        first.answer()
    sequence = second.answer()
    setup.check(sequence)
    again = setup.begin(0)
    assert again.snapshot_tokens == BLOCK_SIZE
    setup.end(sequence, again)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_fault_in_that_the_cache_was_cleared_during_ends_in_a_sequence_of_the_new_epoch(moment: str) -> None:
    setup = Setup()
    setup.spill(0)
    gate = Gate()
    getattr(setup.tier, moment)["get"] = gate
    worker = Worker(lambda: setup.begin(0))
    gate.wait_until_reached()
    setup.serving.clear()
    gate.open()
    sequence = worker.answer()
    setup.check(sequence)
    assert not sequence.is_stale
    assert (sequence.cached_tokens, sequence.snapshot_slot) == (0, None)
    setup.end(sequence)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_snapshot_of_new_weights_is_not_taken_from_a_fault_in_of_the_old(moment: str) -> None:
    setup = Setup()
    setup.spill(0)
    gate = Gate()
    getattr(setup.tier, moment)["get"] = gate
    old = Worker(lambda: setup.begin(0))
    gate.wait_until_reached()
    setup.serving.clear()
    setup.spill(0)
    # It waits for the old one, or reads on its own; this thread cannot know.
    new = Worker(lambda: setup.begin(0))
    gate.open()
    sequences = [old.answer(), new.answer()]
    assert [sequence.is_stale for sequence in sequences] == [False, False]
    assert [sequence.snapshot_tokens for sequence in sequences] == [BLOCK_SIZE] * 2
    setup.end(*sequences)


def test_a_fault_in_that_another_adapter_was_dropped_during_ends_well() -> None:
    setup = Setup()
    setup.spill(0)
    setup.serve(0, adapter=7)
    gate = Gate()
    setup.tier.before["get"] = gate
    worker = Worker(lambda: setup.begin(0))
    gate.wait_until_reached()
    setup.serving.drop_adapter(7)
    gate.open()
    sequence = worker.answer()
    assert sequence.snapshot_tokens == BLOCK_SIZE
    setup.end(sequence)


def test_a_snapshot_that_is_overwritten_during_its_fault_in_is_not_lost() -> None:
    setup = Setup()
    setup.serve(0)
    other = setup.begin(0)
    other.release_snapshot()
    setup.spill()
    gate = Gate()
    setup.tier.before["get"] = gate
    worker = Worker(lambda: setup.begin(0))
    gate.wait_until_reached()
    assert other.snapshot(BLOCK_SIZE, setup.engine.writer(setup.number(prompt(0)[:BLOCK_SIZE])))
    gate.open()
    sequence = worker.answer()
    assert sequence.snapshot_tokens == BLOCK_SIZE
    setup.check(sequence, other)
    again = setup.begin(0)
    assert again.snapshot_tokens == BLOCK_SIZE
    setup.end(sequence, other, again)


# ------------------------------------------------------------------------------------------------------ all at one time


@pytest.fixture
def switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(interval)


class Client:
    """Serves requests of one thread, and checks what it reads."""

    def __init__(self, setup: Setup, number: int) -> None:
        self.setup = setup
        self.random = random.Random(number)
        self.refused = 0

    def work(self) -> None:
        for _ in range(REQUESTS_A_THREAD):
            self.serve(self.random)

    def serve(self, random: random.Random) -> None:
        serving, engine = self.setup.serving, self.setup.engine
        adapter, session = random.choice((0, 0, 1)), random.randrange(4)
        tokens = [random.randrange(3) for _ in range(random.randrange(3))] + [1] * random.randrange(8)
        sequence = serving.begin(tokens, session=session, adapter=adapter, min_compute=random.randrange(3))
        numbers = engine.prefixes.numbers(Prefix(adapter, 0, tuple(tokens)))
        engine.check_rows(
            engine.kv, sequence.block_table.tolist(), numbers[1 : sequence.cached_tokens + 1], "what was matched"
        )
        if sequence.snapshot_slot is not None:
            engine.check_state(engine.slot_state(sequence.snapshot_slot), numbers[sequence.snapshot_tokens], "a slot")
        try:
            sequence.allocate()
        except OutOfBlocks:
            self.refused += 1
            sequence.abort()
            return
        table = sequence.block_table.tolist()
        for at in range(sequence.cached_tokens, len(tokens)):
            engine.kv[table[at // BLOCK_SIZE], at % BLOCK_SIZE] = numbers[at + 1]
        half = len(tokens) // 2
        sequence.publish(max(half, sequence.cached_tokens))
        sequence.snapshot(half, engine.writer(numbers[half]))
        if random.random() < 0.2:
            sequence.abort()
            return
        sequence.publish(len(tokens))
        if random.random() < 0.5:
            sequence.tail_snapshot(
                len(tokens), engine.writer(numbers[-1]), sibling=(half, engine.writer(numbers[half]))
            )
        sequence.finish()


@pytest.mark.usefixtures("switching_often")
@pytest.mark.parametrize("keep_copies", [True, False])
def test_threads_that_serve_at_one_time_leak_nothing_and_read_what_was_written(keep_copies: bool) -> None:
    setup = Setup(keep_copies=keep_copies)
    setup.tier.max_bytes = 5 * SLOT_BYTES
    for worker in [Worker(Client(setup, number).work) for number in range(NUM_THREADS)]:
        worker.answer()
    stats = setup.cache.snapshot_stats()
    assert stats.tier_spills > 0
    assert stats.tier_fault_ins > 0
    setup.end()


@pytest.mark.usefixtures("switching_often")
def test_threads_that_serve_while_everything_is_forgotten_leak_nothing() -> None:
    setup = Setup()
    stop = threading.Event()

    def work(number: int) -> None:
        # What is read is not looked at: the engine here does not know when the weights changed.
        client = Client(setup, number)
        setup.engine.check_rows = lambda *arguments: None  # type: ignore[method-assign]
        setup.engine.check_state = lambda *arguments: None  # type: ignore[method-assign]
        client.work()

    def forget() -> None:
        while not stop.is_set():
            setup.serving.drop_adapter(1)
            setup.serving.clear()

    forgetting = Worker(forget)
    for worker in [Worker(lambda number=number: work(number)) for number in range(NUM_THREADS - 1)]:  # type: ignore[misc]
        worker.answer()
    stop.set()
    forgetting.answer()
    setup.serving.begin([77]).abort()
    setup.end()


# ---------------------------------------------------------------------------------------------------------------- forks

FORK_DURING_A_CALL_OF_THE_TIER = """
sys.path.insert(0, {tests!r})
from test_serving_threads import Gate, Setup, Worker, gated_spill, prompt

setup = Setup()
{prepare}

def in_the_child():
    setup.serving.check_integrity()
    sequence = setup.begin(0)
    assert sequence.snapshot_tokens == 2
    sequence.finish()
    setup.serve(8)
    setup.serving.check_integrity()
    setup.serving.clear()
    setup.serving.begin([77]).abort()
    setup.serving.check_integrity()
    assert setup.cache.stats() == (0, 0)

status = status_of(forked(in_the_child))
gate.open()
worker.answer()
setup.serving.check_integrity()
print(status)
"""

SPILL = """
gate, worker = gated_spill(setup)
# A fork waits for the write to be done. Of the hooks that run before it, the one set up last comes first.
os.register_at_fork(before=gate.open)
"""
FAULT_IN = """
setup.spill(0)
gate = Gate()
setup.tier.before["get"] = gate
worker = Worker(lambda: setup.begin(0).finish())
gate.wait_until_reached()
"""


@pytest.mark.parametrize("prepare", [SPILL, FAULT_IN], ids=["spill", "fault-in"])
def test_a_child_that_was_forked_during_a_call_of_the_tier_goes_on_by_itself(prepare: str) -> None:
    code = FORK_DURING_A_CALL_OF_THE_TIER.format(tests=str(Path(__file__).parent), prepare=prepare)
    assert output_of(start(forking(code), **warm_environment())) == "0\n"
