"""NVIDIA Dynamo's radix index, with which its router finds the worker that has cached most of a prompt.

It counts no references and evicts nothing by itself, so it has look-ups and inserts alone. Its inserts are events that
another thread applies; an insert is over when a look-up would see it.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any, NamedTuple

from dynamo._core import RadixTree, compute_block_hash_for_seq

from benchmarks.peers.peer import INSERT, LOOKUP, MEMORY, Peer
from benchmarks.workload import BLOCK_SIZE, Tokens

_WORKER = 0
# No block of the workload has this hash.
_UNKNOWN = [1]
_UINT64 = (1 << 64) - 1


class Request(NamedTuple):
    """A sequence as the event that says where it is stored."""

    event: bytes


class DynamoRadix(Peer):
    """A ``RadixTree`` that knows of one worker."""

    sections = (MEMORY, LOOKUP, INSERT)
    calls = (
        "RadixTree: compute_block_hash_for_seq() and find_matches() of a list built beforehand; apply_event() of an "
        "event built beforehand, until it is seen; no references, no eviction"
    )

    def __init__(self) -> None:
        self._event_ids = count(1)

    def reset(self, capacity: int) -> None:
        """Start anew; the index has no bound."""
        self._cache = RadixTree()

    def prompt(self, tokens: Tokens) -> list[int]:
        """Build the list."""
        ids: list[int] = tokens.tolist()
        return ids

    def request(self, tokens: Tokens) -> Request:
        """Build the event, in which every block has a hash of its own and one of all up to it."""
        blocks = []
        sequence_hash = 0
        for tokens_hash in compute_block_hash_for_seq(tokens.tolist(), BLOCK_SIZE):
            sequence_hash = hash((sequence_hash, tokens_hash)) & _UINT64
            blocks.append({"block_hash": sequence_hash, "tokens_hash": tokens_hash})
        data = {"stored": {"parent_hash": None, "blocks": blocks}}
        return Request(json.dumps({"event_id": next(self._event_ids), "data": data}).encode())

    def look_up_and_release(self, prompt: list[int]) -> int:
        """Hash and match; there is nothing to release."""
        scores: Any = self._cache.find_matches(compute_block_hash_for_seq(prompt, BLOCK_SIZE)).scores
        return max(scores.values(), default=0) * BLOCK_SIZE

    def insert(self, request: Request) -> None:
        """Apply the event and wait until it is applied."""
        self._cache.apply_event(_WORKER, request.event)
        self._cache.find_matches(_UNKNOWN)
