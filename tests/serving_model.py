"""An engine without a model: what it writes to a block or a slot says which prefix it stands for.

A *prefix* is an adapter, the generation of its weights and some tokens, and has a number. The KV of a token is the
number of the prefix that ends with it, and a recurrent state is the bytes of such a number, so that whatever is read
can be told from what should have been there. What is free is poisoned. :class:`ModelEngine` is the mover of a
:class:`~metrale_numba.serving.ServingCache`, and :class:`FlakyTier` stands between one and its tier; both fail when
they are told to. They promise to notice a place that is read or written while it is free.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from metrale_numba import NONE, Cleared, EvictedBlocks, NoPrefixCaching

#: What a row or a slot holds that was never written, and one that was freed.
NEVER = 0
POISON = 2**63 - 1
#: How often a state repeats its number, so that one that was written by half is noticed.
REPEATS = 3
SLOT_BYTES = 8 * REPEATS


#: What else can be planned for a call of the tier or of the mover is what happens in the middle of it.
TIER_FAILURES = ("ok", "error", "late error", "lose", "interrupt")
MOVER_FAILURES = ("ok", "break", "halfway", "break like a tier", "interrupt")


class Prefix(NamedTuple):
    adapter: int
    generation: int
    tokens: tuple[int, ...]


class BreakdownError(Exception):
    """What the mover raises when it is told to."""


class BreakdownLikeATierError(BreakdownError, OSError):
    """The same, for whoever takes every OSError for the tier's."""


class Interruption(BaseException):
    """What mover and tier raise when they are told to be interrupted, as by Ctrl-C."""


class Prefixes:
    """Gives numbers to prefixes, and tells which prefix has a number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[tuple[int, ...], int] = {}
        # The number of the prefix that is one token shorter, and the token; of an empty one, what it is under.
        self._steps: list[tuple[int, ...]] = [()]

    def _number(self, step: tuple[int, ...]) -> int:
        with self._lock:
            number = self._numbers.setdefault(step, len(self._steps))
            if number == len(self._steps):
                self._steps.append(step)
        return number

    def start(self, adapter: int, generation: int) -> int:
        return self._number((-1, adapter, generation))

    def extend(self, number: int, token: int) -> int:
        return self._number((number, token))

    def numbers(self, prefix: Prefix) -> list[int]:
        """The numbers of all its beginnings, the empty one first."""
        numbers = [self.start(prefix.adapter, prefix.generation)]
        for token in prefix.tokens:
            numbers.append(self.extend(numbers[-1], token))
        return numbers

    def prefix(self, number: int) -> Prefix:
        tokens: list[int] = []
        while (step := self._steps[number])[0] != -1:
            tokens.append(step[1])
            number = step[0]
        return Prefix(step[1], step[2], tuple(reversed(tokens)))

    def shown(self, number: int) -> str:
        if number == NEVER:
            return "what was never written"
        if number == POISON:
            return "what was freed"
        if not 0 < number < len(self._steps):
            return f"nonsense ({number})"
        return f"the end of {tuple(self.prefix(number))}"


def state_of(number: int) -> bytes:
    """The recurrent state after the prefix with this number."""
    return struct.pack("<q", number) * REPEATS


def number_of(state: bytes) -> int:
    """The number of the prefix whose state this is; -1 for a state that is torn."""
    numbers = set(struct.unpack(f"<{REPEATS}q", state))
    return numbers.pop() if len(numbers) == 1 else -1


class Plan:
    """What is to happen at the next calls, one after the other; nothing unusual at those that follow."""

    def __init__(self) -> None:
        self._steps: list[str] = []
        #: How often each thing did happen, since it was planned last.
        self.happened: Counter[str] = Counter()

    def set(self, steps: Iterable[str]) -> None:
        self._steps = list(steps)
        self.happened.clear()

    def next(self) -> str:
        step = self._steps.pop(0) if self._steps else "ok"
        if step != "ok":
            self.happened[step] += 1
        return step


class ModelEngine:
    """The memory of an engine; a mover for a serving cache.

    `serving` is to be set when there is one.
    """

    slot_bytes = SLOT_BYTES

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, num_disk_blocks: int) -> None:
        self.prefixes = Prefixes()
        self.block_size = block_size
        self.kv = np.full((num_blocks, block_size), NEVER, np.int64)
        self.disk = np.full((num_disk_blocks, block_size), NEVER, np.int64)
        self.states = np.full((num_slots, SLOT_BYTES), 0, np.uint8)
        self.plan = Plan()
        self.meanwhile: Callable[[str], None] = lambda name: None
        self.serving: Any = None
        self.calls: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------------- the mover

    def read_slot(self, slot: int, into: memoryview) -> None:
        self._called("read_slot", slot=slot)
        step = self._next()
        assert len(into) == SLOT_BYTES
        if step == "halfway":
            into[: SLOT_BYTES // 2] = bytes(SLOT_BYTES // 2)
            raise BreakdownError("in the middle of read_slot")
        into[:] = self.states[slot].tobytes()

    def write_slot(self, slot: int, data: memoryview) -> None:
        self._called("write_slot", slot=slot)
        step = self._next()
        assert len(data) == SLOT_BYTES
        self.put_state(slot, bytes(data), step)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self._called("copy_rows")
        step = self._next()
        counts = self.serving.blocks.ref_counts()
        assert counts[source] > 0, f"block {source} is copied while it is free"
        assert counts[target] == 1, f"a copy is made to block {target}, which has {counts[target]} references"
        assert source != target
        assert 0 < rows < self.block_size
        self.kv[target] = POISON
        if step == "halfway":
            raise BreakdownError("in the middle of copy_rows")
        self.kv[target, :rows] = self.kv[source, :rows]

    def writer(self, number: int) -> Callable[[int], None]:
        """What writes the state after a prefix to a slot that it is given."""

        def write(slot: int) -> None:
            self._called("write", slot=slot)
            step = self._next()
            if step not in MOVER_FAILURES:
                # No lock is held here.
                self.meanwhile(step)
            self.put_state(slot, state_of(number), step)

        return write

    def put_state(self, slot: int, state: bytes, step: str) -> None:
        if step == "halfway":
            self.states[slot, : SLOT_BYTES // 2] = 0xEE
            raise BreakdownError("in the middle of a state")
        self.states[slot] = np.frombuffer(state, np.uint8)

    def _called(self, name: str, slot: int | None = None) -> None:
        self.calls[name] += 1
        if slot is not None:
            count = self.serving.slots.ref_count(slot)
            assert count > 0, f"{name} of slot {slot}, which is free"
            assert type(slot) is int

    def _next(self) -> str:
        step = self.plan.next()
        if step == "break":
            raise BreakdownError("told to")
        if step == "interrupt":
            raise Interruption
        if step == "break like a tier":
            raise BreakdownLikeATierError("told to")
        return step

    # -------------------------------------------------------------------------------------------------------- checking

    def poison_what_is_free(self) -> None:
        self.kv[self.serving.blocks.ref_counts() == 0] = POISON
        if self.states.size:
            self.states[self.serving.slots.ref_counts() == 0] = np.frombuffer(state_of(POISON), np.uint8)
        if self.disk.size:
            self.disk[self.serving.disk_blocks.ref_counts() == 0] = POISON

    def check_rows(self, memory: np.ndarray, table: Sequence[int], numbers: Sequence[int], what: str) -> None:
        """Fail unless the rows of a table's blocks hold the prefixes with these numbers."""
        got = memory[np.asarray(table, np.int64)].reshape(-1)[: len(numbers)].tolist()
        if got == list(numbers):
            return
        assert len(got) == len(numbers), f"{what}: {len(table)} blocks are too few for {len(numbers)} tokens"
        at = next(i for i, (mine, wanted) in enumerate(zip(got, numbers, strict=True)) if mine != wanted)
        raise AssertionError(
            f"{what}: row {at} (block {table[at // self.block_size]}) holds {self.prefixes.shown(got[at])}, "
            f"not {self.prefixes.shown(numbers[at])}"
        )

    def check_state(self, state: bytes, number: int, what: str) -> None:
        """Fail unless the state is the one after the prefix with this number."""
        if state != state_of(number):
            got, wanted = self.prefixes.shown(number_of(state)), self.prefixes.shown(number)
            raise AssertionError(f"{what} holds the state after {got}, not after {wanted}")

    def slot_state(self, slot: int) -> bytes:
        return self.states[slot].tobytes()


class FlakyTier:
    """A tier that fails, loses or refuses what it is told to, and lets other things happen in the middle of its calls.

    What can be planned for a call: ``error`` before anything is done; ``late error`` after it was done; ``lose`` a
    blob, which makes a put answer False and a get miss; ``interrupt``. Anything else planned is handed to `meanwhile`,
    up to a comma, behind which may be a failure.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.persistent = inner.persistent
        self.plan = Plan()
        self.meanwhile: Callable[[str, Any], None] = lambda name, key: None
        #: The bytes of every key put, whether or not they are still there.
        self.stored: dict[Any, bytes] = {}
        #: Keys of blobs that went without having been deleted.
        self.lost: set[Any] = set()
        #: Whether it failed, so that it may have what nobody needs until it is tried again.
        self.is_ailing = False
        self.calls: Counter[str] = Counter()

    def put(self, key: Any, data: Any) -> bool:
        step = self._begin("put", key)
        data = bytes(data)
        if step == "lose":
            return False
        before = set(self.inner.keys())
        done = self.inner.put(key, data)
        self.lost.discard(key)
        self.lost |= before - set(self.inner.keys()) - {key}
        if done:
            self.stored[key] = data
        if step == "late error":
            raise OSError("told to, after a put")
        return bool(done)

    def get(self, key: Any, into: memoryview) -> bool:
        step = self._begin("get", key)
        if step == "late error":
            into[: len(into) // 2] = bytes(len(into) // 2)
            raise OSError("told to, in the middle of a get")
        if step == "lose" and self.inner.delete(key):
            self.lost.add(key)
        return bool(self.inner.get(key, into))

    def delete(self, key: Any) -> bool:
        step = self._begin("delete", key)
        done = self.inner.delete(key)
        self.lost.discard(key)
        if step == "late error":
            raise OSError("told to, after a delete")
        return bool(done)

    def contains(self, key: Any) -> bool:
        self._begin("contains", key)
        return bool(self.inner.contains(key))

    def keys(self) -> list[Any]:
        self._begin("keys")
        return list(self.inner.keys())

    @property
    def bytes_used(self) -> int:
        return int(self.inner.bytes_used)

    def close(self) -> None:
        self.inner.close()

    def lose_all(self) -> None:
        """Let every blob be gone."""
        while self.lose(0) is not None:
            pass

    def lose(self, which: int) -> Any:
        """Let one of the blobs be gone, as in a tier that others use as well, and tell which; None if there is none."""
        keys = sorted(self.inner.keys())
        if not keys:
            return None
        key = keys[which % len(keys)]
        self.inner.delete(key)
        self.lost.add(key)
        return key

    def _begin(self, name: str, key: Any = None) -> str:
        self.calls[name] += 1
        step = self.plan.next()
        if step not in TIER_FAILURES:
            meanwhile, _, step = step.partition(", ")
            self.meanwhile(meanwhile, key)
            step = step or "ok"
        if name == "delete" and step in ("error", "late error", "interrupt"):
            self.is_ailing = True
        if step == "interrupt":
            raise Interruption
        if step == "error":
            raise OSError(f"told to, before {name}")
        return step


def contents_of(serving: Any) -> Cleared:
    """What the cache of a serving layer would hand back if it forgot everything."""
    if isinstance(serving.cache, NoPrefixCaching):
        return Cleared(EvictedBlocks(), [], np.empty(0, np.uint64))
    contents: Cleared = serving.cache.contents()
    return contents


def check_conservation(serving: Any, sequences: Iterable[Any]) -> None:
    """Count who refers to what: the cache, and the sequences that run. Fail unless the pools count the same."""
    contents = contents_of(serving)
    assert len(set(contents.snapshot_slots)) == len(contents.snapshot_slots)
    owners = {
        "blocks": Counter(contents.blocks.physical.tolist()),
        "disk_blocks": Counter(contents.blocks.disk_block_ids.tolist()),
        "slots": Counter(contents.snapshot_slots),
    }
    for sequence in sequences:
        owners["blocks"].update(sequence.block_table.tolist())
        owners["disk_blocks"].update(disk for disk in sequence.disk_table.tolist() if disk != NONE)
        owners["slots"].update([] if sequence.snapshot_slot is None else [sequence.snapshot_slot])
    for name, counter in owners.items():
        pool = getattr(serving, name)
        if pool is None:
            assert not counter
            continue
        counts = pool.ref_counts()
        held = {number: int(counts[number]) for number in np.flatnonzero(counts).tolist()}
        assert held == dict(counter), f"{name}: the pool counts {held}, owners have {dict(sorted(counter.items()))}"
        assert pool.num_used == len(held)
        assert pool.num_free == counts.size - len(held)
