"""Chats: many conversations at once, each turn's prompt repeating all that was said before."""

from __future__ import annotations

from collections.abc import Iterator

from metrale_numba.replay.requests import TOKENS_PER_HASH_ID, Request
from metrale_numba.replay.workloads.sessions import Draw, Ids, Text, popularity, side_by_side

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


def chat_workload(seed: int, *, requests: int, sessions: int, think_time: int | None = None) -> Iterator[Request]:
    """Make up the requests of `sessions` chats that go on side by side, in the form a trace has.

    A chat starts with one of 64 system prompts, of which the k-th most popular is chosen 1/k as often as the
    first. Each of its 2 to 12 turns adds a message, now and then with a document, and the prompt is all said
    so far; the answer comes back as part of the next turn's prompt. A chat that has ended makes room for a new
    one. Which chat speaks next is drawn evenly, unless they take time to think.

    Parameters
    ----------
    seed : int
        Of the generator; 0 or more.
    requests : int
        How many requests to make.
    sessions : int
        Chats going on at any time; 1 or more.
    think_time : int, optional
        Milliseconds from one turn of a chat to its next: from half of this to one and a half times as much.

    Yields
    ------
    Request
        In order of arrival.
    """
    draw = Draw(seed)
    ids = Ids()
    system_prompts: list[Text] = []
    for _ in range(_SYSTEM_PROMPTS):
        length = draw.between(_SYSTEM_PROMPT_TOKENS)
        system_prompts.append(Text(ids, length, ids.new(length // TOKENS_PER_HASH_ID)))
    sums = popularity(_SYSTEM_PROMPTS)

    def start(number: int) -> _Chat:
        return _Chat(draw, system_prompts[draw.ranked(sums)].copy(), number)

    return side_by_side(draw, start, requests=requests, sessions=sessions, think_time=think_time)


class _Chat:
    def __init__(self, draw: Draw, text: Text, number: int) -> None:
        self._draw = draw
        self._text = text
        self._number = number
        self._turns_left = draw.between(_TURNS)

    @property
    def is_over(self) -> bool:
        return self._turns_left == 0

    def ask(self, timestamp: int) -> Request:
        draw = self._draw
        message = draw.between(_MESSAGE_TOKENS)
        if draw.below(_DOCUMENT_EVERY) == 0:
            message += draw.between(_DOCUMENT_TOKENS)
        self._text.add(message)
        answer = draw.between(_ANSWER_TOKENS)
        request = self._text.as_request(timestamp, answer, self._number)
        # Without ids: those of its blocks are given out when the next message has followed it.
        self._text.tokens += answer
        self._turns_left -= 1
        return request
