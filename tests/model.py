"""A slow and obvious model of the prefix cache, written to be compared with :class:`metrale_numba.RadixTree`.

It relies on the standard library alone and shares no code with the package: nodes live in one dictionary under all
their tokens, snapshots in one list, and every question is answered by looking at all of them. It promises the answers
that the documented behaviour asks for, on valid input, and checks no input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

NONE = 0xFFFF_FFFF

Tokens = tuple[int, ...]
#: What the model has in the place of a check hash: the adapter and the tokens themselves, so that it cannot collide.
Check = tuple[int, Tokens]


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
    """The cache's methods under the cache's names, arguments and defaults; lists where the cache has arrays."""

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
    ) -> None:
        self.partial_tail_sharing = partial_tail_sharing
        self.tail_protect = tail_protect
        self.tail_lease_ttl = tail_lease_ttl
        self.evict_alpha = evict_alpha
        self.evict_legacy = evict_legacy
        self.hermetic = hermetic
        self.adopt_blocks = adopt_blocks
        self.block_size = block_size

        self.nodes: dict[tuple[int, int, Tokens], Node] = {}
        self.clock = 0
        self.hits = 0
        self.misses = 0
        self.hit_tokens = 0
        self.over_releases = 0

        self.entries: list[Entry] = []
        self.index_clock = 0
        self.leased_session = 0
        self.evictions_since_lookup = 0
        self.counts = dict.fromkeys(SnapshotStats._fields, 0)

    # ---------------------------------------------------------------------------------------------------- the tree

    def is_active(self) -> bool:
        return True

    def lookup(
        self, tokens: Iterable[int], block_size: int | None = None, session_hash: int = 0, adapter_id: int = 0
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
            self.misses += 1
            return PrefixMatch([], [], 0)
        self._hold(full)
        self.hits += 1
        self.hit_tokens += matched

        match = PrefixMatch(blocks, disks, matched)
        entry = self._find_snapshot(tokens, matched, session_hash, adapter_id)
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
        node: Node | None = None
        for i in range(min(full, len(table))):
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
        if rest and len(table) > full and node is not None:
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
        for node in self._path(_ints(tokens), block_size or self.block_size, adapter_id):
            if node.count <= 1:
                self.over_releases += 1
            node.count = max(node.count - 1, 0)

    def release_matched(
        self, tokens: Iterable[int], block_size: int | None, matched_tokens: int, adapter_id: int = 0
    ) -> None:
        self.release(_ints(tokens)[:matched_tokens], block_size, adapter_id)

    def evict(self, num_blocks: int) -> EvictedBlocks:
        evicted = EvictedBlocks([], [])
        while len(evicted.physical) < num_blocks:
            parents = {id(node.parent) for node in self.nodes.values()}
            leaves = [node for node in self.nodes.values() if id(node) not in parents]
            candidates = [node for node in leaves if node.count <= 1]
            if not candidates:
                break
            victim = min(candidates, key=lambda node: node.stamp)
            del self.nodes[victim.adapter_id, victim.block_size, victim.prefix]
            for holder in (victim, victim.suffix):
                if holder is not None:
                    evicted.physical.append(holder.block)
                    if holder.disk != NONE:
                        evicted.disk_block_ids.append(holder.disk)
        return evicted

    def stats(self) -> tuple[int, int]:
        return len(self.nodes), len(self.nodes)

    def stats_detail(self) -> StatsDetail:
        suffixes = [node.suffix for node in self.nodes.values() if node.suffix is not None]
        return StatsDetail(
            self.hits, self.misses, self.hit_tokens, self.over_releases, len(self.nodes), len(suffixes), self.clock
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
        i = 0
        while session_hash != 0 and i < len(self.entries):
            entry = self.entries[i]
            if entry.session != session_hash or not (entry.tail or entry.sibling):
                i += 1
                continue
            if not entry.spilled and entry.slot != snapshot_id:
                freed.append(entry.slot)
            self._remove(entry)
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
        return (None if old.spilled or old.slot == slot else old.slot), False

    def _register(self, tokens: Tokens, slot: int, session: int, adapter_id: int, sibling: bool = False) -> int | None:
        displaced, is_new = self._write(tokens, slot, session, adapter_id, sibling=sibling)
        if is_new:
            self.counts["saves"] += 1
        return displaced

    def _find_snapshot(self, tokens: Tokens, matched: int, session: int, adapter_id: int) -> Entry | None:
        """Answer the snapshot half of a look-up that matched something, with its lease, counters and stamp."""
        if session != 0:
            self.leased_session = session
            self.evictions_since_lookup = 0
        found: Entry | None = None
        for entry in self.entries:
            if entry.depth > matched or entry.check != (adapter_id, tokens[: entry.depth]):
                continue
            if (entry.tail or self.hermetic) and (session == 0 or entry.session != session):
                continue
            if found is None or entry.depth > found.depth:
                found = entry
        self.counts["lookups"] += 1
        if found is None:
            self.counts["recompute_tokens_on_miss"] += matched
            return None
        self.index_clock += 1
        found.stamp = self.index_clock
        self.counts["hits"] += 1
        self.counts["anchor_depth_sum"] += found.depth
        self.counts["recompute_tokens_on_hit"] += matched - found.depth
        if found.spilled:
            self.counts["tier_hits"] += 1
        return found

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
