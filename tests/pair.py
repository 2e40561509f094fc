"""A cache and the model, called side by side.

Every call goes to both, and every answer is compared. It relies on the model being right, but keeps books of its own
on what the cache took and gave back: :class:`Pair` promises that no block, disk block, slot or tier key comes back
that the cache did not hold, and that a drained cache holds none. The cache may be exchanged for a copy of itself at
any time, or be called beside one. :func:`forge` makes prompts whose tier keys collide.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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


class Clock:
    """A monotonic clock that goes on only when it is told to; it takes the place of :func:`time.monotonic`."""

    def __init__(self) -> None:
        self.seconds = 4096.0

    def __call__(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class Refusal:
    """What stands for the answer of a call that raised."""

    error: str
    message: str = field(compare=False)


def load_what_is_saved(cache: Any) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "cache")
        cache.save(path)
        return type(cache).load(path, reserve=cache.settings.reserve)


#: The answers, and the fields of answers, that are lists and not arrays, and those that are arrays of keys.
PLAIN_LISTS = ("insert_tail_snapshot", "peek_many", "snapshot_slots")
KEY_ARRAYS = ("tier_keys", "take_dead_tier_keys")

KEYWORD_ONLY = {"record"}

#: The ways to copy a cache.
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "oldest pickle": lambda cache: pickle.loads(pickle.dumps(cache, 2)),
    "deepcopy": copy.deepcopy,
    "file": load_what_is_saved,
}

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
    """A new cache and a new model with the same settings, and at times a copy of the cache.

    The methods are the cache's own; they take every argument, and return the model's answer once the cache's has been
    found equal.
    """

    def __init__(self, make_cache: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        # The clock that the cache will ask, which may be one of a test's.
        self.model = Model(**settings, now=time.monotonic)
        self.cache = make_cache(**settings)
        #: A copy of the cache, which answers every call like the cache itself.
        self.twin: Any = None
        #: Whether one of the two was compacted since: then what has no order may come out in another.
        self.one_was_compacted = False
        self.blocks = Books("block")
        self.disks = Books("disk block")
        self.slots = Books("slot")
        #: The tier keys under which bytes are stored.
        self.stored_keys: set[int] = set()
        self.freed: list[int] = []
        self.numbers: dict[Check, int] = {}
        self.identities: dict[int, Check] = {}
        self.calls = 0
        #: False from the beginning of a call or comparison to its good end.
        self.sound = True

    # ------------------------------------------------------------------------------------------------ the tree's calls

    def lookup(self, tokens: Tokens, block_size: int, session: int, adapter: int, record: bool = True) -> Any:
        arguments = {"tokens": tokens, "block_size": block_size, "session_hash": session, "adapter_id": adapter}
        return self._call("lookup", **arguments, **({} if record else {"record": False}))

    def peek(self, tokens: Tokens, block_size: int, adapter: int) -> int:
        return self._call("peek_matched_tokens", tokens=tokens, block_size=block_size, adapter_id=adapter)

    def peek_many(self, prompts: tuple[Tokens, ...], block_size: int, adapter: int) -> list[int]:
        return self._call("peek_many", prompts=prompts, block_size=block_size, adapter_id=adapter)

    def pin_prefix(self, tokens: Tokens, block_size: int, adapter: int) -> int:
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

    def release(self, tokens: Tokens, block_size: int, adapter: int) -> Refusal | None:
        return self._call("release", tokens=tokens, block_size=block_size, adapter_id=adapter)

    def release_matched(self, tokens: Tokens, block_size: int, matched: int, adapter: int) -> Refusal | None:
        arguments = {"tokens": tokens, "block_size": block_size, "matched_tokens": matched, "adapter_id": adapter}
        return self._call("release_matched", **arguments)

    def evict(self, num_blocks: int) -> Any:
        # Asking would end the pins whose time is over, which is for the call itself to do.
        foreseen = self.cache.num_evictable() if self.model.holds_nest() and not self.model.ended() else None
        evicted = self._call("evict", num_blocks=num_blocks)
        if foreseen is not None:
            freed = len(evicted.physical)
            assert freed == foreseen - self.cache.num_evictable(), f"{freed} of {foreseen} blocks were freed"
            assert freed == foreseen or freed in (num_blocks, num_blocks + 1), f"{foreseen} blocks could be freed"
        return evicted

    # ----------------------------------------------------------------------------------------------- epochs and tenants

    def clear(self) -> Any:
        listed = self.cache.contents()
        cleared = self._call("clear")
        self._agree(listed, cleared, "clear")
        return cleared

    def drop_adapter(self, adapter: int) -> Any:
        return self._call("drop_adapter", adapter_id=adapter)

    def set_quota(self, adapter: int, blocks: int | None) -> None:
        self._call("set_quota", adapter_id=adapter, blocks=blocks)

    def evict_from(self, adapter: int, num_blocks: int) -> Any:
        return self._call("evict_from", adapter_id=adapter, num_blocks=num_blocks)

    # ------------------------------------------------------------------------------------------------------------- pins

    def pin(self, name: str, tokens: Tokens, block_size: int, adapter: int, ttl: float | None = None) -> int | Refusal:
        arguments = {"name": name, "tokens": tokens, "block_size": block_size, "adapter_id": adapter, "ttl": ttl}
        return self._call("pin", **arguments)

    def unpin(self, name: str) -> bool:
        return self._call("unpin", name=name)

    def pins(self) -> dict[str, Any]:
        return self._call("pins")

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

    def take_dead_keys(self) -> list[int]:
        return self._call("take_dead_tier_keys")

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
        if self.twin is not None:
            self._agree(self.twin.promote_snapshot(key, slot, number), wanted, "promote_snapshot")
        if wanted:
            self.slots.take([slot])
            self.stored_keys.remove(key)
        self.sound = True
        return wanted

    # ----------------------------------------------------------------------------------------------------------- copies

    def copy(self, way: str) -> None:
        """Make a copy, the twin from now on, which gets every call too and has to give the same answers."""
        self.sound = False
        before = _counters_of_the_process()
        self.twin = COPIES[way](self.cache)
        assert _counters_of_the_process() == before
        assert type(self.twin) is type(self.cache)
        assert self.twin.settings == self.cache.settings
        self.one_was_compacted = False
        self.sound = True

    def part(self, keep_the_copy: bool) -> None:
        """Go on with one of the two."""
        if keep_the_copy and self.twin is not None:
            self.cache = self.twin
        self.twin = None

    # ---------------------------------------------------------------------------------------------------------- memory

    def compact(self) -> None:
        """Compact the cache, and nothing else: it has to go on like the model, which has no memory, and the twin."""
        self.sound = False
        before = sum(self.cache.memory_usage().values())
        given_back = self.cache.compact()
        assert type(given_back) is int
        assert given_back == before - sum(self.cache.memory_usage().values())
        self.one_was_compacted = True
        self.sound = True

    # ------------------------------------------------------------------------------------------------ comparing, books

    def compare_state(self) -> None:
        """Compare everything that the cache tells of itself, and the books with it; the cache checks itself too."""
        self.sound = False
        self.cache.check_integrity()
        self._agree(self.cache.stats(), self.model.stats(), "stats")
        self._agree(self.cache.snapshot_count(), self.model.snapshot_count(), "snapshot_count")
        self._agree(self.cache.snapshot_stats(), self.model.snapshot_stats(), "snapshot_stats")
        self._agree(self.cache.epoch, self.model.epoch, "epoch")
        for adapter in {node.adapter_id for node in self.model.nodes.values()} | self.model.adapter_drops.keys():
            self._agree(self.cache.adapter_epoch(adapter), self.model.adapter_epoch(adapter), "adapter_epoch")
        detail, wanted = self.cache.stats_detail(), self.model.stats_detail()
        num_evictable = self.cache.num_evictable()
        assert num_evictable == detail.num_evictable
        if not self.model.holds_nest():
            assert num_evictable >= wanted.num_evictable
            wanted = wanted._replace(num_evictable=num_evictable)
        self._agree(detail, wanted, "stats_detail")
        assert self.blocks.total() == detail.num_blocks + detail.num_suffix_blocks
        assert self.slots.total() == sum(not entry.spilled for entry in self.model.entries)
        assert self.stored_keys == {entry.key for entry in self.spilled()} | set(self.model.dead_keys)
        if self.twin is not None:
            self.twin.check_integrity()
            for name in ("stats", "snapshot_count", "snapshot_stats", "stats_detail"):
                _must_be_the_same(getattr(self.cache, name)(), getattr(self.twin, name)(), name)
        self.sound = True

    def drain(self) -> None:
        """Take every hold away, evict everything, and find that all came back."""
        for name in self.pins():
            assert self.unpin(name)
        if self.model.strict:
            # Holds that do not nest cannot all be given up where no node may fall below its own reference.
            self.clear()
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
        self.take_dead_keys()
        assert not self.stored_keys
        self.compare_state()

    def _call(self, name: str, /, **arguments: Any) -> Any:
        self.sound = False
        self.calls += 1
        wanted = _answer(getattr(self.model, name), (), arguments)
        got = self._ask(self.cache, name, arguments)
        self._agree(got, wanted, name)
        if self.twin is not None:
            again = self._ask(self.twin, name, arguments)
            if name == "clear" and self.one_was_compacted:
                _must_be_the_same(without_order(got), without_order(again), name)
            else:
                _must_be_the_same(got, again, name)
        if not isinstance(got, Refusal):
            self._keep_books(name, arguments, got)
        _scribble(got if isinstance(got, tuple) else ())
        self.sound = True
        return wanted

    def _ask(self, cache: Any, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call the cache with the arguments in one of their forms, and write over them afterwards."""
        given = dict(arguments)
        for i, (argument, value) in enumerate(arguments.items()):
            if isinstance(value, tuple):
                form = FORMS[(self.calls + i) % len(FORMS)]
                given[argument] = [form(prompt) for prompt in value] if argument == "prompts" else form(value)
        if self.calls % 3 == 0 and arguments.get("block_size") == self.model.block_size:
            given["block_size"] = None
        by_name = given if self.calls % 2 == 0 else {key: given[key] for key in given.keys() & KEYWORD_ONLY}
        got = _answer(getattr(cache, name), [given[key] for key in given if key not in by_name], by_name)
        _scribble(given.values())
        return got

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
        if name in ("clear", "drop_adapter"):
            self._give_back(got.blocks)
            for slot in got.snapshot_slots:
                self._free(slot)
            self._delete(got.tier_keys)
        elif name == "take_dead_tier_keys":
            self._delete(got)
        elif name == "forget_snapshot_tier_key":
            self._delete([arguments["key"]] if got else [])
        elif name == "lookup":
            self.blocks.has(got.matched_blocks)
            self.disks.has(disk for disk in got.matched_disk_block_ids if disk != NONE)
            self.slots.has([] if got.ssm_snapshot is None else [got.ssm_snapshot])
        elif name == "insert":
            self._acquire(got)
        elif name == "insert_with_snapshot":
            displaced, acquired = got
            self._acquire(acquired)
            self._free(displaced)
        elif name in ("evict", "evict_from"):
            self._give_back(got)
        elif name == "insert_tail_snapshot":
            for slot in got:
                self._free(slot)
        elif name == "evict_snapshot_to_tier":
            self._free(None if got is None else got.slot)
            if hasattr(got, "key"):
                self.stored_keys.add(got.key)
        elif name == "evict_snapshot_slot":
            self._free(arguments["slot"] if got else None)
        elif name in ("insert_intermediate_snapshot", "insert_tail_sibling_snapshot", "evict_snapshot_lru"):
            self._free(got)

    def _acquire(self, acquired: Any) -> None:
        self.blocks.take(acquired.blocks)
        self.blocks.give(acquired.released_blocks)
        self.disks.take(acquired.disk_block_ids)
        self.disks.give(acquired.released_disk_block_ids)

    def _give_back(self, evicted: Any) -> None:
        self.blocks.give(evicted.physical)
        self.disks.give(evicted.disk_block_ids)

    def _delete(self, keys: Iterable[int]) -> None:
        for key in keys:
            assert int(key) in self.stored_keys, f"nothing is stored under the key {key}"
            self.stored_keys.remove(int(key))

    def _free(self, slot: int | None) -> None:
        if slot is not None:
            self.slots.give([slot])
            self.freed.append(slot)

    def _agree(self, got: Any, wanted: Any, where: str) -> None:
        """Fail unless the cache's answer is the model's: same kind, same fields, same values."""
        if isinstance(wanted, list):
            _agree_on_list(got, wanted, where)
        elif hasattr(wanted, "_fields"):
            assert type(got).__name__ == type(wanted).__name__, f"{where}: got {got}, wanted {wanted}"
            assert got._fields == wanted._fields, where
            if where in ("clear", "drop_adapter"):
                got, wanted = without_order(got), without_order(wanted)
            for field, value in wanted._asdict().items():
                if field.endswith("check"):
                    self._agree_on_check(getattr(got, field), value, f"{where}.{field}")
                else:
                    self._agree(getattr(got, field), value, f"{where}.{field}")
        elif isinstance(wanted, tuple):
            assert type(got) is tuple, f"{where}: got {got}, wanted {wanted}"
            assert len(got) == len(wanted), f"{where}: got {got}, wanted {wanted}"
            for i, (mine, value) in enumerate(zip(got, wanted, strict=True)):
                self._agree(mine, value, f"{where}[{i}]")
        elif isinstance(wanted, dict):
            assert type(got) is dict, f"{where}: got {got}, wanted {wanted}"
            assert got.keys() == wanted.keys(), f"{where}: got {got}, wanted {wanted}"
            assert where != "pins" or list(got) == list(wanted), f"{where}: got {got}, wanted {wanted}"
            for key, value in wanted.items():
                self._agree(got[key], value, f"{where}[{key!r}]")
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


def _answer(call: Callable[..., Any], arguments: Iterable[Any], by_name: Mapping[str, Any]) -> Any:
    """What a call answers, be it a refusal."""
    try:
        return call(*arguments, **by_name)
    except ValueError as error:
        return Refusal(type(error).__name__, str(error))


def _counters_of_the_process() -> tuple[int, int, int]:
    return metrale_numba.cache_hit_count(), metrale_numba.cache_miss_count(), metrale_numba.cache_hit_tokens_total()


def _must_be_the_same(got: Any, again: Any, where: str) -> None:
    """Fail unless a cache and its copy answer the same, to the last array and the order in it."""
    if isinstance(got, np.ndarray):
        assert got.dtype == again.dtype, f"{where}: {got.dtype}, and of the copy {again.dtype}"
        assert got.tolist() == again.tolist(), f"{where}: {got}, and from the copy {again}"
    elif isinstance(got, dict):
        assert list(got.items()) == list(again.items()), f"{where}: {got}, and from the copy {again}"
    else:
        assert type(got) is type(again), f"{where}: {got!r}, and from the copy {again!r}"
        assert got == again, f"{where}: {got!r}, and from the copy {again!r}"


def without_order(cleared: Any) -> Any:
    """What was forgotten, in order, for none is promised."""

    def in_order(ids: Any) -> Any:
        return np.sort(ids) if isinstance(ids, np.ndarray) else sorted(ids)

    evicted, slots, keys = cleared
    physical, disks = evicted
    return type(cleared)(type(evicted)(in_order(physical), in_order(disks)), in_order(slots), in_order(keys))


def _agree_on_list(got: Any, wanted: list[int], where: str) -> None:
    """Fail unless the answer is the list, in the form that it has in the cache."""
    what = where.rpartition(".")[2]
    if what in PLAIN_LISTS:
        assert type(got) is list, f"{where}: got {got!r}"
        assert all(type(number) is int for number in got), f"{where}: got {got!r}"
        assert got == wanted, f"{where}: got {got}, wanted {wanted}"
        return
    assert isinstance(got, np.ndarray), f"{where}: got {got!r}"
    assert got.dtype == (np.uint64 if what in KEY_ARRAYS else np.uint32), f"{where}: dtype {got.dtype}"
    assert got.ndim == 1, f"{where}: {got.ndim} dimensions"
    assert got.tolist() == wanted, f"{where}: got {got.tolist()}, wanted {wanted}"


def _scribble(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, np.ndarray) and value.flags.writeable:
            value[...] = SCRIBBLE
        elif isinstance(value, (list, metrale_numba.InsertAcquired, metrale_numba.EvictedBlocks)):
            _scribble(tuple(value))
