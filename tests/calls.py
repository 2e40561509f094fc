"""Random calls of every method of a cache, right and wrong ones, for tests that make a great many of them.

A :class:`Caller` relies on its seed and on the answers it is told of, so that the same seed and the same answers give
the same calls. It promises that no two callers hand in the same slot, and that each call is valid input.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from pair import Refusal

#: How often each method is called, in parts of their sum. What forgets everything is rare, or nothing would grow.
WEIGHTS: dict[str, float] = {
    "lookup": 14,
    "peek_matched_tokens": 4,
    "peek_many": 1,
    "pin_prefix": 3,
    "insert": 14,
    "insert_with_snapshot": 4,
    "insert_intermediate_snapshot": 4,
    "insert_tail_snapshot": 4,
    "insert_tail_sibling_snapshot": 3,
    "release": 12,
    "release_matched": 16,
    "evict": 9,
    "evict_from": 1,
    "evict_snapshot_lru": 3,
    "evict_snapshot_to_tier": 5,
    "evict_snapshot_slot": 2,
    "promote_snapshot": 4,
    "forget_snapshot_tier_key": 2,
    "take_dead_tier_keys": 1,
    "pin": 1,
    "unpin": 1,
    "pins": 1,
    "set_quota": 1,
    "adapter_epoch": 1,
    "num_evictable": 1,
    "snapshot_count": 1,
    "stats": 1,
    "stats_detail": 1,
    "snapshot_stats": 1,
    "memory_usage": 0.2,
    "compact": 0.1,
    "check_integrity": 0.2,
    "drop_adapter": 0.1,
    "copy": 0.05,
    "clear": 0.02,
}
SESSIONS = (0, 1, 2, 2**63 + 9)
PIN_NAMES = ("system prompt", "tools", "")
_REMEMBERED = 64


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


class _Hold(NamedTuple):
    tokens: np.ndarray
    block_size: int
    matched_tokens: int
    adapter_id: int


def answer_of(cache: Any, call: Call) -> Any:
    """What the cache answers, be it a refusal; for ``copy``, what a deep copy tells of itself."""
    if call.name == "copy":
        return told_by(copy.deepcopy(cache))
    try:
        return getattr(cache, call.name)(**call.arguments)
    except ValueError as error:
        return Refusal(type(error).__name__, str(error))


def told_by(cache: Any) -> tuple[Any, ...]:
    """Everything that a cache tells of its state without changing it."""
    return cache.stats_detail(), cache.snapshot_stats(), cache.snapshot_count(), cache.pins(), cache.epoch


def same(left: Any, right: Any) -> bool:
    """Whether two answers are of one kind and equal, arrays included."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and bool(left == right)


class Caller:
    """Makes up calls; most of them concern what it holds, has spilled or has registered, some anything at all.

    Parameters
    ----------
    seed : int
        Of all that is random.
    number : int
        Which of several callers this is, 0..63: it hands in slots and blocks of its own.
    block_sizes, adapters : sequence of int
        What calls are about.
    vocabulary : int
        Number of different tokens: the fewer, the more prompts share.
    num_families : int
        Number of prompts, the same for every caller, of which all others are beginnings, with or without a tail.
    max_chunks : int
        Length of those, in blocks.
    quotas : sequence of int or None
        What quotas are set to.
    wild : float
        Share of the releases, promotions and the like that are about anything at all.
    """

    def __init__(
        self,
        seed: int,
        number: int = 0,
        *,
        block_sizes: Sequence[int] = (2, 3),
        adapters: Sequence[int] = (0, 1, 2**63 + 7),
        vocabulary: int = 2,
        num_families: int = 4,
        max_chunks: int = 5,
        quotas: Sequence[int | None] = (None, None, 0, 4, 12),
        wild: float = 0.3,
    ) -> None:
        self.random = random.Random(f"{seed}/{number}")
        self.block_sizes = block_sizes
        self.adapters = adapters
        self.quotas = quotas
        self.wild = wild
        shape = (num_families, max_chunks * max(block_sizes))
        self.families = np.random.default_rng(0).integers(0, vocabulary, shape, np.uint32)
        # Slices of it are the tails of prompts.
        self.noise = np.random.default_rng([seed, number]).integers(0, vocabulary, 2**16, np.uint32)
        self.slots = itertools.count(number << 40)
        self.next_block = number << 26
        self.holds: list[_Hold] = []
        self.spilled: list[tuple[int, int]] = []
        self.registered: list[int] = []
        self._names = list(WEIGHTS)
        self._weights = list(itertools.accumulate(WEIGHTS.values()))

    def draw(self) -> Call:
        """Make up the next call."""
        (name,) = self.random.choices(self._names, cum_weights=self._weights)
        make = getattr(self, f"_{name}", dict)
        return Call(name, make())

    def learn(self, call: Call, answer: Any) -> None:
        """Take note of an answer."""
        name, arguments = call
        if name in ("lookup", "pin_prefix"):
            matched = answer if name == "pin_prefix" else answer.matched_tokens
            if matched:
                self._keep(
                    self.holds, _Hold(arguments["tokens"], arguments["block_size"], matched, arguments["adapter_id"])
                )
            if name == "lookup" and answer.ssm_snapshot_tier_key is not None:
                self._keep(self.spilled, (answer.ssm_snapshot_tier_key, answer.ssm_snapshot_check))
        elif name in ("insert", "insert_with_snapshot"):
            tokens, block_size = arguments["tokens"], arguments["block_size"]
            self._keep(self.holds, _Hold(tokens, block_size, tokens.size, arguments["adapter_id"]))
        elif name in ("clear", "drop_adapter"):
            forgotten = self.adapters if name == "clear" else (arguments["adapter_id"],)
            self.holds = [hold for hold in self.holds if hold.adapter_id not in forgotten]
        elif name == "evict_snapshot_to_tier" and hasattr(answer, "key"):
            self._keep(self.spilled, (answer.key, answer.check))
        if "snapshot_id" in arguments:
            self._keep(self.registered, arguments["snapshot_id"])

    def _keep(self, memory: list[Any], item: Any) -> None:
        """Remember an item; of many, one is forgotten."""
        if len(memory) < _REMEMBERED:
            memory.append(item)
        else:
            memory[self.random.randrange(_REMEMBERED)] = item

    def _is_wild(self) -> bool:
        return self.random.random() < self.wild

    def _pop(self, memory: list[Any]) -> Any:
        i = self.random.randrange(len(memory))
        memory[i], memory[-1] = memory[-1], memory[i]
        return memory.pop()

    def _prompt(self) -> dict[str, Any]:
        family = self.families[self.random.randrange(len(self.families))]
        block_size = self.random.choice(self.block_sizes)
        tokens = family[: self.random.randrange(family.size + 1)]
        if self.random.random() < 0.5:
            start = self.random.randrange(self.noise.size - 2 * block_size)
            length = self.random.randrange(2 * block_size)
            tokens = np.concatenate((tokens, self.noise[start : start + length]))
        return {"tokens": tokens, "block_size": block_size, "adapter_id": self.random.choice(self.adapters)}

    def _blocks(self, count: int) -> np.ndarray:
        self.next_block += count
        return np.arange(self.next_block - count, self.next_block, dtype=np.uint64) % np.uint64(2**32 - 1)

    def _lookup(self) -> dict[str, Any]:
        return {
            **self._prompt(),
            "session_hash": self.random.choice(SESSIONS),
            "record": self.random.random() < 0.8,
        }

    def _peek_matched_tokens(self) -> dict[str, Any]:
        return self._prompt()

    _pin_prefix = _peek_matched_tokens

    def _peek_many(self) -> dict[str, Any]:
        first, *others = (self._prompt() for _ in range(3))
        return {**_without(first, "tokens"), "prompts": [first["tokens"], *(other["tokens"] for other in others)]}

    def _insert(self) -> dict[str, Any]:
        prompt = self._prompt()
        size, block_size = prompt["tokens"].size, prompt["block_size"]
        count = -(-size // block_size)
        # Now and then too few blocks for the tokens, or more than they need.
        count = max(0, count + self.random.choice((0, 0, 0, 0, 0, 0, 1, -1)))
        # As of a caller who held a part before, which the later release of all takes too much from.
        matched = self.random.randrange(size + 1) if self._is_wild() else 0
        return {
            **prompt,
            "block_table": self._blocks(count),
            "disk_block_ids": self._blocks(count) if self.random.random() < 0.3 else (),
            "matched_tokens": matched if self.random.random() < 0.1 else matched - matched % block_size,
        }

    def _insert_with_snapshot(self) -> dict[str, Any]:
        return {
            **self._insert(),
            "snapshot_id": next(self.slots),
            "session_hash": self.random.choice(SESSIONS),
        }

    _insert_intermediate_snapshot = _insert_with_snapshot

    def _insert_tail_snapshot(self) -> dict[str, Any]:
        return {
            **_without(self._prompt(), "block_size"),
            "snapshot_id": next(self.slots),
            "session_hash": self.random.choice(SESSIONS),
        }

    _insert_tail_sibling_snapshot = _insert_tail_snapshot

    def _release(self) -> dict[str, Any]:
        if not self.holds or self._is_wild():
            return self._prompt()
        hold = self._pop(self.holds)
        tokens = hold.tokens[: hold.matched_tokens]
        return {"tokens": tokens, "block_size": hold.block_size, "adapter_id": hold.adapter_id}

    def _release_matched(self) -> dict[str, Any]:
        if not self.holds or self._is_wild():
            prompt = self._prompt()
            return {**prompt, "matched_tokens": self.random.randrange(prompt["tokens"].size + 1)}
        return self._pop(self.holds)._asdict()

    def _evict(self) -> dict[str, Any]:
        return {"num_blocks": self.random.randrange(7)}

    def _evict_from(self) -> dict[str, Any]:
        return {**self._adapter(), **self._evict()}

    def _evict_snapshot_to_tier(self) -> dict[str, Any]:
        return {"min_tokens": self.random.choice((0, 0, 1, 3))}

    def _evict_snapshot_slot(self) -> dict[str, Any]:
        return {"slot": self._pop(self.registered) if self.registered and not self._is_wild() else 2**62}

    def _promote_snapshot(self) -> dict[str, Any]:
        key, check = self._pop(self.spilled) if self.spilled else (0, 0)
        if self._is_wild():
            check = self.random.choice((None, check ^ 1))
        return {"key": key, "new_slot": next(self.slots), "check": check}

    def _forget_snapshot_tier_key(self) -> dict[str, Any]:
        return {"key": self._pop(self.spilled)[0] if self.spilled and not self._is_wild() else 1}

    def _pin(self) -> dict[str, Any]:
        return {"name": self.random.choice(PIN_NAMES), **self._prompt()}

    def _unpin(self) -> dict[str, Any]:
        return {"name": self.random.choice(PIN_NAMES)}

    def _set_quota(self) -> dict[str, Any]:
        return {**self._adapter(), "blocks": self.random.choice(self.quotas)}

    def _adapter(self) -> dict[str, Any]:
        return {"adapter_id": self.random.choice(self.adapters)}

    _adapter_epoch = _drop_adapter = _adapter


def _without(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key != name}
