"""vLLM's KV cache manager and its block pool, with blocks hashed by xxHash.

vLLM hashes the blocks of every request that arrives, so hashing is part of every look-up. Its pool evicts by itself
when blocks are taken from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from benchmarks.peers.import_stubs import stand_in_for
from benchmarks.peers.peer import Peer
from benchmarks.workload import BLOCK_SIZE, Tokens

stand_in_for(["xgrammar", "llguidance"])

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

_LONGEST = 1 << 20


class VLLMBlockPool(Peer):
    """A ``KVCacheManager`` with one group of full attention."""

    calls = (
        "KVCacheManager with xxhash: hashing, get_computed_blocks(), touch() and free_blocks() of a Request built "
        "beforehand; allocate_slots() of a hashed Request; get_new_blocks() while all that is free is cached"
    )
    withheld_blocks = 1

    def __init__(self) -> None:
        torch.set_num_threads(1)
        hash_function = get_hash_fn_by_name("xxhash")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        self._sampling = SamplingParams(max_tokens=1)
        self._request_ids = count()

    def reset(self, capacity: int) -> None:
        """Start anew, with one block more than asked for, which the pool keeps for itself."""
        group = KVCacheGroupSpec(
            ["layer"], FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16)
        )
        self._cache = KVCacheManager(
            KVCacheConfig(num_blocks=capacity + 1, kv_cache_tensors=[], kv_cache_groups=[group]),
            max_model_len=_LONGEST,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        self._pool = self._cache.block_pool

    def _request(self, tokens: Sequence[int]) -> Any:
        request = Request(
            request_id=str(next(self._request_ids)),
            prompt_token_ids=tokens,
            sampling_params=self._sampling,
            pooling_params=None,
            block_hasher=None,
        )
        # Not given to the constructor, which would hash at once.
        request._block_hasher = self._hasher
        return request

    def request(self, tokens: Tokens) -> Any:
        """Build the request, not hashed yet."""
        return self._request(tokens.tolist())

    def prompt(self, tokens: Tokens) -> Any:
        """Build the request with one token more, since vLLM never matches the last."""
        return self._request(np.append(tokens, np.uint32(1)).tolist())

    def store(self, tokens: Tokens) -> None:
        """Match what is cached first: the pool would cache it a second time."""
        request = self.request(tokens)
        self.insert_rest(request, self.look_up(request), 0)
        self._cache.free(request)

    def get_ready_to_insert(self, request: Any) -> None:
        """Hash the blocks."""
        request.update_block_hashes()

    def look_up_and_release(self, prompt: Any) -> int:
        """Hash, match, take a reference on each block and drop it."""
        prompt.update_block_hashes()
        matched, num_tokens, *_ = self._cache.get_computed_blocks(prompt)
        blocks = matched.blocks[0]
        self._pool.touch(blocks)
        self._pool.free_blocks(reversed(blocks))
        return int(num_tokens)

    def insert(self, request: Any) -> None:
        """Allocate a block for every 16 tokens and cache the full ones."""
        self._allocate(request, 0, self._cache.empty_kv_cache_blocks)

    def _allocate(self, request: Any, num_matched: int, matched: Any) -> None:
        if self._cache.allocate_slots(request, request.num_tokens - num_matched, num_matched, matched) is None:
            raise RuntimeError("vLLM's pool has no room for a request")

    def settle(self, request: Any) -> None:
        """Free the request's blocks, which stay cached."""
        self._cache.free(request)

    def get_ready_to_evict(self) -> None:
        """Take every block that is free and not cached, so that whatever is taken next must be evicted."""
        free = self._pool.free_block_queue.get_all_free_blocks()
        self._taken = self._pool.get_new_blocks(sum(block.block_hash is None for block in free))

    def evict(self, num_blocks: int) -> int:
        """Take blocks, each of which is evicted for it."""
        self._taken += self._pool.get_new_blocks(num_blocks)
        return num_blocks

    def look_up(self, request: Any) -> Any:
        """Hash and match; the references are taken when blocks are allocated."""
        request.update_block_hashes()
        return self._cache.get_computed_blocks(request)

    def num_matched(self, match: Any) -> int:
        """Count the blocks."""
        return int(match[1]) // BLOCK_SIZE

    def make_room(self, num_blocks: int) -> int:
        """Leave it to the pool, which evicts when blocks are allocated."""
        return num_blocks

    def insert_rest(self, request: Any, match: Any, num_blocks: int) -> None:
        """Allocate what was not matched."""
        matched, num_tokens, *_ = match
        self._allocate(request, num_tokens, matched)

    def release(self, request: Any, held: None) -> None:
        """Free the request's blocks."""
        self._cache.free(request)
