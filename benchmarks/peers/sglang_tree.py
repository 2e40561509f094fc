"""What SGLang's two caches have in common: the calls that its scheduler makes around one request.

The module is imported by their adapters only. Slots come from a counting allocator, since the cache asks its allocator
for nothing but to take slots back.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers.import_stubs import stand_in_for
from benchmarks.peers.peer import Peer
from benchmarks.peers.slots import NUM_IDS, IdRange
from benchmarks.workload import BLOCK_SIZE, Tokens

stand_in_for(["torchvision", "tvm_ffi", "sentencepiece", "gguf"])

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

__all__ = ["Allocator", "SGLangTree"]


class Allocator:
    """A pool of KV slots that counts what it is given back."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.page_size = BLOCK_SIZE
        self.num_free = 0

    def free(self, slots: Any) -> None:
        """Take slots back."""
        self.num_free += len(slots)

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        """Take a run of slots back."""
        self.num_free += len(slots)

    def available_size(self) -> int:
        """Say how many slots are free."""
        return self.num_free


class Request(NamedTuple):
    """A sequence, and the slots that it is computed into if nothing of it is cached."""

    key: Any
    slots: Any
    num_tokens: int


class SGLangTree(Peer):
    """A cache of SGLang with pages of 16 tokens."""

    calls = (
        "match_prefix(), path_device_indices(), lock() and unlock() of a RadixKey built beforehand; insert() of slots "
        "built beforehand, with prev_prefix_len; evict(), which gives up whole nodes"
    )

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._slots = torch.arange(NUM_IDS, dtype=torch.int64)

    def _new_cache(self, **parameters: Any) -> Any:
        raise NotImplementedError

    def reset(self, capacity: int) -> None:
        """Start anew; the tree has no bound of its own."""
        self._cache = self._new_cache(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=Allocator(),
            page_size=BLOCK_SIZE,
        )
        self._ids = IdRange()

    def prompt(self, tokens: Tokens) -> Any:
        """Build the key."""
        return RadixKey(array("q", tokens.astype(np.int64).tobytes()))

    def request(self, tokens: Tokens) -> Request:
        """Build the key and hand out slots."""
        return Request(self.prompt(tokens), self._slots[self._ids.take(tokens.size)], tokens.size)

    def look_up_and_release(self, prompt: Any) -> int:
        """Match, gather the slots, lock the path and unlock it."""
        cache = self._cache
        match = cache.match_prefix(MatchPrefixParams(key=prompt))
        node = match.last_device_node
        cache.path_device_indices(node)
        cache.unlock(cache.lock(node))
        return int(match.device_prefix_len)

    def insert(self, request: Request) -> None:
        """Store every page."""
        self._cache.insert(InsertParams(key=request.key, value=request.slots, prev_prefix_len=0))

    def evict(self, num_blocks: int) -> int:
        """Evict whole nodes until it is enough."""
        return int(self._cache.evict(EvictParams(num_tokens=num_blocks * BLOCK_SIZE)).num_tokens_evicted) // BLOCK_SIZE

    def look_up(self, request: Request) -> Any:
        """Match, gather the slots and lock the path."""
        cache = self._cache
        match = cache.match_prefix(MatchPrefixParams(key=request.key))
        node = match.last_device_node
        return match.device_prefix_len, cache.path_device_indices(node), cache.lock(node)

    def num_matched(self, match: Any) -> int:
        """Count the pages."""
        return int(match[0]) // BLOCK_SIZE

    def insert_rest(self, request: Request, match: Any, num_blocks: int) -> Any:
        """Insert by the matched slots and new ones, and pass the lock on."""
        num_matched, slots, lock = match
        new = self._slots[self._ids.take(request.num_tokens - num_matched)]
        self._cache.insert(InsertParams(key=request.key, value=torch.cat([slots, new]), prev_prefix_len=num_matched))
        return lock

    def release(self, request: Request, held: Any) -> None:
        """Unlock the path."""
        self._cache.unlock(held)
