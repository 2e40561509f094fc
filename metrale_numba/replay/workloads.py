"""A made-up chat workload: many conversations at once, each turn's prompt repeating all that was said before.

Relies on NumPy's PCG64 stream, drawn from by `integers` alone, whose values for a seed are the same on every
machine. Promises the same requests for the same arguments, so that counts taken on them can be written down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from metrale_numba.replay.requests import TOKENS_PER_HASH_ID, Request

__all__ = ["chat_workload"]

# Lengths are in tokens; a pair is the smallest and the largest that is drawn.
_SYSTEM_PROMPTS = 64
_SYSTEM_PROMPT_TOKENS = (256, 4_096)
_TURNS = (2, 12)
_MESSAGE_TOKENS = (16, 512)
_ANSWER_TOKENS = (64, 1_024)
# One message in so many brings a document along.
_DOCUMENT_EVERY = 8
_DOCUMENT_TOKENS = (1_024, 8_192)
_MILLISECONDS_BETWEEN_REQUESTS = (0, 60)


@dataclass(slots=True)
class _Conversation:
    tokens: int
    """Tokens said so far, answers included."""
    hash_ids: list[int]
    """Ids of the full blocks among them."""
    turns_left: int


def chat_workload(seed: int, *, requests: int, sessions: int) -> Iterator[Request]:
    """Make up the requests of `sessions` chats that go on side by side, in the form a trace has.

    A chat starts with one of 64 system prompts, of which the k-th most popular is chosen 1/k as often as the
    first. Each of its 2 to 12 turns adds a message, now and then with a document, and the prompt is all said
    so far; the answer comes back as part of the next turn's prompt. A chat that has ended makes room for a new
    one. Which chat speaks next is drawn evenly.

    Parameters
    ----------
    seed : int
        Of the generator; 0 or more.
    requests : int
        How many requests to make.
    sessions : int
        Chats going on at any time; 1 or more.

    Yields
    ------
    Request
        In order of arrival.
    """
    draw = np.random.Generator(np.random.PCG64(seed))

    def between(bounds: tuple[int, int]) -> int:
        return int(draw.integers(bounds[0], bounds[1] + 1))

    unused_id = 0

    def new_ids(count: int) -> list[int]:
        nonlocal unused_id
        unused_id += count
        return list(range(unused_id - count, unused_id))

    system_prompts: list[tuple[int, list[int]]] = []
    for _ in range(_SYSTEM_PROMPTS):
        length = between(_SYSTEM_PROMPT_TOKENS)
        system_prompts.append((length, new_ids(length // TOKENS_PER_HASH_ID)))
    # Popularity is summed in integers, so that no rounding decides which prompt a draw falls on.
    popularity = np.cumsum([1_000_000 // rank for rank in range(1, _SYSTEM_PROMPTS + 1)])

    def new_conversation() -> _Conversation:
        chosen = int(np.searchsorted(popularity, draw.integers(popularity[-1]), side="right"))
        tokens, hash_ids = system_prompts[chosen]
        return _Conversation(tokens, hash_ids.copy(), between(_TURNS))

    conversations = [new_conversation() for _ in range(sessions)]
    timestamp = 0
    for _ in range(requests):
        timestamp += between(_MILLISECONDS_BETWEEN_REQUESTS)
        speaker = int(draw.integers(sessions))
        chat = conversations[speaker]
        chat.tokens += between(_MESSAGE_TOKENS)
        if draw.integers(_DOCUMENT_EVERY) == 0:
            chat.tokens += between(_DOCUMENT_TOKENS)
        full_blocks, tail = divmod(chat.tokens, TOKENS_PER_HASH_ID)
        chat.hash_ids += new_ids(full_blocks - len(chat.hash_ids))
        # A block that is not full yet gets an id of its own: with more tokens in it, it is another block.
        last_id = new_ids(1) if tail else []
        answer = between(_ANSWER_TOKENS)
        yield Request(timestamp, chat.tokens, answer, np.array(chat.hash_ids + last_id, dtype=np.uint32))
        chat.tokens += answer
        chat.turns_left -= 1
        if chat.turns_left == 0:
            conversations[speaker] = new_conversation()
