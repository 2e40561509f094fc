"""A cache and the model, called side by side.

Every call goes to both, and every answer is compared. It relies on the model being right, but keeps books of its own
on what the cache took and gave back: :class:`Pair` promises that no block, disk block or slot comes back that the
cache did not hold, and that a drained cache holds none. :func:`forge` makes prompts whose tier keys collide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from model import NONE, Check, Entry, Model, Tokens, tier_key

import metrale_numba

#: Written over every array that went in or came out, to expose one that the cache still uses.
SCRIBBLE = 0xDEAD_BEEF

#: The ways in which a caller may hold ids, used in turn.
FORMS: tuple[Callable[[Tokens], Any], ...] = (
    lambda ids: np.array(ids, dtype=np.uint32),
    list,
    lambda ids: np.array(ids, dtype=np.int64),
    lambda ids: np.repeat(np.array(ids, dtype=np.uint32), 2)[::2],
    tuple,
    lambda ids: np.array(ids, dtype=">u4"),
)

PRIME = 0x100_0000_01B3
PRIME_INVERSE = pow(PRIME, -1, 2**64)
#: Multiples of it differ in their upper bits as well, which a step carries into the part that the search depends on.
GOLDEN = 0x9E37_79B1


def forge(adapter_id: int, stem: Tokens, key: int) -> Tokens:
    """Continue `stem` by three tokens so that the tier key of the whole is `key`.

    Undoing the last step leaves a state whose upper half no last token can change. The token before it is searched
    by its top byte; the lower 24 bits then follow from the state's top 24, up to a carry. About two in three stems
    have a solution, so the first of the three tokens is changed, in all its bits, until one does.
    """
    wanted = key * PRIME_INVERSE % 2**64
    for first in (i * GOLDEN % 2**32 for i in range(64)):
        state = tier_key(adapter_id, (*stem, first))
        fixed = state >> 32 << 32
        for top in range(256):
            for carry in (0, 1):
                low = ((wanted >> 40) - ((fixed + (top << 24)) * (PRIME - 2**40) >> 40) - carry) % 2**24
                mixed = fixed | top << 24 | low
                if mixed * PRIME % 2**64 >> 32 == wanted >> 32:
                    second = (mixed ^ state) % 2**32
                    third = (mixed * PRIME ^ wanted) % 2**32
                    return (*stem, first, second, third)
    raise AssertionError(f"no continuation of {stem} under adapter {adapter_id} has key {key}")


class Books:
    """How often the cache holds each id, by its own answers."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.held: Counter[int] = Counter()

    def take(self, ids: Iterable[int]) -> None:
        self.held.update(int(i) for i in ids)

    def give(self, ids: Iterable[int]) -> None:
        for i in ids:
            assert self.held[int(i)] > 0, f"{self.what} {i} came back, but the cache does not hold it"
            self.held[int(i)] -= 1

    def has(self, ids: Iterable[int]) -> None:
        for i in ids:
            assert self.held[int(i)] > 0, f"{self.what} {i} was answered, but the cache does not hold it"

    def total(self) -> int:
        return self.held.total()


class Pair:
    """A new cache and a new model with the same settings.

    The methods are the cache's own; they take every argument, and return the model's answer once the cache's has been
    found equal.
    """

    def __init__(self, make_cache: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        self.model = Model(**settings)
        self.cache = make_cache(**settings)
        self.blocks = Books("block")
        self.disks = Books("disk block")
        self.slots = Books("slot")
        self.freed: list[int] = []
        self.numbers: dict[Check, int] = {}
        self.identities: dict[int, Check] = {}
        self.calls = 0
        #: False from the beginning of a call or comparison to its good end.
        self.sound = True

    # ------------------------------------------------------------------------------------------------ the tree's calls

    def lookup(self, tokens: Tokens, block_size: int, session: int, adapter: int) -> Any:
        return self._call("lookup", tokens=tokens, block_size=block_size, session_hash=session, adapter_id=adapter)

    def peek(self, tokens: Tokens, block_size: int, adapter: int) -> int:
        return self._call("peek_matched_tokens", tokens=tokens, block_size=block_size, adapter_id=adapter)

    def pin(self, tokens: Tokens, block_size: int, adapter: int) -> int:
        return self._call("pin_prefix", tokens=tokens, block_size=block_size, adapter_id=adapter)

    def insert(self, tokens: Tokens, table: Tokens, disks: Tokens, block_size: int, matched: int, adapter: int) -> Any:
        return self._call(
            "insert",
            tokens=tokens,
            block_table=table,
            disk_block_ids=disks,
            block_size=block_size,
            matched_tokens=matched,
            adapter_id=adapter,
        )

    def release(self, tokens: Tokens, block_size: int, adapter: int) -> None:
        self._call("release", tokens=tokens, block_size=block_size, adapter_id=adapter)

    def release_matched(self, tokens: Tokens, block_size: int, matched: int, adapter: int) -> None:
        self._call("release_matched", tokens=tokens, block_size=block_size, matched_tokens=matched, adapter_id=adapter)

    def evict(self, num_blocks: int) -> Any:
        return self._call("evict", num_blocks=num_blocks)

    # ----------------------------------------------------------------------------------------------- the index's calls

    def insert_with_snapshot(
        self,
        tokens: Tokens,
        table: Tokens,
        disks: Tokens,
        block_size: int,
        slot: int,
        session: int,
        matched: int,
        adapter: int,
    ) -> Any:
        return self._register(
            "insert_with_snapshot",
            tokens=tokens,
            block_table=table,
            disk_block_ids=disks,
            block_size=block_size,
            snapshot_id=slot,
            session_hash=session,
            matched_tokens=matched,
            adapter_id=adapter,
        )

    def insert_intermediate_snapshot(
        self,
        tokens: Tokens,
        table: Tokens,
        disks: Tokens,
        block_size: int,
        slot: int,
        session: int,
        matched: int,
        adapter: int,
    ) -> Any:
        return self._register(
            "insert_intermediate_snapshot",
            tokens=tokens,
            block_table=table,
            disk_block_ids=disks,
            block_size=block_size,
            snapshot_id=slot,
            session_hash=session,
            matched_tokens=matched,
            adapter_id=adapter,
        )

    def insert_tail(self, tokens: Tokens, slot: int, session: int, adapter: int) -> Any:
        return self._register(
            "insert_tail_snapshot", tokens=tokens, snapshot_id=slot, session_hash=session, adapter_id=adapter
        )

    def insert_sibling(self, tokens: Tokens, slot: int, session: int, adapter: int) -> Any:
        return self._register(
            "insert_tail_sibling_snapshot", tokens=tokens, snapshot_id=slot, session_hash=session, adapter_id=adapter
        )

    def evict_lru(self) -> int | None:
        return self._call("evict_snapshot_lru")

    def evict_to_tier(self, min_tokens: int) -> Any:
        return self._call("evict_snapshot_to_tier", min_tokens=min_tokens)

    def evict_slot(self, slot: int) -> bool:
        return self._call("evict_snapshot_slot", slot=slot)

    def forget(self, key: int) -> bool:
        return self._call("forget_snapshot_tier_key", key=key)

    def promote(self, key: int, slot: int, check: Check | None) -> bool:
        """Promote with the check hash that stands for `check` in the cache, or with one that stands for nothing."""
        self.sound = False
        number = None if check is None else self.numbers.get(check)
        if check is not None and number is None:
            number = next(n for n in range(2**64 - 1, 0, -1) if n not in self.identities)
        wanted = self.model.promote_snapshot(key, slot, check)
        self._agree(self.cache.promote_snapshot(key, slot, number), wanted, "promote_snapshot")
        if wanted:
            self.slots.take([slot])
        self.sound = True
        return wanted

    # ------------------------------------------------------------------------------------------------ comparing, books

    def compare_state(self) -> None:
        """Compare everything that the cache tells of itself, and the books with it; the cache checks itself too."""
        self.sound = False
        self.cache.check_integrity()
        self._agree(self.cache.stats(), self.model.stats(), "stats")
        self._agree(self.cache.snapshot_count(), self.model.snapshot_count(), "snapshot_count")
        self._agree(self.cache.stats_detail(), self.model.stats_detail(), "stats_detail")
        self._agree(self.cache.snapshot_stats(), self.model.snapshot_stats(), "snapshot_stats")
        detail = self.cache.stats_detail()
        assert self.blocks.total() == detail.num_blocks + detail.num_suffix_blocks
        assert self.slots.total() == sum(not entry.spilled for entry in self.model.entries)
        self.sound = True

    def drain(self) -> None:
        """Take every hold away, evict everything, and find that all came back."""
        for node in sorted(self.model.nodes.values(), key=lambda node: -len(node.prefix)):
            while node.count > 1:
                self.release(node.prefix, node.block_size, node.adapter_id)
        self.evict(10**9)
        assert self.cache.stats() == (0, 0)
        assert self.blocks.total() == 0
        assert self.disks.total() == 0
        while self.evict_lru() is not None:
            pass
        assert self.slots.total() == 0
        for key in [entry.key for entry in self.model.entries]:
            assert self.forget(key)
        assert self.cache.snapshot_count() == 0
        self.compare_state()

    def _call(self, name: str, **arguments: Any) -> Any:
        self.sound = False
        self.calls += 1
        wanted = getattr(self.model, name)(**arguments)
        given = dict(arguments)
        for i, (argument, value) in enumerate(arguments.items()):
            if isinstance(value, tuple):
                given[argument] = FORMS[(self.calls + i) % len(FORMS)](value)
        if self.calls % 3 == 0 and arguments.get("block_size") == self.model.block_size:
            given["block_size"] = None
        method = getattr(self.cache, name)
        got = method(*given.values()) if self.calls % 2 else method(**given)
        _scribble(given.values())
        self._agree(got, wanted, name)
        self._keep_books(name, arguments, got)
        _scribble(got if isinstance(got, tuple) else ())
        self.sound = True
        return wanted

    def _register(self, name: str, **arguments: Any) -> Any:
        slot = arguments["snapshot_id"]
        before = self._residents_in(slot)
        wanted = self._call(name, **arguments)
        # An entry overwritten or swept whose slot is the one now given brings nothing back and is not held twice.
        for _ in range(before + 1 - self._residents_in(slot)):
            self.slots.give([slot])
        return wanted

    def _residents_in(self, slot: int) -> int:
        return sum(not entry.spilled and entry.slot == slot for entry in self.model.entries)

    def _keep_books(self, name: str, arguments: Mapping[str, Any], got: Any) -> None:
        if "snapshot_id" in arguments:
            self.slots.take([arguments["snapshot_id"]])
        if name == "lookup":
            self.blocks.has(got.matched_blocks)
            self.disks.has(disk for disk in got.matched_disk_block_ids if disk != NONE)
            self.slots.has([] if got.ssm_snapshot is None else [got.ssm_snapshot])
        elif name == "insert":
            self._acquire(got)
        elif name == "insert_with_snapshot":
            displaced, acquired = got
            self._acquire(acquired)
            self._free(displaced)
        elif name == "evict":
            self.blocks.give(got.physical)
            self.disks.give(got.disk_block_ids)
        elif name == "insert_tail_snapshot":
            for slot in got:
                self._free(slot)
        elif name == "evict_snapshot_to_tier":
            self._free(None if got is None else got.slot)
        elif name == "evict_snapshot_slot":
            self._free(arguments["slot"] if got else None)
        elif name in ("insert_intermediate_snapshot", "insert_tail_sibling_snapshot", "evict_snapshot_lru"):
            self._free(got)

    def _acquire(self, acquired: Any) -> None:
        self.blocks.take(acquired.blocks)
        self.blocks.give(acquired.released_blocks)
        self.disks.take(acquired.disk_block_ids)
        self.disks.give(acquired.released_disk_block_ids)

    def _free(self, slot: int | None) -> None:
        if slot is not None:
            self.slots.give([slot])
            self.freed.append(slot)

    def _agree(self, got: Any, wanted: Any, where: str) -> None:
        """Fail unless the cache's answer is the model's: same kind, same fields, same values."""
        if hasattr(wanted, "_fields"):
            assert type(got).__name__ == type(wanted).__name__, f"{where}: got {got}, wanted {wanted}"
            assert got._fields == wanted._fields, where
            for field, value in wanted._asdict().items():
                if isinstance(value, list):
                    _agree_on_ids(getattr(got, field), value, f"{where}.{field}")
                elif field.endswith("check"):
                    self._agree_on_check(getattr(got, field), value, f"{where}.{field}")
                else:
                    self._agree(getattr(got, field), value, f"{where}.{field}")
        elif isinstance(wanted, tuple | list):
            assert type(got) is type(wanted), f"{where}: got {got}, wanted {wanted}"
            assert len(got) == len(wanted), f"{where}: got {got}, wanted {wanted}"
            for i, (mine, value) in enumerate(zip(got, wanted, strict=True)):
                self._agree(mine, value, f"{where}[{i}]")
        else:
            assert type(got) is type(wanted), f"{where}: got {got!r}, wanted {wanted!r}"
            assert got == wanted, f"{where}: got {got!r}, wanted {wanted!r}"

    def _agree_on_check(self, got: int | None, wanted: Check | None, where: str) -> None:
        """Fail unless one check hash stands for one prefix of one adapter, and the other way round."""
        assert (got is None) == (wanted is None), f"{where}: got {got}, wanted {wanted}"
        if got is None or wanted is None:
            return
        assert type(got) is int, f"{where}: got {got!r}"
        assert 0 <= got < 2**64, f"{where}: got {got!r}"
        known = self.numbers.setdefault(wanted, got)
        assert known == got, f"{where}: {wanted} had {known}, now {got}"
        identity = self.identities.setdefault(got, wanted)
        assert identity == wanted, f"{where}: {got} stood for {identity}, now for {wanted}"

    # --------------------------------------------------------------------------------------------------- for the rules

    def held_table(self, tokens: Tokens, block_size: int, adapter: int) -> tuple[list[int], list[int]]:
        """The blocks and disk ids that the cache has for a prefix, its last suffix included."""
        path = self.model._path(tokens, block_size, adapter)
        blocks, disks = [node.block for node in path], [node.disk for node in path]
        if path and path[-1].suffix is not None:
            blocks.append(path[-1].suffix.block)
            disks.append(path[-1].suffix.disk)
        return blocks, disks

    def spilled(self) -> list[Entry]:
        return [entry for entry in self.model.entries if entry.spilled]


def _agree_on_ids(got: Any, wanted: list[int], where: str) -> None:
    assert isinstance(got, np.ndarray), f"{where}: got {got!r}"
    assert got.dtype == np.uint32, f"{where}: dtype {got.dtype}"
    assert got.ndim == 1, f"{where}: {got.ndim} dimensions"
    assert got.tolist() == wanted, f"{where}: got {got.tolist()}, wanted {wanted}"


def _scribble(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, np.ndarray) and value.flags.writeable:
            value[...] = SCRIBBLE
        elif isinstance(value, metrale_numba.InsertAcquired):
            _scribble(tuple(value))
