"""The work that every peer is given: seeded token sequences, and the requests of a chat simulator.

Relies on NumPy alone. The same scale gives the same tokens in every process, whatever else is installed there, so
that peers in processes of their own do identical work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_SIZE", "LONG", "SCALES", "SEQUENCE", "SHORT", "ChatRequest", "Scale", "Workload", "chat", "filler"]

Tokens: TypeAlias = npt.NDArray[np.uint32]

BLOCK_SIZE = 16
VOCABULARY = 128_000
SYSTEM_PROMPTS = 16
SYSTEM_PROMPT = 1_024
"""Tokens of each system prompt."""
SHORT, SEQUENCE, LONG = 256, 2_048, 32_768
"""Tokens of the three lengths of prompt that are looked up."""
TURNS = 8
NEW_TOKENS = (128, 512)
"""Fewest and most new tokens of a turn."""

# One each, so that a change to one kind of work leaves the others as they were.
_SEED_OF_CACHED, _SEED_OF_NEW, _SEED_OF_CHAT, _SEED_OF_FILLER, _SEED_OF_ORDER = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Scale:
    """How much of each kind of work there is."""

    sequences: int
    """Cached sequences of 2,048 tokens, every other of which begins with a system prompt."""
    short_sequences: int
    lookups: Mapping[int, int]
    """Look-ups, by the length of the prompt."""
    misses: int
    inserts: int
    evictions: Mapping[int, int]
    """Calls of evict, by the number of blocks asked for."""
    requests: int
    sessions: int
    capacity: int
    """Blocks of the chat simulator's cache."""


SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        "full": Scale(
            sequences=1_000,
            short_sequences=64,
            lookups={SHORT: 512, SEQUENCE: 800, LONG: 40},
            misses=300,
            inserts=300,
            evictions={1: 100, 64: 40, 4_096: 5},
            requests=2_000,
            sessions=64,
            capacity=60_000,
        ),
        "small": Scale(
            sequences=40,
            short_sequences=8,
            lookups={SHORT: 16, SEQUENCE: 16, LONG: 3},
            misses=8,
            inserts=8,
            evictions={1: 5, 64: 5, 4_096: 1},
            requests=64,
            sessions=8,
            capacity=4_000,
        ),
    }
)
"""``full`` fills the cache with 100,096 blocks; ``small`` is for trying the measurement itself."""


def _tokens(rng: np.random.Generator, length: int) -> Tokens:
    return rng.integers(0, VOCABULARY, length, dtype=np.uint32)


class Workload:
    """The sequences that are in the cache, and those that are not.

    Parameters
    ----------
    scale : Scale
        How many there are.
    """

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        rng = np.random.default_rng(_SEED_OF_CACHED)
        prompts = [_tokens(rng, SYSTEM_PROMPT) for _ in range(SYSTEM_PROMPTS)]
        shared = range(0, scale.sequences, 2)
        self.sequences = [_tokens(rng, SEQUENCE) for _ in range(scale.sequences)]
        for turn, number in enumerate(shared):
            self.sequences[number][:SYSTEM_PROMPT] = prompts[turn % SYSTEM_PROMPTS]
        self.short = [_tokens(rng, SHORT) for _ in range(scale.short_sequences)]
        self.long = _tokens(rng, LONG)
        once = (len(shared) - min(SYSTEM_PROMPTS, len(shared))) * SYSTEM_PROMPT
        self.num_sequence_blocks = (scale.sequences * SEQUENCE - once) // BLOCK_SIZE
        """Distinct blocks of `sequences`."""
        self.num_blocks = self.num_sequence_blocks + (scale.short_sequences * SHORT + LONG) // BLOCK_SIZE
        """Distinct blocks of everything that is cached."""
        rng = np.random.default_rng(_SEED_OF_NEW)
        self.missing = [_tokens(rng, SEQUENCE) for _ in range(scale.misses)]
        self.new = [_tokens(rng, SEQUENCE) for _ in range(scale.inserts)]
        self.num_new_blocks = scale.inserts * SEQUENCE // BLOCK_SIZE

    def cached(self) -> list[Tokens]:
        """Everything that is in the cache before it is measured."""
        return [*self.sequences, *self.short, self.long]

    def prompts(self, length: int) -> list[Tokens]:
        """Prompts to look up, each of them cached, in an order that no cache can foresee.

        Parameters
        ----------
        length : int
            Tokens of each: `SHORT`, `SEQUENCE` or `LONG`.

        Returns
        -------
        list of array of uint32
            As many as the scale says; over and over the same if there are fewer.
        """
        pool = {SHORT: self.short, SEQUENCE: self.sequences, LONG: [self.long]}[length]
        rng = np.random.default_rng(_SEED_OF_ORDER)
        order = np.concatenate([rng.permutation(len(pool)) for _ in range(-(-self.scale.lookups[length] // len(pool)))])
        return [pool[number] for number in order[: self.scale.lookups[length]]]


@dataclass(frozen=True)
class ChatRequest:
    """One turn of a session: the conversation so far and the new tokens after it."""

    tokens: Tokens
    num_cached: int
    """Blocks of it that a cache which lost nothing of the simulation has."""


def chat(scale: Scale) -> list[ChatRequest]:
    """Sessions that take turns at random, each of them on top of one of the shared system prompts.

    Parameters
    ----------
    scale : Scale
        How many requests and sessions there are.

    Returns
    -------
    list of ChatRequest
        In the order of their arrival. A session that has had all its turns makes way for a new one.
    """
    rng = np.random.default_rng(_SEED_OF_CHAT)
    prompts = [_tokens(rng, SYSTEM_PROMPT) for _ in range(SYSTEM_PROMPTS)]
    seen: set[int] = set()
    requests = []
    # Of each session: its system prompt, its tokens, how many turns it had.
    sessions: list[tuple[int, Tokens, int]] = []

    def begin() -> tuple[int, Tokens, int]:
        prompt = int(rng.integers(SYSTEM_PROMPTS))
        return prompt, prompts[prompt], 0

    sessions = [begin() for _ in range(scale.sessions)]
    for _ in range(scale.requests):
        number = int(rng.integers(scale.sessions))
        prompt, tokens, turns = sessions[number]
        num_cached = tokens.size // BLOCK_SIZE if turns or prompt in seen else 0
        seen.add(prompt)
        fresh = _tokens(rng, int(rng.integers(NEW_TOKENS[0], NEW_TOKENS[1] + 1)))
        tokens = np.concatenate([tokens, fresh])
        requests.append(ChatRequest(tokens, num_cached))
        sessions[number] = (prompt, tokens, turns + 1) if turns + 1 < TURNS else begin()
    return requests


def filler(scale: Scale) -> list[Tokens]:
    """Sequences that fill the simulator's cache before the first request, and that no request asks for."""
    rng = np.random.default_rng(_SEED_OF_FILLER)
    return [_tokens(rng, SEQUENCE) for _ in range(scale.capacity * BLOCK_SIZE // SEQUENCE)]
