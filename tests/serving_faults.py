"""Tests the serving machine: plants one fault at a time in the serving layer, and sees whether the machine notices.

It relies on the source of the method in which a fault is planted, and fails if the line to be changed is not there. It
promises that each of the mistakes that serving engines are known for is found within the examples of a long run; those
that take two threads at certain moments, by the test that brings these about.
"""

from __future__ import annotations
import __future__

import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import test_serving_cache
import test_serving_threads
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from serving_model import Interruption
from test_serving_machine import Machine

from metrale_numba.serving import ServingCache
from metrale_numba.serving.snapshot_store import SnapshotStore

#: The same examples each time, and no search for the smallest that fails.
SETTINGS = settings(
    max_examples=600,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    report_multiple_bugs=False,
    suppress_health_check=tuple(HealthCheck),
)


def machine() -> None:
    run_state_machine_as_test(Machine, settings=SETTINGS)


class Fault(NamedTuple):
    """A wrong line: `old`, which stands exactly once in a method, is replaced by `new`; `by` is to notice it."""

    name: str
    owner: type
    method: str
    old: str
    new: str
    by: Callable[[], None] = machine


FAULTS = (
    # Ends.
    Fault(
        "an end forgets to release in the cache",
        ServingCache,
        "_give_back",
        "if held and",
        "if False and",
    ),
    Fault(
        "an end forgets the blocks",
        ServingCache,
        "_give_back",
        "self._blocks.dec_ref(table)",
        "pass",
    ),
    Fault(
        "an end forgets the slot that was lent",
        ServingCache,
        "_give_back",
        "if slot is not None:",
        "if False:",
    ),
    Fault(
        "an end forgets the disk blocks",
        ServingCache,
        "_give_back",
        "self._disk_blocks.dec_ref(disks)",
        "pass",
    ),
    Fault(
        "an end releases the whole prompt",
        ServingCache,
        "_give_back",
        "holdings.tokens[:held]",
        "holdings.tokens[: holdings.num_tokens]",
    ),
    Fault(
        "a stale end releases anyway",
        ServingCache,
        "_give_back",
        "and not self._is_stale(holdings)",
        "",
    ),
    Fault(
        "a begin that fails keeps what it had",
        ServingCache,
        "begin",
        "            self._drop(holdings)\n",
        "            self._running.discard(holdings)\n",
    ),
    Fault(
        "a sequence that was lost stays",
        ServingCache,
        "_release_forgotten",
        "self._drop(holdings)",
        "self._running.discard(holdings)",
    ),
    # Publishing.
    Fault(
        "a stale publish enters the cache",
        ServingCache,
        "_publish",
        " or self._is_stale(holdings)",
        "",
    ),
    Fault(
        "a publish drops before it takes",
        ServingCache,
        "_take_over",
        "    self._blocks.inc_ref(acquired.blocks)\n",
        "    self._drop_blocks(EvictedBlocks(acquired.released_blocks, acquired.released_disk_block_ids))\n"
        "    self._blocks.inc_ref(acquired.blocks)\n"
        "    acquired = InsertAcquired(acquired.disk_block_ids)\n",
    ),
    Fault(
        "a publish forgets what was released",
        ServingCache,
        "_take_over",
        "acquired.released_blocks, ",
        "acquired.released_blocks[:0], ",
    ),
    Fault(
        "a publish says that nothing is held",
        ServingCache,
        "_publish",
        "matched_tokens=holdings.held",
        "matched_tokens=0",
    ),
    Fault(
        "a publish takes a match in part for whole",
        ServingCache,
        "_publish",
        "matched_tokens=holdings.held",
        "matched_tokens=max(holdings.held, min(holdings.cached_tokens, done))",
    ),
    Fault(
        "a publish that a quota cut short counts as whole",
        ServingCache,
        "_publish",
        "if acquired.blocks.size < num_new:",
        "if False:",
    ),
    Fault(
        "a publish leaves the disk blocks out",
        ServingCache,
        "_take_over",
        "self._disk_blocks.inc_ref(acquired.disk_block_ids)",
        "pass",
    ),
    # Blocks.
    Fault(
        "what is evicted is not dropped",
        ServingCache,
        "_make_room",
        "self._drop_blocks(evicted)",
        "break",
    ),
    Fault(
        "an allocation that cannot be evicts anyway",
        ServingCache,
        "_make_room",
        " or self._num_evictable() < short",
        "",
    ),
    Fault(
        "what is stored twice counts twice",
        ServingCache,
        "_num_evictable",
        "return evictable if self._twice is None else max(evictable - self._twice.surplus, 0)",
        "return evictable",
    ),
    Fault(
        "an allocation evicts once",
        ServingCache,
        "_make_room",
        "short = wanted - self._blocks.num_free\n    return True",
        "short = 0\n    return True",
    ),
    Fault(
        "a block that matched in part is not copied",
        ServingCache,
        "_hold",
        "if rows:",
        "if False:",
    ),
    Fault(
        "a block that matched in part is copied a row short",
        ServingCache,
        "_hold",
        "int(own[0]), rows)",
        "int(own[0]), max(rows - 1, 1))",
    ),
    Fault(
        "the lent block is kept",
        ServingCache,
        "_hold",
        "    self._blocks.dec_ref(lent)\n",
        "    pass\n",
    ),
    Fault(
        "a copy that fails keeps its block",
        ServingCache,
        "_hold",
        "self._blocks.dec_ref(own)",
        "pass",
        partial(test_serving_cache.test_a_copy_that_fails_gives_its_block_back, ValueError),
    ),
    Fault(
        "nothing is held before the copy",
        ServingCache,
        "_hold",
        "self._blocks.inc_ref(match.matched_blocks)",
        "pass",
    ),
    Fault(
        "everything is asked for, and nothing left to compute",
        ServingCache,
        "_look_up",
        "max(holdings.num_tokens - min_compute, 0)",
        "holdings.num_tokens",
    ),
    # Slots.
    Fault(
        "the slot of a look-up is not held",
        ServingCache,
        "_look_up",
        "self._slots.inc_ref([match.ssm_snapshot])",
        "pass",
    ),
    Fault(
        "a slot that was not written to is kept",
        SnapshotStore,
        "give_back",
        "self._slots.dec_ref([slot])",
        "pass",
    ),
    Fault(
        "a snapshot is registered though it was not written",
        ServingCache,
        "_with_slots",
        "is_of_use = is_of_use and",
        "is_of_use =",
    ),
    Fault(
        "a stale snapshot enters the cache",
        ServingCache,
        "_with_slots",
        "len(writes) and not self._is_stale(holdings):",
        "len(writes):",
    ),
    Fault(
        "a snapshot that became stale while it was written enters the cache",
        ServingCache,
        "_with_slots",
        "not holdings.is_ended and not self._is_stale(holdings)",
        "not holdings.is_ended",
    ),
    Fault(
        "the slot that a snapshot displaces is kept",
        SnapshotStore,
        "registered",
        "for old in displaced:",
        "for old in ():",
    ),
    # Spills.
    Fault(
        "a slot is free before it is read",
        SnapshotStore,
        "_stage",
        "    self.counts.spills += 1\n",
        "    self.counts.spills += 1\n    self._slots.dec_ref([spill.slot])\n    self._slots.inc_ref([])\n",
    ),
    Fault(
        "bytes that could not be read are spilled",
        SnapshotStore,
        "_stage",
        "self._cache.forget_snapshot_tier_key(spill.key)",
        "pass",
    ),
    Fault(
        "a spill that the tier did not take stays",
        SnapshotStore,
        "_written",
        "self._cache.forget_snapshot_tier_key(store_key.key)",
        "self._stored[store_key.key] = store_key",
    ),
    Fault(
        "what a failed write left is not deleted",
        SnapshotStore,
        "_written",
        "if is_stored is not False and not is_kept:",
        "if is_stored and not is_kept:",
    ),
    Fault(
        "a write that nobody needs any more is kept",
        SnapshotStore,
        "_written",
        "is_kept = False",
        "is_kept = is_stored",
    ),
    Fault(
        "a clean copy that was never made",
        SnapshotStore,
        "_written",
        "resident.copy = store_key if is_kept else None",
        "resident.copy = store_key",
    ),
    Fault(
        "keys that were overwritten are not looked after",
        SnapshotStore,
        "_bury_dead_keys",
        "self._bury(key)",
        "pass",
    ),
    Fault(
        "the copy of a snapshot that is gone stays in the tier",
        SnapshotStore,
        "_let_go",
        "self._discard(resident.copy)",
        "pass",
    ),
    Fault(
        "clear leaves the tier as it is",
        SnapshotStore,
        "forgotten",
        "self._bury(key)",
        "self._stored.pop(key, None)",
    ),
    Fault(
        "a deletion that failed is not tried again",
        SnapshotStore,
        "_delete_garbage",
        "self._discard(store_key)",
        "pass",
    ),
    # Coming back.
    Fault(
        "a look-up is not made again after a miss",
        SnapshotStore,
        "_arrived",
        "ask_again = not is_current or outcome is False",
        "ask_again = False",
    ),
    Fault(
        "a miss forgets whatever has the key by now",
        SnapshotStore,
        "_arrived",
        "if self._stored.get(fault.key) is fault.store_key:",
        "if True:",
        test_serving_threads.test_a_miss_during_which_the_snapshot_was_written_anew_forgets_nothing,
    ),
    Fault(
        "a fault-in that fails keeps its slot",
        SnapshotStore,
        "fetch",
        "self.give_back(fault.slot)",
        "pass",
    ),
    Fault(
        "a tier that cannot be read keeps the slot",
        SnapshotStore,
        "_arrived",
        "    self.give_back(slot)\n",
        "    pass\n",
    ),
    Fault(
        "what could not be read is used",
        SnapshotStore,
        "_read",
        "return None",
        "pass",
    ),
    Fault(
        "a fault-in takes one reference for two",
        SnapshotStore,
        "_arrived",
        "self._slots.inc_ref([slot])",
        "pass",
    ),
    Fault(
        "a fault-in of an earlier epoch is made resident",
        SnapshotStore,
        "_arrived",
        "self._cache.adapter_epoch(fault.adapter) == fault.epoch",
        "True",
        partial(
            test_serving_threads.test_a_fault_in_that_the_cache_was_cleared_during_ends_in_a_sequence_of_the_new_epoch,
            "after",
        ),
    ),
    Fault(
        "a look-up that is made again keeps the first one's blocks",
        ServingCache,
        "_fetch",
        "self._give_back(holdings)",
        "pass",
    ),
    Fault(
        "without copies the bytes of what came back stay",
        SnapshotStore,
        "_resident_again",
        "self._discard(store_key)",
        "pass",
    ),
    Fault(
        "the second look-up is counted as well",
        ServingCache,
        "begin",
        "record=False",
        "record=record",
    ),
)


def planted(fault: Fault) -> tuple[type, Callable[..., Any]]:
    """The class to change, and the wrong method."""
    home = next(owner for owner in fault.owner.__mro__ if fault.method in vars(owner))
    source = textwrap.dedent(inspect.getsource(vars(home)[fault.method]))
    assert source.count(fault.old) == 1, f"{fault.method} has {source.count(fault.old)} times {fault.old!r}"
    source = source.replace(fault.old, fault.new)
    flags = __future__.annotations.compiler_flag
    names: dict[str, Any] = {}
    exec(compile(source, f"<{fault.name}>", "exec", flags), vars(sys.modules[home.__module__]), names)
    return home, names[fault.method]


def part() -> tuple[Fault, ...]:
    """The faults that METRALE_FAULTS_PART asks for, as ``2/5`` for every fifth from the second on, or else all."""
    first, _, step = os.environ.get("METRALE_FAULTS_PART", "1/1").partition("/")
    return FAULTS[int(first) - 1 :: int(step)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", part(), ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_is_noticed(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    home, wrong = planted(fault)
    monkeypatch.setattr(home, fault.method, wrong)
    # Whatever is raised: without the fault, nothing is.
    with pytest.raises((Exception, Interruption)):
        fault.by()
