"""Where the bytes of snapshots are: in slots, on their way to a tier, in the tier, or garbage to be deleted from it.

The cache says which snapshots there are; this says where each one's bytes are and who is moving them. Its methods are
called by the serving layer with its lock held, but for those that say otherwise: these talk to the tier, which may
take its time, and take the lock themselves for each step.

The bytes of a victim are copied to host memory under the lock, and its slot is free at once. They are written to the
tier after that, by the thread that needed the slot. Until they are there, a look-up is served from the copy.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

from metrale_numba.forking import Lock
from metrale_numba.interface import Spill
from metrale_numba.no_caching import NoPrefixCaching
from metrale_numba.radix_tree import RadixTree
from metrale_numba.serving.block_pool import SnapshotPool
from metrale_numba.serving.books import Books
from metrale_numba.serving.mover import SnapshotMover
from metrale_numba.serving.tier import StoreKey, TierStore
from metrale_numba.serving.transfers import FaultIn, Identity, Load, Resident, StoreCounts, Write

__all__ = ["SnapshotStore"]

_logger = logging.getLogger(__name__)

# So many writes and deletions of different keys can be under way at once; those of one key are made in turn.
_NUM_STRIPES: Final = 16
# So many deletions one call makes for all: whoever comes by shall not pay for what others left.
_MOST_DELETIONS: Final = 32
# So many stored snapshots are asked for after each write: more than a write of the same size can make a tier discard.
_PROBES: Final = 2
# After the first deletion of a call failed, the tier is left alone with deletions for so long.
_DELETIONS_REST_SECONDS: Final = 1.0


class SnapshotStore:
    """The slots of one serving cache, its tier, and what is under way between them."""

    def __init__(
        self,
        cache: RadixTree | NoPrefixCaching,
        slots: SnapshotPool,
        lock: threading.Lock,
        books: Books,
        *,
        mover: SnapshotMover | None,
        tier: TierStore | None,
        identity: Identity,
        spill_min_tokens: int,
        keep_copies: bool,
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._lock = lock
        self._books = books
        self._mover = mover
        self._tier = tier
        self._identity = identity
        self._spill_min_tokens = spill_min_tokens
        self._keep_copies = keep_copies
        self._residents: dict[int, Resident] = {}
        # Of spilled entries, by tier key: where their bytes are.
        self._stored: dict[int, StoreKey] = {}
        self._writes: dict[int, Write] = {}
        self._loads: dict[tuple[int, int], Load] = {}
        # Staged by whoever held the lock, to be written when it has let go of it.
        self._staged: list[Write] = []
        self._garbage: dict[StoreKey, None] = {}
        # References on slots that a call under way has, or has given to a sequence that still waits.
        self.in_transit: list[int] = []
        # A tier that forks, as to compress, takes those it holds once more.
        self.stripes: tuple[Lock, ...] = tuple(threading.RLock() for _ in range(_NUM_STRIPES))
        self._deletions_rest_until = 0.0
        # What failed the last time it was tried, and was logged then.
        self._failing: set[str] = set()
        self.counts = StoreCounts()

    # Slots, under the lock

    def take_slot(self) -> int | None:
        """Take a slot, evicting snapshots until one is free; None, with nothing evicted, if none can be."""
        while self._slots.num_free == 0:
            # A slot that a sequence still reads is not free when its snapshot is gone.
            if not any(self._slots.ref_count(slot) == 1 for slot in self._residents) or not self._evict_one():
                return None
        slot = int(self._slots.allocate(1)[0])
        self.in_transit.append(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Drop the reference of a call under way."""
        self.in_transit.remove(slot)
        self._slots.dec_ref([slot])

    def settle_transit(self, slot: int) -> None:
        """Let somebody else answer for the reference of a call under way."""
        self.in_transit.remove(slot)

    def _evict_one(self) -> bool:
        if isinstance(self._cache, NoPrefixCaching):
            return False
        if self._tier is None:
            slot = self._cache.evict_snapshot_lru()
            if slot is not None:
                self._let_go(slot)
            return slot is not None
        gone = self._cache.evict_snapshot_to_tier(self._spill_min_tokens)
        if isinstance(gone, Spill):
            self._stage(gone)
        elif gone is not None:
            self._let_go(gone.slot)
        return gone is not None

    def _stage(self, spill: Spill) -> None:
        """See to it that a spilled snapshot's bytes are in the tier, and give up its slot."""
        resident = self._residents[spill.slot]
        self.counts.spills += 1
        if resident.write is not None:
            resident.write.slot = None
            self._writes[spill.key] = resident.write
        else:
            try:
                write = Write(self._store_key(resident.adapter, spill.key, spill.check), self._bytes_of(spill.slot))
                write.is_copied = resident.copy is not None
            except BaseException:
                # Without its bytes nobody can use the entry.
                self._cache.forget_snapshot_tier_key(spill.key)
                self._let_go(spill.slot)
                raise
            self._writes[spill.key] = write
            self._staged.append(write)
        del self._residents[spill.slot]
        self._slots.dec_ref([spill.slot])

    def _store_key(self, adapter: int, key: int, check: int) -> StoreKey:
        epoch = self._cache.adapter_epoch(adapter) if isinstance(self._cache, RadixTree) else 0
        return self._identity.store_key(epoch, adapter, key, check)

    def _bytes_of(self, slot: int) -> bytearray:
        assert self._mover is not None
        data = bytearray(self._mover.slot_bytes)
        self._mover.read_slot(slot, memoryview(data))
        return data

    def _let_go(self, slot: int) -> None:
        """Drop the cache's reference on a slot whose snapshot is gone, and what the tier has of it."""
        resident = self._residents.pop(slot)
        if resident.copy is not None:
            self._discard(resident.copy)
        if resident.write is not None:
            self._give_up(resident.write)
        self._slots.dec_ref([slot])

    # What the cache says, under the lock

    def registered(self, slot: int, adapter: int, displaced: Iterable[int]) -> None:
        """Note that the cache has taken over the reference on a slot in transit, and given up others."""
        for old in displaced:
            self._let_go(old)
        self.in_transit.remove(slot)
        self._residents[slot] = Resident(adapter)
        self._bury_dead_keys()

    def _bury_dead_keys(self) -> None:
        if isinstance(self._cache, RadixTree):
            for key in self._cache.take_dead_tier_keys().tolist():
                self._bury(key)

    def forgotten(self, slots: Iterable[int], keys: Iterable[int]) -> None:
        """Note that the cache has forgotten resident and spilled snapshots."""
        for slot in slots:
            self._let_go(slot)
        for key in keys:
            self._bury(key)

    def _bury(self, key: int) -> None:
        """Give up the bytes of a spilled entry that is gone."""
        store_key = self._stored.pop(key, None)
        if store_key is not None:
            self._discard(store_key)
        write = self._writes.pop(key, None)
        if write is not None:
            self._give_up(write)

    def _give_up(self, write: Write) -> None:
        """Let nothing come of a write, or have what comes of it deleted."""
        write.is_dead = True
        if write.is_copied:
            write.is_copied = False
            self._discard(write.store_key)

    def _discard(self, store_key: StoreKey) -> None:
        self._garbage[store_key] = None

    # Fetching a spilled snapshot

    def plan(self, key: int, check: int, adapter: int, epoch: int) -> FaultIn | None:
        """Under the lock: take part in fetching a spilled snapshot; None if there is no slot for it."""
        load = self._loads.get((key, check))
        if load is not None and load.process == os.getpid():
            load.num_waiting += 1
            return FaultIn(key, check, adapter, epoch, load, None, self._store_key(adapter, key, check), None)
        slot = self.take_slot()
        if slot is None:
            return None
        # Of one that a fork cut off from its thread, there is nothing to wait for.
        load = self._loads[key, check] = Load(os.getpid())
        write = self._writes.get(key)
        if write is not None:
            return FaultIn(key, check, adapter, epoch, load, slot, write.store_key, write.data)
        return FaultIn(key, check, adapter, epoch, load, slot, self._stored[key], None)

    def fetch(self, fault: FaultIn) -> bool:
        """Without the lock: fetch, or wait for the one who does; whether the look-up is to be made again.

        Afterwards ``fault.load.slot`` is the slot, with a reference in transit for this sequence; None without one.
        """
        if fault.slot is None:
            return self._wait(fault.load)
        try:
            outcome = self._read(fault, fault.slot)
        except BaseException:
            with self._lock, self._books:
                self._end_load(fault, None, ask_again=False)
                self.give_back(fault.slot)
            raise
        with self._lock, self._books:
            return self._arrived(fault, fault.slot, outcome)

    def _wait(self, load: Load) -> bool:
        try:
            load.ready.wait()
        except BaseException:
            # Interrupted: nobody else would give back what was meant for this sequence.
            with self._lock, self._books:
                if not load.is_over:
                    load.num_waiting -= 1
                elif load.slot is not None:
                    self.give_back(load.slot)
            raise
        return load.ask_again

    def _read(self, fault: FaultIn, slot: int) -> bool | None:
        """Bring the bytes into the slot: True; False if the tier has none; None if it cannot be read."""
        assert self._mover is not None
        data = fault.data
        if data is None:
            data = bytearray(self._mover.slot_bytes)
            assert self._tier is not None
            try:
                if not self._tier.get(fault.store_key, memoryview(data)):
                    return False
            except OSError as error:
                self._report("read", error)
                return None
            self._failing.discard("read")
        self._mover.write_slot(slot, memoryview(data))
        return True

    def _arrived(self, fault: FaultIn, slot: int, outcome: bool | None) -> bool:
        """Under the lock: tell the cache, and hand out references; whether the look-up is to be made again."""
        is_current = isinstance(self._cache, RadixTree) and self._cache.adapter_epoch(fault.adapter) == fault.epoch
        if outcome and is_current:
            if self._cache.promote_snapshot(fault.key, slot, fault.check):
                self.counts.fault_ins += 1
                self._resident_again(fault, slot)
                # One for the cache; that of the call under way is this sequence's.
                self._slots.inc_ref([slot])
            self._end_load(fault, slot, ask_again=False)
            return False
        if outcome is False and is_current:
            self.counts.tier_misses += 1
            # Meanwhile the entry may have been overwritten and spilled anew, with other bytes.
            if self._stored.get(fault.key) is fault.store_key:
                self._cache.forget_snapshot_tier_key(fault.key)
                self._bury(fault.key)
        # Of weights or an adapter that are gone, or a snapshot that is not in the tier: look for another one.
        ask_again = not is_current or outcome is False
        self._end_load(fault, None, ask_again=ask_again)
        self.give_back(slot)
        return ask_again

    def _resident_again(self, fault: FaultIn, slot: int) -> None:
        """Note where the tier has the bytes of a snapshot that has just become resident."""
        resident = self._residents[slot] = Resident(fault.adapter)
        store_key = self._stored.pop(fault.key, None)
        write = self._writes.pop(fault.key, None)
        if write is not None:
            write.slot = slot
            resident.write = write
        elif store_key is not None and self._keep_copies:
            resident.copy = store_key
        elif store_key is not None:
            self._discard(store_key)

    def _end_load(self, fault: FaultIn, slot: int | None, *, ask_again: bool) -> None:
        load = fault.load
        if self._loads.get((fault.key, fault.check)) is load:
            del self._loads[fault.key, fault.check]
        if slot is not None:
            waiting = [slot] * load.num_waiting
            self._slots.inc_ref(waiting)
            self.in_transit.extend(waiting)
        load.slot, load.ask_again, load.is_over = slot, ask_again, True
        load.ready.set()

    # The tier, without the lock

    def settle(self, *, most_deletions: int = _MOST_DELETIONS) -> None:
        """Without the lock: delete what is garbage, as far as it goes, and write what this thread staged."""
        # First what makes room: a tier that is full discards something live for what is written.
        self._delete_garbage(most_deletions)
        self.write_staged()
        self._delete_garbage(most_deletions)

    def write_staged(self) -> None:
        """Without the lock: write what this thread staged."""
        if not self._staged:
            return
        thread = threading.get_ident()
        while mine := [write for write in self._staged if write.thread == thread]:
            self._staged.remove(mine[0])
            self._put(mine[0])

    def _put(self, write: Write) -> None:
        assert self._tier is not None
        store_key = write.store_key
        with self._stripe_of(store_key):
            with self._lock, self._books:
                if write.is_dead:
                    write.is_over.set()
                    return
                # What is written now replaces it.
                self._garbage.pop(store_key, None)
            is_stored: bool | None = None
            try:
                is_stored = self._has_copy(write) or self._tier.put(store_key, memoryview(write.data))
                self._failing.discard("written")
            except OSError as error:
                self._report("written", error)
            finally:
                with self._lock, self._books:
                    self._written(write, is_stored=is_stored)
                write.is_over.set()
        if is_stored:
            self._probe()

    def _has_copy(self, write: Write) -> bool:
        """Whether the tier still has the same bytes, which it may have discarded, or cannot tell now."""
        assert self._tier is not None
        if not write.is_copied:
            return False
        try:
            is_there = self._tier.contains(write.store_key)
        except OSError as error:
            self._report("asked", error)
            return True
        self.counts.clean_spills += is_there
        return is_there

    def _written(self, write: Write, *, is_stored: bool | None) -> None:
        """Under the lock: note where a snapshot's bytes are, or that they are nowhere; None if nobody knows."""
        store_key = write.store_key
        is_kept = bool(is_stored)
        if write.is_dead:
            is_kept = False
        elif write.slot is not None:
            resident = self._residents[write.slot]
            resident.write = None
            is_kept = bool(is_stored) and (self._keep_copies or write.is_asked_for)
            resident.copy = store_key if is_kept else None
        else:
            self._writes.pop(store_key.key, None)
            if is_stored:
                self._stored[store_key.key] = store_key
            else:
                self.counts.lost_writes += 1
                self._cache.forget_snapshot_tier_key(store_key.key)
        if is_stored is not False and not is_kept:
            self._discard(store_key)

    def _probe(self) -> None:
        """Ask the tier for those that were not asked for longest, and forget what it has discarded.

        Without that, the index would go on naming whatever went through a tier with a limit.
        """
        assert self._tier is not None
        with self._lock, self._books:
            oldest = list(islice(self._stored.items(), _PROBES))
        for key, store_key in oldest:
            try:
                is_there = self._tier.contains(store_key)
            except OSError as error:
                self._report("asked", error)
                return
            with self._lock, self._books:
                if self._stored.get(key) is store_key:
                    del self._stored[key]
                    if is_there:
                        # To the end: the next ones are others.
                        self._stored[key] = store_key
                    else:
                        self.counts.tier_misses += 1
                        self._cache.forget_snapshot_tier_key(key)

    def _delete_garbage(self, most: int) -> None:
        if not self._garbage or time.monotonic() < self._deletions_rest_until:
            return
        assert self._tier is not None
        with self._lock, self._books:
            garbage = list(islice(self._garbage, most))
        for number, store_key in enumerate(garbage):
            with self._stripe_of(store_key):
                with self._lock, self._books:
                    if store_key not in self._garbage:
                        continue
                    del self._garbage[store_key]
                try:
                    self._tier.delete(store_key)
                    self._failing.discard("deleted from")
                except BaseException as error:
                    with self._lock, self._books:
                        # At the end, so that one that always fails is in nobody's way.
                        self._discard(store_key)
                        if number == 0:
                            self._deletions_rest_until = time.monotonic() + _DELETIONS_REST_SECONDS
                    if not isinstance(error, OSError):
                        raise
                    self._report("deleted from", error)
                    return

    def _stripe_of(self, store_key: StoreKey) -> Lock:
        return self.stripes[hash(store_key) % _NUM_STRIPES]

    def _report(self, what: str, error: OSError) -> None:
        """Count a failure of the tier, and log the first of a row."""
        self.counts.tier_errors += 1
        if what not in self._failing:
            self._failing.add(what)
            _logger.warning("the snapshot tier cannot be %s, so its snapshots are computed anew: %s", what, error)

    # Saving

    def stored_keys(self) -> dict[int, StoreKey]:
        """Under the lock: of every spilled snapshot, by tier key, where its bytes are or will be."""
        on_their_way = {key: write.store_key for key, write in self._writes.items()}
        return {**self._stored, **on_their_way}

    def writes_under_way(self) -> list[Write]:
        """Under the lock: of spilled snapshots, those whose bytes are not in the tier yet."""
        return list(self._writes.values())

    def resident(self, slot: int) -> Resident:
        """Under the lock: what is known of the snapshot in a slot, to ask for again."""
        return self._residents[slot]

    def stage_copy(self, resident: Resident, spill: Spill) -> Write | None:
        """Under the lock: have the tier given a resident snapshot's bytes, unless it has them; None if it has gone."""
        if self._residents.get(spill.slot) is not resident:
            return None
        if resident.write is None:
            store_key = self._store_key(resident.adapter, spill.key, spill.check)
            resident.write = Write(store_key, self._bytes_of(spill.slot), spill.slot)
            resident.write.is_copied = resident.copy is not None
            resident.copy = None
            self._staged.append(resident.write)
        resident.write.is_asked_for = True
        return resident.write

    def may_have(self, store_key: StoreKey) -> bool:
        """Whether the tier has the bytes of a saved snapshot, or cannot tell now."""
        if self._tier is None:
            return False
        if "asked" in self._failing:
            # Each question may take as long as the tier is given to answer.
            return True
        try:
            return self._tier.contains(store_key)
        except OSError as error:
            self._report("asked", error)
            return True

    def restore(self, stored: Mapping[int, StoreKey]) -> None:
        """Take over the spilled snapshots of a saved index, and have the tier delete what else it has of this model."""
        assert self._tier is not None
        self._stored = dict(stored)
        kept = set(stored.values())
        try:
            found = self._tier.keys()
            for store_key in found:
                if self._identity.owns(store_key) and store_key not in kept:
                    self._discard(store_key)
        except OSError as error:
            self._report("listed", error)

    # Recounting, under the lock

    def put_right(self, slots: Iterable[int], keys: Iterable[int]) -> None:
        """Let the books be as the cache's resident slots and spilled keys, after a step was cut short."""
        residents, spilled = set(slots), set(keys)
        for slot in set(self._residents) - residents:
            resident = self._residents.pop(slot)
            if resident.copy is not None:
                self._discard(resident.copy)
            if resident.write is not None:
                self._give_up(resident.write)
        for key in (set(self._stored) | set(self._writes)) - spilled:
            self._bury(key)
        # Of these nobody knows what adapter they are of, or where their bytes are.
        for slot in residents - set(self._residents):
            if isinstance(self._cache, RadixTree):
                self._cache.evict_snapshot_slot(slot)
        for key in spilled - set(self._stored) - set(self._writes):
            self._cache.forget_snapshot_tier_key(key)

    def faults(self, slots: Iterable[int], keys: Iterable[int]) -> Iterable[str]:
        """Where the books disagree with the cache's resident slots and spilled keys."""
        residents, spilled = set(slots), set(keys)
        if set(self._residents) != residents:
            yield f"the cache has snapshots in slots {sorted(residents)}, the books in {sorted(self._residents)}"
        if set(self._stored) & set(self._writes):
            yield "a spilled snapshot is stored and being written at once"
        known = self._stored.keys() | self._writes.keys()
        if known != spilled:
            yield f"spilled keys {sorted(spilled ^ known)} are known to the cache or to the books alone"
        copies = [resident.copy for resident in self._residents.values() if resident.copy is not None]
        live = [*self._stored.values(), *copies]
        if len(set(live)) != len(live):
            yield "two snapshots have the same place in the tier"
        if self._garbage.keys() & set(live):
            yield "what a snapshot needs is to be deleted from the tier"
        for slot, resident in self._residents.items():
            if resident.write is not None and (resident.write.is_dead or resident.write.slot != slot):
                yield f"slot {slot} waits for a write that is not its own"
