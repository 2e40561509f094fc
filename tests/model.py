"""A slow and obvious model of the prefix cache, written to be compared with :class:`metrale_numba.RadixTree`.

It relies on the standard library alone and shares no code with the package: nodes live in one dictionary under all
their tokens, snapshots in one list, and every question is answered by looking at all of them. It promises the answers
that the documented behaviour asks for, on valid input, and checks no input.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

NONE = 0xFFFF_FFFF

Tokens = tuple[int, ...]
#: What the model has in the place of a check hash: the adapter and the tokens themselves, so that it cannot collide.
Check = tuple[int, Tokens]


class RefcountError(ValueError):
    """What a strict cache says to a release that no sequence is entitled to."""


class PrefixMatch(NamedTuple):
    matched_blocks: list[int]
    matched_disk_block_ids: list[int]
    matched_tokens: int
    ssm_snapshot: int | None = None
    ssm_snapshot_tokens: int = 0
    ssm_snapshot_tier_key: int | None = None
    ssm_snapshot_tier_tokens: int = 0
    ssm_snapshot_is_tail: bool = False
    ssm_snapshot_check: Check | None = None


class InsertAcquired(NamedTuple):
    disk_block_ids: list[int]
    blocks: list[int]
    released_blocks: list[int]
    released_disk_block_ids: list[int]


class EvictedBlocks(NamedTuple):
    physical: list[int]
    disk_block_ids: list[int]


class Cleared(NamedTuple):
    """All three in no order that a caller may rely on."""

    blocks: EvictedBlocks
    snapshot_slots: list[int]
    tier_keys: list[int]


class Spill(NamedTuple):
    slot: int
    key: int
    depth: int
    check: Check


class Drop(NamedTuple):
    slot: int
    depth: int


class SnapshotStats(NamedTuple):
    saves: int
    lookups: int
    hits: int
    anchor_depth_sum: int
    recompute_tokens_on_hit: int
    recompute_tokens_on_miss: int
    evictions: int
    tier_spills: int
    tier_hits: int
    tier_fault_ins: int
    tier_reaps: int


class StatsDetail(NamedTuple):
    cache_hits: int
    cache_misses: int
    cache_hit_tokens: int
    over_releases: int
    num_blocks: int
    num_suffix_blocks: int
    clock: int
    num_evictable: int
    epoch: int
    num_pinned_blocks: int
    blocks_by_adapter: dict[int, int]


class Pin(NamedTuple):
    matched_tokens: int
    num_blocks: int
    block_size: int
    adapter_id: int
    seconds_left: float | None


class Suffix(NamedTuple):
    tokens: Tokens
    block: int
    disk: int


@dataclass(eq=False)
class Node:
    adapter_id: int
    block_size: int
    prefix: Tokens  # all tokens from the root to the end of this node's chunk
    parent: Node | None
    block: int
    disk: int
    count: int
    stamp: int
    suffix: Suffix | None = None

    @property
    def chunk(self) -> Tokens:
        return self.prefix[-self.block_size :]


class Hold(NamedTuple):
    """What a name pins."""

    tokens: Tokens
    block_size: int
    adapter_id: int
    ends_at: float | None

    @property
    def num_blocks(self) -> int:
        return len(self.tokens) // self.block_size


@dataclass(eq=False)
class Entry:
    key: int
    check: Check
    slot: int
    session: int
    depth: int
    stamp: int
    spilled: bool = False
    tail: bool = False
    sibling: bool = False


def tier_key(adapter_id: int, tokens: Iterable[int]) -> int:
    """Fold the tokens, after a nonzero adapter, into 64 bits: FNV-1a with one step for each whole number."""
    key = 0xCBF2_9CE4_8422_2325
    for word in (adapter_id, *tokens) if adapter_id else tokens:
        key = (key ^ word) * 0x100_0000_01B3 % 2**64
    return key


def _ints(values: Iterable[int]) -> Tokens:
    return tuple(int(value) for value in values)


class Model:
    """The cache's methods under the cache's names, arguments and defaults; lists where the cache has arrays.

    `now` is the clock that pins go by.
    """

    def __init__(
        self,
        *,
        partial_tail_sharing: bool = False,
        tail_protect: bool = True,
        tail_lease_ttl: int = 64,
        evict_alpha: float = 0.0,
        evict_legacy: bool = False,
        hermetic: bool = False,
        adopt_blocks: bool = False,
        block_size: int = 16,
        check_secret: bytes | None = None,
        strict: bool = False,
        max_pinned_blocks: int | None = None,
        quotas: Mapping[int, int] | None = None,
        reserve: int = 0,
        ghosts: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.partial_tail_sharing = partial_tail_sharing
        self.tail_protect = tail_protect
        self.tail_lease_ttl = tail_lease_ttl
        self.evict_alpha = evict_alpha
        self.evict_legacy = evict_legacy
        self.hermetic = hermetic
        self.adopt_blocks = adopt_blocks
        self.block_size = block_size
        self.strict = strict
        self.max_pinned_blocks = max_pinned_blocks
        self.quotas = dict(quotas or {})
        self.now = now

        self.nodes: dict[tuple[int, int, Tokens], Node] = {}
        self.clock = 0
        self.hits = 0
        self.misses = 0
        self.hit_tokens = 0
        self.over_releases = 0
        self.holds: dict[str, Hold] = {}
        self.epoch = 0
        self.adapter_drops: Counter[int] = Counter()

        self.entries: list[Entry] = []
        self.index_clock = 0
        self.leased_session = 0
        self.leased_adapter = 0
        self.evictions_since_lookup = 0
        self.dead_keys: list[int] = []
        self.counts = dict.fromkeys(SnapshotStats._fields, 0)

    # ---------------------------------------------------------------------------------------------------- the tree

    def is_active(self) -> bool:
        return True

    def lookup(
        self,
        tokens: Iterable[int],
        block_size: int | None = None,
        session_hash: int = 0,
        adapter_id: int = 0,
        *,
        record: bool = True,
    ) -> PrefixMatch:
        tokens = _ints(tokens)
        full, lent = self._match(tokens, block_size or self.block_size, adapter_id)
        blocks = [node.block for node in full]
        disks = [node.disk for node in full]
        matched = sum(node.block_size for node in full)
        if lent is not None:
            blocks.append(lent.block)
            disks.append(lent.disk)
            matched = len(tokens)
        if all(disk == NONE for disk in disks):
            disks = []
        if matched == 0:
            self.misses += record
            return PrefixMatch([], [], 0)
        self._hold(full)
        self.hits += record
        self.hit_tokens += matched * record

        match = PrefixMatch(blocks, disks, matched)
        entry = self._find_snapshot(tokens, matched, session_hash, adapter_id)
        if record:
            self._record(entry, matched, session_hash, adapter_id)
        if entry is None:
            return match
        match = match._replace(ssm_snapshot_is_tail=entry.tail, ssm_snapshot_check=entry.check)
        if entry.spilled:
            return match._replace(ssm_snapshot_tier_key=entry.key, ssm_snapshot_tier_tokens=entry.depth)
        return match._replace(ssm_snapshot=entry.slot, ssm_snapshot_tokens=entry.depth)

    def peek_matched_tokens(self, tokens: Iterable[int], block_size: int | None = None, adapter_id: int = 0) -> int:
        tokens = _ints(tokens)
        full, lent = self._match(tokens, block_size or self.block_size, adapter_id)
        return len(tokens) if lent is not None else sum(node.block_size for node in full)

    def peek_many(
        self, prompts: Iterable[Iterable[int]], block_size: int | None = None, adapter_id: int = 0
    ) -> list[int]:
        return [self.peek_matched_tokens(tokens, block_size, adapter_id) for tokens in prompts]

    def pin_prefix(self, tokens: Iterable[int], block_size: int | None = None, adapter_id: int = 0) -> int:
        matched = self.peek_matched_tokens(tokens, block_size, adapter_id)
        if matched > 0:
            self._hold(self._match(_ints(tokens), block_size or self.block_size, adapter_id)[0])
        return matched

    def insert(
        self,
        tokens: Iterable[int],
        block_table: Iterable[int],
        disk_block_ids: Iterable[int] = (),
        block_size: int | None = None,
        matched_tokens: int = 0,
        adapter_id: int = 0,
    ) -> InsertAcquired:
        tokens, table, disks = _ints(tokens), _ints(block_table), _ints(disk_block_ids)
        block_size = block_size or self.block_size
        brings_disks = len(disks) > 0
        if not brings_disks:
            disks = (NONE,) * len(table)
        acquired = InsertAcquired([], [], [], [])
        self.clock += 1

        full = len(tokens) // block_size
        num_stored = min(full, len(table))
        if adapter_id in self.quotas and num_stored > 0:
            self._end_pins()
            num_stored = self._make_quota(tokens, block_size, adapter_id, num_stored, acquired)
        node: Node | None = None
        for i in range(num_stored):
            owned = i * block_size >= matched_tokens
            prefix = tokens[: (i + 1) * block_size]
            parent, node = node, self.nodes.get((adapter_id, block_size, prefix))
            if node is not None:
                node.stamp = self.clock
                node.count = max(node.count, 1) + (1 if owned else 0)
                if node.disk == NONE and disks[i] != NONE:
                    node.disk = disks[i]
                    acquired.disk_block_ids.append(disks[i])
                if self.adopt_blocks and owned and not brings_disks and node.block != table[i]:
                    acquired.released_blocks.append(node.block)
                    acquired.blocks.append(table[i])
                    node.block = table[i]
                continue
            if parent is not None and parent.suffix is not None:
                acquired.released_blocks.append(parent.suffix.block)
                if parent.suffix.disk != NONE:
                    acquired.released_disk_block_ids.append(parent.suffix.disk)
                parent.suffix = None
            count = 2 if owned else 1
            node = Node(adapter_id, block_size, prefix, parent, table[i], disks[i], count, self.clock)
            self.nodes[adapter_id, block_size, prefix] = node
            acquired.blocks.append(table[i])
            if disks[i] != NONE:
                acquired.disk_block_ids.append(disks[i])

        rest = tokens[full * block_size :]
        if num_stored == full and rest and len(table) > full and node is not None:
            old, new = node.suffix, Suffix(rest, table[full], disks[full])
            node.suffix = new
            if old is None or old.block != new.block:
                acquired.blocks.append(new.block)
                if old is not None:
                    acquired.released_blocks.append(old.block)
            old_disk = NONE if old is None else old.disk
            if old_disk != new.disk:
                if new.disk != NONE:
                    acquired.disk_block_ids.append(new.disk)
                if old_disk != NONE:
                    acquired.released_disk_block_ids.append(old_disk)
        return acquired

    def release(self, tokens: Iterable[int], block_size: int | None = None, adapter_id: int = 0) -> None:
        path = self._path(_ints(tokens), block_size or self.block_size, adapter_id)
        if self.strict and any(node.count <= 1 for node in path):
            raise RefcountError
        self._drop(path)

    def release_matched(
        self, tokens: Iterable[int], block_size: int | None, matched_tokens: int, adapter_id: int = 0
    ) -> None:
        self.release(_ints(tokens)[:matched_tokens], block_size, adapter_id)

    def evict(self, num_blocks: int) -> EvictedBlocks:
        self._end_pins()
        evicted = EvictedBlocks([], [])
        while len(evicted.physical) < num_blocks and self._evict_oldest(list(self.nodes.values()), evicted):
            pass
        return evicted

    def evict_from(self, adapter_id: int, num_blocks: int) -> EvictedBlocks:
        self._end_pins()
        evicted = EvictedBlocks([], [])
        while len(evicted.physical) < num_blocks and self._evict_oldest(self._nodes_of(adapter_id), evicted):
            pass
        return evicted

    def num_evictable(self) -> int:
        """Count what repeated `evict` would free, and no more: all but what is held, and the way there."""
        self._end_pins()
        kept: set[int] = set()
        for node in self.nodes.values():
            above: Node | None = node if node.count > 1 else None
            while above is not None and id(above) not in kept:
                kept.add(id(above))
                above = above.parent
        return sum(1 if node.suffix is None else 2 for node in self.nodes.values() if id(node) not in kept)

    def holds_nest(self) -> bool:
        """Whether no node is held more often than its parent."""
        return all(max(node.count, 1) <= max(node.parent.count, 1) for node in self.nodes.values() if node.parent)

    def stats(self) -> tuple[int, int]:
        return len(self.nodes), len(self.nodes)

    def stats_detail(self) -> StatsDetail:
        self._end_pins()
        return StatsDetail(
            cache_hits=self.hits,
            cache_misses=self.misses,
            cache_hit_tokens=self.hit_tokens,
            over_releases=self.over_releases,
            num_blocks=len(self.nodes),
            num_suffix_blocks=sum(node.suffix is not None for node in self.nodes.values()),
            clock=self.clock,
            num_evictable=self.num_evictable(),
            epoch=self.epoch,
            num_pinned_blocks=sum(hold.num_blocks for hold in self.holds.values()),
            blocks_by_adapter=dict(Counter(node.adapter_id for node in self.nodes.values())),
        )

    def check_integrity(self) -> None:
        """Nothing is derived here, so nothing can disagree."""

    def _path(self, tokens: Tokens, block_size: int, adapter_id: int) -> list[Node]:
        """The nodes, visible or not, that spell out the full chunks of `tokens`, up to the first that is missing."""
        path: list[Node] = []
        for end in range(block_size, len(tokens) + 1, block_size):
            node = self.nodes.get((adapter_id, block_size, tokens[:end]))
            if node is None:
                break
            path.append(node)
        return path

    def _match(self, tokens: Tokens, block_size: int, adapter_id: int) -> tuple[list[Node], Node | Suffix | None]:
        """The full nodes that match, and what lends its block to the rest of the tokens, if anything does."""
        full: list[Node] = []
        for node in self._path(tokens, block_size, adapter_id):
            if node.count == 0:
                break
            full.append(node)
        rest = tokens[len(full) * block_size :]
        if not self.partial_tail_sharing or not 0 < len(rest) < block_size:
            return full, None
        last = full[-1] if full else None
        lenders = [
            node
            for node in self.nodes.values()
            if (node.adapter_id, node.block_size) == (adapter_id, block_size)
            and node.parent is last
            and node.count > 0
            and node.chunk[: len(rest)] == rest
        ]
        if lenders:
            return full, max(lenders, key=lambda node: node.stamp)
        if last is not None and last.suffix is not None and last.suffix.tokens[: len(rest)] == rest:
            return full, last.suffix
        return full, None

    def _hold(self, full: list[Node]) -> None:
        self.clock += 1
        for node in full:
            node.count += 1
            node.stamp = self.clock

    def _drop(self, path: list[Node]) -> None:
        for node in path:
            if node.count <= 1:
                self.over_releases += 1
            node.count = max(node.count - 1, 0)

    def _nodes_of(self, adapter_id: int) -> list[Node]:
        return [node for node in self.nodes.values() if node.adapter_id == adapter_id]

    def _evict_oldest(self, nodes: list[Node], evicted: EvictedBlocks) -> bool:
        """Evict the oldest of `nodes` that is a leaf and that nobody holds; False if there is none."""
        parents = {id(node.parent) for node in self.nodes.values()}
        candidates = [node for node in nodes if id(node) not in parents and node.count <= 1]
        if not candidates:
            return False
        self._remove_node(min(candidates, key=lambda node: node.stamp), evicted)
        return True

    def _remove_node(self, node: Node, evicted: EvictedBlocks) -> None:
        del self.nodes[node.adapter_id, node.block_size, node.prefix]
        for holder in (node, node.suffix):
            if holder is not None:
                evicted.physical.append(holder.block)
                if holder.disk != NONE:
                    evicted.disk_block_ids.append(holder.disk)

    # ----------------------------------------------------------------------------------------------- epochs and tenants

    def clear(self) -> Cleared:
        evicted = EvictedBlocks([], [])
        for node in list(self.nodes.values()):
            self._remove_node(node, evicted)
        slots = [entry.slot for entry in self.entries if not entry.spilled]
        keys = [entry.key for entry in self.entries if entry.spilled]
        self.entries.clear()
        self.holds.clear()
        self.leased_session = 0
        self.epoch += 1
        return Cleared(evicted, slots, keys)

    def drop_adapter(self, adapter_id: int) -> Cleared:
        cleared = Cleared(EvictedBlocks([], []), [], [])
        for node in self._nodes_of(adapter_id):
            self._remove_node(node, cleared.blocks)
        for entry in self._sweep(lambda entry: entry.check[0] == adapter_id):
            if entry.spilled:
                cleared.tier_keys.append(entry.key)
            else:
                cleared.snapshot_slots.append(entry.slot)
        self.holds = {name: hold for name, hold in self.holds.items() if hold.adapter_id != adapter_id}
        if self.leased_adapter == adapter_id:
            self.leased_session = 0
        self.adapter_drops[adapter_id] += 1
        return cleared

    def adapter_epoch(self, adapter_id: int) -> int:
        return self.epoch + self.adapter_drops[adapter_id]

    def set_quota(self, adapter_id: int, blocks: int | None) -> None:
        if blocks is None:
            self.quotas.pop(adapter_id, None)
        else:
            self.quotas[adapter_id] = blocks

    def _make_quota(
        self, tokens: Tokens, block_size: int, adapter_id: int, count: int, acquired: InsertAcquired
    ) -> int:
        """Evict what an insert of `count` chunks would put an adapter past its quota; say how many it may store."""
        path = self._path(tokens[: count * block_size], block_size, adapter_id)
        missing = count - len(path)
        if missing == 0:
            return count
        evicted = EvictedBlocks(acquired.released_blocks, acquired.released_disk_block_ids)
        others = [node for node in self._nodes_of(adapter_id) if node not in path]
        while len(path) + len(others) + missing > self.quotas[adapter_id] and self._evict_oldest(others, evicted):
            others = [node for node in self._nodes_of(adapter_id) if node not in path]
        room = self.quotas[adapter_id] - len(path) - len(others)
        return len(path) + min(missing, max(room, 0))

    # ------------------------------------------------------------------------------------------------------------- pins

    def pin(
        self,
        name: str,
        tokens: Iterable[int],
        block_size: int | None = None,
        adapter_id: int = 0,
        ttl: float | None = None,
    ) -> int:
        self._end_pins()
        tokens = _ints(tokens)
        block_size = block_size or self.block_size
        matched = self.peek_matched_tokens(tokens, block_size, adapter_id)
        hold = Hold(tokens[:matched], block_size, adapter_id, None if ttl is None else self.now() + ttl)
        pinned = sum(other.num_blocks for key, other in self.holds.items() if key != name) + hold.num_blocks
        if self.max_pinned_blocks is not None and pinned > self.max_pinned_blocks:
            raise ValueError
        self.pin_prefix(tokens, block_size, adapter_id)
        self._unpin(name)
        if matched > 0:
            self.holds[name] = hold
        return matched

    def unpin(self, name: str) -> bool:
        self._end_pins()
        return self._unpin(name)

    def pins(self) -> dict[str, Pin]:
        self._end_pins()
        return {
            name: Pin(
                len(hold.tokens),
                hold.num_blocks,
                hold.block_size,
                hold.adapter_id,
                None if hold.ends_at is None else hold.ends_at - self.now(),
            )
            for name, hold in self.holds.items()
        }

    def _unpin(self, name: str) -> bool:
        hold = self.holds.pop(name, None)
        if hold is None:
            return False
        self._drop(self._path(hold.tokens, hold.block_size, hold.adapter_id))
        return True

    def ended(self) -> list[str]:
        """The names whose time is over, but that nobody has looked at since."""
        return [name for name, hold in self.holds.items() if hold.ends_at is not None and hold.ends_at <= self.now()]

    def _end_pins(self) -> None:
        for name in self.ended():
            self._unpin(name)

    # --------------------------------------------------------------------------------------------- the snapshot index

    def insert_with_snapshot(
        self,
        tokens: Iterable[int],
        block_table: Iterable[int],
        disk_block_ids: Iterable[int],
        block_size: int | None,
        snapshot_id: int,
        session_hash: int = 0,
        matched_tokens: int = 0,
        adapter_id: int = 0,
    ) -> tuple[int | None, InsertAcquired]:
        acquired = self.insert(tokens, block_table, disk_block_ids, block_size, matched_tokens, adapter_id)
        return self._register(_ints(tokens), snapshot_id, session_hash, adapter_id), acquired

    def insert_intermediate_snapshot(
        self,
        tokens: Iterable[int],
        block_table: Iterable[int],
        disk_block_ids: Iterable[int],
        block_size: int | None,
        snapshot_id: int,
        session_hash: int = 0,
        matched_tokens: int = 0,
        adapter_id: int = 0,
    ) -> int | None:
        del block_table, disk_block_ids, block_size, matched_tokens
        return self._register(_ints(tokens), snapshot_id, session_hash, adapter_id)

    def insert_tail_snapshot(
        self, tokens: Iterable[int], snapshot_id: int, session_hash: int = 0, adapter_id: int = 0
    ) -> list[int]:
        freed: list[int] = []
        if session_hash != 0:
            for entry in self._sweep(lambda entry: entry.session == session_hash and (entry.tail or entry.sibling)):
                if entry.spilled:
                    self._bury(entry.key)
                elif entry.slot != snapshot_id:
                    freed.append(entry.slot)
        displaced, _ = self._write(_ints(tokens), snapshot_id, session_hash, adapter_id, tail=True)
        return freed if displaced is None else [*freed, displaced]

    def insert_tail_sibling_snapshot(
        self, tokens: Iterable[int], snapshot_id: int, session_hash: int = 0, adapter_id: int = 0
    ) -> int | None:
        return self._register(_ints(tokens), snapshot_id, session_hash, adapter_id, sibling=True)

    def evict_snapshot_lru(self) -> int | None:
        victim = self._victim(legacy=self.evict_legacy)
        if victim is None:
            return None
        self._remove(victim)
        self.counts["evictions"] += 1
        if not self.evict_legacy:
            self.evictions_since_lookup += 1
        return victim.slot

    def evict_snapshot_to_tier(self, min_tokens: int) -> Spill | Drop | None:
        victim = self._victim(legacy=False)
        if victim is None:
            return None
        self.evictions_since_lookup += 1
        if victim.depth < min_tokens:
            self._remove(victim)
            self.counts["evictions"] += 1
            return Drop(victim.slot, victim.depth)
        victim.spilled = True
        if victim.key in self.dead_keys:
            self.dead_keys.remove(victim.key)
        self.counts["tier_spills"] += 1
        return Spill(victim.slot, victim.key, victim.depth, victim.check)

    def evict_snapshot_slot(self, slot: int) -> bool:
        for entry in self.entries:
            if not entry.spilled and entry.slot == slot:
                self._remove(entry)
                self.counts["evictions"] += 1
                return True
        return False

    def promote_snapshot(self, key: int, new_slot: int, check: Check | None = None) -> bool:
        entry = self._entry(key)
        if entry is None or not entry.spilled or (check is not None and check != entry.check):
            return False
        entry.spilled = False
        entry.slot = new_slot
        self.counts["tier_fault_ins"] += 1
        return True

    def forget_snapshot_tier_key(self, key: int) -> bool:
        entry = self._entry(key)
        if entry is None or not entry.spilled:
            return False
        self._remove(entry)
        self.counts["tier_reaps"] += 1
        return True

    def take_dead_tier_keys(self) -> list[int]:
        keys, self.dead_keys = self.dead_keys, []
        return keys

    def snapshot_count(self) -> int:
        return len(self.entries)

    def snapshot_stats(self) -> SnapshotStats:
        return SnapshotStats(**self.counts)

    def _entry(self, key: int) -> Entry | None:
        for entry in self.entries:
            if entry.key == key:
                return entry
        return None

    def _remove(self, entry: Entry) -> None:
        """Take the entry out; the last one moves into its place."""
        place = self.entries.index(entry)
        last = self.entries.pop()
        if last is not entry:
            self.entries[place] = last

    def _sweep(self, goes: Callable[[Entry], bool]) -> list[Entry]:
        """Remove every entry that goes, in order; the last one moves into each hole and is looked at next."""
        gone: list[Entry] = []
        i = 0
        while i < len(self.entries):
            if goes(self.entries[i]):
                gone.append(self.entries[i])
                self._remove(self.entries[i])
            else:
                i += 1
        return gone

    def _bury(self, key: int) -> None:
        """Enter the key of a spilled entry that is no more."""
        if key not in self.dead_keys:
            self.dead_keys.append(key)

    def _write(
        self,
        tokens: Tokens,
        slot: int,
        session: int,
        adapter_id: int,
        tail: bool = False,
        sibling: bool = False,
    ) -> tuple[int | None, bool]:
        """Write a resident entry over the one with its key, or after the last.

        Returns the slot to hand back, if any, and whether the entry is new.
        """
        self.index_clock += 1
        new = Entry(
            key=tier_key(adapter_id, tokens),
            check=(adapter_id, tokens),
            slot=slot,
            session=session,
            depth=len(tokens),
            stamp=self.index_clock,
            tail=tail,
            sibling=sibling,
        )
        old = self._entry(new.key)
        if old is None:
            self.entries.append(new)
            return None, True
        self.entries[self.entries.index(old)] = new
        if old.spilled:
            self._bury(old.key)
        return (None if old.spilled or old.slot == slot else old.slot), False

    def _register(self, tokens: Tokens, slot: int, session: int, adapter_id: int, sibling: bool = False) -> int | None:
        displaced, is_new = self._write(tokens, slot, session, adapter_id, sibling=sibling)
        if is_new:
            self.counts["saves"] += 1
        return displaced

    def _find_snapshot(self, tokens: Tokens, matched: int, session: int, adapter_id: int) -> Entry | None:
        """Find, and stamp, the deepest snapshot within the match that the session may see."""
        found: Entry | None = None
        for entry in self.entries:
            if entry.depth > matched or entry.check != (adapter_id, tokens[: entry.depth]):
                continue
            if (entry.tail or self.hermetic) and (session == 0 or entry.session != session):
                continue
            if found is None or entry.depth > found.depth:
                found = entry
        if found is not None:
            self.index_clock += 1
            found.stamp = self.index_clock
        return found

    def _record(self, found: Entry | None, matched: int, session: int, adapter_id: int) -> None:
        """Give the session the lease, and count the snapshot half of a look-up that matched something."""
        if session != 0:
            self.leased_session = session
            self.leased_adapter = adapter_id
            self.evictions_since_lookup = 0
        self.counts["lookups"] += 1
        if found is None:
            self.counts["recompute_tokens_on_miss"] += matched
            return
        self.counts["hits"] += 1
        self.counts["anchor_depth_sum"] += found.depth
        self.counts["recompute_tokens_on_hit"] += matched - found.depth
        if found.spilled:
            self.counts["tier_hits"] += 1

    def _victim(self, legacy: bool) -> Entry | None:
        eligible = [entry for entry in self.entries if not entry.spilled]
        if not eligible:
            return None
        if legacy:
            return min(eligible, key=lambda entry: entry.stamp)

        freshness: dict[int, int] = {}
        for entry in eligible:
            freshness[entry.session] = max(entry.stamp, freshness.get(entry.session, 0))
        stamps = [entry.stamp for entry in eligible]
        depths = [entry.depth for entry in eligible]

        def rank(entry: Entry) -> tuple[int, float]:
            score = _norm(entry.stamp, stamps) + self.evict_alpha * _norm(entry.depth, depths)
            return freshness[entry.session], score

        candidates = [entry for entry in eligible if not self._is_leased(entry)] or eligible
        return min(candidates, key=rank)  # of equals the first, which is the one at the lowest index

    def _is_leased(self, entry: Entry) -> bool:
        return (
            self.leased_session != 0
            and self.tail_protect
            and self.evictions_since_lookup < self.tail_lease_ttl
            and entry.session == self.leased_session
            and (entry.tail or entry.sibling)
        )


def _norm(value: int, values: list[int]) -> float:
    low, high = min(values), max(values)
    return 0.0 if low == high else (value - low) / (high - low)
